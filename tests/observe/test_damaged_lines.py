"""Damaged lines and files of a run folder: each is skipped and named, and costs neither the report nor a command."""

import json
import random
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from accel_train.core.json_io import read_json
from accel_train.observe import read_events, read_metrics
from accel_train.observe.run_folder import RunFolder
from accel_train.recovery.incident_folder import last_losses
from accel_train.report.report import render_page, write_report
from accel_train.report.run import load_run
from tests.support.commands import call
from tests.support.report import SUMMARY, Page, make_run
from tests.support.runs import recipe_dict, write_yaml
from tests.support.wording import assert_golden

DAMAGE = {
    "torn": b'{"step": 3, "split": "tr',
    "binary": b"\x00\xff\xfe\x80",
    "empty": b"",
    "no object": b"[1, 2]",
    "a word": b"NaN",
    "no step": b'{"split": "train", "event": "skip", "loss": 1.0}',
    "no split": b'{"step": 3, "loss": 1.0}',
    "step is NaN": b'{"step": "NaN", "split": "train", "event": "skip", "loss": 1.0}',
    "step is text": b'{"step": "three", "split": "train", "event": "skip", "loss": 1.0}',
    "step below 0": b'{"step": -1, "split": "train", "event": "skip", "loss": 1.0}',
    "step too large": b'{"step": 1' + b"0" * 400 + b', "split": "train", "event": "skip"}',
    "number too large": b'{"step": 3, "split": "train", "event": "skip", "grad_norm": 1' + b"0" * 400 + b"}",
    "loss is text": b'{"step": 3, "split": "train", "event": "skip", "loss": "low"}',
    "too deep": b"[" * 50_000,
}


def insert(path: Path, number: int, line: bytes) -> None:
    """Make `line` the line of this number."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((*lines[: number - 1], line + b"\n", *lines[number - 1 :])))


def without_reasons(lines: Iterable[str]) -> str:
    return "\n".join(re.sub(r"\(.*\)", "(REASON)", line) for line in lines)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_skipped_and_named_once_on_stderr_and_kept_by_a_rewind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    facts = {"split": "train", "event": "skip", "loss": 1.0, "step_loss": 1.0}
    lines = [{"step": step, **facts} for step in (1, 2, 4)]
    with RunFolder(tmp_path) as folder:
        for line in lines:
            folder.append_metrics(line)
            folder.append_event(line)
    for name in ("metrics.jsonl", "events.jsonl"):
        insert(tmp_path / name, 3, DAMAGE[damage])
    for _ in range(2):
        assert read_metrics(tmp_path) == read_events(tmp_path) == lines
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" is damaged")[0] for line in said] == [
        f"{tmp_path / name}:3" for name in ("metrics.jsonl", "events.jsonl")
    ]
    assert max(map(len, said)) < 500
    with RunFolder(tmp_path) as folder:
        folder.rewind(2)
    assert DAMAGE[damage] + b"\n" in (tmp_path / "metrics.jsonl").read_bytes()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert [step for step, _ in last_losses(tmp_path)][:2] == [1, 2]


def test_the_report_and_a_comparison_say_which_lines_they_leave_out(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", learning_rate=0.1)
    for number, damage in enumerate(DAMAGE, start=3):
        insert(run / "metrics.jsonl", number, DAMAGE[damage])
        insert(run / "events.jsonl", 2, DAMAGE[damage])
    (run / "summary.json").write_text(json.dumps(SUMMARY)[:-40])
    (run / "evaluation.json").write_bytes(b"\xff\x00")
    (run / "recipe.resolved.yaml").write_bytes(b"\xff\xfe: [")
    for folders in ([run], [run, other]):
        page = Page(write_report(folders).read_text())
        assert_golden(without_reasons(line for line in page.texts if str(run) in line))
        assert ("200 steps" if folders == [run] else "Steps 200") in page.text


def test_no_summary_is_too_odd_to_report(tmp_path: Path) -> None:
    run, draw = make_run(tmp_path / "run"), random.Random(0)
    odd: list[Any] = [None, 3, -1.5, "x", [1], {"a": 1}, {"a": [None]}, {}, True]

    def spoil(value: Any) -> Any:
        if isinstance(value, dict) and value and draw.random() < 0.7:
            return {name: spoil(each) for name, each in value.items()}
        return draw.choice(odd) if draw.random() < 0.4 else value

    for _ in range(100):
        spoiled = spoil({**SUMMARY, "best_metric": 1.0, "best_step": 3, "data": {"num_train": 4}})
        (run / "summary.json").write_text(json.dumps(spoiled))
        (run / "evaluation.json").write_text(json.dumps(spoil({"step": 3, "metrics": {"loss": 1.0, "f1": 0.5}})))
        loaded = load_run(run)
        render_page([loaded])
        render_page([loaded, loaded])


def test_commands_work_on_a_run_with_damaged_files_and_a_resume_keeps_their_lines(corpus: Path) -> None:
    sections = {"task": "causal-lm", "schedule": {"max_steps": 4}, "checkpoint": {"every_steps": 2, "keep": 9}}
    write_yaml(corpus / "recipe.yaml", recipe_dict(corpus, **sections))
    command = ["run", str(corpus / "recipe.yaml")]
    call(*command)
    run = corpus / "run"
    for name in ("metrics.jsonl", "events.jsonl"):
        insert(run / name, 2, DAMAGE["binary"])
    (run / "summary.json").write_text('{"steps": 4, "world_si')
    said = [
        line
        for name in ("evaluate", "report", "verify", "predict", "export")
        for line in call(name, run, code=2 if name == "predict" else 0).err.splitlines()
    ]
    assert_golden(without_reasons(line for line in said if f"{run}/summary.json" in line))
    (run / "evaluation.json").write_text("[")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    call(*command)
    assert [line["step"] for line in read_metrics(run) if line["split"] == "train"] == [1, 2, 3, 4]
    assert DAMAGE["binary"] in (run / "metrics.jsonl").read_bytes()
    assert read_json(run / "summary.json")["status"] == "finished"
