"""Predictions as COCO results: a list of image_id, category_id, bbox and score."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.data.images.annotations.folders import locate
from accel_train.tasks.object_detection.config import ObjectDetectionData


def coco_results(
    columns: Mapping[str, Sequence[Any]], names: Sequence[str], data: ObjectDetectionData
) -> tuple[list[dict[str, Any]], str]:
    """Return the results of a table of predictions, and where their ids come from.

    Ids are those of the COCO file that the data name. Without one, images and classes are counted from 1.
    """
    image_ids, category_ids = _ids(data)
    rows, origin = [_image_id(str(name), image_ids) for name in columns["id"]], "the COCO file of the data"
    if None in rows or not set(names) <= category_ids.keys():
        rows = list(range(1, len(rows) + 1))
        category_ids = {name: number for number, name in enumerate(names, 1)}
        origin = "their order: images and classes count from 1"
    results = [
        {"image_id": image, "category_id": category_ids[label], "bbox": box, "score": score}
        for image, *found in zip(rows, columns["labels"], columns["boxes"], columns["scores"], strict=True)
        for label, box, score in zip(*found, strict=True)
    ]
    return results, origin


def _ids(data: ObjectDetectionData) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ids of images by file name, and of categories by name, in the COCO files that the data name."""
    sides = [side for side in (data.train, data.eval) if side is not None]
    places = [name for side in sides for name in ((side,) if isinstance(side, str) else side)]
    places += [name for name in (data.annotations, data.eval_annotations) if name not in (None, "auto")]
    image_ids, category_ids = dict[str, Any](), dict[str, Any]()
    for place in places:
        found = locate(Path(place).expanduser()) if Path(place).expanduser().exists() else None
        if found is None or found.kind != "COCO":
            continue
        for path in dict.fromkeys(each for each in (found.train, found.eval, found.test) if each is not None):
            content = json.loads(path.read_text(encoding="utf-8"))
            image_ids |= {each["file_name"].replace("\\", "/"): each["id"] for each in content["images"]}
            category_ids |= {each["name"]: each["id"] for each in content["categories"]}
    return image_ids, category_ids


def _image_id(name: str, image_ids: Mapping[str, Any]) -> Any:
    """Return the id of the image whose file name ends a path, or None."""
    parts = Path(name).parts
    endings = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((image_ids[ending] for ending in endings if ending in image_ids), None)
