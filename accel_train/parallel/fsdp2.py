"""Shard weights over the processes with FSDP2, through Accelerate: wrap a model, and read and save its shards."""

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ParallelismConfig, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from accel_train.checkpoint.contents import model_tensors, optimizer_tensors
from accel_train.checkpoint.sharded import KnownPlan, ShardWriter
from accel_train.core.errors import RecipeError, SettingError
from accel_train.core.state import Choice
from accel_train.model.batch_norm import has_batch_norm
from accel_train.model.compile import repeated_blocks
from accel_train.model.training_module import TrainingModule
from accel_train.model.weights import separate_blocks
from accel_train.parallel.dims import check_dimensions, check_divides, parallel_dims
from accel_train.parallel.strategy import ALONE, MakeOptimizer, Snapshot, Strategy
from accel_train.parallel.tensor_parallel import keep_gradients_in_parts, split_layers, tie, tied_names
from accel_train.recipe.parallel import Parallel
from accel_train.runtime.private import before_reduction, flatten_mesh
from accel_train.runtime.process_group import on_main

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""Type of gathered weights by mixed precision."""


class Fsdp2(Strategy):
    """Strategy that shards weights, gradients, and moments over the processes (FSDP2).

    Tensor parallelism may also split layers.
    """

    name = "fsdp2"
    is_replicated = has_whole_weights = syncs_buffers = False
    builds_empty = True
    _saving_group: dist.ProcessGroup
    """Process group of the threads that save. Their collectives must not mix with the training's."""
    _known_plan: KnownPlan
    _gradients: "GradientWatch | None" = None
    """Recorder of missing gradients. None if layers are split but nothing is sharded.

    All processes then lack the same gradients.
    """
    _weights: Mapping[str, Tensor] | None = None
    """Full weights of a model that was built empty, on the main process."""

    @classmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return `dp_shard_size`, or the number of process groups that split layers.

        Raises:
            ValueError: dp_shard_size or tp_size does not divide the number of processes, or cpu_offload is set on a
                CPU.
        """
        if section.cpu_offload and device.type == "cpu":
            problem = "the run is already on the CPU"
            raise SettingError(problem, "Leave it out", "parallel.cpu_offload=True", ("parallel.cpu_offload",))
        if section.tp_size > 1:
            return _choose_groups(section, world_size)
        size = world_size if section.dp_shard_size == "auto" else section.dp_shard_size
        check_divides("dp_shard_size", size, world_size, " or auto")
        if world_size == 1:
            return Choice(1, ALONE)
        copies = world_size // size
        reason = f"fsdp2: weights, gradients and optimizer state sharded over {size} processes"
        return Choice(size, reason if copies == 1 else f"{reason}, {copies} copies (HSDP)")

    def precision(self, precision: Choice[str]) -> Choice[str]:
        """Return the precision, and add the cost of gathering in 16 bits to its reason."""
        if self.choice.value == 1 or precision.value == "no":
            return precision
        cost = (
            f"fsdp2 gathers weights in {'bf16' if precision.value == 'fp8' else precision.value}, half the traffic of "
            "fp32. Embeddings and norms then also compute in 16 bits (ddp: fp32), so losses deviate 3 to 9 times as "
            "much from fp32 (small GPT-2). A model with batch norm is gathered in fp32"
        )
        return replace(precision, reason=f"{precision.reason}; {cost}")

    def accelerator_arguments(self, world_size: int, mixed_precision: str) -> dict[str, Any]:
        """Return the FSDP plugin and the mesh."""
        size, split = self.shard_size, self.section.tp_size
        arguments: dict[str, Any] = {"fsdp_plugin": fsdp_plugin(self.section, mixed_precision)} if size > 1 else {}
        if size < world_size:
            arguments["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=world_size // (size * split), dp_shard_size=size, tp_size=split, cp_size=1, sp_size=1
            )
        return arguments

    @property
    def shard_size(self) -> int:
        """Number of processes that share one copy of the model, or of one part of its split layers."""
        return self.choice.value

    @property
    def num_copies(self) -> int:
        """Number of processes that hold the same shards (HSDP); 1 with plain sharding."""
        config = self.accelerator.parallelism_config
        is_hsdp = config is not None and self.accelerator.is_fsdp2 and self.dims.tp_size == 1
        return int(config.dp_replicate_size) if is_hsdp else 1

    def copies_group(self) -> dist.ProcessGroup | None:
        """Return the process group that holds the same shards."""
        return self.accelerator.torch_device_mesh["dp_replicate"].get_group()

    def independent_modules(self) -> list[nn.Module]:
        """Return the blocks. They do not communicate between FSDP2's hooks."""
        blocks: list[nn.Module] = [each for each in list(self.inner.modules())[1:] if isinstance(each, FSDPModule)]
        return blocks if blocks and self.dims.num_sharing == 1 else super().independent_modules()

    def build(self, make: Callable[[], nn.Module], make_empty: Callable[[], nn.Module]) -> nn.Module:
        """* Build an empty model, with its weights on the main process only.

        Only the main process ever holds all weights. If the task cannot build without values (a custom task that
        computes while it builds), every process builds the whole model.
        """
        problem, model = "", None
        try:
            model = make_empty()
        # A custom task may fail in any way on tensors without values.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if self.accelerator.is_main_process and model is not None:
            whole = make()
            self._weights = {**dict(whole.named_buffers()), **whole.state_dict()}
            expected = {**dict(model.named_buffers()), **model.state_dict()}
            shapes, other = ({name: each.shape for name, each in found.items()} for found in (self._weights, expected))
            if shapes != other:
                problem = "its weights differ between an empty build and a full build"
        if on_main(lambda: problem) or model is None:
            self._weights = None
            return make()
        return model

    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Split and shard the training module in place, and build the optimizer over its shards."""
        check_dimensions(inner.model, self.name)
        wrapped = shard_model(self.accelerator, inner, self._weights)
        self._weights = None
        self.module = inner
        self.take(inner, make_optimizer)
        self._saving_group = dist.new_group(backend="gloo")
        self._known_plan = KnownPlan()
        if self.accelerator.is_fsdp2:
            self._gradients = GradientWatch(inner, self._take_fault)
            self.waits_for_all_parameters, self.looks_for_unused = True, find_unused
        return wrapped

    def _take_fault(self) -> Tensor | None:
        fault, self.fault = self.fault, None
        return fault

    def begin_step(self) -> None:
        """Clear the records of the step before."""
        if self._gradients is not None:
            self._gradients.begin_step()

    def without_gradient(self) -> list[str]:
        """Return the trained parameters that had no gradient in some micro-batch of this process."""
        return super().without_gradient() if self._gradients is None else sorted(self._gradients.lacking)

    def end_incomplete_reduction(self) -> list[str] | None:
        """* Find the parameters that took part nowhere, if each step looks for them, and return None.

        Otherwise return the parameters without a gradient on this process, or None if all have one.
        """
        if self._gradients is None or not self.looks_for_unused:
            return self.without_gradient() or None
        self._gradients.settle(self.accelerator.device)
        return None

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Reduce the gradients of each micro-batch, because whole gradients would not fit into memory."""
        return nullcontext()

    def release_gathered(self) -> None:
        """Free gathered weights. The next forward would otherwise use them after the shards have changed."""
        for each in self.inner.modules():
            if isinstance(each, FSDPModule):
                each.reshard()

    def full_weights(self, without: Collection[str] = ()) -> dict[str, Tensor]:
        """* Gather the weights one tensor at a time, and keep them on the main process."""
        self.release_gathered()
        found = {}
        for name, tensor in model_tensors(self.inner.model, without).items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.accelerator.is_main_process:
                found[name] = whole.cpu()
        return found

    def snapshot(self) -> Snapshot:
        """* Copy this process's shards. The files of all processes make up the checkpoint."""
        weights = model_tensors(self.inner.model, self.inner.base)
        tensors = {f"model/{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in optimizer_tensors(self.optimizer).items()}
        if self.average is not None:
            tensors |= {f"average/{name}": tensor for name, tensor in self.average.tensors().items()}
        return Snapshot({}, ShardWriter(tensors, self._saving_group, self._known_plan))


class GradientWatch:
    """Sets a gradient of 0 for each weight that took no part in a micro-batch, before FSDP2 reduces its group.

    FSDP2 concatenates the gradients that a process has, without their names. If processes lacked different gradients,
    it would add gradients of different weights. A group without any gradient is not reduced.
    """

    def __init__(self, inner: TrainingModule, take_fault: Callable[[], Tensor | None]) -> None:
        self._take_fault = take_fault
        self._parameters = {name: each for name, each in inner.model.named_parameters() if each.requires_grad}
        self._names = {id(each): name for name, each in self._parameters.items()}
        for part in inner.modules():
            if isinstance(part, FSDPModule):
                before_reduction(part, self._complete)
        self.begin_step()

    def begin_step(self) -> None:
        """Clear the records of the step before."""
        self.lacking: set[str] = set()
        """Names of weights that had no gradient in some micro-batch of this process."""
        self._used: set[str] = set()
        self._idle: dict[str, int] = {}

    def _complete(self, weights: Sequence[tuple[nn.Parameter, nn.Parameter | None]]) -> None:
        """Fill in the missing gradients of a group. `weights` are its trained weights as (sharded, gathered) pairs."""
        named = [(self._names[id(sharded)], gathered) for sharded, gathered in weights]
        grads = [gathered.grad for _, gathered in named if gathered is not None and gathered.grad is not None]
        if grads and (fault := self._take_fault()) is not None:
            smallest = min(grads, key=torch.numel)
            (smallest.to_local() if isinstance(smallest, DTensor) else smallest).add_(fault)
        lacking = {name for name, gathered in named if gathered is None or gathered.grad is None}
        self.lacking |= lacking
        self._used.update(name for name, _ in named if name not in lacking)
        if len(lacking) < len(named):
            for name, gathered in named:
                if name in lacking and gathered is not None:
                    gathered.grad = torch.zeros_like(gathered)
        elif named:
            first = named[0][0]
            self._idle[first] = self._idle.get(first, 0) + 1

    def settle(self, device: torch.device) -> None:
        """* Remove the gradients of weights that took part on no process, so that these get no update.

        With one process they get none either.

        Raises:
            RecipeError: on all processes: a group took part on some of them only, but FSDP2 gathers it on all.
        """
        names = list(self._parameters)
        used, idle = ([int(name in self._used) for name in names], [self._idle.get(name, 0) for name in names])
        # Send the largest and the (negated) smallest counts in one collective.
        packed: Tensor = torch.tensor([used, idle, [-count for count in idle]], dtype=torch.int32, device=device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        taking_part, most, fewest = packed.tolist()
        for name, largest, smallest in zip(names, most, fewest, strict=True):
            if largest != -smallest:
                raise RecipeError(
                    f"the loss uses the module with {name} on some processes only, but fsdp2 gathers it on all at "
                    "once. Compute the module on all processes in each micro-batch, or use parallel.strategy ddp"
                )
        for name, is_used in zip(names, taking_part, strict=True):
            if not is_used:
                self._parameters[name].grad = None


def _choose_groups(section: Parallel, world_size: int) -> Choice[int]:
    size = section.tp_size
    check_divides("tp_size", size, world_size)
    groups = world_size // size
    if section.dp_shard_size not in ("auto", groups):
        raise SettingError(
            f"{section.dp_shard_size} x {size} is not the number of processes, {world_size}. Several copies of a model "
            "with split layers are not supported",
            "Leave parallel.dp_shard_size at auto",
            f"parallel.dp_shard_size={section.dp_shard_size} x parallel.tp_size={size}",
            ("parallel.dp_shard_size", "parallel.tp_size"),
        )
    reason = f"tensor parallelism: layers are split over groups of {size} processes, which read the same samples"
    return Choice(groups, reason if groups == 1 else f"{reason}; fsdp2 over {groups} such groups")


def fsdp_plugin(section: Parallel, mixed_precision: str) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's FSDP2 settings: compute in the mixed precision and reduce in fp32.

    All fields are set, so the environment cannot change them.
    """
    dtype = DTYPES.get(mixed_precision)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=section.reshard_after_forward,
        cpu_offload=section.cpu_offload,
        state_dict_type="SHARDED_STATE_DICT",
        # `shard_model` fills the weights, because it handles buffers too.
        cpu_ram_efficient_loading=False,
        # The model checkpoints its activations, by precision.gradient_checkpointing.
        activation_checkpointing=False,
        activation_checkpointing_offload=False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32),
    )


def allow_sharding(device: torch.device) -> None:
    """Let Accelerate use its FSDP plugin or a mesh on a CPU, where it would silently use DDP.

    Call this before the Accelerator is built.
    """
    if device.type == "cpu":
        PartialState().distributed_type = DistributedType.MULTI_GPU


def shard_model(accelerator: Accelerator, inner: TrainingModule, weights: Mapping[str, Tensor] | None) -> Choice[str]:
    """Split the model's layers if the recipe asks for it, wrap it in place block by block, and distribute its weights.

    `weights` are the weights of `inner.model` on the main process. They are used if the model is empty.
    """
    tied, is_empty = tied_names(inner), any(parameter.is_meta for parameter in inner.parameters())
    split = None
    if parallel_dims(accelerator).tp_size > 1:
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
    begun = "" if is_empty else "every process started with the whole model, because it cannot be built empty"
    said = [wrapped.reason, "" if split is None else split.reason, begun]
    return Choice(wrapped.value, "; ".join(each for each in said if each))


def _wrap_blocks(accelerator: Accelerator, inner: TrainingModule) -> Choice[str]:
    blocks, plugin = separate_blocks(inner), accelerator.state.fsdp_plugin
    kinds = sorted({type(block).__name__ for block in blocks})
    plugin.auto_wrap_policy = transformer_auto_wrap_policy if blocks else None
    plugin.transformer_cls_names_to_wrap = kinds or None
    in_fp32 = ""
    if accelerator.mixed_precision != "no" and has_batch_norm(inner):
        # Autocast casts the weights, as under DDP.
        plugin.mixed_precision_policy = MixedPrecisionPolicy()
        in_fp32 = "; weights are gathered in fp32, because batch norm does not take 16-bit weights"
    with warnings.catch_warnings():
        # Ignore this warning for the mesh that Accelerate flattens, as Accelerate does.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        # `prepare` maps the optimizer's weights by address, and empty weights have no address.
        fsdp2_prepare_model(accelerator, inner)
    first = next(inner.parameters())
    if isinstance(first, DTensor) and parallel_dims(accelerator).tp_size > 1:
        # With a flat mesh, the gradient norm takes one collective instead of two.
        flatten_mesh(first)
        # Gathering a whole weight at the end takes two collectives on purpose. Hide the warning about it.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if not blocks:
        why = "blocks share weights with other modules" if repeated_blocks(inner) else "no block is repeated"
        return Choice("as a whole", f"{why}, so all its weights are gathered at once{in_fp32}")
    said = f"{len(blocks)} blocks are gathered one at a time, the other weights together{in_fp32}"
    return Choice(", ".join(kinds), said)


def _fill(
    accelerator: Accelerator, inner: TrainingModule, weights: Mapping[str, Tensor] | None, tied: Sequence[Sequence[str]]
) -> None:
    """Allocate the tensors on the meta device, and broadcast the main process's values, one parameter at a time."""
    offloads = accelerator.is_fsdp2 and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    inner.to_empty(device=torch.device("cpu") if offloads else accelerator.device)
    tie(inner, tied)
    named = {f"model.{name}": tensor for name, tensor in (weights or {}).items()}
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            if accelerator.is_main_process:
                buffer.copy_(named[name])
            values = buffer.contiguous()
            # Send bytes, because backends support few types.
            dist.broadcast(values.view(-1).view(torch.uint8), 0)
            buffer.copy_(values)
    buffers = {name for name, _ in inner.named_buffers()}
    set_model_state_dict(
        inner,
        {name: tensor for name, tensor in named.items() if name not in buffers},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
