"""The one read-only observer of a run: it is told what happened, and passes it to ledger, screen and trackers."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

from accel_train.observe.ledger import RunFolder, utc_event
from accel_train.observe.progress import Progress, format_seconds
from accel_train.observe.throughput import Meter
from accel_train.observe.trackers import Trackers
from accel_train.state import JsonRecord, StepResult
from accel_train.task import rate_name

MOST_UNWRITTEN_LINES = 100_000
"""Of metrics.jsonl, 50 MB of memory: with more of them the oldest are lost."""
# Routine: in the ledger and the report, but not worth a line on the screen.
SILENT_EVENTS = frozenset({"checkpoint", "evaluation"})
BEGINNINGS = frozenset({"start", "resume"})


class Observer(Protocol):
    """What the loop tells, on every process; only the main process's observer does anything with it."""

    @property
    def train_seconds(self) -> float: ...

    def on_step(self, result: StepResult, learning_rate: float) -> None: ...

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None: ...

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None: ...

    def note(self, text: str) -> None: ...

    def pause(self) -> AbstractContextManager[None]: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class RunObserver:
    """The main process's observer: `with RunObserver(...) as observer:` opens the trackers and closes the display.

    Args:
        folder: opened; it is closed by whoever opened it.
        samples_per_step: the global batch size.
        num_samples_per_epoch: global batches in one pass over the training data, as samples.
        targets: what `num_targets` counts: tokens, images, ...
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        trackers: Trackers,
        meter: Meter,
        *,
        log_every_steps: int,
        total_steps: int,
        samples_per_step: int,
        num_samples_per_epoch: float,
        targets: str = "tokens",
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._trackers = trackers
        self._meter = meter
        self._log_every_steps = log_every_steps
        self._total_steps = total_steps
        self._samples_per_step = samples_per_step
        self._num_samples_per_epoch = num_samples_per_epoch
        self._rate_name = rate_name(targets)
        self._loss_sum, self._num_losses = 0.0, 0
        self._step = 0
        self._unwritten: deque[JsonRecord] = deque(maxlen=MOST_UNWRITTEN_LINES)
        self._is_told = False

    @property
    def train_seconds(self) -> float:
        """Training time over all sittings, evaluation and checkpoints left out: for the checkpoint."""
        return self._meter.train_seconds

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Take note of a step; it is written down if it is due, the last, or skipped."""
        step = self._step = result.step
        self._meter.add(result.num_targets, self._samples_per_step)
        if not result.skipped:
            self._loss_sum += result.loss
            self._num_losses += 1
        due = step % self._log_every_steps == 0 or step == self._total_steps
        if due or result.skipped:
            self._log_step(result, learning_rate, due=due)
        self._progress.advance(step)

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Write down what an evaluation found: its loss, and whatever else the task measures.

        The split `eval_final` is that of the weights kept at the end, on all samples: another curve than `eval`.
        """
        self._write({"step": step, "split": split, **metrics})
        self._trackers.log({f"{split}/{name}": value for name, value in metrics.items()}, step)
        self._progress.note(
            f"step {step}: {'evaluation' if split == 'eval' else 'final evaluation'}: {_describe_metrics(metrics)}"
        )

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Write down that something happened: when, on which process (None: all), and why, in one sentence."""
        try:
            if kind == "rollback":
                done_again = [line for line in self._unwritten if line["step"] > facts["to_step"]]
                for line in done_again:
                    self._unwritten.remove(line)
                self._folder.rewind(facts["to_step"])
                self._loss_sum, self._num_losses = 0.0, 0
            self._folder.append_event(utc_event(kind, step, message, rank, facts))
        except OSError as error:  # an event often tells of a failure; it must not become a second one
            self._progress.note(f"events.jsonl could not be written ({error.strerror})")
        if kind not in SILENT_EVENTS:
            # The guard's sentences stand alone in the report, and begin with their step.
            self._progress.note(message if message.startswith(f"step {step}:") else f"step {step}: {message}")
        if kind in BEGINNINGS:
            self._progress.begin()

    def note(self, text: str) -> None:
        """Print a line for whoever watches; it is not kept."""
        self._progress.note(text)

    def pause(self) -> AbstractContextManager[None]:
        """Time within (evaluation, saving) is not training time."""
        return self._meter.paused()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, with this sitting's rates beside what the loop knows, and close trackers and display.

        Raises:
            OSError: summary.json could not be written.
        """
        overall = self._meter.overall()
        rates = {
            "train_seconds": round(self._meter.train_seconds, 3),
            self._rate_name: overall.tokens_per_second,
            "samples_per_second": overall.samples_per_second,
            "mfu": overall.mfu,
        }
        self._folder.write_summary({**rates, **summary})
        self._close()

    def __enter__(self) -> Self:
        self._trackers.start(lambda message: self.on_event("tracker_failed", self._step, message))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._trackers.finish()
        self._progress.close()

    def _write(self, line: JsonRecord) -> None:
        """Add a line to metrics.jsonl; on a full disk lines wait for room, and training goes on."""
        self._unwritten.append(line)
        try:
            while self._unwritten:
                self._folder.append_metrics(self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            if not self._is_told:
                self._progress.note(
                    f"metrics.jsonl cannot be written ({error.strerror}); its lines wait, training goes on"
                )
            self._is_told = True
        else:
            self._is_told = False

    def _log_step(self, result: StepResult, learning_rate: float, *, due: bool) -> None:
        """Write a line: when one is due, of the steps since the line before; for a skipped step in between, of that step alone."""
        loss, num_averaged = result.loss, self._num_losses if due else 0
        if num_averaged:
            loss = self._loss_sum / num_averaged
        if due:
            self._loss_sum, self._num_losses = 0.0, 0
        # Not to now: the host hears of a step while the next one runs, but of the one before a pause at once.
        rates = self._meter.window(restart=due, until=result.ended)
        line: JsonRecord = {
            "step": result.step,
            "split": "train",
            "loss": loss,
            "step_loss": result.loss,
            "num_averaged_steps": num_averaged,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "num_targets": result.num_targets,
            self._rate_name: rates.tokens_per_second,
            "samples_per_second": rates.samples_per_second,
            "mfu": rates.mfu,
            "epoch": round(result.step * self._samples_per_step / self._num_samples_per_epoch, 6),
            "train_seconds": round(self._meter.train_seconds_at(result.ended), 3),
        }
        self._write(line)
        self._trackers.log({f"train/{name}": line[name] for name in line if name not in ("step", "split")}, result.step)
        self._progress.show(
            result.step,
            loss=loss,
            learning_rate=learning_rate,
            tokens_per_second=rates.tokens_per_second,
            skipped=result.skipped,
        )


class NoObserver:
    """The observer of every process but the main one: it listens, and does nothing; or hands on steps, and nothing else."""

    train_seconds = 0.0

    def __init__(self, on_step: Callable[[StepResult, float], None] | None = None) -> None:
        self._on_step = on_step

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Hand it on, where somebody asked for it."""
        if self._on_step is not None:
            self._on_step(result, learning_rate)

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], split: str = "eval") -> None:
        """Nothing."""

    def on_event(self, kind: str, step: int, message: str, *, rank: int | None = None, **facts: Any) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def pause(self) -> AbstractContextManager[None]:
        """Nothing: there is no clock to stop."""
        return nullcontext()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


def _describe_metrics(metrics: Mapping[str, Any]) -> str:
    """`loss 2.0134, perplexity 7.49, bits_per_byte 1.2034 (3s)`."""
    numbers = [
        f"{name} {value:.4f}"
        for name, value in metrics.items()
        if isinstance(value, float) and name not in ("seconds", "num_targets")
    ]
    seconds = f" ({format_seconds(metrics['seconds'])})" if "seconds" in metrics else ""
    return ", ".join(numbers) + seconds
