"""Refuse audio, video, and WebDataset shards by name."""

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

_AUDIO = "wav mp3 flac ogg oga opus m4a aac wma aif aiff"
_VIDEO = "mp4 m4v avi mov mkv webm mpg mpeg wmv"
_SUFFIXES = {f".{name}": kind for kind, names in (("audio", _AUDIO), ("video", _VIDEO)) for name in names.split()}
_TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_IMAGES = (".jpg", ".jpeg", ".png", ".webp")
_LISTED = 1_000
_NUM_LOOKED_AT = 20
_AS_TABLE = (
    "write a table: datasets.load_dataset('webdataset', data_files='*.tar', split='train').to_parquet('train.parquet')"
)
NO_TASK = "accel_train has no task for {0}. Use the {0} models of transformers"


def refuse_other_data(name: str, *, is_asked: bool) -> None:
    """Refuse a file or folder of audio, video, or WebDataset shards.

    Looks at the first files of a folder. `is_asked`: a task was named.

    Raises:
        ValueError: most files are of one of these kinds; the message names a file.
    """
    path = Path(name).expanduser()
    walk = ((root, sorted(files)) for root, _, files in os.walk(path)) if path.is_dir() else iter([("", [path.name])])
    files = list(islice((Path(root, file) for root, names in walk for file in names if file[0] != "."), _LISTED))
    media = [file for file in files if file.suffix.lower() in _SUFFIXES]
    has_table = any(file.suffix.lower() in _TABLES for file in files)
    if 2 * len(media) > len(files) and not has_table and not is_asked:
        kind = _SUFFIXES[media[0].suffix.lower()]
        raise ValueError(f"{name} holds {kind} ({media[0].name}), and {NO_TASK.format(kind)}")
    shards = [file for file in files if file.suffix == ".tar"]
    if path.is_dir() and files and len(shards) == len(files):
        raise ValueError(f"{name} holds tar files ({shards[0].name}). Unpack them; for WebDataset, {_AS_TABLE}")
    if (sample := _sample_of(files)) is not None:
        raise ValueError(f"{name} holds samples of WebDataset ({sample}), which finetune does not read; {_AS_TABLE}")


def _sample_of(files: list[Path]) -> str | None:
    """Return the files of one sample of a WebDataset, or None: an image with .cls, or with .json and .txt."""
    samples = defaultdict[PurePath, list[str]](list)
    for file in files:
        samples[file.with_name(file.name.partition(".")[0])].append(file.name)
    for names in samples.values():
        ends = {name.rpartition(".")[2] for name in names}
        if any(name.lower().endswith(_IMAGES) for name in names) and ("cls" in ends or {"json", "txt"} <= ends):
            return ", ".join(names)
    return None


def medium_of(cells: Sequence[Any]) -> str | None:
    """Return audio or video if the first cells of a column are such files, or None."""
    kinds = {_kind_of(cell) for cell in cells[:_NUM_LOOKED_AT]}
    return next(iter(kinds)) if len(kinds) == 1 else None


def _kind_of(cell: Any) -> str | None:
    name = cell.get("path") if isinstance(cell, dict) else cell
    return _SUFFIXES.get(os.path.splitext(name)[1].lower()) if isinstance(name, str) else None
