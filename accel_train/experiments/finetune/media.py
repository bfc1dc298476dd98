"""Refuse audio, video, and WebDataset shards by name."""

import os
from collections import defaultdict
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from accel_train.data.images.images import IMAGE_SUFFIXES
from accel_train.experiments.finetune.columns import Column, Table
from accel_train.experiments.finetune.recipe import Asked

_AUDIO = "wav mp3 flac ogg oga opus m4a aac wma aif aiff"
_VIDEO = "mp4 m4v avi mov mkv webm mpg mpeg wmv"
_SUFFIXES = {f".{name}": kind for kind, names in (("audio", _AUDIO), ("video", _VIDEO)) for name in names.split()}
_TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_LISTED = 1_000
_NUM_LOOKED_AT = 20
_AS_TABLE = (
    "write a table: datasets.load_dataset('webdataset', data_files='*.tar', split='train').to_parquet('train.parquet')"
)
_NO_TASK = "accel_train has no task for {0}. Use the {0} models of transformers"


def refuse_other_data(asked: Asked) -> None:
    """Refuse a file or folder of audio, video, or WebDataset shards. Looks at the first files of a folder.

    Raises:
        ValueError: most files are of one of these kinds; the message names a file.
    """
    path = Path(asked.path).expanduser()
    walk = ((root, sorted(files)) for root, _, files in os.walk(path)) if path.is_dir() else iter([("", [path.name])])
    files = list(islice((Path(root, name) for root, names in walk for name in names if name[0] != "."), _LISTED))
    media = [file for file in files if file.suffix.lower() in _SUFFIXES]
    has_table = any(file.suffix.lower() in _TABLES for file in files)
    if 2 * len(media) > len(files) and not has_table and asked.task is None:
        kind = _SUFFIXES[media[0].suffix.lower()]
        raise ValueError(f"{asked.path} holds {kind} ({media[0].name}), and {_NO_TASK.format(kind)}")
    shards = [file for file in files if file.suffix == ".tar"]
    if path.is_dir() and files and len(shards) == len(files):
        raise ValueError(f"{asked.path} holds tar files ({shards[0].name}). Unpack them; for WebDataset, {_AS_TABLE}")
    if (sample := _sample_of(files)) is not None:
        raise ValueError(
            f"{asked.path} holds samples of WebDataset ({sample}), which finetune does not read; {_AS_TABLE}"
        )


def _sample_of(files: list[Path]) -> str | None:
    """Return the files of one sample of a WebDataset, or None: an image with .cls, or with .json and .txt."""
    samples = defaultdict[PurePath, list[str]](list)
    for file in files:
        samples[file.with_name(file.name.partition(".")[0])].append(file.name)
    for names in samples.values():
        ends = {name.rpartition(".")[2] for name in names}
        if any(name.lower().endswith(IMAGE_SUFFIXES) for name in names) and ("cls" in ends or {"json", "txt"} <= ends):
            return ", ".join(names)
    return None


def medium_of(column: Column) -> str | None:
    """Return audio or video if all cells of a column are such files, or None."""
    kinds = {_kind_of(cell) for cell in column.cells[:_NUM_LOOKED_AT]}
    return next(iter(kinds)) if len(kinds) == 1 else None


def _kind_of(cell: Any) -> str | None:
    name = cell.get("path") if isinstance(cell, dict) else cell
    return _SUFFIXES.get(os.path.splitext(name)[1].lower()) if isinstance(name, str) else None


def refuse_media(table: Table) -> None:
    """Refuse a table of audio or video files without a column of texts.

    Raises:
        ValueError: a column names such files; the message names it.
    """
    columns = table.columns.values()
    column = next((each for each in columns if medium_of(each) is not None), None)
    if column is not None and not any(each.is_text for each in columns):
        kind = medium_of(column) or ""
        raise ValueError(
            f"{table.path}: column {column.name!r} names {kind} files, and {_NO_TASK.format(kind)}. For a column of "
            "texts: --text COLUMN"
        )
