"""Saved models and checkpoints under transformers' names: `checkpoint-N` links to `checkpoints/step-N`."""

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import _is_peft_model
from transformers.trainer_utils import get_last_checkpoint as newest_of_transformers
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from accel_train.checkpoint.contents import OPTIMIZER, load_model_tensors, model_tensors
from accel_train.checkpoint.store import (
    MANIFEST,
    checkpoint_folders,
    folder_of,
    newest_valid,
    remove,
    rotate,
    step_of,
    steps_of,
)
from accel_train.core.errors import setting_error
from accel_train.core.json_io import parse_json, plain
from accel_train.model.tensors import as_tensors, trained
from accel_train.optim.schedule import set_rate
from accel_train.parallel.zero import import_deepspeed
from accel_train.recipe.schema import Recipe

if TYPE_CHECKING:
    from accel_train.engine.run import RunContext
    from accel_train.hf import Trainer

SCHEDULER_STATE, STREAM = "scheduler.json", "stream.json"
_resume_error = partial(setting_error, "resume_from_checkpoint")


def get_last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest verified checkpoint of a run folder, or None. Incomplete and damaged checkpoints are skipped.

    Raises:
        CheckpointError: checkpoints exist, but none of them is valid.
    """
    path, _ = newest_valid(Path(output_dir) / "checkpoints")
    return None if path is None else str(path)


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
    """Load the weights of a transformers checkpoint into the model: of a PEFT model, its adapters.

    Raises:
        SettingError: the weights are not in the safetensors format, or belong to another model.
    """
    if _is_peft_model(model):
        return _load_stock_adapters(model, folder)
    if not (folder / SAFE_WEIGHTS_NAME).is_file() and not (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        raise _resume_error(folder, f"{SAFE_WEIGHTS_NAME} not found", "Save the whole model as safetensors.")
    # Some models are saved under other weight names. `from_pretrained` handles these names.
    if isinstance(model, PreTrainedModel):
        options = dict.fromkeys(("ignore_mismatched_sizes", "use_safetensors", "output_loading_info"), True)
        loaded, found = type(model).from_pretrained(folder, config=model.config, **options)
        wrong = sorted(map(str, [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]))
        tensors = loaded.state_dict()
        _check_same(folder, dict.fromkeys(wrong), {})
    else:
        tensors = load_file(folder / SAFE_WEIGHTS_NAME)
        _check_same(folder, {name: each.shape for name, each in model.state_dict().items()}, tensors)
    model.load_state_dict(tensors)


def _load_stock_adapters(model: Any, folder: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    for adapter in model.peft_config:
        file = adapter_place(adapter) + SAFETENSORS_WEIGHTS_NAME
        if not (folder / file).is_file():
            raise _resume_error(
                folder,
                f"{file} not found",
                f"Give a model with the adapters of the checkpoint; this model's is named {adapter}.",
            )
        own, tensors = get_peft_model_state_dict(model, adapter_name=adapter), load_file(folder / file)
        _check_same(folder, {name: each.shape for name, each in own.items()}, tensors)
        set_peft_model_state_dict(model, tensors, adapter_name=adapter)


def _check_same(folder: Path, own: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check that saved weights have the names and shapes of the model's."""
    wrong = sorted(own.keys() ^ tensors.keys()) or [name for name in own if own[name] != tensors[name].shape]
    if wrong:
        raise _resume_error(folder, f"the weight {wrong[0]} does not match", "The checkpoint is from another model.")


def load_stock_optimizer(optimizer: torch.optim.Optimizer, groups: list[list[nn.Parameter]], folder: Path) -> bool:
    """Load the optimizer state of a transformers checkpoint. Return whether it has such a file.

    Args:
        groups: parameters in the order of transformers' groups, the group with weight decay first.

    Raises:
        SettingError: the state belongs to other parameters.
    """
    path = folder / OPTIMIZER_NAME
    if not path.is_file():
        return False
    saved = torch.load(path, map_location="cpu", weights_only=True)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group]
    # The state dict of torch counts parameters in this order.
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    place_of = {id(parameter): place for place, parameter in enumerate(in_order)}
    fits = len(numbers) == len(parameters) == len(in_order) and all(
        not isinstance(value, Tensor) or value.dim() == 0 or value.shape == parameter.shape
        for number, parameter in zip(numbers, parameters, strict=False)
        for name, value in saved["state"].get(number, {}).items()
        if name.startswith("exp_avg") and "row" not in name and "col" not in name
    )
    if not fits:
        raise _resume_error(folder, f"{OPTIMIZER_NAME} is for other parameters", "Use the same model and optim.")
    state = {
        place_of[id(parameter)]: saved["state"][number]
        for number, parameter in zip(numbers, parameters, strict=True)
        if number in saved["state"]
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return True


def resume_stock(trainer: "Trainer", run: "RunContext", folder: Path) -> None:
    """Restore optimizer state and step from a checkpoint of transformers' Trainer, or from an adapter run's on the Hub.

    Its weights are loaded already.
    """
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    weights = trained(trainer.model).items()
    groups = [[each for name, each in weights if (name in decayed) is is_decayed] for is_decayed in (True, False)]
    is_own = (folder / OPTIMIZER).is_file()
    if is_own:
        run.strategy.restore_optimizer(folder)
    has_state = is_own or load_stock_optimizer(run.strategy.optimizer, groups, folder)
    lost = "" if has_state else f"{OPTIMIZER_NAME} not found, so the optimizer starts without state; "
    run.state.step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    run.observer.on_event(
        "stock_checkpoint",
        run.state.step,
        f"resumes {folder} from transformers' Trainer: loads weights, optimizer, step, and log; "
        f"{lost}dropout draws other random numbers, and the schedule sets the learning rates",
    )


def resume_of(args: TrainingArguments, requested: str | bool | None) -> str:
    """Return `checkpoint.resume`: never, auto, or a folder. transformers' checkpoint-N means checkpoints/step-N here.

    Raises:
        SettingError: the checkpoint does not exist.
    """
    if requested is None or requested is False or stock_checkpoint(args, requested) is not None:
        return "never"
    root = Path(args.output_dir) / "checkpoints"
    if requested is True:
        if not checkpoint_folders(root):
            problem = f"No valid checkpoint found in output directory ({args.output_dir})"
            raise _resume_error(True, problem, "Remove the argument to start a new run.")
        return "auto"
    path = Path(requested)
    theirs = re.fullmatch(r"checkpoint-(\d+)", path.name)
    if not path.exists() and theirs:
        path = folder_of(path.parent / "checkpoints", int(theirs.group(1)))
    # `CheckpointNames` makes this link.
    if path.is_symlink():
        path = path.parent / path.readlink()
    if not path.exists():
        problem = f"Can't find a valid checkpoint at {requested}"
        raise _resume_error(requested, problem, f"Checkpoints of this run are in {root}.")
    return str(path)


def adapter_files(trainer: "Trainer") -> dict[str, bytes]:
    """Return the files of a PEFT model's adapters by name, as its `save_pretrained` writes them.

    `default` lies at the top, each other adapter in a folder of its name. Empty for a sharded model: `save_model`
    gathers its weights.
    """
    model: Any = trainer.model
    if not _is_peft_model(model) or is_spread(trainer):
        return {}
    from peft import get_peft_model_state_dict
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

    files: dict[str, bytes] = {}
    for name, config in model.peft_config.items():
        tensors = get_peft_model_state_dict(model, adapter_name=name)
        facts = {**config.to_dict(), "inference_mode": True}
        if config.task_type is None:
            base = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
            facts["auto_mapping"] = {"base_model_class": base.__name__, "parent_library": base.__module__}
        text = json.dumps({key: list(value) if isinstance(value, set) else value for key, value in facts.items()})
        files[adapter_place(name) + CONFIG_NAME] = text.encode()
        files[adapter_place(name) + SAFETENSORS_WEIGHTS_NAME] = save(
            {key: each.detach().cpu().clone().contiguous() for key, each in tensors.items()}, {"format": "pt"}
        )
    return files


def adapter_place(name: str) -> str:
    """Return the folder of an adapter in a checkpoint, with its slash. Empty for the default adapter, as in peft."""
    return "" if name == "default" else f"{name}/"


@dataclass
class CheckpointNames:
    """The names of a run's checkpoints, and the best checkpoint in `trainer.state`."""

    run: "RunContext"
    trainer: "Trainer"
    _has_links = True

    def folder(self, step: int) -> str:
        """Return the folder of a checkpoint under transformers' name, or `checkpoints/step-N` without links."""
        link = self.run.plan.output_dir / f"checkpoint-{step}"
        return str(link if self._has_links else folder_of(self.run.saver.root, step))

    def link(self) -> None:
        """Link `checkpoint-N` in the run folder to each published checkpoint, because scripts look for these names.

        Links whose checkpoint is gone are removed. A path of this name that is not a link stays unchanged.
        """
        if not self.trainer.is_world_process_zero():
            return
        output_dir, note = self.run.plan.output_dir, self.run.observer.note
        targets = {output_dir / f"checkpoint-{step_of(each)}": each for each in checkpoint_folders(self.run.saver.root)}
        try:
            for path in output_dir.glob("checkpoint-*"):
                if path.is_symlink() and path.readlink().parts[0] == "checkpoints" and path not in targets:
                    path.unlink()
            for path, folder in targets.items():
                if not path.is_symlink() and not path.exists():
                    path.symlink_to(folder.relative_to(output_dir), target_is_directory=True)
                elif not path.is_symlink():
                    note(f"{path} already exists and stays unchanged. This run's is in checkpoints/.")
        except OSError as error:
            self._has_links = False
            note(f"checkpoint-N: cannot link to checkpoints/ here ({error})")

    def leave_as_transformers(self) -> None:
        """Remove checkpoints that transformers does not keep, when a finished run needs them no more.

        `save_total_limit` counts the best checkpoint, and 1 keeps it alone. `save_strategy="best"` does not keep the
        last step's.
        """
        args, root, best = self.trainer.args, self.run.saver.root, self.run.state.best_step
        limit, steps = args.save_total_limit, steps_of(root)
        is_kept = self.run.plan.recipe.checkpoint.keep_best and best in steps
        if not self.trainer.is_world_process_zero() or not is_kept:
            return
        if steps[-1] != best and (args.save_strategy == "best" or limit == 1):
            remove(folder_of(root, steps.pop()))
        if limit:
            rotate(root, limit if best in steps[-limit:] else max(1, limit - 1), {best})
        self.link()

    def note_best(self) -> None:
        """Copy the best metric so far and its step from the loop."""
        state, args, own = self.trainer.state, self.trainer.args, self.run.state
        if args.metric_for_best_model is not None and own.best_step is not None:
            state.best_metric = own.best_metric
            state.best_global_step = own.best_step if args.save_strategy != "no" else None

    def find_best(self) -> None:
        """Set `state.best_model_checkpoint` to the folder of the best step, if it exists or is being saved."""
        state = self.trainer.state
        if state.best_global_step in {*steps_of(self.run.saver.root), self.run.state.step}:
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
        scheduler.load_state_dict(parse_json((folder / SCHEDULER_STATE).read_text()))
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
    return json.dumps(asdict(state), indent=2, default=default)


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
                f"callbacks: the checkpoint has states of {len(states)} {kind}, the trainer has {len(alike)}; "
                f"restored {min(len(states), len(alike))}"
            )
    return problems


def load_whole(model: nn.Module) -> None:
    """* Give the model whole weights, and load later weights whole, too.

    With ZeRO 3 arguments, `from_pretrained` loads only parts of the weights on each process.
    """
    unset_hf_deepspeed_config()
    # Tied weights share one entry.
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, part in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if hasattr(part, "ds_id"):
                if id(part) not in found:
                    with import_deepspeed().zero.GatheredParameters([part]):
                        found[id(part)] = nn.Parameter(part.data.cpu().clone(), requires_grad=part.requires_grad)
                setattr(module, name, found[id(part)])


def copy_whole(trainer: "Trainer", recipe: Recipe) -> nn.Module | None:
    """Return a copy of a model that is about to be sharded, on the main process, or None.

    Saves load the whole weights into this copy.
    """
    is_spread = recipe.parallel.strategy != "ddp" and trainer.args.world_size > 1
    return copy.deepcopy(trainer.model) if is_spread and trainer.args.process_index == 0 else None


def leave_in_evaluation_mode(trainer: "Trainer") -> None:
    """Set the model to evaluation mode, as transformers leaves it. The next training restores the mode of each part."""
    if trainer.model.training:
        trainer.modes = {part: part.training for part in trainer.model.modules()}
    trainer.model.eval()


def is_spread(trainer: "Trainer") -> bool:
    """Return whether the model's forward waits for the other processes."""
    return trainer.strategy is not None and trainer.strategy.meets_in_forward


def whole_model(trainer: "Trainer") -> nn.Module:
    """* Return the model with all its weights on the main process. All processes of a sharded model must call it."""
    if not is_spread(trainer):
        return trainer.model
    tensors = trainer.strategy.full_weights()
    whole = trainer.whole_model
    if whole is None:
        return trainer.model
    load_model_tensors(whole, tensors)
    return whole.eval()


def save_description(trainer: "Trainer", model: Any, folder: Path) -> None:
    """Write the files that `from_pretrained` needs in addition to the weights."""
    if isinstance(model, PreTrainedModel):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(folder)


def save_pretrained(trainer: "Trainer", model: Any, folder: Path) -> None:
    """Write weights, configuration, and tokenizer as transformers' Trainer.save_model does."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PreTrainedModel) or _is_peft_model(model):
        with as_tensors(model):
            model.save_pretrained(folder)
    else:
        tensors = {name: tensor.cpu() for name, tensor in model_tensors(model).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_description(trainer, model, folder)
    # Access tokens are masked in this JSON.
    arguments = json.dumps(trainer.args.to_dict(), indent=2, default=str)
    (folder / "training_args.json").write_text(arguments, encoding="utf-8")
