"""Small data sets of boxes in public formats: two images of different sizes, with a cat, two dogs and a crowd."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from accel_train.data.images.labelled import ImageRows, ImageSets
from accel_train.tasks.object_detection.config import ObjectDetectionData
from accel_train.tasks.object_detection.data import read_boxed_images

SIZES = {"a.png": (40, 30), "b.png": (20, 50), "empty.png": (16, 16)}
"""Width and height of each image. The last has no boxes."""


class Thing(NamedTuple):
    """An object in an image: left, top, width and height in pixels."""

    image: str
    name: str
    box: tuple[float, float, float, float]
    is_crowd: bool = False


THINGS = (
    Thing("a.png", "cat", (4, 6, 10, 8)),
    Thing("a.png", "dog", (20, 10, 16, 20)),
    Thing("b.png", "dog", (0, 0, 20, 50)),
)


def read_boxes(train: str, eval_fraction: float = 0.0, **data: Any) -> ImageSets:
    """Read images and boxes as the task does. Nothing is held out unless it is said."""
    return read_boxed_images(ObjectDetectionData(train=train, eval_fraction=eval_fraction, **data))


def places(side: ImageRows) -> list[str]:
    """Return the file, or the file and row, of each image."""
    return [side.where(index) for index in range(len(side))]


def corners(side: ImageRows, index: int = 0) -> Any:
    """Return left, top, right, and bottom of each box of an image."""
    return side.boxes_of(index).corners.tolist()


def classes(side: ImageRows, index: int = 0) -> Any:
    """Return the class of each box of an image."""
    return side.boxes_of(index).class_ids.tolist()


EXPECTED = {
    "a.png": {("cat", (4, 6, 14, 14)), ("dog", (20, 10, 36, 30))},
    "b.png": {("dog", (0, 0, 20, 50))},
    "empty.png": set[Any](),
}
"""(Class name, corners) of the boxes of each image."""


def boxes_by_image(side: ImageRows, names: tuple[str, ...]) -> dict[str, Any]:
    """Return (class name, corners) of all boxes of each image. Images in a table are named by their number."""
    found = {}
    for index in range(len(side)):
        boxes, content = side.boxes_of(index), side.images.content(int(side.rows[index]))
        name = content.name if isinstance(content, Path) else [*SIZES][index]
        ends = (tuple(each) for each in boxes.corners.tolist())
        found[name] = {(names[number], each) for number, each in zip(boxes.class_ids, ends)}
        assert (boxes.width, boxes.height) == SIZES[name]
    return found


def write_images(folder: Path | str, sizes: dict[str, tuple[int, int]] | None = None, orientation: int = 1) -> None:
    """Write images of different content. `orientation` is the EXIF orientation of all."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, (name, size) in enumerate((sizes or SIZES).items()):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
        exif = Image.Exif()
        if orientation != 1:
            exif[274] = orientation
        Image.fromarray(pixels).save(Path(folder, name), exif=exif)


def coco_content(things: Sequence[Thing] = THINGS, names: Sequence[str] = ("dog", "cat"), **changes: Any) -> Any:
    """Return COCO's JSON. Ids have gaps, and categories are not in the order of their ids."""
    category = {name: 90 - 10 * number for number, name in enumerate(sorted(names))}
    image_ids = {name: 100 + 7 * number for number, name in enumerate(SIZES)}
    return {
        "images": [
            {"id": image_ids[name], "file_name": name, "width": width, "height": height}
            for name, (width, height) in SIZES.items()
        ],
        "annotations": [
            {
                "id": 1000 + 3 * number,
                "image_id": image_ids[thing.image],
                "category_id": category[thing.name],
                "bbox": list(thing.box),
                "area": thing.box[2] * thing.box[3] / 2,
                "iscrowd": int(thing.is_crowd),
            }
            for number, thing in enumerate(things)
        ],
        "categories": [{"id": category[name], "name": name} for name in names],
        **changes,
    }


def write_coco(file: Path | str, images: Path | str, content: Any = None) -> str:
    """Write COCO's JSON and its images, and return the name of the JSON."""
    write_images(images)
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(content or coco_content()))
    return str(file)


def coco(content: Any = None) -> str:
    """Write c.json and its images in images/, and return its name."""
    return write_coco("c.json", "images", content)


def write_yolo(folder: Path | str, parts: Sequence[str] = ("train",), names: str = "[cat, dog]") -> Path:
    """Write data.yaml, images/PART and labels/PART. An image without boxes has no label file."""
    root = Path(folder)
    ids = {"cat": 0, "dog": 1}
    for part in parts:
        write_images(root / "images" / part)
        (root / "labels" / part).mkdir(parents=True, exist_ok=True)
        lines: dict[str, list[str]] = {}
        for thing in THINGS:
            width, height = SIZES[thing.image]
            left, top, wide, high = thing.box
            numbers = ((left + wide / 2) / width, (top + high / 2) / height, wide / width, high / height)
            lines.setdefault(thing.image, []).append(f"{ids[thing.name]} {' '.join(map(str, numbers))}")
        for name, text in lines.items():
            (root / "labels" / part / name).with_suffix(".txt").write_text("\n".join(text) + "\n")
    file = root / "data.yaml"
    file.write_text("\n".join([f"names: {names}", *(f"{part}: images/{part}" for part in parts)]) + "\n")
    return file


def voc_xml(name: str, things: Sequence[Thing], size: tuple[int, int]) -> str:
    """Return the xml of an image: pixel numbers from 1, both ends included."""
    objects = ""
    for thing in things:
        left, top, width, height = thing.box
        corners = {"xmin": left + 1, "ymin": top + 1, "xmax": left + width, "ymax": top + height}
        box = "".join(f"<{key}>{value:g}</{key}>" for key, value in corners.items())
        objects += f"<object><name>{thing.name}</name><difficult>{int(thing.is_crowd)}</difficult><bndbox>{box}"
        objects += "</bndbox></object>"
    stated = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation><filename>{name}</filename>{stated}{objects}</annotation>"


def write_voc(folder: Path | str, things: Sequence[Thing] = THINGS) -> None:
    """Write JPEGImages/ and Annotations/."""
    root = Path(folder)
    write_images(root / "JPEGImages")
    (root / "Annotations").mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        own = [thing for thing in things if thing.image == name]
        (root / "Annotations" / name).with_suffix(".xml").write_text(voc_xml(name, own, size))


def write_metadata(folder: Path | str, key: str = "category") -> None:
    """Write images with metadata.jsonl, as ImageFolder of `datasets` reads it."""
    write_images(folder)
    rows = []
    for name in SIZES:
        own = [thing for thing in THINGS if thing.image == name]
        objects = {"bbox": [list(thing.box) for thing in own], key: [thing.name for thing in own]}
        rows.append(json.dumps({"file_name": name, "objects": objects}))
    Path(folder, "metadata.jsonl").write_text("\n".join(rows) + "\n")
