"""Images in tables (parquet, csv, jsonl, data sets), read on request, and in NumPy files (.npz, .npy)."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from accel_train.core.format import format_count
from accel_train.data.cache import cache_root
from accel_train.data.images.images import IMAGE_SUFFIXES, ArrayImages, ImagePool, RowImages, Target, evenly_spaced
from accel_train.data.sources import Source
from accel_train.data.tables import check_columns, class_names, read_rows
from accel_train.recipe.data import ImageData

if TYPE_CHECKING:
    import datasets

ARRAY_SUFFIXES = frozenset((".npz", ".npy"))
_NUM_PROBED = 20
"""Number of cells whose files are looked up in the folders next to a table."""


def table_pool(source: Source, data: ImageData, target: Target) -> ImagePool:
    """Return the images of one file or data set with their masks or labels.

    The bytes of parquet files and data sets stay on disk, memory-mapped. `datasets` stores its copy of a parquet file
    in `data.cache_dir`. A csv or jsonl file holds paths relative to itself.

    Raises:
        ValueError: the source is not a table or is empty, a column is missing, or a row is broken.
    """
    image_columns = [column for column in (data.image_column, target.mask) if column is not None]
    columns = [column for column in (target.label, data.id_column) if column is not None]
    path = source.files[0] if source.files else None
    name, folder = (source.name, Path.cwd()) if path is None else (str(path), path.parent)
    dataset = open_dataset(source, data)
    if dataset is not None:
        check_columns(name, dataset.column_names, image_columns, data)
        source = replace(source, files=(), dataset=dataset, name=name)
        cells = list(zip(*(row.cells for row in read_rows(source, columns, data)))) if columns else []
        images = [RowImages(_StoredCells(dataset, column), folder, column, name) for column in image_columns]
    else:
        rows = list(read_rows(source, (*image_columns, *columns), data))
        places = tuple(row.where for row in rows)
        cells = list(zip(*(row.cells for row in rows))) or [()]
        found = [find_images(folder, name, values) or values for values in cells[: len(image_columns)]]
        images = [RowImages(values, folder, column, name, places) for values, column in zip(found, image_columns)]
        cells = cells[len(image_columns) :]
    if not len(images[0]):
        raise ValueError(f"{name}: the file has no rows; take it out")
    values = dict(zip(columns, map(list, cells)))
    return ImagePool(
        images[0],
        f"{name}: {format_count(len(images[0]), 'row')}",
        [] if target.label is None else values[target.label],
        masks=images[1] if len(images) > 1 else None,
        names=class_names(source, target.label),
        ids=None if data.id_column is None else [str(value) for value in values[data.id_column]],
        notes=source.notes,
    )


def find_images(folder: Path, table: str, values: Sequence[Any]) -> Sequence[Any] | None:
    """Return the files that a table's cells name, relative to its `folder`, or None if not found.

    The files lie next to the table or in one folder there (`train/` for `train.csv`). Cells may lack the suffix.

    Raises:
        ValueError: two folders hold the files.
    """
    names = [value for value in values if isinstance(value, str) and value]
    probes = [names[index] for index in evenly_spaced(len(names), _NUM_PROBED)]
    if not probes or any(_file_of(folder, probe) == probe for probe in probes):
        return values if probes else None
    folders = [
        entry.name for entry in sorted(folder.iterdir()) if os.path.isdir(entry) and not entry.name.startswith(".")
    ]
    preferred = ["", *(name for name in folders if name == Path(table).stem)]
    places = [place for place in (*preferred, *folders) if any(_file_of(folder / place, probe) for probe in probes)]
    places = list(dict.fromkeys(places))
    if not places:
        return None
    if len(places) > 1 and places[0] not in preferred:
        raise ValueError(
            f"{table}: {places[0]}/ and {places[1]}/ both hold its images; write the folder into the cells "
            f"({places[0]}/{probes[0]})"
        )
    found = (
        (value, _file_of(folder / places[0], value) if isinstance(value, str) and value else None) for value in values
    )
    return [value if file is None else os.path.join(places[0], file) for value, file in found]


def _file_of(folder: Path, name: str) -> str | None:
    """Return the name of a file with its actual suffix, or None if it does not exist."""
    endings = ("",) if name.lower().endswith(IMAGE_SUFFIXES) else ("", *IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))
    return next((name + ending for ending in endings if os.path.isfile(folder / (name + ending))), None)


def open_dataset(source: Source, data: ImageData) -> "datasets.Dataset | None":
    """Return a source's data set or its parquet file, memory-mapped, or None. Raises ValueError if it is damaged."""
    if source.kind != "parquet":
        return source.dataset
    import datasets

    path = source.files[0]
    has_bars = datasets.is_progress_bar_enabled()
    # Their bars would be drawn into ours.
    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_parquet(str(path), cache_dir=str(cache_root(data) / "images"))
    # pyarrow and datasets raise many types for a damaged file.
    except Exception as error:
        reason = (str(error.__cause__ or error).strip() or repr(error)).splitlines()[0]
        raise ValueError(f"{path}: not a parquet file ({reason}); is it complete?") from error
    finally:
        if has_bars:
            datasets.enable_progress_bars()


class _StoredCells(Sequence[Any]):
    """A column of a data set as stored: images are bytes and paths.

    `datasets` would decode them itself, in any of Pillow's formats, and without the broken row in its error.
    """

    def __init__(self, dataset: "datasets.Dataset", column: str) -> None:
        self._rows = dataset.select_columns([column]).with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index].column(0)[0].as_py()


def array_pool(path: Path, data: ImageData, target: Target) -> ImagePool:
    """Return the images of an array file with their masks or labels.

    `.npz`: arrays named like the columns, or with an s (`images`, `labels`). `.npy`: images only, memory-mapped. Labels
    or masks lie next to it under a name that replaces `images` (`train_images.npy`, `train_labels.npy`).

    Raises:
        ValueError: an array is missing or has the wrong shape or type.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is not a regular file (a pipe, a device or a folder); name an array file")
    array = _read(path, data.image_column, data.image_column)
    _check_images(path, array)
    images = ArrayImages(array, str(path))
    description = f"{path}: {format_count(len(images), 'image')}"
    column = target.column
    if column is None:
        return ImagePool(images, description)
    found, shape = _read(path, column, data.image_column), array.shape[:3]
    if found.shape[:1] != shape[:1]:
        raise ValueError(
            f"{path}: {format_count(len(images), 'image')}, but {column!r} has the shape {found.shape}; one "
            "each is needed"
        )
    if target.mask is not None:
        if found.shape != shape or found.dtype != np.uint8:
            raise ValueError(f"{path}: masks are {found.dtype} of shape {found.shape}, not uint8 of shape {shape}")
        return ImagePool(images, description, masks=ArrayImages(found, f"{path}, mask"))
    if found.ndim != 1 or found.dtype.kind not in "iuUS":
        raise ValueError(
            f"{path}: labels are {found.dtype} of shape {found.shape}, not ({len(images)},) integers or names"
        )
    labels = [value.decode() if isinstance(value, bytes) else value for value in found.tolist()]
    return ImagePool(images, description, labels)


def _read(path: Path, name: str, image_column: str) -> NDArray[Any]:
    try:
        if path.suffix.lower() == ".npz":
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                for spelling in (name, f"{name}s"):
                    if spelling in file.files:
                        return np.asarray(file[spelling])
                available = ", ".join(file.files)
            raise KeyError(f"no array {name!r} or '{name}s'; available: {available}")
        if name != image_column:
            path = _next_to(path, name, image_column)
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except KeyError as error:
        raise ValueError(
            f"{path}: {error.args[0]}; set data.{'image' if name == image_column else name}_column"
        ) from None
    # zipfile, pickle and NumPy raise their own types.
    except Exception as error:
        raise ValueError(
            f"{path}: cannot be read as an array ({str(error).splitlines()[0]}); is it complete?"
        ) from error


def _next_to(path: Path, name: str, image_column: str) -> Path:
    """Return the file of labels or masks: the images' name with `images` replaced."""
    for old in (f"{image_column}s", image_column):
        if old in path.stem:
            several, one = (path.with_stem(path.stem.replace(old, new)) for new in (f"{name}s", name))
            return one if os.path.isfile(one) and not os.path.isfile(several) else several
    raise KeyError(f"its name has no '{image_column}s' to find the file with '{name}s' by; rename it, or use .npz")


def _check_images(path: Path, images: NDArray[Any]) -> None:
    shape = images.shape
    if images.dtype != np.uint8:
        raise ValueError(f"{path}: images are {images.dtype}; whole numbers 0 to 255 are needed: save them as uint8")
    if all(shape) and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3, 4))):
        return
    channels_first = len(shape) == 4 and shape[1] in (1, 3, 4)
    hint = "it seems to have channels first: transpose it" if channels_first else "reshape it"
    raise ValueError(f"{path}: images of shape {shape} are not N x H x W or N x H x W x 1, 3 or 4; {hint}")
