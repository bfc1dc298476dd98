"""Images: folders by class or with masks, tables that name images, and the sizes and colors of the images."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from accel_train.core.errors import DataError
from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.data.images.annotations.folders import LAYOUTS
from accel_train.data.images.decoding import open_header
from accel_train.data.images.images import (
    ImagePool,
    Images,
    RowImages,
    Target,
    evenly_spaced,
    in_threads,
    list_files,
    list_images,
)
from accel_train.data.images.labelled import eval_beside_train, parts_of_classes
from accel_train.data.images.masks import mask_values
from accel_train.data.images.misread import NO_TASK, medium_of, refuse_annotations
from accel_train.data.images.pairs import BESIDE, LISTED_SUFFIXES, lists_pairs, pair_of_folders, pairs_below
from accel_train.data.images.pools import read_pools
from accel_train.data.images.tables import find_images
from accel_train.data.parts import Part, are_parts, part_of, pick
from accel_train.experiments.finetune.columns import Column, Table, read_table
from accel_train.experiments.finetune.recipe import Asked, Found, places_of, refuse_columns
from accel_train.experiments.finetune.tree import Paths, Tree
from accel_train.experiments.finetune.values.labels import recognise_label

_NUM_LOOKED_AT = 200
"""Evenly spaced images whose headers are read for sizes and colors."""
_MASKS_LOOKED_AT = 2_000
_VOC = ("JPEGImages", "SegmentationClass")
_MOST_NUMBERS = 200
"""Maximum different numbers in masks. More indicate photos, or masks that were resized with smoothing."""
_GREY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "I;16B", "F"))


def lie_in_classes(folder: Path, names: Sequence[str]) -> bool:
    """Return whether images lie in two or more folders that may be classes: CLASS/*.jpg or train/CLASS/*.jpg."""
    _, inner = _in_classes(folder, names)
    classes = {name.split("/", 1)[0] for name in inner}
    return all("/" in name for name in inner) and len(classes) > 1 and not are_parts(classes)


def _in_classes(folder: Path, names: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the folder of the classes, and the `names` that lie there, relative to it."""
    root = parts_of_classes(folder).get("train", folder)
    begin = "" if root == folder else f"{root.relative_to(folder).as_posix()}/"
    return root, [name.removeprefix(begin) for name in names if name.startswith(begin)]


def recognise_classes(asked: Asked, folder: Path, tables: Paths) -> Found:
    """Return the classes of a folder with CLASS/*.jpg or train/CLASS/*.jpg. `tables` in it do not name the images.

    Raises:
        ValueError: images lie outside of class folders, or there is one class. The message shows the right layout.
    """
    refuse_columns(asked, folder, "images")
    images, others = list_files(folder)
    if asked.data.label_names is None:
        refuse_annotations(folder, images, others)
    root, names = _in_classes(folder, images)
    num_others = len(_in_classes(folder, others)[1])
    loose = [name for name in names if "/" not in name]
    if loose:
        raise ValueError(
            f"{folder}: {root / loose[0]} is not in a class folder. For classes, put each image into {root}/CLASS/. "
            f"For segmentation, put images into {root}/images/ and masks with the same names into "
            f"{root}/masks/{_tables_there(tables)}"
        )
    classes = sorted({name.split("/", 1)[0] for name in names})
    if are_parts(classes):
        one = next((name for name in classes if part_of(name) != "test"), classes[0])
        raise ValueError(
            f"{root}: {', '.join(classes)} are parts of the data by their names, not classes. Put the images to train "
            f"on into {root}/train/CLASS/, or name one folder: accel-train finetune {quote(str(root / one))}"
        )
    # This raises for empty class folders, and names them.
    pool = read_pools(
        asked.path if root is folder else str(root),
        asked.data,
        asked.path,
        Target(asked.data.label_column, is_mask=False),
    )
    counts = Counter(map(str, pool.labels))
    if len(counts) < 2:
        raise ValueError(
            f"{root} has only the class folder {next(iter(counts), 'none')!r}, "
            f"and a classifier needs two{_tables_there(tables)}"
        )
    shown = ", ".join([*counts][:8]) + (", ..." if len(counts) > 8 else "")
    _, held, notes = eval_beside_train(asked.data)
    used = [root / name for name in classes] + [Path(name) for name in held or ()]
    return Found(
        "image-classification",
        f"images in {len(counts)} folders, one for each class",
        f"{folder}: {format_count(len(names), 'image')} in {len(counts)} classes ({shown})",
        num_samples=len(names),
        settings={"data.train": Choice(asked.path)},
        counts=counts,
        unused=not_used(folder, used, num_others - sum(entry.is_file() for entry in root.glob("[!.]*"))),
        notes=notes,
        **sizes_of(pool.images),
    )


def _tables_there(tables: Paths) -> str:
    """Return a hint about tables next to the images."""
    if not tables:
        return ""
    names = ", ".join(map(str, tables[:3]))
    return f". No column of {names} names these images. A table needs a column of file names relative to the table"


def not_used(root: Path, used: Paths, num_others: int = 0) -> tuple[str, ...]:
    """Return the unused files and folders of `root`. `num_others` lie in used folders."""
    left = [
        entry.name + "/" * entry.is_dir()
        for entry in sorted(root.iterdir())
        if not entry.name.startswith(".") and not any(entry == path or entry in path.parents for path in used)
    ]
    shown = [*left[:6], *([f"{len(left) - 6} more"] if len(left) > 6 else [])]
    within = [f"{format_count(num_others, 'other file')} in class folders"] if num_others else []
    return (*shown, *within)


class Pairs(NamedTuple):
    """The places of images with masks."""

    train: str
    eval: str | None
    why: str


def find_pairs(name: str) -> Pairs | None:
    """Return the places of images and masks below a folder, for training and evaluation, or None without pairs."""
    folder = Path(name).expanduser()
    lists = [folder / "ImageSets" / "Segmentation" / f"{side}.txt" for side in ("train", "val")]
    if (folder / "JPEGImages").is_dir() and all(path.is_file() for path in lists):
        why = "JPEGImages/ and SegmentationClass/ hold images and masks, as in VOC"
        return Pairs(str(lists[0]), str(lists[1]), why)
    if len(below := pairs_below(folder)) > 1:
        train_pair, held_pair = (
            [pair for pair in below if part_of(pair[0].name) == part] for part in ("train", "eval")
        )
        if len(train_pair) != 1 or len(held_pair) > 1:
            listed = ", ".join(str(images) for images, _ in below)
            raise ValueError(
                f"{folder} holds several folders of images with masks ({listed}). Name one: "
                f"accel-train finetune {below[0][0]}"
            )
        ((images, masks),) = train_pair
        why = f"{images.name}/ and {masks.name}/ hold images and masks with the same names"
        return Pairs(str(images), str(held_pair[0][0]) if held_pair else None, why)
    whole = pair_of_folders(folder)
    train = _side(whole[0] if whole else folder, "train")
    if train is not None and (pair := pair_of_folders(train)) is not None:
        held_out = _side(train.parent, "eval")
        held = str(held_out) if held_out is not None and pair_of_folders(held_out) is not None else None
        return Pairs(str(train), held, f"{pair[0]} and {pair[1]} hold images and masks with the same names")
    if whole is None:
        return None
    return Pairs(name, None, f"{whole[0].name}/ and {whole[1].name}/ hold images and masks with the same names")


def _side(folder: Path, part: Part) -> Path | None:
    """Return the folder of a part below `folder`, apart from folders of masks, or None."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    name = pick(names - {name + end for name in names for end in BESIDE}, part)
    return None if name is None else folder / name


def recognise_masks(asked: Asked, tree: Tree) -> Found | str:
    """Return the images and masks of a folder or a list, and the classes among the numbers in masks.

    Raises:
        ValueError: an image has no mask, or the numbers in masks are not classes in order. The message names both.
    """
    pairs = None
    if tree.is_folder:
        is_open = asked.task not in ("image-classification", "object-detection")
        pairs = find_pairs(asked.path) if is_open else None
    elif tree.path.suffix.lower() in LISTED_SUFFIXES:
        if asked.task == "semantic-segmentation":
            pairs = Pairs(asked.path, None, "from --task: a list of images with their masks")
        elif asked.task is None and tree.path.exists() and lists_pairs(tree.path, asked.data):
            pairs = Pairs(asked.path, None, "each line names an image and its mask")
    if pairs is None:
        return "no images/ and masks/"
    refuse_columns(asked, asked.path, "images and masks")
    if not asked.allows("semantic-segmentation"):
        raise ValueError(f"--task {asked.task}: {asked.path} holds images and masks. Use --task semantic-segmentation")
    from accel_train.tasks.semantic_segmentation.data import masked_pool  # imports torch

    pool = masked_pool(pairs.train, asked.data, asked.path)
    classes, notes = _classes_of(asked, pool)
    root = asked.place
    places = [Path(name).expanduser() for name in (pairs.train, pairs.eval) if name is not None]
    used = [folder for place in places for folder in pair_of_folders(place) or (place,)]
    # The masks of polygons keep the folders train/, val/, and test/ of their images.
    root = Path(pairs.train).parent if pool.names is not None and pairs.train != asked.path else root
    used += [root / name for name in _VOC] if Path(pairs.train).suffix and root.is_dir() else []
    return Found(
        "semantic-segmentation",
        pairs.why,
        pool.description,
        num_samples=len(pool.images),
        settings={**places_of(asked, pairs.train, pairs.eval), **classes},
        unused=not_used(root, used) if root.is_dir() else (),
        notes=(*pool.notes, *notes),
        **sizes_of(pool.images),
    )


def _classes_of(asked: Asked, pool: ImagePool) -> tuple[Choices, Sequence[str]]:
    """Return settings for the classes if the masks' numbers are not 0, 1, 2, ..., and notes about them."""
    if {"data.mask_values", "data.reduce_labels", "data.label_names"} & asked.given or pool.masks is None:
        return {}, ()
    if pool.names is not None:
        return {"data.label_names": Choice(list(pool.names), "the annotations' classes")}, ()
    masks = pool.masks
    found = in_threads(
        lambda index: set(np.unique(mask_values(masks[index], masks.where(index))).tolist()),
        evenly_spaced(len(masks), _MASKS_LOOKED_AT),
    )
    numbers = sorted(set().union(*found))
    if len(numbers) == 2 and numbers[1] > 1 and (numbers[1] == asked.data.ignore_index or numbers[0] == 0):
        why = f"masks hold only {numbers[0]} and {numbers[1]}, so they are black and white"
        return {
            "data.mask_values": Choice(numbers, why),
            "data.label_names": Choice(["background", "object"], f"{numbers[0]} and {numbers[1]}"),
        }, ()
    if len(numbers) > _MOST_NUMBERS:
        raise ValueError(
            f"{asked.path}: masks hold {len(numbers)} different numbers, as photos do, "
            f"or masks that were resized with smoothing (first: {masks.where(0)}). "
            "Write one class number into each pixel, or list the numbers: --data.mask_values '[0, 255]'"
        )
    classes = [number for number in numbers if number != asked.data.ignore_index]
    if len(classes) > 1 and classes[-1] >= 4 * len(classes):
        raise ValueError(
            f"{asked.path}: masks hold the numbers {', '.join(map(str, numbers))}, "
            f"too far apart for consecutive classes. List the classes in order: --data.mask_values '{numbers}'"
        )
    if classes[:1] == [0] and len(classes) > 2:
        return {}, ("0 in a mask is a class like the others; if 0 means no class (ADE20K): --data.reduce_labels true",)
    return {}, ()


def sizes_of(images: Images) -> dict[str, Any]:
    """Return the short edge and aspect ratio of the median image, and whether all images are gray.

    The check skips images that cannot be opened. The run reports them.

    Raises:
        ValueError: none of the checked images can be opened. The message names the first.
    """
    edges, aspects, modes, fault = [], [], set(), ""
    for index in evenly_spaced(len(images), _NUM_LOOKED_AT):
        try:
            content = images.content(index)
            assert not isinstance(content, np.ndarray)
            with open_header(content) as image:
                edges.append(min(image.size))
                aspects.append(image.width / image.height)
                modes.add(image.mode)
        except (OSError, SyntaxError, DataError) as error:
            fault = fault or (str(error) if isinstance(error, DataError) else f"{images.where(index)}: {error}")
    if not edges:
        raise ValueError(f"{fault}. None of the images can be opened; check the files")
    return {"edge": int(median(edges)), "aspect": median(aspects), "is_gray": modes <= _GREY_MODES}


_BOXES = ({"xmin", "ymin"}, {"x_min", "y_min"}, {"bbox"}, {"x1", "y1", "x2", "y2"})


def image_column(table: Table) -> tuple[Column, Sequence[Any]] | None:
    """Return the column of images, with its cells as paths relative to the table, or None without such a column.

    Raises:
        ValueError: several columns name images, or the named files do not exist.
    """
    others = [column for column in table.each if medium_of(column.cells) is None]
    columns = [column for column in others if column.is_image]
    if len(columns) > 1:
        raise ValueError(
            f"{table.path}: {' and '.join(column.name for column in columns)} both name images. To train with masks: "
            f"accel-train run segmentation --data.train {table.path} --data.image_column {columns[0].name} "
            f"--data.mask_column {columns[1].name}"
        )
    for column in columns or (column for column in others if column.is_ids):
        found = find_images(table.path.parent, str(table.path), column.cells)
        if columns or found is not None:
            return column, column.cells if found is None else found
    return None


def recognise_images(asked: Asked, table: Table) -> Found | None:
    """Return the facts of a table with a column of images and a column of labels, or None without images."""
    if asked.text or not asked.allows("image-classification"):
        return None
    media = [(column, kind) for column in table.each if (kind := medium_of(column.cells)) is not None]
    if media and not any(column.is_text for column in table.each):
        column, kind = media[0]
        raise ValueError(
            f"{table.path}: column {column.name!r} names {kind} files, and {NO_TASK.format(kind)}. For a column of "
            "texts: --text COLUMN"
        )
    found = image_column(table)
    if found is None:
        return None
    column, cells = found
    names = {name.lower() for name in table.columns}
    # Boxes in a known form were recognized before.
    if any(box <= names for box in _BOXES) and (asked.task is None or len({*map(str, cells)}) < len(cells)):
        raise ValueError(
            f"{table.path} holds boxes (columns {table.names}) that are not read; expected {LAYOUTS}. For classes of "
            "whole images, keep one row for each image, and use --task image-classification"
        )
    folder = table.path.parent
    missing = [index for index, cell in enumerate(cells) if isinstance(cell, str) and not os.path.isfile(folder / cell)]
    if missing:
        raise ValueError(
            f"{table.wheres[missing[0]]}, column {column.name!r}: file not found: {folder / cells[missing[0]]} "
            f"({len(missing)} of {len(cells)} are missing). Write paths relative to the table, "
            "or put the files into one folder next to it"
        )
    label = recognise_label(asked, table, column.name, is_text=False)
    where = "its cells name image files"
    if list(cells) != list(column.cells):
        where = f"its cells name images in {folder / os.path.dirname(cells[0])}/"
    return Found(
        "image-classification",
        f"column {column.name!r} names images, column {label.name!r} their classes",
        settings={"data.image_column": Choice(column.name, where), **label.settings},
        counts=label.counts,
        unused=_not_used(table, cells, column.name, label.name),
        **sizes_of(RowImages(cells, folder, column.name, str(table.path), tuple(table.wheres))),
    )


def _not_used(table: Table, cells: Sequence[Any], *used: str) -> tuple[str, ...]:
    left = [name for name in table.columns if name not in used]
    said = [f"columns {', '.join(left)}"] if left else []
    files = {os.path.normpath(table.path.parent / cell) for cell in cells if isinstance(cell, str)}
    places = {os.path.dirname(file) for file in files}
    images = {os.path.normpath(Path(place, name)) for place in places for name in list_images(Path(place))}
    if others := images - files:
        said.append(f"{format_count(len(others), 'image')} not named in the table")
    left = [
        entry.name + "/" * entry.is_dir()
        for entry in sorted(table.path.parent.iterdir())
        if part_of(entry.name) == "test" and os.path.normpath(entry) not in places
    ]
    return (*said, *left[:6])


def refuse_other_classes(asked: Asked, folder: Path, images: Sequence[str], tables: Paths) -> None:
    """Check that a table of most images has a column with the folders as classes.

    Raises:
        ValueError: a table does not. The message names the table and two of the folders.
    """
    _, images = _in_classes(folder, images)
    class_of = {Path(name).stem: name.split("/", 1)[0] for name in images}
    for path in tables if len(class_of) == len(images) else ():
        try:
            table = read_table(path, asked)
        except ValueError:
            # The table holds other data.
            continue
        for column in table.each:
            names = [Path(str(cell)) for cell in column.cells]
            found = [(row, class_of[name.stem]) for row, name in enumerate(names) if name.stem in class_of]
            if 2 * len(found) <= len(images) or all(each in names[row].parts[:-1] for row, each in found):
                continue
            classes = sorted({each for _, each in found})
            pairs = [{(each, str(other.cells[row])) for row, each in found} for other in table.each]
            if not any(len(pair) == len(classes) == len({value for _, value in pair}) for pair in pairs):
                raise ValueError(
                    f"{path}: column {column.name!r} names images in {folder / classes[0]}/ and "
                    f"{folder / classes[-1]}/, but no column has these folders as classes. "
                    "Put all images into one folder next to the table. If the folders are the classes: "
                    "--task image-classification"
                )
