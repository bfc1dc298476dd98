"""Text files: plain text, or lines with a label and a text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.delimited import FASTTEXT_PREFIX, read_label_lines, table_delimiter
from accel_train.data.encoding import read_lines
from accel_train.data.sources import resolve_sources
from accel_train.data.tables import read_rows
from accel_train.data.text.documents import read_documents
from accel_train.experiments.finetune.columns import Column, Table, readings, source_of, with_settings
from accel_train.experiments.finetune.found import Asked, Found, Settings, lengths
from accel_train.experiments.finetune.labels import recognise_label
from accel_train.experiments.finetune.unused import EVAL_NAME, TEST_NAME, TRAIN_NAME, UNLABELLED, is_part, part_of

_READ_AT_MOST = 50_000_000
"""Bytes of plain text up to which characters are counted. For larger text, bytes are used instead of characters."""
_LINES_LOOKED_AT = 1_000
_MOST_FIRST_WORDS = 50


def find_classes(folder: Path, texts: Sequence[Path]) -> tuple[list[Path], Path | None] | None:
    """Return the folders CLASS/*.txt or train/CLASS/*.txt, and the folder to evaluate on, or None without classes."""
    parts = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    train = [path for path in parts if TRAIN_NAME.search(path.name.lower())]
    root = train[0] if len(train) == 1 else folder
    counts = Counter(path.parent for path in texts if path.suffix.lower() == ".txt" and path.parent.parent == root)
    below = [path for path in texts if root in path.parents]
    is_flat = all(path.parent in counts or path.parent == root for path in below)
    num_loose = sum(path.parent == root for path in below)
    if not is_flat or len(counts) < 2 or min(counts.values()) < max(2, num_loose):
        return None
    are_parts = [any(name.search(each.name.lower()) for name in (TRAIN_NAME, EVAL_NAME, TEST_NAME)) for each in counts]
    if any(are_parts):
        return None
    held_out = [path for path in parts if root != folder and EVAL_NAME.search(path.name.lower())]
    return sorted(counts), held_out[0] if len(held_out) == 1 else None


def recognise_classes_of_texts(asked: Asked, folder: Path, found: tuple[list[Path], Path | None]) -> Found:
    """Return the classes of a folder with CLASS/*.txt or train/CLASS/*.txt. The recipe reads the files in place.

    Raises:
        ValueError: a file cannot be read, or a flag names columns.
    """
    _refuse_flags(asked, folder)
    folders, held_out = found
    named = [path for path in folders if path.name.lower() not in UNLABELLED]
    root, is_whole = named[0].parent, len(named) == len(folders)
    # The path stays as the user gave it if it is the folder of classes.
    train = (asked.path if root == folder else str(root)) if is_whole else [str(path) for path in named]
    data = asked.data.model_copy(update={"lines": "folder_names", "train": train if is_whole else tuple(train)})
    sources = resolve_sources(data.train, data, key=asked.path)
    rows = [row for source in sources for row in read_rows(source, ("label", "text"), data)]
    labels, texts = zip(*(row.cells for row in rows))
    columns = {"label": Column("label", labels), "text": Column("text", texts)}
    label = recognise_label(asked, Table(root, columns, [row.where for row in rows], {}, (), {}), "text")
    settings: dict[str, Choice[Any]] = {
        "data.train": Choice(train, ""),
        "data.lines": Choice("folder_names", "each file is a text, its folder the label"),
    }
    if held_out is not None and "data.eval" not in asked.given:
        settings["data.eval"] = Choice(str(held_out), "its name says that it is for evaluation")
    return Found(
        "text-classification",
        f"texts in {len(named)} folders, one for each class; --task causal-lm would continue them",
        f"{folder}: {format_count(len(rows), 'text')} in {format_count(len(named), 'class folder')} of {root}",
        num_samples=len(rows),
        settings={**settings, **label.settings},
        counts=label.counts,
        has_one_label=label.is_one,
        unused=(),
        **lengths(list(map(len, texts))),
    )


def training_texts(
    asked: Asked, texts: Sequence[Path], folder: Path
) -> tuple[Sequence[Path], Path, dict[str, Choice[Any]]]:
    """Return the texts to train on, the folder, and settings. Files named train, val, and test are separated."""
    if not any(is_part(path, folder, TRAIN_NAME) for path in texts) or "data.eval" in asked.given:
        return texts, folder, {}
    held_out = [path for path in texts if is_part(path, folder, EVAL_NAME)]
    train = [path for path in texts if path not in held_out and not is_part(path, folder, TEST_NAME)]

    def names(paths: Sequence[Path]) -> str | list[str]:
        top = sorted({str(part_of(path, folder)) for path in paths})
        return top if len(top) > 1 else top[0]

    settings = {"data.train": Choice[Any](names(train), "their names say that they are for training")}
    if held_out:
        settings["data.eval"] = Choice(names(held_out), "their names say that they are for evaluation")
    return train, folder, settings


def recognise_text(
    asked: Asked, files: Sequence[Path], folder: Path | None = None, parts: Settings | None = None
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
            f"{asked.path}: {between} divide all lines alike; if it is a table, rename it to {files[0].stem}.csv; "
            "if it is plain text, say --task causal-lm"
        )
    if asked.task not in (None, "causal-lm"):
        raise ValueError(
            f"--task {asked.task}: {asked.path} is plain text, from which a language model learns (causal-lm); "
            f"{asked.task} needs a table (.csv, .tsv, .jsonl, .parquet), lines of a label and a text, or images"
        )
    _refuse_flags(asked, asked.path)
    num_chars = sum(path.stat().st_size for path in files)
    if num_chars <= _READ_AT_MOST:
        documents = (document for path in files for document in read_documents(source_of(path), asked.data))
        num_chars = sum(len(document.text) for document in documents)
    if not num_chars:
        raise ValueError(f"{asked.path} is empty; name text that a model can learn from")
    what = format_count(len(files), "file") if folder else "a text file"
    return Found(
        "causal-lm",
        "plain text, without columns: a language model learns to continue it",
        f"{asked.path}: {what}, {num_chars:,} characters",
        num_samples=len(files),
        settings=settings,
        num_chars=num_chars,
        unused=(),
    )


def _labelled_lines(asked: Asked, path: Path) -> Found | None:
    """Return the facts of a file with a label on each line, or None for plain text."""
    lines, why = asked.data.lines, "as the command line says"
    if lines is None and asked.task in (None, "text-classification"):
        first = next((line for line, _ in read_lines(path, asked.data) if line.strip()), "")
        if first.startswith(FASTTEXT_PREFIX):
            several = any(line.count(FASTTEXT_PREFIX) > 1 for line, _ in read_lines(path, asked.data))
            lines, why = ("fasttext_multi" if several else "fasttext"), f"lines begin with {FASTTEXT_PREFIX}"
        elif (words := _first_words(asked, path)) is not None:
            if asked.task is None:
                raise ValueError(
                    f"{path}: each line begins with one of {len(words)} words ({', '.join(sorted(words)[:3])} ...); "
                    "say --task text-classification if they are labels, or --task causal-lm if it is plain text"
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


def _refuse_flags(asked: Asked, path: str | Path) -> None:
    if asked.text or asked.label:
        flag = "--text" if asked.text else "--label"
        raise ValueError(f"{flag}: {path} is plain text and has no columns; leave it out, or name a table")


def _first_words(asked: Asked, path: Path) -> Counter[str] | None:
    """Return the first words of the lines if they are few and repeat, as labels do, or None."""
    lines = [
        line.split(maxsplit=1) for line, _ in islice(read_lines(path, asked.data), _LINES_LOOKED_AT) if line.strip()
    ]
    words = Counter(line[0] for line in lines if len(line) == 2)
    is_few = 2 <= len(words) <= min(_MOST_FIRST_WORDS, len(lines) // 5)
    return words if is_few and words.total() == len(lines) else None
