"""The learning rate as a pure function of the step: a multiplier of the peak, without state; and the peak.

`make_schedule` joins a linear warmup and one of `CURVES`. Its values equal the schedulers in transformers and torch.
`tests/optim/test_schedule.py` compares each with its model, value by value. A run that moves here from one of them
keeps its learning rates.

In the formulas below, W is `warmup_steps`. D = `max_steps` - W is the number of steps after the warmup. t = step - W
(0-based) is the number of steps since the warmup. m is `min_lr_ratio`.

Warmup is step / W, as in transformers: the first of W steps has rate 0, step W has the peak. (step + 1) / W would use
that first step. But then no curve would agree with transformers at any step of the warmup.

To add a curve, write one function of `(t, span, schedule)`, and add a line to `CURVES` and its name to
`recipe.Schedule.type`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from accel_train.core.state import Choice
from accel_train.data.batch_sizes import BatchSizes
from accel_train.data.order import LastBatch, steps_per_epoch
from accel_train.recipe.optimizer import LRScaling, Schedule

DEFAULT_WARMUP_RATIO = Fraction(1, 100)
ONE_CYCLE_RISE = 0.3
"""Share of one cycle in which the rate rises; torch's `pct_start`."""
INVERSE_SQRT_TIMESCALE_STEPS = 10_000
"""Timescale of `inverse_sqrt` without warmup, in steps; the default of transformers."""


@dataclass(frozen=True)
class StepPlan:
    """The length of a run and its warmup, with the reasons."""

    max_steps: int
    warmup_steps: int
    num_epochs: float
    """Number of passes over the training data in `max_steps`."""
    max_steps_reason: str
    warmup_reason: str


@dataclass(frozen=True)
class Span:
    """The steps that a curve covers."""

    max_steps: int
    warmup_steps: int

    @property
    def curve_steps(self) -> int:
        """D, the number of steps after the warmup; at least 1, so that no curve divides by 0."""
        return max(1, self.max_steps - self.warmup_steps)


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
        raise ValueError(
            f"the training data has {num_samples} samples, so there is nothing to train on; check data.train"
        )
    per_epoch = steps_per_epoch(num_samples, global_batch_size, last_batch)
    if per_epoch == 0:
        raise ValueError(
            f"data.last_batch=drop leaves nothing of {num_samples} samples, which make no step of {global_batch_size}; "
            "lower batch.global_batch_size, or use short or carry"
        )
    max_steps, max_steps_reason = _max_steps(schedule, num_samples, global_batch_size, last_batch)
    warmup_steps, warmup_reason = _warmup_steps(schedule, max_steps)
    if warmup_steps > max_steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup_steps} is longer than the run of {max_steps} steps ({max_steps_reason}); "
            f"lower warmup_steps to at most {max_steps}, or train longer"
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
        return steps, f"{epochs} of {per_epoch} steps, rounded up ({num_samples} samples in each)"
    steps = math.ceil(_decimal(schedule.num_epochs) * num_samples / global_batch_size)
    reason = f"{epochs} x {num_samples} samples / {global_batch_size} per step, rounded up"
    return steps, reason


def _warmup_steps(schedule: Schedule, max_steps: int) -> tuple[int, str]:
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps, "warmup_steps, as written"
    if schedule.warmup_ratio is not None:
        steps = math.ceil(_decimal(schedule.warmup_ratio) * max_steps)
        return steps, f"warmup_ratio {schedule.warmup_ratio:g} x {max_steps} steps, rounded up"
    if not schedule.type.startswith("warmup_"):
        return 0, f"not set, and {schedule.type} has none of its own"
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
    """
    assert 0 <= warmup_steps <= max_steps, (warmup_steps, max_steps)
    span = Span(max_steps, warmup_steps)
    curve = CURVES[schedule.type]
    top = schedule.initial_lr_ratio if schedule.type in ("one_cycle", "cyclic") else 1.0
    bottom = schedule.min_lr_ratio if schedule.type == "warmup_stable_decay" else 0.0

    def multiplier(step: int) -> float:
        assert step >= 0, step
        if step < warmup_steps:
            return step / warmup_steps * (top - bottom) + bottom
        return curve(min(step, max_steps) - warmup_steps, span, schedule)

    return multiplier


def constant(t: int, span: Span, schedule: Schedule) -> float:
    """Return 1. `min_lr_ratio` has no effect. Source: transformers `get_constant_schedule_with_warmup`."""
    return 1.0


def linear(t: int, span: Span, schedule: Schedule) -> float:
    """Return m + (1 - m) (D - t) / D. Source: transformers `get_linear_schedule_with_warmup` (there m = 0)."""
    return _between((span.curve_steps - t) / span.curve_steps, schedule.min_lr_ratio)


def cosine(t: int, span: Span, schedule: Schedule) -> float:
    """Return m + (1 - m) (1 + cos(pi t / D)) / 2.

    Source: transformers `get_cosine_with_min_lr_schedule_with_warmup`; Loshchilov & Hutter 2017, arXiv 1608.03983,
    without restarts.
    """
    return _between(0.5 * (1.0 + math.cos(math.pi * (t / span.curve_steps))), schedule.min_lr_ratio)


def cosine_restarts(t: int, span: Span, schedule: Schedule) -> float:
    """Return m + (1 - m) (1 + cos(pi (c t / D mod 1))) / 2 with c = `num_cycles`, and m at t = D.

    Source: transformers `get_cosine_with_hard_restarts_schedule_with_warmup` (there m = 0); Loshchilov & Hutter 2017.
    """
    progress = t / span.curve_steps
    if progress >= 1.0:
        return schedule.min_lr_ratio
    phase = (schedule.num_cycles * progress) % 1.0
    return _between(0.5 * (1.0 + math.cos(math.pi * phase)), schedule.min_lr_ratio)


def warmup_stable_decay(t: int, span: Span, schedule: Schedule) -> float:
    """Return 1 until the last `decay_ratio` x `max_steps` steps, then m + (1 - m) f(p).

    p in [0, 1) is the finished share of these last steps. f(p) is 1 - p (linear), (1 + cos(pi p)) / 2 (cosine) or 1 -
    sqrt(p) (one_minus_sqrt). The decay is cut if it would begin inside the warmup.

    Source: transformers `get_wsd_schedule`; Hu et al. 2024, arXiv 2404.06395; the 1 - sqrt form: Hägele et al. 2024,
    arXiv 2405.18392.
    """
    decay_steps = min(span.curve_steps, max(1, round(schedule.decay_ratio * span.max_steps)))
    done = t - (span.curve_steps - decay_steps)
    if done < 0:
        return 1.0
    if done >= decay_steps:
        return schedule.min_lr_ratio
    progress = done / decay_steps
    if schedule.decay_shape == "linear":
        return _between(1.0 - progress, schedule.min_lr_ratio)
    if schedule.decay_shape == "cosine":
        return _between(0.5 * (1.0 + math.cos(math.pi * progress)), schedule.min_lr_ratio)
    return _between(1.0 - math.sqrt(progress), schedule.min_lr_ratio)


def one_cycle(t: int, span: Span, schedule: Schedule) -> float:
    """Return half a cosine up from `initial_lr_ratio` to 1 over the first 30 % of D, then half a cosine down to m.

    Source: `torch.optim.lr_scheduler.OneCycleLR(total_steps=D, pct_start=0.3, div_factor=1/initial_lr_ratio,
    final_div_factor=initial_lr_ratio/m, cycle_momentum=False)`; Smith & Topin 2018, arXiv 1708.07120. As in torch, the
    rate of the last step is m: 0 if `min_lr_ratio` is not set.
    """
    peak = ONE_CYCLE_RISE * span.curve_steps - 1
    last = span.curve_steps - 1
    if t <= peak:
        return _anneal(schedule.initial_lr_ratio, 1.0, t / peak if peak > 0 else 1.0)
    return _anneal(1.0, schedule.min_lr_ratio, (min(t, last) - peak) / (last - peak))


def cyclic(t: int, span: Span, schedule: Schedule) -> float:
    """Return `num_cycles` triangles over D, each linear from `initial_lr_ratio` to 1 and back.

    `min_lr_ratio` has no effect. Source: `torch.optim.lr_scheduler.CyclicLR(mode="triangular", step_size_up=D/(2
    num_cycles))`; Smith 2017, arXiv 1506.01186.
    """
    cycle_steps = span.curve_steps / schedule.num_cycles
    phase = (t / cycle_steps) % 1.0
    height = 1.0 - abs(2.0 * phase - 1.0)
    return _between(height, schedule.initial_lr_ratio)


def step(t: int, span: Span, schedule: Schedule) -> float:
    """Return max(m, gamma^floor(t / `step_size_steps`)), by default three stairs over the run.

    Source: `torch.optim.lr_scheduler.StepLR` (there m = 0).
    """
    stair_steps = schedule.step_size_steps or math.ceil(span.max_steps / 3)
    return max(schedule.min_lr_ratio, schedule.gamma ** (t // stair_steps))


def exponential(t: int, span: Span, schedule: Schedule) -> float:
    """Return max(m, gamma^(t / (D - 1))). The last step has `gamma` times the peak.

    Source: `torch.optim.lr_scheduler.ExponentialLR(gamma=gamma^(1 / (D - 1)))` (there m = 0).
    """
    return max(schedule.min_lr_ratio, schedule.gamma ** (t / max(1, span.curve_steps - 1)))


def polynomial(t: int, span: Span, schedule: Schedule) -> float:
    """Return m + (1 - m) (1 - t / D)^`power`. Source: transformers `get_polynomial_decay_schedule_with_warmup`."""
    remaining = 1 - t / span.curve_steps
    return _between(remaining**schedule.power, schedule.min_lr_ratio)


def inverse_sqrt(t: int, span: Span, schedule: Schedule) -> float:
    """Return max(m, sqrt(s / (t + s))) with s = W, or 10 000 steps if W = 0.

    Source: transformers `get_inverse_sqrt_schedule` (there m = 0); Vaswani et al. 2017, arXiv 1706.03762.
    """
    timescale = span.warmup_steps or INVERSE_SQRT_TIMESCALE_STEPS
    return max(schedule.min_lr_ratio, 1.0 / math.sqrt((t + timescale) / timescale))


def _between(fraction: float, bottom: float) -> float:
    """Return the value at `fraction` of the way from `bottom` to 1; at bottom = 0, exactly the fraction."""
    return fraction * (1.0 - bottom) + bottom


def _anneal(start: float, end: float, progress: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * progress) + 1)


Curve = Callable[[int, Span, Schedule], float]
CURVES: dict[str, Curve] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "warmup_cosine": cosine,
    "warmup_stable_decay": warmup_stable_decay,
    "one_cycle": one_cycle,
    "cyclic": cyclic,
    "step": step,
    "exponential": exponential,
    "polynomial": polynomial,
    "inverse_sqrt": inverse_sqrt,
    "cosine_restarts": cosine_restarts,
}


def scale_learning_rate(learning_rate: float, scaling: LRScaling, sizes: BatchSizes) -> Choice[float]:
    """Return the peak learning rate for this global batch. The reason is the formula with its numbers.

    linear: learning_rate x global_batch_size / base_batch_size (Goyal et al. 2017, arXiv 1706.02677; for SGD).
    sqrt: learning_rate x sqrt(global_batch_size / base_batch_size) (Krizhevsky 2014, arXiv 1404.5997; for Adam: Malladi
    et al. 2022, arXiv 2205.10287).
    none: as written.
    """
    base = scaling.base_batch_size
    if scaling.rule == "linear":
        value = learning_rate * sizes.global_batch_size / base
        return Choice(value, f"linear: {learning_rate:g} x ({sizes.factors}) / {base} = {value:g}")
    if scaling.rule == "sqrt":
        value = learning_rate * math.sqrt(sizes.global_batch_size / base)
        return Choice(value, f"sqrt: {learning_rate:g} x sqrt(({sizes.factors}) / {base}) = {value:g}")
    return Choice(learning_rate, "as written, not scaled with the batch")
