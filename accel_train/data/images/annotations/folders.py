"""Find boxes at a path: the format, and the parts for training, evaluation and tests."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from accel_train.core.files import read_regular
from accel_train.data.images.annotations.coco import read_coco
from accel_train.data.images.annotations.records import Annotated
from accel_train.data.images.annotations.tables import METADATA, has_boxes, read_table
from accel_train.data.images.annotations.voc import read_voc
from accel_train.data.images.annotations.yolo import label_file, read_yolo, yolo_places, yolo_settings
from accel_train.data.images.images import evenly_spaced, list_images
from accel_train.data.sources import TABLE_KINDS, resolve_sources
from accel_train.recipe.data import ImageData

LAYOUTS = (
    "a COCO file (annotations/instances_train.json), a YOLO data.yaml, a Pascal VOC folder (Annotations/ and "
    "JPEGImages/), or metadata.jsonl with objects next to the images"
)
_PARTS = {
    "test": {"test", "testing"},
    "eval": {"val", "valid", "validation", "dev", "eval"},
    "train": {"train", "training"},
}
_IMAGE_FOLDERS = ("images/train", "train/images", "images")
_COCO_NAME = re.compile(r"(?:.*[^a-z])?(?:annotations?|instances|coco|labels)(?:[^a-z].*)?\.json")
_LARGE_BYTES = 50_000_000
"""Size from which a JSON file with COCO's name is taken for COCO's without reading it."""
_NUM_LOOKED_AT = 20


class Located(NamedTuple):
    """The boxes at a path."""

    kind: str
    """Format: COCO, YOLO, Pascal VOC, or table."""
    train: Path
    """File or folder of the training images, or of all images."""
    eval: Path | None
    """File or folder of the evaluation images, by its name. A YOLO data.yaml may be both."""
    test: Path | None
    why: str


def locate(path: Path) -> Located | None:
    """Return the boxes at a file or folder, or None without boxes.

    Raises:
        ValueError: a folder has several files of boxes, and their names do not tell the training part.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        return _yolo_yaml(path) or _coco(path) or _metadata(path) or _voc(path) or _yolo_folders(path)
    if suffix in (".yaml", ".yml") and (settings := yolo_settings(path)) is not None:
        held = any(place.exists() for place in yolo_places(path, settings, "val"))
        return Located("YOLO", path, path if held else None, None, f"{path.name} names images and classes")
    if suffix == ".json" and path.is_file() and _is_coco(path):
        return Located("COCO", path, None, None, f"{path.name} holds boxes")
    if suffix == ".txt" and path.parent.name == "Main":
        return Located("Pascal VOC", path, None, None, f"{path.name} lists images")
    if suffix in TABLE_KINDS and path.is_file() and has_boxes(path):
        return Located("table", path, None, None, f"{path.name} has a column of boxes")
    return None


def read_annotated(
    found: Located, part: str, data: ImageData, objects_column: str, images: Path | None = None
) -> Annotated:
    """Return the images and boxes of one part: `train`, `eval` or `test`.

    `images` is the folder of the images if it is not next to the annotations.

    Raises:
        ValueError: a file is broken, or `images` is set for a format that does not need it.
    """
    place = {"train": found.train, "eval": found.eval, "test": found.test}[part]
    assert place is not None
    if images is not None and found.kind not in ("COCO", "Pascal VOC"):
        raise ValueError(
            f"data.annotations={place}: {found.kind} names its images. Set data.train to it, and leave "
            "data.annotations out"
        )
    if found.kind == "COCO":
        return read_coco(place, images)
    if found.kind == "Pascal VOC":
        return read_voc(place, images)
    if found.kind == "YOLO":
        return read_yolo(place, "val" if part == "eval" else part, data.label_names)
    (source,) = resolve_sources(str(place), data, key=str(place))
    tables = [replace(source, files=(file,)) for file in source.files] or [source]
    return read_table(tables[0], data, objects_column)


def part_of(path: Path) -> str | None:
    """Return the part (train, eval or test) that the name of a file or folder tells, or None."""
    words = {*re.split(r"[^a-z]+", path.as_posix().lower())}
    return next((part for part, names in _PARTS.items() if words & names), None)


def _chosen(kind: str, folder: Path, places: Sequence[Path], why: str) -> Located | None:
    """Return the places by their parts, or None without places.

    Raises:
        ValueError: several places may be the training part.
    """
    if not places:
        return None
    parts = {place: part_of(place.relative_to(folder)) for place in places}
    train = [place for place in places if parts[place] == "train"] or [p for p in places if parts[p] is None]
    train = train or list(places)[:1]
    if len(train) > 1:
        shown = ", ".join(map(str, train[:5]))
        raise ValueError(f"{folder} holds several files of boxes ({shown}). Name one of them instead of the folder")
    held, test = (next((p for p in places if parts[p] == part and p != train[0]), None) for part in ("eval", "test"))
    return Located(kind, train[0], held, test, why)


def _yolo_yaml(folder: Path) -> Located | None:
    files = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*.yml"))]
    return next((found for file in files if (found := locate(file)) is not None), None)


def _coco(folder: Path) -> Located | None:
    files = sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])
    named = [file for file in files if _COCO_NAME.fullmatch(file.name.lower())]
    named = named or (files if len(files) <= _NUM_LOOKED_AT else [])
    places = [file for file in named if _is_coco(file)]
    return _chosen("COCO", folder, places, f"{places[0].relative_to(folder)} holds boxes (COCO)" if places else "")


def _is_coco(path: Path) -> bool:
    """Return whether a JSON file holds COCO's boxes. Captions and other annotations have none."""
    if path.stat().st_size >= _LARGE_BYTES and path.name.lower().startswith("instances"):
        return True
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError):
        return False
    if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= content.keys():
        return False
    annotations = content["annotations"]
    return isinstance(annotations, list) and all("bbox" in each for each in annotations[:1] if isinstance(each, dict))


def _metadata(folder: Path) -> Located | None:
    files = [file for name in METADATA for file in (folder / name, *sorted(folder.glob(f"*/{name}")))]
    places = [file for file in files if file.is_file() and has_boxes(file)]
    return _chosen("table", folder, places, f"{places[0].relative_to(folder)} has a column of boxes" if places else "")


def _voc(folder: Path) -> Located | None:
    lists = {part: folder / "ImageSets" / "Main" / f"{part}.txt" for part in ("train", "val", "test")}
    for root in (folder, *[entry for entry in sorted(folder.iterdir()) if entry.is_dir()]):
        below = next((root / name for name in ("Annotations", "annotations") if (root / name).is_dir()), None)
        if below is not None and _holds_boxes(below):
            why = f"{below.name}/ holds boxes (Pascal VOC)"
            lists = {part: root / "ImageSets" / "Main" / f"{part}.txt" for part in ("train", "val", "test")}
            there = {part: path for part, path in lists.items() if path.is_file()}
            if "train" in there:
                return Located("Pascal VOC", there["train"], there.get("val"), there.get("test"), why)
            return Located("Pascal VOC", root, None, None, why)
    # Roboflow writes each xml file next to its image.
    places = [root for root in (folder, *sorted(folder.iterdir())) if root.is_dir() and _holds_boxes(root)]
    return _chosen("Pascal VOC", folder, places, "xml files next to the images hold boxes (Pascal VOC)")


def _holds_boxes(folder: Path) -> bool:
    files = sorted(folder.glob("*.xml"))
    for number in evenly_spaced(len(files), _NUM_LOOKED_AT):
        try:
            if b"<bndbox" in read_regular(files[number]):
                return True
        except OSError:
            continue
    return False


def _yolo_folders(folder: Path) -> Located | None:
    for name in ("", *_IMAGE_FOLDERS):
        images = folder / name
        if name != "" and not images.is_dir():
            continue
        files = [images / file for file in list_images(images)[0]] if name != "" or _is_below_images(folder) else []
        if not any(label_file(file).is_file() for file in files):
            continue
        held = next(
            (
                place
                for part in ("val", "valid", "validation")
                if (place := Path(str(images).replace("train", part))).is_dir() and "train" in name
            ),
            None,
        )
        why = f"{label_file(files[0]).parent} holds boxes (YOLO)"
        return Located("YOLO", images, held, None, why)
    return None


def _is_below_images(folder: Path) -> bool:
    return "images" in folder.absolute().parts
