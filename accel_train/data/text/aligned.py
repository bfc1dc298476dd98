"""Read line-aligned files: a text on each line, and its translation on the same line of a second file."""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from accel_train.core.format import format_count
from accel_train.data.encoding import check_encoding, read_lines
from accel_train.recipe.data import Data


class AlignedLine(NamedTuple):
    """The same line of both files."""

    source: str
    target: str | None
    """None if the targets are not read."""
    where: str
    """File and line of the source."""


def target_file(source: Path, suffix: str) -> Path:
    """Return the file with the targets: train.en for train.de."""
    return source.with_suffix(f".{suffix}")


def read_aligned(source: Path, suffix: str | None, data: Data) -> Iterator[AlignedLine]:
    """Yield the lines of `source` with the lines of the file with the other suffix. None: without targets.

    Raises:
        ValueError: a file cannot be read, or the two differ in lines.
    """
    check_encoding(source, data)
    if suffix is None:
        for number, line in enumerate(_lines(source, data), start=1):
            yield AlignedLine(line, None, f"{source}:{number}")
        return
    target = target_file(source, suffix)
    if target == source or not target.is_file():
        raise ValueError(
            f"{source}: its targets are the lines of {target}, "
            f"{'the same file' if target == source else 'which does not exist'}; check data.target_suffix={suffix}"
        )
    check_encoding(target, data)
    num_lines = [0, 0]
    for number, pair in enumerate(zip_longest(_lines(source, data), _lines(target, data)), start=1):
        num_lines = [count + (line is not None) for count, line in zip(num_lines, pair)]
        if None not in pair:
            yield AlignedLine(pair[0], pair[1], f"{source}:{number}")
    if num_lines[0] != num_lines[1]:
        raise ValueError(
            f"{source} has {format_count(num_lines[0], 'line')}, and {target} has {num_lines[1]:,}; lines with the "
            "same number belong together, so repair the files"
        )


def _lines(path: Path, data: Data) -> Iterator[str]:
    return (line.rstrip("\r\n") for line, _ in read_lines(path, data))
