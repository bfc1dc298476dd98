"""What a bad step means for the run: a pure policy over step results. The device has already refused or clipped the update.

The ladder: a step that is not finite, or whose gradients spike, is not applied (or clipped), counted, and looked into; too
many in a row, or a loss that stays up, lead back to a healthy checkpoint and past the steps around the onset; the second
time in one region the learning rate is lowered; and after `max_rollbacks` the run stops.
"""

import math
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

from accel_train.recipe import Guard
from accel_train.state import Rollback, StepResult, TrainState

WINDOW_STEPS = 1000
LASTING_SPIKE_STEPS = 10
"""So many steps in a row with a loss far above those before are no chance (OLMo and PaLM went back by hand there)."""
INCIDENT_GAP_STEPS = 10
"""Bad steps closer than this belong to one incident."""
LARGEST = 3.4028234663852886e38
"""The largest fp32 number: a limit that every finite gradient norm keeps, and neither NaN nor Inf does."""
LOG_LARGEST = 88.7
"""Its logarithm, rounded down."""
NO_LIMIT = sys.float_info.max
"""Every finite number keeps it, and neither NaN nor Inf does."""
SMALLEST_NORM = 1e-30
"""Gradient norms below this count as this: zero has no logarithm."""
MEASURES_A_WINDOW = 8
"""The limits are found anew so many times while a window fills: they hardly move from step to step, and each finding costs."""
SMALLEST_NORM_SPREAD, SMALLEST_LOSS_SPREAD = 0.2, 0.02
"""Of log gradient norms; and of losses, as a part of their median: steps differ by as much without meaning anything."""

Action = Literal["go_on", "overflow", "skip", "spike", "roll_back", "stop"]


@dataclass(frozen=True)
class Verdict:
    """What the loop does about a step, and the sentence that says why."""

    action: Action
    reason: str = ""
    look_into: bool = False
    """The first bad step of an incident: find its cause."""


GO_ON = Verdict("go_on")


class Limits(NamedTuple):
    """What the next update is held to: plain numbers, handed to the device without a wait."""

    clip: float
    """Gradients are scaled down to this norm; 0: they are not."""
    skip: float = LARGEST
    """With a gradient norm above this, or one that is not finite, the update is not applied."""


class Window:
    """The last accepted values, and what is far above them: a one-sided robust z-score.

    Centre: the median. Spread: how far the 84th percentile lies above it, which is one standard deviation of a normal
    distribution, and which neither outliers nor what lies below can inflate.
    """

    __slots__ = ("_relative", "_size", "_smallest_spread", "_z", "limit", "values")

    def __init__(self, values: list[float], size: int, z: float, smallest_spread: float, *, relative: bool) -> None:
        self.values = values
        """Oldest first; kept by the train state, so that a checkpoint has it."""
        self.limit = NO_LIMIT
        """What lies `z` spreads above the median, from when there is half of `size` values to judge by."""
        self._size, self._z, self._smallest_spread, self._relative = size, z, smallest_spread, relative

    def measure(self, num_newer: int = 0) -> None:
        """Find the limit anew, from the last `size` values but the `num_newer` newest ones; what is older falls out."""
        del self.values[: max(0, len(self.values) - num_newer - self._size)]
        values = sorted(self.values[: len(self.values) - num_newer])
        if 2 * len(values) < self._size:
            self.limit = NO_LIMIT
            return
        last = len(values) - 1
        median = values[last // 2]
        spread = values[math.ceil(last * 0.8413)] - median
        smallest = self._smallest_spread * (abs(median) if self._relative else 1.0)
        self.limit = median + self._z * max(spread, smallest)


class Ladder:
    """The guard of a run. Its memory is in the train state, so a resume judges as the run would have.

    All processes judge the same numbers, and so take the same branch.
    """

    def __init__(
        self,
        guard: Guard,
        state: TrainState,
        *,
        max_grad_norm: float,
        warmup_steps: int,
        epoch_steps: int = sys.maxsize,
    ) -> None:
        self.guard, self.state = guard, state
        self._most_without_targets = min(guard.max_consecutive_skips, epoch_steps - 1)
        self._num_without_targets = 0
        """Steps in a row whose global batch had no target."""
        self._max_grad_norm, self._on_spike = max_grad_norm, guard.on_spike
        self._learns_after = sys.maxsize if guard.on_spike == "off" else warmup_steps
        size, z = guard.spike_window_steps, guard.spike_threshold
        self._measures_every = max(1, size // MEASURES_A_WINDOW)
        self._losses = Window(state.losses, size, z, SMALLEST_LOSS_SPREAD, relative=True)
        self._log_norms = Window(state.grad_norms, size, z, SMALLEST_NORM_SPREAD, relative=False)
        self.limits = Limits(max_grad_norm)
        """What the next update is held to."""
        self._loss_limit = self._norm_limit = NO_LIMIT
        self._measure(state.num_unmeasured)

    def judge(self, result: StepResult) -> Verdict:
        """The verdict on one step."""
        state = self.state
        if (
            result.loss <= self._loss_limit
            and result.grad_norm <= self._norm_limit
            and result.agreed
            and not result.skipped
        ):
            if result.step > self._learns_after:
                self._learn(result.loss, result.grad_norm)
            state.consecutive_skips = state.consecutive_spikes = self._num_without_targets = 0
            state.first_bad_step = None
            return GO_ON
        if result.num_targets == 0:
            return self._judge_without_targets(result)
        self._num_without_targets = 0
        if not result.agreed:
            return self._go_back(
                f"step {result.step}: the processes computed different gradient norms: their weights differ"
            )
        if result.finite:
            return self._judge_finite(result)
        state.num_skipped_steps += 1
        has_loss = math.isfinite(result.loss)
        what = f"grad_norm={result.grad_norm}" if has_loss else f"loss={result.loss}, grad_norm={result.grad_norm}"
        if result.loss_scale is not None and result.loss_scale > self.guard.fp16_scale_floor and has_loss:
            # The search for the right scale: the loss was finite, and only the scaled gradients were not.
            return Verdict(
                "overflow",
                f"step {result.step}: fp16 overflow at loss scale {result.loss_scale:g}; the update was not applied, the scale is halved",
            )
        said = f"step {result.step}: not finite ({what}); the update was not applied on any process"
        return self._count_skip(result, said, stop_at_once=self.guard.on_nonfinite == "stop")

    def _judge_without_targets(self, result: StepResult) -> Verdict:
        """A step with nothing to learn from is no fault; data without any is."""
        self.state.num_skipped_steps += 1
        self._num_without_targets += 1
        found = f"step {result.step}: no sample of the global batch has a target, so the update was not applied"
        if self._num_without_targets <= self._most_without_targets:
            return Verdict("skip", found)
        return Verdict(
            "stop",
            f"{found}: {self._num_without_targets} in a row. The labels (or masks) that the task reads are all ignored; check "
            "the data, and which label it ignores",
        )

    def _learn(self, loss: float, grad_norm: float) -> None:
        """Take note of what an accepted step came to."""
        state = self.state
        state.losses.append(loss)
        state.grad_norms.append(math.log(grad_norm if grad_norm > SMALLEST_NORM else SMALLEST_NORM))
        state.num_unmeasured += 1
        if state.num_unmeasured >= self._measures_every:
            self._measure()

    def judge_drift(self, said: str) -> Verdict:
        """The verdict on weights that differ between processes; `said` is where and how."""
        return self._go_back(said)

    def _judge_finite(self, result: StepResult) -> Verdict:
        state, guard = self.state, self.guard
        limits, loss_limit, norm_limit = self.limits, self._loss_limit, self._norm_limit
        is_loss_spike, is_norm_spike = result.loss > loss_limit, result.grad_norm > norm_limit
        if not result.skipped and result.step > self._learns_after:
            self._learn(min(result.loss, loss_limit), min(result.grad_norm, norm_limit))  # at most as far as allowed
        found = [f"loss={result.loss:.4g}, and {loss_limit:.4g} was expected at most"] if is_loss_spike else []
        if is_norm_spike or result.skipped:
            found.append(
                f"grad_norm={result.grad_norm:.4g}, and {min(limits.skip, norm_limit):.4g} was expected at most"
            )
        said = f"step {result.step}: a spike ({'; '.join(found)})"
        state.consecutive_spikes += 1
        if guard.on_spike == "rollback":
            self._note_bad(result)
            return self._go_back(said)
        if state.consecutive_spikes >= LASTING_SPIKE_STEPS and is_loss_spike:
            self._note_bad(result)
            return self._go_back(f"{said}, the {state.consecutive_spikes}th step in a row")
        if not result.skipped:
            look_into = self._note_bad(result) and is_loss_spike
            done = f"; the gradient was clipped to {limits.clip:.4g}" if is_norm_spike and limits.clip else ""
            return Verdict("spike", said + done, look_into)
        state.num_skipped_steps += 1
        said += "; the update was not applied on any process"
        if state.consecutive_skips >= guard.max_consecutive_skips and not is_loss_spike:
            # The loss is as before, so nothing has broken: gradients have grown, and what was measured holds no longer.
            state.grad_norms.clear()
            self._measure()
            state.consecutive_skips = 0
            return Verdict("spike", f"{said}; the loss is as before, so gradient norms are measured anew")
        return self._count_skip(result, said, stop_at_once=False)

    def _count_skip(self, result: StepResult, said: str, *, stop_at_once: bool) -> Verdict:
        state, guard = self.state, self.guard
        look_into = self._note_bad(result)
        state.consecutive_skips += 1
        state.recent_skips = [step for step in state.recent_skips if step > result.step - WINDOW_STEPS] + [result.step]
        if stop_at_once:
            return Verdict("stop", f"{said}, and guard.on_nonfinite is stop", look_into)
        if len(state.recent_skips) > guard.max_skips_per_1000_steps:
            allowed = f"guard.max_skips_per_1000_steps allows {guard.max_skips_per_1000_steps}"
            return Verdict(
                "stop", f"{said}: {len(state.recent_skips)} in {WINDOW_STEPS} steps, and {allowed}", look_into
            )
        if state.consecutive_skips > guard.max_consecutive_skips:
            allowed = f"guard.max_consecutive_skips allows {guard.max_consecutive_skips}"
            return self._go_back(f"{said}: {state.consecutive_skips} in a row, and {allowed}", look_into)
        in_a_row = f"(skip {state.consecutive_skips} in a row, {guard.max_consecutive_skips} allowed)"
        return Verdict("skip", f"{said} {in_a_row}", look_into)

    def _go_back(self, said: str, look_into: bool = False) -> Verdict:
        done, allowed = len(self.state.rollbacks), self.guard.max_rollbacks
        if done < allowed:
            return Verdict("roll_back", said, look_into)
        why = (
            f"after {done} rollbacks, which is what guard.max_rollbacks allows" if done else "guard.max_rollbacks is 0"
        )
        return Verdict("stop", f"{said}; {why}", look_into)

    def _note_bad(self, result: StepResult) -> bool:
        """Take note of a bad step; whether it is the first one of an incident."""
        state = self.state
        if state.first_bad_step is None:
            state.first_bad_step = result.step
        is_first = state.last_incident is None or not 0 <= result.step - state.last_incident < INCIDENT_GAP_STEPS
        state.last_incident = result.step
        return is_first

    def _measure(self, num_newer: int = 0) -> None:
        """Find anew what is far too large, and what the next update is held to; the `num_newer` last values have no say."""
        if self._on_spike == "off":
            return
        self.state.num_unmeasured = num_newer
        self._losses.measure(num_newer)
        self._log_norms.measure(num_newer)
        self._loss_limit, log_limit = self._losses.limit, self._log_norms.limit
        self._norm_limit = math.exp(min(log_limit, LOG_LARGEST)) if log_limit < NO_LIMIT else NO_LIMIT
        clip, skip = self._max_grad_norm, LARGEST
        if self._norm_limit < NO_LIMIT:
            if self._on_spike != "clip":
                skip = self._norm_limit
            elif not clip or self._norm_limit < clip:
                clip = self._norm_limit
        self.limits = Limits(clip, skip)


def plan_rollback(
    guard: Guard, state: TrainState, *, at_step: int, to_step: int, max_steps: int, steps_per_epoch: float
) -> Rollback:
    """The next rollback of a run: which steps are passed over, and whether the learning rate is lowered.

    The steps that are passed over begin half a window before the onset (what led to it was read before it) and never
    before the checkpoint; they go on for half a window after the last bad step, whose like may follow, and leave the last
    step of the run. The window of `auto` is a fiftieth of the run at most: each step that is passed over is one that does
    not train. The learning rate is lowered where no checkpoint has become healthy since the rollback before: it is the
    second time in one region.
    """
    asked = guard.rollback_skip_steps
    widest = min(200, math.ceil(steps_per_epoch / 10), math.ceil(max_steps / 50))
    width = widest if asked == "auto" else asked
    onset = at_step if state.first_bad_step is None else state.first_bad_step
    first = max(to_step + 1, onset - width // 2)
    last = min(at_step + width - width // 2, max_steps - 1)
    again = bool(state.rollbacks) and to_step <= state.rollbacks[-1].skip_last
    return Rollback(
        number=len(state.rollbacks) + 1,
        at_step=at_step,
        to_step=to_step,
        skip_first=first,
        skip_last=last,
        learning_rate_factor=guard.lowered_learning_rate if again else 1.0,
        lowered_until=last + guard.lowered_steps if again else 0,
        num_skipped_steps=state.num_skipped_steps,
    )


def is_passed_over(step: int, rollbacks: list[Rollback]) -> bool:
    """Whether a step (counted from 1) lies in what a rollback passes over."""
    return any(rollback.skip_first <= step <= rollback.skip_last for rollback in rollbacks)


def learning_rate_factor(step: int, rollbacks: list[Rollback]) -> float:
    """What rollbacks lower the learning rate of a step (counted from 1) by."""
    factors = (each.learning_rate_factor for each in rollbacks if each.to_step < step <= each.lowered_until)
    return math.prod(factors)
