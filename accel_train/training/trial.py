"""Try a program's loss on a few samples before the first step: does it mean the same however a step is cut?"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_train.core.errors import RecipeError, SettingError
from accel_train.data.digest import apart
from accel_train.data.samples import fetch
from accel_train.engine.evaluation import evaluation_mode
from accel_train.engine.loader import Reading, read_batches, to_device
from accel_train.engine.run import RunContext
from accel_train.model.batch_norm import trained_batch_norms
from accel_train.model.isolation import isolated
from accel_train.runtime.process_group import on_main

LEAST_SAMPLES, MOST_SAMPLES = 16, 64
"""Samples that are tried at least, in several batches if micro-batches are smaller, and at most in one batch."""
TOLERANCE, TOLERANCE_OF_16_BITS = 1e-3, 0.05
"""Largest relative difference of equal losses, in fp32 and in mixed precision."""
RANDOM = "random"
"""Difference of sums that also differ between two forwards of the same samples."""
Sums = dict[str, float]
"""Sums over the samples of a batch by name."""


def check_sums(run: RunContext) -> None:
    """Check that the loss and the metrics of a `ModuleTask` are sums over samples: equal for a batch and its parts.

    Micro-batches of evenly spaced training samples are compared with three parts of each, in evaluation mode. A loss
    that differs is refused if a step is cut into several micro-batches or over processes, and noted otherwise. Metrics
    are compared on evaluation samples, and noted. Other tasks do not declare `loss_is_per_batch`, and are not tried.

    Raises:
        SettingError: the loss depends on how a step is cut, and it is cut.
        RecipeError: the loss or a metric has a wrong type or shape.
    """
    plan, strategy = run.plan, run.strategy
    data, is_per_batch = plan.data, plan.task.loss_is_per_batch
    if is_per_batch is None or data.step_batches is not None or strategy.notes_forward_order:
        return
    notes: list[str] = []
    if not is_per_batch:
        verdict = _differing(run, data.train, lambda batch: {"loss": strategy.inner(batch)})
        found: dict[str, str] = on_main(lambda: verdict)
        if "loss" in found:
            notes.append(_about_loss(run, found["loss"]))
    if data.eval is not None:
        verdict = _differing(run, data.eval, lambda batch: strategy.inner(batch, "counts"))
        why = "is not a mean over samples: it depends on the size of evaluation batches"
        notes += [f"metric {name} {why}" for name in on_main(lambda: verdict) if name != "loss_sum"]
    data.add_notes(notes)


def _about_loss(run: RunContext, difference: str) -> str:
    """Return a note about a loss that is not a sum over samples.

    Raises:
        SettingError: a step is cut.
    """
    processes, parts = run.accelerator.num_processes, run.sizes.gradient_accumulation_steps
    if difference == RANDOM:
        return "the loss draws random numbers, so it is not checked to be a mean over samples"
    problem = f"the loss is not a mean over samples ({difference})"
    if processes == 1 and parts == 1:
        return f"{problem}; several processes or micro-batches would train on other numbers"
    cut = f"{parts} micro-batches" if parts > 1 else "1 micro-batch"
    where = f" on each of {processes} processes" if processes > 1 else ""
    raise SettingError(
        f"{problem}, and a step is cut into {cut}{where}. The usual causes are class weights, ignore_index, "
        "reduction='sum', and a comparison of samples with each other",
        "Return one number per sample (reduction='none'), or give count_targets and return a sum. To train on the "
        "value of each micro-batch, set loss_is_per_batch",
        at="loss",
        settings=("loss",),
    )


def _differing(
    run: RunContext, dataset: Any, sums_of: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, str]:
    """Return the names of sums that differ between a batch and its parts, with both means, or `RANDOM`.

    Empty if the samples cannot be forwarded: the step itself reports any error.
    """
    count = min(len(dataset), max(2, min(run.sizes.per_device_batch_size, MOST_SAMPLES)))
    if count < 2:
        return {}
    num_batches = -(-LEAST_SAMPLES // count)
    indices = np.linspace(0, len(dataset) - 1, num_batches * count).astype(int).tolist()
    device, inner = run.accelerator.device, run.strategy.inner
    tolerance = TOLERANCE if run.accelerator.mixed_precision == "no" else TOLERANCE_OF_16_BITS

    def forward(samples: Sequence[Any]) -> Sums:
        # A collate may change its samples.
        batch = run.plan.data.collate(copy.deepcopy(samples))
        batch.pop("num_targets", None)
        found: Any = sums_of(to_device(batch, device, pin=False))
        return {name: float(value) for name, value in found.items() if value.dim() == 0}

    def differ(one: float, other: float, scale: float) -> bool:
        return math.isfinite(one) and not abs(one - other) <= tolerance * scale

    with isolated(inner, device), evaluation_mode(inner), torch.compiler.set_stance("force_eager"):
        try:
            # A copy reads, so that forked workers do not inherit an open file.
            twin, found = apart(dataset), dict[str, str]()
            for number in range(num_batches):
                samples = fetch(twin, indices[number::num_batches])
                whole, parts = forward(samples), _parts(forward, samples)
                again: Sums | None = None
                for name in [name for name in whole if name not in found]:
                    value, values = whole[name], [part[name] for part in parts]
                    scale = max(abs(value), sum(map(abs, values)))
                    if differ(value, sum(values), scale):
                        again = forward(samples) if again is None else again
                        is_random = differ(value, again[name], scale)
                        shown = f"{value / count:.4g} of {count} samples, {sum(values) / count:.4g} by parts of them"
                        found[name] = RANDOM if is_random else shown
            return found
        except RecipeError:
            raise
        except Exception:
            return {}


def _parts(forward: Callable[[Sequence[Any]], Sums], samples: Sequence[Any]) -> list[Sums]:
    """Return the sums of one sample, of a half of the others, and of the rest; of halves if one alone fails."""
    half = 1 + (len(samples) - 1) // 2
    try:
        cuts = [0, 1, half, len(samples)] if half > 1 else [0, 1, len(samples)]
        return [forward(samples[start:end]) for start, end in pairwise(cuts)]
    except Exception:
        half = len(samples) // 2
        return [forward(samples[:half]), forward(samples[half:])]


def check_lone_samples(run: RunContext) -> None:
    """Refuse a run in which a process forwards a single sample and a batch norm cannot train on it.

    Raises:
        ValueError: before the first step. Otherwise torch would fail in the middle of the run.
    """
    plan, sizes, strategy = run.plan, run.sizes, run.strategy
    data, order = plan.data, plan.order
    is_known = strategy.is_replicated and not strategy.meets_in_forward and data.step_batches is None
    if not (is_known and trained_batch_norms(strategy.inner)):
        return
    world_size, size = strategy.dims.size, sizes.per_device_batch_size
    step = math.ceil(order.steps_per_epoch) - 1  # last step of an epoch: with `short` it may have fewer samples
    is_short = plan.recipe.data.last_batch == "short" and step < plan.max_steps
    shares = [order.rank_micro_batches(step, rank, world_size, size) for rank in range(world_size)] if is_short else []
    # A process without a share forwards one sample, because the others wait for it.
    if size > 1 and not any(not share or any(len(part) == 1 for part in share) for share in shares):
        return

    def forward_one() -> str:
        try:
            batch, _ = next(read_batches(data.train, data.collate, iter([[0]]), run.accelerator.device, Reading()))
            with isolated(strategy.inner, run.accelerator.device), torch.no_grad():
                strategy.inner(batch)
        except Exception as error:  # the step itself reports any other error
            return str(error)
        return ""

    if "Expected more than 1 value per channel" in on_main(forward_one):
        where = f"step {step + 1}, the last of an epoch," if size > 1 else "each step"
        remedy = "data.last_batch to drop or carry" if size > 1 else "batch.per_device_batch_size to 2 or more"
        raise ValueError(
            f"in {where} a process forwards one sample alone, and this model's batch norm cannot train on one. "
            f"Set {remedy}"
        )
