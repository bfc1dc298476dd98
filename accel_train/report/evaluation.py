"""The report's section on the last evaluation of a run: metrics and results by class.

Its parts come from evaluation.json. A custom task may have written that file, so missing or malformed parts are left
out.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.core.format import format_count
from accel_train.core.metric_names import MISSING, follows_from_loss, is_variant, label, show_metric, show_value
from accel_train.core.state import JsonRecord
from accel_train.metrics.baselines import by_baseline, is_number
from accel_train.metrics.scores import SUMMARY_ROWS
from accel_train.report.metric_names import NOT_A_SCORE
from accel_train.report.pictures import VERDICTS
from accel_train.report.run import Run

MAX_CLASSES = 25
"""Maximum number of classes in a confusion matrix, limited by the screen."""
MAX_CLASSES_BESIDE = 10
"""Maximum number of classes in a confusion matrix that does not take the whole page width."""
DEEPEST = 0.55
"""Opacity of a cell that holds its whole row. Its text stays readable in light and dark mode."""
MAX_ROWS = 20
"""Number of rows above which a table of classes is folded."""
MAX_PAIRS = 10
"""Maximum number of rows in the table of the most frequent mistakes."""
MAX_TEXTS = 6
"""Number of texts above which mistakes are folded."""
Block = JsonRecord
"""Part of the section as template data. `kind` is examples, table, matrix, bars or text."""


def _verdicts(example: Mapping[str, Any]) -> str:
    """Return which boxes are right, wrong, and missed, by class: `right: cat ×2, dog; missed: dog`."""
    counts = {name: Counter(map(str, example[name])) for name in VERDICTS}
    told = [
        f"{name}: {', '.join(each if number == 1 else f'{each} ×{number}' for each, number in classes.items())}"
        for name, classes in counts.items()
        if classes
    ]
    return "; ".join(told) or "no box, and none predicted"


_EXAMPLES: dict[str, tuple[dict[str, type], Callable[[Mapping[str, Any]], str]]] = {
    "label": (
        {"truth": str, "prediction": str, "score": float},
        "{0[truth]}, predicted as {0[prediction]} ({0[score]:.0%})".format,
    ),
    "mask": ({"wrong": float}, "{0[wrong]:.1%} of the pixels wrong".format),
    "boxes": (dict.fromkeys(VERDICTS, list), _verdicts),
}
"""Values of an example by kind of prediction, and its caption."""


def describe_evaluation(runs: Sequence[Run]) -> list[Block]:
    """Return the parts of the section on the last evaluation, or an empty list if the headline numbers suffice."""
    blocks = [_table_of_metrics(runs)]
    if len(runs) == 1:
        for part, describe in _PARTS.items():
            blocks += describe(runs[0].details(part))
        blocks.append(_describe_examples(runs[0].examples, _mapping(runs[0].summary.get("data")).get("num_eval")))
    return [{"folded": False, "wide": False, "hint": ""} | block for block in blocks if block]


def _describe_examples(found: JsonRecord, num_eval: Any) -> Block:
    """Return the part with samples that the run got wrong, with their images or texts."""
    kind = str(found.get("kind"))
    needed, caption = _EXAMPLES.get(kind, _EXAMPLES["label"])
    examples = [
        each
        for each in _list(found.get("examples"))
        if isinstance(each, Mapping) and all(isinstance(each.get(name), type_) for name, type_ in needed.items())
    ]
    if not examples or not all(is_number(found.get(name)) for name in ("tried", "wrong")):
        return {}
    items = [
        {
            "images": [image for image in _list(each.get("images")) if str(image).startswith("data:image/png;base64,")],
            "text": each.get("text"),
            "caption": caption(each),
        }
        for each in examples
    ]
    is_part = is_number(num_eval) and num_eval > found["tried"]
    tried = f"{found['tried']:,} of the {num_eval:,}" if is_part else f"{found['tried']:,}"
    hint = f"{found['wrong']:,} wrong of {tried} held-out samples; the most confident first"
    if kind == "mask":
        hint = "image, truth, prediction; the worst first"
    elif kind == "boxes":
        least = found.get("least_score")
        of_best = f" with a score of at least {least:.2g}" if is_number(least) else ""
        hint = f"truth, and predicted boxes{of_best}; a box is right by its class and an IoU of at least 0.5"
    return {
        "title": "Predictions" if kind in ("mask", "boxes") else "Mistakes",
        "kind": "examples",
        "items": items,
        "colours": [pair for pair in _list(found.get("colours")) if _is_colour(pair)],
        "verdicts": VERDICTS if kind == "boxes" else {},
        "look": "boxes" if kind == "boxes" else "texts" if items[0]["text"] is not None else "",
        "num_shown": MAX_TEXTS if items[0]["text"] is not None else len(items),
        "hint": hint,
        "wide": True,
    }


def _is_colour(pair: Any) -> bool:
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    return is_pair and re.fullmatch(r"#[0-9a-f]{6}", str(pair[1])) is not None


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def confusion_matrix(part: JsonRecord) -> tuple[NDArray[np.int64], list[str]] | None:
    """Return the confusion matrix and class names in `details`, or None if it is not square or counts nothing."""
    names = _names(part)
    try:
        matrix = np.array(part.get("confusion_matrix"))
    # Rows have different lengths.
    except ValueError:
        return None
    is_counts = matrix.dtype.kind == "i" and matrix.shape == (len(names), len(names)) and (matrix >= 0).all()
    return (matrix.astype(np.int64), names) if is_counts and matrix.any() else None


def _table_of_metrics(runs: Sequence[Run]) -> Block:
    """Return a table of all metrics of each run.

    A single run is shown next to its baselines. Averages that the table of classes repeats are left out.
    """
    columns = [{name: value for name, value in run.final_metrics().items() if name not in NOT_A_SCORE} for run in runs]
    head, names = [run.name for run in runs], list(dict.fromkeys(name for metrics in columns for name in metrics))
    if all(map(follows_from_loss, names)):
        return {}
    if len(runs) == 1:
        baselines = by_baseline(runs[0].summary.get("baselines", {}), names)
        compared = {name for found in baselines.values() for name in found}
        if _mapping(runs[0].details("classification").get("report")):
            names = [name for name in names if name in compared or not is_variant(name, {*names} - {"loss"})]
        head, columns = ["this run" if baselines else "", *baselines], [*columns, *baselines.values()]
    rows = [_row(label(name), [show_metric(name, metrics.get(name)) for metrics in columns]) for name in names]
    return _table("Metrics", ["", *head], rows)


def _describe_classification(part: JsonRecord) -> Iterator[Block]:
    if found := confusion_matrix(part):
        is_small = len(found[1]) <= MAX_CLASSES
        yield _matrix(*found) if is_small else _table_of_pairs(*found, "samples")
    # Beside the table of metrics and the matrix.
    if report := _mapping(part.get("report")):
        yield _table_of_classes(report)
    text = part.get("report_text")
    if isinstance(text, str) and text:
        hint = "the classification report"
        yield {"kind": "text", "title": "As text", "hint": hint, "text": text, "folded": True}


def _table_of_classes(report: JsonRecord) -> Block:
    figures = ("precision", "recall", "f1-score")
    rows, total = [], None
    for name, values in report.items():
        summary = name in SUMMARY_ROWS or name == "samples avg"
        if isinstance(values, Mapping):
            support = values.get("support")
            total = support if summary else total
            cells = [*(_cell(values.get(figure)) for figure in figures), _cell(support, ",.0f")]
            rows.append(_row(name.replace("avg", "average") if summary else name, cells, summary=summary))
    if "accuracy" in report and not isinstance(report["accuracy"], Mapping):
        place = next((number for number, row in enumerate(rows) if row["summary"]), len(rows))
        rows.insert(place, _row("accuracy", ["", "", _cell(report["accuracy"]), _cell(total, ",.0f")], summary=True))
    block = _table("By class", ["class", "precision", "recall", "F1", "samples"], rows)
    num_classes = sum(not row["summary"] for row in rows)
    return block | {"folded": len(rows) > MAX_ROWS, "hint": f"{num_classes} classes"}


def _matrix(matrix: NDArray[np.int64], names: Sequence[str]) -> Block:
    """Return a (C, C) confusion matrix as counts with color depths. Rows are the truth; depth is the share of a row."""
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    # The exponent makes a tenth of a row a fifth as deep, not a tenth, so mistakes stand out.
    depths = (DEEPEST * shares**0.7).round(3)
    cells = [
        [{"count": count, "depth": depth} for count, depth in zip(*row)]
        for row in zip(matrix.tolist(), depths.tolist())
    ]
    rows = [{"name": name, "cells": row} for name, row in zip(names, cells)]
    shown = {"kind": "matrix", "title": "Confusion matrix", "head": list(names), "rows": rows}
    return shown | {"upright": max(map(len, names)) > 5, "wide": len(names) > MAX_CLASSES_BESIDE}


def _table_of_pairs(matrix: NDArray[np.int64], names: Sequence[str], unit: str) -> Block:
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    totals = matrix.sum(axis=1)
    rows = []
    for flat in np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS].tolist():
        truth, answer = divmod(flat, len(names))
        count = int(wrong[truth, answer])
        if count:
            rows.append(_row(names[truth], [names[answer], f"{count:,}", f"{100 * count / totals[truth]:.1f} %"]))
    head = ["truth", "predicted as", unit, "of the class"]
    return _table("Most frequent mistakes", head, rows) | {"text_columns": 1} if rows else {}


def _describe_segmentation(part: JsonRecord) -> Iterator[Block]:
    if bars := _bars_of_classes(part, "iou"):
        known = [iou for iou in part["iou"] if is_number(iou)]
        mean = _bar("mean", fmean(known) if known else None) | {"this": True}
        yield _bars("Intersection over union by class", format_count(len(bars), "class", "classes"), [*bars, mean])
    if found := confusion_matrix(part):
        yield _table_of_pairs(*found, "pixels")


def _describe_detection(part: JsonRecord) -> Iterator[Block]:
    if not (bars := _bars_of_classes(part, "average_precision")):
        return
    hint = f"{format_count(len(bars), 'class', 'classes')}; mean over IoU thresholds from 0.5 to 0.95"
    yield _bars("Average precision by class", hint, bars)
    if best := _mapping(part.get("best_f1")):
        head = ["", "least score", "precision", "recall", "F1"]
        row = _row("boxes", [show_value(best.get(name)) for name in ("score", "precision", "recall", "f1")])
        yield _table("Score with the best F1 at an IoU of 0.5", head, [row])


def _describe_generation(part: JsonRecord) -> Iterator[Block]:
    rows = [
        _row(str(each.get("source", "")), [str(each.get(name, "")) for name in ("target", "generated")])
        for each in _list(part.get("samples"))
        if isinstance(each, Mapping)
    ]
    if rows:
        yield _table("Generated texts", ["source", "target", "generated"], rows) | {"text_columns": 2}


def _describe_retrieval(part: JsonRecord) -> Iterator[Block]:
    rows = [
        _row(
            "" if rank else str(query.get("query", "")),
            [str(each.get("text", "")), "right" if each.get("is_right") else "", show_value(each.get("similarity"), 2)],
        )
        for query in _list(part.get("queries"))
        if isinstance(query, Mapping)
        for rank, each in enumerate(_list(query.get("nearest")))
        if isinstance(each, Mapping)
    ]
    head = ["query", "nearest texts", "", "similarity"]
    if rows:
        yield _table("Nearest texts of some queries", head, rows) | {"text_columns": 2, "wide": True}


def _bars_of_classes(part: JsonRecord, name: str) -> list[Block]:
    """Return a bar for each class, or an empty list if there are other classes than values."""
    names, values = _names(part), _list(part.get(name))
    return list(map(_bar, names, values)) if len(names) == len(values) else []


def _bars(title: str, hint: str, bars: Sequence[Block]) -> Block:
    return {"kind": "bars", "title": title, "hint": hint, "bars": bars, "folded": len(bars) > MAX_ROWS}


def _bar(name: str, iou: Any) -> Block:
    known = is_number(iou)
    percent = round(72 * min(max(iou, 0.0), 1.0), 2) if known else 0
    return {"label": name, "percent": percent, "value": f"{iou:.3f}" if known else "does not occur", "this": False}


def _describe_augmentation(part: JsonRecord) -> Iterator[Block]:
    plain, augmented = _mapping(part.get("without")), _mapping(part.get("with"))
    rows = []
    for name in dict.fromkeys((*plain, *augmented)):
        before, after = plain.get(name), augmented.get(name)
        change = f"{after - before:+.4f}" if is_number(before) and is_number(after) else MISSING
        rows.append(_row(label(name), [show_metric(name, before), show_metric(name, after), change]))
    if rows:
        yield _table("Test-time augmentation", ["", "without", "with", "change"], rows)


_PARTS = {
    "classification": _describe_classification,
    "segmentation": _describe_segmentation,
    "detection": _describe_detection,
    "generation": _describe_generation,
    "retrieval": _describe_retrieval,
    "test_time_augmentation": _describe_augmentation,
}
"""Parts of the details of an evaluation, in the order of display."""


def _table(title: str, head: Sequence[str], rows: Sequence[Block]) -> Block:
    # The first column names the row. The next `text_columns` columns are text, the others numbers.
    return {"kind": "table", "title": title, "head": list(head), "rows": list(rows), "text_columns": 0}


def _row(name: str, cells: Sequence[str], *, summary: bool = False) -> Block:
    return {"name": name, "cells": list(cells), "summary": summary}


def _cell(value: Any, form: str = ".3f") -> str:
    return format(value, form) if is_number(value) else show_value(value)


def _mapping(value: Any) -> JsonRecord:
    return value if isinstance(value, dict) else {}


def _names(part: JsonRecord) -> list[str]:
    return [str(name) for name in _list(part.get("label_names"))]
