"""The files of a checkpoint by name, and how to read them back into a model and its optimizer.

Random number states are not stored. The numbers of a step are a function of (seed, step, process); see
`engine.step.seed_step`.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.checkpoint.base import left_out
from accel_train.checkpoint.sharded import CheckpointReader, copy_to_host
from accel_train.checkpoint.store import TRAINER, Writer
from accel_train.core.errors import CheckpointError
from accel_train.core.state import JsonRecord
from accel_train.model.kernels.nf4 import packed_layers
from accel_train.model.tensors import (
    PACKED,
    ExtraState,
    Tensors,
    load_extra_state,
    local_part,
    packed,
    split_state,
    unpacked,
)
from accel_train.optim.ema import Average

MODEL, OPTIMIZER, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"
NUMBER = "#number"
"""Suffix of an entry of optimizer state that is a Python number."""
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""State of torch's optimizers with the shape of its weight."""


def tensor_writers(
    weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], average: Average | None
) -> dict[str, Writer]:
    """Return writers for the files of whole tensors, by name. `weights` and `moments` must already be copies."""
    writers: dict[str, Writer] = {
        MODEL: lambda path: save_file(dict(weights), path, metadata={"format": "pt"}),
        OPTIMIZER: lambda path: save_file(dict(moments), path),
    }
    if average is not None:
        averages = copy_to_host(average.tensors())
        writers[AVERAGE] = lambda path: save_file(averages, path)
    return writers


def trainer_writers(trainer: JsonRecord, description: Mapping[str, bytes]) -> dict[str, Writer]:
    """Return writers for `trainer.json` and the files that `from_pretrained` needs in addition to weights, by name."""
    files = {TRAINER: json.dumps(trainer, indent=1, allow_nan=False).encode(), **description}
    return {name: partial(Path.write_bytes, data=content) for name, content in files.items()}


def model_tensors(model: nn.Module, without: Collection[str] = ()) -> Tensors:
    """Return the model's contiguous state by name, except the weights `without`, and its extra state as tensors.

    Tied weights appear once, under their first name.

    Raises:
        SettingError: a module has extra state that a checkpoint cannot keep.
    """
    own, extra = split_weights(model)
    return {name: tensor.contiguous() for name, tensor in (own | packed(extra)).items() if name not in without}


def split_weights(model: nn.Module) -> tuple[Tensors, ExtraState]:
    """Return the model's weights and persistent buffers by name, each once and detached, and its extra state."""
    own, extra = split_state(model)
    first_name: dict[int, str] = {}
    # Next to a 4-bit weight, the state has its scales. The base in `model.pretrained` provides them too.
    scales = {f"{name}.{part}" for name in packed_layers(model) for part in ("scales", "scales_of_scales")}
    for name in [name for name in own if name not in scales]:
        first_name.setdefault(id(own[name]), name)
    return {name: own[name].detach() for name in first_name.values()}, extra


def model_shapes(model: nn.Module, without: Collection[str] = ()) -> dict[str, torch.Size | None]:
    """Return the shapes of the model's state by name, except the weights `without`. None for extra state: any shape."""
    own, extra = split_weights(model)
    shapes = {name: each.shape for name, each in own.items() if name not in without}
    return {**shapes, **dict.fromkeys(extra)}


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], may_lack: Collection[str] = ()) -> None:
    """Load saved weights into a model, including tied weights. Missing weights in `may_lack` keep their values.

    Raises:
        ValueError: a required tensor is missing, or a tensor is unknown or has another shape.
    """
    expected = model_shapes(model, [name for name in may_lack if name not in tensors])
    check_fit(expected, {name: tensor.shape for name, tensor in tensors.items()})
    extra = {name: each for name, each in tensors.items() if expected.get(name) is None}
    model.load_state_dict({name: each for name, each in tensors.items() if name not in extra}, strict=False)
    load_extra_state(model, extra)


def check_fit(expected: Mapping[str, torch.Size | None], stored: Mapping[str, torch.Size]) -> None:
    """Check that saved weights have the names and shapes that a model expects. None expects any shape.

    Raises:
        ValueError: they differ; the message names the first differences.
    """
    stored = {name.removesuffix(PACKED): shape for name, shape in stored.items()}
    wrong = sorted(
        (expected.keys() ^ stored.keys())
        | {name for name in expected.keys() & stored.keys() if expected[name] not in (None, stored[name])}
    )
    if wrong:
        raise ValueError(
            f"the checkpoint's weights do not fit this model: {', '.join(wrong[:3])} (differences: {len(wrong)})"
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state as `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, ...

    Each entry of each parameter is a tensor. A Python number is `ENTRY#number.NAME`, with type int64, float64 or bool.
    """
    tensors: Tensors = {}
    for name, parameter in _named_parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{key}.{name}"] = value.detach().contiguous()
            elif isinstance(value, bool | int | float):
                dtype = torch.float64 if isinstance(value, float) else None
                device = local_part(parameter).device
                tensors[f"{key}{NUMBER}.{name}"] = torch.tensor(value, dtype=dtype, device=device)
            elif value is not None:
                raise CheckpointError(
                    f"this optimizer stores {key} of {name} as {type(value).__name__}, but a checkpoint only holds "
                    "tensors and numbers. Use another optimizer"
                )
    return tensors


def check_known(keys: Iterable[str], parameters: Collection[str]) -> None:
    """Check that saved optimizer state only has entries of these parameters.

    Raises:
        ValueError: an entry is unknown; the message names the first.
    """
    unknown = [key for key in keys if key.partition(".")[2] not in parameters]
    if unknown:
        raise ValueError(
            f"the checkpoint's optimizer state does not fit this model: {unknown[0]} (entries: {len(unknown)})"
        )


def _named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def restore_weights(folder: Path, model: nn.Module, average: Average | None) -> None:
    """Load the weights of a checkpoint into a model, and the averaged weights if the run keeps an average.

    Each process reads only its part. Frozen base weights that the checkpoint leaves out stay unchanged. To check that
    they are the same, use `base.base_problem`.

    Raises:
        ValueError: the checkpoint was made for another model.
        CheckpointError: a file is not a safetensors file.
    """
    stored, base = CheckpointReader(folder, "model"), left_out(folder)
    is_whole = not base and all(local_part(each) is each for each in model.parameters())
    if is_whole and type(model).load_state_dict is not nn.Module.load_state_dict:
        # A model with a custom load_state_dict may first resize a buffer.
        state = unpacked({name: stored.read(name) for name in stored.shapes}, next(model.parameters()).device)
        model.load_state_dict(state, strict=False)
    check_fit(model_shapes(model, base), stored.shapes)
    own, extra = split_weights(model)
    stored.read_into({name: tensor for name, tensor in own.items() if name not in base})
    restore_extra_state(stored, model, extra)
    restore_average(folder, average)


def restore_extra_state(stored: CheckpointReader, model: nn.Module, extra: Collection[str]) -> None:
    """Give the modules of a model their extra state, under these names, from a checkpoint."""
    load_extra_state(model, {name: stored.read(name) for name in stored.shapes if name.removesuffix(PACKED) in extra})


def restore_average(folder: Path, average: Average | None) -> None:
    """Load the averaged weights of a checkpoint if the run keeps an average.

    If the checkpoint has no average, the average restarts from the current weights.

    Raises:
        ValueError: the averaged weights belong to other parameters.
    """
    stored = CheckpointReader(folder, "average")
    if average is None:
        return
    if not stored.shapes:
        average.begin_anew()
        return
    if stored.shapes.keys() != set(average.names):
        raise ValueError("the checkpoint's averaged weights do not fit this model")
    stored.read_into(average.tensors())


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load moments and step counters into an optimizer, on the devices of their parameters.

    Each process reads only its part.

    Raises:
        ValueError: the saved state belongs to other parameters.
    """
    parameters, stored = dict(_named_parameters(optimizer)), CheckpointReader(folder, "optimizer")
    check_known(stored.shapes, parameters)
    optimizer.state.clear()
    targets: Tensors = {}
    for key, shape in stored.shapes.items():
        entry, name = key.split(".", 1)
        parameter = parameters[name]
        dtype = stored.dtypes.get(key, parameter.dtype)
        if shape == parameter.shape:
            targets[key] = torch.zeros_like(parameter, dtype=dtype)
        else:
            targets[key] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        optimizer.state[parameter][entry] = targets[key]
    stored.read_into({key: target.detach() for key, target in targets.items()})
    for state in optimizer.state.values():
        for entry in [entry for entry in state if entry.endswith(NUMBER)]:
            state[entry.removesuffix(NUMBER)] = state.pop(entry).item()


def check_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check types of stored weights and shapes of stored moments before anything is changed.

    The type of frozen weights may differ, because `model.frozen_dtype` sets it.

    Raises:
        CheckpointError: a type or shape differs; the message names the first.
    """
    stored, moments = (CheckpointReader(folder, kind) for kind in ("model", "optimizer"))
    parameters = dict(_named_parameters(optimizer))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, tensor in split_weights(model)[0].items():
        found = stored.dtypes.get(name, tensor.dtype)
        if found != tensor.dtype and not (name in frozen and found.is_floating_point and tensor.is_floating_point()):
            raise CheckpointError(f"{folder}: {name} is stored as {found}, but the model uses {tensor.dtype}")
    for key, shape in moments.shapes.items():
        entry, _, name = key.partition(".")
        if entry in MOMENTS and name in parameters and shape != parameters[name].shape:
            expected = tuple(parameters[name].shape)
            raise CheckpointError(
                f"{folder}: {entry} of {name} has shape {tuple(shape)}, but the weight has shape {expected}"
            )
