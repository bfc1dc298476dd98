"""Files next to the data that are not read: test data, descriptions, other tables."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_train.core.files import files_below
from accel_train.data.sources import file_kind, files_of, resolve_sources
from accel_train.experiments.finetune.columns import with_settings
from accel_train.experiments.finetune.found import Asked, Found

EVAL_NAME = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|dev|eval)(?:[^a-z]|$)")
TEST_NAME = re.compile(r"(?:^|[^a-z])test(?:ing)?(?:[^a-z]|$)")
TRAIN_NAME = re.compile(r"(?:^|[^a-z])train(?:ing)?(?:[^a-z]|$)")
UNLABELLED = ("unsup", "unlabeled", "unlabelled")
"""Folders of texts that have no class."""
_MOST_LISTED = 5


def part_of(path: Path, folder: Path) -> str:
    """Return the name, in lower case, that says whether a file is for training or tests: the file's or its top folder's below `folder`."""
    first, *rest = path.relative_to(folder).parts
    return (first if rest else Path(first).stem).lower()


def listed(names: Sequence[str]) -> str:
    """Return names with commas between them, of many the first."""
    more = f" and {len(names) - _MOST_LISTED:,} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def with_unused_files(found: Found, asked: Asked, path: Path) -> Found:
    """Return the same, with the files that will not be read: of a folder all below it, of a file test data next to it."""
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
        others = [file for file in others if str(file) not in found.settings["data.label_names"].reason]
    tests = [file for file in others if TEST_NAME.search(part_of(file, folder)) and file_kind(file) is not None]
    if not path.is_dir():
        held_out = [file for file in others if EVAL_NAME.search(file.stem.lower())]
        others = [file for file in (*held_out, *tests) if file.suffix == path.suffix]
        tests = [file for file in tests if file in others]
    top = sorted({folder / test.relative_to(folder).parts[0] for test in tests})
    test = str(top[0]) if top else None
    rest = _by_folder([file.relative_to(folder) for file in others if file not in tests])
    unused = (*found.unused, *((f"files {rest}",) if rest else ()))
    return replace(found, unused=unused, test=test)


def _by_folder(files: Sequence[Path]) -> str:
    """Return the names of files; a folder with many of them stands for these."""
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
