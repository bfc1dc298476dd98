"""A torch that cannot use the NVIDIA driver trains nothing on the CPU unasked; the refusal names
the wheels that fit.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState

from accel_train import fit
from accel_train.parallel import precision
from accel_train.recipe.schema import Precision
from accel_train.runtime import doctor, driver, process_group
from accel_train.runtime.driver import (
    TorchBuild,
    driver_version,
    hides_gpus,
    installed_torch,
    unsupported_gpu,
    unused_driver,
)
from accel_train.runtime.process_group import start_processes
from tests.support.commands import call
from tests.support.runs import refused, write_recipe_file

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
        ("550.54.14", CUDA_13, ["550.54.14", "CUDA 13.0", " torch==2.13.0 ", "/whl/cu126"], "cu130"),
        ("550.54.14", CPU_BUILD, ["2.13.0+cpu", "the CPU alone", " torch==2.13.0 ", "/whl/cu126"], "cu130"),
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


CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "architectures", "remedy"),
    [
        ((7, 0), CU130, "/whl/cu126"),
        ((6, 0), CU130, "/whl/cu126"),
        ((12, 0), CU126, "/whl/cu130"),
        ((3, 7), CU130, "newer GPU"),
        ((7, 0), CU126, None),
        ((8, 9), CU130, None),
        ((12, 1), CU130, None),
        ((13, 0), CU130, None),
        ((10, 3), ["sm_100a"], None),
        ((9, 0), [], None),
        ((9, 4), ["gfx942"], None),
    ],
)
def test_a_gpu_without_kernels_is_named_with_the_wheels_that_have_some(
    gpu_machine: Path, capability: tuple[int, int], architectures: list[str], remedy: str | None
) -> None:
    gpu = SimpleNamespace(name="Tesla V100", major=capability[0], minor=capability[1])
    found = unsupported_gpu(gpu, architectures)
    if remedy is None:
        assert found is None
    else:
        assert found is not None
        assert remedy in found[1]
        name, number = "Tesla V100", ".".join(map(str, capability))
        assert [part for part in (name, f" {number},", "CUDA 13.0") if part not in found[0]] == []


def test_a_start_and_doctor_refuse_a_gpu_without_kernels(gpu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Tesla V100", major=7, minor=0, uuid="a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CU130)
    processes: Any = SimpleNamespace(device=torch.device("cuda", 0), num_processes=1)
    monkeypatch.setattr(process_group, "PartialState", lambda **given: processes)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    refused(start_processes, named="Tesla V100|/whl/cu126")
    for name, value in {"is_available": True, "device_count": 1, "mem_get_info": (2, 2)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    [finding] = [each for each in doctor._check_gpus() if each.status == "bad"]
    assert finding.subject == "gpu 0"
    assert "/whl/cu126" in finding.remedy


@pytest.mark.parametrize(
    ("given", "is_initialized", "expected"),
    [
        ({}, False, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            False,
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ({}, True, {}),
    ],
)
def test_segments_of_the_allocator_grow_unless_the_user_has_set_it_and_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], is_initialized: bool, expected: dict[str, str]
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    monkeypatch.setattr(os, "environ", {**kept, **given})
    monkeypatch.setattr(precision, "launched_with", lambda: given)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)

    def join(**given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process_group, "PartialState", join)
    with pytest.raises(KeyboardInterrupt):
        start_processes()
    assert {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")} == expected
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda value: None)
    for name in ("allow_tf32", "benchmark", "deterministic"):  # restored at the end
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    said = precision.set_backends(Precision(tf32=False, cudnn_benchmark=False), "no", torch.device("cuda")).get(
        "allocator"
    )
    assert (said and said.value) == next(iter(expected.values()), None)
    assert said is None or ("as PYTORCH" in said.reason) == bool(given)


def test_two_processes_on_one_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    group = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: store))
    monkeypatch.setattr(process_group, "dist", SimpleNamespace(group=group))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CU130)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def check(rank: int, uuid: str) -> None:
        gpu = SimpleNamespace(name="H100", major=9, minor=0, uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        processes: Any = SimpleNamespace(device=torch.device("cuda", 0), num_processes=3, process_index=rank)
        process_group._check_gpu(processes)

    check(0, "a")
    check(1, "b")
    check(0, "a")  # another run of the same processes
    refused(check, 2, "a", named="ranks 0 and 2 |H100| 2 visible")


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
    refused(start, tmp_path, named="550.54.14|/whl/cu126")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("build", [CPU_BUILD, CUDA_13], ids=["known before torch is imported", "known after"])
def test_run_ends_with_2_and_leaves_no_folder(
    gpu_machine: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: TorchBuild,
) -> None:
    from accel_train.cli.commands import train

    monkeypatch.setattr(driver, "installed_torch", lambda: build)
    monkeypatch.setattr(train, "installed_torch", lambda: build)
    call("run", write_recipe_file(corpus), code=2, named="/whl/cu126")
    assert not (corpus / "run").exists()


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


@pytest.mark.parametrize("is_on", [False, True])
def test_a_deterministic_run_leaves_the_switch_of_the_program_to_the_next_run(is_on: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(is_on)
        for deterministic, expected in ((True, True), (True, True), (False, is_on), (False, is_on)):
            precision.set_backends(Precision(deterministic=deterministic), "no", torch.device("cpu"))
            assert torch.are_deterministic_algorithms_enabled() == expected
    finally:
        torch.use_deterministic_algorithms(before)
