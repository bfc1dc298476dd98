"""Recompute an incident on this machine: its weights, its micro-batches, and the output of every module."""

import pdb  # noqa: T100 (--debug is for people)
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from accel_train.checkpoint.base import base_problem, digests_of_base
from accel_train.checkpoint.contents import load_model_tensors, restore_weights
from accel_train.checkpoint.run_recipe import check_settings, read_recipe
from accel_train.checkpoint.store import check
from accel_train.core.errors import CheckpointError, SettingError
from accel_train.core.state import Choice
from accel_train.data.batch_sizes import resolve_batch
from accel_train.engine.resolve import change_model
from accel_train.model.kernels.frozen import keep_frozen
from accel_train.model.training_module import TrainingModule
from accel_train.observe.incident_record import (
    INCIDENTS,
    WEIGHTS,
    Finding,
    Incident,
    classify,
    describe_finding,
    describe_heaviest,
    named,
    next_actions,
    read_incident,
    summarise_incident,
)
from accel_train.observe.run_folder import RECIPE_FILE
from accel_train.parallel.precision import set_backends, start_accelerator
from accel_train.recipe.schema import Recipe
from accel_train.recovery.diagnosis import (
    DiagnosisRequest,
    Outcome,
    Recomputation,
    describe_device,
    examine,
    origins_of,
)
from accel_train.recovery.incident_folder import KeptMicroBatch, read_micro_batches
from accel_train.recovery.module_watch import ModuleWatch
from accel_train.runtime.private import separate_accelerate_state
from accel_train.runtime.process_group import start_processes
from accel_train.task import TaskData, load_task, read_data, with_data_of


@dataclass(frozen=True)
class Replayed:
    """A recomputed micro-batch."""

    file: str
    number: int  # of the micro-batch in its step, from 0
    watch: ModuleWatch
    outcome: Outcome

    @property
    def happens_again(self) -> bool:
        """Return whether loss or gradients are not finite here either."""
        return not self.outcome.is_finite


@dataclass(frozen=True)
class Replay:
    """A recomputed incident."""

    incident: Incident
    device: str
    precision: str
    weights: str  # origin of the weights
    micro_batches: list[Replayed]
    findings: list[Finding]
    """Findings of the processes whose batches were kept. Empty if the run itself diagnosed the step."""

    @property
    def classification(self) -> str:
        """Return deterministic, transient, or unknown: from the findings here, or from the run's own diagnosis."""
        return classify(self._judged) if self.findings else self.incident.classification

    @property
    def _judged(self) -> Incident:
        return replace(self.incident, not_diagnosed=None, processes=self.findings)

    @property
    def verdict(self) -> list[str]:
        """Return lines: a sentence that says whether the problem recurs, then one line per next action."""
        incident = self._judged
        if incident.kind == "spike":
            heaviest = f"{describe_heaviest(incident)}; " if self.findings else ""
            return [f"a spike: {heaviest}compare loss and gradients with the incident"]
        if not self.findings:
            again = any(each.happens_again for each in self.micro_batches)
            return ["happens again" if again else "does not happen again"]
        incident.classification = self.classification
        lines = [summarise_incident(incident)]
        if incident.classification == "transient" and incident.weights.file is None:
            return [
                *lines,
                "The weights are from an earlier step. With the weights of this step, it might happen again.",
            ]
        return [*lines, *(f"- {action}" for action in next_actions(incident, is_replayed=True))]


def replay_incident(
    folder: Path, device: str | None = None, *, debug: bool = False, settings: Sequence[str] = ()
) -> Replay:
    """Build the run's model, load the incident's weights, and recompute its micro-batches.

    A step that the run did not diagnose (for example with a sharded model) is diagnosed here: findings name samples and
    module.

    Args:
        folder: a folder in `RUN/incidents`. The run's recipe is two folders up, and its data must still exist.
        device: `cpu` or `cuda`; None for the available device.
        debug: whether to stop in the debugger at the first module whose output is not finite.
        settings: `--section.field VALUE`, applied to the run's recipe.

    Raises:
        ValueError: the folder is not an incident, keeps no micro-batch, or does not fit the run's recipe.
    """
    incident = read_incident(folder)
    if not incident.batches:
        raise ValueError(f"{folder} does not contain a micro-batch to recompute ({incident.sentence})")
    run_folder = folder.resolve().parent.parent
    if not (run_folder / RECIPE_FILE).is_file():
        raise ValueError(
            f"{run_folder} does not contain {RECIPE_FILE}. Keep an incident in its run folder: RUN/{INCIDENTS}/STEP"
        )
    check_settings(settings)
    with device_of_replay(device):
        return _recompute(folder, run_folder, incident, read_recipe(run_folder, settings), debug=debug)


def _recompute(folder: Path, run_folder: Path, incident: Incident, recipe: Recipe, *, debug: bool) -> Replay:
    device_here = start_processes().device
    precision = "bf16" if incident.precision == "fp8" else incident.precision
    precision = "no" if precision == "fp16" and device_here.type != "cuda" else precision
    set_backends(recipe.precision, precision, device_here)
    readers = incident.world_size // incident.num_sharing
    sizes = resolve_batch(recipe.batch, readers)
    accelerator = start_accelerator(precision, recipe.precision, recipe.guard, sizes, device_here)
    task = load_task(recipe.task)
    recipe = with_data_of(task, recipe)
    data = read_data(task, recipe, progress=sys.stderr.isatty())
    torch.manual_seed(recipe.seed)
    model, _, frozen = change_model(recipe, task, task.build_model(recipe, data))
    base = digests_of_base(model, frozen) if recipe.model.pretrained is not None else {}
    weights = load_weights(model, folder, run_folder, incident, base)
    if recipe.model.frozen_dtype == "nf4":  # not needed for bf16, because autocast rounds to bf16
        keep_frozen(model, frozen, Choice("nf4", "as set"), precision, accelerator.device)
    inner = TrainingModule(model, task).to(accelerator.device)
    accelerator.prepare_model(inner, evaluation_mode=True)  # wraps the forward in autocast, without DDP
    recomputation = Recomputation(inner, _request(incident, readers), accelerator.device)
    replayed, findings = [], []
    for entry in incident.batches:
        kept = read_micro_batches(folder / entry.file, accelerator.device)
        if incident.not_diagnosed is not None:
            finding, kept = _diagnose(recomputation, incident, entry.rank, kept, data)
            findings.append(finding)
        for each in kept:
            watched = recomputation.watched(each.micro_batch, each.state, stop_in_debugger if debug else None)
            replayed.append(Replayed(entry.file, each.number, *watched))
    return Replay(incident, describe_device(accelerator.device), precision, weights, replayed, findings)


def _request(incident: Incident, readers: int) -> DiagnosisRequest:
    return DiagnosisRequest(
        **{name: getattr(incident, name) for name in ("step", "seed", "num_targets", "loss_scale")},
        rank=0,
        random_rank=0,
        world_size=readers,
        is_spike=incident.kind == "spike",
    )


def _diagnose(
    recomputation: Recomputation, incident: Incident, rank: int, kept: list[KeptMicroBatch], data: TaskData
) -> tuple[Finding, list[KeptMicroBatch]]:
    """Diagnose one process's share of the step; return the finding and the bad micro-batch, if any."""
    samples = [each.samples for each in kept if each.samples is not None] or None
    random_rank = rank // incident.num_sharing
    request = replace(recomputation.request, rank=rank, random_rank=random_rank, samples=samples)
    micro_batches = [each.micro_batch for each in kept]
    finding, states = examine(recomputation.inner, micro_batches, request, recomputation.device)
    then, number = incident.processes[rank], finding.micro_batch
    merged = replace(
        finding,
        device=then.device,
        loss_sum_then=then.loss_sum_then,
        gradients_finite_then=then.gradients_finite_then,
        unit=then.unit,
        origins=origins_of(finding, data),
        host=then.host,
    )
    return merged, [] if number is None else [replace(kept[number], state=states[number])]


@contextmanager
def device_of_replay(device: str | None) -> Iterator[None]:
    """Select this device for Accelerate inside the block. Later runs of this process choose their own.

    Raises:
        ValueError: the machine does not have this device.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield
        return
    if device != "cpu" and (here is None or here.type != device):
        raise SettingError("torch does not see this device here", "Use cpu", at=f"--device {device}")
    with patch_environment(accelerate_use_cpu=str(device == "cpu").lower()), separate_accelerate_state():
        yield


def load_weights(model: nn.Module, folder: Path, run_folder: Path, incident: Incident, base: Mapping[str, str]) -> str:
    """Load the incident's weights, or the weights of the checkpoint before it; return their origin.

    Args:
        base: digests of the frozen base weights. The model already holds these weights.

    Raises:
        ValueError: the weights are missing, damaged, or belong to another model.
    """
    kept, checkpoint = incident.weights.file, incident.weights.checkpoint
    path, origin = folder / WEIGHTS, f"{WEIGHTS}, {incident.weights.of}"
    if kept is None:
        if checkpoint is None:
            raise ValueError(f"{folder} does not contain weights, and the run had no checkpoint before it")
        path = run_folder / "checkpoints" / Path(checkpoint).name
        origin = f"{path.name}, the last checkpoint before the step"
        if (problem := check(path).problem) is not None:
            raise ValueError(f"{path} holds the incident's weights, but cannot be used: {problem}")
    try:
        if kept is not None:
            load_model_tensors(model, load_file(path), base)
        else:
            if problem := base_problem(path, base):
                raise ValueError(problem)
            restore_weights(path, model, None)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return origin


def stop_in_debugger(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Open the debugger at the first output that is not finite.

    The debugger shows `name`, `module`, `args`, `kwargs`, and `output`.
    """
    who = f"{name or 'the model'} ({type(module).__name__})"
    print(f"\n{who} received finite numbers but returned NaN or Inf: see args, kwargs, output")
    pdb.Pdb(nosigint=True).set_trace()


def format_replay(replay: Replay) -> str:
    """Return a table of all modules, and the verdict."""
    incident = replay.incident
    lines = [
        f"step {incident.step}: {incident.sentence}",
        f"on {replay.device}, precision {replay.precision} (then {incident.precision}), weights: {replay.weights}",
    ]
    for each in replay.micro_batches:
        lines += ["", f"{each.file}, micro-batch {each.number}", *_call_lines(each), *_outcome_lines(each)]
    for finding in replay.findings:
        lines += ["", f"process {finding.rank}: {describe_finding(finding)}"]
    first, *more = replay.verdict
    return "\n".join([*lines, "", f"verdict: {first}", *more])


def _call_lines(each: Replayed) -> list[str]:
    calls, first = each.watch.calls, each.watch.first_not_finite()
    names = [call.name or "(the model)" for call in calls]
    width, kinds = max(map(len, names), default=6), max((len(call.kind) for call in calls), default=4)
    lines = [f"{'module'.ljust(width)}  {'class'.ljust(kinds)}  finite  {'largest':>12}"]
    for name, call in zip(names, calls, strict=True):
        mark = "  <- first" if call is first else ""
        finite = "yes" if call.output_finite else "NO"
        lines.append(f"{name.ljust(width)}  {call.kind.ljust(kinds)}  {finite:6}  {call.largest:12.6g}{mark}")
    return lines


def _outcome_lines(each: Replayed) -> list[str]:
    bad = each.outcome.not_finite
    lines = [
        f"loss (sum)     {each.outcome.loss:.6g}",
        f"gradient norm  {each.outcome.total:.6g}",
        "not finite     "
        f"{f'{len(bad)} of {len(each.outcome.norms)} gradients: {named(bad, most=10)}' if bad else 'no gradient'}",
    ]
    first = each.watch.first_in_backward
    if first is not None and not each.watch.not_finite():
        lines.append(f"backward       first in {first.name or 'the model'}")
    return lines
