"""Recognition of the data at a path: tables, chats, text files, labeled lines, images, and files that are not read."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from accel_train.core.files import files_below
from accel_train.core.format import did_you_mean, format_count
from accel_train.core.state import Choice
from accel_train.data.delimited import FASTTEXT_PREFIX, read_label_lines, table_delimiter
from accel_train.data.encoding import read_lines, read_text
from accel_train.data.images.images import IMAGE_SUFFIXES, list_images
from accel_train.data.images.labelled import eval_beside_train
from accel_train.data.images.pairs import LISTED_SUFFIXES, lists_pairs
from accel_train.data.sources import file_kind, files_of, is_about_data, is_saved_dataset, resolve_sources
from accel_train.data.tables import has_object_lines, read_rows
from accel_train.data.text.documents import read_documents
from accel_train.experiments.finetune.boxes import find_boxes, recognise_boxes
from accel_train.experiments.finetune.class_files import are_classes
from accel_train.experiments.finetune.columns import (
    NAME_FILES,
    Column,
    Table,
    files_at,
    names_in,
    readings,
    recognise_label,
    source_of,
    with_settings,
)
from accel_train.experiments.finetune.images import (
    Pairs,
    find_pairs,
    lie_in_classes,
    recognise_classes,
    recognise_masks,
    refuse_columns,
    refuse_other_classes,
    table_of_images,
)
from accel_train.experiments.finetune.recipe import (
    MOST_LISTED,
    TASKS,
    Asked,
    Choices,
    Found,
    check_there,
    lengths,
    listed,
)
from accel_train.experiments.finetune.tables import recognise_table
from accel_train.experiments.finetune.text_tasks import holds_questions, holds_tags, recognise_annotated

_EVAL = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|dev|eval)(?:[^a-z]|$)")
_TEST = re.compile(r"(?:^|[^a-z])test(?:ing)?(?:[^a-z]|$)")
_TRAIN = re.compile(r"(?:^|[^a-z])train(?:ing)?(?:[^a-z]|$)")
_UNLABELED = ("unsup", "unlabeled", "unlabelled")
"""Names of text folders without a class."""
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.parquet")


_TABLES = ("csv", "jsonl", "parquet")


def recognise(asked: Asked) -> Found:
    """Return the kind of data at the path, with the recipe's settings for it.

    Raises:
        ValueError: the data are not suited for training, or are ambiguous. The message shows the flag.
    """
    if asked.task is not None and asked.task not in TASKS:
        meant = did_you_mean(asked.task, TASKS, f"it knows {', '.join(TASKS)}")
        raise ValueError(f"--task {asked.task}: finetune does not know this task; {meant}")
    found = _recognise(asked)
    is_beside = found.task == "image-classification" and eval_beside_train(asked.data)[1] is not None
    if is_beside or "data.eval" in {*found.settings, *asked.given}:
        return replace(found, eval_fraction=0.0)
    return replace(found, eval_fraction=asked.data.eval_fraction) if "data.eval_fraction" in asked.given else found


def _recognise(asked: Asked) -> Found:
    path = Path(asked.path).expanduser()
    if path.is_dir():
        return _with_unused_files(_recognise_folder(asked, path), asked, path)
    check_there(asked.path)
    if not path.exists() and file_kind(path) == "text" and not _is_tagged(asked, files_at(path)[0]):
        return _with_unused_files(_recognise_text(asked, files_at(path), path), asked, path)
    if not path.exists() and file_kind(path) == "json":
        raise ValueError(f"{path}: finetune reads one .json file. Write shards as .jsonl")
    return _with_unused_files(_recognise_file(asked, path), asked, path)


def _recognise_file(asked: Asked, path: Path) -> Found:
    kind = file_kind(path)
    if (path.exists() or kind == "parquet") and (located := find_boxes(asked, path)) is not None:
        return recognise_boxes(asked, located)
    if path.suffix.lower() in LISTED_SUFFIXES and asked.task in (None, "semantic-segmentation"):
        if asked.task is not None:
            return recognise_masks(asked, Pairs(asked.path, None, "from --task: a list of images with their masks"))
        if path.exists() and lists_pairs(path, asked.data):
            return recognise_masks(asked, Pairs(asked.path, None, "each line names an image and its mask"))
    if kind in _TABLES:
        return recognise_table(asked, path)
    if kind == "conll" or (kind == "text" and _is_tagged(asked, files_at(path)[0])):
        return recognise_annotated(asked, "token-classification", path)
    if kind == "text":
        return _recognise_text(asked, [path])
    if kind == "json" and (has_object_lines(path, asked.data) or read_text(path, asked.data).lstrip()[:1] == "["):
        return recognise_table(asked, path)
    if kind == "json" and holds_questions(path, asked):
        return recognise_annotated(asked, "question-answering", path)
    if kind == "json":
        raise ValueError(
            f"{path} is one JSON document. finetune reads an array of objects, one object per line (.jsonl), or "
            "SQuAD's form (data, paragraphs, qas), or {train: [...], validation: [...]}. Write [row, row, ...]"
        )
    if kind == "tokens":
        raise ValueError(
            f"{path}: finetune does not read token files. Use: accel-train run gpt_tiny --data.train {path}"
        )
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise ValueError(f"{path} is one image. Name the folder of all images, with the layout CLASS/*{path.suffix}")
    raise ValueError(
        f"{path}: finetune cannot read {path.suffix or 'a file without an extension'}. It reads tables (.csv, .tsv, "
        ".jsonl, .parquet), text (.txt, .md, ...), and folders. Rename or convert the file"
    )


def _recognise_folder(asked: Asked, folder: Path) -> Found:
    if is_saved_dataset(folder):
        if (located := find_boxes(asked, folder)) is not None:
            return recognise_boxes(asked, located)
        held_out = any((folder / name).is_dir() for name in ("validation", "valid", "val", "dev", "eval"))
        found = recognise_table(asked, folder, folder if held_out else None)
        tests = ("split test",) if (folder / "test").is_dir() else ()
        return replace(found, unused=(*(found.unused or ()), *tests))
    is_for_masks = asked.task not in ("image-classification", "object-detection")
    if is_for_masks and (pairs := find_pairs(asked.path)) is not None:
        return recognise_masks(asked, pairs)
    if (located := find_boxes(asked, folder)) is not None:
        return recognise_boxes(asked, located)
    files = [path for path in files_below(folder) if path.is_file()]
    files = [path for path in files if not is_about_data(path, folder)]
    tables = [path for path in files if file_kind(path) in _TABLES]
    images, _ = list_images(folder)
    if images and asked.task not in ("causal-lm", "text-classification"):
        if tables and not lie_in_classes(folder, images):
            if (named := table_of_images(asked, folder, tables)) is not None:
                return recognise_table(asked, *named)
        elif asked.task is None:
            refuse_other_classes(asked, folder, images, tables)
        return recognise_classes(asked, folder, tables)
    if tables:
        return recognise_table(asked, *_training_table(folder, tables))
    texts = [path for path in files if file_kind(path) == "text"]
    tagged = [path for path in files if file_kind(path) == "conll"]
    tagged = tagged or [path for path in texts if len(texts) <= _MOST_TAGGED and _is_tagged(asked, path)]
    if tagged:
        return recognise_annotated(asked, "token-classification", *_training_table(folder, tagged))
    questions = [path for path in files if file_kind(path) == "json" and holds_questions(path, asked)]
    if questions:
        return recognise_annotated(asked, "question-answering", *_training_table(folder, questions))
    if texts and asked.task != "causal-lm" and (classes := _find_classes(folder, texts)) is not None:
        return _recognise_classes_of_texts(asked, folder, classes)
    if _are_files_of_classes(asked, folder, texts):
        is_asked = asked.task is not None or asked.data.lines is not None
        if not is_asked and not are_classes({path.stem: path for path in texts}, asked):
            names = ", ".join(path.stem for path in texts[:3])
            raise ValueError(
                f"{folder}: {len(texts)} files with a text on each line ({names} ...). If the files are classes, use "
                "--task text-classification. If they are plain text, use --task causal-lm"
            )
        return _recognise_texts_by_file(asked, folder)
    if texts:
        return _recognise_text(asked, *_training_texts(asked, texts, folder))
    there = listed([path.relative_to(folder).as_posix() for path in files])
    raise ValueError(
        f"{folder}: finetune cannot read these files ({there or 'no files'}). It reads a table (.csv, .tsv, "
        ".jsonl, .parquet), text files, CLASS/ folders of images or texts, or images/ and masks/. "
        "For files STEM.CLASS with a text per line, use --task text-classification, or a table of text and label"
    )


def _is_tagged(asked: Asked, path: Path) -> bool:
    """Return whether a text file is read as words with tags."""
    is_free = asked.task is None and "data.lines" not in asked.given
    return asked.task == "token-classification" or (is_free and holds_tags(path, asked))


def _training_table(folder: Path, tables: Sequence[Path]) -> tuple[Path, Path | None]:
    """Return the table to train on, and the table to evaluate on if a name shows one."""
    tables = list(dict.fromkeys(map(_shards_of, tables)))
    held_out = [path for path in tables if _EVAL.search(path.stem.lower())]
    others = [path for path in tables if path not in held_out and not _TEST.search(path.stem.lower())]
    others = [path for path in others if _TRAIN.search(path.stem.lower())] or others
    if len(others) != 1 or len(held_out) > 1:
        named = ", ".join(str(path) for path in tables[:5])
        raise ValueError(
            f"{folder} holds several files of data ({named}). Name one: accel-train finetune "
            f"{quote(str([*others, *tables][0]))}"
        )
    return others[0], held_out[0] if held_out else None


_READ_AT_MOST = 50_000_000
"""Bytes of plain text up to which characters are counted. For larger text, bytes are used instead of characters."""
_LINES_LOOKED_AT = 1_000
_MOST_TAGGED = 20
"""Text files in a folder up to which each is tried as words with tags."""
_MOST_FIRST_WORDS = 50
_LINES_OF_A_CLASS = 10
_WORDS_OF_A_LINE = 60
"""Least lines and most mean words per line of a file that may be a class."""


def _find_classes(folder: Path, texts: Sequence[Path]) -> tuple[list[Path], Path | None] | None:
    """Return the folders CLASS/*.txt or train/CLASS/*.txt, and the folder to evaluate on, or None without classes."""
    parts = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    train = [path for path in parts if _TRAIN.search(path.name.lower())]
    root = train[0] if len(train) == 1 else folder
    counts = Counter(path.parent for path in texts if path.suffix.lower() == ".txt" and path.parent.parent == root)
    below = [path for path in texts if root in path.parents]
    is_flat = all(path.parent in counts or path.parent == root for path in below)
    num_loose = sum(path.parent == root for path in below)
    if not is_flat or len(counts) < 2 or min(counts.values()) < max(2, num_loose):
        return None
    are_parts = [any(name.search(each.name.lower()) for name in (_TRAIN, _EVAL, _TEST)) for each in counts]
    if any(are_parts):
        return None
    held_out = [path for path in parts if root != folder and _EVAL.search(path.name.lower())]
    return sorted(counts), held_out[0] if len(held_out) == 1 else None


def _recognise_classes_of_texts(asked: Asked, folder: Path, found: tuple[list[Path], Path | None]) -> Found:
    """Return the classes of a folder with CLASS/*.txt or train/CLASS/*.txt. The recipe reads the files in place.

    Raises:
        ValueError: a file cannot be read, or a flag names columns.
    """
    refuse_columns(asked, folder, "plain text")
    folders, held_out = found
    named = [path for path in folders if path.name.lower() not in _UNLABELED]
    root, is_whole = named[0].parent, len(named) == len(folders)
    # The path stays as the user gave it if it is the folder of classes.
    train = (asked.path if root == folder else str(root)) if is_whole else [str(path) for path in named]
    data = asked.data.model_copy(update={"lines": "folder_names", "train": train if is_whole else tuple(train)})
    sources = resolve_sources(data.train, data, key=asked.path)
    rows = [row for source in sources for row in read_rows(source, ("label", "text"), data)]
    labels, texts = zip(*(row.cells for row in rows))
    columns = {"label": Column("label", labels), "text": Column("text", texts)}
    label = recognise_label(asked, Table(root, columns, [row.where for row in rows], {}, (), {}), "text")
    settings: Choices = {
        "data.train": Choice(train, ""),
        "data.lines": Choice("folder_names", "each file is a text, and its folder is the label"),
    }
    if held_out is not None and "data.eval" not in asked.given:
        settings["data.eval"] = Choice(str(held_out), "evaluation data by its name")
    return Found(
        "text-classification",
        f"texts in {len(named)} folders, one for each class; for a language model: --task causal-lm",
        f"{folder}: {format_count(len(rows), 'text')} in {format_count(len(named), 'class folder')} of {root}",
        num_samples=len(rows),
        settings={**settings, **label.settings},
        counts=label.counts,
        has_one_label=label.is_one,
        unused=(),
        **lengths(list(map(len, texts))),
    )


def _are_files_of_classes(asked: Asked, folder: Path, texts: Sequence[Path]) -> bool:
    """Return whether files lie side by side and hold many lines without gaps, and no name is a number or a part."""
    if len(texts) < 2 or any(path.parent != folder for path in texts) or asked.task == "causal-lm":
        return False
    if asked.data.lines is not None:
        return asked.data.lines == "file_names"
    parts = [path for path in texts if any(name.search(path.stem.lower()) for name in (_TRAIN, _EVAL, _TEST))]
    if parts or any(char.isdigit() for path in texts for char in path.stem):
        return False
    return asked.task is not None or all(_has_a_text_per_line(path, asked) for path in texts)


def _has_a_text_per_line(path: Path, asked: Asked) -> bool:
    lines = [line.split() for line, _ in islice(read_lines(path, asked.data), _LINES_LOOKED_AT)]
    is_short = sum(map(len, lines)) <= _WORDS_OF_A_LINE * len(lines)
    return path.suffix.lower() == ".txt" and len(lines) >= _LINES_OF_A_CLASS and all(lines) and is_short


def _recognise_texts_by_file(asked: Asked, folder: Path) -> Found:
    """Return the classes of a folder with a file for each class and a text on each line.

    Raises:
        ValueError: a file cannot be read, or a flag names columns.
    """
    refuse_columns(asked, folder, "plain text")
    data = asked.data.model_copy(update={"lines": "file_names"})
    (source,) = resolve_sources(asked.path, data, key=asked.path)
    rows = list(read_rows(source, ("label", "text"), data))
    labels, texts = zip(*(row.cells for row in rows))
    columns = {"label": Column("label", labels), "text": Column("text", texts)}
    label = recognise_label(asked, Table(folder, columns, [row.where for row in rows], {}, (), {}), "text")
    why = "each line is a text, and its file is the label"
    names = listed([path.stem for path in source.files])
    found = f"short texts in files named by a word: {names}; for a language model: --task causal-lm"
    return Found(
        "text-classification",
        "from --task" if asked.task else "from data.lines" if asked.data.lines else found,
        f"{folder}: {format_count(len(rows), 'line')} in {format_count(len(source.files), 'file')}, one for each class",
        num_samples=len(rows),
        settings={"data.train": Choice(asked.path, ""), "data.lines": Choice("file_names", why), **label.settings},
        counts=label.counts,
        has_one_label=label.is_one,
        notes=source.notes,
        unused=(),
        **lengths(list(map(len, texts))),
    )


def _training_texts(asked: Asked, texts: Sequence[Path], folder: Path) -> tuple[Sequence[Path], Path, Choices]:
    """Return the texts to train on, the folder, and settings. Files named train, val, and test are separated."""
    if not any(_is_part(path, folder, _TRAIN) for path in texts) or "data.eval" in asked.given:
        return texts, folder, {}
    held_out = [path for path in texts if _is_part(path, folder, _EVAL)]
    train = [path for path in texts if path not in held_out and not _is_part(path, folder, _TEST)]

    def names(paths: Sequence[Path]) -> str | list[str]:
        top = sorted({str(_part_of(path, folder)) for path in paths})
        return top if len(top) > 1 else top[0]

    settings = {"data.train": Choice[Any](names(train), "training data by their names")}
    if held_out:
        settings["data.eval"] = Choice(names(held_out), "evaluation data by their names")
    return train, folder, settings


def _recognise_text(
    asked: Asked, files: Sequence[Path], folder: Path | None = None, parts: Choices | None = None
) -> Found:
    """Return the facts of text files: plain text for a language model, or labeled lines.

    `parts` are settings that name the files to train and to evaluate on.

    Raises:
        ValueError: the files are empty, or do not fit the requested task. The message shows the flag.
    """
    settings = {} if folder is not None else readings(files[0], asked.data, asked.given)
    asked = replace(asked, data=with_settings(asked.data, settings))
    settings = {"data.train": Choice(asked.path, ""), **settings, **(parts or {})}
    found = _labelled_lines(asked, files[0]) if folder is None else None
    if found is not None:
        return replace(found, settings={**settings, **found.settings})
    if folder is None and asked.task is None and (between := table_delimiter(files[0], asked.data)) is not None:
        raise ValueError(
            f"{asked.path}: {between} divide all lines into equal columns. If it is a table, rename it to "
            f"{files[0].stem}.csv. If it is plain text, use --task causal-lm"
        )
    if asked.task not in (None, "causal-lm"):
        raise ValueError(
            f"--task {asked.task}: {asked.path} is plain text, for --task causal-lm. "
            f"{asked.task} needs a table (.csv, .tsv, .jsonl, .parquet), lines with a label and a text, or images"
        )
    refuse_columns(asked, asked.path, "plain text")
    num_chars = sum(path.stat().st_size for path in files)
    if num_chars <= _READ_AT_MOST:
        documents = (document for path in files for document in read_documents(source_of(path), asked.data))
        num_chars = sum(len(document.text) for document in documents)
    if not num_chars:
        raise ValueError(f"{asked.path} is empty. Name a file or folder with text")
    what = format_count(len(files), "file") if folder else "a text file"
    return Found(
        "causal-lm",
        "plain text without columns: a language model learns to continue it",
        f"{asked.path}: {what}, {num_chars:,} characters",
        num_samples=len(files),
        settings=settings,
        num_chars=num_chars,
        unused=(),
    )


def _labelled_lines(asked: Asked, path: Path) -> Found | None:
    """Return the facts of a file with a label on each line, or None for plain text."""
    lines, why = asked.data.lines, "from the command line"
    if lines is None and asked.task in (None, "text-classification"):
        first = next((line for line, _ in read_lines(path, asked.data) if line.strip()), "")
        if first.startswith(FASTTEXT_PREFIX):
            several = any(line.count(FASTTEXT_PREFIX) > 1 for line, _ in read_lines(path, asked.data))
            lines, why = ("fasttext_multi" if several else "fasttext"), f"lines begin with {FASTTEXT_PREFIX}"
        elif (words := _first_words(asked, path)) is not None:
            if asked.task is None:
                raise ValueError(
                    f"{path}: each line begins with one of {len(words)} words ({', '.join(sorted(words)[:3])} ...). "
                    "If they are labels, use --task text-classification. If it is plain text, use --task causal-lm"
                )
            lines, why = "label_text", f"each line begins with one of {len(words)} words, the labels"
    if lines is None:
        return None
    asked = replace(asked, data=asked.data.model_copy(update={"lines": lines}))
    records = list(read_label_lines(path, asked.data))
    labels, texts = zip(*(record.fields for record in records))
    columns = {"label": Column("label", labels), "text": Column("text", texts)}
    label = recognise_label(
        asked, Table(path, columns, [f"{path}:{record.line}" for record in records], {}, (), {}), "text"
    )
    sizes = list(map(len, texts))
    return Found(
        "text-classification",
        "each line is a label and a text",
        f"{path}: {format_count(len(records), 'line')}, each with a label and a text",
        num_samples=len(records),
        settings={
            "data.lines": Choice(lines, why),
            **{name: each for name, each in label.settings.items() if name != "data.label_column"},
        },
        **lengths(sizes),
        counts=label.counts,
        has_one_label=label.is_one,
        unused=(),
    )


def _first_words(asked: Asked, path: Path) -> Counter[str] | None:
    """Return the first words of the lines if they are few and repeat, as labels do, or None."""
    lines = [
        line.split(maxsplit=1) for line, _ in islice(read_lines(path, asked.data), _LINES_LOOKED_AT) if line.strip()
    ]
    words = Counter(line[0] for line in lines if len(line) == 2)
    is_few = 2 <= len(words) <= min(_MOST_FIRST_WORDS, len(lines) // 5)
    return words if is_few and words.total() == len(lines) else None


def _part_of(path: Path, folder: Path) -> Path:
    """Return the highest folder (or the file) named after training, evaluation, or tests.

    Without such a name, return the top folder or the file.
    """
    below = [*reversed(path.relative_to(folder).parents[:-1]), path.relative_to(folder)]
    patterns = (_TRAIN, _EVAL, _TEST)
    said = (each for each in below if any(pattern.search(each.stem.lower()) for pattern in patterns))
    return folder / next(said, below[0])


def _is_part(path: Path, folder: Path, pattern: re.Pattern[str]) -> bool:
    """Return whether the part of the data that holds a file matches `pattern`, for example `_TRAIN`."""
    return pattern.search(_part_of(path, folder).stem.lower()) is not None


def _shards_of(path: Path) -> Path:
    """Return the pattern of all shards of a parquet file, as the hub names them. Other paths are returned unchanged."""
    shard = _SHARD.fullmatch(path.name)
    return path if shard is None else path.with_name(f"{shard[1]}-*-of-{shard[2]}.parquet")


def _with_unused_files(found: Found, asked: Asked, path: Path) -> Found:
    """Return `found` with the files that the run will not read: all below a folder, or test data next to a file."""
    if found.unused is None or found.edge or is_saved_dataset(path):
        return found
    data, read = with_settings(asked.data, found.settings), set[Path]()
    for names in (data.train, data.eval):
        if names is not None:
            read |= {file.resolve() for file in files_of(resolve_sources(names, data, key=str(path)))}
    folder = path if path.is_dir() else path.parent
    others = [file for file in (files_below(folder) if path.is_dir() else sorted(folder.iterdir())) if file.is_file()]
    others = [file for file in others if file.resolve() not in read]
    if "data.label_names" in found.settings:
        names = found.settings["data.label_names"].value
        beside = [Path(str(data.train)).with_name(name) for name in NAME_FILES]
        read_names = next((file for file in beside if file in others and names_in(file, asked.data) == names), None)
        others = [file for file in others if file != read_names]
    tests = [file for file in others if _is_part(file, folder, _TEST) and file_kind(file) is not None]
    if not path.is_dir():
        held_out = [file for file in others if _EVAL.search(file.stem.lower())]
        shards = [file for file in others if _shards_of(file) == _shards_of(path) != path]
        others = [file for file in (*held_out, *shards, *tests) if file.suffix == path.suffix]
        tests = [file for file in tests if file in others]
    top = sorted({_shards_of(_part_of(test, folder)) for test in tests})
    test = str(top[0]) if top else None
    rest = _by_folder([file.relative_to(folder) for file in others if file not in tests])
    unused = (*found.unused, *((f"files {rest}",) if rest else ()))
    return replace(found, unused=unused, test=test)


def _by_folder(files: Sequence[Path]) -> str:
    """Return the names of files. Many files of one folder are shown as one entry."""
    counts = Counter(path.parent for path in files)
    names = []
    for path in files:
        name = (
            path.as_posix()
            if counts[path.parent] <= MOST_LISTED
            else f"{path.parent}/* ({counts[path.parent]:,} files)"
        )
        names.append(name if path.parent != Path() else path.name)
    return listed(list(dict.fromkeys(names)))
