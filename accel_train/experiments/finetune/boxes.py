"""Recognition of images with boxes: COCO, YOLO, Pascal VOC, and tables."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.data.images.annotations.columns import KIND as COLUMNS
from accel_train.data.images.annotations.folders import LAYOUTS, Located, locate
from accel_train.data.images.annotations.yolo import CLASSES_FILES, label_file, yolo_places, yolo_settings
from accel_train.data.images.images import Images
from accel_train.data.sources import file_kind, is_saved_dataset
from accel_train.experiments.finetune.columns import with_settings
from accel_train.experiments.finetune.images import not_used, sizes_of
from accel_train.experiments.finetune.recipe import Asked, Found, refuse_columns
from accel_train.experiments.finetune.tree import Tree
from accel_train.tasks.object_detection.config import ObjectDetectionData

TASK = "object-detection"


def recognise_boxes(asked: Asked, tree: Tree) -> Found | str:
    """Return the images and boxes of a folder or a file, after checking all boxes.

    Raises:
        ValueError: annotations have faults, with a line for each; or the task is object-detection without boxes.
    """
    none, located, path = "no COCO, YOLO, or Pascal VOC", None, tree.path
    if not asked.allows(TASK):
        return none
    if "data.annotations" in asked.given and asked.data.annotations is not None:
        path = Path(asked.data.annotations).expanduser()
    if tree.is_folder or tree.path.exists() or file_kind(tree.path) == "parquet":
        located = locate(path, asked.data)
        if located is None and asked.task == TASK:
            raise ValueError(f"--task {TASK}: {path} has no boxes; expected {LAYOUTS}")
    # A table may hold texts about boxes.
    if located is None or (located.kind == COLUMNS and asked.text and asked.task is None):
        return none
    settings: Choices = {"data.train": Choice(asked.path)}
    if located.kind == COLUMNS and len(asked.label) == 1:
        settings["data.class_column"] = Choice(asked.label[0], "from --label")
    else:
        refuse_columns(asked, asked.path, "images with boxes")
    if "data.annotations" not in asked.given:
        settings["data.train"] = Choice(str(located.train))
        if located.eval is not None and "data.eval" not in asked.given:
            what = "its validation part" if located.eval == located.train else "evaluation data by its name"
            settings["data.eval"] = Choice(str(located.eval), what)
    from accel_train.tasks.object_detection.data import read_boxed_images  # imports torch

    data = with_settings(asked.data, settings)
    fields = {name: getattr(data, name) for name in ObjectDetectionData.model_fields}
    sets = read_boxed_images(ObjectDetectionData.model_validate(fields))
    if sets.box_format is not None:
        settings["data.box_format"] = Choice(sets.box_format, "the order of numbers in which the boxes fit the images")
    sides = [sets.train] if sets.eval is None or "data.eval" in settings else [sets.train, sets.eval]
    num_images = sum(map(len, sides))
    counts = Counter(
        sets.label_names[number]
        for side in sides
        for index in range(len(side))
        for number in side.boxes_of(index).class_ids.tolist()
    )
    root = asked.place
    images = [side.images for side in (sets.train, sets.eval) if side is not None]
    unused = not_used(root, _read_files(located, images, root)) if root.is_dir() else ()
    if is_saved_dataset(root):
        unused = ("test/",) if (root / "test").is_dir() else ()
    left = f"{located.test} is left alone; after training: accel-train evaluate RUN {located.test}"
    notes = (*sets.notes, *([left] if located.test is not None and left not in sets.notes else []))
    return Found(
        TASK,
        located.why,
        f"{sets.description} ({format_count(num_images, 'image')} to train on)",
        num_samples=num_images,
        settings=settings,
        counts={name: counts[name] for name in sets.label_names},
        test=None if located.test is None else str(located.test),
        unused=unused,
        notes=notes,
        **sizes_of(sets.train.images),
    )


def _read_files(located: Located, images: Sequence[Images], root: Path) -> list[Path]:
    """Return the files and folders at the top of `root` that hold images or boxes that were read."""
    places = [place for place in (located.train, located.eval) if place is not None]
    files = {*places, *(file for place in places for file in place.parent.glob(place.name))}
    if located.kind == "Pascal VOC":
        roots = [place if place.is_dir() else place.parents[2] for place in places]
        files |= {folder / name for folder in roots for name in ("Annotations", "annotations")}
    if located.kind == "YOLO":
        files |= {root / name for name in CLASSES_FILES}
        settings = yolo_settings(located.train) if located.train.is_file() else None
        parts = ("train", "val") if settings is not None else ()
        files |= {place for part in parts for place in yolo_places(located.train, settings or {}, part)}
    for each in images:
        # Bytes in a table would all be read.
        found = range(len(each)) if isinstance(each.content(0), Path) else ()
        paths = [path for index in found if isinstance(path := each.content(index), Path)]
        files |= {file for path in paths for file in (path, label_file(path), path.with_suffix(".xml"))}
    tops = {Path(os.path.relpath(file, root)).parts[:1] for file in files}
    return [root.joinpath(*parts) for parts in tops if parts not in ((), ("..",))]
