"""Images with masks for semantic segmentation: a class number for each pixel, in a file, column or array beside the image's."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accel_train.data.digit_scenes import LABEL_NAMES, digit_scenes
from accel_train.data.digit_scenes import NAME as DIGIT_SCENES
from accel_train.data.image_arrays import ARRAY_SUFFIXES, read_arrays
from accel_train.data.image_tables import read_image_tables
from accel_train.data.images import (
    INSPECTED_LIMIT,
    ArrayImages,
    FileImages,
    Images,
    held_out,
    inspect_images,
    join_images,
    list_images,
    text_digest,
)
from accel_train.data.masked_images import MaskedImages
from accel_train.data.sources import resolve_sources
from accel_train.recipe_data import Data


@dataclass(frozen=True)
class MaskSets:
    """What a recipe trains on and is evaluated on."""

    train: MaskedImages
    eval: MaskedImages | None
    label_names: tuple[str, ...]
    description: str
    identity: str
    """Changes when images or masks change."""
    eval_ids: tuple[str, ...] | None
    """`data.id_column` of each evaluation image."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Pool:
    """Everything one leaf of the recipe names."""

    images: Images
    masks: Images | None
    """None without `data.mask_column`."""
    description: str
    ids: list[str] | None = None
    notes: tuple[str, ...] = ()

    def all(self) -> MaskedImages:
        return MaskedImages(self.images, self.masks, np.arange(len(self.images)))


def read_masked_images(data: Data, known_names: tuple[str, ...] | None = None) -> MaskSets:
    """The images and masks that a recipe names, and what is held out of them.

    `known_names` are the classes of a pretrained model: taken where the masks have as many and the recipe names none.

    Raises:
        ValueError: something is missing or broken; the text names both files.
    """
    pool = _read_pools(data.train, data, "data.train")
    other = None if data.eval is None else _read_pools(data.eval, data, "data.eval")
    if data.train in (DIGIT_SCENES, (DIGIT_SCENES,)) and data.eval is None and data.eval_fraction > 0:
        other = _scenes_pool(is_held_out=True)
    train, held, ids, digests = _split(pool, other, data)
    names, notes = _label_names(train, data, known_names)
    identities = [_identity(pool, digests)] + ([] if other is None else [_identity(other, _digests(other, False))])
    return MaskSets(
        train,
        held,
        names,
        pool.description + ("" if other is None else f"; evaluation: {other.description}"),
        text_digest([*identities, *names]),
        ids,
        tuple(dict.fromkeys((*pool.notes, *(() if other is None else other.notes), *notes))),
    )


def _split(
    pool: _Pool, other: _Pool | None, data: Data
) -> tuple[MaskedImages, MaskedImages | None, tuple[str, ...] | None, NDArray[np.uint64] | None]:
    digests = _digests(pool, other is None and data.eval_fraction > 0)
    if other is not None:
        return pool.all(), other.all(), None if other.ids is None else tuple(other.ids), digests
    chosen = np.zeros(len(pool.images), bool) if digests is None else held_out(digests, data.eval_fraction)
    if chosen.all():
        raise ValueError(
            f"no training images are left: all {len(chosen)} fall into data.eval_fraction={data.eval_fraction} "
            "(copies stay together); lower it, or name others in data.eval"
        )
    train, held = (MaskedImages(pool.images, pool.masks, np.flatnonzero(rows)) for rows in (~chosen, chosen))
    ids = None if pool.ids is None else tuple(pool.ids[row] for row in held.rows)
    return train, held if len(held) else None, ids, digests


def _label_names(
    train: MaskedImages, data: Data, known_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The classes in the order of their numbers, and notes; without names, all training masks are read for their numbers."""
    if data.label_names is not None:
        return data.label_names, ()
    if data.train in (DIGIT_SCENES, (DIGIT_SCENES,)):
        return LABEL_NAMES, ()
    if train.masks is None:
        raise ValueError("data.mask_column: none is for images to predict; then data.label_names says the classes")
    counts = train.count_pixels()
    counts[data.ignore_index] = 0
    if not counts.any():
        raise ValueError(f"data.train: every pixel of the masks is data.ignore_index={data.ignore_index}")
    num_classes = int(np.flatnonzero(counts)[-1]) + 1
    note = f"the masks have the numbers 0 to {num_classes - 1}"
    if known_names is not None and len(known_names) == num_classes:
        return known_names, (f"{note}, which are taken for the pretrained model's classes",)
    return tuple(map(str, range(num_classes))), (f"{note}; data.label_names gives them names",)


def _read_pools(names: str | Iterable[str], data: Data, leaf: str) -> _Pool:
    pools = [pool for name in ((names,) if isinstance(names, str) else names) for pool in _read_pool(name, data, leaf)]
    if not pools:
        raise ValueError(
            f"{leaf} is empty; name a folder with images/ and masks/, a table, an array, or {DIGIT_SCENES}"
        )
    if len(pools) == 1:
        return pools[0]
    masks = [pool.masks for pool in pools if pool.masks is not None]
    has_ids = any(pool.ids is not None for pool in pools)
    return _Pool(
        join_images([pool.images for pool in pools]),
        join_images(masks) if masks else None,
        ", ".join(pool.description for pool in pools),
        [name for pool in pools for name in _ids(pool)] if has_ids else None,
        tuple(note for pool in pools for note in pool.notes),
    )


def _ids(pool: _Pool) -> Sequence[str]:
    return [pool.images.where(row) for row in range(len(pool.images))] if pool.ids is None else pool.ids


def _read_pool(name: str, data: Data, leaf: str) -> list[_Pool]:
    if name == DIGIT_SCENES:
        return [_scenes_pool(is_held_out=leaf == "data.eval")]
    path = Path(name).expanduser()
    if path.suffix.lower() in ARRAY_SUFFIXES and path.is_file():
        return [_array_pool(path, data)]
    if path.is_dir() and (folders := _pair_of_folders(path)) is not None:
        return [_folder_pool(*folders, data)]
    if path.is_dir() and (names := list_images(path)[0]):
        if data.mask_column is None:
            return [_Pool(FileImages(path, tuple(names)), None, f"{path}: {len(names):,} images")]
        raise ValueError(
            f"{leaf}: {path} has no masks; expected {path}/images/ and {path}/masks/ with files of the same names"
        )
    pools = []
    image_columns = tuple(column for column in (data.image_column, data.mask_column) if column is not None)
    columns = () if data.id_column is None else (data.id_column,)
    for source in resolve_sources(name, data, leaf=leaf):
        for table in read_image_tables(source, data, image_columns=image_columns, columns=columns):
            images = table.images[data.image_column]
            masks = None if data.mask_column is None else table.images[data.mask_column]
            ids = None if data.id_column is None else [str(value) for value in table.values[data.id_column]]
            pools.append(_Pool(images, masks, f"{table.name}: {len(images):,} rows", ids, source.notes))
    return pools


def _array_pool(path: Path, data: Data) -> _Pool:
    columns = () if data.mask_column is None else (data.mask_column,)
    images, arrays = read_arrays(path, data.image_column, columns)
    description = f"{path}: {len(images):,} images"
    if data.mask_column is None:
        return _Pool(images, None, description)
    masks = arrays[data.mask_column]
    if masks.shape != images.array.shape[:3] or masks.dtype != np.uint8:
        raise ValueError(
            f"{path}: masks are {masks.dtype} of shape {masks.shape}, not uint8 of shape {images.array.shape[:3]}"
        )
    return _Pool(images, ArrayImages(masks, f"{path}, mask"), description)


def _scenes_pool(*, is_held_out: bool) -> _Pool:
    images, masks = digit_scenes(held_out=is_held_out)
    return _Pool(images, masks, f"{images.name}: {len(images):,} images")


def _pair_of_folders(path: Path) -> tuple[Path, Path] | None:
    """`path/images` and `path/masks`; or, for a path that goes through a folder `images`, its twin through `masks`."""
    if (path / "images").is_dir() and (path / "masks").is_dir():
        return path / "images", path / "masks"
    parts = path.parts
    if "images" not in parts:
        return None
    last = len(parts) - 1 - parts[::-1].index("images")
    twin = Path(*parts[:last], "masks", *parts[last + 1 :])
    return (path, twin) if twin.is_dir() else None


def _folder_pool(images: Path, masks: Path, data: Data) -> _Pool:
    """Images and masks of one relative name, whatever the ends (`a/b.jpg` and `a/b.png`)."""
    image_names, mask_names = list_images(images)[0], list_images(masks)[0]
    if data.mask_column is None:
        return _Pool(FileImages(images, tuple(image_names)), None, f"{images}: {len(image_names):,} images")
    mask_of: dict[str, str] = {}
    for name in mask_names:
        stem = os.path.splitext(name)[0]
        if stem in mask_of:
            raise ValueError(f"{masks / mask_of[stem]} and {masks / name} are masks of one image; remove one of them")
        mask_of[stem] = name
    if not image_names:
        raise ValueError(f"{images} holds no image; add some, or name another folder")
    stems = [os.path.splitext(name)[0] for name in image_names]
    alone = [name for name, stem in zip(image_names, stems) if stem not in mask_of]
    if alone:
        more = f" (and {len(alone) - 1} more images have none)" if len(alone) > 1 else ""
        raise ValueError(
            f"{images / alone[0]} has no mask: there is no {masks / os.path.splitext(alone[0])[0]}.png (or another image "
            f"format){more}; add it, or remove the image"
        )
    left_out = len(mask_of) - len(set(stems))
    notes = (f"{masks}: left out {left_out} masks without an image",) if left_out else ()
    return _Pool(
        FileImages(images, tuple(image_names)),
        FileImages(masks, tuple(mask_of[stem] for stem in stems)),
        f"{images} and {masks}: {len(stems):,} pairs",
        notes=notes,
    )


def _digests(pool: _Pool, needed: bool) -> NDArray[np.uint64] | None:
    """Of each image; above 20,000 of them only where the split needs it."""
    return inspect_images(pool.images) if needed or len(pool.images) <= INSPECTED_LIMIT else None


def _identity(pool: _Pool, digests: NDArray[np.uint64] | None) -> str:
    masks = () if pool.masks is None else (pool.masks,)
    if digests is None:
        return text_digest(images.stamp() for images in (pool.images, *masks))
    return text_digest(found.tobytes().hex() for found in (digests, *map(inspect_images, masks)))
