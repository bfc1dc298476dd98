"""Texts with their translations: line-aligned files (train.de, train.en), and columns of texts by language."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.sources import file_kind
from accel_train.data.text.aligned import target_file
from accel_train.experiments.finetune.annotated.text_tasks import LANGUAGES, PAIRS, facts_of
from accel_train.experiments.finetune.columns import Column, Table, readings
from accel_train.experiments.finetune.recipe import Asked, Found, listed, places_of
from accel_train.experiments.finetune.tree import Tree

_SIDES = frozenset(side for pair in PAIRS for side in pair)


def with_languages(asked: Asked, table: Table) -> tuple[Asked, Table]:
    """Return a table with a column for each language of a column that maps languages to texts, and their direction.

    Raises:
        ValueError: the direction is open.
    """
    for name, column in table.columns.items():
        keys = list(column.cells[0]) if isinstance(column.cells[0], Mapping) else []
        are_texts = len(keys) > 1 and all(map(_is_language, keys)) and all(map(_has_texts(keys), column.cells))
        if not asked.allows("seq2seq") or not are_texts:
            continue
        source, target = _direction(asked, keys, table.path)
        columns = {key: Column(key, tuple(cell[key] for cell in column.cells)) for key in keys}
        others = {other: each for other, each in table.columns.items() if other != name}
        settings = {**table.settings, "data.translation_column": Choice(name, "it maps languages to texts")}
        asked = replace(asked, task="seq2seq", text=(source,), label=(target,))
        return asked, replace(table, columns={**others, **columns}, settings=settings)
    return asked, table


def recognise_aligned(asked: Asked, tree: Tree) -> Found | str:
    """Return the facts of line-aligned files, STEM.de and STEM.en. If the path is one of them, it is the source.

    Raises:
        ValueError: the direction is open, the files are packed, cannot be read, or differ in lines.
    """
    files, path, stems = tree.files, tree.path, dict[Path, dict[str, Path]]()
    if not tree.is_folder:
        is_text = file_kind(path) in (None, "text")
        files = sorted(tree.folder.glob(f"{path.with_suffix('').name}.*")) if is_text else []
    named = {*asked.text, *asked.label} if asked.task == "seq2seq" else frozenset[str]()
    for file in files if asked.allows("seq2seq") else ():
        name = file.with_suffix("") if file.suffix == ".gz" else file
        suffix = name.suffix[1:]
        if _is_language(suffix) or suffix in _SIDES or suffix in named:
            stems.setdefault(name.with_suffix(""), {})[suffix] = file
    # .cs, .pl, and others are suffixes of programs, too.
    found = [each for each in stems.values() if len(each) > 1 and not all(map(file_kind, each.values()))]
    if path in files:
        found = [each for each in found if path in each.values()]
        asked = replace(asked, text=asked.text or (path.suffix[1:],))
    if not found:
        return "no STEM.de and STEM.en"
    if packed := [file for each in found for file in each.values() if file.suffix == ".gz"]:
        raise ValueError(f"{packed[0]}: aligned files are read in place. Unpack them: gunzip {packed[0].parent}/*.gz")
    names = sorted({suffix for each in found for suffix in each})
    are_classes = "; if they are classes: --task text-classification" if len(stems) == 1 else ""
    source, target = _direction(asked, names, path, are_classes)
    train, held_out = tree.chosen([each[source] for each in found if {source, target} <= {*each}])
    why = f"a line belongs to the same line of {target_file(train, target).name}"
    settings = {**readings(train, asked), "data.target_suffix": Choice(target, why)}
    facts = facts_of(asked, "seq2seq", str(train), settings)
    settings |= places_of(asked, train, held_out)
    about = f"{train}: {format_count(facts['num_samples'], 'pair')} of lines"
    return Found("seq2seq", "two files hold the same texts, line by line", about, settings=settings, unused=(), **facts)


def _is_language(name: str) -> bool:
    """Return whether a name is the code of a language, perhaps with a region or script: de, pt_BR, zh-Hans."""
    return re.fullmatch(r"[a-z]{2}(?:[-_][A-Za-z]{2,4})?", name) is not None and name[:2] in (*LANGUAGES, "id")


def _has_texts(keys: Sequence[str]) -> Callable[[object], bool]:
    return lambda cell: (
        isinstance(cell, Mapping) and {*cell} == {*keys} and all(isinstance(cell[key], str) for key in keys)
    )


def _direction(asked: Asked, names: Sequence[str], where: Path, otherwise: str = "") -> tuple[str, str]:
    """Return source and target among the names of languages or sides, by --text and --label or by their names.

    Raises:
        ValueError: a flag names something else, or the direction is open.
    """
    for flag, given in (("--text", asked.text), ("--label", asked.label)):
        if len(given) > 1 or not {*given} <= {*names}:
            raise ValueError(f"{flag} {','.join(given)}: {where} has {', '.join(names)}. Name one of them")
    usual = next((pair for pair in PAIRS if {*pair} == {*names}), None)
    if usual is not None and not asked.text and not asked.label:
        return usual[0], usual[1]
    sources = asked.text or [name for name in names if name not in asked.label]
    targets = asked.label or [name for name in names if name not in asked.text]
    if len(sources) != 1 or len(targets) != 1 or sources[0] == targets[0]:
        raise ValueError(
            f"{where}: {listed(names)} look like translations. Choose the direction: --text {names[0]} --label "
            f"{names[1]}, or --text {names[1]} --label {names[0]}{otherwise}"
        )
    return sources[0], targets[0]
