"""Quantize matrices to int8 with torchao: weight-only, symmetric, one scale per output; saved without pickle.

A matrix W (outputs x inputs) becomes Q = round(W / s) in int8, with s = max |W_row| / 127.5 in fp32. A layer computes y
= (x Q^T) s + b, with Q converted to the type of x. This takes a quarter of the memory of fp32 and uses no integer
arithmetic.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Names = tuple[str, ...]
"""Names of the layers whose matrices are int8."""

INT8, SCALE = ".int8", ".scale"
"""Suffixes of a matrix's name in the saved file."""


def quantize_int8(model: nn.Module) -> Names:
    """Quantize the model's matrices to int8, in place, and return their names.

    GPT-2's Conv1D become linear layers first. Embeddings, norms and convolutions stay unchanged. A matrix with shared
    weights, such as an output layer tied to the embedding, also stays.

    Raises:
        ValueError: torchao is not installed, or the model has no matrix.
    """
    names = matrices(model)
    if not names:
        raise ValueError(
            f"--quantize int8: {type(model).__name__} has no linear layer whose weights could become int8; leave "
            "--quantize out"
        )
    _quantize(model, names)
    return names


def matrices(model: nn.Module) -> Names:
    """Return the names of the linear layers (including GPT-2's Conv1D) whose weights are not shared."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return tuple(
        name
        for name, module in model.named_modules()
        # Subclasses (such as the output of nn.MultiheadAttention) are computed elsewhere, from their plain weights.
        if type(module) in (nn.Linear, Conv1D) and owners[id(module.weight)] == 1
    )


def left_alone(model: nn.Module, names: Names) -> dict[str, int]:
    """Return the number of parameters that stay in floating point, by type of module."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen and not (name in names and parameter_name == "weight"):
                found["biases of int8 layers" if name in names else type(module).__name__] += parameter.numel()
            seen.add(id(parameter))
    return dict(found.most_common())


def _quantize(model: nn.Module, names: Names) -> None:
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, Conv1D):
            model.set_submodule(name, _as_linear(module))
    torchao = require_torchao()
    with quiet():
        torchao.quantize_(
            model, torchao.Int8WeightOnlyConfig(set_inductor_config=False), filter_fn=lambda _, name: name in names
        )


def _as_linear(module: Conv1D) -> nn.Linear:
    """Return the same layer as nn.Linear. Conv1D stores its matrix as inputs x outputs."""
    num_inputs, num_outputs = module.weight.shape
    linear = nn.Linear(num_inputs, num_outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous())
    linear.bias = nn.Parameter(module.bias.detach().clone())
    return linear


def int8_tensors(model: nn.Module, names: Names) -> dict[str, Tensor]:
    """Return all tensors of a quantized model by name. Shared tensors occur once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        owner = name.removesuffix(".weight")
        if owner in names and owner != name:
            tensors[name + INT8] = tensor.qdata.contiguous().cpu()
            tensors[name + SCALE] = tensor.scale.contiguous().cpu()
        elif tensor.data_ptr() not in seen or not tensor.numel():
            tensors[name] = tensor.detach().contiguous().cpu()
            seen.add(tensor.data_ptr())
    return tensors


def put_int8_tensors(model: nn.Module, names: Names, tensors: Mapping[str, Tensor]) -> None:
    """Load saved int8 tensors into a model of the same configuration, in place.

    Raises:
        ValueError: the tensors belong to another model.
    """
    _quantize(model, names)
    rest = dict(tensors)
    for name in names:
        weight: Any = model.get_submodule(name).weight
        for suffix, own in ((INT8, weight.qdata), (SCALE, weight.scale)):
            saved = rest.pop(f"{name}.weight{suffix}", None)
            if saved is None or saved.shape != own.shape:
                raise ValueError(f"{name}.weight{suffix} is missing or of another shape; is the export complete?")
            own.copy_(saved)
    quantized = {f"{name}.weight" for name in names}
    given = {model.state_dict(keep_vars=True)[name].data_ptr() for name in rest if name in model.state_dict()}
    result = model.load_state_dict(rest, strict=False)
    state = model.state_dict()
    missing = [name for name in result.missing_keys if name not in quantized and state[name].data_ptr() not in given]
    if missing or result.unexpected_keys:
        raise ValueError(f"{[*missing, *result.unexpected_keys][0]} does not fit the model; is the export complete?")


def require_torchao() -> Any:
    """Return torchao's quantization module, imported without warnings about libraries that int8 does not use.

    Raises:
        ValueError: torchao is not installed.
    """
    with quiet():
        try:
            import torchao.quantization
        except ImportError as error:
            raise ValueError(
                "int8 needs the package torchao; install it: pip install 'accel-train[quantize]'"
            ) from error
    return torchao.quantization


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log lines of other libraries."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
