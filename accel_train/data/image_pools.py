"""What a name in `data.train` or `data.eval` stands for: images, and a label for each as its source has it."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.data.image_arrays import ARRAY_SUFFIXES, digits, read_arrays
from accel_train.data.image_tables import read_image_tables
from accel_train.data.images import FileImages, Images, join_images, list_images
from accel_train.data.sources import resolve_sources
from accel_train.recipe_data import Data

EMBEDDED_IMAGES = ("digits",)


@dataclass(frozen=True)
class ImagePool:
    """Everything one leaf of the recipe names, before labels are numbers."""

    images: Images
    labels: list[Any]
    """Of each image, as its source has it: a name or an integer; None without `data.label_column`."""
    names: tuple[str, ...] | None
    """What a data set calls its integers."""
    description: str
    decoded: bool
    ids: list[str] | None = None
    notes: tuple[str, ...] = ()


def read_pools(names: Sequence[str], data: Data, leaf: str) -> ImagePool:
    """Everything that a leaf names, as one.

    Raises:
        ValueError: something is missing, of an unknown kind, or a row is broken; the text names it.
    """
    pools = [pool for name in names for pool in _read_pool(name, data, leaf)]
    if not pools:
        raise ValueError(f"{leaf} is empty; name a folder of images, a table, an array, or one of {EMBEDDED_IMAGES}")
    if len(pools) == 1:
        return pools[0]
    if len({pool.names for pool in pools}) > 1:
        raise ValueError(f"{leaf}: its sources do not agree on the names of the classes; say data.label_names")
    ids = [
        [str(pool.images.where(row)) for row in range(len(pool.images))] if pool.ids is None else pool.ids
        for pool in pools
    ]
    return ImagePool(
        join_images([pool.images for pool in pools]),
        [label for pool in pools for label in pool.labels],
        pools[0].names,
        ", ".join(pool.description for pool in pools),
        all(pool.decoded for pool in pools),
        [i for part in ids for i in part] if any(pool.ids is not None for pool in pools) else None,
        tuple(note for pool in pools for note in pool.notes),
    )


def _read_pool(name: str, data: Data, leaf: str) -> list[ImagePool]:
    if name == "digits":
        array, targets = digits()
        return [ImagePool(array, targets.tolist(), None, f"digits of scikit-learn: {len(array):,} images", True)]
    path = Path(name).expanduser()
    if path.suffix.lower() in ARRAY_SUFFIXES:
        return [_array_pool(Path(found), data) for found in _matches(name, path, leaf)]
    if path.is_dir():
        files, num_others = list_images(path)
        if files:
            return [_folder_pool(path, files, num_others, data, leaf)]
        if any(entry.is_dir() for entry in path.iterdir()) and not num_others:
            raise ValueError(f"{leaf}: there is no image below the folder {name!r}; expected {name}/CLASS/*.png")
    pools = []
    columns = tuple(column for column in (data.label_column, data.id_column) if column is not None)
    for source in resolve_sources(name, data, leaf=leaf):
        for table in read_image_tables(source, data, image_columns=(data.image_column,), columns=columns):
            images = table.images[data.image_column]
            labels = [None] * len(images) if data.label_column is None else table.values[data.label_column]
            ids = None if data.id_column is None else [str(value) for value in table.values[data.id_column]]
            named = None if data.label_column is None else table.class_names.get(data.label_column)
            pools.append(
                ImagePool(images, labels, named, f"{table.name}: {len(images):,} rows", False, ids, source.notes)
            )
    return pools


def _matches(name: str, path: Path, leaf: str) -> list[str]:
    if path.is_file():
        return [str(path)]
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise ValueError(f"{leaf}: there is no file {name!r} (seen from {Path.cwd()}); check the path")
    return found


def _folder_pool(folder: Path, files: list[str], num_others: int, data: Data, leaf: str) -> ImagePool:
    """root/CLASS/.../image: the first folder below the root is the class."""
    notes = (f"{folder}: left out {num_others} files that are no images",) if num_others else ()
    images, description = FileImages(folder, tuple(files)), f"{folder}: {len(files):,} images"
    if data.label_column is None:
        return ImagePool(images, [None] * len(files), None, description, False, notes=notes)
    classless = [file for file in files if "/" not in file]
    if classless:
        raise ValueError(
            f"{leaf}: {folder / classless[0]} lies in no class folder; expected {folder}/CLASS/{classless[0]} (move or "
            "remove it, or name a table with columns for image and label)"
        )
    labels = [file.split("/", 1)[0] for file in files]
    folders = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    empty = sorted(folders - set(labels))
    if empty:
        raise ValueError(
            f"{leaf}: the class folder {folder / empty[0]} holds no image; add some, or remove the folder"
            + (f" (and {len(empty) - 1} more)" if len(empty) > 1 else "")
        )
    description += f" in {len(folders)} folders"
    return ImagePool(images, labels, None, description, False, notes=notes)


def _array_pool(path: Path, data: Data) -> ImagePool:
    description = f"{path}: {{:,}} images"
    if data.label_column is None:
        images, _ = read_arrays(path, data.image_column, ())
        return ImagePool(images, [None] * len(images), None, description.format(len(images)), True)
    images, columns = read_arrays(path, data.image_column, (data.label_column,))
    labels = columns[data.label_column]
    if labels.ndim != 1 or labels.dtype.kind not in "iuUS":
        raise ValueError(
            f"{path}: labels are {labels.dtype} of shape {labels.shape}, not ({len(images)},) integers or names"
        )
    values = [value.decode() if isinstance(value, bytes) else value for value in labels.tolist()]
    return ImagePool(images, values, None, description.format(len(images)), True)
