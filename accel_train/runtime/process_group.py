"""Start the process group and set its timeouts."""

import atexit
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, broadcast_object_list, gather

from accel_train.core.work import beat
from accel_train.runtime.driver import unsupported_gpu, unused_driver, uses_cpu
from accel_train.runtime.launch_environment import launched_with
from accel_train.runtime.launcher import (
    expand_segments,
    loopback_problem,
    spans_machines,
    stop_with_launcher,
    store_of_this_start,
)
from accel_train.runtime.private import is_set_to_cpu, process_groups
from accel_train.runtime.signals import stopped_while_joining

T = TypeVar("T")
R = TypeVar("R")
COLLECTIVE_TIMEOUT_SECONDS = 1800
"""Timeout of a collective in seconds, in a command without a watchdog."""
WATCHED_SECONDS = 7 * 24 * 3600
"""Timeout of a collective in seconds while a watchdog is open. One process may work for hours while the others wait."""
THREADS_OF_GLOO_SECONDS = 0.2
"""Seconds to wait for gloo's threads. This is much longer than a thread waits for its turn, even on a busy machine."""


def start_processes(*, offloads: bool = False, uses_gloo: bool = False) -> PartialState:
    """Join the other processes of the launcher, if any. The world size is known only after this call.

    A run that `offloads` its weights to the host runs collectives on the host and on the GPUs. Such a run, one on CPUs,
    and one that saves in shards (`uses_gloo`) connects the machines by gloo.

    Raises:
        ValueError: torch cannot use the NVIDIA driver of this machine, and would silently compute on the CPU. Also
            raised if gloo cannot connect the machines, torch lacks kernels for the GPU, or two processes share it.
    """
    if not (has_accelerator() or is_set_to_cpu()) and (problem := unused_driver(os.environ)) is not None:
        raise ValueError(problem)
    problem = loopback_problem(os.environ) if spans_machines(os.environ) else None
    if problem is not None and (offloads or uses_gloo or not has_accelerator()):
        raise ValueError(problem)
    stop_with_launcher()
    # Read the variables before any code here changes one.
    launched_with()
    if has_accelerator() and torch.version.cuda is not None and not torch.cuda.is_initialized():
        expand_segments(os.environ)
    # Accelerate reads the offload from these variables. `start_accelerator` removes them.
    if offloads:
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_OFFLOAD_PARAMS="true")
    # The launch's choice is in the recipe. This program starts DeepSpeed itself, not through Accelerate.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
    # Without cpu=True, Accelerate ignores LOCAL_RANK on a machine without an accelerator, and each process trains
    # alone.
    with stopped_while_joining():
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
        processes = PartialState(cpu=not has_accelerator(), timeout=timeout, **store_of_this_start(timeout))
    if processes.device.type == "cuda":
        _check_gpu(processes)
    # An earlier run in this process (a notebook) has left this type.
    if processes.distributed_type == DistributedType.FSDP:
        kind = DistributedType.MULTI_CPU if processes.device.type == "cpu" else DistributedType.MULTI_GPU
        processes.distributed_type = kind
    if processes.num_processes > 1:
        # An earlier run in this process has changed the timeout.
        limit_collectives(COLLECTIVE_TIMEOUT_SECONDS)
        atexit.unregister(_let_threads_of_gloo_finish)
        atexit.register(_let_threads_of_gloo_finish)
    return processes


def _check_gpu(processes: PartialState) -> None:
    """Check that torch has kernels for this process's GPU and that no other process uses it. NCCL has not started yet.

    Raises:
        ValueError: names the GPU and the fix.
    """
    gpu = torch.cuda.get_device_properties(processes.device)
    if found := unsupported_gpu(gpu, torch.cuda.get_arch_list()):
        raise ValueError("; ".join(found))
    if processes.num_processes == 1:
        return
    group: Any = dist.group.WORLD
    rank, key = str(processes.process_index), f"accel_train/gpu/{gpu.uuid}"
    owner = group.get_group_store().compare_set(key, "", rank).decode()
    if owner != rank:
        visible = torch.cuda.device_count()
        raise ValueError(
            f"ranks {owner} and {rank} share one GPU ({gpu.name}, {processes.device}, of {visible} visible on "
            f"{socket.gethostname()}), and NCCL needs one per process. Start at most {visible} processes on this "
            "machine (torchrun --nproc_per_node), or give each process another GPU in CUDA_VISIBLE_DEVICES"
        )


def on_main(function: Callable[[], T]) -> T:
    """Return the main process's result of `function` on all processes, or raise its error on all."""
    processes = PartialState()
    outcome: list[Any] = [None, None]
    if processes.is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    if processes.num_processes > 1:
        broadcast_object_list(outcome)
    beat()
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def concluded(here: T, conclude: Callable[[list[T]], R]) -> R:
    """* Return the main process's conclusion from the values of all, on all processes, or raise its error on all.

    Only the main process receives the values. If each process received all of them, a start would cost the square of
    the number of processes.
    """
    processes = PartialState()
    if processes.num_processes == 1:
        return conclude([here])
    everywhere: list[Any] | None = [None] * processes.num_processes if processes.is_main_process else None
    dist.gather_object(here, everywhere)
    return on_main(lambda: conclude(everywhere or []))


def first_problem(problems: Sequence[str]) -> str:
    """Return the first problem that is not empty, or an empty string."""
    return next((each for each in problems if each), "")


def wait_for_all() -> None:
    """* Wait until all processes call this function.

    A barrier by Accelerate names the GPU with the number of LOCAL_RANK. A process that sees one GPU does not have it.
    """
    processes = PartialState()
    if processes.num_processes > 1:
        arrived = torch.ones((), device=processes.device)
        dist.all_reduce(arrived)
        arrived.item()
        beat()


def gather_number(number: int) -> list[int]:
    """Return the number of each process, by rank. All must call it. The host waits for one small collective."""
    return gather(torch.tensor([number], device=PartialState().device)).tolist()


def _let_threads_of_gloo_finish() -> None:
    """Wait before the interpreter ends, after the last line of the program that called `train`.

    After a collective, a thread of gloo takes the interpreter's lock to release its tensors. If the interpreter is
    already ending, the process aborts ("terminate called without an active exception", torch 2.13, before Python 3.14).
    """
    time.sleep(THREADS_OF_GLOO_SECONDS)


def limit_collectives(seconds: float) -> None:
    """Set the timeout of collectives in all process groups, also in a mesh's.

    Exceeding it raises (gloo) or ends the process (NCCL).
    """
    for group in process_groups():
        # Some backends (fake, XCCL) have no timeout to set.
        with suppress(RuntimeError):
            group.set_timeout(timedelta(seconds=seconds))


def has_accelerator() -> bool:
    """Return whether a run here computes on a GPU: one exists, and ACCELERATE_USE_CPU does not hide it."""
    return torch.accelerator.is_available() and not uses_cpu(os.environ)
