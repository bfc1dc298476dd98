"""The NVIDIA driver of this machine: the torch build that fits it, and whether the installed torch uses it.

This module does not import torch.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

Environment = Mapping[str, str]
"""Environment variables by name."""

WHEELS = {580: "cu130", 525: "cu126"}
"""torch wheels by the oldest driver that runs them, newest first (NVIDIA, CUDA Compatibility, table 1)."""
OLDEST_CAPABILITY = 50
"""Compute capability, times 10, of the oldest GPUs that the oldest of these wheels have kernels for (Maxwell)."""
ROOT = Path("/")
"""Root of the file system in which the kernel shows the driver and its devices."""
SMI_SECONDS = 20.0


class TorchBuild(NamedTuple):
    """The installed torch and the CUDA version that it is built for; None for other devices and for the CPU alone."""

    version: str
    cuda: str | None
    is_for_cpu: bool

    def __str__(self) -> str:
        built_for = f"CUDA {self.cuda}" if self.cuda else "the CPU alone" if self.is_for_cpu else "other GPUs"
        return f"torch {self.version} (built for {built_for})"


def installed_torch(package: Path | None = None) -> TorchBuild | None:
    """Return the build of the torch in `package`, from its version file; None if the file is not readable."""
    spec = find_spec("torch") if package is None else None
    folder = package or Path((spec and spec.origin) or "missing").parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    values = dict(re.findall(r"^(\w+)[^=\n]*= '([^']*)'$", text, re.MULTILINE))
    is_for_cpu = not values.keys() & {"cuda", "hip", "xpu"}
    return TorchBuild(values.get("__version__", "of unknown version"), values.get("cuda"), is_for_cpu)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, from its kernel module or nvidia-smi (WSL); None without both."""
    # The driver is missing, or the file has another format. WSL has no such file.
    with suppress(OSError, IndexError):
        words = (ROOT / "proc/driver/nvidia/version").read_text().split("Kernel Module", 1)[1].split()
        return next((word for word in words if word[0].isdigit()), None)
    said = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], SMI_SECONDS).split()
    return said[0] if said and said[0][0].isdigit() else None


def output_of(command: Sequence[str], timeout_seconds: float) -> str:
    """Return what a command prints; "" if it is missing, fails, or takes longer."""
    # It may also print bytes that are no text.
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=True).stdout
    return ""


def hides_gpus(environment: Environment) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs. CUDA stops at the first entry that does not name a GPU."""
    first = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return not re.match(r"\d|GPU-|MIG-", first)


def remedy_for(driver: str, build: TorchBuild | None) -> str:
    """Return the remedy that makes torch use a driver of this version."""
    major = re.match(r"\d+", driver)
    wheels = next((name for least, name in WHEELS.items() if major and int(major[0]) >= least), None)
    if wheels is None:
        return f"update the driver to {min(WHEELS)} or newer, as torch requires"
    if build is not None and build.cuda is not None and int(build.cuda.split(".")[0]) <= int(wheels[2:4]):
        return "the two fit, so check CUDA_VISIBLE_DEVICES, and the state of the GPUs with nvidia-smi"
    return _install(wheels, build)


def _install(wheels: str, build: TorchBuild | None) -> str:
    """Return the command that installs other wheels of the same torch version."""
    number = None if build is None else re.match(r"\d[^+]*", build.version)
    version = f"=={number[0]}" if number else ""
    return f"pip install --force-reinstall torch{version} --index-url https://download.pytorch.org/whl/{wheels}"


def unsupported_gpu(gpu: Any, architectures: Sequence[str]) -> tuple[str, str] | None:
    """Return why the installed torch has no kernels for a GPU, with the remedy; None if it has some.

    Args:
        gpu: result of `torch.cuda.get_device_properties()`.
        architectures: result of `torch.cuda.get_arch_list()`. `sm_90` also runs on later minor versions, and the
            portable `compute_90` on all later GPUs. AMD's have other names (`gfx942`), and are not checked.
    """
    known = [(kind, int(number)) for each in architectures for kind, number in re.findall(r"(sm|compute)_(\d+)", each)]
    own = 10 * gpu.major + gpu.minor
    if not known or any(number <= own and (kind == "compute" or number // 10 == own // 10) for kind, number in known):
        return None
    build = installed_torch()
    problem = f"{gpu.name} has compute capability {own / 10:.1f}, but {build or 'torch'} has kernels for "
    problem += ", ".join(f"{number / 10:.1f}" for number in sorted({number for _, number in known}))
    if own < OLDEST_CAPABILITY:
        return f"{problem} only", "use a newer GPU, because current torch wheels lack kernels for this one"
    least = min(WHEELS) if own < min(number for _, number in known) else max(WHEELS)
    return f"{problem} only", f"{_install(WHEELS[least], build)} (driver {least} or newer)"


def unused_driver(environment: Environment) -> str | None:
    """Return why a torch that sees no GPU leaves this machine's GPUs unused, with the remedy; otherwise None.

    Return None if the machine has no GPUs, if the environment hides them or asks for the CPU, and in a container or job
    without GPUs.
    """
    if uses_cpu(environment) or hides_gpus(environment) or (driver := driver_version()) is None:
        return None
    devices = [each for each in (ROOT / "dev").glob("nvidia*") if each.name.removeprefix("nvidia").isdecimal()]
    # Every container of the machine sees the kernel's file, but only containers with GPUs see devices.
    if (ROOT / "proc/driver/nvidia/version").exists() and not any(map(_can_open, devices)):
        return None
    build = installed_torch()
    return (
        f"NVIDIA driver {driver} is installed, but {build or 'torch'} does not use it and would compute on the CPU; "
        f"{remedy_for(driver, build)}. To use the CPU on purpose, set ACCELERATE_USE_CPU=true"
    )


def uses_cpu(environment: Environment) -> bool:
    """Return whether ACCELERATE_USE_CPU hides the GPUs."""
    return environment.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")


def _can_open(device: Path) -> bool:
    """Return whether this process may use a GPU. A scheduler's limits only show when the device is opened."""
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError:
        return False
    return True
