"""Diagnose a bad step: name the process, the samples, and the module, and find out whether the problem recurs."""

import math
import shlex
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from accel_train.checkpoint.store import free_path, steps_of
from accel_train.core.json_io import utc_now
from accel_train.core.redaction import redact
from accel_train.core.state import StepResult
from accel_train.core.work import working
from accel_train.data.samples import fetch
from accel_train.engine.run import RunContext
from accel_train.engine.step import MicroBatch
from accel_train.guard.guard import Decision
from accel_train.model.isolation import RandomState
from accel_train.observe.incident_record import (
    INCIDENTS,
    TEXT,
    WEIGHTS,
    Finding,
    Incident,
    KeptBatch,
    KeptWeights,
    batch_file,
    can_replay,
    classify,
    heaviest_sample,
    incident_folders,
    incident_of,
    next_actions,
    not_finite_then,
    summarise_incident,
)
from accel_train.parallel.sequence_parallel import Slices
from accel_train.recovery.diagnosis import DiagnosisRequest, examine, not_examined, origins_of
from accel_train.recovery.incident_folder import last_losses, pack_micro_batches, write_incident
from accel_train.runtime.doctor import environment
from accel_train.runtime.process_group import on_main

MAX_BATCHES = 4
"""Maximum number of processes whose micro-batches are kept, if the bad processes are known."""
MAX_BATCHES_BYTES = 2**30
"""Size limit of all processes' micro-batches kept with an incident, in bytes."""
MAX_WEIGHTS_BYTES = 2**31
OF_RESULT = ("step", "loss", "grad_norm", "learning_rate", "loss_scale", "max_grad_norm", "skipped", "num_targets")


def diagnose(
    run: RunContext, result: StepResult, decision: Decision, micro_batches: list[MicroBatch]
) -> tuple[str | None, str]:
    """Find the cause of a bad step; return the incident folder's name and a sentence about the cause.

    Each process recomputes its share, and the main process writes the folder. The name is None on the other processes,
    and if the folder could not be written. The sentence is empty once the run has written `guard.max_incidents`
    incidents.

    Sharded weights, split layers, and split sequences cannot be recomputed by one process here. Then batches and whole
    weights are kept for `replay`, and `replay` diagnoses the step on one process. Weights, gradients that wait for
    their update, moments, buffers, and random numbers stay as they are.
    """
    with run.observer.pause("recovery"):
        allowed = run.plan.recipe.guard.max_incidents
        if on_main(lambda: len(incident_folders(run.plan.output_dir)) >= allowed):
            return None, ""
        request, why_not = _request(run, result, len(micro_batches)), _why_not_here(run)
        states: list[RandomState] = []
        if why_not is None:
            finding, states = examine(run.strategy.inner, micro_batches, request, run.accelerator.device)
        else:
            finding = not_examined(request, run.accelerator.device)
        findings = gather_object([_completed(run, finding, result)])
        incident = _incident(run, result, decision, findings, why_not)
        share = _whole_sequences(run, result.step - 1, micro_batches)
        numbers = list(range(len(states) or len(share))) if finding.micro_batch is None else [finding.micro_batch]
        pack = partial(pack_micro_batches, share, numbers, states, request.samples)
        batches = _collect_batches(run, incident, pack)
        weights = _weights(run)
        sentence = incident.sentence
        if not run.accelerator.is_main_process:
            return None, sentence
        try:
            with working("writing the incident"):
                folder = _write(run, incident, batches, weights)
        except Exception as error:  # for example a full disk: the run continues without the folder
            return None, f"{sentence}. The incident could not be written: {error}"
        if why_not is not None and can_replay(incident):
            sentence += f"; run accel-train replay {shlex.quote(str(folder))} to name the sample and the module"
        return folder.name, f"{sentence}; see {INCIDENTS}/{folder.name}/{TEXT}"


def _why_not_here(run: RunContext) -> str | None:
    """Return why a process cannot recompute its share alone; None if each process can."""
    if run.strategy.dims.sp_size > 1:
        return "sequences are split over the processes (parallel.sp_size)"
    if run.strategy.dims.tp_size > 1:
        return "several processes compute each layer together (parallel.tp_size)"
    if run.plan.recipe.parallel.sync_batch_norm and run.accelerator.num_processes > 1:
        return "batch norms take statistics over all processes (parallel.sync_batch_norm)"
    if not run.strategy.has_whole_weights:
        return f"each process holds a shard of the weights (parallel.strategy {run.plan.recipe.parallel.strategy})"
    return None


def _weights(run: RunContext) -> dict[str, Tensor] | None:
    """Return the weights on the main process; None if they are too large to keep with each incident."""
    shapes, base = run.strategy.weight_shapes(), run.strategy.inner.base
    num_bytes = sum(shape.numel() for name, shape in shapes.items() if name not in base) * torch.float32.itemsize
    return run.strategy.full_weights(base) if num_bytes < MAX_WEIGHTS_BYTES else None


def _request(run: RunContext, result: StepResult, num_micro_batches: int) -> DiagnosisRequest:
    dims, recipe = run.strategy.dims, run.plan.recipe
    return DiagnosisRequest(
        step=result.step,
        seed=recipe.seed,
        rank=run.accelerator.process_index,
        random_rank=dims.random_rank,
        world_size=dims.size,
        num_targets=result.num_targets,
        loss_scale=result.loss_scale,
        samples=_samples(run, result.step - 1, num_micro_batches),
        is_spike=result.finite,
        compiled=recipe.precision.compiles,
        seconds=recipe.guard.incident_seconds,
    )


def _samples(run: RunContext, step: int, num_micro_batches: int) -> list[list[int]] | None:
    """Return the samples of this process's micro-batches in a 0-based step, as indices into the training data."""
    if run.plan.data.step_batches is not None:
        return None
    order, dims = run.plan.order, run.strategy.dims
    share = order.rank_micro_batches(step, dims.rank, dims.size, run.sizes.per_device_batch_size)
    # In a short step, a process without samples forwards a sample of another process with weight 0. So it takes part in
    # the collectives.
    return share + [order.step_samples(step)[:1].tolist()] * (num_micro_batches - len(share))


def _completed(run: RunContext, finding: Finding, result: StepResult) -> Finding:
    """Return a finding with the run's own numbers of the step."""
    return replace(
        finding,
        loss_sum_then=result.loss_sum_here,
        gradients_finite_then=math.isfinite(result.gradient_sum_here),
        unit="sample" if run.plan.data.step_batches is None else "row",
        origins=origins_of(finding, run.plan.data),
        host=socket.gethostname(),
    )


def _incident(
    run: RunContext, result: StepResult, decision: Decision, findings: list[Finding], why_not: str | None
) -> Incident:
    incident = Incident(
        run=run.plan.output_dir.name,
        **{name: getattr(result, name) for name in OF_RESULT},
        time=utc_now(),
        kind="spike" if result.finite else "not finite",
        action=decision.action,
        reason=decision.reason,
        precision=run.plan.choices["precision.mixed_precision"].value,
        seed=run.plan.recipe.seed,
        world_size=run.accelerator.num_processes,
        num_sharing=run.strategy.dims.num_sharing,
        not_diagnosed=why_not,
        processes=findings,
        seconds=max(each.seconds for each in findings),
    )
    incident.classification = classify(incident)
    incident.sentence = summarise_incident(incident)
    return incident


def _whole_sequences(run: RunContext, step: int, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches of a 0-based step. Slices computed by this process are replaced by whole sequences."""
    collate = run.plan.data.collate
    if not isinstance(collate, Slices):
        return micro_batches
    samples, train = _samples(run, step, len(micro_batches)) or [], run.plan.data.train
    whole = [collate.collate(fetch(train, indices)) for indices in samples]
    return [(batch, int(batch.pop("num_targets"))) for batch in whole]


def _collect_batches(run: RunContext, incident: Incident, pack: Callable[[], bytes | None]) -> dict[str, bytes]:
    """Send micro-batches worth keeping to the main process, one process at a time, up to `MAX_BATCHES_BYTES`."""
    kept, num_bytes = dict[str, bytes](), 0
    for rank in _ranks_to_keep(incident):
        content: list[Any] = [pack() if rank == run.accelerator.process_index else None]
        broadcast_object_list(content, from_process=rank)
        if content[0] is None:
            continue
        num_bytes += len(content[0])
        if num_bytes > MAX_BATCHES_BYTES:
            break
        incident.batches.append(KeptBatch(batch_file(rank), rank))
        if run.accelerator.is_main_process:
            kept[batch_file(rank)] = content[0]
    return kept


def _ranks_to_keep(incident: Incident) -> list[int]:
    """Return the processes whose micro-batches are worth keeping; equal on all processes."""
    findings, heaviest = incident.processes, heaviest_sample(incident)
    if heaviest is not None:
        return [heaviest[0].rank]
    then = [each.rank for each in not_finite_then(findings)]
    if incident.not_diagnosed is not None:
        # One process of each group that reads the same samples. All groups if the bad processes are not known, because
        # gradients were summed before they were checked.
        share = incident.num_sharing
        return list({rank // share: rank for rank in then or range(len(findings))}.values())
    again = [each.rank for each in findings if each.happens_again]
    failed = [each.rank for each in findings if each.error]
    bad = sorted({*again, *failed}) if again else then or failed
    return (bad or [each.rank for each in findings if len(findings) == 1])[:MAX_BATCHES]


def _write(run: RunContext, incident: Incident, batches: dict[str, bytes], weights: dict[str, Tensor] | None) -> Path:
    """Add the facts that only the main process knows, and write the folder."""
    # The same step may have failed before, on a branch that a rollback abandoned.
    incident.folder = free_path(run.plan.output_dir / INCIDENTS / f"step-{incident.step:08d}").name
    before = [step for step in steps_of(run.saver.root) if 0 < step < incident.step]
    incident.weights = KeptWeights(
        None if weights is None else WEIGHTS,
        f"step-{before[-1]:08d}" if weights is None and before else None,
        "the weights before the step" if incident.skipped else "the weights after the clipped update",
    )
    incident.last_losses = last_losses(run.plan.output_dir) or list(enumerate(run.state.losses[-50:]))
    incident.environment = environment(run.accelerator.device)
    incident.next = next_actions(incident)
    return write_incident(run.plan.output_dir, incident_of(redact(asdict(incident))), batches, weights)
