"""The view of a run in the terminal: what it is doing, and its numbers, at every moment of its life."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_train.cli.main import main
from accel_train.report.run import Run, command_to_use, how_to_use, load_run
from accel_train.report.watch import format_view, sparkline, state_of, total_steps, watch_run
from tests.support.report import SUMMARY, make_run
from tests.support.wording import assert_golden

START: dict[str, Any] = {"event": "start", "step": 0, "message": "starting"}
LINES = [{"step": step, "loss": 3 - step / 10, "train_seconds": 2.0 * step, "epoch": step / 5} for step in (1, 2, 3)]


def test_watch_once_prints_state_loss_evaluation_and_last_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(make_run(tmp_path / "a")), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a: finished"
    assert [line.split()[0] for line in lines[1:6]] == ["step", "loss", "evaluation", "learning", "rate"]
    assert "x" in lines[2].split()[2], "the step whose loss was NaN"
    assert lines[-1].endswith("checkpoint: saved step-200")
    assert max(map(len, lines)) <= 80


def test_a_finished_run_ends_with_lines_to_copy_that_are_not_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "model").mkdir()
    code = f"print({'a' * 90!r})"
    (run / "model" / "README.md").write_text(f"```python\n{code}\n```\n")
    loaded = load_run(run)
    view = format_view(loaded, state_of(loaded), width=40).splitlines()
    assert view[-3:] == ["Use it:", f"  {command_to_use(run, loaded.recipe)}", f"  {code}"]
    assert view[-2].split()[:2] == ["accel-train", "generate"]
    assert how_to_use(tmp_path / "a Trainer's", {"task": "my:Task"}) == []


def test_state_follows_the_last_launch_and_not_an_older_summary() -> None:
    summary = {"status": "finished"}
    preempted, stop = ({"event": kind, "step": 3, "message": ""} for kind in ("preempted", "stop"))
    over, going = {"ended": True}, {"ended": False}

    def said(*events: Any, last: dict[str, bool], silent: float = 0.0, summary: dict[str, str]) -> str:
        run = Run("a", train=LINES, events=[START, *events], launches=[last], summary=summary)
        return state_of(run, silent).text

    assert said(last=going, summary=summary) == "running", "the summary is of an earlier launch"
    assert_golden(said(last=going, silent=3600, summary={}), "silent")
    assert_golden(said(preempted, last=over, summary={}), "preempted")
    assert said(preempted, START, last=over, summary=summary) == "finished", "it was resumed"
    assert_golden(said(stop, last=over, summary={}), "stop")
    assert_golden(said(last=over, summary={}), "over")


def test_time_left_is_of_the_last_steps_and_total_steps_may_follow_from_epochs() -> None:
    run = Run("a", train=LINES, launches=[{"ended": False}], recipe_text="schedule: {max_steps: 13, num_epochs: null}")
    view = format_view(run, state_of(run))
    assert "3 of 13 (23.1 %)" in view
    assert "time left  20s" in view
    assert total_steps(Run("a", train=LINES, recipe_text="schedule: {max_steps: null, num_epochs: 2}")) == 10
    noted = [{"event": "start", "total_steps": 9}, {"event": "resume", "total_steps": 11}, {"event": "checkpoint"}]
    assert total_steps(replace(run, events=noted)) == 11


def test_sparkline_shows_least_greatest_and_what_is_not_finite() -> None:
    assert sparkline([0.0, 7.0, math.nan, 3.0, math.inf]) == "▁█x▄x"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_watch_shows_a_view_once_a_change_and_ends_with_the_run(tmp_path: Path) -> None:
    run, views = make_run(tmp_path / "a", summary=None), list[str]()

    def show(view: str) -> None:
        views.append(view)
        make_run(tmp_path / "b", summary=SUMMARY)
        (tmp_path / "b" / "summary.json").rename(run / "summary.json")

    watch_run(run, every_seconds=0.001, show=show)
    assert [view.splitlines()[0] for view in views] == ["a: running", "a: finished"]


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert_golden(capsys.readouterr().err, "no run")
    assert load_run(make_run(tmp_path / "a")).train
    assert main(["watch", str(tmp_path / "a"), "--every", "0"]) == 2
    assert_golden(capsys.readouterr().err, "no time")
