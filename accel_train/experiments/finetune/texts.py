"""Text files: plain text, or lines of a label and a text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.delimited import FASTTEXT_PREFIX, read_label_lines, table_delimiter
from accel_train.data.encoding import read_lines
from accel_train.data.text.documents import read_documents
from accel_train.experiments.finetune.columns import Column, Table, readings, source_of, with_settings
from accel_train.experiments.finetune.found import Asked, Found
from accel_train.experiments.finetune.labels import recognise_label

_READ_AT_MOST = 50_000_000
"""Bytes of plain text that are counted in characters; of more, the bytes stand for them."""
_LINES_LOOKED_AT = 1_000
_MOST_FIRST_WORDS = 50


def recognise_text(asked: Asked, files: Sequence[Path], folder: Path | None = None) -> Found:
    """Return what text files hold: text that a language model learns to continue, or labelled lines.

    Raises:
        ValueError: they are empty, or asked for as what they are not; the message shows the flag.
    """
    settings = {} if folder is not None else readings(files[0], asked.data, asked.given)
    asked = replace(asked, data=with_settings(asked.data, settings))
    settings = {"data.train": Choice(asked.path, ""), **settings}
    found = _labelled_lines(asked, files[0]) if folder is None else None
    if found is not None:
        return replace(found, settings={**settings, **found.settings})
    if folder is None and asked.task is None and (between := table_delimiter(files[0], asked.data)) is not None:
        raise ValueError(
            f"{asked.path}: {between} divide all lines alike; if it is a table, rename it to {files[0].stem}.csv; if it is plain text, "
            "say --task causal-lm"
        )
    if asked.task not in (None, "causal-lm"):
        raise ValueError(
            f"--task {asked.task}: {asked.path} is plain text, from which a language model learns (causal-lm); {asked.task} needs a "
            "table (.csv, .tsv, .jsonl, .parquet), lines of a label and a text, or images"
        )
    if asked.text or asked.label:
        flag = "--text" if asked.text else "--label"
        raise ValueError(f"{flag}: {asked.path} is plain text and has no columns; leave it out, or name a table")
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
    )


def _labelled_lines(asked: Asked, path: Path) -> Found | None:
    """Return what a file of lines with a label each holds; None where it is plain text."""
    lines, why = asked.data.lines, "as the command line says"
    if lines is None and asked.task in (None, "text-classification"):
        first = next((line for line, _ in read_lines(path, asked.data) if line.strip()), "")
        if first.startswith(FASTTEXT_PREFIX):
            several = any(line.count(FASTTEXT_PREFIX) > 1 for line, _ in read_lines(path, asked.data))
            lines, why = ("fasttext_multi" if several else "fasttext"), f"lines begin with {FASTTEXT_PREFIX}"
        elif (words := _first_words(asked, path)) is not None:
            if asked.task is None:
                raise ValueError(
                    f"{path}: each line begins with one of {len(words)} words ({', '.join(sorted(words)[:3])} ...); say --task "
                    "text-classification if they are labels, or --task causal-lm if it is plain text"
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
    sizes = sorted(map(len, texts))
    return Found(
        "text-classification",
        "each line is a label and a text",
        f"{path}: {format_count(len(records), 'line')}, each with a label and a text",
        num_samples=len(records),
        settings={
            "data.lines": Choice(lines, why),
            **{name: each for name, each in label.settings.items() if name != "data.label_column"},
        },
        num_chars=sum(sizes),
        longest=sizes[len(sizes) * 19 // 20],
        counts=label.counts,
        has_one_label=label.is_one,
    )


def _first_words(asked: Asked, path: Path) -> Counter[str] | None:
    """The first words of the lines, where they are few and come again and again, as labels do."""
    lines = [
        line.split(maxsplit=1) for line, _ in islice(read_lines(path, asked.data), _LINES_LOOKED_AT) if line.strip()
    ]
    words = Counter(line[0] for line in lines if len(line) == 2)
    is_few = 2 <= len(words) <= min(_MOST_FIRST_WORDS, len(lines) // 5)
    return words if is_few and words.total() == len(lines) else None
