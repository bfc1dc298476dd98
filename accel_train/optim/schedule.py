"""The learning rate as a pure function of the step: a multiplier of the peak, without state; and the peak.

`make_schedule` joins a linear warmup and one of `recipe.schedule.CURVES`. Its values equal the schedulers in
transformers and torch. `tests/optim/test_schedule.py` compares each with its model, value by value. A run that moves
here from one of them keeps its learning rates.

Warmup is step / W, as in transformers: the first of W steps has rate 0, step W has the peak. (step + 1) / W would use
that first step. But then no curve would agree with transformers at any step of the warmup.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from accel_train.core.errors import SettingError, first_line, setting_error
from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.order import LastBatch, steps_per_epoch
from accel_train.recipe.optimizer import Group, Optimizer
from accel_train.recipe.schedule import CURVES, Curve, Schedule, Span
from accel_train.task import load_function

DEFAULT_WARMUP_RATIO = Fraction(1, 100)


@dataclass(frozen=True)
class StepPlan:
    """The length of a run and its warmup, with the reasons."""

    max_steps: int
    warmup_steps: int
    num_epochs: float
    """Number of passes over the training data in `max_steps`."""
    max_steps_reason: str
    warmup_reason: str


def resolve_steps(
    schedule: Schedule, num_samples: int, global_batch_size: int, last_batch: LastBatch = "carry"
) -> StepPlan:
    """Return the number of steps and of warmup steps of a run.

    num_epochs becomes ceil(num_epochs x steps of an epoch) steps. `last_batch` defines an epoch's last step
    (`sampling.DataOrder`). Ratios count as the decimal that was written (0.07 x 100 is 7, not 7.000000000000001). They
    round up, as in `transformers.TrainingArguments`.

    Raises:
        ValueError: the data has no sample or too few for one step, or the warmup is longer than the run.
    """
    if num_samples < 1:
        raise ValueError(f"data.train: the training data has {num_samples} samples. Give data with at least one sample")
    per_epoch = steps_per_epoch(num_samples, global_batch_size, last_batch)
    if per_epoch == 0:
        raise ValueError(
            f"data.last_batch=drop: fewer samples ({num_samples}) than one step takes ({global_batch_size}). "
            "Lower batch.global_batch_size, or use short or carry"
        )
    max_steps, max_steps_reason = _max_steps(schedule, num_samples, global_batch_size, last_batch)
    warmup_steps, warmup_reason = _warmup_steps(schedule, max_steps)
    if warmup_steps > max_steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup_steps} is longer than the run of {format_count(max_steps, 'step')} "
            f"({max_steps_reason}); lower warmup_steps to at most {max_steps}, or train longer"
        )
    return StepPlan(max_steps, warmup_steps, max_steps / per_epoch, max_steps_reason, warmup_reason)


def _max_steps(schedule: Schedule, num_samples: int, global_batch_size: int, last_batch: LastBatch) -> tuple[int, str]:
    if schedule.max_steps is not None:
        return schedule.max_steps, "max_steps, as written"
    # The recipe requires one of the two.
    assert schedule.num_epochs is not None
    epochs = f"{schedule.num_epochs:g} epoch{'' if schedule.num_epochs == 1 else 's'}"
    if last_batch != "carry":
        per_epoch = steps_per_epoch(num_samples, global_batch_size, last_batch)
        steps = math.ceil(_decimal(schedule.num_epochs) * int(per_epoch))
        return (
            steps,
            f"{epochs} of {format_count(per_epoch, 'step')}, rounded up (samples in each: {num_samples})",
        )
    steps = math.ceil(_decimal(schedule.num_epochs) * num_samples / global_batch_size)
    reason = f"{epochs} x {format_count(num_samples, 'sample')} / {global_batch_size} per step, rounded up"
    return steps, reason


def _warmup_steps(schedule: Schedule, max_steps: int) -> tuple[int, str]:
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps, "warmup_steps, as written"
    if schedule.warmup_ratio is not None:
        steps = math.ceil(_decimal(schedule.warmup_ratio) * max_steps)
        return steps, f"warmup_ratio {schedule.warmup_ratio:g} x {format_count(max_steps, 'step')}, rounded up"
    if schedule.type not in CURVES or not schedule.type.startswith("warmup_"):
        return 0, f"not set, and {schedule.type} has no default warmup"
    if max_steps == 1:
        return 0, "a run of one step has no warmup: its only step would have rate 0"
    return math.ceil(DEFAULT_WARMUP_RATIO * max_steps), f"default: 1 % of {max_steps} steps, rounded up"


def _decimal(number: float) -> Fraction:
    return Fraction(repr(number))


def make_schedule(schedule: Schedule, max_steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Return the multiplier of the peak learning rate for each 0-based step; from `max_steps` on, the curve's end.

    The warmup rises linearly from 0 to the first value of the curve. Most curves begin at the peak. `one_cycle` and
    `cyclic` begin at `initial_lr_ratio`. The warmup of `warmup_stable_decay` rises from `min_lr_ratio`, as in
    transformers.

    Raises:
        ValueError: your own curve cannot be imported, or returns another value than a finite number of at least 0.
    """
    assert 0 <= warmup_steps <= max_steps, (warmup_steps, max_steps)
    span = Span(max_steps, warmup_steps)
    curve = CURVES.get(schedule.type) or _own_curve(schedule, span)
    top = schedule.initial_lr_ratio if schedule.type in ("one_cycle", "cyclic") else 1.0
    bottom = schedule.min_lr_ratio if schedule.type == "warmup_stable_decay" else 0.0

    def multiplier(step: int) -> float:
        assert step >= 0, step
        if step < warmup_steps:
            return step / warmup_steps * (top - bottom) + bottom
        return curve(min(step, max_steps) - warmup_steps, span, schedule)

    return multiplier


def _own_curve(schedule: Schedule, span: Span) -> Curve:
    """Return the function that `schedule.type` names, with its values checked: the guard does not see a rate of NaN."""
    function = load_function("schedule.type", schedule.type, "(t, span, schedule)")

    def curve(t: int, span: Span, schedule: Schedule) -> float:
        value = function(t, span, schedule)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            problem = f"the curve returned {value!r} at t={t} of {span.curve_steps} steps"
            remedy = "Return the multiplier of the peak, a finite number of at least 0"
            raise setting_error("schedule.type", schedule.type, problem, remedy)
        return float(value)

    for t in (0, span.curve_steps // 2, span.curve_steps):
        try:
            curve(t, span, schedule)
        except SettingError:
            raise
        # A custom function may raise any exception.
        except Exception as error:
            problem = f"the curve raised {type(error).__name__} at t={t}: {first_line(error)}"
            raise setting_error("schedule.type", schedule.type, problem, "Take (t, span, schedule)") from error
    return curve


@dataclass(frozen=True)
class Rate(Choice[float]):
    """The peak learning rate of a run. The reason is the formula of `lr_scaling` with its numbers."""

    factor: float = 1.0
    """Quotient of the peak and the recipe's `optimizer.learning_rate`."""


def scale_learning_rate(section: Optimizer, global_batch_size: int) -> Rate:
    """Return the peak learning rate for this global batch.

    linear: learning_rate x global_batch_size / base_batch_size (Goyal et al. 2017, arXiv 1706.02677; for SGD).
    sqrt: learning_rate x sqrt(global_batch_size / base_batch_size) (Krizhevsky 2014, arXiv 1404.5997; for Adam: Malladi
    et al. 2022, arXiv 2205.10287).
    none: as written.
    """
    written, scaling = section.learning_rate, section.lr_scaling
    base, sizes = scaling.base_batch_size, f"{global_batch_size} / {scaling.base_batch_size}"
    if scaling.rule == "linear":
        peak, how = written * global_batch_size / base, sizes
    elif scaling.rule == "sqrt":
        peak, how = written * math.sqrt(global_batch_size / base), f"sqrt({sizes})"
    else:
        return Rate(written, "as written, not scaled with the batch")
    return Rate(peak, f"{scaling.rule}: {written:g} x {how} = {peak:g}", peak / written)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Sequence[float]) -> float:
    """Set one learning rate on all groups, times each group's factor, or one per group; return the (first) rate."""
    if isinstance(rate, float | int):
        for group in optimizer.param_groups:
            set_rate(group, rate * group["lr_scale"])
        return rate
    for group, own in zip(optimizer.param_groups, rate, strict=True):
        set_rate(group, own)
    return rate[0]


def set_rate(group: Group, rate: float) -> None:
    """Set the learning rate of one group. A tensor stays a tensor, because some optimizers (torchao's) require one."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
