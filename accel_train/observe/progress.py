"""Progress on the screen: a bar in a terminal or notebook, plain lines elsewhere."""

import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

from accel_train.core.format import format_seconds
from accel_train.core.metric_names import is_variant
from accel_train.core.redaction import redact_text
from accel_train.core.terminal import is_terminal, print_line, shown_on, width_of
from accel_train.observe.run_folder import Record

Style = Literal["bar", "notebook", "lines", "off"]

REFRESH_SECONDS = 0.5
"""Minimum time between two redraws of a bar, in seconds. A redraw costs about 0.1 ms, much more on a slow terminal."""

LINE_SECONDS = 2.0
"""Seconds until the first line about a running evaluation without a bar. Each later line waits twice as long."""

CALM_SECONDS = 2.0
"""Least time between two printed steps, or between two printed evaluations, if the recipe sets no frequency."""

WIDE = 80
"""Terminal width that fits a bar and all numbers. Narrower terminals drop the learning rate first, then the speed."""

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}, {remaining} left"
"""Bar format that leaves 10 characters for the bar in 80 columns with six-digit steps."""


def choose_style(setting: bool | Literal["auto"], stream: TextIO | None) -> Style:
    """Resolve `Recipe.log.progress` for this terminal, notebook or log file."""
    if not setting:
        return "off"
    if "ipykernel.zmqshell" in sys.modules:
        return "notebook"
    if setting != "auto":
        return "bar"
    # A job scheduler's terminal may report zero width, and a bar would be empty.
    return "bar" if is_terminal(stream) and width_of(stream) else "lines"


class Progress:
    """A display of the current step, its logged numbers, and the time left. A broken output never stops the run.

    Args:
        setting: `Recipe.log.progress`.
        initial_step: steps done in earlier launches. The time left is estimated from this launch only.
        targets: unit of the rate: tokens, images, ...
        metric: evaluation metric that lines always show, even if it is one of the averages they leave out.
        pause_seconds: least time between two lines of steps, and between two lines of evaluations. First and last
            lines, and skipped steps, are always printed.
        stream: output stream. None means standard output.
    """

    def __init__(
        self,
        setting: bool | Literal["auto"],
        *,
        total_steps: int,
        initial_step: int = 0,
        targets: str = "tokens",
        metric: str = "",
        pause_seconds: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._speed_unit = "tok/s" if targets == "tokens" else f"{targets}/s"
        self.style = choose_style(setting, self._stream)
        self._total_steps, self._initial_step = total_steps, initial_step
        self._metric, self._pause_seconds = metric, pause_seconds
        self._printed = {"step": -math.inf, "evaluation": -math.inf}
        """Time of the last line of each kind, in `time.monotonic` seconds."""
        self._begin = time.monotonic()
        self._bar: Any = None
        self._loss = self._beside_bar = ""
        self._evaluated_for: tuple[float, float] | None = None
        """Start of the running evaluation and time of its next display, both in `time.monotonic` seconds."""
        self._broken = self._stream is None

    def begin(self) -> None:
        """Start the clock of the steps and draw the bar below earlier notes."""
        self._begin = time.monotonic()
        if self.style in ("bar", "notebook"):
            self._guarded(self._open_bar)

    def advance(self, step: int) -> None:
        """Move the bar to a step. Cheap enough to call at every step."""
        if self._bar is not None:
            self._guarded(lambda: self._bar.update(step - self._bar.n))

    def show(
        self, step: int, *, loss: float, learning_rate: float, tokens_per_second: float | None, skipped: bool = False
    ) -> None:
        """Show the numbers of a logged step next to the bar, or as one aligned line."""
        speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} {self._speed_unit}"
        mark, self._loss = "  skipped" if skipped else "", f"{loss:.4f}"
        if self._bar is not None:
            if tokens_per_second is not None:
                speed = f"{self._bar.format_sizeof(tokens_per_second)} {self._speed_unit}"
            width = width_of(self._stream) or WIDE
            rate = f"lr {learning_rate:.1e}" if width >= WIDE else ""
            parts = (f"loss {loss:.4g}", rate, speed if width >= WIDE - 10 else "")
            self._beside_bar = ", ".join(part for part in parts if part) + mark
            self._guarded(lambda: self._bar.set_postfix_str(self._beside_bar, refresh=False))
        elif self.style == "lines" and self._is_due("step", now=skipped or step >= self._total_steps):
            width = len(str(self._total_steps))
            self._write_line(
                f"step {step:>{width}}/{self._total_steps} {100 * step / self._total_steps:5.1f}%"
                f"  loss {loss:<8.4f} lr {learning_rate:.3e}  {speed:>17}  left {self._time_left(step)}{mark}"
            )

    def evaluating(self, step: int, share: float) -> None:
        """Show the progress of an evaluation next to the bar, or as a line if it takes long.

        Cheap enough to call at every batch.
        """
        now = time.monotonic()
        wait = REFRESH_SECONDS if self._bar is not None else LINE_SECONDS
        if self._evaluated_for is None:
            self._evaluated_for = now, now + wait
        began, due = self._evaluated_for
        if now < due or self.style == "off":
            return
        if self._bar is not None:
            self._evaluated_for = began, now + wait
            self._guarded(lambda: self._bar.set_postfix_str(f"evaluating, {share:.0%}"))
        else:
            self._evaluated_for = began, now + now - began
            self._write_line(f"step {step}: evaluating, {share:.0%} done after {format_seconds(now - began)}")

    def evaluated(self, step: int, kind: str, metrics: Record) -> None:
        """Show the metrics of an evaluation as a table row in a notebook, elsewhere as a line."""
        self._evaluated_for = None
        if self._bar is not None:
            self._guarded(lambda: self._bar.set_postfix_str(self._beside_bar, refresh=False))
        if self.style != "notebook" or self._bar is None:
            if not self._is_due("evaluation", now=kind != "evaluation" or step >= self._total_steps):
                return None
            return self.note(f"step {step}: {kind}: {describe_metrics(metrics, self._metric)}")
        numbers = {name.replace("_", " "): f"{value:.4f}" for name, value in _floats(metrics).items()}
        last = " (last)" if kind == "final evaluation" else ""
        row = {
            "step": f"{step}{last}",
            "training loss": self._loss,
            "evaluation loss": numbers.pop("loss", ""),
            **numbers,
        }
        self._guarded(lambda: self._bar.add_row(row))

    def _is_due(self, kind: str, *, now: bool) -> bool:
        """Return whether a line of this kind may be printed. An evaluation also postpones the next step's line."""
        time_now = time.monotonic()
        if not now and time_now - self._printed[kind] < self._pause_seconds:
            return False
        self._printed["step"] = self._printed[kind] = time_now
        return True

    def note(self, text: str) -> None:
        """Print a line above the bar, with secrets redacted. In a terminal, long lines wrap between words."""
        text = redact_text(text)
        width = width_of(self._stream) if self.style == "bar" else 0
        if 20 < width < len(text) and "\n" not in text:
            column = re.match(r"[\w.-]+ {2,}(?=\S)", text)
            hang = " " * (min(column.end(), width // 2) if column else 2)
            text = textwrap.fill(text, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
        if self._bar is None or self.style == "notebook":
            self._write_line(text)
        else:
            self._guarded(lambda: type(self._bar).write(shown_on(self._stream, text), file=self._stream))

    def close(self) -> None:
        """Close the bar and leave its last state on the screen."""
        if self._bar is not None:
            self._guarded(self._bar.close)
            self._bar = None

    def _open_bar(self) -> None:
        # miniters=1 keeps the refresh steady when steps slow down, so tqdm's monitor thread has nothing to do.
        settings: dict[str, Any] = {
            "total": self._total_steps,
            "initial": self._initial_step,
            "mininterval": REFRESH_SECONDS,
            "miniters": 1,
            "smoothing": 0.1,
            "unit": " steps",
        }
        if self.style == "notebook":
            from accel_train.observe.notebook import NotebookBar

            self._bar = NotebookBar(**settings)
        else:
            from tqdm import tqdm

            self._bar = tqdm(file=self._stream, dynamic_ncols=True, bar_format=_BAR, **settings)

    def _time_left(self, step: int) -> str:
        """Return the wall time left at the pace of this launch, including evaluation and checkpoints."""
        done = step - self._initial_step
        if done <= 0:
            return "?"
        return format_seconds((time.monotonic() - self._begin) / done * (self._total_steps - step))

    def _write_line(self, text: str) -> None:
        self._guarded(lambda: print_line(text, self._stream))

    def _guarded(self, draw: Callable[[], object]) -> None:
        """Call `draw`. If the output is gone (closed pipe, closed file, full disk), stop drawing."""
        if self._broken:
            return
        try:
            draw()
        # BrokenPipeError is an OSError. A closed file raises ValueError.
        except (OSError, ValueError):
            self._broken = True
            if self._stream is sys.stdout:
                _discard_stdout()
            if self._bar is not None:
                # Otherwise its close() would draw once more.
                self._bar.disable = True
                self._bar = None


def _discard_stdout() -> None:
    """Discard the rest of standard output's buffer.

    Flushing it at exit would turn exit code 0 into 120.
    """
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    # Closed or not a real file: nothing will be flushed.
    except (OSError, ValueError):
        return


def without_variants(scores: Record, kept: str) -> dict[str, Any]:
    """Return the metrics that no other one represents, and the one named `kept`."""
    return {name: value for name, value in scores.items() if name == kept or not is_variant(name, scores)}


def describe_metrics(metrics: Record, kept: str = "") -> str:
    """Return the metrics as text: `loss 2.0134, perplexity 7.49, bits_per_byte 1.2034 (3s)`.

    Metrics are left out as in `without_variants`.
    """
    numbers = [f"{name} {value:.4f}" for name, value in _floats(without_variants(metrics, kept)).items()]
    seconds = f" ({format_seconds(metrics['seconds'])})" if "seconds" in metrics else ""
    return ", ".join(numbers) + seconds


def _floats(metrics: Record) -> dict[str, float]:
    aside = ("seconds", "num_targets")
    return {name: value for name, value in metrics.items() if isinstance(value, float) and name not in aside}
