"""Read the boxes of Pascal VOC: an xml file for each image."""

import os
from pathlib import Path
from xml.etree import ElementTree

from accel_train.core.files import read_regular
from accel_train.core.format import format_count
from accel_train.data.images.annotations.records import (
    Annotated,
    BoxedImage,
    BoxRow,
    Faults,
    annotated,
    below_one_root,
    is_set,
    numbers,
    stated_size,
)
from accel_train.data.images.images import FileImages, list_files, list_images


def read_voc(path: Path, images_folder: Path | None = None) -> Annotated:
    """Return the images of a Pascal VOC folder or of a list in `ImageSets/Main`. Classes are sorted by name.

    In a folder, each xml file is an image; images without one are left out. Corners are pixel numbers from 1, both
    ends included, as in VOC's own data: left and top are lowered by 1. Difficult objects become crowds. The images are
    in `images_folder`. None: they are in JPEGImages/ or images/, or next to the xml files.

    Raises:
        ValueError: no xml files were found.
    """
    root = path if os.path.isdir(path) else path.parent.parent.parent
    folder = next((root / name for name in ("Annotations", "annotations") if os.path.isdir(root / name)), root)
    places = [root / name for name in ("JPEGImages", "images", "Images") if os.path.isdir(root / name)] or [folder]
    places = places if images_folder is None else [images_folder]
    faults = Faults()
    if os.path.isdir(path):
        files = [folder / name for name in list_files(folder)[1] if name.lower().endswith(".xml")]
    else:
        lines = [line.strip() for line in read_regular(path).decode("utf-8-sig").splitlines()]
        files = [_listed(folder, line) for line in lines if line]
    if not files:
        raise ValueError(f"{path}: no Pascal VOC annotations (xml files) in {folder}; name another folder")
    at = {os.path.splitext(name)[0]: place / name for place in places for name in list_images(place)}
    images, records = list[Path](), list[BoxedImage]()
    for file in files:
        tree = _xml(file, faults)
        if tree is None:
            continue
        named = (tree.findtext("filename") or "").replace("\\", "/").rpartition("/")[2]
        stem = os.path.splitext(file.relative_to(folder).as_posix())[0]
        image = at.get(stem) or next(
            (place / named for place in places if named and os.path.isfile(place / named)), None
        )
        if image is None:
            faults.files.append(f"{file}: its image {named or stem} is not in {places[0]}")
            continue
        images.append(image)
        size = stated_size(tree.findtext("size/width"), tree.findtext("size/height"))
        records.append(BoxedImage(str(file), _voc_objects(file, tree, faults), size))
    num_alone = len({*at.values()} - {*images}) if os.path.isdir(path) else 0
    notes = (f"{places[0]}: left out {format_count(num_alone, 'image')} without an xml file",) if num_alone else ()
    return annotated("Pascal VOC", path, FileImages(*below_one_root(images)), records, faults, "xyxy", notes=notes)


def _listed(folder: Path, line: str) -> Path:
    """Return the xml file of a line: a name, `NAME 1` as in VOC's lists of a class, or the file of the image."""
    name = line.split()[0]
    places = [folder / f"{each}.xml" for each in (line, name, os.path.splitext(line)[0], os.path.splitext(name)[0])]
    return next((place for place in places if os.path.isfile(place)), places[1])


def _xml(file: Path, faults: Faults) -> ElementTree.Element | None:
    try:
        tree = ElementTree.fromstring(read_regular(file))
    except OSError as error:
        faults.files.append(f"{file}: cannot be read ({error.strerror})")
    except ElementTree.ParseError as error:
        faults.files.append(f"{file}: not XML ({error})")
    else:
        if tree.tag == "annotation":
            return tree
        faults.files.append(f"{file}: begins with <{tree.tag}>; a file of Pascal VOC begins with <annotation>")
    return None


def _voc_objects(file: Path, tree: ElementTree.Element, faults: Faults) -> list[BoxRow]:
    objects = []
    for number, each in enumerate(tree.iter("object"), start=1):
        name = (each.findtext("name") or "").strip()
        box = numbers([each.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")], 4)
        where = f"{file}, object {number}"
        if not name:
            faults.files.append(f"{where}: has no name")
        elif box is None:
            faults.boxes.append(f"{where} ({name}): its bndbox has no xmin, ymin, xmax and ymax")
        else:
            corners = (box[0] - 1, box[1] - 1, box[2], box[3])
            objects.append(BoxRow(where, corners, name, is_set(each.findtext("difficult"))))
    return objects
