"""Everything that a run will be, before it costs anything: resolved like a run, with a model that has no weights."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accel_train.batching import BatchSizes, divisors, is_open, resolve_batch
from accel_train.checkpoint import checkpoint_folders
from accel_train.launch_environment import with_launch_environment
from accel_train.loading import fetch
from accel_train.memory_estimate import MemoryPart, build_without_weights, estimate_memory, vocabulary_rows
from accel_train.observe.throughput import PEAK_TFLOPS, peak_flops
from accel_train.precision import choose_mixed_precision
from accel_train.recipe import Precision, Recipe
from accel_train.resolve import change_model, check_recipe, resolve_run
from accel_train.scale.estimate import Hardware, Scale, estimate_scale
from accel_train.scale.hardware import gpu_facts
from accel_train.scale.layout import Layout, choose_layout
from accel_train.scale.memory import spread_memory
from accel_train.scale.split import split_collectives
from accel_train.scale.weights import group_weights
from accel_train.schedule import StepPlan
from accel_train.sharding import across_machines, choose_sharding
from accel_train.state import Choice
from accel_train.task import TARGET_UNITS, TaskData
from accel_train.tensor_parallel import part_shapes


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
) -> Plan:
    """Resolve a recipe as a run would, for `world_size` processes on `gpu` (by default: what is here).

    Text is tokenised, once, as a run would do it; no weights are made.

    Raises:
        ValueError: what a run would refuse, in the words of the run; or `hardware` is no machine.
    """
    recipe = with_launch_environment(recipe)
    task = check_recipe(recipe)
    processes = (
        world_size or int(os.environ.get("WORLD_SIZE") or 0) or (1 if gpu else max(1, torch.cuda.device_count()))
    )
    device, device_bytes = _device(gpu)
    device_type = "cpu" if device == "cpu" else "cuda"
    choose_sharding(recipe.parallel, processes, torch.device(device_type))  # that it can be
    sizes = resolve_batch(recipe.batch, processes, recipe.parallel.tp_size)
    hardware = hardware or Hardware()
    layout = choose_layout(recipe.parallel, processes, device_type, hardware.gpus_per_node)
    precision = (
        _precision_on(recipe.precision, gpu) if gpu else choose_mixed_precision(recipe.precision, _local_device())
    )
    data = task.load_data(recipe, progress=progress)
    num_samples = len(data.train)  # type: ignore[arg-type]
    resolved = resolve_run(recipe, data, sizes)
    steps = resolved.steps
    model, _ = change_model(recipe, build_without_weights(recipe, task, data))
    parameters = list(model.parameters())
    num_parameters, num_trainable = (
        sum(p.numel() for p in some) for some in (parameters, [p for p in parameters if p.requires_grad])
    )
    flops_per_target, vocabulary = task.flops_per_target(recipe, model), _vocabulary(model, data)
    micro_batch = data.collate(longest_samples(data, sizes.per_device_batch_size))
    num_targets_per_sample = micro_batch.pop("num_targets") / sizes.per_device_batch_size
    compute_bytes = 4 if precision.value == "no" else 2
    weights = group_weights(model, part_shapes(model, layout.tp_size) if layout.tp_size > 1 else None)
    of_split_layers = split_collectives(
        model, layout, next(iter(micro_batch.values())).numel(), compute_bytes,
        checkpointed=recipe.precision.gradient_checkpointing,
    )  # fmt: skip
    memory = estimate_memory(
        recipe, task, model, micro_batch,
        mixed_precision=precision.value, device_type=device_type, gathered=layout.shard_size > 1,
    )  # fmt: skip
    moments = next(part.num_bytes or 0 for part in memory if part.name == "optimizer")
    num_targets_per_epoch = (
        data.facts.get("train_targets")
        or max(data.facts.get("train_tokens", 0) - 1, 0)
        or round(num_targets_per_sample * num_samples)
    )
    peak, checkpoint_bytes = (
        peak_flops(device, _peak_dtype(recipe.precision, precision.value)),
        4 * num_parameters + moments,
    )
    targets_per_step = round(steps.num_epochs * num_targets_per_epoch) / steps.max_steps
    scale = estimate_scale(
        recipe, layout, weights, hardware,
        device=device,
        mixed_precision=precision.value,
        num_micro_batches=sizes.gradient_accumulation_steps,
        num_moments=moments // (4 * num_trainable) if num_trainable else 0,
        flops_per_step=None if flops_per_target is None else flops_per_target * targets_per_step,
        peak_flops=peak,
        checkpoint_bytes=checkpoint_bytes,
        of_split_layers=of_split_layers,
    )  # fmt: skip
    return Plan(
        recipe=recipe,
        world_size=processes,
        device=device,
        device_bytes=device_bytes,
        precision=precision,
        sizes=sizes,
        steps=steps,
        learning_rate=resolved.learning_rate,
        num_samples=num_samples,
        num_targets_per_epoch=num_targets_per_epoch,
        data_facts=data.facts,
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        vocabulary=vocabulary,
        flops_per_target=flops_per_target,
        memory=spread_memory(memory, recipe.parallel, layout, weights, compute_bytes, device_type),
        checkpoint_bytes=checkpoint_bytes,
        num_checkpoints=most_checkpoints(recipe, data.eval is not None),
        peak_flops=peak,
        scale=scale,
        notes=tuple(_notes(recipe, data, gpu, sizes, layout, device_type)),
    )


def most_checkpoints(recipe: Recipe, evaluates: bool) -> int:
    """How many checkpoints are on the disk at once: those kept, one being written, the best, and two for a rollback where
    none of those kept is old enough for it."""
    section, guard = recipe.checkpoint, recipe.guard
    oldest_kept_steps = (section.keep - 1) * section.every_steps
    too_young = bool(guard.max_rollbacks and section.every_steps and oldest_kept_steps < guard.healthy_after_steps)
    return section.keep + 1 + (section.keep_best and evaluates) + 2 * too_young


def longest_samples(data: TaskData, count: int) -> Sequence[Any]:
    """The samples of the micro-batch that takes the most memory: the longest ones, where samples differ in length."""
    if data.lengths is None:
        return fetch(data.train, [0] * count)
    longest = np.argsort(data.lengths)[::-1][:count].tolist()
    return fetch(data.train, (longest * count)[:count])


def _local_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _device(gpu: str | None) -> tuple[str, int | None]:
    if gpu is not None:
        facts = gpu_facts(gpu)
        return gpu, None if facts is None else round(facts.memory_gib * 2**30)
    if not torch.cuda.is_available():
        return "cpu", None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory


def _precision_on(section: Precision, gpu: str) -> Choice[str]:
    """As `precision.choose_mixed_precision`, for a GPU that is not here: decided by the table of peaks."""
    asked = section.mixed_precision
    is_known, has_bf16 = peak_flops(gpu, "fp32") is not None, peak_flops(gpu, "bf16") is not None
    if asked == "bf16" and is_known and not has_bf16:
        raise ValueError(f"precision.mixed_precision=bf16 is only emulated, slowly, by {gpu}; use fp16 or auto")
    if asked != "auto":
        return Choice(asked, "as the recipe says")
    if is_known:
        return Choice("bf16", f"{gpu} computes bf16") if has_bf16 else Choice("fp16", f"{gpu} has no bf16")
    return Choice("bf16", f"assumed: {gpu} is not among the known GPUs")


def _peak_dtype(section: Precision, mixed_precision: str) -> str:
    if mixed_precision == "no":
        return "tf32" if section.tf32 is True else "fp32"
    return "bf16" if mixed_precision == "bf16" else "fp16"


def _vocabulary(model: nn.Module, data: TaskData) -> tuple[int, int] | None:
    tokens = getattr(data.source, "vocab_size", None)
    rows = vocabulary_rows(model)
    return None if tokens is None or rows is None else (tokens, rows)


def _notes(
    recipe: Recipe, data: TaskData, gpu: str | None, sizes: BatchSizes, layout: Layout, device_type: str
) -> Iterator[str]:
    yield from data.facts.get("notes", ())
    if (told := across_machines(recipe.parallel, layout.gpus_per_node)) is not None:
        yield told
    if is_open(recipe.batch) and device_type == "cuda" and sizes.per_device_batch_size > 1:
        finds = "measures" if recipe.parallel.strategy == "ddp" else "estimates"
        yield (
            f"per_device_batch_size and gradient_accumulation_steps are auto: before its first step a run {finds} the largest of "
            f"{', '.join(map(str, divisors(sizes.per_device_batch_size)))} that leaves {recipe.batch.memory_headroom:.0%} of "
            "each GPU free; the memory above is that of the largest"
        )
    if gpu is not None and peak_flops(gpu, "fp32") is None:
        near = get_close_matches(gpu, PEAK_TFLOPS, n=3, cutoff=0.4)
        yield f"--gpu {gpu} is not among the GPUs whose peak is known" + (
            f"; did you mean {' or '.join(near)}?" if near else ""
        )
    found = checkpoint_folders(Path(recipe.output_dir) / "checkpoints")
    if found and recipe.checkpoint.resume == "auto":
        yield f"{recipe.output_dir} holds {found[-1].name}: if it is valid and of this run, the run goes on from there"
