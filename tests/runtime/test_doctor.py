"""The doctor says what is wrong with a machine or a launch, and a run refuses a launcher that trains fewer processes
than asked.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_train import Recipe, train
from accel_train.core.errors import SettingError
from accel_train.core.json_io import read_json
from accel_train.runtime.doctor import (
    Finding,
    check_environment,
    check_folder,
    check_host,
    check_launch,
    check_launcher,
    check_versions,
    examine,
    format_findings,
    idle_gpus,
    launch_facts,
)
from tests.support.commands import call
from tests.support.runs import recipe_dict
from tests.support.wording import assert_golden

JOIN_AND_CHECK = """\
from accelerate import PartialState
from accel_train.runtime.doctor import check_launcher

try:
    check_launcher(PartialState(cpu=True).num_processes)
    print("passed")
except ValueError as error:
    print("refused:", error)
"""


def launch(tmp_path: Path, *launcher: str) -> str:
    """The output of a real launch of a program that joins and checks, on the CPU."""
    program = tmp_path / "program.py"
    program.write_text(JOIN_AND_CHECK)
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "WORLD_", "RANK"))}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(program)],
        env={**keep, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


ACCELERATE = ("accelerate.commands.accelerate_cli", "launch")


def test_accelerate_launch_on_the_cpu_that_starts_one_process_of_two_is_refused(tmp_path: Path) -> None:
    assert_golden(launch(tmp_path, *ACCELERATE, "--cpu", "--num_processes", "2"))


@pytest.mark.slow
def test_a_configuration_file_that_asks_for_two_processes_and_gets_one_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "cpu.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nuse_cpu: true\n"
        "num_machines: 1\nnum_processes: 2\n"
    )
    assert_golden(launch(tmp_path, *ACCELERATE, "--config_file", str(config)))


@pytest.mark.slow
def test_what_the_refusal_recommends_passes(tmp_path: Path) -> None:
    told = launch(tmp_path, *ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    assert told.replace("\n", "") == "passedpassed", "two processes write at once, so line ends may come together"


def test_one_process_that_was_asked_for_passes(tmp_path: Path) -> None:
    assert launch(tmp_path, *ACCELERATE, "--cpu", "--num_processes", "1") == "passed\n"


def test_a_world_size_that_accelerate_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_launcher(4)
    with pytest.raises(SettingError) as caught:
        check_launcher(1)
    assert caught.value.problem.startswith("WORLD_SIZE=4, ")
    assert "torchrun --nproc_per_node 4" in caught.value.remedy
    finding = next(check_launch())
    assert (finding.text, finding.remedy) == (caught.value.problem, caught.value.remedy)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["/usr/bin/accel-train", "evaluate", "runs/x y"],
            "torchrun --nproc_per_node 4 -m accel_train evaluate 'runs/x y'`",
        ),
        (
            ["/x/accel_train/__main__.py", "run", "r.yaml", "--seed", "3"],
            "torchrun --nproc_per_node 4 -m accel_train run r.yaml --seed 3`",
        ),
        (
            ["train.py", "--hub_token", "s3cr3t", "--api_key=s3cr3t"],
            "torchrun --nproc_per_node 4 train.py --hub_token REDACTED --api_key=REDACTED`",
        ),
    ],
)
def test_refused_launch_says_the_command_that_was_typed_behind_a_launcher(
    monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SettingError) as caught:
        check_launcher(1)
    assert said in caught.value.remedy


@pytest.mark.parametrize(
    ("variables", "num_gpus", "num_processes", "is_said"),
    [
        ({}, 8, 1, True),
        ({}, 1, 1, False),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 8, 1, False),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 8, 1, False),
        ({"WORLD_SIZE": "2", "RANK": "0"}, 8, 2, False),
    ],
    ids=["alone", "one visible", "torchrun with one", "accelerate launch with one", "torchrun with two"],
)
def test_a_start_without_a_launcher_names_the_idle_gpus_and_the_command_for_all(
    monkeypatch: pytest.MonkeyPatch,
    not_launched: None,
    variables: dict[str, str],
    num_gpus: int,
    num_processes: int,
    is_said: bool,
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr("sys.argv", ["/usr/bin/accel-train", "run", "a recipe.yaml", "--hub_token", "s3cr3t"])
    idle = idle_gpus(torch.device("cuda", 0), num_processes)
    assert (idle is not None) == is_said
    if idle is not None:
        assert idle.value == f"1 of {num_gpus} GPUs used"
        command = (
            f"torchrun --standalone --nproc_per_node {num_gpus} -m accel_train run 'a recipe.yaml' --hub_token REDACTED"
        )
        assert idle.reason == f"all: {command}"
    assert idle_gpus(torch.device("cpu"), 1) is None


def test_a_notebook_is_told_of_its_launcher(monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys)
    idle = idle_gpus(torch.device("cuda", 0), 1)
    assert idle is not None
    assert "notebook_launcher(FUNCTION, num_processes=4)" in idle.reason


def test_a_run_records_the_idle_gpus_with_its_other_choices(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(torch.cpu, "device_count", lambda: 8)  # stands for GPUs: torch counts devices by the run's kind
    train(Recipe.model_validate(recipe_dict(corpus, schedule={"max_steps": 1})))
    choices = read_json(corpus / "run" / "summary.json")["choices"]
    assert "1 of 8 GPUs used" in json.dumps(choices["gpus"])
    assert "--nproc_per_node 8" in json.dumps(choices["gpus"])
    assert "1 of 8 GPUs used" in "".join(capsys.readouterr())


def test_no_launcher_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check_launcher(1)


def test_versions_are_held_against_the_ranges() -> None:
    findings = {
        f.subject: f
        for f in check_versions(["torch>=1", "numpy>=99", "no-such-package>=1", "wandb>=1; extra == 'wandb'"])
    }
    assert findings["python"].status == "ok"
    assert findings["torch"].status == "ok"
    assert (findings["numpy"].status, findings["numpy"].remedy) == ("bad", "pip install 'numpy>=99'")
    assert (findings["no-such-package"].status, findings["no-such-package"].text) == ("bad", "is missing (>=1)")
    assert "wandb" not in findings


def statuses(variables: dict[str, str]) -> dict[str, str]:
    return {finding.subject: finding.status for finding in check_environment(variables)}


def test_variables_of_a_launch_are_named_with_the_setting_that_they_set() -> None:
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "fp16"}
    findings = {finding.subject: finding for finding in check_environment(variables)}
    for name in variables:
        assert_golden(findings[name].text, name)
    # What every `accelerate launch` sets is nothing to report.
    assert statuses({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}) == {"environment": "ok"}


def test_a_world_size_without_a_rank_is_bad() -> None:
    assert statuses({"WORLD_SIZE": "2"})["WORLD_SIZE"] == "bad"
    assert statuses({"WORLD_SIZE": "2", "RANK": "1"}) == {"environment": "ok"}


def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = check_folder("cache", tmp_path / "file" / "cache")
    assert finding.status == "bad"
    assert "ACCEL_TRAIN_CACHE" in finding.remedy
    (finding,) = check_folder("cache", tmp_path / "not" / "yet" / "there")
    assert finding.status in ("ok", "warn")
    assert not (tmp_path / "not").exists()


def test_the_host_has_cores_and_memory() -> None:
    assert next(iter(check_host())).text.endswith("free")


def test_findings_are_lines_with_the_remedy_below() -> None:
    text = format_findings([Finding("ok", "torch", "2.9"), Finding("bad", "numpy", "1.0 (>=2)", "pip install numpy")])
    assert text.splitlines() == [
        "ok    torch          2.9",
        "bad   numpy          1.0 (>=2)",
        "                     -> pip install numpy",
    ]


def test_doctor_exits_with_0_unless_something_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path))
    expected = 2 if any(finding.status == "bad" for finding in examine()) else 0
    assert "python" in call("doctor", code=expected).out
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACCEL_TRAIN_CACHE", str(tmp_path / "file"))
    assert "bad   cache" in call("doctor", code=2).out


def test_a_launch_is_known_by_its_command_host_folder_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accel-train", "run", "r.yaml", "--options.hub_token", "very-secret"])
    launch_facts.cache_clear()
    facts = launch_facts()
    assert "git_commit" not in facts
    assert facts["command"].startswith("accel-train run r.yaml --options.hub_token ")
    assert "very-secret" not in facts["command"]
    assert (facts["folder"], facts["host"]) == (str(tmp_path), socket.gethostname())
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        (tmp_path / "file").write_text("1")
        subprocess.run(["git", *words], check=True)
    launch_facts.cache_clear()
    clean = launch_facts()["git_commit"]
    assert len(clean) == 40
    (tmp_path / "file").write_text("2")
    launch_facts.cache_clear()
    assert launch_facts()["git_commit"] == f"{clean}-dirty"
    launch_facts.cache_clear()
