"""A rehearsal trains, evaluates, saves, kills and resumes for real, says what it took, and finds what a resume cannot
repeat.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file

from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.cli.main import main
from accel_train.experiments.compare_runs import Comparison, _compare_tensors
from accel_train.experiments.rehearse import _changed_settings, _evaluation, _refuse_changes
from accel_train.experiments.subprocess_run import LAUNCHER_VARIABLES, TrainingProcess
from accel_train.model.tensors import same_bits
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.loader import load_recipe
from tests.support.runs import TESTS, TINY_MODEL, recipe_dict, write_corpus
from tests.support.wording import assert_golden, raises_golden

TINY: dict[str, Any] = {"task": "causal-lm", "schedule": {"max_steps": 500}}


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    """What the children of this process see."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe file over a small corpus; returns its path."""
    write_corpus(tmp_path)

    def write(**sections: Any) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe_dict(tmp_path, **{**TINY, **sections})))
        return str(path)

    return write


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def children_that_train() -> list[psutil.Process]:
    """Return the trainings among this process's descendants; what serves other tests (a fork server) has no such
    argument.
    """
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile
            if {"accel_train", "accel_train.torchrun"} & set(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.slow
def test_rehearsal_of_a_sound_recipe_passes_and_tells_what_everything_took(
    write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(model={"config": {**TINY_MODEL, "resid_pdrop": 0.1}})
    before = sorted(entry.name for entry in tmp_path.iterdir())
    assert main(["rehearse", recipe, "--steps", "6", "--batch.gradient_accumulation_steps", "2", "--all"]) == 0
    told = capsys.readouterr()
    assert re.search(r"  killed +SIGKILL .* step 3 was saved", told.out)
    assert "from step 3 to step 6" in told.out
    for what in ("losses", "gradient norms", "evaluations", "weights", "optimizer's moments", "counters and guard"):
        assert re.search(rf"  {what} +bitwise identical \(", told.out), what
    assert re.search(r"  evaluations .*\(steps 3 and 6\)", told.out)
    for what in ("start-up", "a step", "an evaluation", "a save", "asked to stop", "peak memory", "disk"):
        assert re.search(rf"  {what} +.*\d", told.out), what
    assert re.search(r"asked to stop +SIGTERM: saved step \d+ and ended \d+\.\d s later", told.out)
    assert re.search(r"  a save +\d", told.out), "the run logged how long its saves took"
    assert "Settings, and who" in told.out, "the plan stands beside it"
    assert re.search(r"  schedule\.max_steps +1006 \(", told.out), "what was not as in the recipe is said"
    assert told.out.startswith("PASS: killed after step 3")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*before, "cache"])
    assert children_that_train() == []


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_rehearsal_ends_with_the_exit_code_and_the_words_of_a_run_that_fails(
    write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: str
) -> None:
    recipe = write(task="tests.support.tasks.unrepeatable:ForgetfulTask", options={"unreadable": True})
    assert main(["rehearse", recipe, "--processes", processes]) == 2
    said = capsys.readouterr().err
    # Both processes meet the row. If rank 1 ends rank 0, the last lines of the log say so.
    others = "" if processes == "1" else r"(.*\n)*?.*"
    assert re.search(rf"error: uninterrupted: exit code 2:\nerror: {others}corpus\.jsonl:7: ", said)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".rehearsal")]
    assert children_that_train() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, said",
    [
        ("counts", ("DIFFERENT from step 5 on: ", r"DIFFERENT: .* identical until step 4,")),
        ("chance", ("DIFFERENT from step 1 on: ", r"DIFFERENT: .* before the kill,")),
    ],
)
def test_what_a_resume_cannot_repeat_is_named_with_its_first_step_and_exits_with_4(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], option: str, said: tuple[str, str]
) -> None:
    recipe = write(task="tests.support.tasks.unrepeatable:ForgetfulTask", options={option: True})
    assert main(["rehearse", recipe]) == 4
    told = capsys.readouterr().out
    assert re.search(rf"  losses +{said[0]}loss \d\.\d+ and \d\.\d+, .* \S+ \(steps 1 to 8\)", told)
    assert re.search(r"  weights +DIFFERENT \d+ of 28 tensors .*, in \S+ \(", told)
    assert re.match(said[1], told)


@pytest.mark.slow
def test_rehearsal_on_two_processes_passes(write: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", write(data={"num_workers": 1}), "--processes", "2", "--steps", "4"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("PASS")
    assert "Settings, and who" not in told, "the plan is shown by --all"
    assert "--all" in told.splitlines()[-1]
    assert children_that_train() == []


@pytest.mark.slow
@pytest.mark.parametrize("max_steps, saved", [(500, 6), (6, 6)], ids=["under way", "finished"])
def test_resume_proof_of_a_run_passes_and_leaves_its_folder_alone(
    write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], max_steps: int, saved: int
) -> None:
    recipe, run = write(schedule={"max_steps": max_steps}, checkpoint={"every_steps": saved}), tmp_path / "run"
    with TrainingProcess("a run", recipe, (), run, 1) as training:
        if max_steps > saved:
            training.wait_for_checkpoint(saved)
        else:
            training.wait_until((run / "summary.json").exists)
    before = contents(run)
    assert main(["verify", str(run), "--resume-proof"]) == 0
    told = capsys.readouterr().out
    assert "use step-" in told
    assert "\nPASS: killed after step " in told
    assert contents(run) == before
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".rehearsal")]


def test_a_recipe_that_cannot_be_planned_is_refused_before_anything_starts(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", write(), "--batch.global_batch_size", "7", "--processes", "2"]) == 2
    assert "global_batch_size" in capsys.readouterr().err


def test_rehearsal_on_a_gpu_sets_deterministic_kernels_unless_a_flag_says_otherwise(write: Callable[..., str]) -> None:
    plan = resolve_plan(load_recipe(write()), 1, gpu="h200")
    assert _changed_settings(plan, (), 8, 4)["precision.deterministic"] == "true"
    for flags in (("--precision.deterministic", "false"), ("--precision.deterministic=false",)):
        assert "precision.deterministic" not in _changed_settings(plan, flags, 8, 4)
    on_cpu = resolve_plan(load_recipe(write()), 1)
    assert on_cpu.device != "cpu" or "precision.deterministic" not in _changed_settings(on_cpu, (), 8, 4)


def test_rehearsal_inside_a_launch_is_refused(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["rehearse", write()]) == 2
    assert "WORLD_SIZE=2:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "left, right, same",
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([0.0], [-0.0], False),
        ([1.0], [1.0000001], False),
        ([1.0], [1.0, 2.0], False),
    ],
)
def test_bits_are_compared_not_values(left: list[float], right: list[float], same: bool) -> None:
    for dtype in (torch.float32, torch.float64):
        assert same_bits(torch.tensor(left, dtype=dtype), torch.tensor(right, dtype=dtype)) is same
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))


def test_the_tensor_that_differs_most_is_named(tmp_path: Path) -> None:
    left = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.tensor(4)}
    right = {**left, "a": torch.tensor([1.0, 1.0, 1.25]), "b": torch.full((2, 2), 1.5)}
    for name, tensors in (("left", left), ("right", right)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    ours, theirs = (CheckpointReader(tmp_path / name, "model") for name in ("left", "right"))
    found = _compare_tensors("weights", ours, theirs)
    assert isinstance(found, Comparison)
    assert_golden("\n".join(map(str, found)))
    assert _compare_tensors("weights", ours, ours).difference is None


def test_no_launcher_of_the_environment_reaches_the_children() -> None:
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} - set(LAUNCHER_VARIABLES)
    assert "PATH" in os.environ


def test_the_evaluation_of_a_rehearsal_is_the_last_one_and_no_line_of_the_machine() -> None:
    rows = [
        {"split": "eval", "loss": 2.0, "seconds": 3.0},
        {"split": "train", "loss": 1.0},
        {"split": "system", "cpu": 9.0},
    ]
    assert re.fullmatch(r"3\.00 s .* 64 samples: loss 2", _evaluation(rows, 64))
    assert _evaluation(rows[1:], 64).startswith("none: ")


def test_changes_since_the_checkpoint_are_told_apart_by_their_setting() -> None:
    accepted = {"event": "changes_accepted", "settings": ["schedule.max_steps", "seed"], "changes": ["more", "other"]}
    with raises_golden():
        _refuse_changes([{"event": "start"}, accepted], "run")
    _refuse_changes([accepted | {"settings": ["schedule.max_steps", "schedule.warmup_steps"]}], "run")
