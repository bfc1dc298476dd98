"""Columns of a table: texts, labels, prompts, chats or names of images; whatever is ambiguous is an error with the flag."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_train.core.format import did_you_mean, format_count
from accel_train.core.state import Choice
from accel_train.data.sources import Source, resolve_sources
from accel_train.data.tables import MissingColumn, Row, column_names, read_rows
from accel_train.experiments.finetune.columns import Column
from accel_train.experiments.finetune.found import Asked, Found

_TEXT_NAMES = [
    "text",
    "sentence",
    "review",
    "content",
    "comment",
    "message",
    "tweet",
    "body",
    "question",
    "document",
    "abstract",
    "description",
]
_LABEL_NAMES = [
    "label",
    "labels",
    "class",
    "category",
    "target",
    "sentiment",
    "intent",
    "topic",
    "genre",
    "stars",
    "rating",
    "tag",
    "y",
]
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("input", "output"),
)
_FURTHER_INPUTS = ("input", "context", "system", "history")
"""Columns that belong to the prompt, however short: without them the answer cannot be known."""


def source_of(path: Path) -> Source:
    """Return one file as a source."""
    return Source(str(path), str(path), (path,))


def recognise_table(asked: Asked, path: Path, held_out: Path | None = None) -> Found:
    """Return the task of a table and its columns; `held_out` is a table to evaluate on.

    Raises:
        ValueError: a row cannot be read, or no column or several can be what is needed; the message shows the flag.
    """
    (source,) = resolve_sources(str(path), asked.data, key=asked.path)
    columns, rows = _read(asked, source)
    table = {column.name: column for column in columns}
    _check_flags(asked, path, table)
    about = f"{path}: {format_count(len(rows), 'row')}, columns {', '.join(table)}"
    settings = {"data.train": Choice(str(path), "")}
    if held_out is not None and "data.eval" not in asked.given:
        settings["data.eval"] = Choice(str(held_out), "its name says that it is for evaluation")
    found = _chats(asked, table) or _pairs(asked, path, table) or _images(asked, path, table)
    found = found or _plain_text(asked, path, table) or _labelled(asked, path, table)
    return Found(
        **{**found, "description": about, "num_samples": len(rows), "settings": {**settings, **found["settings"]}}
    )


def _read(asked: Asked, source: Source) -> tuple[list[Column], list[Row]]:
    """Every row of the columns that all rows have."""
    names = column_names(source, asked.data)
    while True:
        if not names:
            raise ValueError(f"{source.name}: no column is in every row; write the same keys on each line")
        try:
            rows = list(read_rows(source, names, asked.data))
            break
        except MissingColumn as error:  # of a line of jsonl
            names.remove(error.column)
    if not rows:
        raise ValueError(f"{source.name} holds no rows; name a table that has some")
    return [Column(name, cells) for name, cells in zip(names, zip(*(row.cells for row in rows)))], rows


def _check_flags(asked: Asked, path: Path, table: dict[str, Column]) -> None:
    for flag, names in (("--text", asked.text), ("--label", (asked.label,) if asked.label else ())):
        for name in names:
            if name not in table:
                meant = did_you_mean(name, table, show=repr)
                raise ValueError(f"{flag} {name}: {path} has no such column; {meant} There are {', '.join(table)}")


def _chats(asked: Asked, table: dict[str, Column]) -> dict[str, Any] | None:
    """A column of messages."""
    chats = [column for column in table.values() if column.is_chat]
    if not chats or asked.label or asked.task not in (None, "causal-lm"):
        return None
    named = [column for column in chats if column.name == asked.data.messages_column] or chats
    if len(named) > 1:
        names = [column.name for column in named]
        raise ValueError(f"{' and '.join(names)} hold messages; choose one: --data.messages_column {names[0]}")
    (column,) = named
    keys = set(column.cells[0][0])
    if "role" not in keys or "content" not in keys:
        raise ValueError(
            f"column {column.name!r} holds messages with the keys {', '.join(sorted(keys))}; write each as "
            "{role: user or assistant, content: ...}"
        )
    sizes = [sum(len(str(message.get("content", ""))) for message in chat or ()) for chat in column.cells]
    why = "each is a list of {role, content}; the loss counts what the assistant says"
    return {
        "task": "causal-lm",
        "why": f"column {column.name!r} holds chats",
        "settings": {
            "data.format": Choice("chat", why),
            **_column("messages_column", column.name, "the column of chats"),
        },
        **_lengths(sizes),
        "is_chat": True,
    }


def _pairs(asked: Asked, path: Path, table: dict[str, Column]) -> dict[str, Any] | None:
    """A column of prompts, and one of what is to be answered."""
    if asked.text or asked.label or asked.task not in (None, "causal-lm") or "data.text_column" in asked.given:
        return None
    own = (asked.data.prompt_column, asked.data.completion_column)
    is_given = bool({"data.prompt_column", "data.completion_column"} & asked.given)
    pair = next((pair for pair in (own, *_PAIRS) if set(pair) <= set(table)), None)
    if pair is None or not all(table[name].is_strings for name in pair) or ("label" in table and not is_given):
        return None
    others = [
        name
        for name, column in table.items()
        if name not in pair and (column.is_text or (name in _FURTHER_INPUTS and any(column.cells)))
    ]
    if others and not is_given:
        raise ValueError(
            f"{path}: {' and '.join(pair)} look like prompt and completion, and {', '.join(others)} would not be read; "
            f"join them in your data, or say --data.prompt_column {pair[0]} --data.completion_column {pair[1]}"
        )
    return {
        "task": "causal-lm",
        "why": f"columns {pair[0]!r} and {pair[1]!r} are prompt and completion",
        "settings": {
            "data.format": Choice("prompt_completion", "the loss counts completions"),
            **_column("prompt_column", pair[0], "its name"),
            **_column("completion_column", pair[1], "its name"),
        },
        **_lengths([len(one) + len(other) for one, other in zip(*(table[name].cells for name in pair))]),
    }


def _images(asked: Asked, path: Path, table: dict[str, Column]) -> dict[str, Any] | None:
    """A column of image files, and one of labels."""
    images = [column for column in table.values() if column.is_image]
    if not images or asked.text or asked.task not in (None, "image-classification"):
        return None
    if len(images) > 1:
        raise ValueError(
            f"{path}: {' and '.join(column.name for column in images)} are names of images; with masks, run a recipe: "
            f"recipes/segmentation.yaml --data.image_column {images[0].name} --data.mask_column {images[1].name}"
        )
    label, why = _label_of(asked, path, table, images[0].name)
    return {
        "task": "image-classification",
        "why": f"column {images[0].name!r} names images, column {label.name!r} their classes",
        "settings": {
            **_column("image_column", images[0].name, "its cells are image files"),
            **_column("label_column", label.name, why),
        },
        "counts": label.classes,
        "edge": 224,
    }


def _plain_text(asked: Asked, path: Path, table: dict[str, Column]) -> dict[str, Any] | None:
    """One column of texts and no label: a language model."""
    texts = [column for column in table.values() if column.is_strings]
    is_alone = len(table) == len(texts) == 1 and not asked.label
    if asked.task != "causal-lm" and not (asked.task is None and is_alone):
        return None
    column, why = _text_of(asked, path, table, None)
    if len(column) > 1:
        raise ValueError(f"--text {','.join(asked.text)}: a language model reads one column; name one")
    text = column[0]
    return {
        "task": "causal-lm",
        "why": "as --task says"
        if asked.task
        else "one column of text and no label: a language model learns to continue it",
        "settings": _column("text_column", text.name, why),
        **_lengths([len(str(cell)) for cell in text.cells]),
    }


def _labelled(asked: Asked, path: Path, table: dict[str, Column]) -> dict[str, Any]:
    """A column of texts, or two, and one of labels."""
    if asked.task not in (None, "text-classification"):
        raise ValueError(f"--task {asked.task}: {path} is a table without a column of images; name a folder of images")
    known = _known_label(asked, table)
    texts, why_text = _text_of(asked, path, table, known)
    label, why_label = _label_of(asked, path, table, *(column.name for column in texts))
    settings = {
        "data.text_columns": Choice([column.name for column in texts], why_text),
        **_column("label_column", label.name, why_label),
    }
    if label.is_decimal and "data.label_names" not in asked.given:
        counts: Counter[str] = Counter()
        settings["model.problem_type"] = Choice("regression", f"column {label.name!r} holds decimal numbers")
    else:
        counts = label.classes
        _check_classes(asked, path, label, counts)
    kind = "numbers" if not counts else "labels"
    return {
        "task": "text-classification",
        "why": f"column {' and '.join(repr(column.name) for column in texts)} is text, column {label.name!r} holds {kind}",
        "settings": settings,
        "counts": counts,
        **_lengths([sum(len(str(cell)) for cell in row) for row in zip(*(column.cells for column in texts))]),
    }


def _known_label(asked: Asked, table: dict[str, Column]) -> str | None:
    """The label by flag or by its very name, which then is no text."""
    return asked.label or ("label" if "label" in table else None)


def _text_of(asked: Asked, path: Path, table: dict[str, Column], label: str | None) -> tuple[list[Column], str]:
    if asked.text:
        return [table[name] for name in asked.text], "as --text says"
    others = [column for column in table.values() if column.name != label]
    if "text" in table and table["text"].is_strings:
        ignored = [column.name for column in others if column.is_text and column.name != "text"]
        also = f"; {', '.join(ignored)} is not read (both: --text text,{ignored[0]})" if ignored else ""
        return [table["text"]], f"its name{also}"
    texts = [column for column in others if column.is_text]
    texts = texts or [column for column in others if column.is_strings and column.name.lower() in _TEXT_NAMES]
    if len(texts) == 1:
        return texts, f"the only column of texts: {texts[0].mean_words:.0f} words on average"
    if texts:
        names = [column.name for column in texts]
        pair = f", or --text {names[0]},{names[1]} for both as a pair" if asked.task != "causal-lm" else ""
        raise ValueError(f"{path}: columns {', '.join(names)} are all text; choose one: --text {names[0]}{pair}")
    strings = [column for column in others if column.is_strings]
    if len(strings) == 1 and not strings[0].may_be_labels:
        return strings, "the only column of strings"
    raise ValueError(f"{path}: no column is clearly text (there are {', '.join(table)}); name it: --text COLUMN")


def _label_of(asked: Asked, path: Path, table: dict[str, Column], *used: str) -> tuple[Column, str]:
    others = [column for column in table.values() if column.name not in used]
    if asked.label is not None:
        return table[asked.label], "as --label says"
    for names in (("label",), _LABEL_NAMES):
        named = [column for column in others if column.name.lower() in names]
        if len(named) == 1:
            return named[0], "its name"
        if named:
            break
    likely = named or [column for column in others if column.may_be_labels]
    if len(likely) == 1:
        return likely[0], f"the only column of few values: {len(likely[0].classes)} in {len(likely[0].cells):,} rows"
    if likely:
        some = [f"--label {column.name}" for column in likely]
        raise ValueError(f"{path}: {len(likely)} columns may be the label; choose one: {' or '.join(some)}")
    there = f"there are {', '.join(column.name for column in others)}" if others else "there is no other column"
    raise ValueError(
        f"{path}: no column looks like a label beside {', '.join(used)} ({there}); name it: --label COLUMN; or --task causal-lm "
        f"--text {used[0]} for a language model of the texts"
    )


def _check_classes(asked: Asked, path: Path, label: Column, counts: Counter[str]) -> None:
    """Refuse a label that is another one in nearly every row."""
    num_rows = len(label.cells)
    if len(counts) > max(2, num_rows // 2) and "data.label_names" not in asked.given:
        raise ValueError(
            f"{path}: column {label.name!r} has {len(counts):,} different values in {num_rows:,} rows, too many for labels; "
            "name another: --label COLUMN; or for numbers to predict: --model.problem_type regression"
        )


def _column(setting: str, name: str, why: str) -> dict[str, Choice[Any]]:
    return {f"data.{setting}": Choice(name, why)}


def _lengths(sizes: Sequence[int]) -> dict[str, int]:
    return {"num_chars": sum(sizes), "longest": sorted(sizes)[len(sizes) * 19 // 20]}
