"""Read-only observers of a run: the base class, the main process's observer, and a list of observers."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Self, TypeVar

from accel_train.core.json_io import utc_event
from accel_train.core.state import JsonRecord, StepResult
from accel_train.observe.goodput import LaunchClock
from accel_train.observe.progress import Progress
from accel_train.observe.run_folder import Record, RunFolder
from accel_train.observe.throughput import Meter, SystemMetrics
from accel_train.observe.trackers import Trackers
from accel_train.task import rate_name

MOST_UNWRITTEN_LINES = 100_000
"""Maximum number of unwritten lines of metrics.jsonl to keep, about 50 MB of memory. The oldest are dropped first."""
SILENT_EVENTS = frozenset({"checkpoint", "evaluation"})
"""Routine events, recorded in events.jsonl and the report but not printed on the screen."""
_EVALUATIONS = {
    "eval": "evaluation",
    "eval_final": "final evaluation",
    "eval_untrained": "evaluation of the initial weights",
}
ENDINGS = frozenset({"preempted", "stop", "early_stop"})
"""Events after which the run does not train any more steps."""
T = TypeVar("T")
IDLE_SAMPLES, LEAST_IDLE_PERCENT = 3, 5.0
"""Number of samples, and the smallest share of idle time of a GPU in them, that are worth a remark."""


class Observer:
    """An observer of a run on one process. Subclasses override the methods they need; the defaults do nothing."""

    @property
    def train_seconds(self) -> float:
        """Training time so far in seconds, stored in checkpoints. 0 for an observer without a clock."""
        return 0.0

    def on_step_begin(self, step: int) -> None:
        """Handle the start of a step (0-based).

        The previous step may not have reached `on_step` yet.
        """

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Handle the result of a step, applied or skipped."""

    def on_evaluation_batch(self, step: int, share: float) -> None:
        """Handle the start of an evaluation batch. `share` is the finished part of this process's batches, 0 to 1."""

    def on_evaluation(self, step: int, metrics: Record, split: str = "eval") -> None:
        """Handle the metrics of an evaluation."""

    def on_event(
        self, kind: str, step: int, message: str, *, rank: int | None = None, names_step: bool = False, **facts: Any
    ) -> None:
        """Handle an event of events.jsonl. Without a `rank`, it concerns all processes.

        `names_step` says whether the message names its step.
        """

    def note(self, text: str) -> None:
        """Print a line on the screen without recording it."""

    def pause(self, account: str) -> AbstractContextManager[None]:
        """Return a context for time that is not training, such as an evaluation or a save.

        `account` is one of `goodput.ACCOUNTS`.
        """
        return nullcontext()

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches of the training steps and measure how long the run waits for each.

        The end of the batches marks the end of training.
        """
        return batches

    def finish(self, summary: Record) -> None:
        """Handle the end of training. Called once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


def _of_all(method: str) -> Callable[..., None]:
    def call(self: "Observers", *args: Any, **kwargs: Any) -> None:
        for observer in self.observers:
            getattr(observer, method)(*args, **kwargs)

    return call


class Observers(Observer):
    """A list of observers that behaves like one observer. The first one keeps the training time."""

    on_step, on_evaluation, on_event = _of_all("on_step"), _of_all("on_evaluation"), _of_all("on_event")
    on_step_begin, on_evaluation_batch = _of_all("on_step_begin"), _of_all("on_evaluation_batch")
    note, finish = _of_all("note"), _of_all("finish")

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        self._open = ExitStack()

    @property
    def train_seconds(self) -> float:
        return self.observers[0].train_seconds

    @contextmanager
    def pause(self, account: str) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.pause(account))
            yield

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        return self.observers[0].reading(batches)

    def __enter__(self) -> Self:
        for observer in self.observers:
            self._open.enter_context(observer)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


@dataclass(frozen=True)
class LogPlan:
    """The numbers of a run that decide when to log and that the logged values are computed from."""

    log_every_steps: int
    total_steps: int
    samples_per_step: int
    """Global batch size, in samples."""
    num_samples_per_epoch: float
    """Samples in one pass over the training data, counted in whole global batches."""
    idle_remedy: str
    """What helps against a GPU that waits for the host. Empty: it is set already."""
    targets: str
    """Unit of `num_targets`: tokens, images, ..."""
    by_source: Callable[[int, Sequence[float]], JsonRecord] | None = None
    """Function from a step and the task's counts since the last line to numbers for each source of a mixture."""


class RunObserver(Observer):
    """The main process's observer, used as `with RunObserver(...) as observer:`.

    Entering opens the trackers; leaving closes trackers and display. `folder` must be open and stays open. `clock`
    accounts for the time of this launch. `system` is sampled at log lines.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        trackers: Trackers,
        meter: Meter,
        plan: LogPlan,
        clock: LaunchClock | None = None,
        system: SystemMetrics | None = None,
    ) -> None:
        self._folder, self._progress, self._trackers, self._meter = folder, progress, trackers, meter
        self._clock, self._system = LaunchClock() if clock is None else clock, system
        self._plan, self._rate_name = plan, rate_name(plan.targets)
        self._loss_sum, self._num_losses = 0.0, 0
        self._counts: Sequence[float] = ()
        self._idle: list[float] = []
        self._step = 0
        self._unwritten: deque[JsonRecord] = deque(maxlen=MOST_UNWRITTEN_LINES)
        self._is_failing = False

    @property
    def train_seconds(self) -> float:
        """Training time over all launches in seconds, without evaluation and checkpoints."""
        return self._meter.train_seconds

    def on_step_begin(self, step: int) -> None:
        self._clock.begin_step(step)

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        return self._clock.reading(batches)

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Count a step. Log it if a line is due, at the last step, or if it was skipped."""
        step, plan = result.step, self._plan
        self._step = step
        self._clock.end_step(step - 1, skipped=result.skipped)
        self._meter.add(result.num_targets, plan.samples_per_step)
        if not result.skipped:
            self._loss_sum += result.loss
            self._num_losses += 1
            self._counts = [sum(each) for each in zip_longest(self._counts, result.counts, fillvalue=0.0)]
        due = step % plan.log_every_steps == 0 or step == plan.total_steps
        if due or result.skipped:
            self._log_step(result, learning_rate, due=due)
        self._progress.advance(step)

    def on_evaluation_batch(self, step: int, share: float) -> None:
        self._progress.evaluating(step, share)

    def on_evaluation(self, step: int, metrics: Record, split: str = "eval") -> None:
        """Record the loss and metrics of an evaluation.

        The split `eval_final` is the evaluation of the final weights on all samples, and `eval_untrained` of the
        initial ones, if other evaluations read part of the samples.
        """
        self._write_numbers(step, split, metrics)
        self._progress.evaluated(step, _EVALUATIONS[split], metrics)

    def on_event(
        self, kind: str, step: int, message: str, *, rank: int | None = None, names_step: bool = False, **facts: Any
    ) -> None:
        """Record an event with its time, process (None: all), and reason, and print it unless it is routine."""
        try:
            if kind == "rollback":
                kept = [line for line in self._unwritten if line["step"] <= facts["to_step"]]
                self._unwritten = deque(kept, maxlen=MOST_UNWRITTEN_LINES)
                self._folder.rewind(facts["to_step"])
                self._loss_sum, self._num_losses = 0.0, 0
            self._folder.append_event(utc_event(kind, step, message, rank, facts))
        # An event often reports a failure. Recording it must not cause a second one.
        except OSError as error:
            self._progress.note(f"events.jsonl could not be written ({error.strerror})")
        if kind not in SILENT_EVENTS:
            self._progress.note(message if names_step else f"step {step}: {message}")
        if kind in ("start", "resume"):
            self._progress.begin()
        if kind in ENDINGS:
            self._clock.stop()

    def note(self, text: str) -> None:
        self._progress.note(text)

    @contextmanager
    def pause(self, account: str) -> Iterator[None]:
        with self._meter.paused(), self._clock.inside(account):
            yield

    def finish(self, summary: Record) -> None:
        """Write summary.json with this launch's rates, then close trackers and display."""
        overall = self._meter.overall()
        rates = {
            "train_seconds": round(self._meter.train_seconds, 3),
            self._rate_name: overall.tokens_per_second,
            "samples_per_second": overall.samples_per_second,
            "mfu": overall.mfu,
        }
        goodput = self._clock.goodput()
        try:
            self._folder.write_summary({**rates, **summary, "goodput": goodput})
        # The weights are already written, so a missing summary does not fail the run.
        except Exception as error:
            self._progress.note(
                f"warning: summary.json could not be written ({error}); run the same command again for it"
            )
        shares = {f"{name}_seconds": seconds for name, seconds in goodput.pop("accounts").items()}
        self._trackers.log({f"goodput/{name}": value for name, value in {**goodput, **shares}.items()}, self._step)
        self._close()

    def __enter__(self) -> Self:
        self._trackers.start(lambda message: self.on_event("tracker_failed", self._step, message))
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._trackers.finish()
        self._progress.close()

    def _write(self, line: JsonRecord) -> None:
        """Append a line to metrics.jsonl.

        If the disk is full, lines wait in memory and training continues.
        """
        self._unwritten.append(line)
        try:
            while self._unwritten:
                self._folder.append_metrics(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._is_failing:
                message = f"metrics.jsonl could not be written ({error.strerror}); its lines wait, training continues"
                self._progress.note(message)
            self._is_failing = True
        else:
            self._is_failing = False

    def _write_numbers(self, step: int, split: str, numbers: Record) -> None:
        self._write({"step": step, "split": split, **numbers})
        self._trackers.log({f"{split}/{name}": value for name, value in numbers.items()}, step)

    def _notice_idle_gpu(self, step: int, system: Record) -> None:
        """Say once that the GPU idles, and not because data is late. The first sample does not count: it compiles."""
        if "gpu_percent" not in system or len(self._idle) > IDLE_SAMPLES:
            return
        self._idle.append(100 - system["gpu_percent"])
        if len(self._idle) <= IDLE_SAMPLES or not self._plan.idle_remedy:
            return
        idle, accounts = sum(self._idle[1:]) / IDLE_SAMPLES, self._clock.accounts()
        waits = accounts.get("waiting_for_data", 0.0) / (accounts.get("productive_steps", 0.0) or 1.0)
        if idle > LEAST_IDLE_PERCENT and waits < LEAST_IDLE_PERCENT / 100:
            self.note(f"step {step}: the GPU is idle for {idle:.0f} % of the time: {self._plan.idle_remedy}")

    def _log_step(self, result: StepResult, learning_rate: float, *, due: bool) -> None:
        """Log a step.

        A due line averages the loss of the steps since the previous line. The line of a skipped step in between covers
        that step alone.
        """
        loss, num_averaged = result.loss, self._num_losses if due else 0
        if num_averaged:
            loss = self._loss_sum / num_averaged
        if due:
            self._loss_sum, self._num_losses = 0.0, 0
        # Measure until the step's end, not until now. The host reads a result while the next step runs, except before a
        # pause, where it reads the result at once.
        rates = self._meter.window(restart=due, until=result.ended)
        numbers: JsonRecord = {
            "loss": loss,
            "step_loss": result.loss,
            "num_averaged_steps": num_averaged,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            **({} if result.router_loss is None else {"router_aux_loss": result.router_loss}),
            "skipped": result.skipped,
            "num_targets": result.num_targets,
            self._rate_name: rates.tokens_per_second,
            "samples_per_second": rates.samples_per_second,
            "mfu": rates.mfu,
            "epoch": round(result.step * self._plan.samples_per_step / self._plan.num_samples_per_epoch, 6),
            "train_seconds": round(self._meter.train_seconds_at(result.ended), 3),
            **({} if self._plan.by_source is None else self._plan.by_source(result.step, self._counts)),
        }
        if due:
            self._counts = ()
        self._write_numbers(result.step, "train", numbers)
        if due and self._system is not None and (system := self._system.sample()):
            self._write_numbers(result.step, "system", system)
            self._notice_idle_gpu(result.step, system)
        self._progress.show(
            result.step,
            loss=loss,
            learning_rate=learning_rate,
            tokens_per_second=rates.tokens_per_second,
            skipped=result.skipped,
        )
