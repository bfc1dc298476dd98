"""Bitwise comparison of two runs of one recipe: losses, evaluations, weights, optimizer moments, and counters."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.checkpoint.store import folder_of, read_trainer
from accel_train.core.state import JsonRecord
from accel_train.model.tensors import same_bits
from accel_train.observe.run_folder import read_metrics

TIMINGS = ("tokens_per_second", "samples_per_second", "mfu", "train_seconds", "seconds")
"""Fields that always differ between two runs."""
SERIES = {
    "losses": ("train", ("loss",)),
    "gradient norms": ("train", ("grad_norm", "skipped", "loss_scale")),
    "learning rates": ("train", ("learning_rate",)),
    "evaluations": ("eval", None),
    "the final evaluation": ("eval_final", None),
}
"""Split and compared fields of metrics.jsonl for each kind of number. None: all fields."""
TENSORS = {"weights": "model", "optimizer's moments": "optimizer", "averaged weights": "average"}


class Comparison(NamedTuple):
    """The comparison of one kind of number."""

    name: str
    extent: str
    """Compared steps or tensors, such as `steps 1 to 8` or `52 tensors`."""
    difference: str | None
    """First difference and its size. None if the runs are equal."""
    first_step: int | None = None
    """First step that differs. None for equal runs and for comparisons without steps."""


def compare_runs(first_run: Path, second_run: Path, first_step: int, last_step: int) -> list[Comparison]:
    """Compare the metrics of `first_step` to `last_step` in two run folders, and the checkpoints of the last step."""
    runs = first_run, second_run
    rows = [[row for row in read_metrics(run) if first_step <= row["step"] <= last_step] for run in runs]
    folders = [folder_of(run / "checkpoints", last_step) for run in runs]
    tensors = {name: [CheckpointReader(folder, kind) for folder in folders] for name, kind in TENSORS.items()}
    compared = [
        *(_compare_rows(name, rows, *series) for name, series in SERIES.items()),
        *(_compare_tensors(name, *readers) for name, readers in tensors.items()),
        _compare_counters(folders),
    ]
    return [each for each in compared if each.extent]


def pairs_of_tensors(
    left: CheckpointReader, right: CheckpointReader
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield the tensors of two checkpoints by name. None: the checkpoint does not have it."""
    for name in sorted(left.shapes.keys() | right.shapes.keys()):
        one, other = (reader.read(name) if name in reader.shapes else None for reader in (left, right))
        yield name, one, other


def _compare_rows(
    name: str, rows: Sequence[Sequence[JsonRecord]], split: str, fields: tuple[str, ...] | None
) -> Comparison:
    left, right = ({row["step"]: row for row in side if row["split"] == split} for side in rows)
    steps = sorted(left.keys() | right.keys())
    extent = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 2 else f"steps {' and '.join(map(str, steps))}"
    for step in steps:
        if step not in left or step not in right:
            return Comparison(name, extent, f"only one of the runs has step {step}", step)
        for field in fields or sorted(left[step].keys() | right[step].keys()):
            values = left[step].get(field), right[step].get(field)
            if field not in TIMINGS and repr(values[0]) != repr(values[1]):
                return Comparison(name, extent, f"from step {step} on: {field} {_gap(*values)}", step)
    return Comparison(name, extent if steps else "", None)


def _gap(left: Any, right: Any) -> str:
    both = f"{left!r} and {right!r}"
    if isinstance(left, float) and isinstance(right, float) and left and math.isfinite(left - right):
        return f"{both}, a relative difference of {abs(left - right) / abs(left):.1e}"
    return both


def _compare_tensors(name: str, left: CheckpointReader, right: CheckpointReader) -> Comparison:
    gaps: dict[str, float] = {}
    num_numbers, names = 0, left.shapes.keys() | right.shapes.keys()
    for tensor, ours, theirs in pairs_of_tensors(left, right):
        if ours is None or theirs is None:
            return Comparison(name, f"{len(names)} tensors", f"only one of the runs has {tensor}")
        num_numbers += ours.numel()
        if not same_bits(ours, theirs):
            gap = float((ours.double() - theirs.double()).abs().max()) if ours.shape == theirs.shape else math.nan
            # Infinity can be sorted, but NaN cannot.
            gaps[tensor] = math.inf if math.isnan(gap) else gap
    extent = f"{len(names):,} tensors, {num_numbers:,} numbers" if names else ""
    if not gaps:
        return Comparison(name, extent, None)
    most = max(gaps, key=gaps.__getitem__)
    difference = (
        f"{len(gaps):,} of {len(names):,} tensors differ; the largest difference is {gaps[most]:.2g}, in {most}"
    )
    return Comparison(name, extent, difference)


def _compare_counters(folders: Sequence[Path]) -> Comparison:
    left, right = ({**trainer["state"], "scaler": trainer["scaler"]} for trainer in map(read_trainer, folders))
    different = (
        f"{name} is {str(left.get(name))[:60]} and {str(right.get(name))[:60]}"
        for name in sorted((left.keys() | right.keys()) - {"train_seconds"})
        if repr(left.get(name)) != repr(right.get(name))
    )
    return Comparison("counters and guard", f"{len(left) - 1} values", next(different, None))
