"""Predictions as COCO results: a list of image_id, category_id, bbox and score."""

from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.core.format import is_whole
from accel_train.data.images.labelled import ImageSets


def coco_results(columns: Mapping[str, Sequence[Any]], sets: ImageSets) -> tuple[list[dict[str, Any]], str]:
    """Return the results of a table of predictions for all evaluation images in order, and where their ids come from.

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
    results = [
        {"image_id": image, "category_id": id_of[label], "bbox": box, "score": score}
        for image, *found in zip(image_ids, columns["labels"], columns["boxes"], columns["scores"], strict=True)
        for label, box, score in zip(*found, strict=True)
    ]
    return results, origin


def _image_ids(columns: Mapping[str, Sequence[Any]], sets: ImageSets) -> Sequence[Any]:
    """Return the COCO ids of the evaluation images. Images to predict are named by them if they have any."""
    evaluation = sets.eval
    assert evaluation is not None
    if evaluation.boxes is not None:
        return [evaluation.boxes_of(index).image_id for index in range(len(evaluation))]
    return [int(name) if is_whole(str(name)) else name for name in columns["id"]]
