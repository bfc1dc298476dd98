"""Resolve `precision.compile: auto`, and find the memory that a compiled loss in chunks may use."""

import os
from collections.abc import Iterator
from shutil import which
from typing import NamedTuple

import torch
from torch import nn

from accel_train.core.errors import SettingError, missing_packages
from accel_train.core.format import format_count
from accel_train.core.hardware import ASSUMED_MFU, peak_flops
from accel_train.core.state import Choice
from accel_train.data.batch_sizes import BatchSizes
from accel_train.engine.resolve import change_model
from accel_train.model.compile import repeated_blocks
from accel_train.model.fake_step import Holding, vocabulary_rows
from accel_train.model.memory_estimate import build_without_weights, estimate_memory, largest_samples, total_bytes
from accel_train.parallel.compatibility import check_compatibility
from accel_train.recipe.schema import Precision, Recipe
from accel_train.task import Task, TaskData

BLOCKS_SECONDS = 20.0
"""Seconds that compiling one block adds to the first step.

Measured on a machine with one H100, without compiled code of an earlier start: 15 s (GPT-2 124M). Slower CPUs take
longer.
"""
SECONDS_PER_LAYER = 1.5
"""Further seconds for each layer if the whole model is compiled; measured there for the plain loop (nanoGPT): 1.4 s."""
GAIN_OF_WHOLE = 0.01
"""Share of a step that a model compiled as a whole saves, because residual additions and norms of neighboring blocks
share kernels.

From that H100: the plain loop's norms took 3.1 ms in the backward of a step of 68.2 ms, and those of compiled blocks
3.9.
"""


class Machine(NamedTuple):
    """A device that a run computes on, or is planned for."""

    name: str
    """Name of a GPU, or `cpu`."""
    num_bytes: int | None
    """Its memory, if known."""
    precision: str
    """Mixed precision of the run there."""
    is_here: bool

    @classmethod
    def here(cls, device: torch.device, precision: str) -> "Machine":
        """Return this process's device."""
        if device.type != "cuda":
            return cls("cpu", None, precision, is_here=True)
        found = torch.cuda.get_device_properties(device)
        return cls(found.name, found.total_memory, precision, is_here=True)


def choose_compile(
    recipe: Recipe, task: Task, data: TaskData, sizes: BatchSizes, max_steps: int, machine: Machine
) -> Choice[str | bool]:
    """Return what `precision.compile: auto` comes to in a run of `max_steps`.

    It does not depend on what ran before: a resume makes the same choice.
    """
    for problem in _obstacles(recipe, task, data, sizes, machine):
        return Choice(False, problem)
    # Importing transformers' masks takes a second.
    from accel_train.model.kernels.attention import CAUSAL_SDPA

    model = build_without_weights(recipe, task, data)
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != CAUSAL_SDPA:
        return Choice(False, f"{type(model).__name__} is not among the models checked with it")
    masks = [task.choices(each, model).get("document mask") for each in (recipe, with_compile(recipe, True))]
    if masks[0] is not None and masks[1] is not None and masks[0].value != masks[1].value:
        return Choice(False, f"it would keep documents apart by a {masks[1].value}")
    in_type = "bf16" if machine.precision == "fp8" else machine.precision
    flops, peak = task.flops_per_target(recipe, model), peak_flops(machine.name, in_type)
    if flops is None or peak is None:
        return Choice(False, f"the peak of {machine.name} is not known, so neither is the time that it saves")
    targets = data.collate(largest_samples(data, recipe.seed, 1))["num_targets"] * sizes.global_batch_size
    computing = max_steps * flops * targets / (peak * sizes.world_size)
    saved = computing / ASSUMED_MFU[False] - computing / ASSUMED_MFU[True]
    steps = format_count(max_steps, "step")
    if saved < 2 * BLOCKS_SECONDS:
        return Choice(False, f"{steps} save about {saved:.0f} s, and compiling takes about {BLOCKS_SECONDS:.0f} s")
    longer = SECONDS_PER_LAYER * len(repeated_blocks(model))
    why = f"{steps} save about {saved:,.0f} s"
    is_whole = sizes.world_size == 1 and recipe.precision.recomputed == "nothing"
    if is_whole and GAIN_OF_WHOLE * computing / ASSUMED_MFU[True] > 2 * longer:
        return Choice("model", f"{why}, and compiling takes about {BLOCKS_SECONDS + longer:.0f} s")
    return Choice("blocks", f"{why}, and compiling takes about {BLOCKS_SECONDS:.0f} s")


def _obstacles(recipe: Recipe, task: Task, data: TaskData, sizes: BatchSizes, machine: Machine) -> Iterator[str]:
    """Yield why a run is not compiled, without looking at its model."""
    if machine.name == "cpu":
        yield "its gain is known for NVIDIA GPUs"
    if recipe.task != "causal-lm":
        yield f"its gain was not measured for {recipe.task}"
    if machine.precision == "no":
        yield "its gain was measured in 16 bits"
    if data.lengths_vary:
        yield "lengths vary in this data"
    if machine.is_here and (torch.version.hip or missing_packages(["triton"])):
        yield "this build of torch has no compiler that was measured"
    if machine.is_here and not any(map(which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        yield "this machine has no C compiler"
    try:
        check_compatibility(with_compile(recipe, True), task, machine.precision, sizes.gradient_accumulation_steps)
    except SettingError as error:
        yield f"{error.at} {error.problem}"


def idle_remedy(precision: Precision) -> str:
    """Return the settings that keep a GPU busy whose kernels end before the host launches the next; "" if they are set.

    No run turns CUDA graphs on by itself: they hold memory of their own, and their first step records again.
    """
    if precision.has_cuda_graphs:
        return ""
    also = "" if precision.compiles else "precision.compile: true and "
    return f"{also}precision.compile_mode: reduce-overhead (CUDA graphs) launch a step at once"


def with_compile(recipe: Recipe, value: str | bool) -> Recipe:
    """Return the recipe with another value of `precision.compile`."""
    return recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compile": value})})


def spare_bytes(recipe: Recipe, task: Task, data: TaskData, sizes: BatchSizes, machine: Machine) -> int:
    """Return how much memory a step leaves free by its estimate, for a loss that computes more logits at once.

    It is 0 for an eager loss, and where a step is not known to fit.
    """
    section, is_in_chunks = recipe.precision, recipe.task == "causal-lm" and recipe.loss.chunked is not False
    is_fused = section.compiles and section.compile_backend == "inductor"
    if not (is_in_chunks and is_fused and machine.num_bytes):
        return 0
    model: nn.Module = change_model(recipe, task, build_without_weights(recipe, task, data)).model
    micro_batch = data.collate(largest_samples(data, recipe.seed, sizes.per_device_batch_size))
    micro_batch.pop("num_targets")
    accumulates = sizes.gradient_accumulation_steps > 1
    parts = estimate_memory(
        recipe, task, model, micro_batch, mixed_precision=machine.precision, device_type="cuda",
        holding=Holding(keeps_gradients=accumulates or sizes.world_size > 1),
    )  # fmt: skip
    needed = total_bytes(parts)
    if needed is None or vocabulary_rows(model) is None:
        return 0
    most = round((1 - recipe.batch.memory_headroom) * machine.num_bytes)
    return max(0, most - needed)
