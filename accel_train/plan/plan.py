"""A plan: a run resolved before it costs anything, with a model that has no weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from accel_train.checkpoint.store import checkpoint_folders
from accel_train.core.state import Choice, Choices
from accel_train.data.batch_sizes import BatchSizes, divisors, is_open, resolve_batch
from accel_train.engine.compilation import Machine, choose_compile, spare_bytes, with_compile
from accel_train.engine.resolve import change_model, check_recipe, resolve_run
from accel_train.model.fake_step import Holding, vocabulary_rows
from accel_train.model.kernels import attention
from accel_train.model.kernels.activations import slow_on_cpu
from accel_train.model.kernels.frozen import choose_frozen_dtype, keep_frozen
from accel_train.model.kernels.nf4 import NF4_BYTES
from accel_train.model.memory_estimate import (
    MemoryPart,
    build_without_weights,
    estimate_memory,
    largest_samples,
    state_bytes,
    total_bytes,
)
from accel_train.model.tensors import replaced
from accel_train.model.weights import ModelWeights, group_weights
from accel_train.optim.custom import BY_HOST, try_custom
from accel_train.optim.schedule import Rate, StepPlan
from accel_train.parallel.compatibility import check_compatibility
from accel_train.parallel.dims import across_machines
from accel_train.parallel.sequence_parallel import check_model, slice_of
from accel_train.parallel.tensor_parallel import part_shapes, styles_of
from accel_train.plan.formulas import spread_memory
from accel_train.plan.place import Hardware, Layout, Place, choose_place, count_processes
from accel_train.plan.step_time import Scale, estimate_scale
from accel_train.plan.traffic import Collective, buffer_collectives, neighbour_collectives, with_exchange
from accel_train.recipe.optimizer import optimizer_kind
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import targets_of
from accel_train.runtime.launch_environment import with_launch_environment
from accel_train.task import Facts, Task, TaskData, read_data


@dataclass(frozen=True)
class Plan:
    """A resolved run. Sizes in bytes and FLOPs are per process unless the name says total."""

    recipe: Recipe
    world_size: int
    device: str
    """Device of the run: the name of a GPU, or `cpu`."""
    device_bytes: int | None
    """Memory of that GPU in bytes, or None if unknown."""
    precision: Choice[str]
    sizes: BatchSizes
    steps: StepPlan
    learning_rate: Rate
    """Peak learning rate after scaling. The reason is the formula with its numbers."""
    num_samples: int
    """Number of training samples in an epoch."""
    num_targets: int
    """Number of labels in the whole run: tokens with a label, for a language model."""
    data_facts: Facts
    num_parameters: int
    num_trainable: int
    vocabulary: tuple[int, int] | None
    """Number of tokens in the tokenizer and rows in the embedding, or None without a tokenizer."""
    model_choices: Choices
    """Resolved settings of the model, by name: attention, kernels, adapters, frozen weights, the loss."""
    flops_per_target: float | None
    memory: tuple[MemoryPart, ...]
    checkpoint_bytes: int
    num_checkpoints: int
    """Maximum number of checkpoints on disk, as returned by `most_checkpoints`."""
    peak_flops: float | None
    """Peak of one GPU in this precision, in FLOP/s, or None if unknown."""
    scale: Scale
    """Estimate for several processes: traffic, time of a step, and interval between saves."""
    notes: tuple[str, ...]
    reads_data: bool
    """Whether the plan reads the data. Otherwise it follows from the sequence length and vocabulary alone."""

    @property
    def has_length(self) -> bool:
        """Return whether the number of steps is known."""
        return self.reads_data or self.recipe.schedule.max_steps is not None

    @property
    def targets(self) -> str:
        """Unit of labels: tokens, images, ..."""
        return targets_of(self.recipe.task)

    @property
    def total_flops(self) -> float | None:
        """FLOPs of the whole run on all processes without evaluation, or None if unknown."""
        return None if self.flops_per_target is None else self.flops_per_target * self.num_targets

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one process in bytes, or None if a part is unknown."""
        return total_bytes(self.memory)

    @property
    def fits(self) -> bool | None:
        """Return whether the memory of one process fits into the GPU, or None if either is unknown."""
        needed, room = self.memory_bytes, self.device_bytes
        return None if needed is None or room is None else needed <= room

    @property
    def model_bytes(self) -> int:
        """Bytes of the final weights in `model/`."""
        return self.recipe.checkpoint.bytes_per_weight * self.num_parameters

    @property
    def disk_bytes(self) -> int:
        """Maximum bytes of all checkpoints plus the final weights."""
        return self.num_checkpoints * self.checkpoint_bytes + self.model_bytes

    @property
    def train_seconds(self) -> float | None:
        """Seconds of all steps, without evaluation, saves and failures.

        None if the number of steps, the GPU's peak, or the operations are unknown, and if the time cannot be modeled
        (cpu_offload).
        """
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
    """Resolve a recipe as a run would, for `world_size` processes on `gpu`, and return the plan.

    By default the plan is for this machine. Text is tokenized once, as in a run, but no weights are built. With
    `no_data` no data is read: a language model is planned from `data.sequence_length` and the vocabulary alone.

    Raises:
        ValueError: a run would refuse the recipe, or `hardware` is not a valid machine.
    """
    recipe = with_launch_environment(recipe)
    recipe, task = check_recipe(recipe)
    processes = count_processes(world_size, gpu)
    place = choose_place(recipe, processes, gpu, hardware or Hardware())
    check_compatibility(recipe, task, place.precision.value)
    is_sharded = place.layout.shard_size * place.layout.tp_size > 1
    try_custom(recipe.optimizer, torch.device("cpu"), is_sharded=is_sharded)
    sizes = resolve_batch(recipe.batch, processes, recipe.parallel.num_sharing, recipe.parallel.shared_by)
    proved = task.prove(recipe)
    if no_data:
        short, data = without_data(task, recipe, sizes.global_batch_size)
    else:
        short, data = recipe, read_data(task, recipe, progress=progress)
    steps, _, rate = resolve_run(short, data, sizes)
    given, machine = recipe, Machine(place.device, place.device_bytes, place.precision.value, is_here=gpu is None)
    with replaced({(attention, "device_of_run"): lambda: place.device_type}):
        if recipe.precision.compile == "auto":
            auto = choose_compile(recipe, task, data, sizes, steps.max_steps, machine)
            proved, recipe = {**proved, "precision.compile": auto}, with_compile(recipe, auto.value)
        task.spare_bytes = spare_bytes(recipe, task, data, sizes, machine)
        model = _look_at_model(recipe, task, data, sizes, place)
    num_targets, flops = round(steps.num_epochs * model.num_targets_per_epoch), model.flops_per_target
    scale = estimate_scale(
        recipe, place, model.held, model.others,
        num_micro_batches=sizes.gradient_accumulation_steps,
        flops_per_step=None if flops is None else flops * num_targets / steps.max_steps,
        checkpoint_bytes=model.checkpoint_bytes,
    )  # fmt: skip
    return Plan(
        recipe=given,
        world_size=processes,
        device=place.device,
        device_bytes=place.device_bytes,
        precision=place.precision,
        sizes=sizes,
        steps=steps,
        learning_rate=rate,
        num_samples=len(data.train),  # type: ignore[arg-type]
        num_targets=num_targets,
        data_facts=data.facts,
        num_parameters=model.weights.numel,
        num_trainable=model.weights.trainable_numel,
        vocabulary=model.vocabulary,
        model_choices={**model.choices, **proved},
        flops_per_target=flops,
        memory=spread_memory(
            model.memory,
            place.layout,
            model.held,
            model.weights.trainable_numel,
            place.device_type,
            accumulates=sizes.gradient_accumulation_steps > 1,
        ),
        checkpoint_bytes=model.checkpoint_bytes,
        num_checkpoints=most_checkpoints(recipe, data.eval is not None),
        peak_flops=place.peak_flops,
        scale=scale,
        notes=(*_notes(recipe, data, gpu, sizes, place), *filter(None, [model.slow_part])),
        reads_data=not no_data,
    )


@dataclass(frozen=True)
class _Model:
    """The facts that a model without weights provides about the real model."""

    weights: ModelWeights
    choices: Choices
    held: ModelWeights
    """Weights held by each group of processes that fsdp2 shards over.

    These are all weights, unless tensor parallelism splits layers.
    """
    vocabulary: tuple[int, int] | None
    flops_per_target: float | None
    num_targets_per_epoch: int
    checkpoint_bytes: int
    memory: Sequence[MemoryPart]
    """Memory parts of a process that holds the whole model."""
    slow_part: str | None
    """The activation that another one replaces in less time, or None."""
    others: Sequence[Collective]
    """Collectives of split layers, of split sequences, and of buffers."""


def _look_at_model(recipe: Recipe, task: Task, data: TaskData, sizes: BatchSizes, place: Place) -> _Model:
    layout, precision = place.layout, place.precision.value
    model, choices, frozen = change_model(recipe, task, build_without_weights(recipe, task, data))
    kept = choose_frozen_dtype(recipe, precision, place.device_type)
    choices |= keep_frozen(model, frozen, kept, precision)
    base = frozen if recipe.model.pretrained is not None else ()
    floats = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    stored = sum(each.numel() * each.element_size() for name, each in floats.items() if name not in base)
    weights, flops = group_weights(model), task.flops_per_target(recipe, model)
    tokens, rows = getattr(data.source, "vocab_size", None), vocabulary_rows(model)
    vocabulary = None if tokens is None or rows is None else (tokens, rows)
    held = group_weights(model, part_shapes(model, layout.tp_size)) if layout.tp_size > 1 else weights
    micro_batch = data.collate(largest_samples(data, recipe.seed, sizes.per_device_batch_size))
    num_targets_per_sample = micro_batch.pop("num_targets") / sizes.per_device_batch_size
    if layout.sp_size > 1:
        check_model(model, layout.sp_size)
        micro_batch = slice_of(micro_batch, 0, layout.sp_size)
    num_positions = next(iter(micro_batch.values())).numel()
    # Recomputation also repeats the exchanges.
    checkpointed = recipe.precision.recomputed in ("blocks", "selective")
    num_targets = (
        data.facts.train_targets
        or max((data.facts.train_tokens or 0) - 1, 0)
        or round(num_targets_per_sample * len(data.train))  # type: ignore[arg-type]
    )
    chunked = "loss.chunked" in choices and choices["loss.chunked"].value
    averaged = weights.trainable_numel if recipe.optimizer.averages else 0
    checkpoint_bytes = stored + 4 * averaged + state_bytes(model, recipe.optimizer)
    memory = estimate_memory(
        recipe, task, model, micro_batch,
        mixed_precision=precision, device_type=place.device_type,
        holding=_holding(model, layout, accumulates=sizes.gradient_accumulation_steps > 1, chunked=chunked),
    )  # fmt: skip
    if kept is not None and kept.value == "nf4":
        how = f"{NF4_BYTES:.2f} bytes each (nf4) of the frozen linear layers, 4 of the others"
        memory[0] = replace(memory[0], how=how)
    memory = with_exchange(memory, model, layout, num_positions, place.compute_bytes)
    others = neighbour_collectives(
        model, layout, num_positions, place.compute_bytes, checkpointed=checkpointed, chunked=chunked
    )
    others += buffer_collectives(model, layout)
    slow_part = slow_on_cpu(model) if place.device_type == "cpu" and recipe.model.pretrained is None else None
    return _Model(weights, choices, held, vocabulary, flops, num_targets, checkpoint_bytes, memory, slow_part, others)


def _holding(model: nn.Module, layout: Layout, *, accumulates: bool, chunked: bool) -> Holding:
    section, split = layout.strategy.section, layout.tp_size
    # A loss in chunks takes the head's parts as they are.
    styles = styles_of(model, split) if split > 1 and not chunked else {}
    layers = {name: style for name, style in styles.items() if name in dict(model.named_modules())}
    return Holding(
        # DDP's buckets hold gradients, and ZeRO's formulas count them.
        keeps_gradients=accumulates or (layout.world_size > 1 and layout.strategy.name != "fsdp2"),
        shard_size=layout.shard_size,
        reshards=section.reshard_after_forward,
        offloads=section.cpu_offload,
        split_size=split,
        shapes=part_shapes(model, split) if split > 1 else {},
        gathers_output=[name for name, style in layers.items() if style == "colwise_gather_output"],
    )


def most_checkpoints(recipe: Recipe, evaluates: bool) -> int:
    """Return the maximum number of checkpoints on disk at once.

    They are the kept ones, one being written, and the best one. Two more are for a rollback if no kept one is old
    enough.
    """
    section, guard = recipe.checkpoint, recipe.guard
    oldest_kept_steps = (section.keep - 1) * section.every_steps
    too_young = bool(guard.max_rollbacks and section.every_steps and oldest_kept_steps < guard.healthy_after_steps)
    return section.keep + 1 + (section.keep_best and evaluates) + 2 * too_young


def _notes(recipe: Recipe, data: TaskData, gpu: str | None, sizes: BatchSizes, place: Place) -> Iterator[str]:
    yield from data.facts.notes
    if (note := across_machines(recipe.parallel, place.layout.gpus_per_node)) is not None:
        yield note
    if (kind := optimizer_kind(recipe.optimizer.name)).of_class and not kind.skips_alone:
        yield f"optimizer {recipe.optimizer.name}: {BY_HOST}"
    if recipe.optimizer.name == "muon":
        yield "the time of a step leaves out muon's orthogonalization of matrices"
    if is_open(recipe.batch) and place.device_type == "cuda" and sizes.per_device_batch_size > 1:
        is_searched = place.layout.shard_size * place.layout.tp_size == 1
        largest = f"the largest of {', '.join(map(str, divisors(sizes.per_device_batch_size)))}"
        taken = (
            f"before its first step a run measures {largest} that leaves {recipe.batch.memory_headroom:.0%} of each "
            "GPU free"
            if is_searched
            else f"a run with a sharded model starts with {largest}, and halves it if memory runs out"
        )
        yield (
            f"per_device_batch_size and gradient_accumulation_steps are auto: {taken}. The memory above is for the "
            "largest"
        )
    found = checkpoint_folders(Path(recipe.output_dir) / "checkpoints")
    if found and recipe.checkpoint.resume in ("auto", "unchanged"):
        yield f"{recipe.output_dir} holds {found[-1].name}: the run resumes there if it is valid and from this run"


def without_data(task: Task, recipe: Recipe, global_batch_size: int) -> tuple[Recipe, TaskData]:
    """Return the recipe for a plan that reads no data, and stand-in data: full samples, as many as the run reads.

    If only `schedule.num_epochs` says how long the run is, its steps are not known without the data. Then the recipe
    has one step more than its warmup, for what a plan says of one step, and profiles none.

    Raises:
        ValueError: the task needs its data for more than their length, or the tokenizer cannot be loaded.
    """
    schedule = recipe.schedule
    max_steps = schedule.max_steps or (schedule.warmup_steps or 0) + 1
    data = task.stand_in_data(recipe, max_steps * global_batch_size)
    if data is None:
        raise ValueError(f"--no-data: {recipe.task} needs its data for labels or sizes. Leave --no-data out")
    steps = schedule.model_copy(update={"max_steps": max_steps, "num_epochs": None})
    section = recipe.data.model_copy(update={"group_by_length": False})
    log = recipe.log if schedule.max_steps else recipe.log.model_copy(update={"profile_steps": None})
    return recipe.model_copy(update={"schedule": steps, "data": section, "log": log}), data
