"""Look at the data of a recipe with the run's own functions: samples, the batches of the first steps, and findings."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from accel_train.core.errors import DataError
from accel_train.core.format import format_count
from accel_train.core.terminal import paint
from accel_train.data.batch_sizes import resolve_batch
from accel_train.data.labels import class_notes
from accel_train.data.order import DataOrder
from accel_train.data.samples import Drawn, SeededReads, fetch
from accel_train.engine.broken import collate_readable
from accel_train.engine.resolve import check_recipe, resolve_run
from accel_train.experiments.look.checks import MOST_EXAMPLES, MOST_FILES, Finding, find, findings_of_steps
from accel_train.experiments.look.units import MOST_IMAGES, MOST_TEXTS, Units, read_units
from accel_train.plan.place import count_processes
from accel_train.recipe.schema import Recipe
from accel_train.report.watch import sparkline
from accel_train.runtime.launch_environment import with_launch_environment
from accel_train.task import Collated, TaskData, read_data
from accel_train.training.output import few_held_out

MOST_STEPS = 8
"""Steps whose batches are read."""
MOST_BATCHED = 2_048
"""Samples of these steps; at least one step is read."""
_BINS = 24
_MOST_PRINTED = 2
_MOST_LINES = 12
_MOST_SHOWN = 600
"""Characters of a prompt or an answer in the terminal: its beginning and its end."""


@dataclass(frozen=True)
class Look:
    """The data of a recipe as a run will read them, and the findings about them."""

    recipe: Recipe
    data: TaskData
    train: Units
    held: Units
    padding: Finding
    """Positions of the first steps that hold padding."""
    batch: Collated
    """First micro-batch, as augmented."""
    findings: Sequence[Finding]

    @property
    def stops(self) -> bool:
        """Return whether a batch would teach nothing."""
        return any(each.stops for each in self.findings)

    @property
    def label_names(self) -> Sequence[str]:
        """Names of the classes; empty without classes."""
        return self.data.facts.label_names or ()

    @property
    def counts(self) -> dict[str, int]:
        """Training samples that have a class, by its name, the most frequent first."""
        found = Counter(chain.from_iterable(unit.classes for unit in self.train))
        return {self.label_names[number]: count for number, count in found.most_common()}

    @property
    def sources(self) -> dict[str, int]:
        """Training samples of each file, by its name, the largest first. Empty for one file, and for many."""
        found = Counter(unit.file for unit in self.train)
        return dict(found.most_common()) if 1 < len(found) <= MOST_FILES else {}

    @property
    def lengths(self) -> list[int]:
        """Tokens of each training sample; empty without token ids."""
        return [unit.length for unit in self.train if unit.length]

    @property
    def bins(self) -> list[int]:
        """Histogram of the lengths between their minimum and maximum."""
        return np.histogram(self.lengths, _BINS)[0].tolist() if self.lengths else []

    @property
    def notes(self) -> list[str]:
        """Sentences on how the data are read: what is cut, left out, packed, and padded."""
        count, total = self.padding.count, self.padding.total
        padded = [f"{count / total:.1%} of the positions of the first steps are padding"] if count else []
        return [*self.data.facts.notes, *padded]

    @property
    def lead(self) -> str:
        """Return what was read, as a sentence."""
        name, total = self.data.facts.sources or self.recipe.task, len(self.data.train)  # type: ignore[arg-type]
        of = f" of {total:,}" if len(self.train) in (MOST_IMAGES, MOST_TEXTS) else ""
        return f"{name}: {len(self.train):,}{of} training and {len(self.held):,} evaluation samples were read"


def look_at(recipe: Recipe, *, progress: bool = False) -> Look:
    """Read the data of a recipe as a run does, without a model, and check it.

    Raises:
        ValueError: a run would refuse the recipe or the data.
    """
    recipe, task = check_recipe(with_launch_environment(recipe))
    data = read_data(task, recipe, progress=progress)
    section = recipe.parallel
    sizes = resolve_batch(recipe.batch, count_processes(None, None), section.num_sharing, section.shared_by)
    _, order, _ = resolve_run(recipe, data, sizes)
    train, held = (list(read_units(data, recipe.data, is_training=side)) for side in (True, False))
    batches = list(_batches(data, order, sizes.per_device_batch_size))
    of_steps = findings_of_steps(batches, shuffled=order.shuffle)
    too_few = few_held_out(data.facts, recipe.data.eval, recipe.data.eval_fraction)
    of_lines = []
    if data.shards and (lines := [*data.shards.broken]):
        most = data.shards.shards.cut.data.max_broken
        of_lines = [Finding("broken", len(lines), most, tuple(lines[:MOST_EXAMPLES]))]
    findings = find(train, held, data, [*of_steps, *of_lines], too_few)
    broken = [each for each in findings if each.kind == "unreadable" and each.count <= data.max_broken]
    # Broken evaluation samples are never allowed.
    if broken and not any("unreadable" in unit.problems for unit in held):
        findings[findings.index(broken[0])] = replace(broken[0], kind="broken", total=data.max_broken)
    return Look(recipe, data, train, held, of_steps[-1], next(chain.from_iterable(batches), {}), findings)


def _batches(data: TaskData, order: DataOrder, size: int) -> Iterator[list[Collated]]:
    """Yield the micro-batches of the first steps as one process reads them. Unreadable samples are left out, with their
    step if `data.max_broken` is 0.
    """
    dataset: Any = data.train
    if data.draw is not None:
        dataset = Drawn(data.draw, order.seed, order.num_samples)
    elif data.seeds_reading:
        dataset = SeededReads(dataset, order.seed, order.num_samples)
    for step in range(max(1, min(MOST_STEPS, MOST_BATCHED // order.global_batch_size, int(order.steps_per_epoch)))):
        shares = order.rank_micro_batches(step, 0, 1, size, as_draws=dataset is not data.train)
        # The finding about unreadable samples names them.
        with suppress(DataError):
            if data.max_broken:
                yield [collate_readable(dataset, data.collate, data.max_broken, indices) for indices in shares]
            else:
                yield [data.collate(fetch(dataset, indices)) for indices in shares]


def format_look(look: Look, *, colour: bool) -> list[str]:
    """Return the lines for a terminal: findings, numbers, labels, notes, and decoded samples.

    Targets are green, or without colors between two signs.
    """
    lines = [
        look.lead,
        "",
        format_count(len(look.findings), "finding") + ", the most harmful first" * (len(look.findings) > 1),
    ]
    for each in look.findings:
        lines.append(f"  {paint(each.kind, 'red' if each.stops else 'yellow', on=colour)}: {each.sentence}")
        lines += [f"    {example}" for example in each.examples]
    rows = [("labels", note) for note in (class_notes(look.counts)[:1] if look.counts else ())]
    if look.lengths:
        shown = f"{min(look.lengths):,} {sparkline(look.bins)} {max(look.lengths):,}"
        rows.append(("tokens", f"{shown}, {np.median(look.lengths):,.0f} in the middle"))
    if look.sources:
        rows.append(
            ("sources", ", ".join(f"{name} {count / len(look.train):.1%}" for name, count in look.sources.items()))
        )
    lines += ["", *(f"{name:<9}{text}" for name, text in [*rows, *(("note", note) for note in look.notes)])]
    for unit in look.train[:_MOST_PRINTED]:
        marks = ("\x1b[32m", "\x1b[0m") if colour else ("»", "«")
        parts = [
            part.join(marks) if counts and len(unit.parts) > 1 else part
            for part, counts in ((_shortened(text), counts) for text, counts in unit.parts)
        ]
        text = "".join(parts)
        lines += (
            ["", unit.where, *(f"  {line}" for line in text.splitlines()[:_MOST_LINES] if line.strip())] if text else []
        )
    return lines


def _shortened(text: str) -> str:
    half = _MOST_SHOWN // 2
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"
