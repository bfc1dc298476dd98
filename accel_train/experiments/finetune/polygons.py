"""Read the polygons of labelme and COCO exports, and draw them as masks into folders of images and masks."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from accel_train.core.files import read_regular, sha256
from accel_train.core.format import format_count
from accel_train.core.json_io import parse_json
from accel_train.data.images.annotations.records import numbers
from accel_train.data.images.decoding import open_image
from accel_train.data.images.images import evenly_spaced, in_threads, list_files, text_digest
from accel_train.data.images.pairs import CLASSES_FILE
from accel_train.experiments.finetune.recipe import Asked

_BACKGROUND, _IGNORED = ("background", "_background_"), "__ignore__"
"""labelme's names for class 0, and for pixels that are not counted."""
_NUM_LOOKED_AT = 200
_NO_BOXES = "Masks need polygons. For the boxes of COCO, use --task object-detection"


class Drawing(NamedTuple):
    """An image and its polygons (class name and corners) in drawing order. `size` is stated by the annotations."""

    where: str
    image: Path
    size: tuple[Any, Any]
    shapes: Sequence[tuple[str, Sequence[tuple[float, float]]]]


class Polygons(NamedTuple):
    """An export of polygons, with class names in the order of their numbers."""

    drawings: Sequence[Drawing]
    names: Sequence[str]
    digest: str
    note: str

    def write(self, folder: Path) -> None:
        """Write links to the images, the masks, and the class names. Raises ValueError for a wrong size or corner."""
        ids = {_IGNORED: 255, **dict.fromkeys(_BACKGROUND, 0)} | {name: n for n, name in enumerate(self.names)}
        images = [os.path.abspath(drawing.image) for drawing in self.drawings]
        # Folders train/ and val/ stay.
        root = os.path.commonpath(map(os.path.dirname, images))
        drawings = {os.path.relpath(image, root): each for image, each in zip(images, self.drawings)}
        places = {name: drawing.image for name, drawing in drawings.items()}
        write_masks(folder, places, lambda name: _mask(drawings[name], ids), self.names)


def write_masks(
    folder: Path, images: Mapping[str, Path], draw: Callable[[str], Image.Image], names: Sequence[str]
) -> None:
    """Write links to images by name, the masks that `draw` returns, and the class names."""

    def write(name: str) -> None:
        link, mask = folder / "images" / name, (folder / "masks" / name).with_suffix(".png")
        for path in (link, mask):
            path.parent.mkdir(parents=True, exist_ok=True)
        draw(name).save(mask)
        link.symlink_to(images[name].resolve())

    in_threads(write, images)
    (folder / "masks" / CLASSES_FILE).write_text(json.dumps(names))


def find_polygons(asked: Asked, place: str) -> Polygons | None:
    """Return the polygons of labelme or COCO at a path, or None without annotations, or if masks lie there.

    Raises:
        ValueError: annotations are not polygons, or have no image. The message names the file.
    """
    path = root = Path(place).expanduser()
    files = [path / name for name in list_files(path)[1] if name.lower().endswith(".json")]
    if os.path.isfile(path):
        files, root = [path], path.parent.parent if path.parent.name.lower() == "annotations" else path.parent
    is_asked = asked.allows("semantic-segmentation")
    if not is_asked or not any(_content(files[index]) for index in evenly_spaced(len(files), _NUM_LOOKED_AT)):
        return None
    from accel_train.experiments.finetune.images import find_pairs  # imports torch

    images, others = list_files(root)
    if not images or (os.path.isdir(path) and find_pairs(place) is not None):
        return None
    below, labels, drawings = defaultdict(list), dict[Any, str](), list[Drawing]()
    for name in images:
        below[PurePosixPath(name).name].append(root / name)
    found = {file: content for file in files if (content := _content(file))}
    for file, content in found.items():
        try:
            drawings += (_labelme if "shapes" in content else _coco)(file, content, below, labels)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not as labelme or COCO writes it ({error!r}). Export it again") from error
    shapes = [name for drawing in drawings for name, _ in drawing.shapes]
    if not shapes:
        raise ValueError(f"{next(iter(found))} has no polygons (labelme, COCO), or boxes alone. {_NO_BOXES}")
    twice = Counter(drawing.image.with_suffix("") for drawing in drawings).most_common(1)[0]
    if twice[1] > 1:
        where = " and ".join(each.where for each in drawings if each.image.with_suffix("") == twice[0])
        raise ValueError(f"{where} annotate one image, or two that differ in the suffix. Name one file, or rename")
    ordered = dict.fromkeys(labels[key] for key in sorted(labels, key=lambda key: (isinstance(key, str), key)))
    names = ["background", *(name for name in ordered if name not in (*_BACKGROUND, _IGNORED))]
    stamps = (f"{each.image} {each.image.stat().st_size}" for each in drawings)
    return Polygons(
        drawings,
        names,
        text_digest([*(f"{file} {sha256(file)}" for file in found), *stamps]),
        f"{format_count(len(shapes), 'polygon')} on {format_count(len(drawings), 'image')} are drawn as masks, later "
        f"ones over earlier ones; {shapes.count(_IGNORED)} of them (crowds, {_IGNORED}) are not counted; other pixels "
        f"are background; not used: {format_count(len(images) - len(drawings), 'image')}, "
        f"{format_count(len(others) - len(found), 'other file')}; the model learns the class of each pixel; for "
        "the boxes of COCO: --task object-detection",
    )


def _content(file: Path) -> dict[str, Any] | None:
    """Return the content of an annotation file without labelme's copy of the image, or None for other JSON."""
    try:
        content = parse_json(read_regular(file).decode("utf-8-sig"))
        content.pop("imageData", None)
        shapes = content["annotations"] if {"images", "annotations"} <= {*content} else ()
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    # Boxes alone are for object detection.
    has_polygons = isinstance(shapes, list) and any(
        isinstance(each, dict) and each.get("segmentation") for each in shapes
    )
    return content if isinstance(content.get("shapes"), list) or has_polygons else None


def _labelme(file: Path, content: Any, below: Mapping[str, Any], labels: dict[Any, str]) -> Iterator[Drawing]:
    shapes = [(_label(shape["label"]), [_point(each) for each in shape["points"]]) for shape in content["shapes"]]
    for shape, (name, points) in zip(content["shapes"], shapes):
        kind = shape.get("shape_type") or "polygon"
        if kind != "polygon" or len(points) < 3:
            raise ValueError(f"{file}: {name!r} is a {kind} of {len(points)} points (labelme). {_NO_BOXES}")
        labels[name] = name
    image = _image(file, content.get("imagePath") or f"{file.stem}.jpg", below)
    yield Drawing(str(file), image, (content.get("imageWidth"), content.get("imageHeight")), shapes)


def _coco(file: Path, content: Any, below: Mapping[str, Any], labels: dict[Any, str]) -> Iterator[Drawing]:
    names = {each["id"]: _label(each["name"]) for each in content["categories"]}
    if any(labels.get(key, name) != name for key, name in names.items()):
        raise ValueError(f"{file}: its categories differ from the other files'. Export all with one list")
    labels |= names
    shapes: dict[Any, list[Any]] = {each["id"]: [] for each in content["images"]}
    # Pixels in the box of a crowd are not counted, unless a polygon covers them.
    for each in sorted(content["annotations"], key=lambda each: not each.get("iscrowd")):
        name, parts = names[each["category_id"]], each.get("segmentation")
        if each.get("iscrowd"):
            left, top, width, height = _numbers(each["bbox"], 4)
            right, bottom = left + width, top + height
            name, parts = _IGNORED, [[left, top, right, top, right, bottom, left, bottom]]
        fault = (
            "a box without a polygon" if not parts else "run-length encoded (RLE)" if isinstance(parts, dict) else ""
        )
        if fault or any(len(part) < 6 or len(part) % 2 for part in parts):
            raise ValueError(f"{file}: annotation {each.get('id')} is {fault or 'not a polygon'} (COCO). {_NO_BOXES}")
        corners = [_numbers(part, len(part)) for part in parts]
        shapes[each["image_id"]] += [(name, list(zip(part[::2], part[1::2]))) for part in corners]
    for each in content["images"]:
        name, size = each["file_name"], (each.get("width"), each.get("height"))
        yield Drawing(f"{file} ({name})", _image(file, name, below), size, shapes[each["id"]])


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    found = numbers(values, count)
    if found is None:
        raise TypeError(f"{values!r:.60} are not {count} numbers")
    return found


def _point(values: Any) -> tuple[float, float]:
    x, y = _numbers(values, 2)
    return x, y


def _label(name: Any) -> str:
    if not isinstance(name, str | int):
        raise TypeError(f"{name!r:.60} is not the name of a class")
    return str(name)


def _image(file: Path, name: str, below: Mapping[str, Any]) -> Path:
    """Return the image that an annotation file names, relative to the file, or the only one with its name."""
    name = name.replace("\\", "/")
    near = [folder / name for folder in (file.parent, file.parent.parent) if os.path.isfile(folder / name)]
    named = near[:1] or below.get(PurePosixPath(name).name, [])
    named = [path for path in named if path.as_posix().endswith(f"/{name}")] or named
    # instances_train2017.json names images in train2017/.
    named = [path for path in named if path.parent.name in file.stem] or named
    if len(named) != 1:
        raise ValueError(f"{file}: {len(named) or 'no'} images {name} found. Put each image next to the file")
    return Path(os.path.normpath(named[0]))


def _mask(drawing: Drawing, ids: Mapping[str, int]) -> Image.Image:
    """Return the mask of an image. Raises ValueError if the image has another size, or a corner is outside."""
    width, height = open_image(drawing.image, str(drawing.image)).size
    mask, fault = Image.new("L", (width, height)), ""
    if any(stated not in (None, edge) for stated, edge in zip(drawing.size, mask.size)):
        fault = "states {} x {} pixels".format(*drawing.size)
    for name, points in drawing.shapes:
        outside = [(x, y) for x, y in points if not (-1 <= x <= width + 1 and -1 <= y <= height + 1)]
        fault = fault or (
            f"a polygon of {name!r} has a corner at ({outside[0][0]:g}, {outside[0][1]:g})" if outside else ""
        )
        if not fault:
            ImageDraw.Draw(mask).polygon(points, fill=ids[name])
    if fault:
        raise ValueError(f"{drawing.where}: {fault}, and {drawing.image} has {width} x {height}. Annotate this image")
    return mask
