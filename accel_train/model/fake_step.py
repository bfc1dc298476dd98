"""A step on tensors with shapes but no storage: the peak of its memory, by kind, and FSDP2's buffers in it."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from accel_train.model.kernels import chunked_loss
from accel_train.model.tensors import FINITE, Replacements, replaced, tensors_in
from accel_train.model.training_module import checked_loss
from accel_train.model.weights import FP32_BYTES, fp32_weights, group_weights, parameter_groups
from accel_train.runtime.private import fake_tensors, watch_operators
from accel_train.task import Batch, Task

IN_FP32: dict[Any, tuple[str, ...]] = {
    functional: ("layer_norm", "group_norm", "softmax", "log_softmax", "softplus", "cosine_similarity", "interpolate"),
    torch: ("pow", "rsqrt", "exp", "log", "softmax", "log_softmax", "cumsum", "layer_norm", "group_norm"),
}
"""Functions that autocast computes in fp32 on CUDA, but not on a CPU."""
OF_FSDP2 = {
    "gathered weights": "at the peak of the step, in the type of the forward",
    "whole gradients": "at the peak of the step, in the type of the forward, until they are reduced",
    "collectives": "incoming weights, and outgoing gradients (fp32), at the peak of the step",
}
"""Kinds of FSDP2's buffers, and how they are counted."""


@dataclass(frozen=True)
class Holding:
    """Describes what a process holds of a model in a step. By default that is the whole model."""

    keeps_gradients: bool = False
    """Whether gradients exist before the last backward pass: with accumulation, and in DDP's buckets."""
    shard_size: int = 1
    """Number of processes over which FSDP2 shards the model. It gathers weights in the type of the forward."""
    reshards: bool = True
    """Whether FSDP2 frees a block's gathered weights after its forward."""
    offloads: bool = False
    """Whether shards and their gradients are in host memory."""
    split_size: int = 1
    """Number of processes that split layers (tensor parallelism)."""
    shapes: Mapping[int, torch.Size] = field(default_factory=dict)
    """Shapes of split weights, by the parameter's id."""
    gathers_output: Sequence[str] = ()
    """Names of split layers whose output is gathered."""


WHOLE = Holding()


def simulate_step(
    task: Task,
    model: nn.Module,
    batch: Batch,
    mixed_precision: str = "no",
    *,
    like_cuda: bool = False,
    holding: Holding = WHOLE,
) -> Counter[str]:
    """Return the bytes beyond parameters at the peak of a forward and backward, by kind.

    The kinds are `activations`, `logits`, `gradients`, and the keys of `OF_FSDP2`.

    Raises:
        RuntimeError: the forward depends on values (`.item()`). Fake tensors do not have values.
    """
    # fp8 counts as bf16. The float8 copies take slightly more memory than float8 saves.
    dtype = {"no": torch.float32, "fp16": torch.float16}.get(mixed_precision, torch.bfloat16)
    sharded = holding.shard_size > 1
    with fake_tensors() as fake:
        is_cast = sharded and not group_weights(model).in_fp32
        take_shapes_only(model, dtype if is_cast else None, holding)
        inputs = {name: fake.from_tensor(each) if isinstance(each, Tensor) else each for name, each in batch.items()}
        tracker = PeakTracker(vocabulary_rows(model))
        buffers = _Buffers(model, holding, tracker) if sharded else None
        with watch_operators(tracker.see), replaced(_like_a_run(like_cuda, holding.split_size)):
            with torch.autocast("cpu", dtype=dtype, enabled=mixed_precision != "no"):
                loss = checked_loss(task.loss_without_values(model.train(), inputs))
            if buffers is not None:
                buffers.begin_backward()
            loss.backward()
            if buffers is not None:
                buffers.end_backward()
        if holding.keeps_gradients and not (sharded and holding.offloads):
            held = group_weights(model).part_numel(holding.shard_size, trainable_only=True)
            tracker.peak["gradients"] += FP32_BYTES * held
    return tracker.peak


def take_shapes_only(model: nn.Module, dtype: torch.dtype | None = None, holding: Holding = WHOLE) -> None:
    """Move a model from the meta device to fake CPU tensors of the active mode, with its ties.

    `dtype` is the new element type, except of weights that FSDP2 gathers in fp32; None keeps the types.
    """
    wide = fp32_weights(model)
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                shape = holding.shapes.get(id(parameter), parameter.shape)
                cast = dtype if parameter.is_floating_point() and id(parameter) not in wide else None
                values = torch.empty(shape, device="cpu", dtype=cast or parameter.dtype)
                new = nn.Parameter(values, requires_grad=parameter.requires_grad)
                if parameter.requires_grad and holding.keeps_gradients and holding.shard_size == 1:
                    new.grad = torch.empty_like(new)
                moved[id(parameter)] = new
            setattr(module, name, moved[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    for name in holding.gathers_output:
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output: torch.cat([output] * holding.split_size, dim=-1)
        )


def vocabulary_rows(model: nn.Module) -> int | None:
    """Return the rows of the first embedding, the token embedding in transformers models; None without an embedding."""
    return next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)


class PeakTracker:
    """Sums the live storages that operators allocate. `peak` holds the largest sum, by kind."""

    def __init__(self, vocabulary_rows: int | None) -> None:
        self.vocabulary_rows = vocabulary_rows
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._kinds: weakref.WeakKeyDictionary[torch.UntypedStorage, list[str]] = weakref.WeakKeyDictionary()

    def see(self, arguments: Any, result: Any) -> None:
        """Add the storages that an operator has allocated for its result."""
        given = [tensor.untyped_storage() for tensor in tensors_in(arguments)]
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage in self._kinds or any(storage is each for each in given):
                continue
            is_wide = tensor.dim() and tensor.shape[-1] == self.vocabulary_rows
            kind = self._kinds[storage] = ["logits" if is_wide else "activations"]
            weakref.finalize(storage, self._free, kind, storage.nbytes())
            self.add(kind[0], storage.nbytes())

    def add(self, kind: str, num_bytes: int) -> None:
        """Add live bytes; negative: free them."""
        self.now[kind] += num_bytes
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def rename(self, tensor: Tensor, kind: str) -> None:
        """Count a live tensor as `kind` from now on."""
        storage = tensor.untyped_storage()
        if (cell := self._kinds.get(storage)) is not None:
            self.now[cell[0]] -= storage.nbytes()
            self.now[kind] += storage.nbytes()
            cell[0] = kind

    def _free(self, kind: list[str], num_bytes: int) -> None:
        self.now[kind[0]] -= num_bytes


@dataclass(eq=False)
class _Group:
    """Parameters that FSDP2 gathers together, and the bytes of its buffers for them."""

    parameters: list[nn.Parameter]
    gathered_bytes: int
    part_bytes: int
    """Bytes of this process's part of the gradients, in fp32."""
    reshards: bool
    """Whether the gathered weights are freed after the forward."""
    gathers_again: bool
    """Whether the backward needs the weights."""
    is_gathered: bool = False
    is_in_backward: bool = False
    is_reduced: bool = False


class _Buffers:
    """Adds FSDP2's buffers to a step on fake tensors, in the order in which torch 2.13 allocates and frees them."""

    def __init__(self, model: nn.Module, holding: Holding, tracker: PeakTracker) -> None:
        self.holding, self.tracker, size = holding, tracker, holding.shard_size
        weights, found = group_weights(model), parameter_groups(model)
        embedding, head = weights.ends
        in_order = [each for each in (embedding, *weights.blocks, head) if each.weights] + [weights.rest]
        self.groups = [
            _Group(
                parameters,
                size * held.part_bytes(size),
                FP32_BYTES * held.part_numel(size, trainable_only=True),
                reshards=holding.reshards and held is not head,
                gathers_again=held is not embedding,
            )
            for (_, parameters), held in zip(found, in_order, strict=True)
        ]
        self.root = self.groups[-1]
        self.incoming: _Group | None = None
        """Group whose gather has a buffer: the last one of the forward pass, or the next one of the backward pass."""
        self.sent_bytes = 0
        for (modules, _), group in zip(found[:-1], self.groups):
            modules[0].register_forward_pre_hook(partial(self._before, group), with_kwargs=True)
            modules[-1].register_forward_hook(partial(self._after, group))
        self._gather(self.root)
        self.is_forward = True

    def _gather(self, group: _Group) -> None:
        """Gather a group in the forward pass. Its incoming buffer stays until the next group has arrived."""
        self.tracker.add("collectives", group.gathered_bytes)
        self._drop_incoming()
        self.incoming, group.is_gathered = group, True
        self.tracker.add("gathered weights", group.gathered_bytes)

    def _drop_incoming(self) -> None:
        if self.incoming is not None:
            self.tracker.add("collectives", -self.incoming.gathered_bytes)
        self.incoming = None

    def _release(self, group: _Group) -> None:
        if group.is_gathered:
            self.tracker.add("gathered weights", -group.gathered_bytes)
        group.is_gathered = False

    def _before(self, group: _Group, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.is_forward and not group.is_gathered:
            self._gather(group)
        inputs = [each for each in tensors_in((args, kwargs)) if each.requires_grad]
        if not torch.is_grad_enabled() or not inputs:
            return None
        marked = dict(zip(map(id, inputs), _Mark.apply(partial(self._reduce, group), *inputs)))
        swap = partial(tree_map_only, Tensor, lambda each: marked.get(id(each), each))
        return swap(args), swap(kwargs)

    def _after(self, group: _Group, module: nn.Module, args: Any, output: Any) -> None:
        if not self.is_forward:
            return
        if group.reshards:
            self._release(group)
        for each in tensors_in(output):
            if each.requires_grad:
                each.register_hook(partial(self._regather, group))

    def begin_backward(self) -> None:
        """Free the last gather of the forward pass, and gather the last block again."""
        self._drop_incoming()
        self.is_forward = False
        for group in self.groups:
            kept = partial(self._keep, group)
            for parameter in group.parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(kept)
        # The root is the last group of the forward. It prefetches the group before, if it has weights itself.
        if self.root.parameters:
            self._prefetch(len(self.groups) - 1)

    def _keep(self, group: _Group, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.rename(parameter.grad, "whole gradients")

    def _prefetch(self, number: int) -> None:
        if number and (group := self.groups[number - 1]).gathers_again and not group.is_gathered:
            self.tracker.add("collectives", group.gathered_bytes)
            self.incoming = group

    def _regather(self, group: _Group, gradient: Tensor) -> None:
        """Gather a group if it is not, before its backward, and prefetch the next one."""
        if group.is_in_backward:
            return
        group.is_in_backward = True
        if group.gathers_again and not group.is_gathered:
            if self.incoming is not group:
                self.tracker.add("collectives", group.gathered_bytes)
                self.incoming = group
            group.is_gathered = True
            self.tracker.add("gathered weights", group.gathered_bytes)
            self._drop_incoming()
        self._prefetch(self.groups.index(group))

    def _reduce(self, group: _Group) -> None:
        """Send a group's gradients. The buffer stays until the next group's gradients are complete."""
        if group.is_reduced:
            return
        group.is_reduced = True
        self._release(group)
        self.tracker.add("collectives", -self.sent_bytes)
        self.sent_bytes = self.holding.shard_size * group.part_bytes
        self.tracker.add("collectives", self.sent_bytes)
        for parameter in group.parameters:
            parameter.grad = None
        self.tracker.add("gradients", group.part_bytes)
        if self.holding.keeps_gradients or self.holding.offloads:
            self.tracker.add("gradients", -group.part_bytes)

    def end_backward(self) -> None:
        """Send the gradients of the root, and of the groups whose inputs get none."""
        for group in (self.root, *self.groups):
            self._reduce(group)


class _Mark(torch.autograd.Function):
    """Calls a function when all inputs of a block have their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.call()
        return (None, *gradients)


def _like_a_run(like_cuda: bool, split_size: int) -> Replacements:
    """Return replacements of functions that make operators allocate as in a run.

    On a GPU, autocast computes `IN_FP32` in fp32, attention keeps no scores for dropout, documents are kept apart by
    another kernel, and a chunked loss does not copy 16-bit factors to fp32. Fake CPU tensors need replaced functions,
    because torch's modes do not reach the recomputation of a checkpointed block.
    """
    # The parts of a split output layer are plain tensors here.
    found: Replacements = {**FINITE, (chunked_loss, "num_parts"): lambda head: split_size}
    if hasattr(functional, "grouped_mm"):  # from torch 2.10 on
        found[functional, "grouped_mm"] = _grouped(functional.grouped_mm)
    if not like_cuda:
        return found
    # Importing transformers' masks takes a second, and only a plan simulates a GPU.
    from accel_train.model.kernels import attention, documents

    attention_of_cpu = functional.scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return attention_of_cpu(*args, **{**kwargs, "dropout_p": 0.0})

    def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        wide = torch.promote_types(a.dtype, torch.float32)
        return torch.empty(a.shape[0], b.shape[1], dtype=wide) if out is None else out

    def add_product(*_: Tensor) -> None:
        """The product is added in place."""

    found |= {(chunked_loss, "product"): multiply, (chunked_loss, "add_product"): add_product}
    found |= {(owner, "device_of"): lambda tensor: "cuda" for owner in (attention, documents)}
    found |= {(chunked_loss, "is_on_gpu"): lambda head: True, (functional, "scaled_dot_product_attention"): attend}
    return found | {(owner, name): _widened(getattr(owner, name)) for owner, names in IN_FP32.items() for name in names}


def _grouped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return experts' products that also run without values in other types than bf16: as one product of this size."""

    def multiply(a: Tensor, b: Tensor, **offsets: Tensor) -> Tensor:
        return function(a, b, **offsets) if b.dtype == torch.bfloat16 else a @ b[0]

    return multiply


def _widened(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def widen(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, widen, (args, kwargs))
        return function(*args, **kwargs)

    return compute
