"""What a bad step means for the run: a pure policy over step results. The device has already refused the update."""

from dataclasses import dataclass
from typing import Literal

from accel_train.recipe import Guard
from accel_train.state import StepResult, TrainState

WINDOW_STEPS = 1000


@dataclass(frozen=True)
class Verdict:
    """What the loop does about a step, and the sentence that says why."""

    action: Literal["go_on", "overflow", "skip", "stop"]
    reason: str = ""


GO_ON = Verdict("go_on")


def judge(result: StepResult, state: TrainState, guard: Guard) -> Verdict:
    """The verdict on one step; `state.recent_skips` and `consecutive_skips` are its memory and are updated.

    An fp16 overflow above the scale's floor is the search for the right scale and is not counted: the loss was finite, and
    only the scaled gradients were not.
    """
    if not result.skipped:
        state.consecutive_skips = 0
        return GO_ON
    state.num_skipped_steps += 1
    finite_loss = result.loss - result.loss == 0
    what = f"grad_norm={result.grad_norm}" if finite_loss else f"loss={result.loss}, grad_norm={result.grad_norm}"
    if result.loss_scale is not None and result.loss_scale > guard.fp16_scale_floor and finite_loss:
        return Verdict(
            "overflow",
            f"step {result.step}: fp16 overflow at loss scale {result.loss_scale:g}; the update was not applied, the scale is halved",
        )
    state.consecutive_skips += 1
    state.recent_skips = [step for step in state.recent_skips if step > result.step - WINDOW_STEPS] + [result.step]
    said = f"step {result.step}: not finite ({what}); the update was not applied on any process"
    if guard.on_nonfinite == "stop":
        return Verdict("stop", f"{said}, and guard.on_nonfinite is stop")
    if state.consecutive_skips > guard.max_consecutive_skips:
        return Verdict(
            "stop",
            f"{said}: {state.consecutive_skips} in a row, and guard.max_consecutive_skips allows {guard.max_consecutive_skips}",
        )
    if len(state.recent_skips) > guard.max_skips_per_1000_steps:
        return Verdict(
            "stop",
            f"{said}: {len(state.recent_skips)} in {WINDOW_STEPS} steps, and guard.max_skips_per_1000_steps allows {guard.max_skips_per_1000_steps}",
        )
    return Verdict("skip", f"{said} (skip {state.consecutive_skips} in a row, {guard.max_consecutive_skips} allowed)")
