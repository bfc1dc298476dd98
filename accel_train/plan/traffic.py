"""Traffic between processes in a step, in bytes and, over given links, in seconds.

In an all-gather or reduce-scatter of S bytes among n processes, each process sends S (n - 1) / n. In an all-reduce it
sends twice as much. Rings do so, and trees do not send less. In an all-to-all, S is the size of each process's tensor.
The time is these bytes over the slowest link of the ring, plus a latency for each hop.

Groups split layers (tensor parallelism) or sequences (sequence parallelism), per micro-batch. Layers are counted by the
styles of the model's plan, as transformers applies them. A `colwise` layer sums its input's gradients over the group,
and a `rowwise` layer sums its output. Sequences are counted by the calls of DeepSpeed's UlyssesSPAttentionHF. Queries,
keys and values go from sequence slices to head slices, and the attention output goes back. These are four all-to-alls
per layer, and four more for the gradients. None of this traffic overlaps with computing.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from accel_train.core.hardware import GB, LINK_EFFICIENCY, Gpu, Interconnect
from accel_train.model.batch_norm import is_batch_norm, keeps_statistics
from accel_train.model.compile import repeated_blocks
from accel_train.model.memory_estimate import MemoryPart
from accel_train.model.pretrained import value_of
from accel_train.model.weights import ModelWeights, Weight
from accel_train.parallel.tensor_parallel import styles_of
from accel_train.plan.place import Layout

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast"]
Phase = Literal["forward", "backward"]
# NVIDIA/nccl, src/graph/tuning.cc: baseLat and hwLat of the ring and the tree, protocol Simple, in microseconds.
BASE_LATENCY_SECONDS, LINK_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS = 8.4e-6, 3.4e-6, 14.0e-6
TREE_LINK_LATENCY_SECONDS = 4.0e-6
_FORWARD: dict[str, Kind] = {
    "rowwise": "all-reduce",
    "rowwise_split_input": "all-reduce",
    "embedding_rowwise": "all-reduce",
    "colwise_gather_output": "all-gather",
}
_BACKWARD: dict[str, Kind] = {
    "colwise": "all-reduce",
    "colwise_gather_output": "all-reduce",
    "rowwise_split_input": "all-gather",
}
_Exchange = tuple[Kind, int, Phase]
"""One collective: its kind, the elements per position, and its pass."""


@dataclass(frozen=True)
class Ring:
    """The processes of a collective, `stride` ranks apart. All ranks belong to rings of the same shape."""

    size: int
    stride: int
    gpus_per_node: int

    @cached_property
    def _members(self) -> list[Counter[int]]:
        """Number of members on each node, for each ring up to where the pattern of rings and nodes repeats."""
        span = self.size * self.stride
        firsts = range(0, math.lcm(span, self.gpus_per_node), span)
        rings = [first + offset for first in firsts for offset in range(self.stride)]
        return [Counter((ring + n * self.stride) // self.gpus_per_node for n in range(self.size)) for ring in rings]

    @cached_property
    def size_in_node(self) -> int:
        """Maximum number of members on one node."""
        return max(max(nodes.values()) for nodes in self._members)

    @cached_property
    def num_nodes(self) -> int:
        """Maximum number of nodes that a ring spans."""
        return max(map(len, self._members))

    def leaves_node(self, network: Interconnect) -> float:
        """Return the nominal rate of the slowest ring between nodes, in bytes per second.

        Rings that span several nodes share the network of each node.
        """
        reaching = [nodes for nodes in self._members if len(nodes) > 1]
        sharing = Counter(node for nodes in reaching for node in nodes)
        if network.per == "GPU":
            return network.gb_per_second * GB * min(min(nodes.values()) for nodes in reaching)
        return network.gb_per_second * GB / max(sharing.values())

    def seconds(self, kind: Kind, num_bytes: float, gpu: Gpu, network: Interconnect) -> float:
        """Return the seconds of a collective, by NCCL's cost model.

        `num_bytes` is the size of the whole tensor, such as the result of an all-gather.
        """
        if self.size == 1:
            return 0.0
        if kind == "all-to-all" and self.num_nodes > 1:
            return self._exchange_seconds(num_bytes, gpu, network)
        rounds = 2 if kind == "all-reduce" else 1
        rate = gpu.link_gb_per_second * GB
        if self.num_nodes > 1:
            rate = self.leaves_node(network) if self.size_in_node == 1 else min(rate, self.leaves_node(network))
        hops_between, hops = rounds * (self.num_nodes - 1), rounds * (self.size - 1)
        latency = hops_between * NETWORK_LATENCY_SECONDS + (hops - hops_between) * LINK_LATENCY_SECONDS
        if kind == "all-reduce":
            tree = (self.size_in_node - 1) * TREE_LINK_LATENCY_SECONDS
            tree += math.ceil(math.log2(self.num_nodes)) * NETWORK_LATENCY_SECONDS
            latency = min(latency, 2 * tree)
        return sent_bytes(kind, num_bytes, self.size) / (rate * LINK_EFFICIENCY) + BASE_LATENCY_SECONDS + latency

    def _exchange_seconds(self, num_bytes: float, gpu: Gpu, network: Interconnect) -> float:
        """Return the seconds of an all-to-all over several nodes.

        Traffic between nodes shares their network, and overlaps with traffic inside a node.
        """
        here = self.size_in_node
        between = here * num_bytes * (self.size - here) / self.size / self.leaves_node(network)
        within = num_bytes * (here - 1) / self.size / (gpu.link_gb_per_second * GB)
        return max(between, within) / LINK_EFFICIENCY + BASE_LATENCY_SECONDS + NETWORK_LATENCY_SECONDS


def sent_bytes(kind: Kind, num_bytes: float, size: int) -> float:
    """Return the bytes that each of `size` processes sends in a collective of `num_bytes`."""
    return (2 if kind == "all-reduce" else 1) * num_bytes * (size - 1) / size


@dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    kind: Kind
    num_bytes: int
    """Bytes of the whole tensor: the result of an all-gather, or the input of a reduction."""
    ring: Ring
    phase: Phase
    """Pass that the collective belongs to. Every micro-batch repeats the collective unless `per_step`."""
    per_step: bool
    """Whether the collective runs once per step, with the last micro-batch, instead of once per micro-batch."""
    is_hidden: bool
    """Whether computing overlaps with the collective.

    False for the first gather, and for the last reduction of a backward pass.
    """
    purpose: str


@dataclass(frozen=True)
class Traffic:
    """The bytes that each process sends in a step in one kind of collective."""

    kind: Kind
    purpose: str
    times: int
    payload_bytes: int
    """Bytes of the collectives' whole tensors, added up."""
    sent_bytes: float


def traffic_of(found: Sequence[Collective], num_micro_batches: int) -> tuple[Traffic, ...]:
    """Return the traffic of a step: its collectives, added up by kind and purpose."""
    sums: dict[tuple[Kind, str], list[float]] = {}
    for each in found:
        times = 1 if each.per_step else num_micro_batches
        added = (times, times * each.num_bytes, times * sent_bytes(each.kind, each.num_bytes, each.ring.size))
        sums[each.kind, each.purpose] = [a + b for a, b in zip(sums.get((each.kind, each.purpose), [0, 0, 0]), added)]
    return tuple(
        Traffic(kind, purpose, round(times), round(payload), sent)
        for (kind, purpose), (times, payload, sent) in sums.items()
    )


def backward_order(weights: ModelWeights) -> list[Weight]:
    """Return the trainable weights in the order in which a backward pass makes their gradients."""
    root, num_first = weights.root.weights, len(weights.root.weights) - weights.num_last
    blocks = (block.weights for block in reversed(weights.blocks))
    groups = (root[num_first:], *blocks, root[:num_first])
    return [each for group in groups for each in reversed(group) if each.trainable]


def neighbour_collectives(
    model: nn.Module, layout: Layout, num_positions: int, compute_bytes: int, *, checkpointed: bool, chunked: bool
) -> tuple[Collective, ...]:
    """Return the collectives of split layers or sequences in one micro-batch.

    A process has `num_positions` tokens and elements of `compute_bytes`. `checkpointed` blocks repeat their forward
    pass. A `chunked` loss does not gather logits. Left out are the gradients of the few weights that all processes hold
    and sum. Also left out are positions, a few bytes per layer that DeepSpeed gathers.

    Raises:
        ValueError: as for `tensor_parallel.styles_of`.
    """
    exchanges: Iterable[_Exchange] = ()
    size, purpose = layout.tp_size, "activations of split layers"
    if layout.tp_size > 1:
        exchanges = _of_layers(model, size, checkpointed, of_sums=4 // compute_bytes if chunked else None)
    elif layout.sp_size > 1:
        size, purpose = layout.sp_size, "heads for slices of the sequence (parallel.sp_size)"
        exchanges = _of_sequences(model, size, checkpointed)
    ring = Ring(size, 1, layout.gpus_per_node)
    return tuple(
        Collective(kind, compute_bytes * num_positions * width, ring, phase, False, False, purpose)
        for kind, width, phase in exchanges
    )


def buffer_collectives(model: nn.Module, layout: Layout) -> tuple[Collective, ...]:
    """Return the broadcasts of a model with batch norm: each step begins with the buffers of the first process.

    DDP sends all buffers, one type at a time. The other strategies send the statistics of norms.
    """
    is_ddp = layout.strategy.name == "ddp" and any(map(is_batch_norm, model.modules()))
    norms = [model] if is_ddp else [each for each in model.modules() if keeps_statistics(each)]
    sizes: Counter[torch.dtype] = Counter()
    for buffer in (each for norm in norms for each in norm.buffers()) if layout.world_size > 1 else ():
        sizes[buffer.dtype] += buffer.nbytes
    ring = Ring(layout.world_size, 1, layout.gpus_per_node)
    return tuple(
        Collective("broadcast", size, ring, "forward", True, False, f"buffers, {str(dtype).removeprefix('torch.')}")
        for dtype, size in sizes.items()
    )


def _of_layers(model: Any, size: int, checkpointed: bool, of_sums: int | None) -> Iterator[_Exchange]:
    """Yield the exchanges of split layers.

    `of_sums` is the size of an fp32 sum of a chunked loss, in elements of the compute dtype. None means that logits are
    gathered.
    """
    chunked_head = None if of_sums is None else model.get_output_embeddings()
    in_blocks = {id(part) for block in repeated_blocks(model) for part in block.modules()}
    modules = dict(model.named_modules())
    for name, style in styles_of(model, size).items():
        if (module := modules.get(name)) is None:
            continue
        is_embedding = isinstance(module, nn.Embedding)
        width_in = 0 if is_embedding else int(getattr(module, "in_features", 0))
        width_out = int(getattr(module, "embedding_dim" if is_embedding else "out_features", 0))
        if module is chunked_head and of_sums is not None:
            # The largest logit of a position.
            yield "all-reduce", of_sums, "forward"
            # Its sum of exponentials, the logit of its label, and the mean.
            yield "all-reduce", 3 * of_sums, "forward"
            # The chunked loss computes the gradients of its input in the forward pass.
            yield "all-reduce", width_in * of_sums, "forward"
            continue
        if (kind := _FORWARD.get(style)) is not None:
            yield kind, width_out, "forward"
            if checkpointed and id(module) in in_blocks:
                yield kind, width_out, "backward"
        if (kind := _BACKWARD.get(style)) is not None:
            yield kind, width_in, "backward"


def _of_sequences(model: Any, size: int, checkpointed: bool) -> Iterator[_Exchange]:
    phases: tuple[Phase, ...] = ("forward", "backward", "backward") if checkpointed else ("forward", "backward")
    for phase in phases:
        for _ in range(model.config.get_text_config().num_hidden_layers):
            for width in _head_widths(model, size):
                yield "all-to-all", width, phase


def with_exchange(
    parts: Sequence[MemoryPart], model: Any, layout: Layout, num_positions: int, compute_bytes: int
) -> list[MemoryPart]:
    """Return the memory parts of a process with its slices only, and the buffers of one layer's exchange."""
    if layout.sp_size == 1:
        return [*parts]
    size = sum(_head_widths(model, layout.sp_size)[:3]) * compute_bytes * num_positions
    how = f"outgoing and incoming queries, keys, and values of a layer, {compute_bytes} bytes each"
    return [*parts, MemoryPart("exchange", 2 * size, "estimate", how)]


def _head_widths(model: Any, size: int) -> tuple[int, int, int, int]:
    """Return the elements per position of queries, keys, values, and attention output.

    Keys and values are repeated if there are fewer key heads than processes.
    """
    text = model.config.get_text_config()
    heads = int(text.num_attention_heads)
    key_heads = int(value_of(text, "num_key_value_heads") or heads)
    head_size = int(value_of(text, "head_dim") or text.hidden_size // heads)
    of_keys = max(key_heads, size) * head_size
    return heads * head_size, of_keys, of_keys, heads * head_size
