"""Split a table by a column that names the part of each row (train, validation, test), into one file per part."""

import json
from collections.abc import Sequence
from pathlib import Path

from accel_train.data.sources import file_kind
from accel_train.data.tables import SPLITS, columns_with_parts, parts_in, rows_of
from accel_train.experiments.finetune.columns import read_table, readings, source_of, with_settings
from accel_train.experiments.finetune.recipe import Asked


def rows_by_part(asked: Asked, path: Path) -> tuple[str, dict[str, bytes]] | None:
    """Return words for the column of parts in a table, and a file for each: parquet as parquet, other rows as jsonl.

    Returns None without this column, and for a table that names image files, because its paths are relative to it.

    Raises:
        ValueError: some rows of the column are of no part.
    """
    if not path.is_file():
        return None
    source, kind = source_of(path), file_kind(path)
    try:
        data = with_settings(asked.data, readings(path, asked.data, asked.given))
    # The reader of the table will report the byte.
    except ValueError:
        return None
    columns, names = columns_with_parts(source, data, (*asked.label, *asked.text))
    for name, cells in columns.items():
        parts = parts_in(str(path), name, cells, names)
        if parts is None or _names_images(asked, path):
            continue
        by = f" by column {name!r}"
        found = {SPLITS[part]: numbers for part, numbers in parts.items()}
        if kind == "parquet":
            return by, {f"{split}.parquet": _parquet_of(path, numbers) for split, numbers in found.items()}
        encoding = data.encoding if "data.encoding" in asked.given else "utf-8"
        lines = [f"{json.dumps(row)}\n" for row in rows_of(source, names, data)]
        texts = {split: "".join(lines[number] for number in numbers) for split, numbers in found.items()}
        return by, {f"{split}.jsonl": text.encode(encoding) for split, text in texts.items()}
    return None


def _names_images(asked: Asked, path: Path) -> bool:
    from accel_train.experiments.finetune.images import image_column  # imports Pillow

    found = image_column(read_table(path, asked.data, asked.given))
    return found is not None and isinstance(found[1][0], str)


def _parquet_of(path: Path, rows: Sequence[int]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).take(rows), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
