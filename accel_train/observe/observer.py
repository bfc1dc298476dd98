"""Read-only observers of a run: their base, the main process's own (run folder, screen, trackers), and a list of them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from accel_train.core.json_io import utc_event
from accel_train.core.state import JsonRecord, StepResult
from accel_train.observe.goodput import LaunchClock
from accel_train.observe.progress import Progress
from accel_train.observe.run_folder import RunFolder
from accel_train.observe.system_metrics import SystemMetrics
from accel_train.observe.throughput import Meter
from accel_train.observe.trackers import Trackers
from accel_train.task import rate_name

MOST_UNWRITTEN_LINES = 100_000
"""Lines of metrics.jsonl, 50 MB of memory: with more of them the oldest are lost."""
SILENT_EVENTS = frozenset({"checkpoint", "evaluation"})
"""Routine events: in events.jsonl and the report, but not on the screen."""
ENDINGS = frozenset({"preempted", "stop", "early_stop"})
"""Events after which nothing is trained."""
T = TypeVar("T")


class Observer:
    """An observer of a run, on every process: subclasses override what they want to see; everything else does nothing."""

    @property
    def train_seconds(self) -> float:
        """Training time so far, which a checkpoint keeps; 0 for an observer that keeps no time."""
        return 0.0

    def on_step_begin(self, step: int) -> None:
        """Called before each step, 0-based; the step before it may not have been seen by `on_step` yet."""

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Called after each step, applied or skipped."""

    def on_evaluation_batch(self, step: int, share: float) -> None:
        """Called before each batch of an evaluation: the share of them that is done, 0 to 1, of this process's."""

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Called after each evaluation."""

    def on_event(
        self, kind: str, step: int, message: str, *, rank: int | None = None, names_step: bool = False, **facts: Any
    ) -> None:
        """Called for each event of events.jsonl; `rank` is None where it concerns all processes; `names_step`: the message does."""

    def note(self, text: str) -> None:
        """Called with a line for the screen that is not kept."""

    def pause(self, account: str) -> AbstractContextManager[None]:
        """Return a context for time that is not training: an evaluation, a save; `account` is one of `goodput.ACCOUNTS`."""
        return nullcontext()

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        """Return the same batches of steps, and measure how long each is waited for; the end of them is that of the training."""
        return batches

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Called once, when training has ended."""

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
    """A list of observers as one; the first keeps the time."""

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
    """The numbers of a run that decide when a line is due, and that lines of metrics.jsonl follow from."""

    log_every_steps: int
    total_steps: int
    samples_per_step: int
    """The global batch size."""
    num_samples_per_epoch: float
    """Global batches in one pass over the training data, as samples."""
    targets: str = "tokens"
    """Unit of `num_targets`: tokens, images, ..."""


class RunObserver(Observer):
    """The main process's observer: `with RunObserver(...) as observer:` opens the trackers and closes the display.

    `folder` is open, and stays so. The `clock` accounts for the time of this launch; `system` is asked at log lines.
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
        self._step = 0
        self._unwritten: deque[JsonRecord] = deque(maxlen=MOST_UNWRITTEN_LINES)
        self._is_failing = False

    @property
    def train_seconds(self) -> float:
        """Training time over all launches, without evaluation and checkpoints."""
        return self._meter.train_seconds

    def on_step_begin(self, step: int) -> None:
        self._clock.begin_step(step)

    def reading(self, batches: Iterator[T]) -> Iterator[T]:
        return self._clock.reading(batches)

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Count a step, and write its line if one is due, if it is the last, or if it was skipped."""
        step, plan = result.step, self._plan
        self._step = step
        self._clock.end_step(step - 1, skipped=result.skipped)
        self._meter.add(result.num_targets, plan.samples_per_step)
        if not result.skipped:
            self._loss_sum += result.loss
            self._num_losses += 1
        due = step % plan.log_every_steps == 0 or step == plan.total_steps
        if due or result.skipped:
            self._log_step(result, learning_rate, due=due)
        self._progress.advance(step)

    def on_evaluation_batch(self, step: int, share: float) -> None:
        self._progress.evaluating(step, share)

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Write an evaluation's loss and metrics; the split `eval_final` is that of the weights kept at the end, on all samples."""
        self._write_numbers(step, split, metrics)
        kind = "evaluation" if split == "eval" else "final evaluation"
        self._progress.evaluated(step, kind, metrics)

    def on_event(
        self, kind: str, step: int, message: str, *, rank: int | None = None, names_step: bool = False, **facts: Any
    ) -> None:
        """Write an event: when, on which process (None: all), and why, in one sentence."""
        try:
            if kind == "rollback":
                kept = [line for line in self._unwritten if line["step"] <= facts["to_step"]]
                self._unwritten = deque(kept, maxlen=MOST_UNWRITTEN_LINES)
                self._folder.rewind(facts["to_step"])
                self._loss_sum, self._num_losses = 0.0, 0
            self._folder.append_event(utc_event(kind, step, message, rank, facts))
        except OSError as error:  # an event often reports a failure; it must not become a second one
            self._progress.note(f"events.jsonl could not be written ({error.strerror})")
        if kind not in SILENT_EVENTS:
            self._progress.note(message if names_step else f"step {step}: {message}")
        if kind in ("start", "resume"):
            self._progress.begin()
        if kind in ENDINGS:
            self._clock.switch("stopping")

    def note(self, text: str) -> None:
        self._progress.note(text)

    @contextmanager
    def pause(self, account: str) -> Iterator[None]:
        with self._meter.paused(), self._clock.inside(account):
            yield

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json with this launch's rates, and close trackers and display."""
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
        except Exception as error:  # the weights are written: the run has finished all the same
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
        """Add a line to metrics.jsonl; on a full disk lines wait for room, and training continues."""
        self._unwritten.append(line)
        try:
            while self._unwritten:
                self._folder.append_metrics(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._is_failing:
                message = f"metrics.jsonl cannot be written ({error.strerror}); its lines wait, training continues"
                self._progress.note(message)
            self._is_failing = True
        else:
            self._is_failing = False

    def _write_numbers(self, step: int, split: str, numbers: Mapping[str, Any]) -> None:
        self._write({"step": step, "split": split, **numbers})
        self._trackers.log({f"{split}/{name}": value for name, value in numbers.items()}, step)

    def _log_step(self, result: StepResult, learning_rate: float, *, due: bool) -> None:
        """Write a line: when one is due, for the steps since the line before; for a skipped step in between, for that step alone."""
        loss, num_averaged = result.loss, self._num_losses if due else 0
        if num_averaged:
            loss = self._loss_sum / num_averaged
        if due:
            self._loss_sum, self._num_losses = 0.0, 0
        # Not to now: the host reads a step's result while the next one runs, but that of the one before a pause at once.
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
        }
        self._write_numbers(result.step, "train", numbers)
        if due and self._system is not None and (system := self._system.sample()):
            self._write_numbers(result.step, "system", system)
        self._progress.show(
            result.step,
            loss=loss,
            learning_rate=learning_rate,
            tokens_per_second=rates.tokens_per_second,
            skipped=result.skipped,
        )
