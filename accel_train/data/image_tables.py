"""Tables whose rows hold or name images: parquet, csv, jsonl and data sets; images are read when they are asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.data.cache import cache_root
from accel_train.data.images import RowImages
from accel_train.data.sources import Source, SourceFile
from accel_train.data.tables import class_names, read_rows
from accel_train.recipe_data import Data

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class ImageTable:
    """The rows of one file or data set."""

    name: str
    images: dict[str, RowImages]
    """By column."""
    values: dict[str, list[Any]]
    """The cells of other columns (labels, ids), as the source has them."""
    class_names: dict[str, tuple[str, ...] | None]
    """What a data set calls the integers of such a column (`datasets.ClassLabel`)."""


def read_image_tables(
    source: Source, data: Data, *, image_columns: tuple[str, ...], columns: tuple[str, ...]
) -> list[ImageTable]:
    """The tables of a source, with columns of images (or masks) and columns of small values.

    The bytes of parquet and data sets stay on disk, memory-mapped (`datasets` keeps its copy of a parquet file in
    `data.cache_dir`); a csv or jsonl file holds paths, relative to itself.

    Raises:
        ValueError: a file is no table, a column is missing, or a row is broken or there is none; the text names them.
    """
    if source.dataset is not None:
        tables = [_mapped(source, source.dataset, Path.cwd(), data, image_columns, columns)]
    else:
        tables = [_file(replace(source, files=(file,)), file, data, image_columns, columns) for file in source.files]
    for table in tables:
        if not len(table.images[image_columns[0]]):
            raise ValueError(f"{table.name}: there are no rows; take the file out")
    return tables


def _file(
    source: Source, file: SourceFile, data: Data, image_columns: tuple[str, ...], columns: tuple[str, ...]
) -> ImageTable:
    if file.kind == "parquet":
        return _mapped(source, _parquet(file, data), file.path.parent, data, image_columns, columns)
    rows = list(read_rows(source, (*image_columns, *columns), data))
    cells = dict(zip((*image_columns, *columns), zip(*(row.cells for row in rows)))) if rows else {}
    places = tuple(row.where for row in rows)
    images = {
        name: RowImages(cells.get(name, ()), file.path.parent, name, str(file.path), places) for name in image_columns
    }
    return ImageTable(str(file.path), images, {name: list(cells.get(name, ())) for name in columns}, {})


def _mapped(
    source: Source,
    dataset: "datasets.Dataset",
    folder: Path,
    data: Data,
    image_columns: tuple[str, ...],
    columns: tuple[str, ...],
) -> ImageTable:
    name = str(source.files[0].path) if source.files else source.name
    for column in image_columns:
        if column not in dataset.column_names:
            raise ValueError(
                f"{name}: the column {column!r} is missing; available: {', '.join(dataset.column_names)}; "
                f"set data.{'mask' if column == data.mask_column else 'image'}_column"
            )
    images = {column: RowImages(_Cells(dataset, column), folder, column, name) for column in image_columns}
    with_dataset = replace(source, files=(), dataset=dataset, name=name)
    cells = list(zip(*(row.cells for row in read_rows(with_dataset, columns, data)))) if columns else []
    values = {column: list(found) for column, found in zip(columns, cells)} or {column: [] for column in columns}
    return ImageTable(name, images, values, {column: class_names(with_dataset, column) for column in columns})


def _parquet(file: SourceFile, data: Data) -> "datasets.Dataset":
    import datasets

    try:
        with _no_bars():
            return datasets.Dataset.from_parquet(str(file.path), cache_dir=str(cache_root(data) / "images"))
    except Exception as error:  # whatever pyarrow or datasets raise for a damaged file
        reason = (str(error.__cause__ or error).strip() or repr(error)).splitlines()[0]
        raise ValueError(f"{file.path}: not a parquet file ({reason}); is it complete?") from error


class _Cells(Sequence[Any]):
    """A column of a data set, cell by cell. Images stay bytes and path: we decode, and know the row that is broken."""

    def __init__(self, dataset: "datasets.Dataset", column: str) -> None:
        import datasets

        alone = dataset.select_columns([column]).with_format(None)
        if isinstance(alone.features[column], datasets.Image):
            alone = alone.cast_column(column, datasets.Image(decode=False))
        self.dataset, self.column = alone, column

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        return self.dataset[row][self.column]


@contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bar of `datasets` inside: it would be drawn into ours."""
    import datasets

    was_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()
