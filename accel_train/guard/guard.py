"""The guard: decides from step results whether to continue, skip, roll back, or stop.

The device has already refused or clipped the update of a bad step. The guard counts such steps and requests a
diagnosis. Too many in a row, or a loss that stays high, roll the run back to a known-good checkpoint. The steps around
the onset are then skipped. A second rollback in one region also lowers the learning rate. After `max_rollbacks`
rollbacks, the run stops.
"""

import math
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

from accel_train.core.state import Rollback, StepResult, TrainState
from accel_train.recipe import schema

WINDOW_STEPS = 1000
LASTING_SPIKE_STEPS = 10
"""Consecutive steps with a loss spike that count as a lasting spike.

OLMo and PaLM were rolled back by hand in this situation.
"""
INCIDENT_GAP_STEPS = 10
"""Distance in steps below which bad steps belong to one incident."""
LARGEST = 3.4028234663852886e38
"""The largest fp32 number. As a limit, it accepts every finite gradient norm and rejects NaN and Inf."""
LOG_LARGEST = 88.7
"""Logarithm of `LARGEST`, rounded down."""
NO_LIMIT = sys.float_info.max
"""A limit that accepts every finite number and rejects NaN and Inf."""
SMALLEST_NORM = 1e-30
"""Smallest gradient norm in the windows, because zero has no logarithm."""
MEASURES_A_WINDOW = 8
"""Measurements of the limits while a window fills. Each costs time, and limits hardly change between steps."""
SMALLEST_NORM_SPREAD, SMALLEST_LOSS_SPREAD = 0.2, 0.02
"""Minimum spread of log gradient norms, and of losses as a share of their median: the variation of ordinary steps."""

Action = Literal["continue", "overflow", "skip", "high", "spike", "roll_back", "stop"]
"""high: a loss above the limit, but below the alarm. It counts towards a lasting spike, and needs no message."""


@dataclass(frozen=True)
class Decision:
    """The guard's decision about a step, with a sentence that gives the reason."""

    action: Action
    reason: str = ""
    needs_diagnosis: bool = False
    """Whether the step is the first bad step of an incident. Default: False."""


CONTINUE = Decision("continue")


class Limits(NamedTuple):
    """Limits of the next update, as plain numbers that are copied to the device without synchronization."""

    clip: float
    """Gradient norm to clip to. 0 turns clipping off."""
    skip: float = LARGEST
    """Gradient norm above which the update is not applied. A norm that is not finite also exceeds it."""


class Window:
    """The last accepted values, and the limit above which a new value is a spike: a one-sided robust z-score.

    The center is the median. The spread is the distance from the median to the 84th percentile, one standard deviation
    of a normal distribution. Neither outliers nor low values can inflate it.
    """

    def __init__(self, values: list[float], size: int, z: float, smallest_spread: float, *, relative: bool) -> None:
        # Oldest first. This is the list of the train state, so checkpoints contain it.
        self.values = values
        self.limit = NO_LIMIT
        """Limit of `z` spreads above the median, or `NO_LIMIT` with fewer than half of `size` values."""
        self.alarm = NO_LIMIT
        """Limit above which a single value is reported. If `relative` and all values are positive, it is computed from
        logarithms, because ordinary losses near zero differ by factors.
        """
        self._size, self._z, self._smallest_spread, self._relative = size, z, smallest_spread, relative

    def measure(self, num_newer: int = 0) -> None:
        """Update the limit from the last `size` values, and drop older values.

        The `num_newer` newest values do not count.
        """
        del self.values[: max(0, len(self.values) - num_newer - self._size)]
        values = sorted(self.values[: len(self.values) - num_newer])
        if 2 * len(values) < self._size:
            self.limit = self.alarm = NO_LIMIT
            return
        last = len(values) - 1
        median = values[last // 2]
        upper = values[math.ceil(last * 0.8413)]
        smallest = self._smallest_spread * (abs(median) if self._relative else 1.0)
        self.limit = self.alarm = median + self._z * max(upper - median, smallest)
        if self._relative and values[0] > 0:
            spread = max(math.log(upper / median), math.log1p(self._smallest_spread))
            self.alarm = max(self.limit, median * math.exp(min(self._z * spread, LOG_LARGEST)))


class Guard:
    """The guard of a run. Its memory is part of the train state, so a resumed run decides as if it had not stopped.

    All processes decide from the same numbers and take the same branch.
    """

    def __init__(
        self,
        section: schema.Guard,
        state: TrainState,
        *,
        max_grad_norm: float,
        warmup_steps: int,
        epoch_steps: int = sys.maxsize,
    ) -> None:
        self.section, self.state = section, state
        self._most_without_targets = min(section.max_consecutive_skips, epoch_steps - 1)
        # Consecutive steps whose global batch has no label.
        self._num_without_targets = 0
        self._max_grad_norm = max_grad_norm
        self._learns_after = sys.maxsize if section.on_spike == "off" else warmup_steps
        size, z = section.spike_window_steps, section.spike_threshold
        self._measures_every = max(1, size // MEASURES_A_WINDOW)
        self._losses = Window(state.losses, size, z, SMALLEST_LOSS_SPREAD, relative=True)
        self._log_norms = Window(state.grad_norms, size, z, SMALLEST_NORM_SPREAD, relative=False)
        # Limits of the next update.
        self.limits = Limits(max_grad_norm)
        self._loss_limit = self._norm_limit = NO_LIMIT
        self._measure(state.num_unmeasured)

    def decide(self, result: StepResult) -> Decision:
        """Return the decision about one step from its result."""
        state, step = self.state, result.step
        if result.num_targets == 0:
            return self._decide_without_targets(result)
        is_usual = result.loss <= self._loss_limit and result.grad_norm <= self._norm_limit
        if is_usual and result.agreed and not result.skipped:
            if step > self._learns_after:
                self._learn(result.loss, result.grad_norm)
            state.consecutive_skips = state.consecutive_spikes = self._num_without_targets = 0
            state.first_bad_step = None
            return CONTINUE
        self._num_without_targets = 0
        if not result.agreed:
            return self.roll_back_or_stop(
                f"step {step}: the processes computed different gradient norms: their weights differ"
            )
        if result.finite:
            return self._decide_on_spike(result)
        state.num_skipped_steps += 1
        has_loss = math.isfinite(result.loss)
        if result.loss_scale is not None and result.loss_scale > self.section.fp16_scale_floor and has_loss:
            # Part of the search for the right scale: the loss is finite, only the scaled gradients are not.
            found = f"step {step}: fp16 overflow at loss scale {result.loss_scale:g}"
            return Decision("overflow", f"{found}; the update was not applied, the scale is halved")
        values = f"grad_norm={result.grad_norm}" if has_loss else f"loss={result.loss}, grad_norm={result.grad_norm}"
        reason = f"step {step}: not finite ({values}); the update was not applied on any process"
        return self._count_skip(result, reason, stop_at_once=self.section.on_nonfinite == "stop")

    def _decide_without_targets(self, result: StepResult) -> Decision:
        """Skip a step whose global batch has no label, or stop after too many in a row."""
        self.state.num_skipped_steps += 1
        self._num_without_targets += 1
        reason = f"step {result.step}: no sample of the global batch has a target, so the update was not applied"
        if self._num_without_targets <= self._most_without_targets:
            return Decision("skip", reason)
        return Decision(
            "stop",
            f"{reason}: {self._num_without_targets} in a row. The labels (or masks) that the task reads are all "
            "ignored; check the data, and which label it ignores",
        )

    def _learn(self, loss: float, grad_norm: float) -> None:
        """Add the loss and gradient norm of an accepted step to the windows."""
        state = self.state
        state.losses.append(loss)
        state.grad_norms.append(math.log(grad_norm if grad_norm > SMALLEST_NORM else SMALLEST_NORM))
        state.num_unmeasured += 1
        if state.num_unmeasured >= self._measures_every:
            self._measure()

    def _decide_on_spike(self, result: StepResult) -> Decision:
        state, section = self.state, self.section
        limits, loss_limit, norm_limit, alarm = self.limits, self._loss_limit, self._norm_limit, self._losses.alarm
        is_loss_spike, is_norm_spike = result.loss > loss_limit, result.grad_norm > norm_limit
        if not result.skipped and result.step > self._learns_after:
            # The windows see a spike only up to the limits.
            self._learn(min(result.loss, loss_limit), min(result.grad_norm, norm_limit))
        found = [f"loss={result.loss:.4g} instead of at most {loss_limit:.4g}"] if is_loss_spike else []
        if is_norm_spike or result.skipped:
            most = min(limits.skip, norm_limit)
            found.append(f"grad_norm={result.grad_norm:.4g} instead of at most {most:.4g}")
        reason = f"step {result.step}: a spike ({'; '.join(found)})"
        state.consecutive_spikes += 1
        is_lasting = state.consecutive_spikes >= LASTING_SPIKE_STEPS and is_loss_spike
        if section.on_spike == "rollback" or is_lasting:
            self._note_bad(result)
            nth = "" if section.on_spike == "rollback" else f", the {state.consecutive_spikes}th step in a row"
            return self.roll_back_or_stop(reason + nth)
        if not result.skipped:
            if not is_norm_spike and result.loss <= alarm:
                state.first_bad_step = result.step if state.first_bad_step is None else state.first_bad_step
                return Decision("high")
            needs_diagnosis = self._note_bad(result) and is_loss_spike
            done = f"; the gradient was clipped to {limits.clip:.4g}" if is_norm_spike and limits.clip else ""
            return Decision("spike", reason + done, needs_diagnosis)
        state.num_skipped_steps += 1
        reason += "; the update was not applied on any process"
        if state.consecutive_skips >= section.max_consecutive_skips and not is_loss_spike:
            # The loss is as before, so the model is intact. Gradients have grown, and their limit is too low.
            state.grad_norms.clear()
            self._measure()
            state.consecutive_skips = 0
            return Decision("spike", f"{reason}; the loss is unchanged, so the guard measures gradient norms again")
        return self._count_skip(result, reason, stop_at_once=False)

    def _count_skip(self, result: StepResult, reason: str, *, stop_at_once: bool) -> Decision:
        state, section = self.state, self.section
        needs_diagnosis = self._note_bad(result)
        state.consecutive_skips += 1
        state.recent_skips = [step for step in state.recent_skips if step > result.step - WINDOW_STEPS] + [result.step]
        recent, in_a_row, allowed = len(state.recent_skips), state.consecutive_skips, section.max_consecutive_skips
        if stop_at_once:
            return Decision("stop", f"{reason}, and guard.on_nonfinite is stop", needs_diagnosis)
        if recent > section.max_skips_per_1000_steps:
            limit = f"guard.max_skips_per_1000_steps allows {section.max_skips_per_1000_steps}"
            return Decision("stop", f"{reason}: {recent} in {WINDOW_STEPS} steps, and {limit}", needs_diagnosis)
        if in_a_row > allowed:
            limit = f"guard.max_consecutive_skips allows {allowed}"
            return self.roll_back_or_stop(f"{reason}: {in_a_row} in a row, and {limit}", needs_diagnosis)
        return Decision("skip", f"{reason} (skip {in_a_row} in a row, {allowed} allowed)", needs_diagnosis)

    def roll_back_or_stop(self, reason: str, needs_diagnosis: bool = False) -> Decision:
        """Return the decision to roll back for this reason, or to stop if `max_rollbacks` is reached."""
        done = len(self.state.rollbacks)
        if done < self.section.max_rollbacks:
            return Decision("roll_back", reason, needs_diagnosis)
        why = (
            f"after {done} rollbacks, the most that guard.max_rollbacks allows" if done else "guard.max_rollbacks is 0"
        )
        return Decision("stop", f"{reason}; {why}", needs_diagnosis)

    def _note_bad(self, result: StepResult) -> bool:
        """Record a bad step, and return whether it is the first of an incident."""
        state = self.state
        if state.first_bad_step is None:
            state.first_bad_step = result.step
        is_first = state.last_incident is None or not 0 <= result.step - state.last_incident < INCIDENT_GAP_STEPS
        state.last_incident = result.step
        return is_first

    def _measure(self, num_newer: int = 0) -> None:
        """Update the spike limits and the limits of the next update. The `num_newer` last values do not count yet."""
        if self.section.on_spike == "off":
            return
        self.state.num_unmeasured = num_newer
        self._losses.measure(num_newer)
        self._log_norms.measure(num_newer)
        self._loss_limit, log_limit = self._losses.limit, self._log_norms.limit
        self._norm_limit = math.exp(min(log_limit, LOG_LARGEST)) if log_limit < NO_LIMIT else NO_LIMIT
        clip, skip = self._max_grad_norm, LARGEST
        if self._norm_limit < NO_LIMIT:
            if self.section.on_spike != "clip":
                skip = self._norm_limit
            elif not clip or self._norm_limit < clip:
                clip = self._norm_limit
        self.limits = Limits(clip, skip)


def plan_rollback(
    section: schema.Guard, state: TrainState, *, at_step: int, to_step: int, max_steps: int, steps_per_epoch: float
) -> Rollback:
    """Return the next rollback of a run: the steps to skip, and the factor of the learning rate.

    Skipped steps begin half a window before the onset, because their data led to it, but after the checkpoint. They end
    half a window after the last bad step, since similar steps may follow. The last step of the run is never skipped.
    Skipped steps do not train, so the window of `auto` is at most a fiftieth of the run. A second rollback in one
    region lowers the learning rate. Two rollbacks are in one region if no checkpoint became known-good between them.
    """
    widest = min(200, math.ceil(steps_per_epoch / 10), math.ceil(max_steps / 50))
    width = widest if section.rollback_skip_steps == "auto" else section.rollback_skip_steps
    onset = at_step if state.first_bad_step is None else state.first_bad_step
    last = min(at_step + width - width // 2, max_steps - 1)
    again = bool(state.rollbacks) and to_step <= state.rollbacks[-1].skip_last
    return Rollback(
        number=len(state.rollbacks) + 1,
        at_step=at_step,
        to_step=to_step,
        skip_first=max(to_step + 1, onset - width // 2),
        skip_last=last,
        learning_rate_factor=section.lowered_learning_rate if again else 1.0,
        lowered_until=last + section.lowered_steps if again else 0,
        num_skipped_steps=state.num_skipped_steps,
    )


def is_skipped_by_rollback(step: int, rollbacks: list[Rollback]) -> bool:
    """Return whether any of the rollbacks skips a step (counted from 1)."""
    return any(rollback.skip_first <= step <= rollback.skip_last for rollback in rollbacks)


def learning_rate_factor(step: int, rollbacks: list[Rollback]) -> float:
    """Return the factor by which rollbacks lower the learning rate of a step (counted from 1)."""
    return math.prod(each.learning_rate_factor for each in rollbacks if each.to_step < step <= each.lowered_until)
