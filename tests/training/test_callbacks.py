"""Callbacks of `fit` and of recipes read a run on every process, and ask it to stop, save, and evaluate."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accel_train import Callback, RunResult, fit
from accel_train.core.errors import SettingError
from accel_train.core.state import Requests, StepResult
from accel_train.engine.run import Extensions
from accel_train.training.callbacks import RunFacts, with_callbacks
from tests.support.commands import call
from tests.support.processes import run_forked
from tests.support.runs import TESTS, events, losses, tiny_recipe

pytestmark = pytest.mark.usefixtures("empty_folder")

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.sum(dim=1))


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square()


def fitted(*callbacks: Callback, output_dir: str = "run", **settings: Any) -> RunResult:
    torch.manual_seed(1)
    return fit(
        nn.Linear(4, 1), DATA, loss=squared_error, eval_data=DATA, output_dir=output_dir, callbacks=callbacks,
        **{"max_steps": 12, "batch_size": 8, "learning_rate": 0.05, **settings},
        evaluate={"every_steps": 4}, log={"every_steps": 1, "progress": False},
    )  # fmt: skip


class Reader(Callback):
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.evaluated: dict[int, float] = {}
        self.kinds: list[str] = []

    def on_start(self, run: RunFacts) -> None:
        self.run = run

    def on_step(self, step: StepResult) -> None:
        self.losses[step.step] = step.loss

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], requests: Requests) -> None:
        self.evaluated[step] = metrics["loss"]

    def on_event(self, kind: str, step: int, message: str) -> None:
        self.kinds.append(kind)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.steps = summary["steps"]


class StopAfter(Callback):
    """A stop at the first evaluation after some steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_evaluation(self, step: int, metrics: Mapping[str, Any], requests: Requests) -> None:
        requests.stop = step >= self.step


class AskAt(Callback):
    def ask(self, step: StepResult, requests: Requests) -> None:
        requests.save |= step.step == 2
        requests.evaluate |= step.step == 3
        requests.stop |= step.step == 8


def test_a_callback_reads_every_step_evaluation_and_event_and_changes_no_bit() -> None:
    reader = Reader()
    read, plain = fitted(reader), fitted(output_dir="plain")
    assert reader.losses == losses(Path("plain"))
    assert sorted(reader.evaluated) == [4, 8, 12]
    assert reader.evaluated[12] == read.metrics["loss"] == plain.metrics["loss"]
    assert {"start", "checkpoint"} <= {*reader.kinds}
    assert reader.steps == reader.run.max_steps == 12
    assert (reader.run.model, reader.run.is_main, reader.run.output_dir) == (read.model, True, Path("run"))


def test_the_host_waits_for_each_step_only_for_a_callback_that_overrides_ask(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    assert with_callbacks(recipe, Extensions(callbacks=(Reader(), StopAfter(1)))).requests is None
    assert with_callbacks(recipe, Extensions(callbacks=(Reader(), AskAt()))).requests is not None


def test_a_stop_at_an_evaluation_ends_the_run_there_and_fit_again_returns_it_finished() -> None:
    reader = Reader()
    assert fitted(reader, StopAfter(5)).summary["steps"] == 8
    assert sorted(reader.losses) == [*range(1, 9)]
    assert [event["step"] for event in events(Path("run"), "early_stop")] == [8]
    again = Reader()
    assert fitted(again, StopAfter(5)).summary["steps"] == 8
    assert again.losses == {}


def test_a_stop_at_the_last_step_is_no_early_stop() -> None:
    assert fitted(StopAfter(12)).summary["steps"] == 12
    assert events(Path("run"), "early_stop") == []


def test_requests_after_a_step_save_evaluate_and_stop_at_this_step() -> None:
    reader = Reader()
    fitted(reader, AskAt())
    saved = {event["step"] for event in events(Path("run"), "checkpoint")}
    assert 2 in saved
    assert max(saved) == 8
    assert sorted(reader.evaluated) == [3, 4, 8]
    assert [event["step"] for event in events(Path("run"), "early_stop")] == [8]


def test_on_two_processes_all_see_the_same_and_the_request_of_one_counts_for_all(tmp_path: Path) -> None:
    program, seen = TESTS / "support" / "programs" / "fit_callbacks.py", {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        run_forked([str(folder)], processes, folder=folder / "out", program=program).expect(0, 120.0)
        seen[processes] = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(processes)]
    ((*alone, end_alone),) = seen[1]
    (*main, end_of_main), (*other, end_of_other) = seen[2]
    assert main == other
    assert [each[:2] for each in main] == [["start", 0], ["step", 1], ["step", 2], ["step", 3]]
    assert [each[2] for each in main] == pytest.approx([each[2] for each in alone], rel=1e-6)
    assert (end_alone, end_of_main, end_of_other) == (["end", True, True], ["end", True, True], ["end", False, False])


def test_what_is_no_callback_is_refused_before_the_run_has_a_folder() -> None:
    for wrong in (Reader, StepResult):
        with pytest.raises(SettingError) as refused:
            fitted(wrong)  # type: ignore[arg-type]
        assert refused.value.settings == ("log.callbacks",)
    Path("of_mine.py").write_text("class NotOne: pass\n")
    Path("line.yaml").write_text("output_dir: run\nmodel: {config: {model_type: gpt2}}\nschedule: {max_steps: 1}\n")
    for name in ("of_mine:NotOne", "of_mine:Missing", "missing:At"):
        flags = ("--data.train", "line.yaml", "--log.callbacks", f"[{name}]")
        call("run", "line.yaml", *flags, code=2, named="callbacks")
    assert not Path("run").exists()
