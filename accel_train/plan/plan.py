"""Everything that a run will be, before it costs anything: resolved like a run, with a model that has no weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from accel_train.batching import BatchSizes, divisors, is_open, resolve_batch
from accel_train.checkpoint import checkpoint_folders
from accel_train.data.without_data import without_data
from accel_train.launch_environment import with_launch_environment
from accel_train.memory_estimate import (
    MemoryPart,
    build_without_weights,
    estimate_memory,
    is_averaged,
    largest_samples,
    num_moments,
    vocabulary_rows,
)
from accel_train.plan_place import Place, choose_place, count_processes
from accel_train.recipe import Recipe
from accel_train.resolve import change_model, check_recipe, resolve_run
from accel_train.scale.estimate import Hardware, Scale, estimate_scale
from accel_train.scale.memory import spread_memory
from accel_train.scale.sequences import sequence_collectives, with_exchange
from accel_train.scale.split import split_collectives
from accel_train.scale.traffic import Collective
from accel_train.scale.weights import ModelWeights, group_weights
from accel_train.schedule import StepPlan
from accel_train.sequence_parallel import check_model
from accel_train.sequence_slices import slice_of
from accel_train.sharding import across_machines
from accel_train.state import Choice
from accel_train.task import TARGET_UNITS, Task, TaskData, read_data
from accel_train.tensor_parallel import part_shapes
from accel_train.zero import check_zero


@dataclass(frozen=True)
class Plan:
    """A run, resolved. Sizes in bytes and FLOPs are of one process unless the name says total."""

    recipe: Recipe
    world_size: int
    device: str
    """What it would run on: the name of a GPU, or `cpu`."""
    device_bytes: int | None
    """Memory of that GPU, where it is known."""
    precision: Choice[str]
    sizes: BatchSizes
    steps: StepPlan
    learning_rate: Choice[float]
    """The peak, after scaling; the reason is the formula with its numbers."""
    num_samples: int
    """Training samples in an epoch."""
    num_targets_per_epoch: int
    """Tokens with a label, for a language model."""
    data_facts: Mapping[str, Any]
    num_parameters: int
    num_trainable: int
    vocabulary: tuple[int, int] | None
    """Tokens of the tokenizer and rows of the embedding; None where there is no tokenizer."""
    flops_per_target: float | None
    memory: tuple[MemoryPart, ...]
    checkpoint_bytes: int
    num_checkpoints: int
    """Checkpoints on disk at most: those kept, the best one, and the one being written."""
    peak_flops: float | None
    """Of one GPU, in this precision; None where it is not known."""
    scale: Scale
    """What several processes make of it: traffic, the time of a step, failures."""
    notes: tuple[str, ...]
    reads_data: bool = True
    """Else the plan follows from the sequence length and the vocabulary alone."""

    @property
    def has_length(self) -> bool:
        """Whether it is known how many steps the run takes."""
        return self.reads_data or self.recipe.schedule.max_steps is not None

    @property
    def targets(self) -> str:
        """What a target is: tokens, images, ..."""
        return TARGET_UNITS.get(self.recipe.task, "targets")

    @property
    def num_targets(self) -> int:
        """Targets of the whole run."""
        return round(self.steps.num_epochs * self.num_targets_per_epoch)

    @property
    def total_flops(self) -> float | None:
        """Of the whole run on all processes, evaluation left out."""
        return None if self.flops_per_target is None else self.flops_per_target * self.num_targets

    @property
    def memory_bytes(self) -> int | None:
        """Of one process; None where a part is not known."""
        sizes = [part.num_bytes for part in self.memory]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def disk_bytes(self) -> int:
        """All checkpoints and the final weights."""
        return self.num_checkpoints * self.checkpoint_bytes + 4 * self.num_parameters

    @property
    def train_seconds(self) -> float | None:
        """Of all steps, evaluation, saves and failures left out; None where the GPU or the operations are not known."""
        if not self.has_length:
            return None
        if self.scale.step is not None:
            return self.steps.max_steps * self.scale.step.seconds
        if self.total_flops is None or self.peak_flops is None or self.recipe.parallel.cpu_offload:
            return None
        return self.total_flops / (self.peak_flops * self.scale.mfu.value * self.world_size)


def resolve_plan(
    recipe: Recipe,
    world_size: int | None = None,
    gpu: str | None = None,
    hardware: Hardware | None = None,
    *,
    progress: bool = False,
    no_data: bool = False,
) -> Plan:
    """Resolve a recipe as a run would, for `world_size` processes on `gpu` (by default: what is here).

    Text is tokenised, once, as a run would do it; no weights are made. With `no_data` nothing is read: a language model is
    planned from `data.sequence_length` and the vocabulary alone.

    Raises:
        ValueError: what a run would refuse, in the words of the run; or `hardware` is no machine.
    """
    recipe = with_launch_environment(recipe)
    task = check_recipe(recipe)
    processes = count_processes(world_size, gpu)
    place = choose_place(recipe, processes, gpu, hardware or Hardware())
    check_zero(recipe, place.precision.value)
    section = recipe.parallel
    sizes = resolve_batch(recipe.batch, processes, section.num_sharing, section.shared_by)
    if no_data:
        short, data = without_data(recipe, sizes.global_batch_size)
        resolved = resolve_run(short, data, sizes)
    else:
        data = read_data(task, recipe, progress=progress)
        resolved = resolve_run(recipe, data, sizes)
    model = _look_at_model(recipe, task, data, sizes, place)
    weights, checkpoint_bytes = model.weights, _checkpoint_bytes(recipe, model.weights)
    return Plan(
        recipe=recipe,
        world_size=processes,
        device=place.device,
        device_bytes=place.device_bytes,
        precision=place.precision,
        sizes=sizes,
        steps=resolved.steps,
        learning_rate=resolved.learning_rate,
        num_samples=len(data.train),  # type: ignore[arg-type]
        num_targets_per_epoch=model.num_targets_per_epoch,
        data_facts=data.facts,
        num_parameters=weights.numel,
        num_trainable=weights.trainable_numel,
        vocabulary=model.vocabulary,
        flops_per_target=model.flops_per_target,
        memory=spread_memory(
            model.memory, recipe.parallel, place.layout, model.held, place.compute_bytes, place.device_type
        ),
        checkpoint_bytes=checkpoint_bytes,
        num_checkpoints=most_checkpoints(recipe, data.eval is not None),
        peak_flops=place.peak_flops,
        scale=_scale(recipe, place, sizes, resolved.steps, model, checkpoint_bytes),
        notes=tuple(_notes(recipe, data, gpu, sizes, place)),
        reads_data=not no_data,
    )


@dataclass(frozen=True)
class _Model:
    """What a model without weights says of one with them."""

    weights: ModelWeights
    held: ModelWeights
    """By each group of processes among which fsdp2 deals out rows: all of it, unless neighbours split the layers."""
    vocabulary: tuple[int, int] | None
    flops_per_target: float | None
    num_targets_per_epoch: int
    memory: Sequence[MemoryPart]
    """Of a process that holds all of it."""
    of_neighbours: Sequence[Collective]
    """What those exchange that split layers or sequences."""


def _look_at_model(recipe: Recipe, task: Task, data: TaskData, sizes: BatchSizes, place: Place) -> _Model:
    model, _ = change_model(recipe, build_without_weights(recipe, task, data))
    weights, vocabulary, flops = group_weights(model), _vocabulary(model, data), task.flops_per_target(recipe, model)
    held = group_weights(model, part_shapes(model, place.layout.tp_size)) if place.layout.tp_size > 1 else weights
    micro_batch = data.collate(largest_samples(data, recipe.seed, sizes.per_device_batch_size))
    num_targets_per_sample = micro_batch.pop("num_targets") / sizes.per_device_batch_size
    sequences = place.layout.sp_size
    if sequences > 1:
        check_model(model, sequences)
        micro_batch = slice_of(micro_batch, 0, sequences)
    num_positions, checkpointed = next(iter(micro_batch.values())).numel(), recipe.precision.gradient_checkpointing
    num_targets = (
        data.facts.get("train_targets")
        or max(data.facts.get("train_tokens", 0) - 1, 0)
        or round(num_targets_per_sample * len(data.train))  # type: ignore[arg-type]
    )
    memory = estimate_memory(
        recipe, task, model, micro_batch,
        mixed_precision=place.precision.value, device_type=place.device_type, gathered=place.layout.shard_size > 1,
    )  # fmt: skip
    memory = with_exchange(memory, model, place.layout, num_positions, place.compute_bytes)
    of_neighbours = tuple(
        each
        for collectives in (split_collectives, sequence_collectives)
        for each in collectives(model, place.layout, num_positions, place.compute_bytes, checkpointed=checkpointed)
    )
    return _Model(weights, held, vocabulary, flops, num_targets, memory, of_neighbours)


def _checkpoint_bytes(recipe: Recipe, weights: ModelWeights) -> int:
    copies = num_moments(recipe.optimizer) + is_averaged(recipe.optimizer)
    return 4 * (weights.numel + copies * weights.trainable_numel)


def _scale(
    recipe: Recipe, place: Place, sizes: BatchSizes, steps: StepPlan, model: _Model, checkpoint_bytes: int
) -> Scale:
    flops, targets = model.flops_per_target, round(steps.num_epochs * model.num_targets_per_epoch)
    return estimate_scale(
        recipe, place.layout, model.held, place.hardware,
        device=place.device,
        compute_bytes=place.compute_bytes,
        num_micro_batches=sizes.gradient_accumulation_steps,
        num_moments=num_moments(recipe.optimizer),
        flops_per_step=None if flops is None else flops * targets / steps.max_steps,
        peak_flops=place.peak_flops,
        checkpoint_bytes=checkpoint_bytes,
        of_neighbours=model.of_neighbours,
    )  # fmt: skip


def most_checkpoints(recipe: Recipe, evaluates: bool) -> int:
    """How many checkpoints are on the disk at once: those kept, one being written, the best, and two for a rollback where
    none of those kept is old enough for it."""
    section, guard = recipe.checkpoint, recipe.guard
    oldest_kept_steps = (section.keep - 1) * section.every_steps
    too_young = bool(guard.max_rollbacks and section.every_steps and oldest_kept_steps < guard.healthy_after_steps)
    return section.keep + 1 + (section.keep_best and evaluates) + 2 * too_young


def _vocabulary(model: nn.Module, data: TaskData) -> tuple[int, int] | None:
    tokens = getattr(data.source, "vocab_size", None)
    rows = vocabulary_rows(model)
    return None if tokens is None or rows is None else (tokens, rows)


def _notes(recipe: Recipe, data: TaskData, gpu: str | None, sizes: BatchSizes, place: Place) -> Iterator[str]:
    yield from data.facts.get("notes", ())
    if (told := across_machines(recipe.parallel, place.layout.gpus_per_node)) is not None:
        yield told
    if is_open(recipe.batch) and place.device_type == "cuda" and sizes.per_device_batch_size > 1:
        finds = "measures" if recipe.parallel.strategy == "ddp" else "estimates"
        yield (
            f"per_device_batch_size and gradient_accumulation_steps are auto: before its first step a run {finds} the largest of "
            f"{', '.join(map(str, divisors(sizes.per_device_batch_size)))} that leaves {recipe.batch.memory_headroom:.0%} of "
            "each GPU free; the memory above is that of the largest"
        )
    found = checkpoint_folders(Path(recipe.output_dir) / "checkpoints")
    if found and recipe.checkpoint.resume == "auto":
        yield f"{recipe.output_dir} holds {found[-1].name}: if it is valid and of this run, the run goes on from there"
