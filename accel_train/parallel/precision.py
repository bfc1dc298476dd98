"""The precision of a run and its reason: autocast, loss scale, TF32, determinism. The Accelerator applies them."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import AORecipeKwargs, GradientAccumulationPlugin, TorchDynamoPlugin
from torch.nn.parallel import DistributedDataParallel

from accel_train.core.errors import setting_error
from accel_train.core.state import Choice, Choices
from accel_train.data.batch_sizes import BatchSizes
from accel_train.model.kernels.float8 import float8_config
from accel_train.optim.update import FlooredGradScaler
from accel_train.recipe.schema import Guard, Precision
from accel_train.runtime.doctor import device_name
from accel_train.runtime.launch_environment import launched_with
from accel_train.runtime.launcher import ALLOCATOR_VARIABLES
from accel_train.runtime.memory import keep_freed_memory
from accel_train.runtime.private import forget_accelerator
from accel_train.runtime.process_group import COLLECTIVE_TIMEOUT_SECONDS, concluded, limit_collectives

_of_earlier_run: dict[str, bool] = {}
"""Switches of torch that the last run of this process turned on. A program's own switches stay."""


def choose_mixed_precision(section: Precision, device: torch.device) -> Choice[str]:
    """Return the resolved `mixed_precision` on this device, with the reason.

    Raises:
        ValueError: the device does not support the precision. Without this check, Accelerate would compute fp32 for
            fp16 on a CPU. A GPU without bf16 would emulate it. torchao would compute fp8 slowly without float8 units.
    """
    asked = section.mixed_precision
    if device.type == "cuda" or asked == "fp8":
        has_bf16 = asked != "fp8" and torch.cuda.is_bf16_supported(including_emulation=False)
        return precision_on_gpu(asked, device_name(device), has_bf16=has_bf16, has_fp8=has_float8(device))
    if asked == "fp16":
        problem = f"this process runs on {device.type}, but fp16 needs a CUDA device"
        raise setting_error("precision.mixed_precision", asked, problem, "Use auto, bf16 or no")
    if asked != "auto":
        return Choice(asked, "as set")
    return Choice("no", f"{device.type}: fp32 is exact, and 16-bit precision gains little")


def precision_on_gpu(asked: str, name: str, *, has_bf16: bool, has_fp8: bool) -> Choice[str]:
    """Return the resolved `mixed_precision` on a GPU with this name, which may be elsewhere.

    Raises:
        SettingError: the GPU does not support the precision.
    """
    if asked == "bf16" and not has_bf16:
        raise setting_error(
            "precision.mixed_precision", asked, f"{name} only emulates bf16, slowly", "Use fp16 or auto"
        )
    if asked == "fp8" and not has_fp8:
        problem = f"needs an NVIDIA GPU with float8 units (L4, RTX 40, H100 and later), but {name} does not have them"
        raise setting_error("precision.mixed_precision", asked, problem, "Use bf16 or auto")
    if asked != "auto":
        return Choice(asked, "as set")
    if has_bf16:
        return Choice("bf16", f"{name} supports bf16, which needs no loss scale")
    return Choice("fp16", f"{name} does not support bf16")


def agree_on_mixed_precision(section: Precision, device: torch.device, num_processes: int) -> Choice[str]:
    """* Return one precision for all processes: the weakest of the precisions resolved on their devices.

    The reason also names the devices if they differ.

    Raises:
        ValueError: on all processes: some device does not support the recipe's precision.
    """
    try:
        own: Choice[str] | str = choose_mixed_precision(section, device)
    except ValueError as error:
        own = str(error)
    if num_processes == 1:
        return weakest_precision([own])

    def conclude(everywhere: list[tuple[Choice[str] | str, str]]) -> Choice[str]:
        choice = weakest_precision([each for each, _ in everywhere])
        return replace(choice, reason=choice.reason + different_devices([name for _, name in everywhere]))

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    described = " ".join([device_name(device), ".".join(map(str, capability))]).strip()
    return concluded((own, described), conclude)


def different_devices(names: Sequence[str]) -> str:
    """Return an addition to a reason that names the kinds of devices with their ranks; empty if all are equal."""
    kinds = Counter(names)
    if len(kinds) == 1:
        return ""
    more = {name: f" and {number - 1} more" if number > 1 else "" for name, number in kinds.items()}
    return "; the devices differ: " + ", ".join(f"{name} (rank {names.index(name)}{more[name]})" for name in kinds)


def weakest_precision(choices: Sequence[Choice[str] | str]) -> Choice[str]:
    """Return the weakest of the precisions that processes have resolved; raise the first error (a text) among them."""
    chosen = []
    for rank, each in enumerate(choices):
        if isinstance(each, str):
            raise ValueError(each if len(choices) == 1 else f"rank {rank}: {each}")
        chosen.append(each)
    if len({each.value for each in chosen}) == 1:
        return chosen[0]
    # The first of equals.
    weakest = min(chosen, key=lambda each: ("no", "fp16", "bf16").index(each.value))
    reason = f"the weakest of all processes, from rank {chosen.index(weakest)}: {weakest.reason}"
    return Choice(weakest.value, reason)


def has_float8(device: torch.device) -> bool:
    """Return whether a device multiplies float8: NVIDIA compute capability 8.9 and above (Ada, Hopper, Blackwell)."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def set_backends(section: Precision, mixed_precision: str, device: torch.device) -> Choices:
    """Set torch's global switches for this run; return each setting with its reason."""
    choices: Choices = {}
    if _of_earlier_run.pop("deterministic", False):
        torch.use_deterministic_algorithms(False)
    if section.deterministic:
        _of_earlier_run["deterministic"] = not torch.are_deterministic_algorithms_enabled()
        # cuBLAS reads it when CUDA's first handle is created.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        why = "precision.deterministic: bit-identical results, at some cost in speed"
        choices["precision.deterministic"] = Choice(True, why)
    if device.type == "cuda":
        tf32 = Choice(mixed_precision != "no", f"mixed_precision is {mixed_precision}")
        benchmark = Choice(not section.deterministic, f"deterministic is {section.deterministic}")
        if section.tf32 != "auto":
            tf32 = Choice(section.tf32, "as set")
        if section.cudnn_benchmark != "auto":
            benchmark = Choice(section.cudnn_benchmark, "as set")
        torch.set_float32_matmul_precision("high" if tf32.value else "highest")
        torch.backends.cudnn.allow_tf32 = tf32.value
        torch.backends.cudnn.benchmark = benchmark.value
        torch.backends.cudnn.deterministic = section.deterministic
        for name in ALLOCATOR_VARIABLES:
            if name in os.environ:
                why = f"as {name} says" if name in launched_with() else "less fragmentation; PYTORCH_ALLOC_CONF sets it"
                choices["allocator"] = Choice(os.environ[name], why)
        choices |= {"precision.tf32": tf32, "precision.cudnn_benchmark": benchmark}
    if device.type == "cpu":
        if keep_freed_memory():
            why = "returning memory to the system costs thousands of page faults per step on a CPU"
            choices["malloc"] = Choice("keeps freed memory", why)
        spins = os.environ.get("GOMP_SPINCOUNT", "the default number of")
        why = f"set by OMP_NUM_THREADS; a waiting thread spins {spins} times, then sleeps"
        choices["threads"] = Choice(torch.get_num_threads(), why)
    return choices


@dataclass
class DdpArguments(DistributedDataParallelKwargs):
    """Arguments of DDP, with one of torch 2.12 that Accelerate 1.15 does not have."""

    batched_grad_copy: bool = False
    """Whether gradients are copied into a bucket by one operator, and not by one for each weight. Default: False."""


def start_accelerator(
    mixed_precision: str,
    section: Precision,
    guard: Guard,
    sizes: BatchSizes,
    device: torch.device,
    plugins: Mapping[str, Any] | None = None,
) -> Accelerator:
    """Return the Accelerator of this run. `plugins` define the sharding, and the environment cannot change it."""
    # A second run in this process (a notebook) may have another precision.
    forget_accelerator()
    # The Accelerator reads these variables, and sets them if it gets a plugin. The launcher's values are already in the
    # recipe.
    os.environ["ACCELERATE_USE_FSDP"] = os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    # If DeepSpeed is installed, saving a model imports it. On a CPU, it then warns that it had to detect the device.
    os.environ["DS_ACCELERATOR"] = launched_with().get("DS_ACCELERATOR", device.type)
    handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS))]
    if mixed_precision == "fp8":
        # `convert_to_float8` has already converted the model, so that it is the same under every strategy. `prepare`
        # must convert nothing.
        handlers.append(AORecipeKwargs(config=float8_config(), module_filter_func=lambda _, name: False))
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=mixed_precision,
        # A plugin, because ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides the plain argument.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=sizes.gradient_accumulation_steps, adjust_scheduler=False, sync_with_dataloader=False
        ),
        # The model is compiled block by block, before it is wrapped.
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        kwargs_handlers=handlers,
        **(plugins or {}),
    )
    accelerator.ddp_handler = DdpArguments(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        batched_grad_copy="batched_grad_copy" in signature(DistributedDataParallel).parameters,
    )
    if accelerator.num_processes > 1:
        limit_collectives(COLLECTIVE_TIMEOUT_SECONDS)  # the groups of a mesh begin with torch's default
    if mixed_precision == "fp16":
        accelerator.scaler = FlooredGradScaler(
            device.type,
            init_scale=section.fp16_init_scale,
            growth_interval=section.fp16_growth_interval,
            floor=guard.fp16_scale_floor,
        )
    return accelerator
