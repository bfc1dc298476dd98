"""Run folders and settings of strangers: nothing of them runs, hangs, leaks, or costs a finished run its end."""

import json
import math
import os
import shutil
import signal
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from accel_train.checkpoint.trainer_state import read_state
from accel_train.cli.main import main
from accel_train.core.errors import CheckpointError
from accel_train.core.redaction import redact_text
from accel_train.core.terminal import without_controls
from accel_train.inference.finished_run import recipe_of_trained
from accel_train.observe import metrics_reader
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.observe.run_folder import RECIPE_FILE, RunFolder, parse_line, read_metrics
from accel_train.recipe.schema import Recipe
from accel_train.report.report import load_runs
from accel_train.task import TaskData
from accel_train.tasks.causal_lm import CausalLM
from tests.support.runs import recipe_dict, write_corpus, write_recipe_file


def _strangers_run(folder: Path, **sections: Any) -> Path:
    """Write the files of a finished run that the readers of run folders need, without training one."""
    run = folder / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (run / "model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    write_corpus(folder)
    (run / RECIPE_FILE).write_text(yaml.safe_dump(recipe_dict(folder, **sections)))
    lines = [{"split": "train", "step": step, "loss": 5.0 / step} for step in range(1, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text(json.dumps({"step": 0, "event": "start", "message": "starting"}) + "\n")
    return run


@pytest.mark.parametrize("place", ["beside the run", "in the run folder", "below the current folder"])
def test_attack_10_a_module_that_came_with_a_run_is_imported_by_consent_only(
    place: str, tmp_path: Path, not_launched: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"in the run folder": tmp_path / "run", "below the current folder": tmp_path / "evil"}.get(place, tmp_path)
    name = "evil.deep" if place == "below the current folder" else "evil"
    run = _strangers_run(tmp_path, task=f"{name}:Task")
    folder.mkdir(exist_ok=True)
    (folder / f"{name.rpartition('.')[2]}.py").write_text(
        f"open({str(tmp_path / 'canary')!r}, 'w').close()\nclass Task: pass\n"
    )
    monkeypatch.chdir(run if place == "in the run folder" else tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", ".")
    shown = os.path.relpath(run)
    for words in (
        ["evaluate"],
        ["predict"],
        ["export"],
        ["export", "--quantize", "int8"],
        ["verify", "--resume-proof"],
    ):
        assert main([words[0], shown, *words[1:]]) in ((2, 4) if words[0] == "verify" else (2,)), words
        said = capsys.readouterr().err
        assert not (tmp_path / "canary").exists(), words
        assert words[0] == "verify" or f"--task {name}:Task" in said, said
        assert str(Path.cwd()) not in sys.path
    assert main(["evaluate", shown, "--task", "other:Task"]) == 2
    assert not (tmp_path / "canary").exists()
    assert main(["evaluate", shown, "--task", f"{name}:Task"]) == 2  # it is not a task, which only its import shows
    assert (tmp_path / "canary").exists()
    assert "lacks" in capsys.readouterr().err
    for loaded in ("evil.deep", "evil"):
        sys.modules.pop(loaded, None)


def test_attack_10_an_installed_module_needs_no_consent(
    tmp_path: Path, not_launched: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _strangers_run(tmp_path / "sent", task="a_task_of_mine:Task")
    own = tmp_path / "own"
    own.mkdir()
    (own / "a_task_of_mine.py").write_text("class Task: pass\n")
    monkeypatch.chdir(tmp_path / "sent")
    monkeypatch.setattr(sys, "path", [*sys.path, str(own)])
    assert main(["evaluate", str(run)]) == 2
    assert "a_task_of_mine:Task' lacks" in capsys.readouterr().err
    assert str(Path.cwd()) not in sys.path, "an optional import of the task would be looked up there"
    del sys.modules["a_task_of_mine"]
    # A file of the same name where the reader stands would be imported in its place by `python -m`.
    shutil.copy(own / "a_task_of_mine.py", tmp_path / "sent")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "sent"), *sys.path])
    assert main(["evaluate", str(run)]) == 2
    assert "--task a_task_of_mine:Task" in capsys.readouterr().err


@pytest.mark.parametrize(
    "record", ['{"step":3,"kind":"nonfinite"}', '{"format": 1, "step": 3}', "[]", "{", '{"format": 1, "processes": 3}']
)
def test_attack_06_a_damaged_incident_costs_neither_the_report_nor_the_end_of_a_run(
    record: str, tmp_path: Path, not_launched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _strangers_run(tmp_path)
    incident = run / "incidents" / "step-00000003" / "incident.json"
    incident.parent.mkdir(parents=True)
    incident.write_text(record)
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").is_file()
    assert str(incident) in capsys.readouterr().err
    assert main(["watch", str(run), "--once"]) == 0
    assert main(["replay", str(incident.parent)]) == 2
    assert capsys.readouterr().err.count("error:") == 1


class _EndsBadly(CausalLM):
    """Fails in everything that comes after the weights."""

    def baselines(self, data: TaskData) -> dict[str, float]:
        raise KeyError("a baseline")

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        raise RuntimeError("a sample")


def test_attack_06_nothing_after_the_weights_changes_the_exit_code(
    tmp_path: Path, not_launched: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("folder")

    for name in ("write_report", "examples_of", "_note_end"):
        monkeypatch.setattr(f"accel_train.training.finish.{name}", fail)
    monkeypatch.setattr("accel_train.observe.run_folder.RunFolder.write_summary", fail)
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, task=f"{__name__}:_EndsBadly", schedule={"max_steps": 2})
    assert main(["run", str(recipe)]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    said = capfd.readouterr().out
    assert said.count("warning: ") == 6, said


def test_attack_05_an_alias_bomb_in_a_recipe_ends_a_comparison_at_once(tmp_path: Path, not_launched: None) -> None:
    runs = [_strangers_run(tmp_path / name) for name in ("a", "b")]
    bomb = ["zzz:", "  k0: &a0 {a: x, b: x}"]
    bomb += [f"  k{n}: &a{n} {{{', '.join(f'{c}: *a{n - 1}' for c in 'abcdefghi')}}}" for n in range(1, 9)]
    with (runs[1] / RECIPE_FILE).open("a") as file:
        file.write("\n" + "\n".join(bomb) + "\n")
    loaded = load_runs(runs)
    assert loaded[1].recipe is None  # 2 * 9^8 values
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "both.html")]) == 0
    assert "cannot be read" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "summary.json",
        "events.jsonl",
        "launches.jsonl",
        "evaluation.json",
        "examples.json",
        "recipe.yaml",
        ".accel_train.json",
    ],
)
def test_a_pipe_in_place_of_a_file_of_a_run_hangs_no_reader(name: str, tmp_path: Path, not_launched: None) -> None:
    run = _strangers_run(tmp_path)
    if name == "recipe.yaml":
        (run / RECIPE_FILE).unlink()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    try:
        assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
        assert main(["watch", str(run), "--once"]) == 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "target", ['curl -H "Authorization: Bearer BEARERSECRET777" x', ["curl", "-u", "bob:PASSWORD555"]]
)
def test_attack_03_a_command_in_log_notify_is_refused_and_reaches_no_file_or_terminal(
    target: str | list[str], tmp_path: Path, not_launched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path, log={"notify": [target]})
    assert main(["run", str(recipe)]) == 2
    said = "".join(capsys.readouterr())
    assert said.count("error:") == 1
    assert "log.notify" in said
    assert not [secret for secret in ("BEARERSECRET777", "PASSWORD555") if secret in said]
    assert not (tmp_path / "run").exists()
    run = _strangers_run(tmp_path / "older", log={"notify": [target]})  # a run of an older version can still be opened
    assert recipe_of_trained(run).log.notify == ()


@pytest.mark.parametrize(
    "text",
    [
        "-H 'Authorization: Bearer {}'",
        '"Authorization": "Basic {}"',
        "bearer {}",
        "glpat-{}",
        "xoxb-{}",
        "github_pat_{}",
    ],
)
def test_attack_03_credentials_are_known_by_their_form(text: str) -> None:
    secret = "Abcd1234" * 3
    assert secret not in redact_text(f"a text {text.format(secret)} and more")
    assert redact_text(f"a text {text.format(secret)} and more").endswith("and more")
    assert redact_text("key AKIAABCDEFGHIJKLMNOP.") == "key REDACTED."
    plain = "the basic configuration, a bearer of news, token classification of xoxo"
    assert redact_text(plain) == plain


_ESCAPES = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;PWNED\x07\x1b[8mhidden\x1b[2A\x9b2J\x7f\rover"


@pytest.mark.parametrize(
    "words", [["watch", "RUN", "--once"], ["report", "RUN"], ["evaluate", "RUN"], ["verify", "RUN"]]
)
def test_attack_04_no_control_character_of_a_run_reaches_the_terminal(
    words: list[str], tmp_path: Path, not_launched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _strangers_run(tmp_path / "a\x1b]0;PWNED\x07b", task=f"evil{_ESCAPES}:Task")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"split": "train", "step": _ESCAPES}) + "\n")
    event = {"time": "2026-11-25T00:00:00+00:00", "step": 4, "event": "done", "rank": 0, "message": f"ended{_ESCAPES}"}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    main([str(run) if word == "RUN" else word for word in words])
    for text in capsys.readouterr():
        assert not [c for c in text if c != "\n" and unicodedata.category(c) == "Cc"], text


def test_attack_04_colours_and_progress_bars_stay() -> None:
    ours = ["\r 10%|###", "\x1b[A", "\x1b[1;31merror:\x1b[0m text\n", "a\tb\n", "\x1b[H\x1b[J"]
    assert [without_controls(text) for text in ours] == ours
    assert without_controls("line\r\nline") == "line\nline"
    assert without_controls("\x1b[H\x1b[Jtext \udcff") == "?[H?[Jtext ?"


def test_attack_08_a_long_run_is_read_once_in_little_memory_and_keeps_its_extremes(
    tmp_path: Path, not_launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_reader, "WHOLE_BYTES", 2**16)
    monkeypatch.setattr(metrics_reader, "GROUPS", 50)
    run = _strangers_run(tmp_path)
    steps = 20_000
    odd = {7_001: 99.0, 7_002: "NaN", 9_001: -3.0}
    lines = [
        {"split": "train", "step": n, "loss": odd.get(n, 5.0), "grad_norm": 1.0 + (n == 123)} for n in range(1, steps)
    ]
    lines.insert(100, {"split": "eval", "step": 100, "loss": 4.0})
    path = run / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    reader = MetricsReader(path)
    kept = reader.read()
    assert len(kept) < 500
    assert [line["step"] for line in kept] == sorted(line["step"] for line in kept)
    by_step = {line["step"]: line for line in kept if line["split"] == "train"}
    assert by_step[7_001]["loss"] == 99.0
    assert math.isnan(by_step[7_002]["loss"])
    assert by_step[9_001]["loss"] == -3.0
    assert by_step[123]["grad_norm"] == 2.0
    assert [step for step in range(steps - 60, steps) if step not in by_step] == []
    assert [line for line in kept if line["split"] == "eval"] == [lines[100]]
    parsed = []
    monkeypatch.setattr(metrics_reader, "parse_line", lambda *a: (parsed.append(a), parse_line(*a))[1])
    with path.open("a") as file:
        file.write(f'ain", "step": {steps}, "loss": 1.5}}\n')
    assert reader.read()[-1] == {"split": "train", "step": steps, "loss": 1.5}
    assert len(parsed) < 500
    os.truncate(path, 3_000)  # a rollback
    assert reader.read() == read_metrics(run)


@pytest.mark.parametrize("damaged", [False, True])
def test_attack_08_a_resume_reads_the_end_of_the_metrics_only(damaged: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder:
        path = tmp_path / "run" / "metrics.jsonl"
        lines = [json.dumps({"split": "train", "step": n, "loss": 5.0}) for n in range(1, 30_001)]
        lines[29_500] += "damaged" * damaged
        lines.insert(29_000, json.dumps({"split": "eval", "step": 29_000, "loss": 5.0}))
        path.write_text("".join(f"{line}\n" for line in lines))
        inode = path.stat().st_ino
        folder.rewind(29_000, evaluated=False)
        expected = lines[:29_000] + [lines[29_501]] * damaged
        assert path.read_text().splitlines() == expected
        assert (path.stat().st_ino == inode) is not damaged, "cut off in its place"
        folder.append_metrics({"split": "train", "step": 29_001})
        folder.rewind(0)
        assert path.read_text().splitlines() == [lines[29_501]] * damaged
        path.write_text("torn")
        folder.rewind(5)
        assert path.read_text() == ""


@pytest.mark.parametrize("name", ["a" * 300, "\udcff"])
def test_a_name_that_no_folder_can_have_is_one_line(
    name: str, tmp_path: Path, not_launched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path)
    recipe = write_recipe_file(tmp_path)
    assert main(["run", str(recipe), "--output_dir", str(tmp_path / name)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "output_dir" in errors[0]


@pytest.mark.parametrize(
    ("change", "step"),
    [({"settings": [1]}, 3), ({"origins": 3}, 3), ({"state": {"step": 3, "num_targets_seen": 10**400}}, 3)],
)
def test_a_trainer_json_that_no_run_wrote_is_one_error(change: dict[str, Any], step: int, tmp_path: Path) -> None:
    trainer = {"state": {"step": step}, "identity": {}, **change}
    (tmp_path / "trainer.json").write_text(json.dumps(trainer))
    (tmp_path / "manifest.json").write_text(json.dumps({"step": step}))
    with pytest.raises(CheckpointError):
        read_state(tmp_path)
