"""Masks from polygons (labelme, COCO), or from masks in which each class has a color."""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from accel_train.core.files import read_regular, sha256
from accel_train.core.format import format_count
from accel_train.core.json_io import parse_json
from accel_train.core.state import JsonRecord
from accel_train.data.encoding import read_text
from accel_train.data.images.annotations.records import numbers
from accel_train.data.images.decoding import open_image
from accel_train.data.images.images import FileImages, evenly_spaced, in_threads, list_files, list_images, text_digest
from accel_train.data.images.pairs import CLASSES_FILE, pair_of_folders
from accel_train.data.parts import folders_beside
from accel_train.experiments.finetune.columns import objects
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
    shapes: Sequence[tuple[str, Sequence[tuple[float, ...]]]]


class Masks(NamedTuple):
    """Masks to write: the digest of what they are made from, words about them, and what writes them into a folder.

    `write` raises ValueError for a wrong size, corner, or color.
    """

    digest: str
    note: str
    write: Callable[[Path], None]


def _write_masks(
    images: Mapping[str, Path], draw: Callable[[str], Image.Image], names: Sequence[str], folder: Path
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


def find_polygons(asked: Asked, place: str) -> Masks | None:
    """Return the polygons of labelme or COCO at a path, or None without annotations, or if masks lie there.

    Raises:
        ValueError: annotations are not polygons, or have no image. The message names the file.
    """
    path = root = Path(place).expanduser()
    files = [path / name for name in list_files(path)[1] if name.lower().endswith(".json")]
    if os.path.isfile(path):
        files, root = [path], path.parent.parent if path.parent.name.lower() == "annotations" else path.parent
    looked_at = (files[index] for index in evenly_spaced(len(files), _NUM_LOOKED_AT))
    if not asked.allows("semantic-segmentation") or not any(map(_content, looked_at)):
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
    ids = {_IGNORED: 255, **dict.fromkeys(_BACKGROUND, 0)} | {name: number for number, name in enumerate(names)}
    # Folders train/ and val/ stay.
    top = os.path.commonpath([os.path.dirname(os.path.abspath(each.image)) for each in drawings])
    by_name = {os.path.relpath(each.image, top): each for each in drawings}
    stamps = (f"{each.image} {each.image.stat().st_size}" for each in drawings)
    return Masks(
        text_digest([*(f"{file} {sha256(file)}" for file in found), *stamps]),
        f"{format_count(len(shapes), 'polygon')} on {format_count(len(drawings), 'image')} are drawn as masks, later "
        f"ones over earlier ones; {shapes.count(_IGNORED)} of them (crowds, {_IGNORED}) are not counted; other pixels "
        f"are background; not used: {format_count(len(images) - len(drawings), 'image')}, "
        f"{format_count(len(others) - len(found), 'other file')}; the model learns the class of each pixel; for "
        "the boxes of COCO: --task object-detection",
        partial(
            _write_masks,
            {name: each.image for name, each in by_name.items()},
            lambda name: _mask(by_name[name], ids),
            names,
        ),
    )


def _content(file: Path) -> JsonRecord | None:
    """Return the content of an annotation file without labelme's copy of the image, or None for other JSON."""
    try:
        content = parse_json(read_regular(file).decode("utf-8-sig"))
        content.pop("imageData", None)
        shapes = content["annotations"] if {"images", "annotations"} <= {*content} else ()
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    # Boxes alone are for object detection.
    has_polygons = any(each.get("segmentation") for each in objects(shapes))
    return content if isinstance(content.get("shapes"), list) or has_polygons else None


def _labelme(file: Path, content: Any, below: Mapping[str, Any], labels: dict[Any, str]) -> Iterator[Drawing]:
    shapes = [(_label(shape["label"]), [_numbers(each, 2) for each in shape["points"]]) for shape in content["shapes"]]
    for shape, (name, points) in zip(content["shapes"], shapes):
        kind = shape.get("shape_type") or "polygon"
        if kind != "polygon" or len(points) < 3:
            raise ValueError(
                f"{file}: {name!r} is a {kind} of {format_count(len(points), 'point')} (labelme). {_NO_BOXES}"
            )
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


_MOST_COLORS, _MOST_CLASSES, _MOST_BYTES = 64, 255, 1 << 20
_LIST = re.compile(r".*(?:class|label|colou?r|palette).*\.(?:csv|txt)")
# `Car,64,0,128` (class_dict.csv), `Car:64,0,128::` (labelmap.txt of CVAT), or `64 0 128 Car` (label_colors.txt).
_COLOR = re.compile(r"(?<![^\s,;:])(\d+)[\s,;]+(\d+)[\s,;]+(\d+)(?![^\s,;:]|[\s,;:]+\d)")
_NOT_COUNTED = re.compile(r"[\W_]*(?:void|unlabell?ed|ignored?)[\W_]*", re.IGNORECASE)


def _named_by_parts(masks: Sequence[Path], source: Path) -> dict[int, str]:
    """Return a name for each color. Raises ValueError for many colors, or colors that only borders have."""

    def look(mask: Path) -> tuple[set[int], set[int]]:
        colors = _colors_in(mask)
        one, right, below, both = colors[:-1, :-1], colors[:-1, 1:], colors[1:, :-1], colors[1:, 1:]
        filled = one[(one == right) & (one == below) & (one == both)]
        return {*np.unique(colors).tolist()}, {*np.unique(filled).tolist()}

    found, filled = (set[int]().union(*side) for side in zip(*in_threads(look, masks)))
    if len(found) > _MOST_COLORS or found > filled:
        raise ValueError(
            f"{source.parent}: masks have {len(found)} colors (limit: {_MOST_COLORS}), of which "
            f"{len(found - filled)} never fill 2 x 2 pixels. Smoothing and JPEG make such colors. Export the masks "
            f"again as PNG, without smoothing, or list the classes in {source}: lines `name,r,g,b`"
        )
    return {color: f"color_{_shown(color, '_')}" for color in sorted(found)}


def find_palette(asked: Asked, place: str) -> Masks | None:
    """Return the color masks of a folder, or None without. Raises ValueError for unclear pairs or lists of classes."""
    path = Path(place).expanduser()
    if not asked.allows("semantic-segmentation") or not path.is_dir() or not list_images(path):
        return None
    from accel_train.experiments.finetune.images import find_pairs, not_used

    if (pairs := find_pairs(place)) is None:
        return None
    from accel_train.tasks.semantic_segmentation.data import masked_pool  # imports torch

    parts = {"train": pairs.train}
    if pairs.eval and "data.eval" not in asked.given:
        parts["val"] = pairs.eval
    test = folders_beside(Path(pairs.train).expanduser()).get("test")
    if pairs.train != place and test is not None and pair_of_folders(test):
        parts["test"] = str(test)
    files, stamps, roots = dict[str, tuple[Path, Path]](), list[str](), list[Path]()
    for part, source in parts.items():
        pool = masked_pool(source, asked.data, place)
        images, masks = pool.images, pool.masks
        if not isinstance(images, FileImages) or not isinstance(masks, FileImages) or pool.names is not None:
            return None
        looked_at = (masks[n] for n in evenly_spaced(len(masks), _NUM_LOOKED_AT))
        colored = (np.ptp(np.asarray(mask)[..., :3], 2).any() for mask in looked_at if mask.mode in ("RGB", "RGBA"))
        # Shades of gray are class numbers.
        if part == "train" and not any(colored):
            return None
        roots += [images.root, masks.root]
        stamps += map(str, in_threads(masks.inspect, range(len(masks))))
        for n, name in enumerate(images.names):
            files[f"{part}/{name}" if len(parts) > 1 else name] = images.content(n), masks.content(n)
    # Lists of images name absolute paths.
    top = Path(os.path.commonpath([path.absolute() if roots[0].is_absolute() else path, *roots]))
    places = sorted({each for root in roots for each in (top, root.parent, root)})
    lists = [
        file
        for each in places
        for file in sorted(each.iterdir())
        if _LIST.fullmatch(file.name.lower()) and file.is_file() and file.stat().st_size <= _MOST_BYTES
    ]
    found = {file: colors for file in lists if (colors := _named_colors(file, asked))}
    file, colors = next(iter(found.items()), (top / "class_dict.csv", {}))
    if any(other != colors for other in found.values()):
        raise ValueError(f"{' and '.join(map(str, found))} list different classes. Remove all but one")
    note = f"each color of the masks is a class, without a name in {file} (lines `name,r,g,b`; void: not counted)"
    if colors:
        ignored = ", ".join(filter(_NOT_COUNTED.fullmatch, colors.values())) or "nothing"
        note = f"colors of the masks are classes by {file}; not counted: {ignored}"
    stamps += [repr(colors), str(asked.data.ignore_index), *(f"{name} {each}" for name, each in files.items())]
    unused = ", ".join(not_used(top, [*roots, file])) or "nothing"
    write = partial(_write_classes, files, colors, file, asked.data.ignore_index)
    return Masks(text_digest(stamps), f"{note}; not used: {unused}", write)


def _write_classes(
    files: Mapping[str, tuple[Path, Path]], colors: Mapping[int, str], source: Path, ignore_index: int, folder: Path
) -> None:
    """Write images and masks. `colors` are class names by color, 0xRRGGBB, from the list `source`, or nothing."""
    colors = colors or _named_by_parts([mask for _, mask in files.values()], source)
    names = [name for name in dict.fromkeys(colors.values()) if not _NOT_COUNTED.fullmatch(name)]
    if not 0 < len(names) <= ignore_index:
        raise ValueError(f"{source}: {len(names)} classes. Name 1 to {ignore_index} (data.ignore_index)")
    table = np.full(1 << 24, ignore_index, np.uint8)
    table[[*colors]] = [names.index(name) if name in names else ignore_index for name in colors.values()]

    def draw(name: str) -> Image.Image:
        image, mask = files[name]
        pixels, size = _colors_in(mask), open_image(image, str(image)).size
        if pixels.shape != size[::-1]:
            sizes = "{1} x {0} pixels, and {2} has {3} x {4}".format(*pixels.shape, image, *size)
            raise ValueError(f"{mask} has {sizes}. Export the mask again, in the size of the image")
        if others := sorted({*np.unique(pixels).tolist()} - {*colors}):
            fault = f"{mask}: {len(others)} of its colors ({_shown(others[0])}) are not among the {len(colors)} of"
            raise ValueError(f"{fault} {source}. Add them, or export the masks without smoothing, as PNG")
        return Image.fromarray(table[pixels])

    _write_masks({name: image for name, (image, _) in files.items()}, draw, names, folder)


def _named_colors(file: Path, asked: Asked) -> dict[int, str]:
    """Return class names by color from a list, or nothing from another file. Raises ValueError for an unclear line."""
    lines = [line.strip() for line in read_text(file, asked.data).splitlines() if line.strip() and line[0] != "#"]
    if lines and not re.search(r"\d|\bb(?:lue)?\b.*\br(?:ed)?\b", lines[0].lower()):
        del lines[0]
    colors = dict[int, str]()
    for line in lines if any(map(_COLOR.search, lines)) else ():
        before, *rgb, after = _COLOR.split(line, maxsplit=1) if _COLOR.search(line) else ("", "999", "")
        name = (re.split(r"[,;:\t]", before.rstrip(" ,;:\t"))[-1] or after.lstrip(" ,;:\t")).strip("\"' ")
        is_color = max(map(int, rgb)) < 256 and re.search(r"[^\W\d]", name) is not None
        if not is_color or colors.setdefault(int.from_bytes(bytes(map(int, rgb))), name) != name:
            fault = f"{file}: {line!r} is not `name,r,g,b`, or its color has two names"
            raise ValueError(f"{fault}. Repair the line, or rename a file that does not list the colors of classes")
    return colors


def _colors_in(path: Path) -> NDArray[np.int64]:
    """Return the color of each pixel, 0xRRGGBB, (H, W). Raises ValueError if the mask cannot have exact colors."""
    mask = open_image(path, str(path))
    colors = np.asarray(np.asarray(mask.convert("RGB")).astype(np.int64) @ (1 << 16, 1 << 8, 1))
    is_opaque = mask.mode == "RGB" or (mask.mode == "RGBA" and mask.getchannel("A").getextrema() == (255, 255))
    if mask.format in ("JPEG", "MPO") or not is_opaque or len(np.unique(colors)) > _MOST_CLASSES:
        fault = f"{path} ({mask.format}, mode {mask.mode}, {len(np.unique(colors))} colors)"
        rule = f"color masks have exact, opaque RGB colors, at most {_MOST_CLASSES}; JPEG and smoothing make others"
        raise ValueError(f"{fault}: {rule}. Write the masks again as RGB PNG, from the original")
    return colors


def _shown(color: int, between: str = ",") -> str:
    return between.join(map(str, int(color).to_bytes(3)))
