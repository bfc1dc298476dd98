"""The groups into which FSDP2 cuts a model: groups that are gathered together, and each weight of a group by its rows."""

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
    """One parameter: rows are its first dimension, which is what FSDP2 divides."""

    num_rows: int
    row_numel: int
    trainable: bool
    num_bytes: int = FP32_BYTES
    """Bytes of an element; 2 where a frozen matrix is kept in bf16."""

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return self.num_rows * self.row_numel

    def part_numel(self, shard_size: int) -> int:
        """Elements of the largest part, which is also what every process keeps room for: whole rows, padded."""
        return -(-self.num_rows // shard_size) * self.row_numel


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are gathered, and whose gradients are reduced, in one collective."""

    weights: tuple[Weight, ...]

    @property
    def numel(self) -> int:
        """Elements of all weights."""
        return sum(weight.numel for weight in self.weights)

    @property
    def trainable_numel(self) -> int:
        """Those that gradients are made for."""
        return sum(weight.numel for weight in self.weights if weight.trainable)

    def part_numel(self, shard_size: int, *, trainable_only: bool = False) -> int:
        """Elements of one process's parts, padded."""
        return sum(each.part_numel(shard_size) for each in self.weights if each.trainable or not trainable_only)

    def part_bytes(self, shard_size: int) -> int:
        """Bytes of one process's parts, padded."""
        return sum(each.num_bytes * each.part_numel(shard_size) for each in self.weights)


@dataclass(frozen=True)
class ModelWeights(WeightGroup):
    """All weights of a model, and how sharding groups them (`fsdp2.shard_model`)."""

    root: WeightGroup
    """Weights of no repeated block (embeddings, the last norm, the head): gathered for the whole of a step."""
    blocks: tuple[WeightGroup, ...]
    """Blocks in the order of the forward pass; empty where the model repeats none."""
    in_fp32: bool = False
    """It has batch norm: its weights are gathered in fp32 in any precision."""

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """The root and the blocks."""
        return (self.root, *self.blocks)

    def gathered_bytes(self, compute_bytes: int) -> int:
        """Return the bytes of an element of gathered weights, where one that is computed with has `compute_bytes`."""
        return FP32_BYTES if self.in_fp32 else compute_bytes

    def padding(self, shard_size: int) -> float:
        """Return the share of padding in what the processes hold together, 0 to 1: rows are not divided."""
        held = shard_size * self.part_numel(shard_size)
        return 1 - self.numel / held if held else 0.0


def separate_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks, which FSDP2 gathers one at a time; none where one has a weight that is another module's as well."""
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

    `shapes`, by the id of a parameter, are of what tensor parallelism leaves of it to FSDP2.
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
    """Return the weights, the largest first, in rounds of at most `size`: one for each process, about as large as the others."""
    order = sorted(range(len(weights)), key=lambda number: -numels[number])
    return [[weights[number] for number in order[first : first + size]] for first in range(0, len(order), size)]


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights of embeddings, tied output weights included."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return [weight for table in tables for weight in table.parameters(recurse=False) if weight.requires_grad]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained weights with two dimensions in the repeated blocks, embeddings left out: what Muon makes orthogonal.

    Without repeated blocks (one layer) all of them between the embeddings and the head.

    Raises:
        ValueError: the model has none.
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
    """Return the leaves of a model that are not its head: the last linear layer, or what a model of transformers adds to its base."""
    base = getattr(model, "base_model", model)
    leaves = [module for module in base.modules() if not list(module.children())]
    head = next((module for module in reversed(leaves) if base is model and isinstance(module, nn.Linear)), None)
    return [module for module in leaves if module is not head]
