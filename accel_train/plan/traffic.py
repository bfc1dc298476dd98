"""What the processes send each other in a step, in bytes and, over given links, in seconds.

A collective of S bytes among n processes makes each of them send S (n - 1) / n (all-gather, reduce-scatter), or twice that
(all-reduce), as rings do; trees send no less. In an all-to-all S is what each of them holds. Time is that over the slowest link of
the ring, plus a latency for each hop.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from accel_train.recipe import Parallel
from accel_train.scale.hardware import GB, LINK_EFFICIENCY, Gpu, Interconnect
from accel_train.scale.layout import Layout
from accel_train.scale.weights import FP32_BYTES, ModelWeights, WeightGroup

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Phase = Literal["forward", "backward"]
BUCKET_BYTES = 25 * 2**20
"""DDP's buckets (bucket_cap_mb): one is full with the weight that makes it as large, or larger."""
# NVIDIA/nccl, src/graph/tuning.cc: baseLat and hwLat of the ring and the tree, protocol Simple, in microseconds.
BASE_LATENCY_SECONDS, LINK_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS = 8.4e-6, 3.4e-6, 14.0e-6
TREE_LINK_LATENCY_SECONDS = 4.0e-6


@dataclass(frozen=True)
class Ring:
    """Processes that take part in a collective, each `stride` ranks after the one before; all ranks are in rings like it."""

    size: int
    stride: int
    gpus_per_node: int

    @cached_property
    def _members(self) -> list[Counter[int]]:
        """For each ring, until nodes and rings begin together again: how many of its members each node has."""
        span = self.size * self.stride
        firsts = range(0, math.lcm(span, self.gpus_per_node), span)
        rings = [first + offset for first in firsts for offset in range(self.stride)]
        return [Counter((ring + n * self.stride) // self.gpus_per_node for n in range(self.size)) for ring in rings]

    @cached_property
    def size_in_node(self) -> int:
        """Members on one node, at most."""
        return max(max(nodes.values()) for nodes in self._members)

    @cached_property
    def num_nodes(self) -> int:
        """Nodes that it reaches over, at most."""
        return max(len(nodes) for nodes in self._members)

    def leaves_node(self, network: Interconnect) -> float:
        """Bytes a second that a ring of several nodes sends from one to the next, nominal: the slowest of them, as others that
        reach further than a node share its network."""
        reaching = [nodes for nodes in self._members if len(nodes) > 1]
        sharing = Counter(node for nodes in reaching for node in nodes)
        if network.per == "GPU":
            return network.gb_per_second * GB * min(min(nodes.values()) for nodes in reaching)
        return network.gb_per_second * GB / max(sharing.values())

    def seconds(self, kind: Kind, num_bytes: float, gpu: Gpu, network: Interconnect) -> float:
        """One collective of `num_bytes` in all (what an all-gather ends with, a reduction begins with): NCCL's own model."""
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
        """Each member sends to each: what goes to other nodes shares their network, beside what stays in the node."""
        here = self.size_in_node
        between = here * num_bytes * (self.size - here) / self.size / self.leaves_node(network)
        within = num_bytes * (here - 1) / self.size / (gpu.link_gb_per_second * GB)
        return max(between, within) / LINK_EFFICIENCY + BASE_LATENCY_SECONDS + NETWORK_LATENCY_SECONDS


def sent_bytes(kind: Kind, num_bytes: float, size: int) -> float:
    """What each of `size` processes sends in a collective of `num_bytes`."""
    return (2 if kind == "all-reduce" else 1) * num_bytes * (size - 1) / size


@dataclass(frozen=True)
class Collective:
    """One collective of a step."""

    kind: Kind
    num_bytes: int
    """What an all-gather ends with, a reduction begins with."""
    ring: Ring
    phase: Phase
    """What it runs beside; of several micro-batches, each has it unless `per_step`."""
    per_step: bool
    """Once a step, with the last micro-batch; else once a micro-batch."""
    is_hidden: bool = True
    """Computing goes on beside it. Not so the first gather, and the last reduction of a backward pass."""
    purpose: str = ""

    def times(self, num_micro_batches: int) -> int:
        """How often it happens in a step."""
        return 1 if self.per_step else num_micro_batches


def collectives(
    section: Parallel, layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int = FP32_BYTES
) -> tuple[Collective, ...]:
    """All large collectives of a step but those of split layers (`split.py`); `compute_bytes` of an element of gathered weights (2 in mixed precision, else 4),
    `reduce_bytes` of one of reduced gradients (always 4 here: others reduce in 16 bits).

    Left out: a few bytes a step that the processes agree with, the gradients' norm, and the checks of drift.
    """
    if layout.world_size == layout.tp_size:
        return ()
    if layout.shard_size == 1:
        return tuple(_buckets(layout, weights, reduce_bytes))
    return tuple(_of_shards(section, layout, weights, compute_bytes, reduce_bytes))


def _buckets(layout: Layout, weights: ModelWeights, reduce_bytes: int) -> Sequence[Collective]:
    """As gradients come: those of the last block first, those of embeddings last. Nothing runs beside the last bucket."""
    ring = Ring(layout.world_size, 1, layout.gpus_per_node)
    sizes = [0]
    for group in (*reversed(weights.blocks), weights.root):
        for weight in reversed([each for each in group.weights if each.trainable]):
            if sizes[-1] >= BUCKET_BYTES:
                sizes.append(0)
            sizes[-1] += reduce_bytes * weight.numel
    last = len(sizes) - 1
    return [
        Collective("all-reduce", size, ring, "backward", True, number < last, "gradients, fp32")
        for number, size in enumerate(sizes)
        if size
    ]


def _of_shards(
    section: Parallel, layout: Layout, weights: ModelWeights, compute_bytes: int, reduce_bytes: int
) -> list[Collective]:
    size = layout.shard_size
    shard = Ring(size, layout.tp_size, layout.gpus_per_node)
    copies = Ring(layout.num_copies, size, layout.gpus_per_node)
    compute_bytes = weights.gathered_bytes(compute_bytes)
    dtype = "fp32" if compute_bytes == FP32_BYTES else f"{8 * compute_bytes} bits"
    found: list[Collective] = []

    def gather(group: WeightGroup, phase: Phase, hidden: bool) -> None:
        num_bytes = compute_bytes * size * group.part_numel(size)
        found.append(Collective("all-gather", num_bytes, shard, phase, False, hidden, f"weights, {dtype}"))

    def reduce(group: WeightGroup, hidden: bool) -> None:
        part = reduce_bytes * group.part_numel(size, trainable_only=True)
        if part == 0:
            return
        found.append(Collective("reduce-scatter", part * size, shard, "backward", False, hidden, "gradients, fp32"))
        if layout.num_copies > 1:
            purpose = "gradients of the parts, fp32"
            found.append(Collective("all-reduce", part, copies, "backward", False, hidden, purpose))

    gather(weights.root, "forward", False)
    for number, block in enumerate(weights.blocks):
        gather(block, "forward", number > 0)
    for number, block in reversed(list(enumerate(weights.blocks))):
        if section.reshard_after_forward and number < len(weights.blocks) - 1:
            gather(block, "backward", True)
        reduce(block, number > 0)
    if section.reshard_after_forward and weights.blocks:
        gather(weights.blocks[-1], "backward", False)
    reduce(weights.root, False)
    return found


@dataclass(frozen=True)
class Traffic:
    """What each process sends in a step by one kind of collective."""

    kind: Kind
    purpose: str
    times: int
    payload_bytes: int
    """What the collectives are of."""
    sent_bytes: float


def traffic_of(found: Sequence[Collective], num_micro_batches: int) -> tuple[Traffic, ...]:
    """The collectives of a step, added up by kind."""
    sums: dict[tuple[Kind, str], list[float]] = {}
    for each in found:
        times = each.times(num_micro_batches)
        added = (times, times * each.num_bytes, times * sent_bytes(each.kind, each.num_bytes, each.ring.size))
        sums[each.kind, each.purpose] = [a + b for a, b in zip(sums.get((each.kind, each.purpose), [0, 0, 0]), added)]
    return tuple(
        Traffic(kind, purpose, round(times), round(payload), sent)
        for (kind, purpose), (times, payload, sent) in sums.items()
    )
