"""The `guard` and `checkpoint` sections of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from accel_train.core.format import LARGEST_COUNT
from accel_train.recipe.values import Auto, Length, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Guard(Section):
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """A step with a NaN or Inf loss or gradient is skipped, or stops the run. Its update is never applied, on any process."""
    on_spike: Literal["off", "clip", "skip", "rollback"] = "clip"
    """A gradient norm far above those before is clipped to the limit, its update is skipped, or the run rolls back at once. A loss
    that stays far above those before for 10 steps rolls back with all of them; off: nothing is watched."""
    spike_threshold: PositiveFloat = 6.0
    """How far above: spreads above the median of the window, of the loss and of the logarithm of the gradient norm."""
    spike_window_steps: Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = 128
    """Accepted steps after the warmup that spikes are measured by; with half of them the watch begins."""
    max_consecutive_skips: NonNegativeInt = 5
    """More skipped steps than this in a row roll back."""
    max_skips_per_1000_steps: NonNegativeInt = 20
    """More skipped steps than this in any 1000 stop the run (exit code 3)."""
    healthy_after_steps: PositiveInt = 100
    """A checkpoint that so many clean steps in a row have followed is healthy: the run can roll back to it."""
    max_rollbacks: NonNegativeInt = 3
    """After so many the run stops (exit code 3); 0: it never rolls back."""
    rollback_skip_steps: Auto | PositiveInt = "auto"
    """Steps that are skipped after a rollback beside the bad ones, half of them before and half after; auto: 200, and a
    tenth of an epoch and a fiftieth of the run at most."""
    lowered_learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor of the learning rate after a second rollback in one region ..."""
    lowered_steps: PositiveInt = 1000
    """... for this many steps."""
    max_incidents: NonNegativeInt = 10
    """Incidents that are diagnosed and written to `incidents/`; later ones are events alone."""
    incident_seconds: Length = 60.0
    """Limit of one diagnosis."""
    fp16_scale_floor: PositiveFloat = 1.0
    """The loss scale never falls below this; overflows above it are the scale's search, and not counted as skips."""
    hang_timeout_seconds: Length = 600.0
    """Without a step, or an evaluated batch, for so long the run has hung: stacks are written, the process that the others wait
    for is named, and all end (exit code 5). The first step of a launch may take three times as long; after it no collective
    waits for longer than twice this."""
    straggler_factor: Annotated[float, Field(gt=1)] | None = 1.5
    """A process whose own work in a step (reading data, and on a CPU the forward) takes so many times what the median process's
    takes is named in an event, where that is a tenth of a step at least; none: no comparison."""
    straggler_window_steps: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = 50
    """Steps over which that is averaged, and between two comparisons ..."""
    straggler_windows: PositiveInt = 3
    """... of which so many in a row have to find the same process."""
    drift_check_steps: NonNegativeInt = 500
    """Steps between two checks that all processes hold the same weights (HSDP: the copies of each shard), also made before every
    checkpoint; 0: never."""


class Checkpoint(Section):
    every_steps: NonNegativeInt = 500
    """Steps between two checkpoints; 0: only at the end and when the job is asked to stop."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; the newest healthy one, and the next one to be healthy, stay for a rollback all the same."""
    keep_best: bool = True
    """Keep the one that evaluated best (`evaluate.metric_for_best_model`) as well."""
    load_best_model_at_end: Auto | bool = "auto"
    """The weights that evaluated best, not the last ones, are evaluated at the end and written to `model/`. auto: with early
    stopping (`evaluate.early_stopping_patience`), whose last weights are never the best."""
    in_background: bool = True
    """Copy the state and write it in the background; off: training waits until it is on the disk."""
    resume: str = "auto"
    """auto: resume from the newest valid checkpoint of this output folder. unchanged: the same, and where data, code or settings have
    changed, keep the old run in previous-N and start a new one. never: always start a new one. Or a checkpoint's path."""
    accept_changes: bool = False
    """Resume although the recipe differs from the checkpoint's in data, model, batch size or length."""
