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

from accel_train.batching import BatchSizes, resolve_batch
from accel_train.checkpoint import checkpoint_folders
from accel_train.launch_environment import with_launch_environment
from accel_train.loading import fetch
from accel_train.memory_estimate import MemoryPart, build_without_weights, estimate_memory, vocabulary_rows
from accel_train.observe.progress import format_seconds
from accel_train.observe.throughput import PEAK_TFLOPS, peak_flops
from accel_train.precision import choose_mixed_precision
from accel_train.recipe import Precision, Recipe
from accel_train.recipe_names import recipe_names
from accel_train.recipe_writing import setting_lines
from accel_train.redaction import redact
from accel_train.resolve import change_model, check_recipe, resolve_run
from accel_train.schedule import StepPlan
from accel_train.state import Choice
from accel_train.task import TARGET_UNITS, TaskData

ASSUMED_MFU = 0.35
"""Of a GPU's peak: what GPT-like models of 100M parameters and more reach, compiled; small models reach less."""


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
        """At `ASSUMED_MFU` on all processes; None where the peak or the operations are not known."""
        if self.total_flops is None or self.peak_flops is None:
            return None
        return self.total_flops / (self.peak_flops * ASSUMED_MFU * self.world_size)


def resolve_plan(
    recipe: Recipe, world_size: int | None = None, gpu: str | None = None, *, progress: bool = False
) -> Plan:
    """Resolve a recipe as a run would, for `world_size` processes on `gpu` (by default: what is here).

    Text is tokenised, once, as a run would do it; no weights are made.

    Raises:
        ValueError: what a run would refuse, in the words of the run.
    """
    recipe = with_launch_environment(recipe)
    task = check_recipe(recipe)
    processes = (
        world_size or int(os.environ.get("WORLD_SIZE") or 0) or (1 if gpu else max(1, torch.cuda.device_count()))
    )
    sizes = resolve_batch(recipe.batch, processes)
    device, device_bytes = _device(gpu)
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
    device_type = "cpu" if device == "cpu" else "cuda"
    memory = estimate_memory(recipe, task, model, micro_batch, mixed_precision=precision.value, device_type=device_type)
    moments = next(part.num_bytes or 0 for part in memory if part.name == "optimizer")
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
        num_targets_per_epoch=data.facts.get("train_targets")
        or max(data.facts.get("train_tokens", 0) - 1, 0)
        or round(num_targets_per_sample * num_samples),
        data_facts=data.facts,
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        vocabulary=vocabulary,
        flops_per_target=flops_per_target,
        memory=tuple(memory),
        checkpoint_bytes=4 * num_parameters + moments,
        num_checkpoints=most_checkpoints(recipe, data.eval is not None),
        peak_flops=peak_flops(device, _peak_dtype(recipe.precision, precision.value)),
        notes=tuple(_notes(recipe, data, gpu)),
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
        return gpu, None
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


def _notes(recipe: Recipe, data: TaskData, gpu: str | None) -> Iterator[str]:
    yield from data.facts.get("notes", ())
    if gpu is not None and peak_flops(gpu, "fp32") is None:
        near = get_close_matches(gpu, PEAK_TFLOPS, n=3, cutoff=0.4)
        yield f"--gpu {gpu} is not among the GPUs whose peak is known" + (
            f"; did you mean {' or '.join(near)}?" if near else ""
        )
    found = checkpoint_folders(Path(recipe.output_dir) / "checkpoints")
    if found and recipe.checkpoint.resume == "auto":
        yield f"{recipe.output_dir} holds {found[-1].name}: if it is valid and of this run, the run goes on from there"


def format_plan(plan: Plan, *, colour: bool = False) -> str:
    """The plan as aligned text; with `colour`, what is a default is dim (for a terminal)."""
    width = max(len(name.rpartition(".")[2]) + 2 * name.count(".") for name in recipe_names()) + 2
    lines = ["Settings, and who set them"]
    for depth, name, value, who in setting_lines(plan.recipe):
        left = f"{'  ' * (depth + 1)}{name}".ljust(width + 2)
        line = f"{left}{value}".ljust(width + 30) + f"  <- {who}" if who else left.rstrip()
        lines.append(f"\x1b[2m{line}\x1b[0m" if colour and who == "default" else line)
    for title, rows in _blocks(plan):
        lines += ["", f"\x1b[1m{title}\x1b[0m" if colour else title]
        name_width = max((len(row[0]) for row in rows), default=0)
        lines += [f"  {name.ljust(name_width)}  {text}" for name, text in rows]
    return str(redact("\n".join(lines)))


def _blocks(plan: Plan) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    sizes, steps, facts = plan.sizes, plan.steps, plan.data_facts
    yield "Steps", [
        ("global batch", f"{sizes.reason}; {sizes.per_device_eval_batch_size} per device in evaluation"),
        ("learning rate", f"{plan.learning_rate.value:g} at its peak ({plan.learning_rate.reason})"),
        ("schedule", f"{plan.recipe.schedule.type}, {_count(steps.warmup_steps)} steps of warmup ({steps.warmup_reason})"),
        ("steps", f"{_count(steps.max_steps)} ({steps.max_steps_reason})"),
        ("in all", f"{_count(steps.max_steps * sizes.global_batch_size)} samples, of {_count(plan.num_samples)} in an epoch: {steps.num_epochs:.4g} epochs"),
        (plan.targets, f"{_count(plan.num_targets)} with a label, {_count(plan.num_targets / steps.max_steps)} a step"),
    ]  # fmt: skip
    yield "Data", [(name, str(facts[name])) for name in ("sources",) if name in facts] + [
        (name, _count(facts[name])) for name in ("num_documents", "train_tokens", "eval_tokens", "num_train", "num_eval") if facts.get(name) is not None
    ]  # fmt: skip
    yield "Model", list(_model_rows(plan))
    total = plan.memory_bytes
    memory = [(part.name, f"{_size(part.num_bytes)}  {part.kind}: {part.how}") for part in plan.memory]
    room = "" if plan.device_bytes is None or total is None else _room(total, plan.device_bytes)
    yield f"Memory of each process ({plan.device})", [*memory, ("total", f"{_size(total)}{room}")]
    yield (
        "Disk",
        [
            ("checkpoint", f"{_size(plan.checkpoint_bytes)}  arithmetic: weights and optimizer, fp32"),
            ("in all", f"{_size(plan.disk_bytes)}  {plan.num_checkpoints} checkpoints at most, and the final weights"),
        ],
    )
    yield "Time", [("training", _time(plan))]
    if plan.notes:
        yield "Notes", [("-", note) for note in plan.notes]


def _model_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    frozen = plan.num_parameters - plan.num_trainable
    yield "parameters", _count(plan.num_parameters) + (f", {_count(frozen)} of them frozen" if frozen else "")
    if plan.vocabulary is not None:
        tokens, rows = plan.vocabulary
        multiple = plan.recipe.model.pad_vocab_to_multiple_of
        why = f", {rows - tokens} never used (model.pad_vocab_to_multiple_of is {multiple})" if rows != tokens else ""
        yield "vocabulary", f"{_count(tokens)} tokens in {_count(rows)} rows{why}"
    yield "precision", f"{plan.precision.value} ({plan.precision.reason})"
    if plan.flops_per_target is None or plan.total_flops is None:
        yield "FLOPs", "not known for this task"
        return
    yield (
        "FLOPs",
        (
            f"{plan.flops_per_target:.4g} for each of {plan.targets}, {plan.total_flops / plan.steps.max_steps:.4g} a step, {plan.total_flops:.4g} in all "
            f"({'6 N + 12 L D T a token; ' if plan.targets == 'tokens' else ''}evaluation and recomputation left out)"
        ),
    )


def _time(plan: Plan) -> str:
    seconds = plan.train_seconds
    if seconds is None or plan.peak_flops is None:
        return f"unknown: no peak is known for {plan.device} ({plan.precision.value}); plan --gpu NAME names one"
    peak = f"{plan.world_size} x {plan.peak_flops / 1e12:g} TFLOP/s"
    return (
        f"{format_seconds(seconds)}, an estimate: at an assumed MFU of {ASSUMED_MFU:.0%} of {peak} ({plan.device}); small models "
        "reach less; evaluation left out"
    )


def _room(needed: int, device_bytes: int) -> str:
    if needed <= device_bytes:
        return f", of {_size(device_bytes)}"
    return (
        f", MORE than the {_size(device_bytes)} of this GPU: lower per_device_batch_size, or set gradient_checkpointing"
    )


def _count(number: float) -> str:
    return f"{round(number):,}"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown".rjust(10)
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}".rjust(10)
