"""Texts in files: classes by folder, by file, or on each line, and plain text. Imports no torch."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice, pairwise, permutations
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.data.delimited import FASTTEXT_PREFIX, LINE_COLUMNS, table_delimiter
from accel_train.data.encoding import read_lines
from accel_train.data.images.annotations.yolo import CLASSES_FILES
from accel_train.data.images.images import evenly_spaced
from accel_train.data.images.misread import kind_of_annotation
from accel_train.data.parts import folders_of_parts, is_unlabeled, part_of, top_part
from accel_train.data.sources import file_kind, resolve_sources
from accel_train.data.tables import read_rows
from accel_train.data.text.documents import read_documents
from accel_train.experiments.finetune.columns import readings, source_of, table_of, with_settings
from accel_train.experiments.finetune.recipe import (
    Answer,
    Asked,
    Converted,
    Found,
    lengths,
    listed,
    places_of,
    refuse_columns,
)
from accel_train.experiments.finetune.tree import Paths, Tree
from accel_train.experiments.finetune.values.labels import recognise_label
from accel_train.recipe.data import Data

_READ_AT_MOST = 50_000_000
"""Bytes of plain text up to which characters are counted. For larger text, bytes are used instead of characters."""
_LINES_LOOKED_AT = 1_000
_MOST_FIRST_WORDS = 50
_LINES_OF_A_CLASS = 10
_WORDS_OF_A_LINE = 60
"""Least lines and most mean words per line of a file that may be a class."""
_LEAST_LINES, _MOST_CHARACTERS = 20, 200
"""Least lines of a class, and median length of lines above which they are paragraphs."""
_MOST_CONTINUED, _MOST_SHARED = 0.2, 0.5
"""Largest share of lines that continue a sentence, and of distinct lines that another file has too."""
_LABELS = frozenset(["pos", "neg", "positive", "negative", "neutral", "ham", "spam"])
_NO_CLASS = re.compile(
    r"\d|(?<![a-z])(?:chapter|part|section|vol|volume|books?"
    r"|act|scene|page|shard|split|fold|chunk|half|first|second|third|last|one|two|three|four|five|six|seven|eight|nine"
    r"|ten|[ivx]+|[a-z]|prologue|epilogue|intro|introduction|preface|appendix|corpus|data|texts?|raw|clean|all|src|tgt"
    r"|source|target|input|output|vocab|vocabulary|(?:stop)?words|dictionary|labels?|classes|merges|news|web|wiki"
    r"|wikipedia|logs?|out|err|errors?|access|requirements|old|new|bak|notes|todo)(?![a-z])"
)
"""Names of chapters, kinds of text for a language model, and files about other files."""
_LOG_OR_CODE = re.compile(r"\s|[\[{(<#\d]|//|.*[{};]$")


def are_classes(files: Mapping[str, Path], asked: Asked) -> bool:
    """Return whether files by name hold a short text on each line, and can hardly be anything but classes."""
    names = {name.lower() for name in files}
    if len(names) < 2 or any(_NO_CLASS.search(name) or part_of(name) for name in names):
        return False
    texts = [[line.rstrip() for line, _ in read_lines(path, asked.data)] for path in files.values()]
    # Files with equally many lines may be aligned: sentences and their translations, or words and tags.
    if not all(map(_are_texts, texts)) or (len({*map(len, texts)}) == 1 and not _LABELS.issuperset(names)):
        return False
    distinct = [{*lines} for lines in texts]
    return all(len(one & other) <= _MOST_SHARED * len(one) for one, other in permutations(distinct, 2))


def _are_texts(lines: list[str]) -> bool:
    """Return whether lines are short and without gaps, and neither prose, verse, a log, nor source code."""
    if len(lines) < _LEAST_LINES or not all(lines) or median(map(len, lines)) >= _MOST_CHARACTERS:
        return False
    num_continued = sum(one[-1] in ",;:-" or (one[-1].isalpha() and two[0].islower()) for one, two in pairwise(lines))
    num_odd = sum(_LOG_OR_CODE.match(line) is not None for line in lines)
    return num_continued <= _MOST_CONTINUED * len(lines) and 2 * num_odd <= len(lines)


def classes_by_suffix(asked: Asked, tree: Tree) -> Converted | None:
    """Return the files STEM.CLASS of a folder as CLASS.txt. Without `--task`, CLASS must be a usual label: pos, neg."""
    files = {path.suffix[1:]: path for path in tree.files if path.parent == tree.path and not file_kind(path)}
    if not asked.allows("text-classification") or asked.data.lines is not None or "" in files:
        return None
    if len(files) < 2 or len(files) != len(tree.files) or len({path.stem for path in tree.files}) > 1:
        return None
    is_safe = asked.task is not None or (_LABELS.issuperset(files) and are_classes(files, asked))
    return Converted({f"{name}.txt": file.read_bytes() for name, file in files.items()}) if is_safe else None


def recognise_class_folders(asked: Asked, tree: Tree) -> Answer:
    """Return the classes of a folder with CLASS/*.txt or train/CLASS/*.txt. The recipe reads the files in place.

    Raises:
        ValueError: a file cannot be read, or a flag names columns.
    """
    none, folder, texts = "no CLASS/*.txt", tree.path, tree.of_kind("text")
    if not tree.is_folder or not texts or asked.task == "causal-lm":
        return none
    parts = folders_of_parts(folder)
    root = parts.get("train", folder)
    counts = Counter(path.parent for path in texts if path.suffix.lower() == ".txt" and path.parent.parent == root)
    below = [path for path in texts if root in path.parents]
    is_flat = all(path.parent in counts or path.parent == root for path in below)
    num_loose = sum(path.parent == root for path in below)
    if not is_flat or len(counts) < 2 or min(counts.values()) < max(2, num_loose):
        return none
    named = [path for path in sorted(counts) if not is_unlabeled(path.name)]
    if not named or any(part_of(each.name) for each in counts):
        return none
    root, held_out = named[0].parent, parts.get("eval") if root != folder else None
    train: str | list[str] = [*map(str, named)]
    if len(named) == len(counts):
        # The path stays as the user gave it if it is the folder of classes.
        train = asked.path if root == folder else str(root)
    settings = places_of(asked, root, held_out) | {
        "data.train": Choice(train),
        "data.lines": Choice("folder_names", "each file is a text, and its folder is the label"),
    }
    why = f"texts in {len(named)} folders, one for each class; for a language model: --task causal-lm"
    return _labelled(asked, settings, why, "text", f" in {format_count(len(named), 'class folder')} of {root}")


def _is_file_per_class(asked: Asked, folder: Path, texts: Paths) -> bool:
    """Return whether files lie side by side and hold many lines without gaps, and no name is a number or a part."""
    if len(texts) < 2 or any(path.parent != folder for path in texts) or asked.task == "causal-lm":
        return False
    if asked.data.lines is not None:
        return bool(asked.data.lines == "file_names")
    if any(part_of(path.name) for path in texts) or any(char.isdigit() for path in texts for char in path.stem):
        return False
    if asked.task is None and not all(_has_a_text_per_line(path, asked) for path in texts):
        return False
    if _are_fasttext(texts, asked.data):
        return False
    if asked.task is None and not are_classes({path.stem: path for path in texts}, asked):
        names = ", ".join(path.stem for path in texts[:3])
        raise ValueError(
            f"{folder}: {len(texts)} files with a text on each line ({names} ...). If the files are classes, use "
            "--task text-classification. If they are plain text, use --task causal-lm"
        )
    return True


def _has_a_text_per_line(path: Path, asked: Asked) -> bool:
    lines = [line.split() for line, _ in islice(read_lines(path, asked.data), _LINES_LOOKED_AT)]
    is_short = sum(map(len, lines)) <= _WORDS_OF_A_LINE * len(lines)
    return path.suffix.lower() == ".txt" and len(lines) >= _LINES_OF_A_CLASS and all(lines) and is_short


def recognise_files_of_classes(asked: Asked, tree: Tree) -> Answer:
    """Return the classes of a folder with a file for each class and a text on each line.

    Raises:
        ValueError: a file cannot be read, may be a class or plain text, or a flag names columns.
    """
    texts = tree.of_kind("text")
    if not tree.is_folder or not _is_file_per_class(asked, tree.path, texts):
        return "no files with a text on each line, named by classes"
    settings: Choices = {
        "data.train": Choice(asked.path),
        "data.lines": Choice("file_names", "each line is a text, and its file is the label"),
    }
    names = listed([path.stem for path in texts])
    found = f"short texts in files named by a word: {names}; for a language model: --task causal-lm"
    why = "from --task" if asked.task else "from data.lines" if asked.data.lines else found
    return _labelled(asked, settings, why, "line", f" in {format_count(len(texts), 'file')}, one for each class")


def _labelled(asked: Asked, settings: Choices, why: str, unit: str, where: str) -> Found:
    """Return the facts of texts that `settings` read as rows of label and text."""
    refuse_columns(asked, asked.path, "plain text")
    data = with_settings(asked.data, settings)
    sources = resolve_sources(data.train_names, data, key=asked.path)
    rows = (row for source in sources for row in read_rows(source, LINE_COLUMNS, data))
    table = table_of(Path(asked.path), LINE_COLUMNS, rows, {}, (), {})
    label = recognise_label(asked, table, "text")
    return Found(
        "text-classification",
        why,
        f"{asked.path}: {format_count(len(table.wheres), unit)}{where}",
        num_samples=len(table.wheres),
        settings={**settings, **{name: each for name, each in label.settings.items() if name != "data.label_column"}},
        counts=label.counts,
        has_one_label=label.is_one,
        notes=tuple(note for source in sources for note in source.notes if data.lines == "file_names"),
        unused=(),
        **lengths(map(len, table["text"].cells)),
    )


def _training_texts(asked: Asked, tree: Tree) -> tuple[Paths, Choices]:
    """Return the texts to train on, and settings that name them and those to evaluate on.

    Files and folders named train, val, and test are told apart. Without them, there are no settings.
    """
    texts, folder = tree.of_kind("text"), tree.folder
    tops = {path: top_part(path.relative_to(folder), suffix=".txt") for path in texts}
    parts = {part for _, part in tops.values()}
    if "train" not in parts or not (tree.is_folder or {"eval", "test"} & parts) or "data.eval" in asked.given:
        return texts, {}
    held_out = [path for path in texts if tops[path][1] == "eval"]
    train = [path for path in texts if tops[path][1] in ("train", None)]

    def names(paths: Paths) -> str | list[str]:
        top = sorted({str(folder / tops[path][0]) for path in paths})
        return top if len(top) > 1 else top[0]

    settings = {"data.train": Choice[Any](names(train), "training data by their names")}
    if held_out:
        settings["data.eval"] = Choice(names(held_out), "evaluation data by their names")
    return train, settings


def find_label_lines(asked: Asked, files: Paths, *, are_parts: bool) -> Choice[str] | None:
    """Return the setting `data.lines` of files with a label on each line, or None for other text.

    Raises:
        ValueError: a label may begin each line, and no task is asked for.
    """
    if asked.data.lines in _LABEL_FIRST:
        return Choice(asked.data.lines, "from the command line")
    if asked.data.lines is not None or not asked.allows("text-classification"):
        return None
    data = with_settings(asked.data, _readings(asked, files))
    if _are_fasttext(files, data):
        several = any(line.count(FASTTEXT_PREFIX) > 1 for file in files for line, _ in read_lines(file, data))
        return Choice("fasttext_multi" if several else "fasttext", f"lines begin with {FASTTEXT_PREFIX}")
    words = _first_words(files, data)
    # Speakers of a dialogue, in files without names of parts.
    if words is None or (len(files) > 1 and not are_parts and all(word.endswith(":") for word in words)):
        return None
    if asked.task is None:
        raise ValueError(
            f"{files[0]}: each line begins with one of {len(words)} words ({', '.join(sorted(words)[:3])} ...). "
            "If they are labels, use --task text-classification. If it is plain text, use --task causal-lm"
        )
    return Choice("label_text", f"each line begins with one of {len(words)} words, the labels")


def _are_fasttext(files: Paths, data: Data) -> bool:
    firsts = (next((line for line, _ in read_lines(file, data) if line.strip()), "") for file in files)
    return all(first.startswith(FASTTEXT_PREFIX) for first in firsts)


_LABEL_FIRST = ("fasttext", "fasttext_multi", "label_text")


def _first_words(files: Paths, data: Data) -> Counter[str] | None:
    """Return the first words of the lines if they are few and repeat in each file, as labels do, or None."""
    found = Counter[str]()
    for file in files:
        lines = [line.split(maxsplit=1) for line, _ in islice(read_lines(file, data), _LINES_LOOKED_AT) if line.strip()]
        words = Counter(line[0] for line in lines if len(line) == 2)
        is_few = 2 <= len(words) <= min(_MOST_FIRST_WORDS, len(lines) // 5)
        found += words
        if not is_few or words.total() < len(lines) or len(found) > _MOST_FIRST_WORDS:
            return None
    return found


def _readings(asked: Asked, files: Paths) -> Choices:
    """Return the encoding of one file. The encoding of several is a decision of the user."""
    return readings(files[0], asked) if len(files) == 1 else {}


def recognise_lines(asked: Asked, tree: Tree) -> Answer:
    """Return the facts of files with a label and a text on each line."""
    files, parts = _training_texts(asked, tree)
    lines = find_label_lines(asked, files, are_parts=bool(parts)) if files else None
    if lines is None:
        return "no label on each line"
    settings = {"data.train": Choice(asked.path), **_readings(asked, files), **parts, "data.lines": lines}
    return _labelled(asked, settings, "each line is a label and a text", "line", ", each with a label and a text")


def recognise_text(asked: Asked, tree: Tree) -> Answer:
    """Return the facts of plain text for a language model.

    Raises:
        ValueError: the files are empty, may be something else, or do not fit the requested task.
    """
    files, parts = _training_texts(asked, tree)
    if not files:
        return "no text files"
    settings = {"data.train": Choice(asked.path), **_readings(asked, files), **parts}
    asked = replace(asked, data=with_settings(asked.data, settings))
    if not asked.allows("causal-lm"):
        raise ValueError(
            f"--task {asked.task}: {asked.path} is plain text, for --task causal-lm. "
            f"{asked.task} needs a table (.csv, .tsv, .jsonl, .parquet), lines with a label and a text, or images"
        )
    if asked.task is None:
        others = [path for path in tree.files if tree.is_folder and file_kind(path) != "text"]
        _refuse_other_data(asked, files, others)
    refuse_columns(asked, asked.path, "plain text")
    num_chars = sum(path.stat().st_size for path in files)
    if num_chars <= _READ_AT_MOST:
        documents = (document for path in files for document in read_documents(source_of(path), asked.data))
        num_chars = sum(len(document.text) for document in documents)
    if not num_chars:
        raise ValueError(f"{asked.path} is empty. Name a file or folder with text")
    is_one = asked.place.is_file()
    return Found(
        "causal-lm",
        "plain text without columns: a language model learns to continue it",
        f"{asked.path}: {'a text file' if is_one else format_count(len(files), 'file')}, {num_chars:,} characters",
        num_samples=len(files),
        settings=settings,
        num_chars=num_chars,
        unused=(),
    )


def _refuse_other_data(asked: Asked, files: Paths, others: Paths) -> None:
    """Raise ValueError for text that is a table, mark-up, or boxes, and for a small part of all text in the folder."""
    texts = [path for path in files if len(files) == 1 or path.suffix.lower() == ".txt"]
    between = {table_delimiter(path, asked.data) for path in texts[:_FILES_LOOKED_AT]} if texts == [*files] else set()
    if between and None not in between:
        name = f"{files[0].stem}.csv" if len(files) == 1 else f"{files[0].stem}.csv, ..."
        raise ValueError(
            f"{asked.path}: {' or '.join(sorted(map(str, between)))} divide all lines into equal columns. If it is a "
            f"table, rename it to {name}. If it is plain text, use --task causal-lm"
        )
    marked = [path for path in files if path.suffix.lower() in (".txt", ".xml") and path.stat().st_size]
    marked = [path for path in marked if path.name not in CLASSES_FILES]
    looked_at = [marked[number] for number in evenly_spaced(len(marked), _FILES_LOOKED_AT)]
    kinds = {kind_of_annotation(path) for path in looked_at}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        raise ValueError(
            f"{asked.path}: {marked[0]} holds boxes ({kind}), and their images are missing. Put the images next to "
            "them, or into images/. For a language model of the numbers: --task causal-lm"
        )
    xml = [path.read_text(errors="replace") for path in looked_at if path.suffix.lower() == ".xml"]
    if len(xml) == len(files[:_FILES_LOOKED_AT]):
        num_all, num_text = sum(map(len, xml)), sum(len(_TAG.sub("", text).strip()) for text in xml)
        if 2 * num_text < num_all:
            raise ValueError(
                f"{asked.path}: {num_text / num_all:.0%} of the .xml files is text, the rest is mark-up. Write the "
                "texts into .txt files, or a table of texts and labels. To learn the mark-up: --task causal-lm"
            )
    left_out = [path for path in others if file_kind(path) is None and _is_plain(path)]
    num_read, num_left = (sum(path.stat().st_size for path in side) for side in (files, left_out))
    if len(left_out) > len(files) and num_left > num_read:
        one = f"accel-train finetune {quote(str(files[0]))}, or " if len(files) == 1 else ""
        raise ValueError(
            f"{asked.path}: {format_count(len(files), 'file')} ({files[0].name}) of {num_read:,} bytes would be the "
            f"text, and {len(left_out):,} other files of text ({listed([path.name for path in left_out])}), "
            f"{num_left:,} bytes, would be left out. Rename these to .txt, or to a known form. To read only "
            f"{files[0].name}: {one}--task causal-lm"
        )


_FILES_LOOKED_AT = 20
_TAG = re.compile(r"<[^>]*>|\s+")
_HEAD_BYTES = 4096


def _is_plain(path: Path) -> bool:
    """Return whether a file begins like a text."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return b"\0" not in head and 20 * head.decode(errors="replace").count("\ufffd") <= len(head)
