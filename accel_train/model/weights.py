"""The groups into which FSDP2 cuts a model: weights that are gathered together, each divided by its rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from accel_train.model.batch_norm import has_batch_norm
from accel_train.model.compile import repeated_blocks

FP32_BYTES = 4
Each = TypeVar("Each")


@dataclass(frozen=True)
class Weight:
    """One parameter. Its rows are its first dimension. FSDP2 divides this dimension."""

    num_rows: int
    row_numel: int
    trainable: bool
    num_bytes: int = FP32_BYTES
    """Bytes per element; 2 for a frozen matrix that is kept in bf16."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return self.num_rows * self.row_numel

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


@dataclass(frozen=True)
class ModelWeights(WeightGroup):
    """All weights of a model, and the groups in which `fsdp2.shard_model` shards them."""

    root: WeightGroup
    """Weights outside the repeated blocks (embeddings, the last norm, the head). They stay gathered for a whole step.
    """
    blocks: tuple[WeightGroup, ...]
    """Groups of the repeated blocks, in the order of the forward pass; empty for a model without repeated blocks."""
    in_fp32: bool = False
    """Whether the weights are gathered in fp32 in any precision, because the model has batch norm."""

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """The root and the blocks."""
        return (self.root, *self.blocks)

    def gathered_bytes(self, compute_bytes: int) -> int:
        """Return the bytes per element of gathered weights, given the bytes per element of the compute type."""
        return FP32_BYTES if self.in_fp32 else compute_bytes

    def padding(self, shard_size: int) -> float:
        """Return the share of padding in the memory of all processes, 0 to 1. Padding exists because rows are not
        divided.
        """
        held = shard_size * self.part_numel(shard_size)
        return 1 - self.numel / held if held else 0.0


def separate_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks for FSDP2 to gather one at a time; empty if a block shares a weight.

    A shared weight is one that another module also has.
    """
    blocks = repeated_blocks(module)
    kinds = tuple({type(block) for block in blocks})
    owners: dict[int, set[int]] = {}
    inside: set[int] = set()
    for block in (part for part in module.modules() if isinstance(part, kinds)):
        inside.update(map(id, block.modules()))
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(id(block))
    for part in module.modules():
        if id(part) not in inside:
            for parameter in part.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(id(module))
    return [] if any(len(each) > 1 for each in owners.values()) else blocks


def group_weights(model: nn.Module, shapes: Mapping[int, Sequence[int]] | None = None) -> ModelWeights:
    """Return the groups of `fsdp2.shard_model`: each repeated block, and the rest. Tied weights count once.

    `shapes` gives, by a parameter's id, the shape that tensor parallelism leaves for FSDP2 to shard.
    """
    kinds = tuple({type(block) for block in separate_blocks(model)})
    seen: set[int] = set()
    parts = shapes or {}

    def group(module: nn.Module) -> WeightGroup:
        new = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        held = [(tuple(parts.get(id(each), each.shape)) or (1,), each) for each in new]
        return WeightGroup(
            tuple(
                Weight(rows, math.prod(rest), each.requires_grad, each.element_size()) for (rows, *rest), each in held
            )
        )

    blocks = [block for module in model.modules() if isinstance(module, kinds) and (block := group(module)).weights]
    root = group(model)
    every = root.weights + tuple(weight for block in blocks for weight in block.weights)
    return ModelWeights(every, root, tuple(blocks), in_fp32=has_batch_norm(model))


def in_rounds(weights: Sequence[Each], numels: Sequence[int], size: int) -> list[list[Each]]:
    """Return the weights in rounds of at most `size`, largest first. Each round has one weight of similar size per
    process.
    """
    order = sorted(range(len(weights)), key=lambda number: -numels[number])
    return [[weights[number] for number in order[first : first + size]] for first in range(0, len(order), size)]


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
    kinds = tuple({type(block) for block in repeated_blocks(model)})
    found: dict[int, nn.Parameter] = {}
    for block in [module for module in model.modules() if isinstance(module, kinds)] or _below_the_head(model):
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 2 and parameter.requires_grad and not isinstance(module, nn.Embedding):
                    found[id(parameter)] = parameter
    if not found:
        raise ValueError(
            "optimizer.name=muon: the model has no trained matrix between its embeddings and its head; use adamw"
        )
    return list(found.values())


def _below_the_head(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model without its head.

    The head is the last linear layer, or everything that a transformers model adds to its base model.
    """
    base = getattr(model, "base_model", model)
    leaves = [module for module in base.modules() if not list(module.children())]
    head = next((module for module in reversed(leaves) if base is model and isinstance(module, nn.Linear)), None)
    return [module for module in leaves if module is not head]
