"""Split a recipe's images into training and evaluation, and encode classification labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.core.files import digest64
from accel_train.data.images.boxes import Boxes
from accel_train.data.images.images import (
    BROKEN,
    INSPECTED_LIMIT,
    ArrayImages,
    ImagePool,
    Images,
    evenly_spaced,
    held_out,
    inspect_images,
    text_digest,
)
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.parts import Part, folders_beside, folders_of_parts, part_of
from accel_train.data.samples import fetch_readable, held_out_units, numbered
from accel_train.recipe.data import ClassData, Data, ImageData, listed

_NUM_TRIED = 64


@dataclass(frozen=True)
class ImageRows:
    """Selected `rows` of a pool's images, in order. `ids`, `masks` and `boxes` cover the whole pool."""

    images: Images
    rows: NDArray[np.int64]
    ids: list[str] | None
    labels: NDArray[np.int64]
    """Class id of each image, or -100 without a label."""
    masks: Images | None = None
    boxes: tuple[Boxes, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, index: int) -> Image.Image:
        """Return the image in its own mode, upright."""
        return self.images[int(self.rows[index])]

    def boxes_of(self, index: int) -> Boxes:
        """Return the boxes of an image. The images must have boxes."""
        assert self.boxes is not None
        return self.boxes[int(self.rows[index])]

    def where(self, index: int) -> str:
        """Return the image's file, or file and row."""
        return self.images.where(int(self.rows[index]))

    def row_id(self, index: int) -> str:
        """Return the image's name in predictions: its id column, or its file, or file and row."""
        return self.where(index) if self.ids is None else self.ids[int(self.rows[index])]


@dataclass(frozen=True)
class ImageSets:
    """The images of a recipe for training and evaluation."""

    train: ImageRows
    eval: ImageRows | None
    description: str
    contents: tuple[str, ...]
    """Digests of the images with their labels or masks."""
    notes: tuple[str, ...]
    label_names: tuple[str, ...] = ()
    """Class names in the order of their ids."""
    category_ids: tuple[int, ...] | None = None
    """Id of each class in the COCO file that the evaluation images come from. None in other formats."""
    box_format: str | None = None
    """Order of the numbers of boxes in a table, if their values decided it."""
    eval_counts: Sequence[int] = ()
    """Number of images of each evaluation set. Empty if the images' files tell."""

    @property
    def identity(self) -> str:
        """Return a digest that changes with images, labels, masks or class names."""
        return text_digest([*self.contents, *self.label_names])

    @property
    def decoded(self) -> bool:
        """Return whether all images are array pixels. Array pixels need no decoding."""
        return all(isinstance(side.images, ArrayImages) for side in (self.train, self.eval) if side is not None)

    def named(self, names: tuple[str, ...], notes: tuple[str, ...]) -> "ImageSets":
        """Return the same images with class names and additional notes."""
        return replace(self, label_names=names, notes=tuple(dict.fromkeys((*self.notes, *notes))))


def divide_pools(pool: ImagePool, other: ImagePool | None, data: ImageData) -> ImageSets:
    """Split the images of `data.train` into training and evaluation, or use `other` (`data.eval`) for evaluation.

    If `other` is `pool`, the pool serves both sides. The classes have no names yet.

    Raises:
        ValueError: an image is broken, or no training image is left.
    """
    most = data.max_broken
    digests = _look_at(pool.images, data, most, needed=other is None and data.eval_fraction > 0)
    description, contents, notes = pool.description, [_identity(pool, digests, data, most)], list(pool.notes)
    train = _rows(pool, np.arange(len(pool.images)))
    held: ImageRows | None = train
    if other is None:
        chosen = np.zeros(len(pool.images), dtype=bool) if digests is None else _chosen(digests, pool, data)
        chosen &= digests != BROKEN
        if chosen.all():
            raise ValueError(
                f"no training images are left: all {len(chosen)} fall into data.eval_fraction={data.eval_fraction} "
                "(copies stay together); lower it, or name others in data.eval"
            )
        train = _rows(pool, np.flatnonzero(~chosen))
        held = _rows(pool, np.flatnonzero(chosen)) if chosen.any() else None
    elif other is not pool:
        other_digests = _look_at(other.images, data, 0, needed=False)
        held = _rows(other, np.arange(len(other.images)))
        description += f"; evaluation: {other.description}"
        contents.append(_identity(other, other_digests, data, 0))
        notes += other.notes
        if digests is not None and other_digests is not None and data.eval != data.train:
            num_shared = int(np.isin(other_digests, digests).sum())
            note = f"{num_shared} of {len(other_digests)} evaluation images are training images as well"
            notes += [note] if num_shared else []
    return ImageSets(train, held, description, tuple(contents), tuple(notes))


def _chosen(digests: NDArray[np.uint64], pool: ImagePool, data: Data) -> NDArray[np.bool_]:
    """Return a mask of held-out images."""
    if data.split_seed:
        digests = np.array([digest64(digest.tobytes(), data.split_seed) for digest in digests.astype("<u8")], np.uint64)
    if isinstance(data, ClassData) and data.stratify and pool.class_ids is not None and data.eval_fraction > 0:
        return np.array(held_out_units(digests.tolist(), pool.class_ids.tolist(), data.eval_fraction))
    return held_out(digests, data.eval_fraction)


def _rows(pool: ImagePool, rows: NDArray[np.int64]) -> ImageRows:
    labels = np.full(len(rows), IGNORED_LABEL) if pool.class_ids is None else pool.class_ids[rows]
    return ImageRows(pool.images, rows, pool.ids, labels, pool.masks, pool.boxes)


def try_samples(dataset: Any, most_broken: int) -> None:
    """Read 64 evenly spaced samples, to find errors that affect all of them.

    Raises:
        DataError: more than `most_broken` of them cannot be read.
    """
    _, faults = fetch_readable(dataset, evenly_spaced(len(dataset), _NUM_TRIED))
    for number, fault in enumerate(faults, start=1):
        numbered(fault, number, most_broken)


def eval_beside_train(data: Data) -> tuple[tuple[str, ...], tuple[str, ...] | None, tuple[str, ...]]:
    """Return the names to train on, the names to evaluate on, and notes.

    In a folder with parts, these are the training part and the evaluation part. The test part is left alone: selecting
    the best weights on it would invalidate it.
    """
    train, held = listed(data.train), None if data.eval is None else listed(data.eval)
    root = Path(train[0]).expanduser() if len(train) == 1 else None
    if root is None or not root.is_dir():
        return train, held, ()
    parts = parts_of_classes(root)
    if not parts:
        return train, held, ()
    folder, beside, test = parts["train"], parts.get("eval"), parts.get("test")
    if held == train and folder != root:
        shown = beside or test or folder
        return (str(shown),), (str(shown),), (f"of {root}, {shown.name} is read",)  # evaluation of a trained model
    notes = (f"{test} is left alone; after training: accel-train evaluate RUN {test}",) if test else ()
    if beside is None:
        return train if folder == root else (str(folder),), held, notes if held is None else ()
    if held is None:
        return (str(folder),), (str(beside),), (f"evaluation is on {beside}, found next to {folder}", *notes)
    return (str(folder),), held, ()


def parts_of_classes(root: Path) -> dict[Part, Path]:
    """Return the parts in a folder, or next to it if it is the training part. Empty without PART/CLASS/."""
    parts = folders_of_parts(root)
    if "train" not in parts:
        parts = folders_beside(root) if part_of(root.name) == "train" else {}
    # Otherwise, `train` may be the name of a class.
    return parts if parts and any(entry.is_dir() for entry in parts["train"].iterdir()) else {}


def _look_at(images: Images, data: Data, most_broken: int, *, needed: bool) -> NDArray[np.uint64] | None:
    """Return the digest of each image, or None for more than 20,000 images unless the split needs them."""
    return inspect_images(images, data, most_broken) if needed or len(images) <= INSPECTED_LIMIT else None


def _identity(pool: ImagePool, digests: NDArray[np.uint64] | None, data: Data, most_broken: int) -> str:
    """Return a digest that changes with any image, mask, label, and with any box, class, flag, area or image size."""
    parts = (pool.images,) if pool.masks is None else (pool.images, pool.masks)
    if digests is None:
        contents = [images.stamp() for images in parts]
    else:
        of_masks = [inspect_images(images, data, most_broken) for images in parts[1:]]
        contents = [found.tobytes().hex() for found in (digests, *of_masks)]
    contents += map(str, pool.labels)
    if pool.boxes is not None:
        contents.append(
            text_digest(
                f"{each.width} {each.height} "
                + " ".join(part.tobytes().hex() for part in (each.corners, each.class_ids, each.is_crowd, each.areas))
                for each in pool.boxes
            )
        )
    return text_digest(contents)
