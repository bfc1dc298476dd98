"""A task that is added to the package, by a folder and a line, is known to every command."""

import csv
import json
import subprocess
import sys
from pathlib import Path

from accel_train.core.metric_names import label
from tests.support.programs import new_task
from tests.support.runs import environment, summary_of

NAME = new_task.NAME


def test_a_folder_and_a_line_add_a_task_to_every_command(tmp_path: Path) -> None:
    call = [sys.executable, new_task.__file__, str(tmp_path)]
    ended = subprocess.run(call, env=environment(), check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    refused = {"setting of another task", "unknown task", "finetune"}
    assert {name: each["code"] for name, each in found.items()} == {name: 2 if name in refused else 0 for name in found}
    # The third refusal is from `finetune`, which recognizes files of other tasks only.
    for name in ("explain", "explain of a setting that it uses", "help", "docs", *refused):
        assert NAME in found[name]["text"], found[name]
    summary = summary_of(tmp_path / "run")
    assert {"f1_macro", "accuracy", "loss"} <= summary["eval"].keys()
    with (tmp_path / "predictions.csv").open() as file:
        assert {row["label"] for row in csv.DictReader(file)} <= {"a", "b"}
    assert "accuracy" in found["push"]["text"]
    assert "pipeline_tag: mood-detection" in found["push"]["text"]
    assert "to name the mood of a text" in (tmp_path / "run" / "model" / "README.md").read_text()
    report = (tmp_path / "run" / "report.html").read_text()
    assert NAME in report
    assert -1 < report.find(f">{label('mcc')}<") < report.find(f">{label('f1_macro')}<")
    assert (tmp_path / "exported" / "model.safetensors").exists()
