"""Folders of images: by class, or with masks; their sizes and colours."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.images.images import ImagePool, evenly_spaced, in_threads, list_images
from accel_train.data.images.masks import mask_values
from accel_train.data.images.pairs import pair_of_folders
from accel_train.data.images.pools import read_pools
from accel_train.experiments.finetune.found import Asked, Found

_NUM_LOOKED_AT = 200
"""Images, evenly spaced, whose headers are read for their sizes and colours."""
_MASKS_LOOKED_AT = 2_000
_TRAIN = re.compile("train(?:ing|[0-9]+)?")
_EVAL = re.compile("(?:val|valid|validation|dev)(?:[0-9]+)?")
_PARTS = re.compile(r"(?:.*[^a-z])?(?:train(?:ing)?|val(?:id|idation)?|dev|test(?:ing)?)(?:[^a-z].*)?")
_GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "F")


def recognise_classes(asked: Asked, folder: Path) -> Found:
    """Return the classes of a folder with CLASS/*.jpg in it, or train/CLASS/*.jpg.

    Raises:
        ValueError: images lie in no class folder, or there is one class; the message shows how they should lie.
    """
    _refuse_columns(asked, folder, "images")
    root = folder / "train" if (folder / "train").is_dir() else folder
    names, _ = list_images(root)
    loose = [name for name in names if "/" not in name]
    if loose:
        raise ValueError(
            f"{folder}: {root / loose[0]} lies in no class folder; for classes put each image into {root}/CLASS/; for "
            f"segmentation put images into {root}/images/ and masks of the same names into {root}/masks/"
        )
    pool = read_pools(
        asked.path if root is folder else str(root), asked.data, asked.path, masks=False
    )  # names folders that are empty
    counts = Counter(map(str, pool.labels))
    if len(counts) < 2:
        raise ValueError(f"{root} has the one class folder {next(iter(counts), 'none')!r}, and a classifier needs two")
    if all(_PARTS.fullmatch(name.lower()) for name in counts):
        first, *others = sorted(counts, key=lambda name: "train" not in name.lower())
        raise ValueError(
            f"{root}: {', '.join(sorted(counts))} are no classes, but parts of the data, by their names; say which is trained on: "
            f"accel-train finetune {root / first} --data.eval {root / others[0]}"
        )
    return Found(
        "image-classification",
        f"images in {len(counts)} folders, one for each class",
        f"{folder}: {format_count(len(names), 'image')} in {len(counts)} classes ({_listed(list(counts))})",
        num_samples=len(names),
        settings={"data.train": Choice(asked.path, "")},
        counts=counts,
        **sizes_of([root / name for name in names]),
    )


class Pairs(NamedTuple):
    """The places where images lie with their masks."""

    train: str
    eval: str | None
    why: str


def find_pairs(name: str) -> Pairs | None:
    """Return where images and masks lie below a folder, for training and for evaluation; None where there are none."""
    folder = Path(name).expanduser()
    lists = [folder / "ImageSets" / "Segmentation" / f"{side}.txt" for side in ("train", "val")]
    if (folder / "JPEGImages").is_dir() and all(path.is_file() for path in lists):
        return Pairs(
            str(lists[0]), str(lists[1]), "JPEGImages/ and SegmentationClass/ hold images and masks, as in VOC"
        )
    whole = pair_of_folders(folder)
    train = _side(whole[0] if whole else folder, _TRAIN)
    pair = pair_of_folders(train) if train is not None else None
    if train is not None and pair is not None:
        held_out = _side(train.parent, _EVAL)
        is_pair = held_out is not None and pair_of_folders(held_out) is not None
        return Pairs(
            str(train),
            str(held_out) if is_pair else None,
            f"{pair[0]} and {pair[1]} hold images and masks of the same names",
        )
    if whole is None:
        return None
    return Pairs(name, None, f"{whole[0].name}/ and {whole[1].name}/ hold images and masks of the same names")


def _side(folder: Path, pattern: re.Pattern[str]) -> Path | None:
    """The folder of training or evaluation images below a folder, by its name."""
    found = [path for path in sorted(folder.iterdir()) if path.is_dir() and pattern.fullmatch(path.name)]
    return found[0] if len(found) == 1 else None


def recognise_masks(asked: Asked, pairs: Pairs) -> Found:
    """Return the images and masks of a folder or a list, and which numbers of masks are classes.

    Raises:
        ValueError: an image has no mask, or the masks have numbers that are no classes in order; the message names both.
    """
    _refuse_columns(asked, asked.path, "images and masks")
    if asked.task not in (None, "semantic-segmentation"):
        raise ValueError(
            f"--task {asked.task}: {asked.path} holds images and masks, which are for semantic-segmentation"
        )
    pool = read_pools(pairs.train, asked.data, asked.path, masks=True)
    settings = {"data.train": Choice(pairs.train, "")}
    if pairs.eval is not None and "data.eval" not in asked.given:
        settings["data.eval"] = Choice(pairs.eval, "its name says that it is for evaluation")
    classes, notes = _classes_of(asked, pool)
    return Found(
        "semantic-segmentation",
        pairs.why,
        pool.description,
        num_samples=len(pool.images),
        settings={**settings, **classes},
        notes=(*pool.notes, *notes),
        **sizes_of([Path(pool.images.where(index)) for index in range(len(pool.images))]),
    )


def _classes_of(asked: Asked, pool: ImagePool) -> tuple[dict[str, Choice[Any]], Sequence[str]]:
    """Return which numbers in the masks are classes, where they are not 0, 1, 2, ...; and what is to be said of them."""
    if {"data.mask_values", "data.reduce_labels", "data.label_names"} & asked.given or pool.masks is None:
        return {}, ()
    masks = pool.masks
    found = in_threads(
        lambda index: set(np.unique(mask_values(masks[index], masks.where(index))).tolist()),
        evenly_spaced(len(masks), _MASKS_LOOKED_AT),
    )
    numbers = sorted(set().union(*found))
    if len(numbers) == 2 and numbers[1] > 1 and (numbers[1] == asked.data.ignore_index or numbers[0] == 0):
        why = f"masks hold {numbers[0]} and {numbers[1]} alone, so they are black and white"
        return {
            "data.mask_values": Choice(numbers, why),
            "data.label_names": Choice(["background", "object"], f"{numbers[0]} and {numbers[1]}"),
        }, ()
    classes = [number for number in numbers if number != asked.data.ignore_index]
    if len(classes) > 1 and classes[-1] >= 4 * len(classes):
        raise ValueError(
            f"{asked.path}: masks hold the numbers {', '.join(map(str, numbers))}, too far apart to be classes in order; say which are, in "
            f"order: --data.mask_values '{numbers}'"
        )
    if classes[:1] == [0] and len(classes) > 2:
        return {}, (
            "0 in a mask is a class like the others; where it means no class (ADE20K): --data.reduce_labels true",
        )
    return {}, ()


def _refuse_columns(asked: Asked, folder: str | Path, what: str) -> None:
    for flag, given in (("--text", asked.text), ("--label", asked.label)):
        if given:
            raise ValueError(f"{flag}: {folder} holds {what} and no columns; leave it out, or name a table")


def sizes_of(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the short edge and the aspect of the median image, and whether all are grey; broken ones are named later, by the run."""
    edges, aspects, modes = [], [], set()
    for index in evenly_spaced(len(paths), _NUM_LOOKED_AT):
        try:
            with Image.open(paths[index]) as image:
                edges.append(min(image.size))
                aspects.append(image.width / image.height)
                modes.add(image.mode)
        except (OSError, SyntaxError):
            continue
    if not edges:
        return {}
    return {"edge": int(median(edges)), "aspect": median(aspects), "is_grey": bool(modes) and modes <= {*_GREY_MODES}}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
