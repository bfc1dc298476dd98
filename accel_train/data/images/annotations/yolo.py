"""Read the boxes of YOLO: a data.yaml, folders of images, and a text file of boxes for each image."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_train.core.files import read_regular
from accel_train.core.format import format_count, is_whole
from accel_train.core.state import JsonRecord
from accel_train.data.images.annotations.records import (
    Annotated,
    BoxedImage,
    BoxRow,
    Faults,
    annotated,
    below_one_root,
    box_row,
    numbers,
)
from accel_train.data.images.images import FileImages, list_images
from accel_train.recipe.yaml_core import parse_yaml

_YOLO_NUMBERS = 5
CLASSES_FILES = ("classes.txt", "obj.names")


def read_yolo(path: Path, part: str, order: str) -> Annotated:
    """Return the images of one part (`train`, `val` or `test`) of a YOLO data.yaml, or of a folder of images.

    The labels of `images/a.jpg` are in `labels/a.txt`, or next to the image. Without that file, the image has no boxes.
    `order` names the order of a box's numbers: cxcywh in YOLO.

    Raises:
        ValueError: the file has no class names or does not name the part, or a folder is missing or empty.
    """
    if os.path.isdir(path):
        names, places, root = _yolo_names_near(path), [path], path
    else:
        names, places, root = _yolo_yaml(path, part)
    faults, files, rows, notes = Faults(), list[Path](), list[BoxedImage](), list[str]()
    num_labels, num_alone = 0, 0
    for place in places:
        if os.path.isdir(place):
            found = [place / name for name in list_images(place)]
        elif os.path.isfile(place):
            found = _listed_images(place, root)
        else:
            raise ValueError(f"{path}: {part} names {place}, which does not exist; correct the path")
        if not found:
            raise ValueError(f"{path}: {place} holds no images; add some, or correct the path")
        for image in found:
            label = label_file(image)
            if os.path.isfile(label):
                num_labels += 1
                boxes = _yolo_rows(label, faults, order)
            else:
                num_alone, boxes = num_alone + 1, []
            files.append(image)
            rows.append(BoxedImage(str(label), boxes, is_upright=True, is_relative=True))
        if os.path.isdir(place):
            notes += _labels_without_image(found)
    if not num_labels and not os.path.exists(files[0]):
        raise ValueError(f"{path}: {part} lists {files[0]}, which does not exist; correct the list")
    if not num_labels:
        raise ValueError(f"{files[0]}: no image has a label file; expected {label_file(files[0])}")
    if num_alone:
        notes.append(f"{format_count(num_alone, 'image')} without a label file, and so without boxes")
    if part == "train" and os.path.isfile(path):
        held = yolo_places(path, yolo_settings(path) or {}, "val")
        notes += [f"{path}: val names {place}, which does not exist" for place in held if not os.path.exists(place)]
    images = FileImages(*below_one_root(files))
    return annotated("YOLO", path, images, rows, faults, order, names, notes=tuple(notes))


def yolo_settings(path: Path) -> JsonRecord | None:
    """Return the content of a YOLO data.yaml, or None if a file is something else."""
    try:
        content, _ = parse_yaml(read_regular(path).decode("utf-8-sig"), str(path))
    except (OSError, ValueError):
        return None
    has_parts = isinstance(content, dict) and "names" in content and {"train", "val", "test"} & {*content}
    return content if has_parts else None


def yolo_places(path: Path, settings: Mapping[str, Any], part: str) -> list[Path]:
    """Return the folders or lists that a data.yaml names for a part; empty if it names none.

    Raises:
        ValueError: the part is neither a path nor a list of paths.
    """
    named = settings.get(part)
    named = [named] if isinstance(named, str) else [] if named is None else named
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(
            f"{path}: {part} is {settings[part]!r}; write a folder, a text file of images, or a list of them"
        )
    root, places = yolo_root(path, settings), []
    for name in named:
        place = root / str(name)
        # Roboflow writes ../train/images for the folder train/images next to the file.
        inside = root / str(name).removeprefix("../")
        places.append(place if os.path.exists(place) or not os.path.exists(inside) else inside)
    return places


def yolo_root(path: Path, settings: Mapping[str, Any]) -> Path:
    """Return the folder to which the paths of a data.yaml are relative.

    It is `path` in the file, seen from the file or from the working directory, or the folder of the file.
    """
    stated = settings.get("path")
    if not isinstance(stated, str):
        return path.parent
    named = [settings.get(part) for part in ("train", "val", "test")]
    names = [str(name) for each in named for name in (each if isinstance(each, list) else [each]) if name is not None]
    # Downloaded files name the folder of another machine; then the folder of the file itself is meant.
    places = (path.parent / Path(stated).expanduser(), Path(stated).expanduser())
    return next((each for each in places if any(os.path.exists(each / name) for name in names)), path.parent)


def _yolo_yaml(path: Path, part: str) -> tuple[list[str], list[Path], Path]:
    """Return the class names of a data.yaml, the folders or lists of a part, and the folder of its paths."""
    settings = yolo_settings(path)
    if settings is None:
        raise ValueError(f"{path}: is not a YOLO file; it has names, and train or val with folders of images")
    names = settings["names"]
    if isinstance(names, dict):
        keys = sorted(names, key=lambda key: int(key) if is_whole(str(key)) else -1)
        if [str(key) for key in keys] != [str(number) for number in range(len(keys))]:
            raise ValueError(f"{path}: names has the numbers {', '.join(map(str, keys[:10]))}, not 0, 1, 2, ...")
        names = [names[key] for key in keys]
    if not isinstance(names, list) or not names or len(set(map(str, names))) != len(names):
        raise ValueError(f"{path}: names is not a list of different class names; correct it")
    if settings.get("nc") not in (None, len(names)):
        raise ValueError(
            f"{path}: nc={settings['nc']}, and names has {format_count(len(names), 'class', 'classes')}; correct one "
            "of them"
        )
    places = yolo_places(path, settings, part)
    if not places:
        raise ValueError(f"{path}: does not name {part}; add a folder of images")
    return [str(name) for name in names], places, yolo_root(path, settings)


def _yolo_names_near(folder: Path) -> list[str] | None:
    """Return the class names for a folder of images: of a data.yaml or classes.txt in a folder above it, or None."""
    for above in (folder, *folder.parents[:3]):
        for file in sorted([*above.glob("*.yaml"), *above.glob("*.yml")]):
            if (settings := yolo_settings(file)) is not None:
                return _yolo_yaml(file, next(part for part in ("train", "val", "test") if settings.get(part)))[0]
        for name in CLASSES_FILES:
            for file in (above / name, above / "labels" / name):
                if os.path.isfile(file):
                    return _class_lines(file)
    return None


def _class_lines(file: Path) -> list[str]:
    """Return the class names of a file with a name on each line.

    Raises:
        ValueError: a line before the last name is empty, or a name occurs twice.
    """
    names = [line.strip() for line in read_regular(file).decode("utf-8-sig").rstrip().splitlines()]
    if not all(names) or len({*names}) < len(names):
        raise ValueError(f"{file}: an empty line, or a name that occurs twice; write a different name on each line")
    return names


def _listed_images(path: Path, root: Path) -> list[Path]:
    """Return the images that a text file lists: relative to the file, to `root`, or to the working directory."""
    lines = [line.strip().replace("\\", "/") for line in read_regular(path).decode("utf-8-sig").splitlines()]
    places = ([each / line for each in (path.parent, root, Path())] for line in lines if line)
    return [next((place for place in each if os.path.isfile(place)), each[0]) for each in places]


def _labels_without_image(images: Sequence[Path]) -> list[str]:
    """Return a note on the files in folders `labels` that belong to none of the images."""
    labels = {label_file(image) for image in images}
    folders = {label.parent for label in labels} - {image.parent for image in images}
    texts = {file for folder in folders for file in folder.glob("*.txt") if file.name not in CLASSES_FILES}
    alone = sorted(texts - labels)
    return [f"{format_count(len(alone), 'label file')} without an image, first: {alone[0]}"] if alone else []


def label_file(image: Path) -> Path:
    """Return the label file of an image: the last folder `images` of its path becomes `labels`."""
    parts = list(image.parts)
    for number in range(len(parts) - 2, -1, -1):
        if parts[number] == "images":
            parts[number] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _yolo_rows(path: Path, faults: Faults, order: str) -> list[BoxRow]:
    rows, seen = list[BoxRow](), dict[str, int]()
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        faults.files.append(f"{path}: cannot be read as text ({error})")
        return []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        where = f"{path}, line {number}"
        values = numbers(fields, len(fields))
        if len(fields) > _YOLO_NUMBERS:
            faults.files.append(f"{where}: {len(fields)} numbers are a polygon or a rotated box, not `class x y w h`")
        elif values is None or len(fields) < _YOLO_NUMBERS:
            faults.files.append(f"{where}: {line.strip()[:80]!r} is not `class x y w h`")
        elif values[0] % 1:
            faults.files.append(f"{where}: the class {fields[0][:20]} is not a whole number")
        elif " ".join(fields) in seen:
            faults.boxes.append(f"{where}: repeats line {seen[' '.join(fields)]}")
        else:
            seen[" ".join(fields)] = number
            rows.append(box_row(where, values[1:], int(values[0]), order))
    return rows
