"""In which precision a run computes, and why: autocast, loss scale, TF32, determinism, and the Accelerator that carries them."""

import atexit
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, TorchDynamoPlugin

from accel_train.batching import BatchSizes
from accel_train.launch_environment import launched_with
from accel_train.launcher import stop_with_launcher, store_of_this_start
from accel_train.memory import keep_freed_memory
from accel_train.recipe import Guard, Precision
from accel_train.signals import heard_while_waiting
from accel_train.state import Choice

COLLECTIVE_TIMEOUT_SECONDS = 1800
"""How long a collective may wait while a run begins or ends: one process may tokenise, or write, for all of them."""
THREADS_OF_GLOO_SECONDS = 0.2
"""Much longer than a thread waits for its turn, on a busy machine as well."""


def start_processes(*, offloads: bool = False) -> PartialState:
    """Join the other processes of the launcher, if any: the world size is known after this and not before.

    A run that `offloads` its weights to the host has collectives there as well as on the GPUs.
    """
    stop_with_launcher()
    launched_with()  # before anything here changes a variable
    if offloads:  # Accelerate's own way to be told of it; `start_accelerator` takes it back
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_OFFLOAD_PARAMS="true")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"  # the launcher's is in the recipe, and DeepSpeed is started by us
    # Without cpu=True Accelerate ignores LOCAL_RANK on a machine that has no accelerator, and each process trains alone.
    with heard_while_waiting():
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
        processes = PartialState(cpu=not _has_accelerator(), timeout=timeout, **store_of_this_start(timeout))
    if processes.distributed_type == DistributedType.FSDP:  # as an earlier run in this process (a notebook) left it
        kind = DistributedType.MULTI_CPU if processes.device.type == "cpu" else DistributedType.MULTI_GPU
        PartialState._shared_state["distributed_type"] = kind
    if processes.num_processes > 1:
        limit_collectives(COLLECTIVE_TIMEOUT_SECONDS)  # the watchdog of an earlier run in this process has lowered it
        atexit.unregister(_let_threads_of_gloo_finish)
        atexit.register(_let_threads_of_gloo_finish)
    return processes


def _let_threads_of_gloo_finish() -> None:
    """When the interpreter is about to end, after the last line of whoever called `train`.

    After a collective a thread of gloo asks for the interpreter's lock, to let go of its tensors; if the interpreter is ending
    by then, the process is aborted ("terminate called without an active exception", torch 2.13, before Python 3.14).
    """
    time.sleep(THREADS_OF_GLOO_SECONDS)


def limit_collectives(seconds: float) -> None:
    """From now on let no collective of all processes wait for longer: it raises (gloo), or ends the process (NCCL)."""
    from torch.distributed.distributed_c10d import _set_pg_timeout  # torch has no public name for it

    _set_pg_timeout(timedelta(seconds=seconds))


def _has_accelerator() -> bool:
    return torch.accelerator.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in (
        "true",
        "1",
    )


def choose_mixed_precision(section: Precision, device: torch.device) -> Choice[str]:
    """What `mixed_precision` means on this device, with the reason.

    Raises:
        ValueError: fp16 without CUDA (Accelerate would compute fp32 and report fp16), or bf16 where a GPU only emulates it.
    """
    asked = section.mixed_precision
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else device.type
    has_bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "fp16" and not cuda:
        raise ValueError(
            f"precision.mixed_precision=fp16 needs a CUDA device, and this process runs on {device.type}; use auto, bf16 or no"
        )
    if asked == "bf16" and cuda and not has_bf16:
        raise ValueError(f"precision.mixed_precision=bf16 is only emulated, slowly, by {name}; use fp16 or auto")
    if asked != "auto":
        return Choice(asked, "as the recipe says")
    if has_bf16:
        return Choice("bf16", f"{name} computes bf16, which needs no loss scale")
    if cuda:
        return Choice("fp16", f"{name} has no bf16")
    return Choice("no", f"{device.type}: fp32 is exact, and 16 bits gain little here")


def set_backends(section: Precision, mixed_precision: str, device: torch.device) -> dict[str, Choice[Any]]:
    """Set torch's global switches for this run; returns what was set, and why."""
    choices: dict[str, Choice[Any]] = {}
    if section.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's first handle is made
        torch.use_deterministic_algorithms(True)
        choices["precision.deterministic"] = Choice(
            True, "precision.deterministic: the same bits each time, at some cost in speed"
        )
    if device.type == "cuda":
        tf32 = section.tf32 if section.tf32 != "auto" else mixed_precision != "no"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        why = "as the recipe says" if section.tf32 != "auto" else f"mixed_precision is {mixed_precision}"
        choices["precision.tf32"] = Choice(tf32, why)
        benchmark = section.cudnn_benchmark if section.cudnn_benchmark != "auto" else not section.deterministic
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cudnn.deterministic = section.deterministic
        why = "as the recipe says" if section.cudnn_benchmark != "auto" else f"deterministic is {section.deterministic}"
        choices["precision.cudnn_benchmark"] = Choice(benchmark, why)
    if device.type == "cpu" and keep_freed_memory():
        choices["malloc"] = Choice(
            "keeps freed memory", "handing it back costs thousands of page faults a step on a CPU"
        )
    if device.type == "cpu":
        spins = os.environ.get("GOMP_SPINCOUNT", "its default number of")
        why = f"OMP_NUM_THREADS sets it; a thread that waits spins {spins} times, then sleeps"
        choices["threads"] = Choice(torch.get_num_threads(), why)
    return choices


class FlooredGradScaler(torch.amp.GradScaler):
    """A loss scale that never falls below a floor: torch's own goes to 0 in 166 overflows, and the next good step writes NaN."""

    def __init__(self, device: str, *, init_scale: float, growth_interval: int, floor: float) -> None:
        super().__init__(device, init_scale=max(init_scale, floor), growth_interval=growth_interval)
        self.floor = floor

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        self.scale_tensor.clamp_(min=self.floor)

    @property
    def scale_tensor(self) -> torch.Tensor:
        """The scale, 0-dim fp32 on the device: reading it here does not wait for the device."""
        assert self._scale is not None, "the scale exists from the first scaled loss on"
        return self._scale


def start_accelerator(
    mixed_precision: str,
    section: Precision,
    guard: Guard,
    sizes: BatchSizes,
    device: torch.device,
    plugins: Mapping[str, Any] | None = None,
) -> Accelerator:
    """The Accelerator of this run, with nothing left for the environment to change; `plugins` say how a model is spread."""
    AcceleratorState._reset_state()  # a second run in this process (a notebook) may have another precision
    # Read by the Accelerator, and set by it where it is given a plugin; the launcher's are in the recipe by now.
    os.environ["ACCELERATE_USE_FSDP"] = os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    # Where DeepSpeed is installed, saving a model imports it, and on a CPU it warns that it had to find that out by itself.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=mixed_precision,
        # A plugin, because ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides the plain argument.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=sizes.gradient_accumulation_steps, adjust_scheduler=False, sync_with_dataloader=False
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # compiling is ours: block by block, before wrapping
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)),
        ],
        **(plugins or {}),
    )
    if mixed_precision == "fp16":
        accelerator.scaler = FlooredGradScaler(
            device.type,
            init_scale=section.fp16_init_scale,
            growth_interval=section.fp16_growth_interval,
            floor=guard.fp16_scale_floor,
        )
    return accelerator
