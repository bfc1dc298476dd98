"""Average precision of predicted boxes, by pycocotools."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accel_train.core.state import JsonRecord
from accel_train.data.images.boxes import Boxes
from accel_train.task import Scores
from accel_train.tasks.object_detection.config import SPEC

MAX_BOXES = 100
"""Boxes of an image that count, by score: COCO's largest number of detections."""


class Detection(NamedTuple):
    """The predicted boxes of an image, by falling score."""

    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    corners: NDArray[np.float32]
    """Left, top, right, bottom in pixels of the image, (K, 4)."""


def average_precision(truth: Sequence[Boxes], found: Sequence[Detection], names: Sequence[str]) -> Scores:
    """Return mAP, mAP at an IoU of 0.5 and of 0.75, AP by class, and the least score with the best F1.

    Images are in the same order in both lists. Crowds are ignored regions, as in COCO. A class without a box in the
    truth has no AP and does not count.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations: list[JsonRecord] = []
    results: list[JsonRecord] = []
    for image, (boxes, detection) in enumerate(zip(truth, found, strict=True), 1):
        for corners, class_id, crowd, area in zip(boxes.corners, boxes.class_ids, boxes.is_crowd, boxes.areas):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": int(class_id) + 1,
                    "bbox": coco_box(corners),
                    "area": float(area),
                    "iscrowd": int(crowd),
                }
            )
        for score, class_id, corners in zip(*detection):
            # pycocotools would sort NaN anywhere.
            if not np.isfinite([score, *corners]).all():
                continue
            box = coco_box(corners)
            results.append({"image_id": image, "category_id": int(class_id) + 1, "bbox": box, "score": float(score)})
    known = COCO()
    known.dataset = {
        "info": {},
        "images": [{"id": n, "width": each.width, "height": each.height} for n, each in enumerate(truth, 1)],
        "categories": [{"id": n, "name": name} for n, name in enumerate(names, 1)],
        "annotations": annotations,
    }
    # pycocotools prints its progress.
    with contextlib.redirect_stdout(io.StringIO()):
        known.createIndex()
        if not annotations or not results:
            metrics = dict.fromkeys(SPEC.metrics, 0.0 if annotations else float("nan"))
            return Scores(metrics, _details(names, [0.0] * len(names), annotations))
        evaluation = COCOeval(known, known.loadRes(results), "bbox")
        evaluation.params.maxDets = [1, 10, MAX_BOXES]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # (IoU thresholds, recalls, classes, sizes, numbers of boxes); -1 for a class without truth.
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    by_class = [
        float(each[each > -1].mean()) if (each > -1).any() else float("nan") for each in precision.transpose(2, 0, 1)
    ]
    metrics = dict(zip(SPEC.metrics, map(float, evaluation.stats[:3])))
    details = _details(names, by_class, annotations)
    details["detection"]["best_f1"] = _best_cut(evaluation)
    return Scores(metrics, details)


def _best_cut(evaluation: Any) -> dict[str, float] | None:
    """Return the least score with the best F1 of all classes at an IoU of 0.5, or None if no box is right there."""
    params = evaluation.params
    found = [each for each in evaluation.evalImgs if each is not None and each["aRng"] == params.areaRng[0]]
    counts = np.concatenate([each["dtIgnore"][0] for each in found]) == 0
    scores = np.concatenate([each["dtScores"] for each in found])[counts]
    is_right = np.concatenate([each["dtMatches"][0] for each in found])[counts] > 0
    num_boxes = sum(int((np.asarray(each["gtIgnore"]) == 0).sum()) for each in found)
    order = np.argsort(-scores, kind="stable")
    scores, num_right = scores[order], is_right[order].cumsum()
    if not is_right.any():
        return None
    f1 = 2 * num_right / (np.arange(1, len(scores) + 1) + num_boxes)
    # A least score takes all boxes with this score.
    f1[:-1][scores[1:] == scores[:-1]] = 0
    best = int(f1.argmax())
    right = int(num_right[best])
    return {
        "score": float(scores[best]),
        "precision": right / (best + 1),
        "recall": right / num_boxes,
        "f1": float(f1[best]),
    }


def _details(names: Sequence[str], by_class: Sequence[float], annotations: Sequence[JsonRecord]) -> JsonRecord:
    counts = np.bincount(
        [each["category_id"] - 1 for each in annotations if not each["iscrowd"]], minlength=len(names)
    ).tolist()
    precision = [None if not count or np.isnan(each) else each for each, count in zip(by_class, counts)]
    return {"detection": {"label_names": list(names), "average_precision": precision, "num_boxes": counts}}


def coco_box(corners: Sequence[float] | NDArray[Any]) -> list[float]:
    """Return [left, top, width, height] of a box's corners."""
    left, top, right, bottom = map(float, corners)
    return [left, top, right - left, bottom - top]


def mean_boxes(train: Sequence[Boxes], images: Sequence[Boxes], num_classes: int) -> list[Detection]:
    """Return, for each image, a box per class: the mean of the training boxes, relative to the image.

    A box's score is the share of training images with the class.
    """
    sums, counts, shares = np.zeros((num_classes, 4)), np.zeros(num_classes), np.zeros(num_classes)
    for boxes in train:
        size = np.array([boxes.width, boxes.height] * 2)
        own = boxes.class_ids[~boxes.is_crowd]
        np.add.at(sums, own, boxes.corners[~boxes.is_crowd] / size)
        np.add.at(counts, own, 1)
        shares[np.unique(own)] += 1
    order = np.argsort(-shares, kind="stable")[:MAX_BOXES]
    order = order[counts[order] > 0]
    means, scores = sums[order] / counts[order, None], (shares[order] / max(len(train), 1)).astype(np.float32)
    return [
        Detection(scores, order, (means * np.array([each.width, each.height] * 2)).astype(np.float32))
        for each in images
    ]
