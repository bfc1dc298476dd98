"""The parts of a data set by the README.md of a hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from accel_train.data.parts import Part, pick
from accel_train.data.tables import SPLITS
from accel_train.experiments.finetune.columns import files_at, mapping, objects
from accel_train.experiments.finetune.recipe import MOST_LISTED
from accel_train.recipe.yaml_core import parse_yaml

_HEAD = re.compile(r"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)


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
    configs = objects(mapping(content).get("configs"))
    named = [each for each in configs if isinstance(each.get("data_files"), str | list | dict)]
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
