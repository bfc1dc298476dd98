"""Checkpoints under transformers' names: `checkpoint-N` in the run folder links to `checkpoints/step-N`."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import _is_peft_model
from transformers.trainer_utils import get_last_checkpoint as newest_of_transformers
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from accel_train.checkpoint.store import MANIFEST, checkpoint_folders, newest_valid, step_of
from accel_train.core.json_io import plain
from accel_train.hf.sharding import is_spread
from accel_train.optim.optimizers import set_rate

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext
    from accel_train.hf import Trainer

SCHEDULER_STATE = "scheduler.json"


def get_last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest verified checkpoint of a run folder, or None. Incomplete and damaged checkpoints are skipped.

    Raises:
        CheckpointError: checkpoints exist, but none of them is valid.
    """
    path, _ = newest_valid(Path(output_dir) / "checkpoints")
    return None if path is None else str(path)


def link_checkpoints(output_dir: Path) -> list[Path]:
    """Link each `checkpoint-N` to `checkpoints/step-N`, and remove such links if their target is missing.

    Returns:
        Paths named `checkpoint-N` that are not links. They stay unchanged.

    Raises:
        OSError: a link cannot be created.
    """
    targets = {f"checkpoint-{step_of(folder)}": folder for folder in checkpoint_folders(output_dir / "checkpoints")}
    for path in output_dir.glob("checkpoint-*"):
        if path.is_symlink() and path.readlink().parts[0] == "checkpoints" and path.name not in targets:
            path.unlink()
    in_the_way = []
    for name, folder in targets.items():
        path = output_dir / name
        if not path.is_symlink() and not path.exists():
            path.symlink_to(folder.relative_to(output_dir), target_is_directory=True)
        elif not path.is_symlink():
            in_the_way.append(path)
    return in_the_way


def stock_checkpoint(args: TrainingArguments, requested: str | bool | None) -> Path | None:
    """Return the checkpoint to resume from if transformers' own Trainer wrote it, or None.

    For `requested=True`, checkpoints of accel_train have priority.
    """
    if requested is True:
        has_ours = bool(checkpoint_folders(Path(args.output_dir) / "checkpoints"))
        found = None if has_ours or not Path(args.output_dir).is_dir() else newest_of_transformers(args.output_dir)
    else:
        found = requested or None
    path = None if found is None else Path(str(found))
    is_stock = path is not None and (path / TRAINER_STATE_NAME).is_file() and not (path / MANIFEST).exists()
    return path if is_stock else None


def load_stock_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a transformers checkpoint into the model.

    Raises:
        ValueError: the weights are not in the safetensors format, or belong to another model.
    """
    if not (folder / SAFE_WEIGHTS_NAME).is_file() and not (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        raise ValueError(
            f"resume_from_checkpoint={folder}: it has no {SAFE_WEIGHTS_NAME}; "
            "only safetensors of a whole model are read"
        )
    # Some models are saved under other weight names. `from_pretrained` handles these names.
    if isinstance(model, PreTrainedModel):
        options: dict[str, Any] = {
            "ignore_mismatched_sizes": True,
            "use_safetensors": True,
            "output_loading_info": True,
        }
        loaded, found = type(model).from_pretrained(folder, config=model.config, **options)
        wrong = sorted(map(str, [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]))
        tensors = loaded.state_dict()
    else:
        tensors, own = load_file(folder / SAFE_WEIGHTS_NAME), model.state_dict()
        wrong = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(f"resume_from_checkpoint={folder}: it is of another model, by its weight {wrong[0]}")
    model.load_state_dict(tensors)


def load_stock_optimizer(optimizer: torch.optim.Optimizer, groups: list[list[nn.Parameter]], folder: Path) -> str:
    """Load the optimizer state of a transformers checkpoint. Return a note if it has no such file.

    Args:
        groups: parameters in the order of transformers' groups, the group with weight decay first.

    Raises:
        ValueError: the state belongs to other parameters.
    """
    path = folder / OPTIMIZER_NAME
    if not path.is_file():
        return f"it has no {OPTIMIZER_NAME}, so the optimizer begins anew; "
    saved = torch.load(path, map_location="cpu", weights_only=True)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group]
    own = optimizer.state_dict()
    places = [number for group in own["param_groups"] for number in group["params"]]
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    place_of = {id(parameter): place for parameter, place in zip(in_order, places, strict=True)}
    fits = len(numbers) == len(parameters) == len(in_order) and all(
        not isinstance(value, Tensor) or value.dim() == 0 or value.shape == parameter.shape
        for number, parameter in zip(numbers, parameters, strict=False)
        for name, value in saved["state"].get(number, {}).items()
        if name.startswith("exp_avg") and "row" not in name and "col" not in name
    )
    if not fits:
        raise ValueError(
            f"resume_from_checkpoint={folder}: {OPTIMIZER_NAME} is of other parameters; use the same model and optim"
        )
    state = {
        place_of[id(parameter)]: saved["state"][number]
        for number, parameter in zip(numbers, parameters, strict=True)
        if number in saved["state"]
    }
    optimizer.load_state_dict({**own, "state": state})
    return ""


def resume_of(args: TrainingArguments, requested: str | bool | None) -> str:
    """Return `checkpoint.resume`: never, auto, or a folder. transformers' checkpoint-N means checkpoints/step-N here.

    Raises:
        ValueError: the checkpoint does not exist.
    """
    if requested is None or requested is False or stock_checkpoint(args, requested) is not None:
        return "never"
    root = Path(args.output_dir) / "checkpoints"
    if requested is True:
        if not checkpoint_folders(root):
            raise ValueError(
                f"resume_from_checkpoint=True: No valid checkpoint found in output directory ({args.output_dir}); "
                "leave it out to start a new run"
            )
        return "auto"
    path = Path(requested)
    theirs = re.fullmatch(r"checkpoint-(\d+)", path.name)
    if not path.exists() and theirs:
        path = path.parent / "checkpoints" / f"step-{int(theirs.group(1)):08d}"
    # `link_checkpoints` makes this link.
    if path.is_symlink():
        path = path.parent / path.readlink()
    if not path.exists():
        raise ValueError(f"Can't find a valid checkpoint at {requested}. Checkpoints of this run are in {root}")
    return str(path)


def adapter_files(trainer: "Trainer") -> dict[str, bytes]:
    """Return the adapter weights of a PEFT model by file name, for `PeftModel.from_pretrained` of a checkpoint.

    Empty for a sharded model: `save_model` gathers its weights.
    """
    model: Any = trainer.model
    if not _is_peft_model(model) or is_spread(trainer):
        return {}
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    tensors = get_peft_model_state_dict(model, adapter_name=next(iter(model.peft_config)))
    return {SAFETENSORS_WEIGHTS_NAME: save({name: each.detach().cpu().contiguous() for name, each in tensors.items()})}


class CheckpointNames:
    """The names of a run's checkpoints, and the best checkpoint in `trainer.state`."""

    def __init__(self, run: "RunContext", trainer: "Trainer") -> None:
        self.run, self.trainer = run, trainer
        self._has_links = True

    def folder(self, step: int) -> str:
        """Return the folder of a checkpoint under transformers' name, or `checkpoints/step-N` without links."""
        output_dir = self.run.plan.output_dir
        return str(output_dir / (f"checkpoint-{step}" if self._has_links else f"checkpoints/step-{step:08d}"))

    def link(self) -> None:
        """Link `checkpoint-N` in the run folder to each published checkpoint, because scripts look for these names."""
        if self.trainer.is_world_process_zero():
            try:
                in_the_way = link_checkpoints(self.run.plan.output_dir)
            except OSError as error:
                self._has_links, in_the_way = False, []
                self.run.observer.note(f"checkpoint-N: no links to checkpoints/ can be made here ({error})")
            for path in in_the_way:
                self.run.observer.note(f"{path} was there before and is left alone; this run's is in checkpoints/")

    def note_best(self) -> None:
        """Copy the best metric so far and its step from the loop."""
        state, args, own = self.trainer.state, self.trainer.args, self.run.state
        if args.metric_for_best_model is not None and own.best_step is not None:
            state.best_metric = own.best_metric
            state.best_global_step = own.best_step if args.save_strategy != "no" else None

    def find_best(self) -> None:
        """Set `state.best_model_checkpoint` to the folder of the best step, if it exists or is being saved."""
        state = self.trainer.state
        saved = {step_of(folder) for folder in checkpoint_folders(self.run.plan.output_dir / "checkpoints")}
        if state.best_global_step is not None and state.best_global_step in saved | {self.run.state.step}:
            state.best_model_checkpoint = self.folder(state.best_global_step)


def first_state(
    trainer: "Trainer", folder: Path | None, scheduler: ReduceLROnPlateau | None, note: Callable[[str], None]
) -> TrainerState:
    """Return a new state, or the state of the resumed checkpoint.

    Also restore the states of callbacks, and of a schedule that follows evaluations.

    Raises:
        OSError: the state cannot be read.
    """
    if folder is None or not (folder / TRAINER_STATE_NAME).exists():
        return TrainerState(stateful_callbacks=exportable(trainer))
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if trainer.args.restore_callback_states_from_checkpoint:
        for problem in restore_callbacks(trainer, state):
            note(problem)
    if scheduler is not None and (folder / SCHEDULER_STATE).exists():
        scheduler.load_state_dict(json.loads((folder / SCHEDULER_STATE).read_text()))
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            set_rate(group, float(rate))
    return state


def exportable(trainer: "Trainer") -> list[Any]:
    """Return the callbacks with a saved state, and the control."""
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def state_text(state: TrainerState, default: Callable[[Any], Any]) -> str:
    """Return the content of trainer_state.json. `default` converts values that JSON lacks.

    Raises:
        TypeError: `default` cannot convert a value.
    """
    return json.dumps(dataclasses.asdict(state), indent=2, default=default)


def as_text(value: Any) -> Any:
    """Return the `plain` value, or its text for other types.

    A callback state that changes late then cannot make a save fail.
    """
    try:
        return plain(value)
    except TypeError:
        return str(value)


def restore_callbacks(trainer: "Trainer", state: TrainerState) -> list[str]:
    """Restore the saved state of each callback. Several callbacks of one class get their states in order.

    Returns:
        A note for each class with another number of callbacks than in the checkpoint.
    """
    callbacks = [callback for callback in exportable(trainer) if isinstance(callback, TrainerCallback)]
    problems = []
    for kind, saved in (state.stateful_callbacks or {}).items():
        if kind == "TrainerControl":
            continue
        states = saved if isinstance(saved, list) else [saved]
        alike = [callback for callback in callbacks if type(callback).__name__ == kind]
        for callback, one in zip(alike, states, strict=False):
            for name, value in {**one["args"], **one["attributes"]}.items():
                setattr(callback, name, value)
        if len(alike) != len(states):
            problems.append(
                f"callbacks: the checkpoint has the state of {len(states)} {kind}, and there are {len(alike)}; "
                f"{min(len(states), len(alike))} got it back"
            )
    return problems
