"""Classes of whole texts in the exports of Prodigy and Label Studio, written as tables. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.format import format_count
from accel_train.data.parts import part_of
from accel_train.data.tables import SPLITS, json_objects
from accel_train.data.text.spans import ANNOTATIONS, finished
from accel_train.experiments.finetune.annotated.annotations import (
    columns_of_spans,
    is_label_studio,
    objects,
    results_of,
)
from accel_train.experiments.finetune.columns import data_at
from accel_train.experiments.finetune.recipe import Asked, Converted, listed
from accel_train.experiments.finetune.tree import MOST_TAGGED, Tree

_MEDIA = re.compile(r"\S+\.\w{2,5}(?:\?\S*)?")
"""Name of an image or a sound."""

Row = Mapping[str, Any]
Columns = tuple[str, str]
"""Names of the text and of its class."""


class _Text(NamedTuple):
    text: str
    labels: Sequence[str] | None
    """None: rejected, ignored, or not annotated."""


def tables_of_classes(asked: Asked, tree: Tree) -> Converted | None:
    """Return a table for each part, and a note on texts that were left out, or None for files without these classes.

    Raises:
        ValueError: annotations of a text differ, or several columns may be the text or the classes.
    """
    files = tree.of_kind("jsonl", "json")
    if not asked.allows("text-classification") or not 0 < len(files) <= MOST_TAGGED or files != tree.files:
        return None
    names, by_split = ("text", "label"), dict[str, list[_Text]]()
    for file in files:
        if (found := _texts_of(asked, file)) is None:
            return None
        names, texts = found
        part = part_of(file.relative_to(tree.path).as_posix()) if tree.is_folder else None
        by_split.setdefault(SPLITS[part or "train"], []).extend(texts)
    every = [text for texts in by_split.values() for text in texts]
    is_one = all(len(text.labels or ()) < 2 for text in every)
    rows = {
        f"{split}.jsonl": [
            dict(zip(names, (text, labels[0] if is_one else labels)))
            for text, labels in texts
            if labels or (labels is not None and not is_one)
        ]
        for split, texts in by_split.items()
    }
    left_out = len(every) - sum(map(len, rows.values()))
    how = f", without {format_count(left_out, 'text')} rejected, ignored, or without a class" if left_out else ""
    return Converted({name: asked.jsonl(some) for name, some in rows.items()}, how)


def _texts_of(asked: Asked, file: Path) -> tuple[Columns, list[_Text]] | None:
    try:
        rows = [(row, where) for row, where, _ in json_objects(file, data_at(file, asked), "text")]
    # The reader of the table will report the row.
    except ValueError:
        return None
    judged = [row for row, _ in rows if {"text", "answer"} <= row.keys()]
    if any("options" in row for row in judged):
        return ("text", "label"), [_Text(row["text"], _accepted(row)) for row in judged]
    tasks = [(row, where) for row, where in rows if is_label_studio(row)]
    kinds = {kind for row, _ in tasks for _, value in results_of(row) for kind in value}
    if "choices" in kinds and (asked.task is not None or "labels" not in kinds):
        text, label = names = _columns(asked, file, [row for row, _ in tasks])
        return names, [_Text(row["data"][text], _chosen(row, label, where)) for row, where in tasks]
    is_asked_about = any(row["answer"] != "accept" for row in judged) and all("label" in row for row in judged)
    if is_asked_about and (asked.task is not None or not columns_of_spans(judged)):
        return ("text", "label"), _questions(judged)
    return None


def _accepted(row: Row) -> list[str] | None:
    """Return the options that were accepted in Prodigy. An id that is a number stands for its text."""
    texts = {option.get("id"): option.get("text") for option in objects(row["options"])}
    labels = [str(each if isinstance(each, str) else texts.get(each, each)) for each in row.get("accept") or ()]
    return labels if row["answer"] == "accept" else None


def _questions(rows: Sequence[Row]) -> list[_Text]:
    """Return each text with the labels that were accepted in Prodigy, where each row asks about one label.

    Of a single label, the texts that were rejected are the other class.
    """
    is_only = len({str(row["label"]) for row in rows}) == 1
    found: dict[str, list[str]] = {}
    for row in rows:
        labels, name = found.setdefault(row["text"], []), str(row["label"])
        if row["answer"] == "reject" and is_only:
            name = f"not {name}"
        if (row["answer"] == "accept" or name != row["label"]) and name not in labels:
            labels.append(name)
    return [_Text(text, labels or None) for text, labels in found.items()]


def _columns(asked: Asked, path: Path, rows: Sequence[Row]) -> Columns:
    """Return the key of the texts in `data`, and the name of the choices."""
    held = [row["data"] for row in rows]
    texts = [key for key in held[0] if all(isinstance(data.get(key), str) for data in held)]
    texts = [key for key in texts if not all(_MEDIA.fullmatch(data[key]) for data in held)]
    texts = [key for key in asked.text or ({"text"} & {*texts} or texts) if key in texts]
    names = [*dict.fromkeys(name for row in rows for name, value in results_of(row) if "choices" in value)]
    names = [name for name in asked.label or names if name in names]
    for flag, found, what in (("--text", texts, "texts"), ("--label", names, "classes")):
        if len(found) != 1:
            raise ValueError(
                f"{path}: {listed(found) or 'nothing'} may be the {what} of Label Studio's export. Choose one: {flag} "
                f"{[*found, 'NAME'][0]}"
            )
    return texts[0], names[0]


def _chosen(row: Row, name: str, where: str) -> list[str] | None:
    """Return the classes that were chosen in Label Studio."""
    made = finished([each for key in ANNOTATIONS for each in objects(row.get(key))])
    found = []
    for annotation in made:
        values = [value for found_name, value in results_of({ANNOTATIONS[0]: [annotation]}) if found_name == name]
        found.append(sorted({str(label) for value in values for label in value.get("choices", ())}))
    if any(labels != found[0] for labels in found):
        raise ValueError(
            f"{where}: {len(found)} annotations choose different classes; choose one in Label Studio (ground truth), "
            "or drop the others"
        )
    return found[0] if found else None
