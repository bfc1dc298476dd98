"""Folders of images: by class, or with masks; their sizes and colours."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.images.images import evenly_spaced, list_images
from accel_train.data.images.pools import pair_of_folders, read_pools
from accel_train.experiments.finetune.found import Asked, Found

_NUM_LOOKED_AT = 200
"""Images, evenly spaced, whose headers are read for their sizes and colours."""
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
    return Found(
        "image-classification",
        f"images in {len(counts)} folders, one for each class",
        f"{folder}: {format_count(len(names), 'image')} in {len(counts)} classes ({_listed(list(counts))})",
        num_samples=len(names),
        settings={"data.train": Choice(asked.path, "")},
        counts=counts,
        **_sizes([root / name for name in names]),
    )


def recognise_masks(asked: Asked, folder: Path) -> Found:
    """Return the pairs of a folder with images and masks.

    Raises:
        ValueError: an image has no mask; the message names both.
    """
    _refuse_columns(asked, folder, "images and masks")
    if asked.task not in (None, "semantic-segmentation"):
        raise ValueError(f"--task {asked.task}: {folder} holds images and masks, which are for semantic-segmentation")
    folders = pair_of_folders(folder)
    assert folders is not None, "who calls this has seen them"
    pool = read_pools(asked.path, asked.data, asked.path, masks=True)
    names, _ = list_images(folders[0])
    return Found(
        "semantic-segmentation",
        f"{folders[0].name}/ and {folders[1].name}/ hold images and masks of the same names",
        pool.description,
        num_samples=len(pool.images),
        settings={"data.train": Choice(asked.path, "")},
        **_sizes([folders[0] / name for name in names]),
    )


def _refuse_columns(asked: Asked, folder: Path, what: str) -> None:
    for flag, given in (("--text", asked.text), ("--label", asked.label)):
        if given:
            raise ValueError(f"{flag}: {folder} holds {what} and no columns; leave it out, or name a table")


def _sizes(paths: Sequence[Path]) -> dict[str, Any]:
    """The short edge of the median image, and whether all are grey; broken ones are named later, by the run."""
    edges, modes = [], set()
    for index in evenly_spaced(len(paths), _NUM_LOOKED_AT):
        try:
            with Image.open(paths[index]) as image:
                edges.append(min(image.size))
                modes.add(image.mode)
        except (OSError, SyntaxError):
            continue
    return {"edge": int(median(edges)) if edges else 0, "is_grey": bool(modes) and modes <= {*_GREY_MODES}}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
