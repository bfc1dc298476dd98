"""What is wrong with this machine or this launch, and what to do about it."""

import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from accel_train.redaction import redact_words

DISTRIBUTION = "accel-train"
LEAST_FREE_DISK_BYTES = 5 * 2**30
LEAST_SHARED_MEMORY_BYTES = 2**30
"""Data workers and NCCL pass buffers through /dev/shm; Docker gives it 64 MiB unless told otherwise."""
SHOWN_VARIABLES = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG",
)  # fmt: skip
OVERRIDING_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "precision.mixed_precision",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "batch.gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "optimizer.max_grad_norm",
    "ACCELERATE_DYNAMO_BACKEND": "precision.compile",
    "ACCELERATE_ALLOW_TF32": "precision.tf32",
}
"""Variables that change an Accelerator built without care, and the setting that decides here instead."""


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    status: Literal["ok", "warn", "bad"]
    subject: str
    text: str
    remedy: str = ""


def examine(cache_dir: Path | None = None, run_dir: Path | None = None) -> list[Finding]:
    """Look at versions, GPUs, precision, memory, launcher and disk; nothing is changed."""
    return [
        *check_versions(),
        *check_gpus(),
        *check_host(),
        *check_environment(os.environ),
        *_launcher_finding(),
        *check_folder("cache", cache_dir or Path(os.environ.get("ACCEL_TRAIN_CACHE") or "~/.cache/accel_train")),
        *check_folder("run folder", run_dir or Path("runs")),
    ]


def format_findings(findings: Iterable[Finding]) -> str:
    """The findings as aligned lines, what to do under each that asks for something."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.subject:<13} {finding.text}")
        lines += [f"{'':<19} -> {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)


def check_launcher(num_processes_seen: int) -> None:
    """Refuse to go on when the launcher was asked for more processes than Accelerate sees: each would train alone.

    `num_processes_seen` is `accelerator.num_processes`, after the processes have joined.

    Raises:
        ValueError: WORLD_SIZE, or the `accelerate launch` that started this process, asks for more.
    """
    said = os.environ.get("WORLD_SIZE", "")
    if said.isdigit() and int(said) > num_processes_seen:
        raise ValueError(
            f"WORLD_SIZE={said}, but Accelerate sees {num_processes_seen} process{'es' * (num_processes_seen != 1)}, so that "
            f"each would train alone; start with `{_torchrun(int(said))}`, or unset WORLD_SIZE to train on one process"
        )
    launch = _accelerate_launch_arguments()
    asked = None if launch is None else _processes_asked_of(launch)
    if asked is not None and asked > num_processes_seen:
        raise ValueError(
            f"`accelerate launch` was asked for {asked} processes and started {num_processes_seen} (with --cpu it starts "
            f"one, without a word); start with `{_torchrun(asked)}`, or `accelerate launch --multi_gpu "
            f"--num_processes {asked} {_own_command()}`"
        )


def _torchrun(num_processes: int) -> str:
    return f"torchrun --nproc_per_node {num_processes} {_own_command()}"


def _own_command() -> str:
    """What this process was started with, as it stands behind a launcher; without secrets."""
    program = Path(sys.argv[0])
    is_ours = program.name == "accel-train" or (program.name, program.parent.name) == ("__main__.py", "accel_train")
    words = ["-m", "accel_train", *sys.argv[1:]] if is_ours else sys.argv
    return shlex.join(redact_words(words))


def _accelerate_launch_arguments() -> list[str] | None:
    """What stands behind `accelerate launch` on the command line that started this process; None if another one did."""
    import psutil

    for parent in psutil.Process().parents()[:4]:
        try:
            words = parent.cmdline()
        except psutil.Error:  # a parent of another user, or gone by now
            continue
        for i, word in enumerate(words[:4]):
            name = Path(word).name
            if name == "accelerate-launch" or word in ("accelerate.commands.launch", "accelerate/commands/launch.py"):
                return words[i + 1 :]
            if name in ("accelerate", "accelerate.commands.accelerate_cli") and words[i + 1 : i + 2] == ["launch"]:
                return words[i + 2 :]
    return None


def _processes_asked_of(arguments: Sequence[str]) -> int | None:
    """--num_processes, or else that of the configuration file the launch reads; read with Accelerate's own parser."""
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        launch, _ = launch_command_parser().parse_known_args(list(arguments))
        reads_config = launch.config_file is not None or (Path(default_config_file).is_file() and not launch.cpu)
        if launch.num_processes is not None or not reads_config:
            return launch.num_processes
        return int(load_config_from_file(launch.config_file).num_processes)
    except (OSError, ValueError, SystemExit):  # not a launch that could have started this process
        return None


def _launcher_finding() -> Iterator[Finding]:
    world_size = os.environ.get("WORLD_SIZE", "1")
    try:
        check_launcher(int(world_size) if "RANK" in os.environ and world_size.isdigit() else 1)
    except ValueError as error:
        fault, _, remedy = str(error).partition("; ")
        yield Finding("bad", "launcher", fault, remedy)


def check_versions(requirements: Sequence[str] | None = None) -> Iterator[Finding]:
    """Python and every required package against the ranges that this package declares (`torch>=2.9`, ...)."""
    from packaging.requirements import Requirement

    python = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Finding("bad" if old else "ok", "python", f"{python} (>=3.11)", "install Python 3.11 or newer" if old else "")
    try:
        declared = requires(DISTRIBUTION) or [] if requirements is None else requirements
    except PackageNotFoundError:
        yield Finding("warn", "accel-train", "runs from source, so versions are not compared", "pip install -e .")
        return
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, wanted = requirement.name, str(requirement.specifier)
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("bad", name, f"is missing ({wanted})", f"pip install '{name}{wanted}'")
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        remedy = "" if fits else f"pip install '{name}{wanted}'"
        yield Finding("ok" if fits else "bad", name, f"{found} ({wanted})", remedy)


def check_gpus() -> Iterator[Finding]:
    """Each GPU with its memory and the precisions it computes in, the driver, CUDA and NCCL."""
    import torch

    driver = _driver_version()
    if not torch.cuda.is_available():
        yield _no_gpu(torch, driver)
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
        text = f"{gpu.name}, {_gib(total)}, {_gib(free)} free; computes {', '.join(precisions)}"
        busy = free < total / 2
        remedy = "another process holds most of its memory: nvidia-smi shows which" if busy else ""
        yield Finding("warn" if busy else "ok", f"gpu {index}", text, remedy)
    if nccl == "none" and torch.cuda.device_count() > 1:
        yield Finding(
            "bad", "nccl", "this torch has no NCCL, so several GPUs cannot work together", "install torch for CUDA"
        )


def _no_gpu(torch: Any, driver: str | None) -> Finding:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver is not None and torch.version.cuda is None:
        remedy = "install torch for CUDA: https://pytorch.org/get-started/locally"
        return Finding(
            "bad", "gpu", f"driver {driver} is here, but torch {torch.__version__} computes on the CPU only", remedy
        )
    if hidden is not None and hidden.strip() in ("", "-1"):
        return Finding("warn", "gpu", f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is not None:
        remedy = "install the driver, or give the container its GPUs (docker run --gpus all)"
        return Finding("warn", "gpu", f"torch is built for CUDA {torch.version.cuda}, and finds no GPU", remedy)
    return Finding(
        "warn",
        "gpu",
        "none: training runs on the CPU, in fp32",
        "fine for a trial; install torch for CUDA on a GPU machine",
    )


def _driver_version() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("Kernel Module", 1)[1].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit()), None)


def check_host() -> Iterator[Finding]:
    """CPU cores this process may use, memory, and the shared memory that data workers need."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    low = memory.available < 2 * 2**30
    remedy = "close other programs, or use a larger machine" if low else ""
    text = f"{cores} cores, {_gib(memory.total)}, {_gib(memory.available)} free"
    yield Finding("warn" if low else "ok", "cpu", text, remedy)
    if sys.platform == "linux" and Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        small = size < LEAST_SHARED_MEMORY_BYTES
        remedy = "docker run --shm-size 8g, or data.num_workers: 0" if small else ""
        yield Finding("warn" if small else "ok", "/dev/shm", _gib(size), remedy)


def check_environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """The launcher's variables, and those of Accelerate that users expect to change a run."""
    shown = [f"{name}={variables[name]}" for name in SHOWN_VARIABLES if name in variables]
    yield Finding("ok", "environment", ", ".join(shown) or "no launcher: one process")
    if variables.get("WORLD_SIZE", "1") != "1" and "RANK" not in variables:
        yield Finding(
            "bad", "WORLD_SIZE", f"{variables['WORLD_SIZE']}, but RANK is not set", "unset WORLD_SIZE, or use torchrun"
        )
    for name, setting in OVERRIDING_VARIABLES.items():
        if variables.get(name, "no").lower() not in ("no", ""):
            text = f"{variables[name]}: has no effect here, where {setting} decides"
            yield Finding("warn", name, text, f"unset {name}, and set {setting} in the recipe")
    if variables.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes"):
        yield Finding(
            "warn", "ACCELERATE_USE_CPU", "trains on the CPU, whatever GPUs are here", "unset ACCELERATE_USE_CPU"
        )
    if variables.get("ACCELERATE_USE_MEGATRON_LM", "").lower() in ("true", "1", "yes"):
        remedy = "choose MULTI_GPU, FSDP or DEEPSPEED in `accelerate config`"
        yield Finding("bad", "ACCELERATE_USE_MEGATRON_LM", "Megatron-LM is not supported", remedy)


def check_folder(subject: str, folder: Path) -> Iterator[Finding]:
    """Whether a folder (or the nearest one above it that exists) can be written, and how much room there is."""
    folder = folder.expanduser()
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"can be written")
    except OSError as error:
        remedy = "set ACCEL_TRAIN_CACHE to a folder you can write" if subject == "cache" else "set another output_dir"
        yield Finding("bad", subject, f"{folder} cannot be written: {error.strerror}", remedy)
        return
    free = shutil.disk_usage(existing).free
    low = free < LEAST_FREE_DISK_BYTES
    remedy = "checkpoints take 12 bytes a parameter each: make room, or lower checkpoint.keep" if low else ""
    yield Finding("warn" if low else "ok", subject, f"{folder}, {_gib(free)} free", remedy)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
