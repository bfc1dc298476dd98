"""The launcher that started this process: it must not be outlived for long, and it may have started others before."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

PR_SET_PDEATHSIG = 1
LAUNCH_REMEDY = "start with torchrun or `accelerate launch`, which set it, or unset WORLD_SIZE and the RANKs to train on one process"


def stop_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies, however it dies: a run then saves, and ends."""
    _ask_for_signal_at_death_of_parent("SIGTERM")


def die_with_parent() -> None:
    """Ask the kernel to end this process when the parent dies, or the thread of it that began this process."""
    _ask_for_signal_at_death_of_parent("SIGKILL")


def _ask_for_signal_at_death_of_parent(name: str) -> None:
    """prctl(2); Linux only, elsewhere nothing is done."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, getattr(signal, name))


def stop_with_launcher() -> None:
    """`stop_with_parent`, where that is torchrun or `accelerate launch`.

    Killed, they leave processes behind that train on, hold their GPUs and keep the run folder locked. Other launchers
    (slurmd, an MPI daemon) see to their processes, and may start them from a thread that ends, which counts as a death.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()


def launch_mistake(environment: Mapping[str, str]) -> str | None:
    """Return what is impossible in the variables that a launcher sets, so that this process would wait for ever; None if nothing is."""
    numbers = {}
    for name, least in {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
        text = environment.get(name)
        if text is not None and not (text.isdecimal() and int(text) >= least):
            return f"{name}={text!r}: must be a whole number of at least {least}; {LAUNCH_REMEDY}"
        if text is not None:
            numbers[name] = int(text)
    world_size = numbers.get("WORLD_SIZE", 1)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and (rank == "RANK" or size in numbers) and numbers[rank] >= numbers.get(size, 1):
            return f"{rank}={numbers[rank]} with {size}={numbers.get(size, 1)}: ranks count from 0 to {size} - 1; {LAUNCH_REMEDY}"
    if numbers.get("LOCAL_WORLD_SIZE", 1) > world_size:
        return f"LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']} is more than WORLD_SIZE={world_size}; {LAUNCH_REMEDY}"
    is_mpi = any(
        name.startswith(("PMI_", "OMPI_", "MV2_")) for name in environment
    )  # Accelerate reads ranks from there
    for name in ("RANK", "MASTER_ADDR") if world_size > 1 and not is_mpi else ():
        if not environment.get(name):
            return f"WORLD_SIZE={world_size}, but {name} is not set, so that the processes cannot meet; {LAUNCH_REMEDY}"
    return None


def store_of_this_start(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` for processes that torchrun has started again; none for others.

    torchrun's store outlives the processes, and in it what those of before have said: the addresses where gloo and NCCL
    would look for them, and that one of them failed (torch 2.13 gives each start the same names in it).
    """
    environment = os.environ
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch.distributed import PrefixStore, TCPStore

    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    return {"store": PrefixStore(f"start-{restarts}", store), "rank": rank, "world_size": world_size}
