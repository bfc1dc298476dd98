"""The parts of a data set by a column of its table, which is split into one file per part, or by a hub's README.md."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from accel_train.data.parts import Part, pick
from accel_train.data.sources import file_kind
from accel_train.data.tables import SPLITS, columns_with_parts, parts_in, rows_of
from accel_train.experiments.finetune.columns import data_at, files_at, read_table, source_of
from accel_train.experiments.finetune.recipe import MOST_LISTED, Asked, Converted
from accel_train.recipe.yaml_core import parse_yaml

_HEAD = re.compile(r"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)


def rows_by_part(asked: Asked, path: Path) -> Converted | None:
    """Return a file for each part that a column of a table names: parquet as parquet, other rows as jsonl.

    Returns None without this column, and for a table that names image files, because its paths are relative to it.

    Raises:
        ValueError: some rows of the column are of no part.
    """
    if not path.is_file():
        return None
    source, kind = source_of(path), file_kind(path)
    try:
        data = data_at(path, asked)
    # The reader of the table will report the byte.
    except ValueError:
        return None
    columns, names = columns_with_parts(source, data, (*asked.label, *asked.text))
    for name, cells in columns.items():
        parts = parts_in(str(path), name, cells, names)
        if parts is None:
            continue
        from accel_train.experiments.finetune.images import image_column  # imports Pillow

        images = image_column(read_table(path, asked))
        if images is not None and isinstance(images[1][0], str):
            continue
        by = f" by column {name!r}"
        found = {SPLITS[part]: numbers for part, numbers in parts.items()}
        if kind == "parquet":
            return Converted({f"{split}.parquet": _parquet_of(path, rows) for split, rows in found.items()}, by)
        every = list(rows_of(source, names, data))
        parted = {split: [every[number] for number in numbers] for split, numbers in found.items()}
        return Converted({f"{split}.jsonl": asked.jsonl(rows) for split, rows in parted.items()}, by)
    return None


def _parquet_of(path: Path, rows: Sequence[int]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).take(rows), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def parts_of_card(folder: Path) -> dict[Part, Path]:
    """Return the path or pattern of each part that the README.md of a data set on the hub names, or nothing.

    Raises:
        ValueError: it names several data sets, no files for training, or several patterns for a part.
    """
    card = folder / "README.md"
    head = _HEAD.match(card.read_text(errors="replace")) if card.is_file() else None
    try:
        content = parse_yaml(head[1], str(card))[0] if head is not None else None
    # The card of something else.
    except ValueError:
        return {}
    configs = content.get("configs") if isinstance(content, dict) else None
    named = [each for each in configs if isinstance(each, dict)] if isinstance(configs, list) else []
    named = [each for each in named if isinstance(each.get("data_files"), str | list | dict)]
    found = {str(each.get("config_name")): _files_of(each["data_files"]) for each in named}
    places = {name: {part: _place(folder, name, files) for part, files in each.items()} for name, each in found.items()}
    if len(places) > 1:
        commands = [_command(name, each) for name, each in places.items()][:MOST_LISTED]
        raise ValueError(f"{card} names {len(places)} data sets. Choose one: {'; '.join(commands)}")
    return next(iter(places.values()), {})


def _command(name: str, places: Mapping[Part, Path]) -> str:
    train, held = (quote(str(places[part])) if part in places else "" for part in SPLITS if part != "test")
    return f"{name}: accel-train finetune {train}{f' --data.eval {held}' if held else ''}"


def _files_of(data_files: str | list[Any] | dict[Any, Any]) -> dict[Part, list[str]]:
    """Return the patterns of each part: a pattern, a list of them, or of {split, path}, or a mapping of splits."""
    from datasets.data_files import sanitize_patterns  # slow to import

    files = {name: [*map(str, patterns)] for name, patterns in sanitize_patterns(data_files).items()}
    names: dict[Part, str | None] = {part: pick(files, part) for part in SPLITS}
    names["train"] = names["train"] or (next(iter(files)) if len(files) == 1 else None)
    return {part: files[name] for part, name in names.items() if name is not None and files[name]}


def _place(folder: Path, name: str, files: Sequence[str]) -> Path:
    found = [folder / file for file in files]
    # A stranger's file names nothing outside of its folder.
    is_inside = folder in found[0].parents and ".." not in found[0].parts[len(folder.parts) :]
    if len(found) > 1 or not is_inside or not files_at(found[0]):
        problem = "several patterns for a part" if len(found) > 1 else f"{files[0]}, which is not in the folder"
        raise ValueError(
            f"{folder / 'README.md'}: {name} names {problem}. Name the files: accel-train finetune "
            f"{quote(str(found[0]))}"
        )
    return found[0]
