"""Predicted boxes: the score from which they are shown, rows for each box, and COCO results."""

import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from accel_train.core.format import format_count, is_whole
from accel_train.core.state import Choice, JsonRecord
from accel_train.data.images.labelled import ImageSets
from accel_train.inference.evaluate import evaluation_file
from accel_train.inference.finished_run import TrainedRun
from accel_train.inference.options import Options
from accel_train.observe.run_folder import read_record
from accel_train.task import Columns


def least_score(run: TrainedRun, options: Options) -> Choice[float] | None:
    """Return the least score of a box to show, with its reason. None if the task predicts no boxes."""
    if run.task.spec.gives != "boxes":
        return None
    if options.min_score is not None:
        return Choice(options.min_score)
    found = read_record(evaluation_file(run.folder, None)).get("details")
    for name in ("detection", "best_f1", "score"):
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, float) and 0 <= found <= 1:
        return Choice(found, "the score with the best F1 on the held-out data; --min-score sets another")
    return Choice(0.0, "the run has no score with the best F1; --min-score leaves out doubtful boxes")


def boxes_above(columns: Columns, least: float) -> Columns:
    """Return the columns of boxes without the boxes below a score."""
    # Scores are the shortest decimals of their float32 values, and may lie below them.
    kept = [[np.float32(score) >= np.float32(least) for score in scores] for scores in columns["scores"]]
    lists = {
        name: [list(compress(values, keep)) for values, keep in zip(columns[name], kept, strict=True)]
        for name in ("labels", "scores", "boxes")
    }
    return columns | lists


def rows_of_boxes(columns: Columns) -> Columns:
    """Return a row for each box: its image, class, score, and corners in pixels."""
    rows = [
        (file, label, score, left, top, round(left + width, 2), round(top + height, 2))
        for file, *found in zip(columns["id"], columns["labels"], columns["scores"], columns["boxes"], strict=True)
        for label, score, (left, top, width, height) in zip(*found, strict=True)
    ]
    names = ("file", "class", "score", "x1", "y1", "x2", "y2")
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def note_boxes(columns: Columns, least: Choice[float]) -> None:
    """Print the number of boxes that are shown, and why others are not."""
    boxes = format_count(sum(map(len, columns["labels"])), "box", "boxes")
    images = format_count(len(columns["labels"]), "image")
    why = f" ({least.reason})" if least.reason else ""
    print(f"{boxes} in {images}, with a score of at least {least.value:.4g}{why}", file=sys.stderr)


def coco_results(columns: Columns, sets: ImageSets) -> tuple[list[JsonRecord], str]:
    """Return the boxes of a table of predictions as COCO's tools read them, and where their ids come from.

    The table has all evaluation images in order. `bbox` is left, top, width, and height in pixels.
    Ids are from the COCO file of the images. Without such a file, or if images of several files share an id, images and
    classes are counted from 1.
    """
    image_ids, category_ids = _image_ids(columns, sets), sets.category_ids
    origin = "the COCO file of the data"
    if category_ids is None or None in image_ids or len(set(image_ids)) < len(image_ids):
        image_ids = range(1, len(columns["id"]) + 1)
        category_ids = tuple(range(1, len(sets.label_names) + 1))
        origin = "their order: images and classes count from 1"
    id_of = dict(zip(sets.label_names, category_ids, strict=True))
    results: list[JsonRecord] = [
        {"image_id": image, "category_id": id_of[label], "bbox": box, "score": score}
        for image, *found in zip(image_ids, columns["labels"], columns["boxes"], columns["scores"], strict=True)
        for label, box, score in zip(*found, strict=True)
    ]
    return results, origin


def _image_ids(columns: Columns, sets: ImageSets) -> Sequence[Any]:
    """Return the COCO ids of the evaluation images. Images to predict are named by them if they have any."""
    evaluation = sets.eval
    assert evaluation is not None
    if evaluation.boxes is not None:
        return [evaluation.boxes_of(index).image_id for index in range(len(evaluation))]
    return [int(name) if is_whole(str(name)) else name for name in columns["id"]]
