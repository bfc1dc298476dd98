"""The `guard` and `checkpoint` sections of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from accel_train.core.format import LARGEST_COUNT
from accel_train.recipe.values import Auto, Length, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Guard(Section):
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """Reaction to a step with a NaN or Inf loss or gradient. The update is never applied, on any process. skip:
    training continues. stop: the run stops.
    """
    on_spike: Literal["off", "clip", "skip", "rollback"] = "clip"
    """Reaction to a gradient norm far above recent ones. clip: it is clipped to the limit. skip: the update is skipped.
    rollback: the run rolls back immediately. With all three, a loss that stays far above recent ones for 10 steps rolls
    back. off: spikes are not detected.
    """
    spike_threshold: PositiveFloat = 6.0
    """Spike threshold, in robust standard deviations above the window's median, of the loss and of the log gradient
    norm.
    """
    spike_window_steps: Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = 128
    """Number of accepted steps after the warmup in the spike window. Detection starts when half of them are recorded.
    """
    max_consecutive_skips: NonNegativeInt = 5
    """Maximum number of consecutive skipped steps. More of them cause a rollback."""
    max_skips_per_1000_steps: NonNegativeInt = 20
    """Maximum number of skipped steps in any 1000 steps. More of them stop the run (exit code 3)."""
    healthy_after_steps: PositiveInt = 100
    """Number of consecutive clean steps after which a checkpoint counts as healthy and can be rolled back to."""
    max_rollbacks: NonNegativeInt = 3
    """Number of rollbacks after which the run stops (exit code 3). 0: the run never rolls back."""
    rollback_skip_steps: Auto | PositiveInt = "auto"
    """Number of additional steps to skip after a rollback, half before the bad steps and half after. auto: 200, but at
    most a tenth of an epoch and a fiftieth of the run.
    """
    lowered_learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor of the learning rate after a second rollback in the same region."""
    lowered_steps: PositiveInt = 1000
    """Number of steps for which lowered_learning_rate applies."""
    max_incidents: NonNegativeInt = 10
    """Number of incidents that are diagnosed and written to `incidents/`. Later ones are only logged as events."""
    incident_seconds: Length = 60.0
    """Time limit of one diagnosis, in seconds."""
    fp16_scale_floor: PositiveFloat = 1.0
    """Lowest fp16 loss scale. Overflows above it belong to the search for the scale and do not count as skipped steps.
    """
    hang_timeout_seconds: Length = 600.0
    """Seconds without a finished step or evaluation batch before the run counts as hung. All processes then write their
    stacks, name the process that the others wait for, and end (exit code 5). The first step of a launch may take three
    times as long. After it, collectives time out after twice this time.
    """
    straggler_factor: Annotated[float, Field(gt=1)] | None = 1.5
    """Ratio to the median process's time above which a process counts as a straggler. The time is the process's own
    work in a step: reading data, and on a CPU the forward. A straggler is named in an event if the work takes at least
    a tenth of a step. null: no comparison.
    """
    straggler_window_steps: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = 50
    """Number of steps that are averaged for each straggler comparison."""
    straggler_windows: PositiveInt = 3
    """Number of consecutive comparisons that must find the same process before it is reported."""
    drift_check_steps: NonNegativeInt = 500
    """Number of steps between two checks that all processes hold the same weights (HSDP: the copies of each shard). The
    check also runs before every checkpoint. 0: never.
    """


class Checkpoint(Section):
    every_steps: NonNegativeInt = 500
    """Number of steps between two checkpoints. 0: only at the end and when the job is asked to stop."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep. The newest healthy checkpoint, and the next one to become healthy, are also
    kept for a rollback.
    """
    keep_best: bool = True
    """Whether to keep the checkpoint with the best evaluation (`evaluate.metric_for_best_model`) as well."""
    load_best_model_at_end: Auto | bool = "auto"
    """Whether to evaluate the best weights at the end and write them to `model/`, instead of the last ones. auto: with
    early stopping (`evaluate.early_stopping_patience`), because the last weights are then never the best.
    """
    in_background: bool = True
    """Whether to copy the state and write it in the background. false: training waits until it is on disk."""
    resume: str = "auto"
    """Checkpoint to resume from. auto: the newest valid checkpoint of this output folder. unchanged: the same, but if
    data, code, or settings have changed, keep the old run in previous-N and start a new one. never: always start a new
    run. Or a checkpoint's path.
    """
    accept_changes: bool = False
    """Whether to resume although the recipe differs from the checkpoint in data, model, batch size, or length."""
