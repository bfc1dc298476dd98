"""An incident, computed again on this machine: its weights, its micro-batches, and every module's output one by one."""

import json
import os
import pdb  # noqa: T100 (--debug is for people)
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_train.batching import resolve_batch
from accel_train.checkpoint import check
from accel_train.evidence import describe_device
from accel_train.module_watch import Call, ModuleWatch
from accel_train.observe.incident_record import INCIDENTS, WEIGHTS, read_incident
from accel_train.observe.ledger import RECIPE_FILE
from accel_train.ownership import recipe_of_run
from accel_train.precision import set_backends, start_accelerator, start_processes
from accel_train.rerun import Outcome, RandomState, Rerun
from accel_train.resolve import change_model
from accel_train.snapshot import load_model_tensors, restore_weights
from accel_train.state import CheckpointError, JsonRecord
from accel_train.step import MicroBatch, TrainingModule
from accel_train.task import load_task, read_data
from accel_train.trained import check_settings, read_recipe

HOST, CUDA = "random_state.host", "random_state.cuda"
MAX_NAMED = 10


@dataclass(frozen=True)
class Replayed:
    """One micro-batch, computed again."""

    file: str
    number: int
    """Of the micro-batch in its step, from 0."""
    calls: list[Call]
    outcome: Outcome
    first_in_backward: Call | None

    @property
    def happens_again(self) -> bool:
        """Whether loss or gradients are not finite here either."""
        return not self.outcome.is_finite


@dataclass(frozen=True)
class Replay:
    """An incident's micro-batches, computed again."""

    record: JsonRecord
    device: str
    precision: str
    weights: str
    """Where they come from."""
    micro_batches: list[Replayed]


def replay_incident(
    folder: Path, device: str | None = None, *, debug: bool = False, settings: Sequence[str] = ()
) -> Replay:
    """Build the run's model, load the incident's weights, and compute its micro-batches again.

    Args:
        folder: of `RUN/incidents`; the run's recipe lies two folders up, and its data must still be there.
        device: `cpu`, `cuda`; None: what there is.
        debug: stop in the debugger at the first module whose output is not finite.
        settings: `--section.field VALUE`, on top of the run's recipe.

    Raises:
        ValueError: the folder is no incident, keeps no micro-batch, or does not fit the run's recipe.
    """
    record = read_incident(folder)
    files = [folder / each["file"] for each in record["batches"]]
    if not files:
        raise ValueError(f"{folder} keeps no micro-batch ({record['sentence']}), so there is nothing to compute again")
    run_folder = folder.resolve().parent.parent
    path = recipe_of_run(run_folder)
    if path is None:
        raise ValueError(
            f"{run_folder} has no {RECIPE_FILE}: an incident is computed again where it lies, in RUN/{INCIDENTS}/STEP"
        )
    use_device(device)
    check_settings(settings)
    recipe = read_recipe(run_folder, settings)
    processes = start_processes()
    precision = record["precision"] if (record["precision"] != "fp16" or processes.device.type == "cuda") else "no"
    set_backends(recipe.precision, precision, processes.device)
    readers = record["world_size"] // record.get("num_sharing", 1)
    sizes = resolve_batch(recipe.batch, readers)
    accelerator = start_accelerator(precision, recipe.precision, recipe.guard, sizes, processes.device)
    task = load_task(recipe.task)
    data = read_data(task, recipe, progress=sys.stderr.isatty())
    torch.manual_seed(recipe.seed)
    model, _ = change_model(recipe, task.build_model(recipe, data))
    weights = load_weights(model, folder, run_folder, record)
    inner = TrainingModule(model, task).to(accelerator.device)
    accelerator.prepare_model(inner, evaluation_mode=True)  # puts autocast around its forward, and no DDP
    rerun = Rerun(
        inner,
        num_targets=record["num_targets"],
        world_size=readers,
        loss_scale=record["loss_scale"],
        device=accelerator.device,
    )
    found = [each for file in files for each in _replay_file(rerun, file, stop_in_debugger if debug else None)]
    return Replay(record, describe_device(accelerator.device), precision, weights, found)


def use_device(device: str | None) -> None:
    """Let Accelerate take this device.

    Raises:
        ValueError: there is none of the kind.
    """
    if device is None:
        return
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    elif not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type != device:  # type: ignore[union-attr]
        raise ValueError(f"--device {device}: torch sees no such device here; give cpu")


def load_weights(model: nn.Module, folder: Path, run_folder: Path, record: JsonRecord) -> str:
    """Load what the incident kept, or the checkpoint before it; says which.

    Raises:
        ValueError: they are gone, damaged, or those of another model.
    """
    kept, checkpoint = record["weights"]["file"], record["weights"]["checkpoint"]
    if kept is not None:
        path, said = folder / WEIGHTS, f"{WEIGHTS}, {record['weights']['of']}"
    elif checkpoint is not None:
        path = run_folder / "checkpoints" / str(Path(checkpoint).name)
        said = f"{Path(checkpoint).name}, the last checkpoint before the step"
        problem = check(path).problem
        if problem is not None:
            raise ValueError(f"{path} holds the incident's weights, and cannot be used: {problem}")
    else:
        raise ValueError(f"{folder} keeps no weights, and there was no checkpoint before it")
    try:
        if kept is not None:
            load_model_tensors(model, load_file(path))
        else:
            restore_weights(path, model, None)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return said


def _replay_file(rerun: Rerun, path: Path, on_not_finite: Callable[..., None] | None) -> list[Replayed]:
    found = []
    for number, micro_batch, states in read_micro_batches(path, rerun.device):
        _put_back(states, rerun.device)
        with ModuleWatch(rerun.inner.model, on_not_finite) as watch:
            outcome = rerun.compute(micro_batch, watch)
        found.append(Replayed(path.name, number, watch.calls, outcome, watch.first_in_backward))
    return found


def read_micro_batches(path: Path, device: torch.device) -> list[tuple[int, MicroBatch, dict[str, Tensor]]]:
    """The micro-batches of a file by their number in the step, on the device, each with its random states.

    Raises:
        ValueError: the file is gone or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            num_targets = json.loads((file.metadata() or {})["num_targets"])
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    found: list[tuple[int, MicroBatch, dict[str, Tensor]]] = []
    for key, targets in num_targets.items():
        own = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.partition("/")[0] == key}
        states = {name: own.pop(name) for name in (HOST, CUDA) if name in own}
        batch = {name: tensor.to(device) for name, tensor in own.items()}
        found.append((int(key), (batch, int(targets)), states))
    return found


def _put_back(states: dict[str, Tensor], device: torch.device) -> None:
    state = RandomState(device)
    state.host = states.get(HOST, state.host)
    if state.cuda is not None:
        state.cuda = states.get(CUDA, state.cuda)
    state.put_back()


def stop_in_debugger(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """The debugger, where the first output is not finite: `name`, `module`, `args`, `kwargs` and `output` are at hand."""
    print(
        f"\n{name or 'the model'} ({type(module).__name__}) got finite numbers, and returned others: see args, kwargs, output"
    )
    pdb.Pdb(nosigint=True).set_trace()


def format_replay(replay: Replay) -> str:
    """The table, module by module, and the verdict."""
    record = replay.record
    lines = [
        f"step {record['step']}: {record['sentence']}",
        f"on {replay.device}, precision {replay.precision} (then {record['precision']}), weights: {replay.weights}",
    ]
    for each in replay.micro_batches:
        lines += ["", f"{each.file}, micro-batch {each.number}", *_call_lines(each.calls), *_outcome_lines(each)]
    again = [each for each in replay.micro_batches if each.happens_again]
    if record["kind"] == "spike":
        verdict = "a spike: compare loss and gradients with the incident's"
    else:
        verdict = "happens again" if again else "does not happen again"
    return "\n".join([*lines, "", f"verdict: {verdict}"])


def _call_lines(calls: list[Call]) -> list[str]:
    names = [call.name or "(the model)" for call in calls]
    width, kinds = max(map(len, names), default=6), max((len(call.kind) for call in calls), default=4)
    lines = [f"{'module'.ljust(width)}  {'class'.ljust(kinds)}  finite  {'largest':>12}"]
    first = next((call for call in calls if call.inputs_finite and not call.output_finite), None)
    for name, call in zip(names, calls, strict=True):
        mark = "  <- first" if call is first else ""
        finite = "yes" if call.output_finite else "NO"
        lines.append(f"{name.ljust(width)}  {call.kind.ljust(kinds)}  {finite:6}  {call.largest:12.6g}{mark}")
    return lines


def _outcome_lines(each: Replayed) -> list[str]:
    bad = each.outcome.not_finite
    named = ", ".join(bad[:MAX_NAMED]) + (f" and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else "")
    lines = [
        f"loss (sum)     {each.outcome.loss:.6g}",
        f"gradient norm  {each.outcome.total:.6g}",
        f"not finite     {f'{len(bad)} of {len(each.outcome.norms)} gradients: {named}' if bad else 'no gradient'}",
    ]
    if each.first_in_backward is not None and all(call.output_finite for call in each.calls):
        lines.append(f"backward       first in {each.first_in_backward.name or 'the model'}")
    return lines
