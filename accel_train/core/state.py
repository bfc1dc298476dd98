"""Frozen records that parts of a run exchange. Does not import torch."""

import math
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A resolved setting with the reason that is printed. A value that explains itself has no reason."""

    value: T
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


Choices = dict[str, Choice[Any]]
"""Resolved settings by name."""


class StepResult(NamedTuple):
    """The result of one step, equal on every process and read by the host one step late.

    A tuple for speed, because each step makes one.
    """

    step: int
    """Number of attempted steps including this one. The first step is 1."""
    loss: float
    """Mean loss over all targets of the global batch, as optimized. NaN without targets."""
    grad_norm: float
    """Norm of all gradients over all processes, before clipping, unscaled."""
    num_targets: int
    """Number of targets (tokens, for a language model) in the global batch."""
    skipped: bool
    """Whether the update was skipped: no targets, a nonfinite loss or gradient, or a norm above the guard's limit."""
    loss_scale: float | None
    """Loss scale of this step's gradients. fp16 only."""
    stop_requested: bool
    """Whether a process was asked to stop (SIGTERM, Ctrl-C) before this step."""
    save_failed: bool = False
    """Whether a checkpoint could not be written in the background."""
    ran_out_of_memory: bool = False
    """Whether a process ran out of memory for gradients. No process applied the update, and the step is repeated."""
    learning_rate: float = 0.0
    max_grad_norm: float = 0.0
    """Norm to which gradients were clipped. 0: no clipping."""
    agreed: bool = True
    """Whether all processes computed the same gradient norm and made the same decision on the update."""
    loss_sum_here: float = 0.0
    """Loss sum of this process's share. Used only to find the process with a fault, never for a decision."""
    gradient_sum_here: float = 0.0
    """Sum of this process's scaled gradients. Finite if all gradients were finite or were not checked."""
    router_loss: float | None = None
    """Load-balancing loss of a mixture of experts over the global batch, without its coefficient."""
    counts: tuple[float, ...] = ()
    """Numbers that the task counted, summed over all processes."""
    ended: float | None = None
    """Time at which this process's host had queued its update, by `time.perf_counter`."""

    @property
    def finite(self) -> bool:
        """Return whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Rollback:
    """One rollback to an earlier checkpoint. Part of the run from then on."""

    number: int
    """Number of the rollback, from 1."""
    at_step: int
    """Last step attempted before the rollback."""
    to_step: int
    """Step of the restored checkpoint. The steps after it are repeated or skipped."""
    skip_first: int
    """First skipped step, counted from 1."""
    skip_last: int
    """Last skipped step. The samples of skipped steps are not trained on in this epoch."""
    learning_rate_factor: float = 1.0
    lowered_until: int = 0
    """Last step with the lowered learning rate."""
    num_skipped_steps: int = 0
    """Number of the run's steps without an applied update up to then, including repeated steps."""


@dataclass
class TrainState:
    """State for a resume, in addition to weights, optimizer and loss scale."""

    step: int = 0
    """Number of attempted steps. Determines the data position."""
    num_targets_seen: int = 0
    num_input_tokens_seen: int = 0
    """Number of tokens in all batches, if the task counts them."""
    num_skipped_steps: int = 0
    recent_skips: list[int] = field(default_factory=list)
    """Step numbers of the guard's last skips, oldest first."""
    consecutive_skips: int = 0
    consecutive_spikes: int = 0
    """Number of consecutive steps with a spike in the loss or the gradients."""
    first_bad_step: int | None = None
    """First step of the current series of skips and spikes."""
    last_incident: int | None = None
    """Last step that was not finite or spiked. Steps near it belong to the same incident."""
    losses: list[float] = field(default_factory=list)
    """The guard's window: losses of the last accepted steps, oldest first."""
    grad_norms: list[float] = field(default_factory=list)
    """Logarithms of the gradient norms of the same steps."""
    num_unmeasured: int = 0
    """Number of newest window entries that the guard's limits do not include yet."""
    rollbacks: list[Rollback] = field(default_factory=list)
    best_metric: float | None = None
    """Best value of `evaluate.metric_for_best_model` so far."""
    best_step: int | None = None
    best_loss: float | None = None
    """Held-out loss at `best_step`, a tie-breaker between equal metrics. None: not finite."""
    last_loss: float | None = None
    """Held-out loss of the newest evaluation."""
    evaluations_without_improvement: int = 0
    evaluation_owed: bool = False
    """Whether a stop request cut the evaluation after this step short. A resume begins with it."""
    stopped_early: bool = False
    """Whether early stopping or a program's request ended the run before its last step.

    A resume does not train while the recipe's patience is spent. Otherwise, it clears this field.
    """
    untrained: dict[str, float] = field(default_factory=dict)
    """Metrics of the initial weights on all evaluation samples. Empty if they were not evaluated."""
    train_seconds: float = 0.0
    """Wall time of training over all launches in seconds, without evaluation and checkpoints."""


@dataclass
class Requests:
    """Requests of an observer to the loop at the current step. The loop clears each request when done.

    Observers exist on every process and must make the same requests on all.
    """

    stop: bool = False
    """End the run here, as if this were its last step."""
    save: bool = False
    evaluate: bool = False


JsonRecord = dict[str, Any]
"""A JSON object: one line of metrics.jsonl or events.jsonl, or another record of a run."""
