"""A torch that cannot use the NVIDIA driver trains nothing on the CPU unasked; the refusal names
the wheels that fit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from accel_train import fit
from accel_train.cli.main import main
from accel_train.runtime import doctor, driver
from accel_train.runtime.driver import TorchBuild, driver_version, hides_gpus, installed_torch, unused_driver
from accel_train.runtime.process_group import start_processes
from tests.support.runs import write_corpus, write_recipe_file

CPU_BUILD, CUDA_13 = TorchBuild("2.13.0+cpu", None, True), TorchBuild("2.13.0", "13.0", False)
CUDA_12 = TorchBuild("2.13.0+cu126", "12.6", False)


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with driver 550 and one GPU, which torch does not see; returns the root of its files."""
    root = tmp_path / "root"
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    set_driver(root, "550.54.14")
    monkeypatch.setattr(driver, "ROOT", root)
    monkeypatch.setattr(driver, "installed_torch", lambda: CUDA_13)
    monkeypatch.setattr(doctor, "installed_torch", lambda: CUDA_13)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    PartialState._reset_state()
    yield root
    PartialState._reset_state()


def set_driver(root: Path, version: str, kind: str = "Kernel Module") -> None:
    text = (
        f"NVRM version: NVIDIA UNIX x86_64 {kind}  {version}  Thu Feb 22 01:44:30 UTC 2026\nGCC version: gcc 12.2.0\n"
    )
    (root / "proc/driver/nvidia/version").write_text(text)


@pytest.mark.parametrize(
    ("version", "build", "said", "not_said"),
    [
        ("550.54.14", CUDA_13, ["550.54.14", "CUDA 13.0", "/whl/cu126"], "cu130"),
        ("550.54.14", CPU_BUILD, ["2.13.0+cpu", "the CPU alone", "/whl/cu126"], "cu130"),
        ("580.65.06", CPU_BUILD, ["580.65.06", "/whl/cu130"], "cu126"),
        ("470.256.02", CUDA_13, ["470.256.02", "525"], "pip install"),
        ("550.54.14", CUDA_12, ["nvidia-smi", "CUDA_VISIBLE_DEVICES"], "pip install"),
    ],
)
def test_the_refusal_names_driver_build_and_the_wheels_that_fit(
    gpu_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    build: TorchBuild,
    said: list[str],
    not_said: str,
) -> None:
    set_driver(gpu_machine, version)
    monkeypatch.setattr(driver, "installed_torch", lambda: build)
    problem = unused_driver({})
    assert problem is not None
    assert [part for part in [*said, "ACCELERATE_USE_CPU=true"] if part not in problem] == []
    assert not_said not in problem


def test_the_open_kernel_module_has_its_version_elsewhere_in_the_line(gpu_machine: Path) -> None:
    set_driver(gpu_machine, "for x86_64  570.86.15  Release Build", "Open Kernel Module")
    assert driver_version() == "570.86.15"


def test_a_driver_without_files_is_asked_for_by_nvidia_smi(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu_machine / "proc/driver/nvidia/version").unlink()
    monkeypatch.setenv("PATH", str(gpu_machine))
    assert unused_driver({}) is None
    program = gpu_machine / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 551.86\n")
    program.chmod(0o755)
    assert "551.86" in (unused_driver({}) or "")


@pytest.mark.parametrize("hidden", ["", "-1", " -1,0", "NoDevFiles"])
def test_hidden_gpus_and_a_cpu_on_purpose_pass(gpu_machine: Path, hidden: str) -> None:
    assert unused_driver({"CUDA_VISIBLE_DEVICES": hidden}) is None
    assert unused_driver({"ACCELERATE_USE_CPU": "true"}) is None
    assert unused_driver({"ACCELERATE_USE_CPU": "false"}) is not None


@pytest.mark.parametrize("shown", ["0", "7", "1,0", "GPU-8a3c", "MIG-8a3c"])
def test_gpus_that_are_named_are_not_hidden(shown: str) -> None:
    assert not hides_gpus({"CUDA_VISIBLE_DEVICES": shown})


def test_a_container_that_was_given_no_gpu_passes_on_a_machine_that_has_some(gpu_machine: Path) -> None:
    (gpu_machine / "dev/nvidia0").unlink()
    (gpu_machine / "dev/nvidiactl").touch()
    assert unused_driver({}) is None
    (gpu_machine / "dev/nvidia3").mkdir()  # cannot be opened, as under a scheduler's limits
    assert unused_driver({}) is None


def test_the_build_of_torch_is_read_without_importing_it(tmp_path: Path) -> None:
    found = installed_torch()
    assert found is not None
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)
    text = "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = {}\nhip: Optional[str] = {}\n"
    for values, expected in {
        ("'13.0'", "None"): ("2.13.0", "13.0", False),
        ("None", "'7.1'"): ("2.13.0", None, False),
        ("None", "None"): ("2.13.0", None, True),
    }.items():
        (tmp_path / "version.py").write_text(text.format(*values))
        assert installed_torch(tmp_path) == expected
    assert installed_torch(tmp_path / "missing") is None


def start_fit(folder: Path) -> None:
    data: list[Any] = [(torch.ones(2), torch.ones(1))] * 8
    fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, output_dir=str(folder / "run"))


def start_trainer(folder: Path) -> None:
    from transformers import TrainingArguments

    from accel_train import Trainer

    arguments = TrainingArguments(str(folder / "run"), report_to="none", max_steps=1)
    data: Any = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    Trainer(torch.nn.Linear(2, 1), arguments, train_dataset=data).train()


@pytest.mark.parametrize("start", [start_fit, start_trainer])
def test_fit_and_the_trainer_refuse_before_they_train(gpu_machine: Path, tmp_path: Path, start: Any) -> None:
    with pytest.raises(ValueError, match=r"550\.54\.14.*/whl/cu126"):
        start(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("build", [CPU_BUILD, CUDA_13], ids=["known before torch is imported", "known after"])
def test_run_ends_with_2_and_leaves_no_folder(
    gpu_machine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    build: TorchBuild,
) -> None:
    from accel_train.cli.commands import train

    monkeypatch.setattr(driver, "installed_torch", lambda: build)
    monkeypatch.setattr(train, "installed_torch", lambda: build)
    write_corpus(tmp_path)
    assert main(["run", str(write_recipe_file(tmp_path))]) == 2
    assert "/whl/cu126" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_use_cpu_of_training_arguments_is_a_purpose(gpu_machine: Path, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    assert TrainingArguments(str(tmp_path), use_cpu=True).device.type == "cpu"
    assert start_processes().device.type == "cpu"


def test_doctor_names_driver_build_and_wheels(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [finding] = [each for each in doctor._check_gpus() if each.subject == "gpu"]
    assert finding.status == "bad"
    assert ("550.54.14" in finding.text, "CUDA 13.0" in finding.text) == (True, True)
    assert finding.remedy.endswith("/whl/cu126")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    [hidden] = [each for each in doctor._check_gpus() if each.subject == "gpu"]
    assert (hidden.status, "CUDA_VISIBLE_DEVICES" in hidden.text) == ("warn", True)
