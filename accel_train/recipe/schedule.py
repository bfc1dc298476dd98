"""The `schedule` section of a recipe: its length, its warmup, and the curve of the learning rate.

A curve is a function of (t, span, schedule) that returns the multiplier of the peak learning rate. To add one, write
the function and add its line to `CURVES`. In the formulas, W is `warmup_steps`, D = `max_steps` - W is the number of
steps after the warmup, t = step - W (0-based), and m = `min_lr_ratio`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from accel_train.core.errors import SettingError
from accel_train.recipe.values import (
    Fraction,
    Length,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)

ONE_CYCLE_RISE = 0.3
"""Share of one cycle in which the rate rises; torch's `pct_start`."""
INVERSE_SQRT_TIMESCALE_STEPS = 10_000
"""Timescale of `inverse_sqrt` without warmup, in steps; the default of transformers."""


@dataclass(frozen=True)
class Span:
    """The steps that a curve covers."""

    max_steps: int
    warmup_steps: int

    @property
    def curve_steps(self) -> int:
        """D, the number of steps after the warmup; at least 1, so that no curve divides by 0."""
        return max(1, self.max_steps - self.warmup_steps)


def constant(t: int, span: Span, schedule: "Schedule") -> float:
    """Return 1. `min_lr_ratio` has no effect. Source: transformers `get_constant_schedule_with_warmup`."""
    return 1.0


def linear(t: int, span: Span, schedule: "Schedule") -> float:
    """Return m + (1 - m) (D - t) / D. Source: transformers `get_linear_schedule_with_warmup` (there m = 0)."""
    return _between((span.curve_steps - t) / span.curve_steps, schedule.min_lr_ratio)


def cosine(t: int, span: Span, schedule: "Schedule") -> float:
    """Return m + (1 - m) (1 + cos(pi t / D)) / 2.

    Source: transformers `get_cosine_with_min_lr_schedule_with_warmup`; Loshchilov & Hutter 2017, arXiv 1608.03983,
    without restarts.
    """
    return _between(0.5 * (1.0 + math.cos(math.pi * (t / span.curve_steps))), schedule.min_lr_ratio)


def cosine_restarts(t: int, span: Span, schedule: "Schedule") -> float:
    """Return m + (1 - m) (1 + cos(pi (c t / D mod 1))) / 2 with c = `num_cycles`, and m at t = D.

    Source: transformers `get_cosine_with_hard_restarts_schedule_with_warmup` (there m = 0); Loshchilov & Hutter 2017.
    """
    progress = t / span.curve_steps
    if progress >= 1.0:
        return schedule.min_lr_ratio
    phase = (schedule.num_cycles * progress) % 1.0
    return _between(0.5 * (1.0 + math.cos(math.pi * phase)), schedule.min_lr_ratio)


def warmup_stable_decay(t: int, span: Span, schedule: "Schedule") -> float:
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


def one_cycle(t: int, span: Span, schedule: "Schedule") -> float:
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


def cyclic(t: int, span: Span, schedule: "Schedule") -> float:
    """Return `num_cycles` triangles over D, each linear from `initial_lr_ratio` to 1 and back.

    `min_lr_ratio` has no effect. Source: `torch.optim.lr_scheduler.CyclicLR(mode="triangular", step_size_up=D/(2
    num_cycles))`; Smith 2017, arXiv 1506.01186.
    """
    cycle_steps = span.curve_steps / schedule.num_cycles
    phase = (t / cycle_steps) % 1.0
    height = 1.0 - abs(2.0 * phase - 1.0)
    return _between(height, schedule.initial_lr_ratio)


def step(t: int, span: Span, schedule: "Schedule") -> float:
    """Return max(m, gamma^floor(t / `step_size_steps`)), by default three stairs over the run.

    Source: `torch.optim.lr_scheduler.StepLR` (there m = 0).
    """
    stair_steps = schedule.step_size_steps or math.ceil(span.max_steps / 3)
    return max(schedule.min_lr_ratio, schedule.gamma ** (t // stair_steps))


def exponential(t: int, span: Span, schedule: "Schedule") -> float:
    """Return max(m, gamma^(t / (D - 1))). The last step has `gamma` times the peak.

    Source: `torch.optim.lr_scheduler.ExponentialLR(gamma=gamma^(1 / (D - 1)))` (there m = 0).
    """
    return max(schedule.min_lr_ratio, schedule.gamma ** (t / max(1, span.curve_steps - 1)))


def polynomial(t: int, span: Span, schedule: "Schedule") -> float:
    """Return m + (1 - m) (1 - t / D)^`power`. Source: transformers `get_polynomial_decay_schedule_with_warmup`."""
    remaining = 1 - t / span.curve_steps
    return _between(remaining**schedule.power, schedule.min_lr_ratio)


def inverse_sqrt(t: int, span: Span, schedule: "Schedule") -> float:
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


Curve = Callable[[int, Span, "Schedule"], float]
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
"""`schedule.type` -> curve."""

if TYPE_CHECKING:
    CurveName = str
else:
    CurveName = Literal[tuple(CURVES)] | Annotated[str, Field(pattern=".:.", title="module:function")]


class Schedule(Section):
    type: CurveName = "warmup_cosine"
    """Curve of the learning rate over the steps. `module:function`: your own function of (t, span, schedule), which
    returns the multiplier of the peak, `t` steps after the warmup. `span.curve_steps` is their number.
    """
    max_steps: PositiveInt | None = None
    """Number of steps (optimizer updates) to train."""
    num_epochs: Length | None = None
    """Number of passes over the training data. Give this or max_steps."""
    warmup_steps: NonNegativeInt | None = None
    """Number of warmup steps. The learning rate rises linearly to the start of the curve. This is the peak, or
    `initial_lr_ratio` of the peak for one_cycle and cyclic.
    """
    warmup_ratio: Fraction | None = None
    """Number of warmup steps as a fraction of all steps. Give this or warmup_steps. Default: 1 % for warmup_* types,
    otherwise 0.
    """
    min_lr_ratio: Fraction = 0.0
    """End of a decay, as a fraction of the peak; a floor for step, exponential, and inverse_sqrt. constant and cyclic
    ignore it.
    """
    decay_ratio: PositiveFraction = 0.2
    """warmup_stable_decay: fraction of all steps, at the end, in which the learning rate decays."""
    decay_shape: Literal["linear", "cosine", "one_minus_sqrt"] = "linear"
    """warmup_stable_decay: shape of the decay."""
    num_cycles: PositiveInt = 1
    """cosine_restarts and cyclic: number of cycles."""
    step_size_steps: PositiveInt | None = Field(default=None, examples=[1000])
    """step: number of steps between two drops. Default: a third of all steps."""
    gamma: PositiveFraction = 0.1
    """step: factor of each drop. exponential: fraction of the peak at the last step."""
    power: PositiveFloat = 1.0
    """polynomial: exponent of the decay."""
    initial_lr_ratio: PositiveFraction = 0.04
    """one_cycle: start of the curve, as a fraction of the peak. cyclic: low point of a cycle, as a fraction of the
    peak.
    """

    @model_validator(mode="after")
    def one_length_and_one_warmup(self) -> "Schedule":
        if (self.max_steps is None) == (self.num_epochs is None):
            raise SettingError(
                "give exactly one of schedule.max_steps and schedule.num_epochs",
                settings=("schedule.max_steps", "schedule.num_epochs"),
            )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise SettingError(
                "give one of schedule.warmup_steps and schedule.warmup_ratio, not both",
                settings=("schedule.warmup_steps", "schedule.warmup_ratio"),
            )
        if self.max_steps is not None and self.warmup_steps is not None and self.warmup_steps > self.max_steps:
            raise SettingError(
                f"schedule.warmup_steps={self.warmup_steps} exceeds schedule.max_steps={self.max_steps}",
                "Lower warmup_steps.",
                settings=("schedule.warmup_steps",),
            )
        return self
