"""Run folders and settings of strangers: nothing of them runs, hangs, leaks, or costs a finished run its end."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.cli.main import main
from accel_train.observe.run_folder import RECIPE_FILE
from tests.support.runs import recipe_dict, write_corpus


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
