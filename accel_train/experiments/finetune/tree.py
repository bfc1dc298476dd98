"""The files at a path, listed once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote

from accel_train.core.files import files_below
from accel_train.data.images.images import list_images
from accel_train.data.parts import Part, part_of
from accel_train.data.sources import FileKind, file_kind, is_about_data
from accel_train.experiments.finetune.columns import files_at
from accel_train.experiments.finetune.values.parts import parts_of_card

Paths = Sequence[Path]
TABLES: tuple[FileKind, ...] = ("csv", "jsonl", "parquet")
MOST_TAGGED = 20
"""Number of files up to which each is tried as words with tags, or as an export of an annotation tool."""
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.parquet")


@dataclass(frozen=True)
class Tree:
    """The files at a path: all below a folder, those of a pattern, or one."""

    path: Path

    @cached_property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @property
    def folder(self) -> Path:
        """Return the folder that holds all files."""
        return self.path if self.is_folder else self.path.parent

    @cached_property
    def listed(self) -> Paths:
        """Return all files, without hidden ones."""
        return [each for each in files_below(self.path) if each.is_file()] if self.is_folder else files_at(self.path)

    @cached_property
    def files(self) -> list[Path]:
        """Return the files that may hold data: in a folder, those that do not describe the data by their names."""
        return [path for path in self.listed if not self.is_folder or not is_about_data(path, self.path)]

    @cached_property
    def images(self) -> list[str]:
        """Return the names of images below a folder, relative to it."""
        return list_images(self.path) if self.is_folder else []

    @cached_property
    def card(self) -> dict[Part, Path]:
        """Return the tables of the parts that the README.md of a folder names."""
        parts = parts_of_card(self.path) if self.is_folder else {}
        are_tables = all(file_kind(file) in TABLES for path in parts.values() for file in files_at(path))
        return parts if "train" in parts and are_tables else {}

    def of_kind(self, *kinds: FileKind) -> list[Path]:
        return [path for path in self.files if file_kind(path) in kinds]

    def chosen(self, tables: Paths) -> tuple[Path, Path | None]:
        """Return the table to train on, and the table to evaluate on if a name or the README.md shows one.

        Raises:
            ValueError: several tables may be the one to train on.
        """
        if not self.is_folder:
            return self.path, None
        if self.card and {*files_at(self.card["train"])} <= {*tables}:
            return self.card["train"], self.card.get("eval")
        tables = list(dict.fromkeys(map(shards_of, tables)))
        parts = {path: part_of(path.name) or part_of(path.relative_to(self.path).as_posix()) for path in tables}
        train, held_out, unnamed = (
            [path for path in tables if parts[path] == part] for part in ("train", "eval", None)
        )
        others = train or unnamed
        if len(others) != 1 or len(held_out) > 1:
            raise ValueError(
                f"{self.path} holds several files of data ({', '.join(map(str, tables[:5]))}). Name one: accel-train "
                f"finetune {quote(str([*others, *tables][0]))}"
            )
        return others[0], next(iter(held_out), None)


def shards_of(path: Path) -> Path:
    """Return the pattern of all shards of a parquet file, as the hub names them. Other paths are returned unchanged."""
    shard = _SHARD.fullmatch(path.name)
    return path if shard is None else path.with_name(f"{shard[1]}-*-of-{shard[2]}.parquet")
