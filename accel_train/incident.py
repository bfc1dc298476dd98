"""Looking into a bad step: which process, which samples, which module, and whether it happens again."""

import json
import math
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import save
from torch import Tensor

from accel_train.checkpoint import checkpoint_folders, step_of
from accel_train.data_group import data_group, is_sharded
from accel_train.diagnosis import Finding, Question, examine, not_examined
from accel_train.finish import environment
from accel_train.guard import Verdict
from accel_train.incident_writing import (
    MAX_WEIGHTS_BYTES,
    free_name,
    gathered_weights_of,
    last_losses,
    weights_of,
    write_incident,
)
from accel_train.loading import fetch
from accel_train.lockstep import Lockstep, ShardedLockstep, ZeroLockstep
from accel_train.observe.incident_record import (
    FORMAT,
    INCIDENTS,
    TEXT,
    WEIGHTS,
    batch_file,
    classify,
    heaviest_sample,
    incident_folders,
    next_actions,
    not_finite_then,
    summarise_incident,
)
from accel_train.redaction import redact
from accel_train.reduction import ShardedReduction
from accel_train.rerun import RandomState
from accel_train.run import Run
from accel_train.sequence_slices import Slices
from accel_train.state import JsonRecord, StepResult
from accel_train.step import MicroBatch

MAX_ORIGINS = 10
MAX_BATCHES = 4
"""Processes whose micro-batches are kept with an incident."""
MAX_BATCH_BYTES = 2**28


@dataclass(frozen=True)
class Cause:
    """What was found out about a bad step."""

    folder_name: str | None
    """Below `incidents/`; None where it could not be written, and on processes that write none."""
    sentence: str


def look_into(run: Run, result: StepResult, verdict: Verdict, micro_batches: list[MicroBatch]) -> Cause | None:
    """Find the cause of a bad step: all processes compute it again, and the main process writes down what they found.

    Weights, gradients that wait for their update, moments, buffers and random numbers are left as they are. None where the
    run has had its share of incidents (`guard.max_incidents`).

    Raises:
        OutOfStep: an error has parted this process from the others, which hold parts of the model, too.
    """
    with run.observer.pause():
        if not _is_wanted(run):
            return None
        question = _question(run, result, len(micro_batches))
        finding, states = _examine(run, micro_batches, question)
        findings = gather_object([_as_record(run, finding, result)])
        record = _record(run, result, verdict, findings)
        batches = _collect_batches(run, record, finding, _whole(run, result.step - 1, micro_batches), states)
        weights = _gathered_weights(run)
        sentence = record["sentence"]
        if not run.accelerator.is_main_process:
            return Cause(None, sentence)
        try:
            folder = _write(run, record, batches, weights)
        except Exception as error:  # a full disk, say: it costs the folder, and not the run
            return Cause(None, f"{sentence}. The incident could not be written: {error}")
        return Cause(folder.name, f"{sentence}; see {INCIDENTS}/{folder.name}/{TEXT}")


def _is_wanted(run: Run) -> bool:
    allowed = run.recipe.guard.max_incidents
    wanted = [run.accelerator.is_main_process and len(incident_folders(run.output_dir)) < allowed]
    if run.accelerator.num_processes > 1:
        broadcast_object_list(wanted)
    return wanted[0]


def _examine(run: Run, micro_batches: list[MicroBatch], question: Question) -> tuple[Finding, list[RandomState]]:
    device, group, why = run.accelerator.device, data_group(run.accelerator), ""
    if group.num_slices > 1:
        why = "sequences are split over the processes (parallel.sp_size)"
    elif group.num_alike > 1:
        why = "neighbours compute each layer together (parallel.tp_size)"
    if why:
        return not_examined(question, device, why), []
    return examine(run.inner, micro_batches, question, device, _lockstep(run))


def _lockstep(run: Run) -> Lockstep | None:
    """How the processes compute again together; None where each can do so alone."""
    if run.zero is not None and run.zero.spreads_weights:
        return ZeroLockstep(run.inner, run.accelerator.device, run.zero)
    if not is_sharded(run.accelerator):
        return None
    noting = run.reduction if isinstance(run.reduction, ShardedReduction) else None
    return ShardedLockstep(run.inner, run.accelerator.device, noting)


def _gathered_weights(run: Run) -> dict[str, Tensor] | None:
    """On the main process, those of the model, where no process holds all of them; None where they are too large to be kept."""
    if run.has_whole_weights:
        return None
    if run.zero is None:
        return gathered_weights_of(run.inner.model)
    parts = run.zero.parts
    num_bytes = sum(shape.numel() for shape in parts.shapes().values()) * torch.float32.itemsize
    return parts.weights() if num_bytes < MAX_WEIGHTS_BYTES else None


def _question(run: Run, result: StepResult, num_micro_batches: int) -> Question:
    return Question(
        step=result.step,
        seed=run.recipe.seed,
        rank=run.accelerator.process_index,
        world_size=data_group(run.accelerator).size,
        num_targets=result.num_targets,
        loss_scale=result.loss_scale,
        samples=_samples(run, result.step - 1, num_micro_batches),
        is_spike=result.finite,
        compiled=run.recipe.precision.compile is not False,
        seconds=run.recipe.guard.incident_seconds,
    )


def _samples(run: Run, step: int, num_micro_batches: int) -> list[list[int]] | None:
    """The samples of this process's micro-batches in a 0-based step, as indices into the training data."""
    if run.data.step_batches is not None:
        return None
    order, sizes = run.order, run.sizes
    group = data_group(run.accelerator)
    share = order.rank_micro_batches(step, group.rank, group.size, sizes.per_device_batch_size)
    # In a short step a process forwards what is of another's, and weighs nothing: to be there when they meet.
    return share + [order.step_samples(step)[:1].tolist()] * (num_micro_batches - len(share))


def _as_record(run: Run, finding: Finding, result: StepResult) -> JsonRecord:
    """A finding as plain values, with what only the run knows of it."""
    where, has_indices = run.data.where, run.data.step_batches is None
    named = finding.samples or [int(each["sample"]) for each in finding.heaviest]
    origins = []
    if where is not None and has_indices:
        try:
            origins = [f"{index}: {where(index)}" for index in named[:MAX_ORIGINS]]
        except Exception as error:  # of the data set; what is known without it is worth more
            origins = [f"not known: {error}"]
    return {
        **asdict(finding),
        "loss_sum_then": result.loss_sum_here,
        "gradients_finite_then": math.isfinite(result.gradient_sum_here),
        "unit": "sample" if has_indices else "row",
        "origins": origins,
        "host": socket.gethostname(),
    }


def _record(run: Run, result: StepResult, verdict: Verdict, findings: list[JsonRecord]) -> JsonRecord:
    record: JsonRecord = {
        "format": FORMAT,
        "run": run.output_dir.name,
        "step": result.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "kind": "spike" if result.finite else "not finite",
        "action": verdict.action,
        "reason": verdict.reason,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "loss_scale": result.loss_scale,
        "max_grad_norm": result.max_grad_norm,
        "skipped": result.skipped,
        "num_targets": result.num_targets,
        "precision": run.choices["precision.mixed_precision"].value,
        "seed": run.recipe.seed,
        "world_size": run.accelerator.num_processes,
        "num_sharing": data_group(run.accelerator).num_sharing,
        "processes": findings,
        "seconds": max(each["seconds"] for each in findings),
    }
    record["classification"] = classify(record)
    record["sentence"] = summarise_incident(record)
    return record


def _whole(run: Run, step: int, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches of a 0-based step with whole sequences, where this process has computed slices: one process can replay them."""
    collate = run.data.collate
    if not isinstance(collate, Slices):
        return micro_batches
    whole = [
        collate.collate(fetch(run.data.train, indices)) for indices in _samples(run, step, len(micro_batches)) or []
    ]
    return [(batch, int(batch.pop("num_targets"))) for batch in whole]


def _collect_batches(
    run: Run, record: JsonRecord, finding: Finding, micro_batches: list[MicroBatch], states: list[RandomState]
) -> dict[str, bytes]:
    """The bad micro-batches of up to `MAX_BATCHES` processes, each sent to all in its turn: never all of them at once."""
    kept = {}
    for rank in _ranks_to_keep(record):
        content: list[Any] = [None]
        if rank == run.accelerator.process_index:
            content = [_packed(finding, micro_batches, states)]
        if run.accelerator.num_processes > 1:
            broadcast_object_list(content, from_process=rank)
        if content[0] is not None and run.accelerator.is_main_process:
            kept[batch_file(rank)] = content[0]
    record["batches"] = [{"file": name} for name in kept]
    return kept


def _ranks_to_keep(record: JsonRecord) -> list[int]:
    """The processes whose micro-batches are worth keeping: the same answer on all."""
    findings, heaviest = record["processes"], heaviest_sample(record)
    if heaviest is not None:
        return [heaviest[0]["rank"]]
    again = [each["rank"] for each in findings if each["happens_again"]]
    failed = [each["rank"] for each in findings if each["error"]]
    then = [each["rank"] for each in not_finite_then(findings)]
    bad = sorted({*again, *failed}) if again else then or failed
    return (bad or [each["rank"] for each in findings if len(findings) == 1])[:MAX_BATCHES]


def _packed(finding: Finding, micro_batches: Sequence[MicroBatch], states: Sequence[RandomState]) -> bytes | None:
    """Micro-batches as a safetensors file: `0/input_ids`, with the random numbers that stood before each."""
    numbers = range(len(states)) if finding.micro_batch is None else [finding.micro_batch]
    tensors: dict[str, Tensor] = {}
    num_targets: dict[int, int] = {}
    try:
        for number in numbers or range(len(micro_batches)):
            batch, num_targets[number] = micro_batches[number]
            for name, value in batch.items():
                if isinstance(value, Tensor):
                    tensors[f"{number}/{name}"] = value.detach().cpu().contiguous().clone()
            if number >= len(states):
                continue
            tensors[f"{number}/random_state.host"] = states[number].host
            if (cuda := states[number].cuda) is not None:
                tensors[f"{number}/random_state.cuda"] = cuda
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > MAX_BATCH_BYTES:
            return None
        return save(tensors, metadata={"num_targets": json.dumps(num_targets)})
    except Exception:  # the others wait for this process's turn to end, whatever comes of it
        return None


def _write(run: Run, record: JsonRecord, batches: dict[str, bytes], gathered: dict[str, Tensor] | None) -> Path:
    """What only the main process knows, and the folder."""
    record["folder"] = free_name(run.output_dir, record["step"])
    weights = weights_of(run.inner.model) if run.has_whole_weights else gathered
    before = [step for path in checkpoint_folders(run.saver.root) if (step := step_of(path)) and step < record["step"]]
    record["weights"] = {
        "file": None if weights is None else WEIGHTS,
        "checkpoint": f"step-{before[-1]:08d}" if weights is None and before else None,
        "of": "those that it was computed with" if record["skipped"] else "after its update, which was clipped",
    }
    record["last_losses"] = last_losses(run.output_dir) or list(enumerate(run.state.losses[-50:]))
    record["environment"] = environment(run.accelerator.device)
    record["next"] = next_actions(record)
    return write_incident(run.output_dir, redact(record), batches, weights)
