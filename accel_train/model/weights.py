"""The groups into which FSDP2 cuts a model: weights that are gathered together, each divided by its rows."""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from accel_train.model.batch_norm import has_batch_norm
from accel_train.model.compile import blocks_in_order, repeated_blocks
from accel_train.model.kernels.chunked_loss import has_plain_head
from accel_train.model.tensors import unpacked_numel

FP32_BYTES = 4
STAGE_NUMEL = 2**24
"""Elements of the matrices that a process makes orthogonal at once: 64 MiB in fp32."""
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
"""Layers whose weights autocast rounds to 16 bits under every strategy, in addition to transformers' Conv1D."""
Each = TypeVar("Each")


@dataclass(frozen=True)
class Weight:
    """One parameter. Its rows are its first dimension. FSDP2 divides this dimension."""

    num_rows: int
    row_numel: int
    trainable: bool
    num_bytes: int = FP32_BYTES
    """Bytes per element; 2 for a frozen matrix that is kept in bf16, 1 for nf4."""
    weights_per_element: int = 1
    """Weights that an element stands for; 2 for nf4, 0 for the scales of nf4."""
    in_fp32: bool = False
    """Whether FSDP2 gathers the weight in fp32 in any precision."""

    @property
    def numel(self) -> int:
        """Number of weights in the whole parameter."""
        return self.num_rows * self.row_numel * self.weights_per_element

    def gathered_bytes(self, compute_bytes: int) -> int:
        """Return the bytes per gathered element, given the bytes of the compute type. nf4 stays bytes."""
        return self.num_bytes if self.num_bytes == 1 or self.in_fp32 else compute_bytes

    def part_numel(self, shard_size: int) -> int:
        """Return the elements of the largest part: whole rows, with padding. Every process reserves memory for this
        size.
        """
        return -(-self.num_rows // shard_size) * self.row_numel


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are gathered, and whose gradients are reduced, in one collective."""

    weights: tuple[Weight, ...]

    @property
    def numel(self) -> int:
        """Number of elements of all weights."""
        return sum(weight.numel for weight in self.weights)

    @property
    def trainable_numel(self) -> int:
        """Number of elements that get gradients."""
        return sum(weight.numel for weight in self.weights if weight.trainable)

    def part_numel(self, shard_size: int, *, trainable_only: bool = False) -> int:
        """Return the elements of one process's parts, with padding."""
        return sum(each.part_numel(shard_size) for each in self.weights if each.trainable or not trainable_only)

    def part_bytes(self, shard_size: int) -> int:
        """Return the bytes of one process's parts, with padding."""
        return sum(each.num_bytes * each.part_numel(shard_size) for each in self.weights)

    def gathered_part_bytes(self, shard_size: int, compute_bytes: int) -> int:
        """Return the bytes that one process sends when the weights are gathered in the compute type, with padding."""
        return sum(each.gathered_bytes(compute_bytes) * each.part_numel(shard_size) for each in self.weights)


@dataclass(frozen=True)
class ModelWeights(WeightGroup):
    """All weights of a model, and the groups in which `fsdp2.shard_model` shards them."""

    rest: WeightGroup
    """FSDP2's root group: the weights outside the repeated blocks and the ends. It stays gathered for a whole step."""
    blocks: tuple[WeightGroup, ...]
    """Groups of the repeated blocks, in the order of the forward pass; empty for a model without repeated blocks."""
    ends: tuple[WeightGroup, WeightGroup]
    """FSDP2's groups of the input embedding, and of the last norm with the head (`separate_ends`); empty if `rest` has
    them.
    """
    in_fp32: bool = False
    """Whether all weights are gathered in fp32 in any precision: a model with batch norm, before torch 2.15."""
    num_last: int = 0
    """Number of the root's weights that follow the blocks. Their gradients come first."""

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """The root and the blocks."""
        return (self.root, *self.blocks)

    @property
    def root(self) -> WeightGroup:
        """Weights outside the repeated blocks (embeddings, the last norm, the head)."""
        embedding, head = self.ends
        return WeightGroup(embedding.weights + self.rest.weights + head.weights)

    def gathered_bytes(self, compute_bytes: int) -> int:
        """Return the bytes per element of gathered weights, given the bytes per element of the compute type."""
        return FP32_BYTES if self.in_fp32 else compute_bytes

    def padding(self, shard_size: int) -> float:
        """Return the share of padding in the memory of all processes, 0 to 1. Padding exists because rows are not
        divided.
        """
        held = shard_size * self.part_numel(shard_size)
        elements = sum(each.num_rows * each.row_numel for each in self.weights)
        return 1 - elements / held if held else 0.0


def separate_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks for FSDP2 to gather one at a time; empty if a block shares a weight.

    A shared weight is one that another module also has.
    """
    blocks = repeated_blocks(module)
    kinds = tuple({type(block) for block in blocks})
    owners: dict[int, set[int]] = defaultdict(set)
    inside: set[int] = set()
    for block in (part for part in module.modules() if isinstance(part, kinds)):
        inside.update(map(id, block.modules()))
        for parameter in block.parameters():
            owners[id(parameter)].add(id(block))
    for part in module.modules():
        if id(part) not in inside:
            for parameter in part.parameters(recurse=False):
                owners[id(parameter)].add(id(module))
    return [] if any(len(each) > 1 for each in owners.values()) else blocks


class Ends(NamedTuple):
    """The modules at both ends of a language model that FSDP2 gathers apart from the root."""

    embedding: nn.Embedding
    norm: nn.Module
    head: nn.Linear


def separate_ends(model: nn.Module) -> Ends | None:
    """Return the ends of a model whose weights no other module has or uses; None if the root keeps them.

    Only models with a plain head qualify: they use these weights in these modules only, and call the norm right before
    the head. The blocks must be gathered one at a time. Before torch 2.13, FSDP2 does not finish a group if a forward
    called only some of its modules.
    """
    if torch.__version__ < "2.13.0a0" or not has_plain_head(model) or not separate_blocks(model):
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    norms = [each for each in model.base_model.children() if "Norm" in type(each).__name__]  # type: ignore[union-attr]
    # Adapters replace a layer. Renormalizing would write to the gathered copy of the weights.
    if not norms or type(head) is not nn.Linear or type(embedding) is not nn.Embedding or embedding.max_norm:
        return None
    ends = Ends(embedding, norms[-1], head)
    num_names = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    return None if any(num_names[id(each)] > 1 for module in ends for each in module.parameters()) else ends


def parameter_groups(model: nn.Module) -> list[tuple[Sequence[nn.Module], list[nn.Parameter]]]:
    """Return the modules that fsdp2 gathers together, with their parameters, in the order of the forward pass.

    These are the embedding, the blocks, and the last norm with the head. The model itself comes last, with the other
    parameters. Tied parameters count once.
    """
    kinds, ends = tuple({type(block) for block in separate_blocks(model)}), separate_ends(model)
    modules: list[Sequence[nn.Module]] = [[each] for each in model.modules() if isinstance(each, kinds)]
    if ends is not None:
        modules = [[ends.embedding], *modules, [ends.norm, ends.head]]
    seen: set[int] = set()
    found = []
    for together in (*modules, [model]):
        new = [each for module in together for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, new))
        if new or together == [model]:
            found.append((together, new))
    return found


def group_weights(model: nn.Module, shapes: Mapping[int, Sequence[int]] | None = None) -> ModelWeights:
    """Return the weights of `parameter_groups`.

    `shapes` gives, by a parameter's id, the shape that tensor parallelism leaves for FSDP2 to shard.
    """
    parts, wide = shapes or {}, fp32_weights(model)

    def weight_of(each: nn.Parameter) -> Weight:
        rows, *others = parts.get(id(each), each.shape) or (1,)
        per_element = 1 if each.numel() == 0 else unpacked_numel(each) // each.numel()
        return Weight(rows, math.prod(others), each.requires_grad, each.element_size(), per_element, id(each) in wide)

    def group(parameters: Sequence[nn.Parameter]) -> WeightGroup:
        return WeightGroup(tuple(map(weight_of, parameters)))

    found, ends = [parameters for _, parameters in parameter_groups(model)], separate_ends(model)
    first, last = ([], []) if ends is None else (found[0], found[-2])
    in_blocks = found[:-1] if ends is None else found[1:-2]
    rest, embedding, head, *blocks = map(group, (found[-1], first, last, *in_blocks))
    place = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    last_of_blocks = max((place[id(each)] for parameters in in_blocks for each in parameters), default=-1)
    num_last = sum(place[id(each)] > last_of_blocks for each in (*found[-1], *last))
    every = tuple(weight for each in (embedding, rest, head, *blocks) for weight in each.weights)
    in_fp32 = has_batch_norm(model) and not gathers_two_types()
    return ModelWeights(every, rest, tuple(blocks), (embedding, head), in_fp32, num_last if blocks else 0)


def gathers_two_types() -> bool:
    """Return whether FSDP2 can gather some weights of a group in 16 bits and others in fp32 (torch 2.15 or newer)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return "param_dtype_override_fn" in signature(MixedPrecisionPolicy).parameters


def fp32_weights(model: nn.Module) -> set[int]:
    """Return the ids of the fp32 weights that FSDP2 gathers in fp32 in mixed precision; empty before torch 2.15.

    These are norms, embeddings, routers, and single vectors, which compute in fp32 under DDP too. Autocast rounds the
    others in any case: the weights of linear layers and convolutions, and of experts (three dimensions or more).
    """
    if not gathers_two_types():
        return set()
    return {
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dtype == torch.float32 and not _is_rounded(module, parameter)
    }


def _is_rounded(module: nn.Module, parameter: nn.Parameter) -> bool:
    name = type(module).__name__
    if "Router" in name or "Norm" in name:
        return False
    # By name, because a run without a model of transformers does not import them.
    is_product = isinstance(module, _PRODUCTS) or any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return is_product or (parameter.dim() > 2 and not isinstance(module, nn.Embedding))


def in_shares(matrices: Sequence[Each], shapes: Sequence[Sequence[int]], size: int) -> list[list[list[Each]]]:
    """Return matrices in stages: in each, the matrices that each of `size` processes makes orthogonal at once.

    They are dealt out in rounds, costliest first, so that each process has one of similar cost from each round. A stage
    has as many rounds as `STAGE_NUMEL` allows, and at least one.
    """
    numels = [math.prod(shape) for shape in shapes]
    order = sorted(range(len(matrices)), key=lambda number: -numels[number] * min(shapes[number]))
    stages, held = list[list[list[Each]]](), STAGE_NUMEL
    for first in range(0, len(order), size):
        held += numels[order[first]]
        if held > STAGE_NUMEL:
            stages.append([[] for _ in range(size)])
            held = numels[order[first]]
        for share, number in zip(stages[-1], order[first:], strict=False):
            share.append(matrices[number])
    return stages


def narrow_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that become bf16 in `model/`: fp32 ones that transformers may convert."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    parameters = {name: each for name, each in model.named_parameters() if each.dtype == torch.float32}
    return {name for name in parameters if not any(fnmatchcase(name, f"*{pattern}*") for pattern in kept)}


def in_bf16(model: nn.Module) -> nn.Module:
    """Return a copy in host memory whose parameters are bf16, except those that transformers keeps in fp32.

    Values that are bf16 already are shared with the model.
    """
    narrow = narrow_names(model)
    # `deepcopy` takes objects that are already copied from its memo.
    memo: dict[int, Any] = {id(each): each.detach().cpu() for each in model.buffers()}
    for name, each in model.named_parameters():
        values = each.detach().to("cpu", torch.bfloat16 if name in narrow else each.dtype)
        memo[id(each)] = nn.Parameter(values, each.requires_grad)
    return copy.deepcopy(model, memo)


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained embedding weights, including tied output weights."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return [weight for table in tables for weight in table.parameters(recurse=False) if weight.requires_grad]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained 2-D weights in the repeated blocks, without embeddings. Muon orthogonalizes their updates.

    Without repeated blocks, return all trained 2-D weights between the embeddings and the head.

    Raises:
        ValueError: the model has no such weight.
    """
    kinds = tuple({type(block) for block in blocks_in_order(model)})
    blocks = [module for module in model.modules() if isinstance(module, kinds)] or _below_the_head(model)
    # A dict, because blocks may be nested or share weights.
    found = dict.fromkeys(
        parameter
        for block in blocks
        for module in block.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2 and parameter.requires_grad and not isinstance(module, nn.Embedding)
    )
    if not found:
        raise ValueError(
            "optimizer.name=muon: the model has no trained matrix between its embeddings and its head; use adamw"
        )
    return list(found)


def _below_the_head(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model without its head.

    The head is the last linear layer, or everything that a transformers model adds to its base model.
    """
    base = getattr(model, "base_model", model)
    leaves = [module for module in base.modules() if not list(module.children())]
    head = next((module for module in reversed(leaves) if base is model and isinstance(module, nn.Linear)), None)
    return [module for module in leaves if module is not head]


def whole_numel(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of elements of parameters, including other processes' ZeRO stage 3 shares.

    4-bit weights count unpacked.
    """
    return sum(int(getattr(parameter, "ds_numel", unpacked_numel(parameter))) for parameter in parameters)
