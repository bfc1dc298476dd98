"""The time of a step on any number of GPUs, from the layout, the traffic, and the links.

The model is a roofline of arithmetic, memory and links, including the overlap between them. It also yields the interval
between saves.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from accel_train.core.hardware import (
    ASSUMED_MFU,
    GB,
    MEMORY_EFFICIENCY,
    Gpu,
    Interconnect,
    choose_interconnect,
    find_gpu,
)
from accel_train.core.state import Choice
from accel_train.model.memory_estimate import num_moments
from accel_train.model.weights import ModelWeights
from accel_train.optim.muon import choose_dtype
from accel_train.plan.formulas import collectives, matrix_collectives
from accel_train.plan.place import Layout, Place
from accel_train.plan.saving import SaveInterval, save_interval, saving_cost
from accel_train.plan.traffic import Collective, Traffic, traffic_of
from accel_train.recipe.schema import Recipe

RECOMPUTED_FORWARDS = {"nothing": 0.0, "blocks": 1.0, "selective": 0.1, "budget": 1.0}
"""Number of forward passes that the backward pass repeats, by `precision.recomputed`.

They add to the arithmetic of 3 passes that MFU counts. `selective` repeats none of GPT-2's matrix products and 9 % of a
Llama's. For a memory budget, only the maximum is known.
"""
OPTIMIZER_ACCESSES = 8
"""Transfers of 4 bytes for each updated element.

AdamW reads weight, gradient and two moments, and writes three of them. The gradient norm reads the gradient.
"""


class StepTime(NamedTuple):
    """The modeled parts of a step, in seconds.

    The model leaves out stragglers and the slowdown of computing during communication.
    """

    compute_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    """Time of all collectives without overlap, in seconds."""
    exposed_seconds: float
    """Communication time that does not overlap with computing, in seconds. The GPU waits."""

    @property
    def seconds(self) -> float:
        """Duration of the whole step, in seconds."""
        return self.compute_seconds + self.optimizer_seconds + self.exposed_seconds

    @property
    def efficiency(self) -> float:
        """Share of the speed without waiting for other processes, 0 to 1."""
        return (self.compute_seconds + self.optimizer_seconds) / self.seconds


class StepWork(NamedTuple):
    """The work of one process in a step, without communication."""

    compute_seconds: float
    """Seconds of arithmetic: one third forward, two thirds backward."""
    num_micro_batches: int
    optimizer_elements: int
    """Number of elements that this process updates."""
    num_moments: float


def model_step(found: Sequence[Collective], work: StepWork, gpu: Gpu, network: Interconnect) -> StepTime:
    """Return the modeled time of a step with the collectives `found`.

    Hidden collectives overlap with the pass they belong to. They run one after the other because they share the links.
    The GPU waits for the part that is longer than the pass, and for all collectives that are not hidden.
    """
    accesses = OPTIMIZER_ACCESSES - 2 * (2 - work.num_moments)
    optimizer = 4 * accesses * work.optimizer_elements / (gpu.memory_gb_per_second * GB * MEMORY_EFFICIENCY)

    def seconds(some: Iterable[Collective]) -> float:
        return sum(each.ring.seconds(each.kind, each.num_bytes, gpu, network) for each in some)

    total = exposed = 0.0
    for last in (False, True):
        times = 1 if last else work.num_micro_batches - 1
        now = [each for each in found if last or not each.per_step]
        total += times * seconds(now)
        for phase, share in (("forward", 1 / 3), ("backward", 2 / 3)):
            beside = seconds(each for each in now if each.phase == phase and each.is_hidden)
            alone = seconds(each for each in now if each.phase == phase and not each.is_hidden)
            exposed += times * (alone + max(0.0, beside - share * work.compute_seconds / work.num_micro_batches))
    return StepTime(work.compute_seconds, optimizer, total, exposed)


class Scale(NamedTuple):
    """The estimate of a run on many processes. Bytes are per process and step unless the name says otherwise."""

    layout: Layout
    weights: ModelWeights
    traffic: tuple[Traffic, ...]
    gpu: Gpu | None
    """GPU of the run, or None if its memory and links are unknown."""
    network: Choice[Interconnect]
    mfu: Choice[float]
    step: StepTime | None
    """Time of a step, or None if it cannot be modeled.

    This is the case if the GPU's peak, memory or links, or the model's operations are unknown, and with cpu_offload.
    """
    save_interval: SaveInterval


def choose_mfu(recipe: Recipe, asked: float | None) -> Choice[float]:
    """Return the share of the peak that computing reaches between two waits: `asked`, or an assumption.

    Raises:
        ValueError: --mfu is not above 0 and at most 1.
    """
    if asked is not None:
        if not 0 < asked <= 1:
            raise ValueError(f"--mfu={asked:g}: must be above 0 and at most 1, for example 0.4")
        return Choice(asked, "from --mfu")
    assumed = ASSUMED_MFU[recipe.precision.compiles]
    if again := RECOMPUTED_FORWARDS[recipe.precision.recomputed]:
        most = "at most " if recipe.precision.recomputed == "budget" else ""
        share = again / (3 + again)
        return Choice(assumed * (1 - share), f"assumed: {assumed:.0%}, of which recomputation takes {most}{share:.0%}")
    return Choice(assumed, "assumed; set --mfu to the MFU of a short run")


def estimate_scale(
    recipe: Recipe,
    place: Place,
    weights: ModelWeights,
    others: Sequence[Collective],
    *,
    num_micro_batches: int,
    flops_per_step: float | None,
    checkpoint_bytes: int,
) -> Scale:
    """Return the estimate for a run in this place.

    `flops_per_step` covers all processes together. `weights` are held by one group of neighbors. `others`
    are the collectives that do not follow from weights.

    Raises:
        ValueError: the interconnect is unknown, or --mfu or --mtbf is out of range.
    """
    layout = place.layout
    dtype = choose_dtype(recipe.optimizer, place.precision.value, place.device_type).value
    of_matrices = matrix_collectives(layout, weights, dtype) if recipe.optimizer.name == "muon" else ()
    found = (*collectives(layout, weights, place.compute_bytes), *others, *of_matrices)
    found_gpu, mfu = find_gpu(place.device), choose_mfu(recipe, place.hardware.mfu)
    gpu = found_gpu if found_gpu is not None and found_gpu.memory_gib else None
    network = choose_interconnect(place.hardware.interconnect, gpu)
    peak, step = place.peak_flops, None
    if gpu is not None and peak is not None and flops_per_step is not None and not recipe.parallel.cpu_offload:
        work = StepWork(
            flops_per_step / (peak * mfu.value * layout.world_size),
            num_micro_batches,
            weights.part_numel(layout.strategy.choice.value, trainable_only=True),
            # 20 bytes of transfers instead of 8: bf16 moments are converted to fp32 and back.
            num_moments(recipe.optimizer) * (2.5 if recipe.optimizer.state_dtype == "bf16" else 1),
        )
        step = model_step(found, work, gpu, network.value)
    cost = saving_cost(recipe.checkpoint, layout, checkpoint_bytes, Path(recipe.output_dir))
    interval = save_interval(cost, layout.world_size, place.hardware.mtbf_hours)
    return Scale(layout, weights, traffic_of(found, num_micro_batches), gpu, network, mfu, step, interval)
