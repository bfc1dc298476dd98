"""Shard weights over the processes with FSDP2, through Accelerate: wrap a model, and read and save its shards."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ParallelismConfig, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from accel_train.checkpoint.contents import model_shapes, model_tensors, optimizer_tensors
from accel_train.checkpoint.sharded import KnownPlan, ShardWriter
from accel_train.core.errors import RecipeError, SettingError, setting_error
from accel_train.core.state import Choice
from accel_train.core.work import beat
from accel_train.guard.guard import Limits
from accel_train.model.compile import repeated_blocks
from accel_train.model.kernels.nf4 import packed_layers
from accel_train.model.tensors import Tensors, local_part, plain_tensors, replace_values, trained
from accel_train.model.training_module import TrainingModule
from accel_train.model.weights import separate_blocks, separate_ends
from accel_train.optim.update import Update
from accel_train.parallel import mixed
from accel_train.parallel.building import Builders, Unread, fill, fill_from_main
from accel_train.parallel.dims import check_dimensions, check_divides, parallel_dims
from accel_train.parallel.strategy import ALONE, MakeOptimizer, Snapshot, Strategy
from accel_train.parallel.tensor_parallel import keep_gradients_in_parts, split_layers, tie, tied_names
from accel_train.recipe.parallel import Parallel
from accel_train.runtime.private import before_reduction, drop_partial_sums, end_open_forward, flatten_mesh
from accel_train.runtime.process_group import concluded, first_problem, on_main

LOOKING = "looking for unused weights"
"""Description of the process group in which the hosts exchange which weights took part in a step."""
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
    _sharded_modules: Sequence[FSDPModule] = ()
    """Modules whose weights FSDP2 gathers. Empty if nothing is sharded."""
    _looking_group: dist.ProcessGroup | None = None
    """Process group of the hosts that look for unused weights. None until the first step that looks for them."""
    _known_plan: KnownPlan
    _gradients: "GradientWatch | None" = None
    """Recorder of missing gradients. None if layers are split but nothing is sharded: all lack the same gradients."""
    _weights: Tensors | None = None
    """Full weights and buffers of a model that was built empty, on the main process; None if a checkpoint has them.

    Weights of `_unread` are not among them.
    """
    _unread: Unread | None = None
    """Model whose weights are still in files, or not drawn yet."""

    @classmethod
    def choose(cls, section: Parallel, world_size: int, device: torch.device) -> Choice[int]:
        """Return `dp_shard_size`, or the number of process groups that split layers.

        Raises:
            ValueError: dp_shard_size or tp_size does not divide the number of processes, or cpu_offload is set on a
                CPU.
        """
        if section.cpu_offload and device.type == "cpu":
            raise setting_error("parallel.cpu_offload", True, "the run is already on the CPU", "Leave it out")
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
        return replace(precision, reason=f"{precision.reason}; {mixed.cost(precision.value)}")

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

    def build(self, builders: Builders) -> nn.Module:
        """* Build an empty model. `wrap` gives each process its part of the weights; a checkpoint has them on a resume.

        If the weights cannot be made in parts, the main process holds all of them. If the task cannot build without
        values, every process builds the whole model.
        """
        restored = builders.restored()
        if concluded(restored is not None, all):
            assert restored is not None
            return restored
        if (unread := builders.unread()) is not None:
            return self._without_values(unread)
        problem, model = "", None
        try:
            model = builders.empty()
        # A custom task may fail in any way on tensors without values.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if model is not None and any(each.is_meta for each in plain_tensors(model)):
            problem = "it makes tensors that are neither parameters nor buffers"
        if self.accelerator.is_main_process and model is not None and not problem:
            whole = builders.whole()
            self._weights = {**dict(whole.named_buffers()), **whole.state_dict()}
            shapes, other = (
                {**model_shapes(found), **{name: each.shape for name, each in found.named_buffers()}}
                for found in (whole, model)
            )
            if shapes != other:
                problem = "its weights differ between an empty build and a full build"
        problem = concluded(problem, first_problem)
        if problem or model is None:
            self._weights, self.whole_because = None, problem
            return builders.whole()
        return model

    def _without_values(self, unread: Unread) -> nn.Module:
        """Return the model with all parameters on the meta device. The main process keeps the values that it made."""
        named = dict(unread.model.named_parameters(remove_duplicate=False))
        made = {name: each for name, each in named.items() if not each.is_meta}
        self._unread = unread
        if self.accelerator.is_main_process:
            values = {name: each.detach() for name, each in made.items()}
            self._weights = {**dict(unread.model.named_buffers()), **values}
        for each in made.values():
            replace_values(each, torch.empty_like(each, device="meta"))
        return unread.model

    def wrap(self, inner: TrainingModule, make_optimizer: MakeOptimizer, *, find_unused: bool) -> Choice[str] | None:
        """* Split and shard the training module in place, and build the optimizer over its shards."""
        check_dimensions(inner.model, self.name)
        wrapped = shard_model(self.accelerator, inner, self._weights, self._unread)
        self._weights = self._unread = None
        self.module = inner
        self.take(inner, make_optimizer)
        self._saving_group = dist.new_group(backend="gloo", group_desc="saving")
        self._known_plan = KnownPlan()
        self._sharded_modules = [each for each in inner.modules() if isinstance(each, FSDPModule)]
        if self.accelerator.is_fsdp2:
            self._gradients = GradientWatch(inner, self._take_fault, sums_over_copies=self.num_copies > 1)
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
        if self._looking_group is None:
            self._looking_group = dist.new_group(backend="gloo", group_desc=LOOKING)
        self._gradients.settle(self._looking_group)
        return None

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Reduce the gradients of each micro-batch to shards, because whole gradients would not fit into memory.

        Copies of the shards (HSDP) are summed once, with the last micro-batch.
        """
        if self.num_copies > 1 and isinstance(self.inner, FSDPModule):
            self.inner.set_requires_all_reduce(is_last)
        return nullcontext()

    def update_within(self, limits: Limits, share: Tensor) -> Update:
        """* Clip and update. Weights that a callback has gathered since the backward are freed before."""
        self.release_gathered()
        return super().update_within(limits, share)

    def release_gathered(self) -> None:
        """Free gathered weights. The next forward would otherwise use them after the shards have changed."""
        end_open_forward(self.inner)
        for each in self._sharded_modules:
            each.reshard()

    def full_weights(self, without: Collection[str] = (), narrow: Collection[str] = ()) -> Tensors:
        """* Gather the weights one tensor at a time, and keep them on the main process."""
        self.release_gathered()
        found, packed = {}, packed_layers(self.inner.model)
        for name, tensor in model_tensors(self.inner.model, without).items():
            layer = packed.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            parts = None if layer is None else layer.packed(_gathered)
            whole = _gathered(tensor) if parts is None else tensor
            beat()
            if self.accelerator.is_main_process:
                whole = whole if parts is None else parts.unpacked()
                dtype = torch.bfloat16 if name in narrow else whole.dtype
                # On a CPU, a tensor that is not sharded would stay the run's own.
                found[name] = whole.to("cpu", dtype, copy=True)
        return found

    def snapshot(self) -> Snapshot:
        """* Copy this process's shards. The files of all processes make up the checkpoint."""
        parts = {
            "model": model_tensors(self.inner.model, self.inner.base),
            "optimizer": optimizer_tensors(self.optimizer),
            "average": {} if self.average is None else self.average.tensors(),
        }
        tensors = {f"{kind}/{name}": each for kind, part in parts.items() for name, each in part.items()}
        return Snapshot({}, ShardWriter(tensors, self._saving_group, self._known_plan))


def _gathered(tensor: Tensor) -> Tensor:
    """* Return the whole of a tensor that may be sharded."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


class GradientWatch:
    """Sets a gradient of 0 for each weight that took no part in a micro-batch, before FSDP2 reduces its group.

    FSDP2 concatenates the gradients that a process has, without their names. If processes lacked different gradients,
    it would add gradients of different weights. A group without any gradient is not reduced.
    """

    def __init__(
        self, inner: TrainingModule, take_fault: Callable[[], Tensor | None], *, sums_over_copies: bool
    ) -> None:
        self._take_fault, self._inner, self._sums_over_copies = take_fault, inner, sums_over_copies
        self._parameters = trained(inner.model)
        self._names = {id(each): name for name, each in self._parameters.items()}
        before_reduction(inner, self._complete)
        self.begin_step()

    def begin_step(self) -> None:
        """Clear the records of the step before, and the sums that a failed step has not sent to the copies."""
        if self._sums_over_copies:
            drop_partial_sums(self._inner)
        self.lacking: set[str] = set()
        """Names of weights that had no gradient in some micro-batch of this process."""
        self._used: set[str] = set()
        self._idle = Counter[str]()

    def _complete(self, weights: Sequence[tuple[nn.Parameter, nn.Parameter | None]]) -> None:
        """Fill in the missing gradients of a group. `weights` are its trained weights as (sharded, gathered) pairs."""
        named = [(self._names[id(sharded)], gathered) for sharded, gathered in weights]
        grads = [gathered.grad for _, gathered in named if gathered is not None and gathered.grad is not None]
        if grads and (fault := self._take_fault()) is not None:
            smallest = min(grads, key=torch.numel)
            local_part(smallest).add_(fault)
        lacking = {name for name, gathered in named if gathered is None or gathered.grad is None}
        self.lacking |= lacking
        # The last micro-batch also sends what earlier ones have summed.
        is_used = len(lacking) < len(named) or (self._sums_over_copies and not lacking.isdisjoint(self._used))
        self._used.update(name for name, _ in named if name not in lacking)
        if is_used:
            for name, gathered in named:
                if name in lacking and gathered is not None:
                    gathered.grad = torch.zeros_like(gathered)
        elif named:
            self._idle[named[0][0]] += 1

    def settle(self, hosts: dist.ProcessGroup) -> None:
        """* Remove the gradients of weights that took part on no process, so that these get no update.

        With one process they get none either. A host knows which gradients exist before the device has computed them,
        so the `hosts` exchange this among themselves, and none of them waits for its device.

        Raises:
            RecipeError: on all processes: a group took part on some of them only, but FSDP2 gathers it on all.
        """
        names = list(self._parameters)
        used, idle = [int(name in self._used) for name in names], [self._idle[name] for name in names]
        # Send the largest and the (negated) smallest counts in one collective.
        packed = torch.tensor([used, idle, [-count for count in idle]], dtype=torch.int32)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=hosts)
        for name, is_used, most, fewest in zip(names, *packed.tolist(), strict=True):
            if most != -fewest:
                raise RecipeError(
                    f"the loss uses the module with {name} on some processes only, but fsdp2 gathers it on all at "
                    "once. Compute the module on all processes in each micro-batch, or use parallel.strategy ddp"
                )
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
        mixed_precision_policy=mixed.policy_of(dtype),
    )


def allow_sharding(device: torch.device) -> None:
    """Let Accelerate use its FSDP plugin or a mesh on a CPU, where it would silently use DDP.

    Call this before the Accelerator is built.
    """
    if device.type == "cpu":
        PartialState().distributed_type = DistributedType.MULTI_GPU


def shard_model(
    accelerator: Accelerator, inner: TrainingModule, weights: Tensors | None, unread: Unread | None = None
) -> Choice[str]:
    """Split the model's layers if the recipe asks for it, wrap it in place block by block, and distribute its weights.

    `weights` are the weights of `inner.model` on the main process. They are used if the model is empty, and so are the
    files of `unread`.
    """
    tied, is_empty = tied_names(inner), any(parameter.is_meta for parameter in inner.parameters())
    split = ""
    if parallel_dims(accelerator).tp_size > 1:
        if not is_empty:
            inner.to(accelerator.device)
        split = split_layers(inner.model, accelerator.torch_device_mesh["tp"])
    wrapped = _wrap_blocks(accelerator, inner) if accelerator.is_fsdp2 else Choice("not", "")
    if is_empty:
        _fill(accelerator, inner, weights, tied)
        if unread is not None:
            parameters = {name.removeprefix("model."): each for name, each in inner.named_parameters()}
            if unread.is_shared:
                fill(parameters, unread.sources)
            else:
                fill_from_main(parameters, unread.sources, accelerator.device)
    if not accelerator.is_fsdp2:
        keep_gradients_in_parts(inner)
    if accelerator.mixed_precision != "no":
        inner.forward = accelerator.autocast()(inner.forward)  # type: ignore[method-assign]
        if accelerator.device.type == "cpu":
            mixed.narrow_for_norms(inner)
    begun = "" if is_empty else "every process started with the whole model, because it cannot be built empty"
    return Choice(wrapped.value, "; ".join(filter(None, (wrapped.reason, split, begun))))


def _wrap_blocks(accelerator: Accelerator, inner: TrainingModule) -> Choice[str]:
    blocks, plugin = separate_blocks(inner), accelerator.state.fsdp_plugin
    kinds = sorted({type(block).__name__ for block in blocks})
    plugin.auto_wrap_policy = transformer_auto_wrap_policy if blocks else None
    plugin.transformer_cls_names_to_wrap = kinds or None
    in_fp32 = ""
    if accelerator.mixed_precision != "no":
        plugin.mixed_precision_policy, in_fp32 = mixed.policy(plugin.mixed_precision_policy, inner)
    with warnings.catch_warnings():
        # Ignore this warning for the mesh that Accelerate flattens, as Accelerate does.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        ends = _wrap_ends(accelerator, inner.model)
        # `prepare` maps the optimizer's weights by address, and empty weights have no address.
        fsdp2_prepare_model(accelerator, inner)
    if ends:
        # An operation in place on such an output would only drop a prefetch: the head's weights stay gathered, and the
        # embedding's are not needed.
        views = r"FSDP2-wrapped module \((FSDPEmbedding|\w+, FSDPLinear)\) returned a view"
        warnings.filterwarnings("ignore", message=views, category=UserWarning)
    first = next(inner.parameters())
    if isinstance(first, DTensor) and parallel_dims(accelerator).tp_size > 1:
        # With a flat mesh, the gradient norm takes one collective instead of two.
        flatten_mesh(first)
        # Gathering a whole weight at the end takes two collectives on purpose. Hide the warning about it.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if not blocks:
        why = "blocks share weights with other modules" if repeated_blocks(inner) else "no block is repeated"
        return Choice("as a whole", f"{why}, so all its weights are gathered at once{in_fp32}")
    rest = "the embedding and the head for their own use" if ends else "the other weights together"
    return Choice(", ".join(kinds), f"{len(blocks)} blocks are gathered one at a time, {rest}{in_fp32}")


def _wrap_ends(accelerator: Accelerator, model: nn.Module) -> bool:
    """Make the input embedding, and the last norm with the head, groups of their own; return whether it is possible.

    The embedding's weights are not needed in the backward, and the head's are needed from the end of the forward to the
    beginning of the backward. (Accelerate 1.15 does this for models that it gets without their loss.)
    """
    if (ends := separate_ends(model)) is None:
        return False
    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    shared = {
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy,
    }
    embedding = fully_shard(ends.embedding, reshard_after_forward=plugin.reshard_after_forward, **shared)
    embedding.set_unshard_in_backward(False)
    fully_shard([ends.norm, ends.head], reshard_after_forward=False, **shared)
    return True


def _fill(
    accelerator: Accelerator, inner: TrainingModule, weights: Tensors | None, tied: Sequence[Sequence[str]]
) -> None:
    """Allocate the tensors on the meta device, and broadcast the main process's values, one parameter at a time.

    If a checkpoint will fill the weights, only the buffers have values, on every process.
    """
    offloads = accelerator.is_fsdp2 and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    buffers = dict(inner.named_buffers(remove_duplicate=False))
    inner.to_empty(device=torch.device("cpu") if offloads else accelerator.device)
    tie(inner, tied)
    if not on_main(lambda: weights is not None):
        for name, buffer in inner.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
        return
    named = {f"model.{name}": tensor for name, tensor in (weights or {}).items()}
    with torch.no_grad():
        for name, buffer in inner.named_buffers():
            if accelerator.is_main_process:
                buffer.copy_(named[name])
            values = buffer.contiguous()
            # Send bytes, because backends support few types.
            dist.broadcast(values.view(-1).view(torch.uint8), 0)
            buffer.copy_(values)
    set_model_state_dict(
        inner,
        {name: tensor for name, tensor in named.items() if name not in buffers},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False),
    )
