"""A run on any number of GPUs, put together: where its processes are, what they send, what a step takes, what fails."""

from collections.abc import Sequence
from dataclasses import dataclass

from accel_train.recipe import Recipe
from accel_train.scale.hardware import Gpu, Interconnect, choose_interconnect, gpu_facts
from accel_train.scale.layout import Layout
from accel_train.scale.saving_cost import Interval, SavingCost, best_intervals, saving_cost
from accel_train.scale.step_time import StepTime, model_step
from accel_train.scale.traffic import Collective, Traffic, collectives, traffic_of
from accel_train.scale.weights import ModelWeights
from accel_train.scale.zero_traffic import zero_collectives
from accel_train.state import Choice

ASSUMED_MFU = 0.35
"""Of a GPU's peak: what GPT-like models of 100M parameters and more reach, compiled; small models reach less."""
RECOMPUTATION = 3 / 4
"""Gradient checkpointing does the forward pass twice: 4 passes' worth of arithmetic for the 3 that MFU counts."""


@dataclass(frozen=True)
class Hardware:
    """What a plan is for, as its flags say it."""

    gpus_per_node: int | None = None
    interconnect: str | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class Scale:
    """What many processes make of a run. Bytes are of one process and step, unless the name says otherwise."""

    layout: Layout
    weights: ModelWeights
    traffic: tuple[Traffic, ...]
    gpu: Gpu | None
    """None where its memory and links are not known."""
    network: Choice[Interconnect]
    mfu: Choice[float]
    step: StepTime | None
    """None where the GPU's peak, memory or links, or the model's operations are not known; with cpu_offload, which is not modelled."""
    saving: SavingCost
    intervals: tuple[Interval, ...]
    """One for each published rate of failures; empty where a step's time is not known."""


def choose_mfu(recipe: Recipe, asked: float | None) -> Choice[float]:
    """The share of the peak that computing reaches between two waits.

    Raises:
        ValueError: --mfu is not above 0 and at most 1.
    """
    if asked is not None:
        if not 0 < asked <= 1:
            raise ValueError(f"--mfu={asked:g}: a share of the peak is above 0 and at most 1, as 0.35")
        return Choice(asked, "as --mfu says")
    if recipe.precision.gradient_checkpointing:
        return Choice(
            ASSUMED_MFU * RECOMPUTATION, f"assumed: {ASSUMED_MFU:.0%}, of which recomputation takes a quarter"
        )
    return Choice(ASSUMED_MFU, "assumed; --mfu says what a short run reached")


def estimate_scale(
    recipe: Recipe,
    layout: Layout,
    weights: ModelWeights,
    hardware: Hardware,
    *,
    device: str,
    compute_bytes: int,
    num_micro_batches: int,
    num_moments: int,
    flops_per_step: float | None,
    peak_flops: float | None,
    checkpoint_bytes: int,
    of_neighbours: Sequence[Collective] = (),
) -> Scale:
    """All of it, for processes laid out like this; `flops_per_step` are of all of them together, `compute_bytes` of one
    number that is computed with.

    Raises:
        ValueError: the interconnect is not known, or the MFU is no share.
    """
    section = recipe.parallel
    is_zero = section.strategy == "deepspeed"
    if is_zero:
        found = zero_collectives(section.zero_stage, layout, weights)
    else:
        found = (*collectives(section, layout, weights, compute_bytes), *of_neighbours)
    gpu, mfu = gpu_facts(device), choose_mfu(recipe, hardware.mfu)
    network = choose_interconnect(hardware.interconnect, gpu)
    step = None
    parts = layout.world_size if is_zero else layout.shard_size
    if gpu is not None and peak_flops is not None and flops_per_step is not None and not section.cpu_offload:
        step = model_step(
            found,
            compute_seconds=flops_per_step / (peak_flops * mfu.value * layout.world_size),
            num_micro_batches=num_micro_batches,
            optimizer_elements=weights.part_numel(parts, trainable_only=True),
            num_moments=num_moments,
            gpu=gpu,
            network=network.value,
        )
    saving = saving_cost(recipe.checkpoint, layout, checkpoint_bytes)
    intervals = () if step is None else best_intervals(recipe.checkpoint, saving, layout.world_size, step.seconds)
    traffic = traffic_of(found, num_micro_batches)
    return Scale(layout, weights, traffic, gpu, network, mfu, step, saving, intervals)
