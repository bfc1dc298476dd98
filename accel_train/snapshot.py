"""What of a run goes into a checkpoint, and back: weights, optimizer, loss scale, counters, and what makes it the same run.

Random numbers are not in it: those of a step are a function of (seed, step, process), see `step.seed_step`.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_train.checkpoint import MANIFEST, TRAINER, Writer, read_json, read_trainer
from accel_train.ema import WeightAverage
from accel_train.sharded_checkpoint import Parts, Stored, is_in_parts
from accel_train.state import CheckpointError, TrainState
from accel_train.task import Task, TaskData
from accel_train.tensor_parts import is_spread

if TYPE_CHECKING:
    from accel_train.zero_parts import ZeroParts

MODEL, OPTIMIZER, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State of torch's optimizers that has its weight's shape."""
_STATE = TypeAdapter(TrainState)


def snapshot_writers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    state: TrainState,
    identity: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    origins: Mapping[str, str] | None = None,
    average: WeightAverage | None = None,
    description: Mapping[str, bytes] | None = None,
    zero: "ZeroParts | None" = None,
) -> dict[str, Writer]:
    """Writers for the files of a checkpoint, by name; `description` is what `from_pretrained` needs beside the weights,
    `origins` who set what is in the identity and in `settings` (`identity.Settings`). Of a model that is spread over processes, all but `snapshot_parts`.

    They hold copies in host memory: training may go on before they are called. With `zero` all processes call it at once,
    and what the main one gets is written.
    """
    scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
    trainer = {
        "state": asdict(state),
        "scaler": scaler,
        "identity": dict(identity),
        "settings": dict(settings or {}),
        "origins": dict(origins or {}),
        "world_size": accelerator.num_processes,
        "torch": torch.__version__,
    }
    writers: dict[str, Writer] = {TRAINER: lambda path: _write_json(path, trainer)}
    for name, content in (description or {}).items():
        writers[name] = partial(_write_bytes, content=content)
    if is_spread(model):
        return writers
    weights = copy_to_host(model_tensors(model)) if zero is None else zero.weights()
    moments = copy_to_host(optimizer_tensors(optimizer)) if zero is None else zero.moments()
    writers[MODEL] = lambda path: save_file(weights, path, metadata={"format": "pt"})
    writers[OPTIMIZER] = lambda path: save_file(moments, path)
    if average is not None:
        averages = copy_to_host(average.tensors())
        writers[AVERAGE] = lambda path: save_file(averages, path)
    return writers


def snapshot_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None, group: dist.ProcessGroup
) -> Parts:
    """Copies of what this process holds of a model that is spread over several: on all of them at once."""
    tensors = {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in optimizer_tensors(optimizer).items()}
    if average is not None:
        tensors |= {f"average/{name}": tensor for name, tensor in average.tensors().items()}
    return Parts(tensors, group)


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, complete when this returns."""
    copies = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        copies[name].copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False), encoding="utf-8")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name; a tensor with several names (tied weights) is there once, under its first."""
    first_name: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_name.setdefault(id(tensor), name)
    return {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first_name[id(tensor)] == name
    }


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved weights back, tied ones included.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    expected = model_tensors(model)
    check_fit(*({name: tensor.shape for name, tensor in each.items()} for each in (expected, tensors)))
    model.load_state_dict(dict(tensors), strict=False)


def check_fit(expected: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
    """Refuse saved weights of another model: names and shapes must be the same.

    Raises:
        ValueError: names the first that differ.
    """
    wrong = sorted(name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name))
    if wrong:
        raise ValueError(
            f"the checkpoint's weights do not fit this model: {', '.join(wrong[:3])} (of {len(wrong)} differences)"
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, ...: one tensor per entry and parameter."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"this optimizer keeps {key}={value!r} for {name}, and a checkpoint holds tensors only; use another one"
                    )
                tensors[f"{key}.{name}"] = value.detach().contiguous()
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put saved moments and step counters back, on the device of their parameters.

    Raises:
        ValueError: the saved state is of other parameters.
    """
    parameters = dict(_named_parameters(optimizer))
    _check_known(tensors, parameters)
    optimizer.state.clear()
    for key, tensor in tensors.items():
        entry, name = key.split(".", 1)
        parameter = parameters[name]
        optimizer.state[parameter][entry] = tensor.to(parameter.device)


def _check_known(keys: Iterable[str], parameters: Collection[str]) -> None:
    unknown = [key for key in keys if key.partition(".")[2] not in parameters]
    if unknown:
        raise ValueError(
            f"the checkpoint's optimizer state does not fit this model: {unknown[0]} (of {len(unknown)} entries)"
        )


def _named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def restore_weights(
    folder: Path, model: nn.Module, average: WeightAverage | None, zero: "ZeroParts | None" = None
) -> None:
    """Load the weights of a checkpoint, and their average where one is kept.

    Raises:
        ValueError: it was made for another model.
        CheckpointError: a file in it is no safetensors file.
    """
    if zero is not None:
        check_fit(zero.shapes(), Stored(folder, "model").shapes)
        zero.load_weights(folder)
        if average is not None and (kept := Stored(folder, "average")).shapes:
            average.load({name: kept.read(name) for name in kept.shapes})
        return
    if is_spread(model) or is_in_parts(folder):
        _restore_parts(folder, model, average)
        return
    load_model_tensors(model, _load(folder / MODEL))
    if average is not None and (folder / AVERAGE).exists():
        average.load(_load(folder / AVERAGE))


def _restore_parts(folder: Path, model: nn.Module, average: WeightAverage | None) -> None:
    weights, stored = model_tensors(model), Stored(folder, "model")
    check_fit({name: tensor.shape for name, tensor in weights.items()}, stored.shapes)
    stored.read_into(weights)
    kept = Stored(folder, "average")
    if average is not None and kept.shapes:
        if kept.shapes.keys() != set(average.names):
            raise ValueError("the checkpoint's averaged weights do not fit this model")
        kept.read_into(average.tensors())


def _restore_optimizer_parts(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    parameters, stored = dict(_named_parameters(optimizer)), Stored(folder, "optimizer")
    _check_known(stored.shapes, parameters)
    optimizer.state.clear()
    targets: dict[str, Tensor] = {}
    for key, shape in stored.shapes.items():
        entry, name = key.split(".", 1)
        parameter = parameters[name]
        is_alike = shape == parameter.shape
        targets[key] = torch.zeros_like(parameter) if is_alike else torch.zeros(shape, device=parameter.device)
        optimizer.state[parameter][entry] = targets[key]
    stored.read_into({key: target.detach() for key, target in targets.items()})


def _load(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    return tensors


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    average: WeightAverage | None = None,
    zero: "ZeroParts | None" = None,
) -> TrainState:
    """Load a checkpoint that proved itself into the model, the optimizer and the loss scale; returns the counters.

    Raises:
        ValueError: it was made for another model.
        CheckpointError: it holds something else than this version writes.
    """
    state, trainer = read_state(folder), read_trainer(folder)
    if zero is None:
        _check_tensors(folder, model, optimizer)
    restore_weights(folder, model, average, zero)
    if zero is not None:
        zero.load_moments(folder)
    elif is_spread(model) or is_in_parts(folder):
        _restore_optimizer_parts(folder, optimizer)
    else:
        load_optimizer_tensors(optimizer, _load(folder / OPTIMIZER))
    if accelerator.scaler is not None and trainer["scaler"] is not None:
        accelerator.scaler.load_state_dict(trainer["scaler"])
    return state


def read_state(folder: Path) -> TrainState:
    """The counters of a checkpoint, once it is sure that a run can have had them.

    Raises:
        CheckpointError: one is of another type or out of its range, or the step is not the one that was saved.
    """
    trainer = read_trainer(folder)
    try:
        saved_step = read_json(folder / MANIFEST)["step"]
        state = _STATE.validate_json(json.dumps(trainer["state"]), strict=True)
        unknown = trainer["state"].keys() - {field.name for field in fields(TrainState)}
        last = trainer["identity"].get("schedule.max_steps", state.step)
        problems = [f"{name} is unknown" for name in sorted(unknown)]
        problems += [
            f"{name}={value} is out of range" for name, value in _numbers(asdict(state)) if _is_wild(name, value)
        ]
        if state.step != saved_step:
            problems.append(f"step={state.step}, and the checkpoint is of step {saved_step}")
        if state.step > last:
            problems.append(f"step={state.step}, and the run has {last} steps")
        scaler = trainer.get("scaler") or {}
        problems += [
            f"scaler.{name}={value!r} is out of range" for name, value in scaler.items() if not _is_scale(value)
        ]
    except ValidationError as error:
        first = error.errors()[0]
        problems = [f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise CheckpointError(f"{folder / TRAINER} holds no state of a run: {problems[0]} (of {len(problems)})")
    return state


def _numbers(tree: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _numbers(each)
            elif each is not None:
                yield name, each


def _is_wild(name: str, value: float) -> bool:
    """Losses, logarithms of norms and the best metric may be negative; nothing else may."""
    return not math.isfinite(value) or (value < 0 and name not in ("losses", "grad_norms", "best_metric"))


def _is_scale(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _check_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Before any of them is changed: what is stored has the types of the weights, and the moments have their shapes.

    Raises:
        CheckpointError: names the first that has not.
    """
    stored, moments, parameters = (
        Stored(folder, "model"),
        Stored(folder, "optimizer"),
        dict(_named_parameters(optimizer)),
    )
    for name, tensor in model_tensors(model).items():
        found = stored.dtypes.get(name, tensor.dtype)
        if found != tensor.dtype:
            raise CheckpointError(f"{folder}: {name} is stored as {found}, and the model's is {tensor.dtype}")
    for key, shape in moments.shapes.items():
        entry, _, name = key.partition(".")
        if entry in MOMENTS and name in parameters and shape != parameters[name].shape:
            expected = tuple(parameters[name].shape)
            raise CheckpointError(
                f"{folder}: {entry} of {name} is stored as {tuple(shape)}, and the weight is {expected}"
            )


def describe_model(task: Task, model: nn.Module, data: TaskData) -> dict[str, bytes]:
    """What `from_pretrained` needs beside the weights (configuration, tokenizer), by file name."""
    with TemporaryDirectory() as folder:
        task.save_description(model, data, Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
