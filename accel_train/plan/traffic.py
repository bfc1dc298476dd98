"""Traffic between processes in a step, in bytes and, over given links, in seconds.

In an all-gather or reduce-scatter of S bytes among n processes, each process sends S (n - 1) / n. In an all-reduce it
sends twice as much. Rings do so, and trees do not send less. In an all-to-all, S is the size of each process's tensor.
The time is these bytes over the slowest link of the ring, plus a latency for each hop.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from accel_train.core.hardware import GB, LINK_EFFICIENCY, Gpu, Interconnect
from accel_train.model.weights import ModelWeights, Weight

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Phase = Literal["forward", "backward"]
# NVIDIA/nccl, src/graph/tuning.cc: baseLat and hwLat of the ring and the tree, protocol Simple, in microseconds.
BASE_LATENCY_SECONDS, LINK_LATENCY_SECONDS, NETWORK_LATENCY_SECONDS = 8.4e-6, 3.4e-6, 14.0e-6
TREE_LINK_LATENCY_SECONDS = 4.0e-6


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
        return max(len(nodes) for nodes in self._members)

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
    is_hidden: bool = True
    """Whether computing overlaps with the collective. Default: True.

    False for the first gather, and for the last reduction of a backward pass.
    """
    purpose: str = ""


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
    groups = (*reversed(weights.blocks), weights.root)
    return [each for group in groups for each in reversed(group.weights) if each.trainable]
