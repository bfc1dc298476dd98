"""How FSDP2 cuts a model: into groups that are gathered together, and each weight of a group by its rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from accel_train.compiling import repeated_blocks
from accel_train.running_statistics import has_batch_norm

FP32_BYTES = 4


@dataclass(frozen=True)
class Weight:
    """One parameter: rows are its first dimension, which is what FSDP2 divides."""

    num_rows: int
    row_numel: int
    trainable: bool

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

    def part_numel(self, shard_size: int, *, trainable_only: bool = False) -> int:
        """Elements of one process's parts, padded."""
        return sum(each.part_numel(shard_size) for each in self.weights if each.trainable or not trainable_only)


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights, as sharding groups them (`sharding.shard_model`)."""

    root: WeightGroup
    """What belongs to no repeated block (embeddings, the last norm, the head): gathered for the whole of a step."""
    blocks: tuple[WeightGroup, ...]
    """In the order of the forward pass; empty where the model repeats none."""
    in_fp32: bool = False
    """It has batch norm: its weights are gathered in fp32 in any precision."""

    @property
    def groups(self) -> tuple[WeightGroup, ...]:
        """The root and the blocks."""
        return (self.root, *self.blocks)

    @property
    def numel(self) -> int:
        """All parameters."""
        return sum(group.numel for group in self.groups)

    @property
    def trainable_numel(self) -> int:
        """Those that gradients are made for."""
        return sum(weight.numel for group in self.groups for weight in group.weights if weight.trainable)

    def part_numel(self, shard_size: int, *, trainable_only: bool = False) -> int:
        """Elements that one process holds, with the padding."""
        return sum(group.part_numel(shard_size, trainable_only=trainable_only) for group in self.groups)

    def gathered_bytes(self, compute_bytes: int) -> int:
        """Of one element of gathered weights, where those that are computed with have `compute_bytes`."""
        return FP32_BYTES if self.in_fp32 else compute_bytes

    def padding(self, shard_size: int) -> float:
        """What of all that the processes hold together is padding, 0 to 1: rows are not divided."""
        held = shard_size * self.part_numel(shard_size)
        return 1 - self.numel / held if held else 0.0


def group_weights(model: nn.Module, shapes: Mapping[int, Sequence[int]] | None = None) -> ModelWeights:
    """The groups of `sharding.shard_model`: each module of the repeated block's class, and the rest. Tied weights count once.

    `shapes`, by the id of a parameter, are of what tensor parallelism leaves of it to FSDP2.
    """
    kinds = tuple({type(block) for block in repeated_blocks(model)})
    seen: set[int] = set()
    parts = shapes or {}
    blocks = [_group(list(module.parameters()), seen, parts) for module in model.modules() if isinstance(module, kinds)]
    return ModelWeights(
        _group(list(model.parameters()), seen, parts),
        tuple(block for block in blocks if block.weights),
        in_fp32=has_batch_norm(model),
    )


def _group(parameters: Sequence[nn.Parameter], seen: set[int], shapes: Mapping[int, Sequence[int]]) -> WeightGroup:
    new = [parameter for parameter in parameters if id(parameter) not in seen]
    seen.update(map(id, new))
    return WeightGroup(tuple(_weight(parameter, shapes.get(id(parameter), parameter.shape)) for parameter in new))


def _weight(parameter: nn.Parameter, part: Sequence[int]) -> Weight:
    shape = tuple(part) or (1,)
    return Weight(shape[0], math.prod(shape[1:]), parameter.requires_grad)
