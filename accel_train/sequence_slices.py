"""What a process keeps of the sequences that it reads, where several split each of them: its slice of every one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from accel_train.data.windows import IGNORED_LABEL
from accel_train.data_group import DataGroup
from accel_train.task import TaskData

SPLIT = ("input_ids", "labels")


@dataclass(frozen=True)
class Slices:
    """A task's collate, of whose batches one slice is kept."""

    collate: Callable[[Sequence[Any]], dict[str, Any]]
    """Samples -> whole sequences."""
    part: int
    num_parts: int

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        """As `slice_of` the whole batch, with the slice's own `num_targets`."""
        batch = slice_of(self.collate(rows), self.part, self.num_parts)
        return {**batch, "num_targets": int((batch["labels"] != IGNORED_LABEL).sum())}


def in_slices(data: TaskData, group: DataGroup) -> TaskData:
    """The same data, of which this process keeps its slice of each sequence: all of it, where nobody shares them.

    Raises:
        ValueError: it comes in batches of its own.
    """
    num_parts = group.num_slices
    if num_parts == 1:
        return data
    if data.step_batches is not None:
        raise ValueError(f"parallel.sp_size={num_parts}: this data comes in batches of its own; set it to 1")
    return replace(data, collate=Slices(data.collate, group.slice_index, num_parts))


def slice_of(batch: Mapping[str, Any], part: int, num_parts: int) -> dict[str, Any]:
    """Slice `part` (from 0) of `num_parts` equal ones: `input_ids`, `labels` and their `position_ids`, (B, T / num_parts) each.

    labels[:, t] is the token after input t, in the whole batch already: so the last target of a slice is the first input of the
    next one, and none is lost between them.

    Raises:
        ValueError: there is more in the batch than a plain language model reads, or its length does not divide.
    """
    others = sorted(name for name in batch if name not in (*SPLIT, "num_targets"))
    if others or any(name not in batch for name in SPLIT):
        raise ValueError(
            f"parallel.sp_size={num_parts} splits batches of input_ids and labels, and these have {', '.join(sorted(batch))}; set "
            "it to 1"
        )
    num_samples, length = batch["input_ids"].shape
    if length % num_parts:
        raise ValueError(f"parallel.sp_size={num_parts} does not divide a batch of {length} tokens; set it to 1")
    begin, end = part * length // num_parts, (part + 1) * length // num_parts
    own: dict[str, Any] = {name: batch[name][:, begin:end].contiguous() for name in SPLIT}
    own["position_ids"] = torch.arange(begin, end).repeat(num_samples, 1)
    return own
