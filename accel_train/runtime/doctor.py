"""Examine this machine and this launch: report problems and remedies."""

import os
import platform
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from accel_train.core.errors import SettingError
from accel_train.core.files import existing_part
from accel_train.core.format import format_bytes, format_count
from accel_train.core.redaction import redact_words
from accel_train.core.state import Choice
from accel_train.core.version import __version__
from accel_train.runtime.driver import (
    Environment,
    TorchBuild,
    driver_version,
    hides_gpus,
    installed_torch,
    output_of,
    remedy_for,
    unsupported_gpu,
    unused_driver,
)
from accel_train.runtime.launch_environment import launched_with, left_by_parent, settings_of_launch
from accel_train.runtime.launcher import loopback_problem, spans_machines

GIT_SECONDS = 2.0
LEAST_FREE_DISK_BYTES = 5 * 2**30
LEAST_SHARED_MEMORY_BYTES = 2**30
"""Smallest size of /dev/shm without a warning. Data workers and NCCL pass buffers through it; Docker's default is 64
MiB.
"""
SHOWN_VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    status: Literal["ok", "warn", "bad"]
    subject: str
    text: str
    remedy: str = ""


def device_name(device: Any) -> str:
    """Return the name of a torch device's GPU, or the device type of any other device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def environment(device: Any) -> dict[str, str]:
    """Return the GPU, platform, and versions of a run on this torch device."""
    return {
        "gpu": device_name(device) if device.type == "cuda" else "none",
        "cpu_cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "accel_train": __version__,
        **{name: version(name) for name in ("torch", "accelerate", "transformers")},
    }


@cache
def launch_facts() -> dict[str, str]:
    """Return the command, host, folder, and git commit of this launch at the first call, without secrets."""
    facts = {"command": _own_command("accel-train"), "host": socket.gethostname(), "folder": os.getcwd()}
    # This command runs no hook of the repository. `-dirty` marks uncommitted changes.
    words = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Empty if git or the repository is missing, or the repository is very large.
    commit = output_of(words, GIT_SECONDS).strip()
    return {**facts, "git_commit": commit} if commit else facts


def finding_of(
    problem: object, subject: str, text: str, remedy: str, status: Literal["warn", "bad"] = "warn"
) -> Finding:
    """Return a finding with `status` and `remedy` if there is a problem, otherwise an "ok" finding."""
    return Finding(status, subject, text, remedy) if problem else Finding("ok", subject, text)


def examine() -> list[Finding]:
    """Examine versions, GPUs, precision, memory, launcher, and disk, without changing anything."""
    return [
        *check_versions(),
        *_check_gpus(),
        *check_host(),
        *check_environment(launched_with()),
        *check_launch(),
        *check_folder("cache", Path(os.environ.get("ACCEL_TRAIN_CACHE") or "~/.cache/accel_train")),
        *check_folder("run folder", Path("runs")),
    ]


def format_findings(findings: Iterable[Finding]) -> str:
    """Return the findings as aligned lines, each remedy below its finding."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.subject:<14} {finding.text}")
        lines += [f"{'':<20} -> {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)


def check_launcher(num_processes_seen: int) -> None:
    """Check that the launcher was not asked for more processes than Accelerate sees. Each would train alone.

    `num_processes_seen` is `accelerator.num_processes`, after the processes have joined.

    Raises:
        SettingError: WORLD_SIZE or `accelerate launch` asks for more.
    """
    wanted = os.environ.get("WORLD_SIZE", "")
    if wanted.isdigit() and int(wanted) > num_processes_seen:
        raise SettingError(
            f"WORLD_SIZE={wanted}, but Accelerate sees {format_count(num_processes_seen, 'process', 'processes')}, so "
            "that each would train alone",
            f"start with `torchrun --nproc_per_node {wanted} {_own_command()}`, or unset WORLD_SIZE to train on one "
            "process",
        )
    # `accelerate launch` sets both variables if it was asked for several processes. It sets WORLD_SIZE only if it
    # starts them.
    if num_processes_seen == 1 and not wanted and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        raise SettingError(
            "`accelerate launch` was asked for several processes and started one (with --cpu it starts one, without a "
            "word)",
            f"start with `torchrun --nproc_per_node N {_own_command()}`, or `accelerate launch --multi_gpu "
            f"--num_processes N {_own_command()}`, or unset MASTER_ADDR to train on one process",
        )


def idle_gpus(device: Any, num_processes_seen: int) -> Choice[str] | None:
    """Return a choice that reports idle GPUs and the command to use all; None under a launcher or if none is idle."""
    import torch

    num_gpus = torch.get_device_module(device).device_count()
    # `accelerate launch` sets ACCELERATE_MIXED_PRECISION, and sets WORLD_SIZE only for several processes.
    is_launched = not {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"}.isdisjoint(os.environ)
    if num_processes_seen > 1 or num_gpus < 2 or is_launched:
        return None
    command = f"torchrun --standalone --nproc_per_node {num_gpus} {_own_command()}"
    if "ipykernel.zmqshell" in sys.modules:
        command = f"accelerate.notebook_launcher(FUNCTION, num_processes={num_gpus})"
    return Choice(f"1 of {num_gpus} GPUs used", f"all: {command}")


def _own_command(*ours: str) -> str:
    """Return the command of this process, without secrets. `ours` are the words for this program, by default those
    after a launcher.
    """
    program = Path(sys.argv[0])
    is_ours = program.name == "accel-train" or (program.name, program.parent.name) == ("__main__.py", "accel_train")
    words = [*(ours or ("-m", "accel_train")), *sys.argv[1:]] if is_ours else sys.argv
    return shlex.join(redact_words(words))


def check_launch() -> Iterator[Finding]:
    """Examine whether the launcher starts all processes, and whether other machines reach this one by its name."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    try:
        check_launcher(int(world_size) if "RANK" in os.environ and world_size.isdigit() else 1)
    except SettingError as error:
        yield Finding("bad", "launcher", error.problem, error.remedy)
    # gloo connects machines by their names.
    problem = loopback_problem(os.environ)
    if problem is not None and spans_machines(os.environ):
        yield Finding("bad", "host name", *problem.split(". ", 1))
    elif problem is not None:
        text = f"{socket.gethostname()} resolves to this machine alone: on several, GLOO_SOCKET_IFNAME must be set"
        yield Finding("ok", "host name", text)


def check_versions(requirements: Sequence[str] | None = None) -> Iterator[Finding]:
    """Show Python, and compare each required package with the range that this package declares (`torch>=2.9`, ...)."""
    from packaging.requirements import Requirement

    yield Finding("ok", "python", f"{platform.python_version()} (>=3.11)")
    try:
        declared = requires("accel-train") or [] if requirements is None else requirements
    except PackageNotFoundError:
        yield Finding("warn", "accel-train", "runs from source, so versions are not compared", "pip install -e .")
        return
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, wanted = requirement.name, str(requirement.specifier)
        remedy = f"pip install '{name}{wanted}'"
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("bad", name, f"is missing ({wanted})", remedy)
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        yield finding_of(not fits, name, f"{found} ({wanted})", remedy, "bad")


def _check_gpus() -> Iterator[Finding]:
    """Examine each GPU (memory, precisions), the driver, CUDA, and NCCL."""
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        yield _no_gpu(driver, installed_torch())
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    yield Finding("ok", "cuda", f"driver {driver or 'unknown'}, CUDA {torch.version.cuda}, NCCL {nccl}")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            precisions = ["fp32", "fp16"]
            precisions += ["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []
            precisions += ["tf32"] if gpu.major >= 8 else []
        text = f"{gpu.name}, {format_bytes(total)}, {format_bytes(free)} free; computes {', '.join(precisions)}"
        remedy = "another process holds most of its memory: nvidia-smi shows which"
        yield finding_of(free < total / 2, f"gpu {index}", text, remedy)
        if found := unsupported_gpu(gpu, torch.cuda.get_arch_list()):
            yield Finding("bad", f"gpu {index}", *found)
    if nccl == "none" and torch.cuda.device_count() > 1:
        text = "this torch has no NCCL, so several GPUs cannot work together"
        yield Finding("bad", "nccl", text, "install torch for CUDA")


def _no_gpu(driver: str | None, build: TorchBuild | None) -> Finding:
    if hides_gpus(os.environ):
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        return Finding("warn", "gpu", f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if driver is not None:
        status: Literal["warn", "bad"] = "bad" if unused_driver(os.environ) else "warn"
        return Finding(status, "gpu", f"driver {driver} is here, but {build} finds no GPU", remedy_for(driver, build))
    if build is not None and build.cuda is not None:
        remedy = "install the driver, or give the container its GPUs (docker run --gpus all)"
        return Finding("warn", "gpu", f"{build} finds no GPU and no driver", remedy)
    remedy = "fine for a trial; install torch for CUDA on a GPU machine"
    return Finding("warn", "gpu", "none: training runs on the CPU, in fp32", remedy)


def check_host() -> Iterator[Finding]:
    """Examine the available CPU cores, the memory, and the shared memory that data workers need."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    text = f"{format_count(cores, 'core')}, {format_bytes(memory.total)}, {format_bytes(memory.available)} free"
    yield finding_of(memory.available < 2 * 2**30, "cpu", text, "close other programs, or use a larger machine")
    if sys.platform == "linux" and Path("/dev/shm").is_dir():
        size, remedy = shutil.disk_usage("/dev/shm").total, "docker run --shm-size 8g, or data.num_workers: 0"
        yield finding_of(size < LEAST_SHARED_MEMORY_BYTES, "/dev/shm", format_bytes(size), remedy)


def check_environment(variables: Environment) -> Iterator[Finding]:
    """Examine the launcher's variables, and the Accelerate variables that users expect to change a run."""
    shown = [f"{name}={variables[name]}" for name in SHOWN_VARIABLES if name in variables]
    yield Finding("ok", "environment", ", ".join(shown) or "no launcher: one process")
    size = variables.get("WORLD_SIZE", "1")
    if size != "1" and "RANK" not in variables:
        yield Finding("bad", "WORLD_SIZE", f"{size}, but RANK is not set", "unset WORLD_SIZE, or use torchrun")
    for name, setting, value, _ in settings_of_launch(variables):
        yield Finding(
            "ok", name, f"sets {setting} to {value} if the recipe leaves it open; otherwise the run is refused"
        )
    for name, value in left_by_parent().items():
        text = f"{value}: has no effect, because a parent process left it and no launcher started this one"
        yield Finding("warn", name, text, f"unset {name}, or start with `accelerate launch`")
    on = {name for name, value in variables.items() if value.lower() in ("true", "1", "yes")}
    if (name := "ACCELERATE_USE_CPU") in on:
        yield Finding("warn", name, "trains on the CPU, whatever GPUs are here", f"unset {name}")
    if (name := "ACCELERATE_USE_MEGATRON_LM") in on:
        remedy = "choose MULTI_GPU, FSDP or DEEPSPEED in `accelerate config`"
        yield Finding("bad", name, "Megatron-LM is not supported", remedy)


def check_folder(subject: str, folder: Path) -> Iterator[Finding]:
    """Check that a folder (or its nearest existing parent) is writable and has room."""
    folder = folder.expanduser()
    existing = existing_part(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"can be written")
    except OSError as error:
        remedy = "set ACCEL_TRAIN_CACHE to a folder you can write" if subject == "cache" else "set another output_dir"
        yield Finding("bad", subject, f"{folder} cannot be written: {error.strerror}", remedy)
        return
    free = shutil.disk_usage(existing).free
    remedy = "checkpoints take 12 bytes a parameter each: make room, or lower checkpoint.keep"
    yield finding_of(free < LEAST_FREE_DISK_BYTES, subject, f"{folder}, {format_bytes(free)} free", remedy)
