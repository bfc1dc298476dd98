"""Two runs of one recipe, held against each other bit by bit: losses, evaluations, weights, moments, counters."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.checkpoint import read_trainer
from accel_train.observe.ledger import METRICS_FILE, read_metrics
from accel_train.sharded_checkpoint import Stored

MEASURED = ("tokens_per_second", "samples_per_second", "mfu", "train_seconds", "seconds")
"""What a clock says: it differs between any two runs."""
KINDS = (("model", "weights"), ("optimizer", "optimizer's moments"), ("average", "averaged weights"))


class Compared(NamedTuple):
    """One kind of number of two runs."""

    what: str
    extent: str
    """How much was compared: `steps 1 to 8`, `52 tensors`."""
    difference: str | None
    """Where the runs differ first, and by how much; None: nowhere."""
    first_step: int | None = None
    """The first step that differs, where steps were compared."""


def compare_runs(whole: Path, again: Path, first_step: int, last_step: int) -> list[Compared]:
    """Hold the steps `first_step` to `last_step` of two run folders against each other, and the checkpoint of the last one."""
    rows = _rows(whole, first_step, last_step), _rows(again, first_step, last_step)
    names = [f"{root.name}" for root in (whole, again)]
    assert names[0] != names[1], names
    folders = [root / "checkpoints" / f"step-{last_step:08d}" for root in (whole, again)]
    compared = [
        _compare_rows("losses", rows, "train", ("loss",)),
        _compare_rows("gradient norms", rows, "train", ("grad_norm", "skipped", "loss_scale")),
        _compare_rows("learning rates", rows, "train", ("learning_rate",)),
        _compare_rows("evaluations", rows, "eval", None),
        _compare_rows("the final evaluation", rows, "eval_final", None),
    ]
    compared += [_compare_tensors(what, *(Stored(folder, kind) for folder in folders)) for kind, what in KINDS]
    return [each for each in [*compared, _compare_counters(*folders)] if each.extent]


def largest_gap(left: Tensor, right: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape; NaN where only one of them is a number."""
    return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals itself, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _rows(root: Path, first_step: int, last_step: int) -> list[dict[str, Any]]:
    if not (root / METRICS_FILE).exists():
        return []
    return [row for row in read_metrics(root) if first_step <= row["step"] <= last_step]


def _compare_rows(
    what: str, rows: tuple[list[dict[str, Any]], list[dict[str, Any]]], split: str, fields: tuple[str, ...] | None
) -> Compared:
    ours, theirs = ({row["step"]: row for row in side if row["split"] == split} for side in rows)
    extent = _steps(sorted(ours))
    for step in sorted(ours.keys() | theirs.keys()):
        if step not in ours or step not in theirs:
            return Compared(what, extent, f"only one of the runs has step {step}", step)
        for field in fields or sorted(ours[step].keys() | theirs[step].keys()):
            left, right = ours[step].get(field), theirs[step].get(field)
            if field not in MEASURED and repr(left) != repr(right):
                return Compared(what, extent, f"from step {step} on: {_field(field, what)}{_gap(left, right)}", step)
    return Compared(what, extent, None)


def _steps(steps: list[int]) -> str:
    if len(steps) > 2 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"steps {steps[0]} to {steps[-1]}"
    return f"step{'s' * (len(steps) > 1)} {' and '.join(map(str, steps))}" if steps else ""


def _field(field: str, what: str) -> str:
    return "" if what.replace(" ", "_").startswith((field, field.replace("grad_", "gradient_"))) else f"{field} "


def _gap(left: Any, right: Any) -> str:
    told = f"{left!r} and {right!r}"
    if isinstance(left, float) and isinstance(right, float) and left and math.isfinite(left - right):
        return f"{told}, {abs(left - right) / abs(left):.1e} of it apart"
    return told


def _compare_tensors(what: str, ours: Stored, theirs: Stored) -> Compared:
    different: list[tuple[float, str]] = []
    num_numbers = 0
    names = sorted(ours.shapes.keys() | theirs.shapes.keys())
    for name in names:
        if name not in ours.shapes or name not in theirs.shapes:
            return Compared(what, f"{len(names)} tensors", f"only one of the runs has {name}")
        left, right = ours.read(name), theirs.read(name)
        num_numbers += left.numel()
        if not same_bits(left, right):
            different.append((largest_gap(left, right) if left.shape == right.shape else math.nan, name))
    extent = f"{len(names):,} tensors, {num_numbers:,} numbers" if names else ""
    if not different:
        return Compared(what, extent, None)
    gap, name = max(different, key=lambda each: (not math.isfinite(each[0]), each[0]))
    return Compared(
        what, extent, f"{len(different):,} of {len(names):,} tensors differ, most of all {name}, by {gap:.2g}"
    )


def _compare_counters(ours: Path, theirs: Path) -> Compared:
    left, right = (read_trainer(folder) for folder in (ours, theirs))
    for trainer in (left, right):
        trainer["state"].pop("train_seconds")
    sides = left["state"] | {"scaler": left["scaler"]}, right["state"] | {"scaler": right["scaler"]}
    changed = next(_changed(*sides), None)
    return Compared("counters and guard", f"{len(sides[0])} values", changed)


def _changed(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(left.keys() | right.keys()):
        if repr(left.get(name)) != repr(right.get(name)):
            yield f"{name} is {str(left.get(name))[:60]} and {str(right.get(name))[:60]}"
