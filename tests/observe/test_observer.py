import errno
import io
import json
import math
import os
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from accel_train.core.state import StepResult
from accel_train.observe import read_events, read_metrics, read_summary
from accel_train.observe.observer import LogPlan, Observer, RunObserver
from accel_train.observe.progress import Progress
from accel_train.observe.run_folder import RunFolder
from accel_train.observe.throughput import Meter, SystemMetrics
from accel_train.observe.trackers import Trackers
from tests.support.wording import assert_golden

STEP = StepResult(
    step=1, loss=2.0, grad_norm=0.5, num_targets=100, skipped=False, loss_scale=None, stop_requested=False
)


class Recording(GeneralTracker):
    """A tracker that keeps its lines, and fails when told to."""

    name = "recording"
    requires_logging_directory = False
    lines: "list[tuple[int | None, dict[str, Any]]]" = []  # noqa: RUF012
    broken = False

    def __init__(self, project: str) -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self.broken:
            raise ConnectionError("service down")
        self.lines.append((step, values))


@pytest.fixture
def recording() -> Iterator[type[Recording]]:
    register_tracker_class(Recording)
    Recording.lines.clear()
    yield Recording
    del LOGGER_TYPE_TO_CLASS["recording"]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Seen:
    observer: RunObserver
    folder: RunFolder
    clock: Clock
    screen: io.StringIO

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder.path)


@contextmanager
def observing(
    path: Path,
    *,
    names: tuple[str, ...] = (),
    total_steps: int = 25,
    every: int = 10,
    targets: str = "tokens",
    system: SystemMetrics | None = None,
    idle_remedy: str = "",
) -> Iterator[Seen]:
    clock, screen = Clock(), io.StringIO()
    with RunFolder(path) as folder:
        trackers = Trackers(
            Accelerator(cpu=True), names, project="p", run_name="r", config={"seed": 1}, logging_dir=path
        )
        observer = RunObserver(
            folder,
            Progress("auto", total_steps=total_steps, stream=screen),
            trackers,
            Meter(flops_per_token=1e6, peak_flops=1e9, clock=clock),
            LogPlan(
                every,
                total_steps,
                samples_per_step=4,
                num_samples_per_epoch=40,
                targets=targets,
                idle_remedy=idle_remedy,
            ),
            system=system,
        )
        with observer:
            yield Seen(observer, folder, clock, screen)


def test_lines_are_written_at_log_steps_at_the_last_step_and_for_every_skipped_step(tmp_path: Path) -> None:
    with observing(tmp_path) as seen:
        for step in range(1, 26):
            seen.clock.now += 1.0 if 11 <= step <= 13 else 0.5
            skipped = step == 13
            loss = math.nan if skipped else 2.0
            seen.observer.on_step(STEP._replace(step=step, loss=loss, skipped=skipped), 3e-4)
    assert [line["step"] for line in seen.metrics] == [10, 13, 20, 25]
    first, skipped_line, third, last = seen.metrics
    assert first == {
        "step": 10,
        "split": "train",
        "loss": 2.0,
        "step_loss": 2.0,
        "num_averaged_steps": 10,
        "learning_rate": 3e-4,
        "grad_norm": 0.5,
        "loss_scale": None,
        "skipped": False,
        "num_targets": 100,
        "tokens_per_second": 200.0,
        "samples_per_second": 8.0,
        "mfu": 0.2,
        "epoch": 1.0,
        "train_seconds": 5.0,
    }
    assert math.isnan(skipped_line["loss"])
    assert skipped_line["skipped"] is True
    # The skipped step's line does not cut the stretch between two log lines in two.
    assert [line["tokens_per_second"] for line in (third, last)] == [pytest.approx(1000 / 6.5), 200.0]
    assert "step 10/25  40.0%  loss 2.0000" in seen.screen.getvalue()
    assert "step 13/25" in seen.screen.getvalue()


def test_the_loss_of_a_line_is_the_mean_of_the_steps_since_the_line_before_it(
    tmp_path: Path, recording: type[Recording]
) -> None:
    losses = {step: float(step) for step in range(1, 13)} | {3: math.nan, 5: 500.0, 8: math.inf}
    skipped = (3, 5, 8)
    with observing(tmp_path, names=("recording",), total_steps=12, every=4) as seen:
        for step, loss in losses.items():
            seen.observer.on_step(STEP._replace(step=step, loss=loss, skipped=step in skipped), 3e-4)
    lines = [(x["step"], x["loss"], x["step_loss"], x["num_averaged_steps"], x["skipped"]) for x in seen.metrics]
    assert repr(lines) == repr(
        [
            (3, math.nan, math.nan, 0, True),  # a skipped step between two lines: it alone, as it was
            (4, (1 + 2 + 4) / 3, 4.0, 3, False),
            (5, 500.0, 500.0, 0, True),
            (8, (6 + 7) / 2, math.inf, 2, True),  # skipped where a line is due
            (12, (9 + 10 + 11 + 12) / 4, 12.0, 4, False),
        ]
    )
    assert recording.lines[1][1]["train/loss"] == pytest.approx(7 / 3)
    assert recording.lines[1][1]["train/step_loss"] == 4.0
    assert "step  4/12  33.3%  loss 2.3333" in seen.screen.getvalue()


def test_steps_that_a_rollback_does_again_are_in_no_mean(tmp_path: Path) -> None:
    with observing(tmp_path, total_steps=8, every=4) as seen:
        for step in (1, 2, 3, 4, 5, 6, 7):
            seen.observer.on_step(STEP._replace(step=step, loss=100.0 if step > 6 else 2.0), 3e-4)
        seen.observer.on_event("rollback", 7, "going back", to_step=6)
        for step in (7, 8):
            seen.observer.on_step(STEP._replace(step=step, loss=3.0), 3e-4)
    assert [(x["step"], x["loss"], x["num_averaged_steps"]) for x in seen.metrics] == [(4, 2.0, 4), (8, 3.0, 2)]


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("tokens", {"tokens_per_second": 50.0, "samples_per_second": 2.0}),
        ("pixels", {"pixels_per_second": 50.0, "samples_per_second": 2.0}),
        ("targets", {"targets_per_second": 50.0, "samples_per_second": 2.0}),
        ("samples", {"samples_per_second": 2.0}),
        ("images", {"samples_per_second": 2.0}),
    ],
)
def test_a_rate_is_named_after_what_it_counts(
    tmp_path: Path, recording: type[Recording], targets: str, names: dict[str, float]
) -> None:
    with observing(tmp_path, names=("recording",), every=1, targets=targets) as seen:
        seen.clock.now = 2.0
        seen.observer.on_step(STEP, 1e-3)
        seen.observer.finish({})

    def rates(record: dict[str, Any]) -> dict[str, float]:
        return {name.removeprefix("train/"): x for name, x in record.items() if name.endswith("_per_second")}

    assert rates(seen.metrics[0]) == rates(read_summary(tmp_path)) == rates(recording.lines[0][1]) == names


def test_evaluation_and_saving_are_not_training_time(tmp_path: Path) -> None:
    with observing(tmp_path) as seen:
        for step in range(1, 11):
            seen.clock.now += 1
            seen.observer.on_step(STEP._replace(step=step), 1e-3)
            with seen.observer.pause("evaluation"):
                seen.clock.now += 100
                assert seen.observer.train_seconds == step
    [line] = seen.metrics
    assert line["tokens_per_second"] == 100.0
    assert line["train_seconds"] == 10.0


def test_an_evaluation_is_a_line_of_its_own_with_all_its_numbers(tmp_path: Path, recording: type[Recording]) -> None:
    metrics = {"loss": 2.0, "perplexity": 7.389, "bits_per_byte": 1.2, "num_targets": 4000, "seconds": 3.2}
    with observing(tmp_path, names=("recording",)) as seen:
        seen.observer.on_step(STEP._replace(step=10, loss_scale=128.0), 1e-3)
        seen.observer.on_evaluation(10, metrics)
    assert seen.metrics[1] == {"step": 10, "split": "eval", **metrics}
    assert_golden(seen.screen.getvalue().splitlines()[1])
    (train_step, train), (eval_step, evaluation) = recording.lines
    assert (train_step, eval_step) == (10, 10)
    assert train["train/loss"] == 2.0
    assert train["train/loss_scale"] == 128.0
    assert evaluation["eval/perplexity"] == 7.389


def test_an_event_says_when_who_and_why(tmp_path: Path) -> None:
    with observing(tmp_path) as seen:
        seen.observer.on_event("skip", 7, "the loss is NaN", rank=3, parameter="h.0.weight", norm=math.inf)
        seen.observer.on_event("checkpoint", 8, "saved step-8")
        seen.observer.on_event("spike", 9, "at step 9 the loss is 7", names_step=True)
    skip, checkpoint, spike = read_events(tmp_path)
    stamp = skip.pop("time")
    assert stamp.endswith("+00:00")
    assert skip == {
        "step": 7,
        "event": "skip",
        "rank": 3,
        "message": "the loss is NaN",
        "parameter": "h.0.weight",
        "norm": math.inf,
    }
    assert checkpoint["rank"] is None
    assert spike.keys() == checkpoint.keys()
    # A routine checkpoint is not shown.
    assert_golden(seen.screen.getvalue())


def test_a_tracker_that_fails_in_the_run_becomes_one_event_and_training_goes_on(
    tmp_path: Path, recording: type[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    with observing(tmp_path, names=("recording",), every=1) as seen:
        seen.observer.on_step(STEP._replace(step=1), 1e-3)
        monkeypatch.setattr(recording, "broken", True)
        for step in (2, 3, 4):
            seen.observer.on_step(STEP._replace(step=step), 1e-3)
    [event] = read_events(tmp_path)
    assert (event["event"], event["step"]) == ("tracker_failed", 2)
    assert "ConnectionError: service down" in event["message"]
    assert [line["step"] for line in seen.metrics] == [1, 2, 3, 4]


def fill_the_disk_of(run_folder: Path) -> None:
    RunFolder(run_folder).open().close()
    for name in ("metrics.jsonl", "events.jsonl"):
        (run_folder / name).unlink()
        (run_folder / name).symlink_to("/dev/full")


def test_lines_that_a_full_disk_does_not_take_wait_for_room_and_nothing_is_raised(tmp_path: Path) -> None:
    fill_the_disk_of(tmp_path)
    with observing(tmp_path, every=1) as seen:
        seen.observer.on_step(STEP, 1e-3)
        seen.observer.on_evaluation(1, {"loss": 1.0})
        seen.observer.on_step(STEP._replace(step=2), 1e-3)
        seen.observer.on_event("stop", 1, "the disk is full")
        said = [line for line in seen.screen.getvalue().splitlines() if " lr " not in line]
        assert_golden("\n".join(said).replace(os.strerror(errno.ENOSPC), "REASON"))
        for name in ("metrics.jsonl", "events.jsonl"):
            (tmp_path / name).unlink()
        seen.folder.rewind(0)  # opens the files anew
        seen.observer.on_step(STEP._replace(step=3), 1e-3)
        assert [(line["step"], line["split"]) for line in seen.metrics] == [
            *((1, "train"), (1, "eval"), (2, "train"), (3, "train")),
        ]


def test_lines_that_wait_for_room_are_forgotten_where_a_rollback_does_their_steps_again(tmp_path: Path) -> None:
    fill_the_disk_of(tmp_path)
    with observing(tmp_path, every=1) as seen:
        for step in (1, 2, 3):
            seen.observer.on_step(STEP._replace(step=step), 1e-3)
        for name in ("metrics.jsonl", "events.jsonl"):
            (tmp_path / name).unlink()
        seen.observer.on_event("rollback", 3, "going back", to_step=1)
        seen.observer.on_step(STEP._replace(step=2, loss=1.5), 1e-3)
        assert [(line["step"], line["loss"]) for line in seen.metrics] == [(1, 2.0), (2, 1.5)]


def test_finish_writes_the_summary_with_the_rates_and_the_loops_word_wins(tmp_path: Path) -> None:
    with observing(tmp_path) as seen:
        seen.clock.now = 4.0
        seen.observer.on_step(STEP, 1e-3)
        seen.observer.finish({"status": "finished", "steps": 1, "train_seconds": 99.0})
    summary = read_summary(tmp_path)
    assert summary.pop("goodput")["launches"] == 1
    assert summary == {
        "train_seconds": 99.0,
        "tokens_per_second": 25.0,
        "samples_per_second": 1.0,
        "mfu": 0.025,
        "status": "finished",
        "steps": 1,
    }


def test_the_other_processes_observer_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    observer = Observer()
    with observer, observer.pause("evaluation"):
        observer.on_step(STEP, 1e-3)
        observer.on_evaluation(1, {"loss": 1.0})
        observer.on_event("skip", 1, "x", rank=0, more=1)
        observer.note("x")
        observer.finish({"steps": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_not_logged_costs_less_than_five_microseconds(tmp_path: Path) -> None:
    results = iter([STEP._replace(step=step) for step in range(1, 10_001)])
    with observing(tmp_path, total_steps=10**9, every=10**9) as seen:
        best = min(timeit.repeat(lambda: seen.observer.on_step(next(results), 1e-3), number=1000, repeat=10)) / 1000
    assert best < 5e-6, f"{best * 1e6:.2f} microseconds"  # measured 0.5


def test_every_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    began = time.time()
    child = os.fork()
    if child == 0:
        with observing(tmp_path, every=1) as seen:
            seen.observer.on_step(STEP, 1e-3)
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.0
    assert time.time() - began < 30
