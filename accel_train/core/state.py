"""The facts that pass between the parts of a run: plain frozen records, no torch."""

import math
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """Something decided for the user, with the reason that is printed."""

    value: T
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


class StepResult(NamedTuple):
    """The result of one step, the same on every process: read by the host one step late. (A tuple, because one is made each step.)"""

    step: int
    """Steps attempted up to and including this one: the first step of a run is 1."""
    loss: float
    """Mean over all targets of the global batch: the number that was optimised. NaN without targets."""
    grad_norm: float
    """Norm of all gradients, over all processes, before clipping, unscaled."""
    num_targets: int
    """Targets (tokens, for a language model) in the global batch."""
    skipped: bool
    """The update was not applied: no targets, a loss or gradient not finite, or a norm above the guard's limit."""
    loss_scale: float | None
    """fp16 only: the scale this step's gradients were computed with."""
    stop_requested: bool
    """Some process was asked to stop (SIGTERM, Ctrl-C) before this step."""
    save_failed: bool = False
    """A checkpoint that was being written in the background could not be written."""
    ran_out_of_memory: bool = False
    """Some process had no memory for its gradients: no process applied the update, and the step is repeated."""
    learning_rate: float = 0.0
    max_grad_norm: float = 0.0
    """Gradients were clipped to this norm; 0: they were not."""
    agreed: bool = True
    """All processes computed the same gradient norm, and all applied the update or none did."""
    loss_sum_here: float = 0.0
    """Loss of this process's own share. Nothing is decided by it: it shows which process a fault was on."""
    gradient_sum_here: float = 0.0
    """Sum of its own gradients, scaled as they were: finite where all of them were, or where nobody looked."""
    router_loss: float | None = None
    """Load-balancing loss of a mixture of experts over the global batch, without its coefficient."""
    ended: float | None = None
    """Time at which this process's host had queued its update, by `time.perf_counter`."""

    @property
    def finite(self) -> bool:
        """Return whether loss and gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Rollback:
    """One return to an earlier checkpoint: part of what the run is from then on."""

    number: int
    """Counted from 1."""
    at_step: int
    """The last step that had been attempted."""
    to_step: int
    """The step of the checkpoint that was restored; the steps between are repeated or skipped."""
    skip_first: int
    """The first step that is skipped from now on, counted from 1 ..."""
    skip_last: int
    """... and the last one: their samples are not trained on in this epoch."""
    learning_rate_factor: float = 1.0
    lowered_until: int = 0
    """The last step whose learning rate has that factor."""
    num_skipped_steps: int = 0
    """Steps of the run whose update was not applied up to then, also those that are repeated."""


@dataclass
class TrainState:
    """The state that a resume needs beside the weights, the optimizer and the loss scale."""

    step: int = 0
    """Steps attempted; the data position follows from it."""
    num_targets_seen: int = 0
    num_skipped_steps: int = 0
    recent_skips: list[int] = field(default_factory=list)
    """The guard's memory: step numbers of the last skips, oldest first."""
    consecutive_skips: int = 0
    consecutive_spikes: int = 0
    """Steps in a row whose loss was far above those before, or whose gradients were."""
    first_bad_step: int | None = None
    """The first step of the present row of skips and spikes."""
    last_incident: int | None = None
    """The last step that was not finite or spiked: steps near it belong to the same incident."""
    losses: list[float] = field(default_factory=list)
    """The guard's window: losses of the last accepted steps, oldest first ..."""
    grad_norms: list[float] = field(default_factory=list)
    """... and the logarithms of their gradient norms."""
    num_unmeasured: int = 0
    """Number of the newest of those that the guard's limits do not include yet."""
    rollbacks: list[Rollback] = field(default_factory=list)
    best_metric: float | None = None
    """`evaluate.metric_for_best_model` at its best so far."""
    best_step: int | None = None
    best_loss: float | None = None
    """Held-out loss at `best_step`: it decides between equal metrics. None: not finite."""
    last_loss: float | None = None
    """Held-out loss of the newest evaluation."""
    evaluations_without_improvement: int = 0
    evaluation_owed: bool = False
    """A stop request cut the evaluation after this step short; a resume begins with it."""
    stopped_early: bool = False
    """Early stopping (or a program's request) ended the run before its last step. A resume trains no further while the recipe's
    patience is spent, and else clears this."""
    train_seconds: float = 0.0
    """Wall time of training over all launches, evaluation and checkpoints left out."""


@dataclass
class Requests:
    """Requests of an observer to the loop, at the step that it was just called for; the loop clears each once it is done.

    Observers exist on every process, and must request the same on all.
    """

    stop: bool = False
    """End the run here, as if this were its last step."""
    save: bool = False
    evaluate: bool = False


JsonRecord = dict[str, Any]
"""One line of metrics.jsonl or events.jsonl."""
