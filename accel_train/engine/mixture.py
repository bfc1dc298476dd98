"""Resolve the weighted sources of a recipe: their order, what a run says of them, and their losses in training."""

import glob
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.buckets.files import local_files
from accel_train.core.errors import SettingError
from accel_train.core.format import format_count
from accel_train.core.state import JsonRecord
from accel_train.data.order import DataOrder
from accel_train.data.samples import fetch
from accel_train.data.text.kept import Rows
from accel_train.engine.block_order import block_orders
from accel_train.engine.mixed_order import MixedOrder, MixedSource
from accel_train.engine.step import Counted
from accel_train.recipe.data import Data
from accel_train.recipe.schema import Recipe
from accel_train.task import Collate, Collated, TaskData

SOURCES = "sources"
"""Name of the numbers of sources in a micro-batch, one for each label."""
_AT = "data.train"


def mixed_order(recipe: Recipe, data: TaskData, global_batch_size: int, max_steps: int) -> MixedOrder:
    """Return the order of a run on the weighted sources of `data.train`.

    Raises:
        SettingError: the sources of the samples are unknown, a source is empty, or all end before the run does.
    """
    section, num_samples = recipe.data, len(data.train)  # type: ignore[arg-type]
    samples_of = data.samples_of or ([range(num_samples)] if len(section.mixture) == 1 else _by_place(recipe, data))
    sources = tuple(
        MixedSource(each.title, samples, each.weights, each.max_epochs)
        for each, samples in zip(section.mixture, samples_of, strict=True)
    )
    for each in sources:
        if not len(each.samples):
            raise SettingError(f"source {each.name!r} has no training sample", "Leave it out", _AT, (_AT,))
        if each.limit == 0:
            problem = f"max_epochs of source {each.name!r} is less than one of its {len(each.samples)} samples"
            raise SettingError(problem, "Raise it", _AT, (_AT,))
    blocks = block_orders(recipe, data.shards, 1) if data.shards is not None else ()
    num_samples = blocks[0].num_samples if blocks else sum(len(each.samples) for each in sources)
    order = MixedOrder(num_samples, global_batch_size, recipe.seed, section.shuffle, sources=sources, blocks=blocks)
    if order.num_steps is not None and order.num_steps < max_steps:
        raise SettingError(
            f"all sources end (max_epochs) after step {order.num_steps:,}, and the run has {max_steps:,}",
            f"Leave max_epochs of one source out, or set schedule.max_steps to at most {order.num_steps}",
            _AT,
            (_AT, "schedule.max_steps"),
        )
    return order


def _by_place(recipe: Recipe, data: TaskData) -> list[NDArray[np.int64]]:
    """Return the training samples of each source by the file, folder, or data set that each sample is from."""
    rows = getattr(getattr(data.source, "rows", None), "train", None) or ()
    num_samples = len(data.train)  # type: ignore[arg-type]
    if data.where is None and len(rows) != num_samples:
        problem = f"task {recipe.task} does not say which source a sample is from"
        raise SettingError(problem, "Leave the weights out", _AT, (_AT,))
    if data.where is not None:
        places = map(data.where, range(num_samples))
    else:
        places = map(str, rows.column("where") if isinstance(rows, Rows) else (row.where for row in rows))
    numbers = np.fromiter(map(_finder(recipe.data), places), np.int64, num_samples)
    return [np.flatnonzero(numbers == number) for number in range(len(recipe.data.mixture))]


def _finder(data: Data) -> Callable[[str], int]:
    """Return a function from the place of a sample to the number of its source: the one with the longest name.

    Images that a table lists are those below its folder.
    """
    number_by_start, number_by_folder = dict[str, int](), dict[str, set[int]]()
    for number, name in enumerate(data.train_names):
        place = Path(local_files(name)).expanduser()
        for path in glob.glob(str(place), recursive=True) or [str(place)]:
            number_by_start[path] = number
            if os.path.isfile(path):
                number_by_folder.setdefault(os.path.dirname(path), set()).add(number)
    alone = {folder: min(numbers) for folder, numbers in number_by_folder.items() if len(numbers) == 1}
    number_by_start = {**alone, **number_by_start}
    starts = sorted(number_by_start)

    def number_of(where: str) -> int:
        for at in range(bisect_right(starts, where) - 1, -1, -1):
            if where.startswith(starts[at]):
                return number_by_start[starts[at]]
        raise SettingError(f"{where} is from none of the sources", "Leave the weights out", _AT, (_AT,))

    return number_of


def describe_mixture(order: MixedOrder, max_steps: int, window: int | None) -> list[str]:
    """Return a sentence for each source: its share, and what the run reads of it. A sample has `window` tokens."""
    notes, changes = [], sorted({step for source in order.sources for step in source.weights})
    for number, (source, count) in enumerate(zip(order.sources, order.drawn_before(max_steps), strict=True)):
        end = order.end_of(number)
        found = [(step, _share(order.shares_at(step), number)) for step in changes if step < end]
        kept = [each for each, before in zip(found, [(0, -1.0), *found]) if each[1] != before[1]]
        share = ", ".join(f"{share:.3g} % " + (f"from step {at:,}" if at else "of the samples") for at, share in kept)
        tokens = f" ({format_count(count * window, 'token')})" if window else ""
        ends = f"; it ends after step {end:,}, and the others take its share" if end <= max_steps else ""
        notes.append(
            f"source {source.name}: {share}: {format_count(count, 'sample')}{tokens}, "
            f"{count / len(source.samples):.4g} epochs of {format_count(len(source.samples))}{ends}"
        )
    return notes


def _share(shares: Sequence[int], number: int) -> float:
    return 100 * shares[number] / max(sum(shares), 1)


class SourceCounts(Counted):
    """Losses of the sources of a mixture, and their numbers of targets."""

    sources: Tensor | None = None
    """Number of the source of each label of the micro-batch, (N, T), or of each sample, (N,)."""


class WithSources:
    """Samples with the number of the source of each, for `collate_with_sources`."""

    def __init__(self, dataset: Any, order: MixedOrder) -> None:
        self.dataset, self.num_samples = dataset, order.num_samples
        # The samples of the sources follow each other, unless a source lies within another one.
        self.starts = [int(source.samples[0]) for source in order.sources]
        self.owners: NDArray[np.int16] | None = None
        if not all(isinstance(source.samples, range) for source in order.sources):
            self.owners = np.empty(order.num_samples, np.int16)
            for number, source in enumerate(order.sources):
                self.owners[source.samples] = number

    def __getitems__(self, numbers: list[int]) -> Sequence[Any]:
        places = [number % self.num_samples for number in numbers]
        if self.owners is not None:
            return [self.owners[places].tolist(), fetch(self.dataset, numbers)]
        return [[bisect_right(self.starts, place) - 1 for place in places], fetch(self.dataset, numbers)]


def collate_with_sources(collate: Collate, found: Sequence[Any]) -> Collated:
    """Return the micro-batch of samples of `WithSources`, with the number of the source of each label, or sample."""
    sources, samples = found
    batch = collate(samples)
    labels, numbers = batch.get("labels"), torch.tensor(sources)
    if labels is not None and labels.ndim == 2:
        numbers = numbers[:, None].expand_as(labels).contiguous()
    batch[SOURCES] = numbers
    return batch


def numbers_by_source(order: DataOrder, window: int | None) -> Callable[[int, Sequence[float]], JsonRecord] | None:
    """Return a function from a step and the counts since the last line to what metrics.jsonl holds of each source.

    The counts are loss sums and numbers of targets; there may be none. `window` is the number of tokens in a sample.
    None without weights.
    """
    if not isinstance(order, MixedOrder):
        return None
    sources, drawn_before, unit = order.sources, order.drawn_before, "tokens" if window else "samples"

    def numbers(step: int, counts: Sequence[float]) -> JsonRecord:
        found: JsonRecord = {}
        for number, (source, drawn) in enumerate(zip(sources, drawn_before(step), strict=True)):
            if len(counts) > len(sources) and counts[len(sources) + number]:
                found[f"{source.name}/loss"] = counts[number] / counts[len(sources) + number]
            found[f"{source.name}/{unit}"] = drawn * (window or 1)
            found[f"{source.name}/epoch"] = round(order.epochs_of(number, drawn), 6)
        return found

    return numbers
