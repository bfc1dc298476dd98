"""Computing a bad step again, each process for itself: does it happen again, with which samples, in which module.

Nothing of the run is changed by it: gradients that wait for an update, buffers and random numbers are as they were.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from accel_train.evidence import SamplesOf, describe_columns, describe_device, weights_not_finite
from accel_train.lockstep import Lockstep, OutOfStep, TurnFailed, describe_error
from accel_train.module_watch import ModuleWatch, class_name
from accel_train.rerun import Outcome, RandomState, Rerun, eager, undisturbed
from accel_train.step import MicroBatch, TrainingModule, seed_step

MAX_LISTED = 50
"""Samples, parameters and so on that are named; more are only counted."""
TOP = 10


@dataclass(frozen=True)
class Question:
    """A step that went wrong, as one process knows it."""

    step: int
    """From 1."""
    seed: int
    rank: int
    world_size: int
    num_targets: int
    """Of the global batch."""
    loss_scale: float | None
    samples: list[list[int]] | None
    """The data set's indices of each micro-batch; None where the data has an order of its own."""
    is_spike: bool
    """Loss and gradients were finite, only far too large."""
    compiled: bool
    seconds: float
    """How long looking into it may take."""


@dataclass
class Finding:
    """What one process found; filled as far as it got."""

    rank: int
    device: str
    happens_again: bool | None = None
    """None: it could not be computed again, or (spikes) is for all processes together to say."""
    place: str | None = None
    """Where the first number that is not finite comes from: `weights`, `batch`, `module`, `loss` or `gradient`."""
    micro_batch: int | None = None
    """The first bad one, from 0."""
    samples: list[int] = field(default_factory=list)
    """Indices in the data set of those that alone are bad (rows of the micro-batch where it has no indices) ..."""
    num_samples: int = 0
    """... and how many they are."""
    suspects: list[int] = field(default_factory=list)
    """All samples of the bad micro-batch, or, where none is bad any more, of the step."""
    module: str | None = None
    module_kind: str | None = None
    weights_not_finite: list[str] = field(default_factory=list)
    gradients_not_finite: list[str] = field(default_factory=list)
    num_gradients_not_finite: int = 0
    largest_gradients: list[tuple[str, float]] = field(default_factory=list)
    """Norms by parameter, of this process alone, as far as they are finite."""
    loss_sum: float | None = None
    """Of this process, computed again."""
    gradient_norm: float | None = None
    """Of this process alone, computed again: the sum over its micro-batches, which is the most that it can be."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the bad micro-batch, or the first: shape, smallest and largest number, and how many are not finite."""
    heaviest: list[dict[str, float]] = field(default_factory=list)
    """Spikes: samples with their own loss and gradient norm, the largest first."""
    seconds: float = 0.0
    error: str | None = None
    """Why it ended early."""


@dataclass(frozen=True)
class _Search:
    """A process's share of a step, computed again until the deadline, and what is known of it so far."""

    rerun: Rerun
    micro_batches: Sequence[MicroBatch]
    question: Question
    finding: Finding
    states: list[RandomState]
    deadline: float


def examine(
    inner: TrainingModule,
    micro_batches: Sequence[MicroBatch],
    question: Question,
    device: torch.device,
    lockstep: Lockstep | None = None,
) -> tuple[Finding, list[RandomState]]:
    """Compute this process's share of a step again, and say what is wrong with it; an error is a finding, too.

    Also where the random numbers stood before each of its micro-batches, as far as it got. With a `lockstep` all processes
    call this at once, and each goes on computing until none of them looks for anything any more.

    Raises:
        OutOfStep: an error has parted this process from the others (FSDP2), which wait for it.
    """
    began = time.monotonic()
    finding = Finding(question.rank, describe_device(device))
    states: list[RandomState] = []
    try:
        with undisturbed(inner, device), eager(question.compiled), lockstep or nullcontext():
            rerun = Rerun(
                inner,
                num_targets=question.num_targets,
                world_size=question.world_size,
                loss_scale=question.loss_scale,
                device=device,
                lockstep=lockstep,
            )
            search = _Search(rerun, micro_batches, question, finding, states, began + question.seconds)
            if lockstep is None:
                _examine(search)
            else:
                _examine_among_others(search, lockstep)
    except OutOfStep:
        raise
    except Exception as error:  # a fault of the search must not become one of the run
        finding.error = describe_error(error)
    finding.seconds = round(time.monotonic() - began, 3)
    return finding, states


def not_examined(question: Question, device: torch.device, why: str) -> Finding:
    """What is known where a process cannot compute by itself, because others have a part in whatever it computes."""
    finding = Finding(question.rank, describe_device(device))
    finding.suspects = [sample for share in question.samples or [] for sample in share][:MAX_LISTED]
    finding.error = why
    return finding


def _examine_among_others(search: _Search, lockstep: Lockstep) -> None:
    """This process's search, and then turns for the sake of the others."""
    rerun, whole = search.rerun, search.micro_batches[0]
    samples = SamplesOf(whole, search.question.samples[0] if search.question.samples else None)
    parts = [samples.part([0]), whole] if samples.can_be_cut else [whole]
    lockstep.pieces = [partial(rerun.stand_in, part) for part in parts]
    try:
        _examine(search)
    except OutOfStep:
        raise
    except TurnFailed as error:
        search.finding.error = str(error)
    except Exception as error:  # the others wait for this process's turns, whatever became of its own
        search.finding.error = describe_error(error)
    said = lockstep.serve()
    search.finding.error = search.finding.error or said


def _examine(search: _Search) -> None:
    rerun, micro_batches, question = search.rerun, search.micro_batches, search.question
    finding, states = search.finding, search.states
    if rerun.lockstep is None:
        broken = weights_not_finite({name: each.detach() for name, each in rerun.inner.model.named_parameters()})
    else:
        broken = weights_not_finite(rerun.lockstep.local_parts(), rerun.device)
    finding.weights_not_finite = broken[:MAX_LISTED]
    finding.columns = describe_columns(micro_batches[0][0])
    finding.suspects = [sample for share in question.samples or [] for sample in share]
    seed_step(question.seed, question.step - 1, question.rank, rerun.device)
    bad: int | None = None
    finding.loss_sum = finding.gradient_norm = 0.0
    for number, micro_batch in enumerate(micro_batches):
        states.append(RandomState(rerun.device))
        outcome = rerun.compute(micro_batch)
        finding.loss_sum += outcome.loss
        finding.gradient_norm += outcome.total
        if not finding.largest_gradients or not outcome.is_finite:
            _note_gradients(finding, outcome)
        if not outcome.is_finite:
            bad = number
            break
    if question.is_spike:
        _find_heaviest(search)
        return
    finding.happens_again = bad is not None
    if bad is None:
        return
    finding.micro_batch = bad
    finding.columns = describe_columns(micro_batches[bad][0])
    samples = SamplesOf(micro_batches[bad], None if question.samples is None else question.samples[bad])
    finding.suspects = samples.indices
    rows = [] if finding.weights_not_finite else _bad_rows(rerun, samples, states[bad], search.deadline)
    finding.num_samples = len(rows)
    finding.samples = [samples.indices[row] for row in rows[:MAX_LISTED]]
    _name_place(rerun, samples, rows, states[bad], finding)


def _note_gradients(finding: Finding, outcome: Outcome) -> None:
    finite = [(name, norm) for name, norm in outcome.norms.items() if math.isfinite(norm)]
    finding.largest_gradients = sorted(finite, key=lambda item: item[1], reverse=True)[:TOP]
    finding.gradients_not_finite = outcome.not_finite[:MAX_LISTED]
    finding.num_gradients_not_finite = len(outcome.not_finite)


def _with_nan_on_top(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _bad_rows(rerun: Rerun, samples: SamplesOf, state: RandomState, deadline: float) -> list[int]:
    """The rows that alone are not finite, by halving; empty where only several together are, or time ran out."""
    if not samples.can_be_cut:
        return []

    def is_bad(rows: Sequence[int]) -> bool:
        return time.monotonic() < deadline and not rerun.compute_apart(samples.part(rows), state).is_finite

    return find_rows(is_bad, range(samples.num_rows))


def find_rows(is_bad: Callable[[Sequence[int]], bool], rows: Sequence[int]) -> list[int]:
    """Of rows that together are bad, those that are so alone."""
    if len(rows) == 1:
        return list(rows)
    middle = len(rows) // 2
    return [row for half in (rows[:middle], rows[middle:]) if is_bad(half) for row in find_rows(is_bad, half)]


def _name_place(rerun: Rerun, samples: SamplesOf, rows: list[int], state: RandomState, finding: Finding) -> None:
    """The first module that makes something not finite, on the way there or, where the loss is finite, on the way back."""
    innocent: set[str] = set()
    with ModuleWatch(rerun.inner.model) as watch:
        if rows:
            outcome = rerun.compute_apart(samples.part(rows[:1]), state, watch)
        else:
            outcome = rerun.compute_again((samples.batch, samples.num_targets), state, watch)
    good = [row for row in range(samples.num_rows) if row not in rows] if rows else []
    if good:
        with ModuleWatch(rerun.inner.model) as beside:
            is_well = rerun.compute_apart(samples.part(good[:1]), state, beside).is_finite
        innocent = beside.not_finite() if is_well else set()
    first = watch.first_not_finite(innocent)
    columns = describe_columns(samples.part(rows[:1])[0] if rows else samples.batch)
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
        # Every gradient that passed between modules is finite: it is a parameter's own.
        finding.module = (outcome.not_finite or finding.gradients_not_finite or ["."])[0].rpartition(".")[0]
        parts = dict(rerun.inner.model.named_modules())
        finding.module_kind = class_name(parts[finding.module]) if finding.module in parts else None


def _find_heaviest(search: _Search) -> None:
    """Loss and gradient norm of single samples, in the order of the step, as many as there is time for."""
    finding, indices = search.finding, search.question.samples
    measured = []
    for number, micro_batch in enumerate(search.micro_batches):
        samples = SamplesOf(micro_batch, None if indices is None else indices[number])
        for row in range(samples.num_rows if samples.can_be_cut else 0):
            if time.monotonic() > search.deadline:
                break
            alone = search.rerun.compute_apart(samples.part([row]), search.states[number])
            facts = {"sample": samples.indices[row], "micro_batch": number}
            measured.append({**facts, "loss": alone.loss, "gradient_norm": alone.total})
    measured.sort(key=lambda each: _with_nan_on_top(each["gradient_norm"]), reverse=True)
    finding.heaviest = measured[:TOP]
    if measured:
        finding.micro_batch = int(measured[0]["micro_batch"])
        finding.columns = describe_columns(search.micro_batches[finding.micro_batch][0])
