"""Files next to the data that are not read: test data, descriptions, and other tables."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_train.core.files import files_below
from accel_train.data.sources import file_kind, files_of, resolve_sources
from accel_train.experiments.finetune.columns import with_settings
from accel_train.experiments.finetune.found import Asked, Found
from accel_train.experiments.finetune.labels import NAME_FILES, names_in

EVAL_NAME = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|dev|eval)(?:[^a-z]|$)")
TEST_NAME = re.compile(r"(?:^|[^a-z])test(?:ing)?(?:[^a-z]|$)")
TRAIN_NAME = re.compile(r"(?:^|[^a-z])train(?:ing)?(?:[^a-z]|$)")
UNLABELLED = ("unsup", "unlabeled", "unlabelled")
"""Names of text folders without a class."""
_MOST_LISTED = 5
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.parquet")


def part_of(path: Path, folder: Path) -> Path:
    """Return the highest folder (or the file) named after training, evaluation, or tests.

    Without such a name, return the top folder or the file.
    """
    below = [*reversed(path.relative_to(folder).parents[:-1]), path.relative_to(folder)]
    patterns = (TRAIN_NAME, EVAL_NAME, TEST_NAME)
    said = (each for each in below if any(pattern.search(each.stem.lower()) for pattern in patterns))
    return folder / next(said, below[0])


def is_part(path: Path, folder: Path, pattern: re.Pattern[str]) -> bool:
    """Return whether the part of the data that holds a file matches `pattern`, for example `TRAIN_NAME`."""
    return pattern.search(part_of(path, folder).stem.lower()) is not None


def shards_of(path: Path) -> Path:
    """Return the pattern of all shards of a parquet file, as the hub names them. Other paths are returned unchanged."""
    shard = _SHARD.fullmatch(path.name)
    return path if shard is None else path.with_name(f"{shard[1]}-*-of-{shard[2]}.parquet")


def listed(names: Sequence[str]) -> str:
    """Return names separated by commas. Long lists show only the first names."""
    more = f" and {len(names) - _MOST_LISTED:,} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def with_unused_files(found: Found, asked: Asked, path: Path) -> Found:
    """Return `found` with the files that the run will not read: all below a folder, or test data next to a file."""
    if found.unused is None:
        return found
    data, read = with_settings(asked.data, found.settings), set[Path]()
    for names in (data.train, data.eval):
        if names is not None:
            read |= {file.resolve() for file in files_of(resolve_sources(names, data, key=str(path)))}
    folder = path if path.is_dir() else path.parent
    others = [file for file in (files_below(folder) if path.is_dir() else sorted(folder.iterdir())) if file.is_file()]
    others = [file for file in others if file.resolve() not in read]
    if "data.label_names" in found.settings:
        names = found.settings["data.label_names"].value
        beside = [Path(str(data.train)).with_name(name) for name in NAME_FILES]
        read_names = next((file for file in beside if file in others and names_in(file, asked.data) == names), None)
        others = [file for file in others if file != read_names]
    tests = [file for file in others if is_part(file, folder, TEST_NAME) and file_kind(file) is not None]
    if not path.is_dir():
        held_out = [file for file in others if EVAL_NAME.search(file.stem.lower())]
        shards = [file for file in others if shards_of(file) == shards_of(path) != path]
        others = [file for file in (*held_out, *shards, *tests) if file.suffix == path.suffix]
        tests = [file for file in tests if file in others]
    top = sorted({shards_of(part_of(test, folder)) for test in tests})
    test = str(top[0]) if top else None
    rest = _by_folder([file.relative_to(folder) for file in others if file not in tests])
    unused = (*found.unused, *((f"files {rest}",) if rest else ()))
    return replace(found, unused=unused, test=test)


def _by_folder(files: Sequence[Path]) -> str:
    """Return the names of files. Many files of one folder are shown as one entry."""
    counts = Counter(path.parent for path in files)
    names = []
    for path in files:
        name = (
            path.as_posix()
            if counts[path.parent] <= _MOST_LISTED
            else f"{path.parent}/* ({counts[path.parent]:,} files)"
        )
        names.append(name if path.parent != Path() else path.name)
    return listed(list(dict.fromkeys(names)))
