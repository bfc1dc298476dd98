"""A task of the user's own: found in the current folder, and what it gets wrong is one line, before its second step."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from accel_train.cli.main import main
from accel_train.task import Facts
from tests.support.runs import TESTS, environment, events, recipe_dict, refused
from tests.support.wording import assert_golden

OWN = """
from tests.support.tasks.number_faults import FaultyRegression
from accel_train.task import Task
import torch

class Own(FaultyRegression):
{body}

class Half(Task):
    def load_data(self, recipe, *, progress): return Own().load_data(recipe, progress=progress)

class Smallest(Half):
    def build_model(self, recipe, data): return Own().build_model(recipe, data)
    def loss_sum(self, model, batch): return (model(batch["features"]) - batch["wanted"]).square().sum()

def make():
    return Own()

made = Own()

class NoTask:
    pass

class NeedsMore(Own):
    def __init__(self, folder):
        super().__init__()
"""
STRANGE: dict[str, tuple[str, str]] = {
    "float loss": ("Own", "def loss_sum(self, model, batch): return super().loss_sum(model, batch).item()"),
    "loss of shape [1]": ("Own", "def loss_sum(self, model, batch): return super().loss_sum(model, batch)[None]"),
    "loss of each sample": (
        "Own",
        "def loss_sum(self, model, batch): return (model(batch['features']) - batch['wanted']) ** 2",
    ),
    "detached loss": ("Own", "def loss_sum(self, model, batch): return super().loss_sum(model, batch).detach()"),
    "no loss": ("Own", "def loss_sum(self, model, batch): pass"),
    "no data": ("Own", "def load_data(self, recipe, *, progress): pass"),
    "data of another kind": ("Own", "def load_data(self, recipe, *, progress): return [1, 2]"),
    "no samples": (
        "Own",
        "def load_data(self, recipe, *, progress):\n        from dataclasses import replace\n        return "
        "replace(super().load_data(recipe, progress=progress), train=None)",
    ),
    "facts of another kind": (
        "Own",
        "def load_data(self, recipe, *, progress):\n        from dataclasses import replace\n        return "
        "replace(super().load_data(recipe, progress=progress), facts={})",
    ),
    "no model": ("Own", "def build_model(self, recipe, data): pass"),
    "function": ("make", "pass"),
    "instance": ("made", "pass"),
    "module": ("torch", "pass"),
    "arguments": ("NeedsMore", "pass"),
    "no task": ("NoTask", "pass"),
    "no method": ("Own", "score = predict_batch = None"),
    "no loss of a derived class": ("Half", "pass"),
}


def write(folder: Path, module: str, name: str, body: str) -> str:
    """A recipe beside the module of its task; returns the task."""
    (folder / f"{module}.py").write_text(OWN.format(body=f"    {body}"))
    recipe = recipe_dict(
        folder, windows=False, task=f"{module}:{name}", options={"num_samples": 64}, schedule={"max_steps": 3}
    )
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return str(recipe["task"])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(TESTS), *(each for each in sys.path if each)])
    return tmp_path


@pytest.mark.parametrize("case", STRANGE)
def test_a_strange_task_is_one_line_before_its_second_step(
    here: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, body = STRANGE[case]
    task = write(here, f"own_task_{list(STRANGE).index(case)}", name, body)
    assert main(["run", "r.yaml"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    line = re.sub(r"NeedsMore\.__init__\(\) .*'folder'", "REASON", line)
    assert_golden(line.replace(task, "TASK"))
    assert not (here / "run" / "checkpoints").exists() or not any((here / "run" / "checkpoints").iterdir())
    assert not (here / "run" / "model").exists()


def test_a_task_with_data_a_model_and_a_loss_alone_is_trained_and_its_weights_are_saved(here: Path) -> None:
    write(here, "own_smallest", "Smallest", "pass")
    assert main(["run", "r.yaml"]) == 0
    weights = load_file(here / "run" / "model" / "model.safetensors")
    assert weights["head.weight"].shape == (1, 16)
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert (summary["baselines"], summary["sample"]) == ({}, None)


@pytest.mark.parametrize("loss", ["float loss", "detached loss"])
def test_plan_refuses_a_loss_that_cannot_be_trained_on(
    here: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, body = STRANGE[loss]
    write(here, f"own_plan_{loss[0]}", "Own", body.replace(".item()", ".sum"))
    assert main(["plan", "r.yaml"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert_golden(line)


def test_a_loss_that_is_nan_is_for_the_guard(here: Path) -> None:
    write(
        here, "own_nan", "Own", "def loss_sum(self, model, batch): return super().loss_sum(model, batch) * float('nan')"
    )
    assert main(["run", "r.yaml"]) == 0
    assert len(events(here / "run", "skip")) == 3


@pytest.mark.slow
def test_a_module_in_the_current_folder_is_found_by_the_installed_command_and_hides_no_package(here: Path) -> None:
    """`-P` leaves the current folder off the path, as the installed command does."""
    task = write(here, "own_found", "Own", "pass")
    (here / "safetensors.py").write_text("raise ImportError('a file in the current folder hides a package')")
    command: list[Any] = [
        sys.executable,
        "-P",
        "-c",
        "from accel_train.cli.main import program; program()",
        "plan",
        "r.yaml",
    ]
    done = subprocess.run(command, cwd=here, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (here / "own_found.py").unlink()
    done = subprocess.run(command, cwd=here, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for part in (f"task='{task}'", "No module named 'own_found'", "PYTHONPATH", "current folder"):
        assert part in done.stderr


OWN_DATA = """
from accel_train.recipe.data import Data
from accel_train.task import TaskSpec
from tests.support.tasks.number_faults import FaultyRegression

class OwnData(Data):
    shift: float = 0.0

class Shifted(FaultyRegression):
    spec = TaskSpec(data=OwnData)

    def load_data(self, recipe, *, progress):
        print("shift", OwnData.of(recipe.data).shift)
        return super().load_data(recipe, progress=progress)
"""


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ((), 0, "shift 0.0"),
        (("--data.shift", "0.5"), 0, "shift 0.5"),
        (("--data.shift", "much"), 2, "data.shift='much' (--data.shift)"),
        (("--data.shfit", "0.5"), 2, "the settings shift"),
        (("--data.doc_stride", "5"), 2, "data.doc_stride=5"),
    ],
)
def test_a_custom_task_declares_its_own_settings_of_data(
    here: Path, flags: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"own_data_{code}_{len(said)}"
    write(here, module, "Shifted", "pass")
    (here / f"{module}.py").write_text(OWN_DATA)
    assert main(["run", "r.yaml", *flags]) == code
    told = capsys.readouterr()
    assert said in (told.err if code else told.out)
    if code == 0:
        assert f"shift: {said.split()[1]}" in (here / "run" / "recipe.resolved.yaml").read_text()


def test_a_resume_with_another_value_of_a_custom_setting_is_an_event(here: Path) -> None:
    write(here, "own_data_resumed", "Shifted", "pass")
    (here / "own_data_resumed.py").write_text(OWN_DATA)
    assert main(["run", "r.yaml", "--checkpoint.every_steps", "1"]) == 0
    assert main(["run", "r.yaml", "--accept-changes", "--schedule.max_steps", "5", "--data.shift", "0.5"]) == 0
    (event,) = events(here / "run", "settings_changed")
    assert event["setting"] == "data.shift"
    assert "was 0" in event["message"]
    assert "now 0.5 (--data.shift)" in event["message"]


def test_a_record_has_exactly_the_facts_that_are_set_also_none() -> None:
    facts = Facts(num_train=8, eval_bytes=None, others={"fill": None})
    facts.notes = ["a note"]
    assert facts.record() == {"num_train": 8, "eval_bytes": None, "fill": None, "notes": ["a note"]}
    assert Facts.model_construct(**facts.record()).num_train == 8


def test_a_wrong_name_is_refused() -> None:
    refused(Facts, num_trian=8, named="num_trian")
