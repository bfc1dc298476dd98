"""Read the boxes of a COCO JSON file."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from accel_train.core.json_io import load_object
from accel_train.core.state import JsonRecord
from accel_train.data.images.annotations.records import (
    Annotated,
    BoxedImage,
    BoxRow,
    Faults,
    annotated,
    box_row,
    numbers,
    repeated,
    stated_size,
)
from accel_train.data.images.images import FileImages


def read_coco(path: Path, images: Path | None = None, *, needs_boxes: bool = True) -> Annotated:
    """Return the images of a COCO file in the order of their list. Categories are sorted by id.

    `images` is the folder of the images. None: it is looked up near the file. Images without annotations stay. Without
    `needs_boxes`, a file of images to predict need not have `annotations`, and rows are named by image ids.

    Raises:
        ValueError: the file is not JSON with `images`, `annotations` and `categories`, or lists no images.
    """
    content = load_object(path)
    if not needs_boxes:
        content.setdefault("annotations", [])
    lists = {key: _list(path, content, key) for key in ("images", "annotations", "categories")}
    if not lists["images"]:
        raise ValueError(f"{path}: lists no images; name another file")
    faults = Faults()
    used = Counter(_key(each, "category_id") for each in lists["annotations"])
    class_of, names = _categories(path, lists["categories"], used, faults)
    files, sizes, index_of = list[str](), list[tuple[int, int] | None](), dict[Any, int]()
    for each in lists["images"]:
        name, key = each.get("file_name"), _key(each, "id")
        if not isinstance(name, str) or not name or key is None:
            faults.files.append(f"{path}, image {key}: has no file_name or no id")
        elif key in index_of:
            faults.files.append(f"{path}, image {key} ({name}): the id occurs twice")
        else:
            index_of[key] = len(files)
            files.append(name.replace("\\", "/"))
            sizes.append(stated_size(each.get("width"), each.get("height")))
    rows: list[list[BoxRow]] = [[] for _ in files]
    seen = set[Any]()
    for number, each in enumerate(lists["annotations"] if needs_boxes else ()):
        key, image, category = (_key(each, name) for name in ("id", "image_id", "category_id"))
        key = f"number {number + 1}" if key is None else key
        where = f"{path}, annotation {key}"
        box = numbers(each.get("bbox"), 4)
        if key in seen:
            faults.files.append(f"{where}: the id occurs twice")
        elif image not in index_of:
            faults.files.append(f"{where}: its image_id {str(each.get('image_id'))[:80]} is not among the images")
        elif category not in class_of:
            faults.files.append(
                f"{where}: its category_id {str(each.get('category_id'))[:80]} is not among the categories"
            )
        elif box is None:
            faults.boxes.append(f"{where}: its bbox {str(each.get('bbox'))[:80]} is not [left, top, width, height]")
        else:
            row = box_row(where, box, class_of[category], crowd=each.get("iscrowd"), area=each.get("area"))
            rows[index_of[image]].append(row)
        seen.add(key)
    root, files = _place_of(path, files, images)
    keys = list(index_of)
    records = [BoxedImage(str(path), *found, image_id=key) for key, found in zip(keys, zip(rows, sizes))]
    return annotated(
        "COCO",
        path,
        FileImages(root, tuple(files)),
        records,
        faults,
        "xywh",
        names,
        ids=None if needs_boxes else [str(key) for key in keys],
        category_ids={names[number]: key for key, number in class_of.items()},
    )


def _list(path: Path, content: Mapping[str, Any], key: str) -> list[JsonRecord]:
    value = content.get(key)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{path}: no list {key!r}. A COCO file has images, annotations and categories")
    return value


def _key(entry: Mapping[str, Any], name: str) -> int | str | None:
    """Return an id, or None if it is missing or neither a whole number nor a text."""
    value = entry.get(name)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (int, str)) else None


def _categories(
    path: Path, categories: Sequence[Mapping[str, Any]], used: Mapping[Any, int], faults: Faults
) -> tuple[dict[Any, int], tuple[str, ...]]:
    """Return the class of each category id, and the class names.

    A second category with the name of another (as Roboflow writes) is left out if it has no annotations.
    """
    named = [{**each, "id": _key(each, "id")} for each in categories if "name" in each]
    named = [each for each in named if isinstance(each["id"], int)]
    if len(named) != len(categories):
        faults.files.append(f"{path}: a category has no whole number as id, or no name")
    for key in repeated(each["id"] for each in named):
        faults.files.append(f"{path}, category {key}: the id occurs twice")
    twice = set(repeated(str(each["name"]) for each in named))
    kept = [each for each in named if str(each["name"]) not in twice or used.get(each["id"])]
    for name in repeated(str(each["name"]) for each in kept):
        faults.files.append(f"{path}: two categories with annotations are called {name!r}")
    kept = sorted(kept, key=lambda each: each["id"])
    return {each["id"]: number for number, each in enumerate(kept)}, tuple(str(each["name"]) for each in kept)


def _place_of(path: Path, files: Sequence[str], images: Path | None) -> tuple[Path, list[str]]:
    """Return the folder of a COCO file's images, and their names in it, with or without the folders in `file_name`."""
    above, words = path.parent.parent, path.stem.split("_")
    parts = (*reversed(words), path.stem)
    inner = (*parts, "images", *(f"images/{part}" for part in parts), "data", "")
    near = [path.parent, *(folder / name for folder in (above, path.parent) for name in inner)]
    probes = [files[number] for number in {0, len(files) // 2, len(files) - 1}]
    for folder in [images] if images is not None else near:
        for shorten in (str, lambda name: PurePosixPath(name).name):
            found = [shorten(name) for name in files]
            # Without their folders, different images may have one name.
            if len({*found}) == len({*files}) and any(os.path.isfile(folder / shorten(name)) for name in probes):
                return folder, found
    return images or path.parent, list(files)
