"""Recompute one process's share of a bad step, to find out if it recurs, with which samples, and in which module.

The diagnosis does not change the run: pending gradients, buffers, and random numbers stay as they are.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel_train.core.state import JsonRecord
from accel_train.engine.step import MicroBatch, seed_step
from accel_train.model.isolation import Buffers, RandomState, isolated, without_batch_statistics
from accel_train.model.tensors import names_not_finite, trained
from accel_train.model.training_module import TrainingModule
from accel_train.observe.incident_record import Finding, HeavySample
from accel_train.recovery.module_watch import ModuleWatch, OnNotFinite
from accel_train.runtime.doctor import device_name
from accel_train.runtime.private import norms_of
from accel_train.task import TaskData

MAX_LISTED = 50
"""Maximum number of samples, parameters, and so on that are named. Further ones are only counted."""
MAX_ORIGINS = 10
TOP = 10


@dataclass(frozen=True)
class DiagnosisRequest:
    """One process's facts about a bad step, and the time limit of its diagnosis."""

    step: int  # from 1
    seed: int
    rank: int
    random_rank: int  # `ParallelDims.random_rank`
    world_size: int  # processes that read different samples
    num_targets: int  # of the global batch
    loss_scale: float | None
    is_spike: bool
    """Whether loss and gradients were finite but far too large."""
    samples: list[list[int]] | None = None
    """Indices of each micro-batch in the data set. None if the data set defines its own order."""
    compiled: bool = False
    seconds: float = math.inf  # limit of the diagnosis


@dataclass(frozen=True)
class Outcome:
    """Loss and gradient norms of one forward and backward."""

    loss: float
    norms: dict[str, float]  # of each parameter's gradient, unscaled
    total: float  # norm of all gradients

    @property
    def is_finite(self) -> bool:
        """Return whether loss and norm are finite, by the same rule as in the step."""
        return math.isfinite(self.loss) and math.isfinite(self.total)

    @property
    def not_finite(self) -> list[str]:
        """Return the parameters whose gradient is not finite or too large to have a norm."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]


class Recomputation:
    """Forward and backward of the training module as in the step, on this process alone. Gradients are not kept."""

    def __init__(self, inner: TrainingModule, request: DiagnosisRequest, device: torch.device) -> None:
        self.inner, self.request, self.device = inner, request, device
        self._deadline = time.monotonic() + request.seconds
        self.scale = request.loss_scale or 1.0
        self.buffers = Buffers(inner)
        self.parameters = trained(inner.model)
        share = request.world_size / max(request.num_targets, 1)
        self.share = torch.tensor(share, dtype=torch.float32, device=device) * self.scale

    def compute(self, micro_batch: MicroBatch, watch: ModuleWatch | None = None) -> Outcome:
        """Compute the same as `step.forward_backward` for this micro-batch. DDP's hooks are not called."""
        batch, num_targets = micro_batch
        with torch.enable_grad():
            loss = self.inner(batch)
            if watch is not None:
                watch.forward_is_over()
            detached = loss.detach()
            weight = torch.zeros_like(self.share) if num_targets == 0 else self.share + (detached - detached)
            gradients = torch.autograd.grad(loss, list(self.parameters.values()), weight, allow_unused=True)
        by_name = {name: each for name, each in zip(self.parameters, gradients, strict=True) if each is not None}
        norms = torch.stack([norm.float() for norm in norms_of(list(by_name.values()))]) / self.scale
        # The step also ignores the loss of a micro-batch without targets.
        value = 0.0 if num_targets == 0 else float(detached)
        total = float(torch.linalg.vector_norm(norms))
        return Outcome(value, dict(zip(by_name, norms.tolist(), strict=True)), total)

    def recompute(
        self, part: MicroBatch, state: RandomState, watch: ModuleWatch | None = None, *, by_row: bool = False
    ) -> Outcome:
        """Compute with the random numbers and buffers from before the micro-batch.

        With `by_row`, batch statistics are off, so no row depends on another.
        """
        state.put_back()
        self.buffers.put_back()
        with without_batch_statistics(self.inner) if by_row else nullcontext():
            return self.compute(part, watch)

    def watched(
        self, part: MicroBatch, state: RandomState, on_not_finite: OnNotFinite | None = None, *, by_row: bool = False
    ) -> tuple[ModuleWatch, Outcome]:
        """Recompute while watching every module; return the watch and the outcome."""
        with ModuleWatch(self.inner.model, on_not_finite) as watch:
            return watch, self.recompute(part, state, watch, by_row=by_row)

    @property
    def is_late(self) -> bool:
        """Return whether the time limit of the diagnosis is over."""
        return time.monotonic() > self._deadline


class SamplesOf:
    """A micro-batch, its samples by index, and parts of it."""

    def __init__(self, micro_batch: MicroBatch, indices: list[int] | None) -> None:
        self.micro_batch = micro_batch
        self.batch, self.num_targets = micro_batch
        shapes = [value.shape for value in self.batch.values() if isinstance(value, Tensor) and value.dim()]
        sizes = [shape[0] for shape in shapes]
        self.num_rows = len(indices) if indices else max(set(sizes), key=sizes.count, default=0)
        # Samples packed into one row, padded time-first samples, and nodes of one graph cannot be separated.
        self.can_be_cut = self.num_targets > 0 and self.num_rows > 0 and set(sizes) == {self.num_rows}
        # A program's layout (`ModuleTask`) may be time-first, with equally many time steps and samples.
        if (self.num_rows, 0) in shapes:
            self.can_be_cut &= not any(self.num_rows in shape[1:] for shape in shapes)
        self.indices = indices or list(range(self.num_rows))

    def part(self, rows: Sequence[int]) -> MicroBatch:
        """Return only these rows. A 0-dim tensor stays whole."""
        batch = {
            name: value[list(rows)] if isinstance(value, Tensor) and value.dim() else value
            for name, value in self.batch.items()
        }
        return batch, self.num_targets


def examine(
    inner: TrainingModule, micro_batches: Sequence[MicroBatch], request: DiagnosisRequest, device: torch.device
) -> tuple[Finding, list[RandomState]]:
    """Recompute a process's share of a step and find the problem; return the finding and the random states.

    The finding includes any error of the diagnosis. The random states are from before each recomputed micro-batch.
    """
    began = time.monotonic()
    finding = Finding(request.rank, describe_device(device))
    states: list[RandomState] = []
    try:
        with isolated(inner, device), torch.compiler.set_stance("force_eager") if request.compiled else nullcontext():
            _examine(Recomputation(inner, request, device), micro_batches, finding, states)
    except Exception as error:  # a failed diagnosis must not fail the run
        finding.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finding.seconds = round(time.monotonic() - began, 3)
    return finding, states


def not_examined(request: DiagnosisRequest, device: torch.device) -> Finding:
    """Return a finding without recomputing anything."""
    suspects = [sample for share in request.samples or [] for sample in share][:MAX_LISTED]
    return Finding(request.rank, describe_device(device), suspects=suspects)


def origins_of(finding: Finding, data: TaskData) -> list[str]:
    """Return the origins of the named samples (`7: train.jsonl, row 7`), if the data set knows them."""
    if data.where is None or data.step_batches is not None:
        return []
    named = finding.samples or [each.sample for each in finding.heaviest]
    try:
        return [f"{index}: {data.where(index)}" for index in named[:MAX_ORIGINS]]
    except Exception as error:  # `where` is code of the data set and may raise anything
        return [f"unknown: {error}"]


def describe_device(device: torch.device) -> str:
    """Return the device as text, such as `cuda:3 (NVIDIA H200)` or `cpu`."""
    return f"{device} ({device_name(device)})" if device.type == "cuda" else str(device)


def _examine(
    recomputation: Recomputation, micro_batches: Sequence[MicroBatch], finding: Finding, states: list[RandomState]
) -> None:
    """Fill the finding and the random state before each micro-batch."""
    request = recomputation.request
    finding.weights_not_finite = names_not_finite(dict(recomputation.inner.model.named_parameters()))[:MAX_LISTED]
    finding.columns = _describe_columns(micro_batches[0][0])
    finding.suspects = [sample for share in request.samples or [] for sample in share]
    seed_step(request.seed, request.step - 1, request.random_rank, recomputation.device)
    bad: int | None = None
    finding.loss_sum = finding.gradient_norm = 0.0
    for number, micro_batch in enumerate(micro_batches):
        states.append(RandomState(recomputation.device))
        outcome = recomputation.compute(micro_batch)
        finding.loss_sum += outcome.loss
        finding.gradient_norm += outcome.total
        if not finding.largest_gradients or not outcome.is_finite:
            _note_gradients(finding, outcome)
        if not outcome.is_finite:
            bad = number
            break
    if request.is_spike:
        return _find_heaviest(recomputation, micro_batches, finding, states)
    finding.happens_again = bad is not None
    if bad is None:
        return
    finding.micro_batch = bad
    finding.columns = _describe_columns(micro_batches[bad][0])
    samples = SamplesOf(micro_batches[bad], None if request.samples is None else request.samples[bad])
    finding.suspects = samples.indices
    rows = [] if finding.weights_not_finite else _bad_rows(recomputation, samples, states[bad])
    finding.num_samples = len(rows)
    finding.samples = [samples.indices[row] for row in rows[:MAX_LISTED]]
    _name_place(recomputation, samples, rows, states[bad], finding)


def _describe_columns(batch: Mapping[str, Any]) -> dict[str, JsonRecord]:
    """Return the shape, dtype, minimum, maximum, and count of NaN and Inf of each tensor of a batch."""
    columns = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        facts: JsonRecord = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        facts["not_finite"] = 0
        if value.numel() and not value.is_complex() and value.dtype != torch.bool:
            facts["not_finite"] = int((~torch.isfinite(value)).sum())
            facts |= {"min": value.min().item(), "max": value.max().item()}
        columns[name] = facts
    return columns


def _note_gradients(finding: Finding, outcome: Outcome) -> None:
    finite = [(name, norm) for name, norm in outcome.norms.items() if math.isfinite(norm)]
    finding.largest_gradients = sorted(finite, key=lambda item: item[1], reverse=True)[:TOP]
    finding.gradients_not_finite = outcome.not_finite[:MAX_LISTED]
    finding.num_gradients_not_finite = len(outcome.not_finite)


def _bad_rows(recomputation: Recomputation, samples: SamplesOf, state: RandomState) -> list[int]:
    """Return the rows that are not finite alone, found by bisection.

    The result is empty if only several rows together are not finite, or if the time limit is over.
    """
    if not samples.can_be_cut:
        return []

    def is_bad(rows: Sequence[int]) -> bool:
        part = samples.part(rows)
        return not recomputation.is_late and not recomputation.recompute(part, state, by_row=True).is_finite

    return find_rows(is_bad, range(samples.num_rows))


def find_rows(is_bad: Callable[[Sequence[int]], bool], rows: Sequence[int]) -> list[int]:
    """Return the `rows` that are bad alone; `rows` together are bad."""
    if len(rows) == 1:
        return list(rows)
    middle = len(rows) // 2
    return [row for half in (rows[:middle], rows[middle:]) if is_bad(half) for row in find_rows(is_bad, half)]


def _name_place(
    recomputation: Recomputation, samples: SamplesOf, rows: list[int], state: RandomState, finding: Finding
) -> None:
    """Name the first module with an output that is not finite.

    If the loss is finite, name the first such module of the backward.
    """
    bad_part = samples.part(rows[:1]) if rows else samples.micro_batch
    watch, outcome = recomputation.watched(bad_part, state, by_row=bool(rows))
    ignored: set[str] = set()
    good = [row for row in range(samples.num_rows) if row not in rows] if rows else []
    if good:  # modules that are also not finite for a good sample (a mask of -Inf) are not the cause
        good_watch, good_outcome = recomputation.watched(samples.part(good[:1]), state, by_row=True)
        ignored = good_watch.not_finite() if good_outcome.is_finite else set()
    first = watch.first_not_finite(ignored)
    columns = _describe_columns(bad_part[0])
    if finding.weights_not_finite:
        finding.place = "weights"
    elif any(column["not_finite"] for column in columns.values()):
        finding.place = "batch"
        first = next((call for call in watch.calls if not call.output_finite), None)
    elif first is not None:
        finding.place = "module"
    elif not math.isfinite(outcome.loss):
        finding.place = "loss"
    else:
        finding.place, first = "gradient", watch.first_in_backward
    if first is not None:
        finding.module, finding.module_kind = first.name, first.kind
    elif finding.place == "gradient" and watch.calls and watch.calls[-1].output_gradients_finite:
        # Every gradient between modules is finite, so the gradient of a parameter itself is not.
        finding.module = (outcome.not_finite or finding.gradients_not_finite or ["."])[0].rpartition(".")[0]
        parts = dict(recomputation.inner.model.named_modules())
        finding.module_kind = type(parts[finding.module]).__name__ if finding.module in parts else None


def _find_heaviest(
    recomputation: Recomputation, micro_batches: Sequence[MicroBatch], finding: Finding, states: Sequence[RandomState]
) -> None:
    """Measure loss and gradient norm of single samples, in the order of the step, until the time limit."""
    indices = recomputation.request.samples
    measured = []
    for number, micro_batch in enumerate(micro_batches):
        samples = SamplesOf(micro_batch, None if indices is None else indices[number])
        for row in range(samples.num_rows if samples.can_be_cut else 0):
            if recomputation.is_late:
                break
            alone = recomputation.recompute(samples.part([row]), states[number], by_row=True)
            measured.append(HeavySample(samples.indices[row], number, alone.loss, alone.total))
    measured.sort(key=lambda each: math.inf if math.isnan(each.gradient_norm) else each.gradient_norm, reverse=True)
    finding.heaviest = measured[:TOP]
    if measured:
        finding.micro_batch = measured[0].micro_batch
        finding.columns = _describe_columns(micro_batches[finding.micro_batch][0])
