"""Find boxes at a path: the format, and the parts for training, evaluation and tests."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from accel_train.core.files import read_regular
from accel_train.core.json_io import parse_json
from accel_train.data.images.annotations.coco import read_coco
from accel_train.data.images.annotations.columns import KIND, find_columns, read_columns
from accel_train.data.images.annotations.records import Annotated
from accel_train.data.images.annotations.tables import METADATA, has_objects, of_cells, read_table, with_same_names
from accel_train.data.images.annotations.voc import read_voc
from accel_train.data.images.annotations.yolo import (
    CLASSES_FILES,
    label_file,
    read_yolo,
    yolo_places,
    yolo_settings,
)
from accel_train.data.images.images import Target, evenly_spaced, list_images
from accel_train.data.images.pools import read_pools
from accel_train.data.images.tars import tars_among
from accel_train.data.parts import part_of, pick
from accel_train.data.sources import TABLE_KINDS, Source, is_saved_dataset, resolve_sources
from accel_train.data.tables import refuse_parts_of
from accel_train.recipe.data import BoxData
from accel_train.recipe.tasks import TARS

LAYOUTS = (
    "a COCO file (annotations/instances_train.json), a YOLO data.yaml, a Pascal VOC folder (Annotations/ and "
    "JPEGImages/), metadata.jsonl with objects next to the images, a table with a box in each row (filename, class, "
    f"xmin, ymin, xmax, ymax; or bbox), or {TARS} (KEY.jpg, KEY.json)"
)
_COCO_NAME = re.compile(r"(?:.*[^a-z])?(?:annotations?|instances|coco|labels)(?:[^a-z].*)?\.json")
_TARS = "tars"
_LARGE_BYTES = 50_000_000
"""Size from which a JSON file with COCO's name is taken for COCO's without reading it."""
_NUM_LOOKED_AT = 20
_BOX_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
_MOST_TABLES = 100
"""Number of tables in a folder up to which each is opened for columns of boxes."""
_SHARD = re.compile(r"-\d+-of-(\d+)(?=\.parquet$)")


class Located(NamedTuple):
    """The boxes at a path."""

    kind: str
    """Format: COCO, YOLO, Pascal VOC, table, or tars."""
    train: Path
    """File or folder of the training images, or of all images."""
    why: str
    eval: Path | None = None
    """File or folder of the evaluation images, by its name. A YOLO data.yaml may be both."""
    test: Path | None = None


def locate(path: Path, data: BoxData) -> Located | None:
    """Return the boxes at a file, a folder, or the tables of a pattern, or None without boxes.

    Raises:
        ValueError: a folder has several files of boxes, and their names do not tell the training part.
    """
    suffix = path.suffix.lower()
    if tars_among(path.iterdir() if os.path.isdir(path) else [path]):
        return Located(_TARS, path, f"{path.name} holds tars")
    if os.path.isdir(path) and is_saved_dataset(path):
        return _saved_dataset(path, data)
    if os.path.isdir(path):
        found = _yolo_yaml(path) or _coco(path) or _tables("table", path, data)
        return found or _voc(path) or _yolo_folders(path) or _tables(KIND, path, data)
    if suffix in (".yaml", ".yml") and (found := _yolo_file(path)) is not None:
        return found
    if suffix == ".json" and os.path.isfile(path) and _is_coco(path):
        return Located("COCO", path, f"{path.name} holds boxes")
    if suffix == ".txt" and path.parent.name == "Main":
        return Located("Pascal VOC", path, f"{path.name} lists images")
    files = [path] if os.path.isfile(path) else sorted(map(Path, glob.glob(str(path))))
    kind = _kind_of(_source(files[0]), data) if suffix in TABLE_KINDS and files else None
    what = "columns" if kind == KIND else "a column"
    return None if kind is None else Located(kind, path, f"{path.name} has {what} of boxes")


def _source(file: Path) -> Source:
    return Source(str(file), "", (file,))


def _kind_of(source: Source, data: BoxData) -> str | None:
    """Return the kind of a table with boxes, or None without boxes."""
    return "table" if has_objects(source, data) else KIND if find_columns(source, data) else None


def read_annotated(
    found: Located, part: str, data: BoxData, images: Path | None = None, *, needs_boxes: bool = True
) -> list[Annotated]:
    """Return the images and boxes of one part, `train`, `eval` or `test`: one set, or one for each shard of a table.

    `images` is the folder of the images if it is not next to the annotations. Without `needs_boxes`, a table of boxes
    only lists its images.

    Raises:
        ValueError: a file is broken, or `images` is set for a format that does not need it.
    """
    place = {"train": found.train, "eval": found.eval, "test": found.test}[part]
    assert place is not None
    if images is not None and found.kind not in ("COCO", "Pascal VOC", KIND):
        raise ValueError(
            f"data.annotations={place}: {found.kind} names its images. Set data.train to it, and leave "
            "data.annotations out"
        )
    if found.kind == _TARS:
        # The label of a sample is the cell of its boxes.
        pool = read_pools(str(place), data, data.train_key, Target(data.objects_column, is_mask=False))
        return [of_cells(str(place), pool, pool.labels, data)]
    if found.kind == "COCO":
        return [read_coco(place, images)]
    if found.kind == "Pascal VOC":
        return [read_voc(place, images)]
    if found.kind == "YOLO":
        order = "cxcywh" if data.box_format == "auto" else data.box_format
        return [read_yolo(place, "val" if part == "eval" else part, order)]
    (source,) = resolve_sources(str(place), data, key="data.eval" if part == "eval" else data.train_key)
    if part == "train":
        refuse_parts_of(source, data)
    tables = [replace(each, name=str(each.files[0])) if each.files else each for each in source.parts()]
    columns = [find_columns(table, data) if found.kind == KIND else None for table in tables]
    return with_same_names(
        [
            read_columns(table, data, each, images, needs_boxes=needs_boxes) if each else read_table(table, data)
            for table, each in zip(tables, columns)
        ]
    )


def _chosen(kind: str, folder: Path, places: Sequence[Path]) -> Located | None:
    """Return the places by their parts, or None without places.

    Raises:
        ValueError: several places may be the training part, or several places are other parts.
    """
    if not places:
        return None
    parts = {place: part_of(place.relative_to(folder).as_posix()) for place in places}
    train = [place for place in places if parts[place] == "train"] or [p for p in places if parts[p] is None]
    # trainval would repeat the images of train.
    train = [place for place in train if "trainval" not in place.name] or train or list(places)
    if len(train) > 1:
        shown = ", ".join(map(str, train[:5]))
        raise ValueError(f"{folder} holds several files of boxes ({shown}). Name one of them instead of the folder")
    held, test = (next((p for p in places if parts[p] == part and p != train[0]), None) for part in ("eval", "test"))
    return Located(kind, train[0], f"{train[0].relative_to(folder.parent)} holds boxes ({kind})", held, test)


def _yolo_file(path: Path) -> Located | None:
    if (settings := yolo_settings(path)) is None:
        return None
    held = any(os.path.exists(place) for place in yolo_places(path, settings, "val"))
    return Located("YOLO", path, f"{path.name} names images and classes", path if held else None)


def _yolo_yaml(folder: Path) -> Located | None:
    files = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*.yml"))]
    return next((found for file in files if (found := _yolo_file(file)) is not None), None)


def _coco(folder: Path) -> Located | None:
    files = sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])
    named = [file for file in files if _COCO_NAME.fullmatch(file.name.lower())]
    named = named or (files if len(files) <= _NUM_LOOKED_AT else [])
    return _chosen("COCO", folder, [file for file in named if _is_coco(file)])


def _is_coco(path: Path) -> bool:
    """Return whether a JSON file holds COCO's boxes. Captions and other annotations have none."""
    if path.stat().st_size >= _LARGE_BYTES and path.name.lower().startswith("instances"):
        return True
    try:
        content = parse_json(read_regular(path))
    except (OSError, ValueError):
        return False
    if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= content.keys():
        return False
    annotations = content["annotations"]
    return isinstance(annotations, list) and all("bbox" in each for each in annotations[:1] if isinstance(each, dict))


def _tables(kind: str, folder: Path, data: BoxData) -> Located | None:
    """Return the tables with a column of objects, or with columns of boxes, in the folder or one below.

    They are metadata.jsonl or csv files, and parquet files, whose shards are one place.
    """
    if kind == KIND:
        found = [file for file in (*folder.glob("*"), *folder.glob("*/*")) if file.suffix.lower() in _BOX_TABLES]
        files = sorted(found)[:_MOST_TABLES]
    else:
        files = [file for name in METADATA for file in (folder / name, *sorted(folder.glob(f"*/{name}")))]
    # A file of each place.
    first = {file: file for file in files if os.path.isfile(file)}
    for file in [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("*/*.parquet"))]:
        if file.name not in METADATA and file.is_file():
            first.setdefault(file.with_name(_SHARD.sub(r"-*-of-\1", file.name)), file)
    holds = find_columns if kind == KIND else has_objects
    return _chosen(kind, folder, [place for place, file in first.items() if holds(_source(file), data)])


def _saved_dataset(folder: Path, data: BoxData) -> Located | None:
    """Return the boxes of a folder of `save_to_disk`, or None without a column of boxes."""
    opened = data.model_copy(update={"train": str(folder), "eval": str(folder)})
    try:
        (source,) = resolve_sources(str(folder), opened, key="data.train")
    except ValueError:
        return None
    if (kind := _kind_of(source, data)) is None:
        return None
    held = pick([each.name for each in folder.iterdir() if each.is_dir()], "eval") is not None
    return Located(kind, folder, f"{source.name} has a column of boxes", folder if held else None)


def _voc(folder: Path) -> Located | None:
    roots = [root for root in (folder, *sorted(folder.iterdir())) if os.path.isdir(root)]
    places = [root for root in roots if any(map(_holds_boxes, (root / "Annotations", root / "annotations")))]
    if folder in places or len(places) == 1:
        return _voc_parts(folder if folder in places else places[0])
    # Roboflow writes each xml file next to its image.
    return _chosen("Pascal VOC", folder, places or [root for root in roots if _holds_boxes(root)])


def _voc_parts(root: Path) -> Located:
    """Return the parts of a folder with Annotations/ by the lists in ImageSets/Main.

    Raises:
        ValueError: there are lists, but not for training.
    """
    lists = {part: root / "ImageSets" / "Main" / f"{part}.txt" for part in ("train", "trainval", "val", "test")}
    there = {part: path for part, path in lists.items() if os.path.isfile(path)}
    why = f"{root.name} holds boxes (Pascal VOC)"
    if not there:
        return Located("Pascal VOC", root, why)
    train = there.get("train") or there.get("trainval")
    if train is None:
        names = ", ".join(path.name for path in there.values())
        raise ValueError(
            f"{lists['train'].parent} has {names}, but no train.txt. Add the list of training images, or name a list "
            "instead of the folder"
        )
    return Located("Pascal VOC", train, why, there.get("val") if "train" in there else None, there.get("test"))


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
    """Return the boxes of images/PART or PART/images, of images/, or of a folder with images and text files."""
    # Images below images/ have their text files below labels/. LabelImg writes them next to images, with classes.txt.
    may_be_images = "images" in folder.absolute().parts or any(os.path.isfile(folder / name) for name in CLASSES_FILES)
    above = folder if folder.name == "images" else folder / "images"
    inner = {*above.glob("*"), *folder.glob("*/images"), *(folder.glob("*") if may_be_images else ())}
    places = [path for path in sorted(inner) if _has_labels(path)]
    if not any(part_of(path.relative_to(folder).as_posix()) for path in places):
        places = [path for path in (above, *[folder] * may_be_images) if _has_labels(path)][:1]
    return _chosen("YOLO", folder, places)


def _has_labels(images: Path) -> bool:
    return os.path.isdir(images) and any(os.path.isfile(label_file(images / name)) for name in list_images(images))
