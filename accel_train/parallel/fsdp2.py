"""Weights spread over the processes by FSDP2, through Accelerate: how a model is wrapped, and what of it is held here."""

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ParallelismConfig, broadcast_object_list, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from accel_train.batching import divisors
from accel_train.compiling import repeated_blocks
from accel_train.data_group import data_group
from accel_train.recipe import Parallel
from accel_train.running_statistics import has_batch_norm
from accel_train.state import Choice
from accel_train.step import TrainingModule
from accel_train.tensor_parallel import keep_gradients_in_parts, split_layers, tie, tied_names
from accel_train.zero import choose_zero

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def choose_sharding(section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
    """Processes that share one copy of the model (1: each holds all of it), with the reason; of tensor parallelism, groups.

    Raises:
        ValueError: the number of processes is no multiple of dp_shard_size or tp_size, or an offload would lead nowhere.
    """
    if section.strategy == "ddp":
        return Choice(1, "parallel.strategy ddp: every process holds the whole model")
    if section.strategy == "deepspeed":
        return choose_zero(section, world_size)
    if section.cpu_offload and device.type == "cpu":
        raise ValueError("parallel.cpu_offload=True: the run is on the CPU already; leave it out")
    if section.tp_size > 1:
        return _choose_groups(section, world_size)
    size = world_size if section.dp_shard_size == "auto" else section.dp_shard_size
    if world_size % size:
        fitting = [str(divisor) for divisor in range(1, world_size + 1) if world_size % divisor == 0]
        raise ValueError(
            f"parallel.dp_shard_size={size} does not divide the {world_size} processes of this run; use {', '.join(fitting)} or auto"
        )
    if world_size == 1:
        return Choice(1, "one process: there is nobody to share the model with")
    copies = world_size // size
    shared = f"fsdp2: weights, gradients and optimizer spread over {size} processes"
    return Choice(size, shared if copies == 1 else f"{shared}, {copies} copies (HSDP)")


def _choose_groups(section: Parallel, world_size: int) -> Choice[int]:
    split = section.tp_size
    if world_size % split:
        raise ValueError(
            f"parallel.tp_size={split} does not divide the {world_size} process{'es' * (world_size > 1)} of this run; use "
            f"{', '.join(map(str, divisors(world_size)))}, or run on {split} or {2 * split} processes"
        )
    groups = world_size // split
    if section.dp_shard_size not in ("auto", groups):
        raise ValueError(
            f"parallel.dp_shard_size={section.dp_shard_size} x parallel.tp_size={split} is not the number of processes, "
            f"{world_size}; several copies of a model whose layers are split are not supported: leave dp_shard_size at auto"
        )
    reason = f"tensor parallelism: layers are split over {split} neighbours, which read the same samples"
    return Choice(groups, reason if groups == 1 else f"{reason}; fsdp2 over {groups} such groups")


def processes_on_machine(world_size: int) -> int:
    """Of this run, by what the launcher says; all of them where it says nothing."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) > 0 else world_size


def across_machines(section: Parallel, processes_on_machine: int) -> str | None:
    """What to know where neighbours that split layers are on several machines; None where they are on one."""
    if section.tp_size == 1 or processes_on_machine % section.tp_size == 0:
        return None
    return (
        f"parallel.tp_size={section.tp_size} reaches over machines of {processes_on_machine} processes, and each layer waits for the "
        f"network several times; use {', '.join(map(str, divisors(processes_on_machine)))}"
    )


def sharding_plugins(section: Parallel, shard_size: int, world_size: int, mixed_precision: str) -> dict[str, Any]:
    """What the Accelerator is told of it, by its own names; nothing where every process holds the whole model."""
    split = section.tp_size
    plugins: dict[str, Any] = {}
    if section.strategy != "fsdp2":
        return plugins
    if shard_size > 1:
        plugins["fsdp_plugin"] = fsdp_plugin(section, mixed_precision)
    if shard_size < world_size and (split > 1 or shard_size > 1):
        copies = world_size // (shard_size * split)
        plugins["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=copies, dp_shard_size=shard_size, tp_size=split, cp_size=1, sp_size=1
        )
    return plugins


def fsdp_plugin(section: Parallel, mixed_precision: str) -> FullyShardedDataParallelPlugin:
    """Accelerate's settings of FSDP2: computed in the mixed precision, reduced in fp32, nothing left to the environment."""
    dtype = DTYPES.get(mixed_precision)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=section.reshard_after_forward,
        cpu_offload=section.cpu_offload,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,  # ours (`shard_model`) knows buffers as well
        activation_checkpointing=False,  # the model's own, by precision.gradient_checkpointing
        activation_checkpointing_offload=False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32),
    )


def precision_when_gathered(section: Parallel, shard_size: int, precision: Choice[str]) -> Choice[str]:
    """Return the precision, whose reason says what FSDP2 makes of it."""
    if section.strategy != "fsdp2" or shard_size == 1 or precision.value == "no":
        return precision
    said = (
        f"fsdp2 gathers weights in {precision.value}, half of what fp32 would send; embeddings and norms compute with them, which ddp "
        "keeps in fp32: losses are 3 to 9 times as far from those of fp32 (small GPT-2; a model with batch norm is gathered in fp32)"
    )
    return replace(precision, reason=f"{precision.reason}; {said}")


def allow_sharding(device: torch.device) -> None:
    """Let Accelerate take its FSDP plugin, or a mesh, on a CPU as well, where it would quietly use DDP; before the Accelerator is built."""
    if device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def build_for_sharding(
    accelerator: Accelerator, build: Callable[[], nn.Module], build_empty: Callable[[], nn.Module]
) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    """A model without weights on every process, and the weights and buffers on the main one; so only there is it ever whole.

    `build` is as for a run on one process, `build_empty` makes the same on the meta device. Where that cannot be (a task of
    one's own that computes while it builds), every process builds the whole model, and the weights are None.
    """
    weights: dict[str, Tensor] | None = None
    problem: str | None = None
    model = None
    try:
        model = build_empty()
    except Exception as error:  # whatever a task of one's own does that tensors without values cannot
        problem = f"{type(error).__name__}: {error}"
    if accelerator.is_main_process and model is not None:
        whole = build()
        weights = {**dict(whole.named_buffers()), **whole.state_dict()}
        expected = {**dict(model.named_buffers()), **model.state_dict()}
        if {name: value.shape for name, value in weights.items()} != {name: v.shape for name, v in expected.items()}:
            problem = "it has other weights without values than with them"
    told = [problem]
    broadcast_object_list(told)
    if model is None or told[0] is not None:
        return build(), None
    return model, weights


def shard_model(accelerator: Accelerator, inner: TrainingModule, weights: Mapping[str, Tensor] | None) -> Choice[str]:
    """Split its layers, where the recipe says so, wrap the training module in place, block by block, and give every process
    its part of the weights.

    `weights` are those of `inner.model` on the main process; used where the model has none of its own.
    """
    tied, is_empty = tied_names(inner), any(parameter.is_meta for parameter in inner.parameters())
    split = None
    if data_group(accelerator).num_alike > 1:
        if not is_empty:
            inner.to(accelerator.device)
        split = split_layers(inner.model, accelerator.torch_device_mesh["tp"])
    wrapped = _wrap_blocks(accelerator, inner) if accelerator.is_fsdp2 else Choice("not", "")
    if is_empty:
        _fill(accelerator, inner, weights, tied)
    if not accelerator.is_fsdp2:
        keep_gradients_in_parts(inner)
    if accelerator.mixed_precision != "no":
        inner.forward = accelerator.autocast()(inner.forward)  # type: ignore[method-assign]
    begun = "" if is_empty else "every process began with the whole model, which cannot be built without its weights"
    said = [wrapped.reason, "" if split is None else split.reason, begun]
    return Choice(wrapped.value, "; ".join(each for each in said if each))


def _wrap_blocks(accelerator: Accelerator, inner: TrainingModule) -> Choice[str]:
    blocks, plugin = repeated_blocks(inner), accelerator.state.fsdp_plugin
    kinds = sorted({type(block).__name__ for block in blocks})
    plugin.auto_wrap_policy = transformer_auto_wrap_policy if blocks else None
    plugin.transformer_cls_names_to_wrap = kinds or None
    in_fp32 = ""
    if accelerator.mixed_precision != "no" and has_batch_norm(inner):
        plugin.mixed_precision_policy = MixedPrecisionPolicy()  # autocast, as under DDP
        in_fp32 = "; weights are gathered in fp32, for batch norm takes none of 16 bits"
    with warnings.catch_warnings():
        # As Accelerate does it, with the mesh that it flattens.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        # Not by `prepare`, which maps the optimizer's weights by address: empty ones have none.
        fsdp2_prepare_model(accelerator, inner)
    first = next(inner.parameters())
    if isinstance(first, DTensor) and data_group(accelerator).num_alike > 1:
        first.device_mesh._flatten()  # so that the gradient norm is one collective, not two
        # Gathering the whole of a weight at the end takes two, and is as meant.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if not blocks:
        return Choice("as a whole", f"the model repeats no block, so all its weights are gathered at once{in_fp32}")
    said = f"{len(blocks)} blocks are gathered one at a time, the rest with the model as a whole{in_fp32}"
    return Choice(", ".join(kinds), said)


def _fill(
    accelerator: Accelerator, inner: TrainingModule, weights: Mapping[str, Tensor] | None, tied: Sequence[Sequence[str]]
) -> None:
    """Storage for what is on the meta device, and the main process's values in it: a parameter at a time over the wire."""
    offloads = accelerator.is_fsdp2 and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    inner.to_empty(device=torch.device("cpu") if offloads else accelerator.device)
    tie(inner, tied)
    named = {f"model.{name}": tensor for name, tensor in (weights or {}).items()}
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            if accelerator.is_main_process:
                buffer.copy_(named[name])
            dist.broadcast(buffer, 0)
    buffers = {name for name, _ in inner.named_buffers()}
    set_model_state_dict(
        inner,
        {name: tensor for name, tensor in named.items() if name not in buffers},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )


def reshard(module: nn.Module) -> None:
    """Let go of gathered weights: before weights are changed outside of a step, or the next forward would use the old ones."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def forget_broken_pass(root: FSDPModule) -> None:
    """Let FSDP2 begin a forward, whatever became of the one before; before torch 2.13 it can where that one ended."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    reshard(root)  # type: ignore[arg-type]
