"""Start the process group and set its timeouts."""

import atexit
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, broadcast_object_list

from accel_train.runtime.driver import unused_driver, uses_cpu
from accel_train.runtime.launch_environment import launched_with
from accel_train.runtime.launcher import stop_with_launcher, store_of_this_start
from accel_train.runtime.private import is_set_to_cpu
from accel_train.runtime.signals import stopped_while_joining

T = TypeVar("T")
COLLECTIVE_TIMEOUT_SECONDS = 1800
"""Timeout of a collective in seconds while a run starts or ends. One process may tokenize or write for all of them."""
THREADS_OF_GLOO_SECONDS = 0.2
"""Seconds to wait for gloo's threads. This is much longer than a thread waits for its turn, even on a busy machine."""


def start_processes(*, offloads: bool = False) -> PartialState:
    """Join the other processes of the launcher, if any. The world size is known only after this call.

    A run that `offloads` its weights to the host runs collectives on the host and on the GPUs.

    Raises:
        ValueError: torch cannot use the NVIDIA driver of this machine, and would silently compute on the CPU.
    """
    if not (has_accelerator() or is_set_to_cpu()) and (problem := unused_driver(os.environ)) is not None:
        raise ValueError(problem)
    stop_with_launcher()
    # Read the variables before any code here changes one.
    launched_with()
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
    # An earlier run in this process (a notebook) has left this type.
    if processes.distributed_type == DistributedType.FSDP:
        kind = DistributedType.MULTI_CPU if processes.device.type == "cpu" else DistributedType.MULTI_GPU
        processes.distributed_type = kind
    if processes.num_processes > 1:
        # The watchdog of an earlier run in this process has lowered the timeout.
        limit_collectives(COLLECTIVE_TIMEOUT_SECONDS)
        atexit.unregister(_let_threads_of_gloo_finish)
        atexit.register(_let_threads_of_gloo_finish)
    return processes


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
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def _let_threads_of_gloo_finish() -> None:
    """Wait before the interpreter ends, after the last line of the program that called `train`.

    After a collective, a thread of gloo takes the interpreter's lock to release its tensors. If the interpreter is
    already ending, the process aborts ("terminate called without an active exception", torch 2.13, before Python 3.14).
    """
    time.sleep(THREADS_OF_GLOO_SECONDS)


def limit_collectives(seconds: float) -> None:
    """Set the timeout of collectives on all processes. Exceeding it raises (gloo) or ends the process (NCCL)."""
    group: Any = dist.group.WORLD
    group.set_timeout(timedelta(seconds=seconds))


def has_accelerator() -> bool:
    """Return whether a run here computes on a GPU: one exists, and ACCELERATE_USE_CPU does not hide it."""
    return torch.accelerator.is_available() and not uses_cpu(os.environ)
