"""Images with labels as numbers: which classes there are, what is trained on, and what is held out."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.data.image_pools import ImagePool, read_pools
from accel_train.data.images import INSPECTED_LIMIT, FileImages, Images, held_out, inspect_images, text_digest
from accel_train.data.labels import LabelCell, LabelScheme, label_scheme
from accel_train.recipe_data import Data

NO_LABEL = -100
"""Of an image that is only predicted."""
_EVAL_NAMES = ("val", "validation", "valid", "dev", "test")


@dataclass(frozen=True)
class LabelledImages:
    """Some images of a set, with the number of each one's class."""

    images: Images
    rows: NDArray[np.int64]
    """Which of the images."""
    labels: NDArray[np.int64]
    ids: list[str] | None = None
    """`data.id_column` of all images."""

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, index: int) -> Image.Image:
        """In its own mode, upright."""
        return self.images[int(self.rows[index])]

    def where(self, index: int) -> str:
        """File, or file and row."""
        return self.images.where(int(self.rows[index]))

    def row_id(self, index: int) -> str:
        """What names the image in predictions: its id column, else its file, or file and row."""
        return self.where(index) if self.ids is None else self.ids[int(self.rows[index])]


@dataclass(frozen=True)
class ImageSets:
    """What a recipe trains on and is evaluated on."""

    train: LabelledImages
    eval: LabelledImages | None
    label_names: tuple[str, ...]
    description: str
    """What was read, for people."""
    identity: str
    """Changes when images or labels change."""
    decoded: bool
    """They are arrays: nothing is left to decode."""
    notes: tuple[str, ...]


def read_labelled_images(data: Data, known_names: tuple[str, ...] | None = None) -> ImageSets:
    """The images that a recipe names, with labels as numbers, and what is held out of them.

    `known_names` are those of a pretrained classifier: if it has just these classes, its order is kept, and its head.

    Raises:
        ValueError: something is missing or broken; the text names file, row or column.
    """
    train_names, eval_names, notes = _eval_beside_train(data)
    pool = read_pools(train_names, data, "data.train")
    scheme = _scheme(pool, data, known_names)
    labels = _numbers(pool, scheme)
    digests = _look_at(pool.images, needed=eval_names is None and data.eval_fraction > 0)
    description, identity, decoded = pool.description, [_identity(pool, digests)], pool.decoded
    held: LabelledImages | None
    if eval_names is None:
        chosen = _chosen(digests, len(labels), data.eval_fraction)
        train, held = (_part(pool, labels, np.flatnonzero(side)) for side in (~chosen, chosen))
        held = held if len(held) else None
    elif eval_names == train_names:  # a trained model is shown other data: nothing is trained
        train = held = _part(pool, labels, np.arange(len(labels)))
    else:
        other = read_pools(eval_names, data, "data.eval")
        other_labels, other_digests = _numbers(other, scheme), _look_at(other.images, needed=False)
        train = _part(pool, labels, np.arange(len(labels)))
        held = _part(other, other_labels, np.arange(len(other_labels)))
        description += f"; evaluation: {other.description}"
        identity.append(_identity(other, other_digests))
        decoded = decoded and other.decoded
        notes += (*other.notes, *_shared_images(digests, other_digests))
    notes = tuple(dict.fromkeys((*pool.notes, *notes, *_untrained_classes(train, held, scheme.names, data))))
    return ImageSets(train, held, scheme.names, description, text_digest([*identity, *scheme.names]), decoded, notes)


def _part(pool: ImagePool, labels: NDArray[np.int64], rows: NDArray[np.int64]) -> LabelledImages:
    return LabelledImages(pool.images, rows, labels[rows], pool.ids)


def _chosen(digests: NDArray[np.uint64] | None, num_images: int, eval_fraction: float) -> NDArray[np.bool_]:
    if digests is None:
        return np.zeros(num_images, dtype=bool)
    chosen = held_out(digests, eval_fraction)
    if chosen.all():
        raise ValueError(
            f"no training images are left: all {num_images} fall into data.eval_fraction={eval_fraction} (copies stay "
            "together); lower it, or name others in data.eval"
        )
    return chosen


def _shared_images(train: NDArray[np.uint64] | None, held: NDArray[np.uint64] | None) -> Iterable[str]:
    if train is None or held is None:
        return ()
    num_shared = int(np.isin(held, train).sum())
    return (f"{num_shared} of {len(held)} evaluation images are training images as well",) if num_shared else ()


def _eval_beside_train(data: Data) -> tuple[tuple[str, ...], tuple[str, ...] | None, tuple[str, ...]]:
    """What to train on and evaluate on, and a note: of a folder with splits, `train` and the one that is held out."""
    train = (data.train,) if isinstance(data.train, str) else data.train
    held = (data.eval,) if isinstance(data.eval, str) else data.eval
    root = Path(train[0]).expanduser() if len(train) == 1 else None
    if root is None or not root.is_dir():
        return train, held, ()
    folder = root if root.name == "train" else root / "train"
    beside = next((found for name in _EVAL_NAMES if (found := folder.with_name(name)).is_dir()), None)
    if beside is None or not folder.is_dir():
        return train, held, ()
    if held is None:
        return (str(folder),), (str(beside),), (f"evaluation is on {beside}, found beside {folder}",)
    if held == train and folder != root:  # a trained model is shown a folder with splits
        return (str(beside),), (str(beside),), (f"of {root}, {beside.name} is read",)
    return (str(folder),), held, ()


def _scheme(pool: ImagePool, data: Data, known_names: tuple[str, ...] | None) -> LabelScheme:
    """The classes in the order of their ids: the recipe's, the data set's own, or the labels that occur, sorted."""
    if data.label_column is None:
        if data.label_names is None:
            raise ValueError("data.label_column: none is for images to predict; then data.label_names says the classes")
        return LabelScheme("single_label", data.label_names, "", False, "as the recipe says")
    cells = list(_distinct(pool).values())
    if len(cells) == 1 and data.label_names is None and isinstance(pool.images, FileImages):
        folder = pool.images.root / str(cells[0].value)
        raise ValueError(
            f"data.train: the one class folder is {folder}, and a classifier needs two; is it one too high?"
        )
    scheme = label_scheme(
        cells,
        column=data.label_column,
        problem_type="single_label",
        label_names=data.label_names,
        feature_names=pool.names,
    )
    if known_names is None or data.label_names is not None or scheme.are_ids:
        return scheme
    return scheme.renamed(known_names) if sorted(known_names) == sorted(scheme.names) else scheme


def _numbers(pool: ImagePool, scheme: LabelScheme) -> NDArray[np.int64]:
    """Each label as the number of its class; a label that is none is a ValueError that names its row."""
    if not scheme.column:
        return np.full(len(pool.labels), NO_LABEL)
    cells = _distinct(pool)
    ids = dict(zip(cells, scheme.encode(list(cells.values())).tolist(), strict=True))
    return np.array([ids[_key(label)] for label in pool.labels], dtype=np.int64)


def _distinct(pool: ImagePool) -> dict[Any, LabelCell]:
    """The labels that occur, each where it stands first: millions of images have few classes."""
    first: dict[Any, int] = {}
    for row, label in enumerate(pool.labels):
        first.setdefault(_key(label), row)
    return {key: LabelCell(pool.labels[row], pool.images.where(row)) for key, row in first.items()}


def _key(label: Any) -> tuple[type, Any]:
    return type(label), label if isinstance(label, str | int | float) else repr(label)


def _look_at(images: Images, *, needed: bool) -> NDArray[np.uint64] | None:
    """The digest of each image; above 20,000 of them only where the split needs it."""
    return inspect_images(images) if needed or len(images) <= INSPECTED_LIMIT else None


def _identity(pool: ImagePool, digests: NDArray[np.uint64] | None) -> str:
    contents = pool.images.stamp() if digests is None else digests.tobytes().hex()
    return text_digest([contents, *map(str, pool.labels)])


def _untrained_classes(
    train: LabelledImages, held: LabelledImages | None, names: tuple[str, ...], data: Data
) -> tuple[str, ...]:
    """Classes without a training image: an error where the evaluation has some, unless the recipe lists the classes."""
    if data.label_column is None:
        return ()
    counts = np.bincount(train.labels, minlength=len(names))
    missing = [name for name, count in zip(names, counts) if count == 0]
    if not missing:
        return ()
    evaluated = np.zeros(len(names), dtype=bool)
    if held is not None:
        evaluated[held.labels] = True
    asked = [name for name in missing if evaluated[names.index(name)]]
    if asked and data.label_names is None:
        raise ValueError(
            f"no training image is of the class {asked[0]!r}, which the evaluation has; add some"
            + (", or lower data.eval_fraction" if data.eval is None else ", or list all classes in data.label_names")
        )
    return (f"no training image is of {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}",)
