"""Build a model without values, to be filled from a checkpoint or pretrained files, or with initial weights."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accel_train.checkpoint.contents import check_fit, model_shapes
from accel_train.checkpoint.sharded import CheckpointReader, parts_here
from accel_train.core.work import beat
from accel_train.model.tensors import FileTensor, Tensors, load_extra_state, plain_tensors, replace_values
from accel_train.parallel.initial import Drawn

READING_THREADS = 4
Source = FileTensor | Drawn
"""Values of a parameter that are not in memory yet."""


class Unread(NamedTuple):
    """A model with parameters on the meta device whose values are still in files, or not drawn yet."""

    model: nn.Module
    sources: dict[str, Source]
    """The values of the parameters on the meta device, by name."""
    is_shared: bool
    """Whether all processes see the same files, if there are any."""


Build = Callable[[], nn.Module]


class Builders(NamedTuple):
    """Functions that build the model of a run, with the recipe's changes."""

    whole: Build
    empty: Build
    """Builds it on the meta device."""
    restored: Callable[[], nn.Module | None]
    """Builds it without values, for the checkpoint of a resume to fill; None if it does not hold all values."""
    unread: Callable[[], Unread | None]
    """* Builds it without the values of pretrained or initial weights; None on all processes if one of them cannot."""


def empty_until_restored(make: Build, folder: Path) -> nn.Module | None:
    """Return the model of `make` with its parameters on the meta device, and its buffers with their values.

    One parameter at a time has values while `make` runs. A checkpoint has the values of parameters and of persistent
    buffers. The other buffers are computed here, as at the start of the run.

    Returns None if the model needs values to be built: a buffer depends on weights or on random numbers that are drawn
    after them, the checkpoint in `folder` has other names or shapes, or `make` fails without values.
    """
    generator = torch.get_rng_state()
    try:
        with _parameters_without_values():
            model = make()
        check_fit(model_shapes(model), CheckpointReader(folder, "model").shapes)
    # A custom task may fail in any way on tensors without values. A full build reports the errors of the recipe.
    except Exception:
        torch.set_rng_state(generator)
        return None
    computed = [each for name, each in model.named_buffers() if name not in model.state_dict()]
    computed += plain_tensors(model)
    needs_values = any(each.is_meta for each in [*computed, *model.buffers()])
    was_drawn = not torch.equal(generator, torch.get_rng_state())
    torch.set_rng_state(generator)
    return None if needs_values or (was_drawn and computed) else model


def allocate(model: nn.Module, device: torch.device, sources: Mapping[str, Source] = MappingProxyType({})) -> nn.Module:
    """Return the model on the device. Parameters on the meta device get their values from `sources`, or zeros.

    They stay tied.
    """
    empty = {name: each for name, each in model.named_parameters() if each.is_meta}
    for parameter in empty.values():
        replace_values(parameter, torch.zeros_like(parameter, device=device))
    fill(empty, {name: each for name, each in sources.items() if name in empty})
    return model.to(device)


def read_layer(unread: Unread, layer: nn.Module, *, has_values: bool) -> None:
    """Take the parameters of a layer out of `unread`, and give them their values in host memory if it `has_values`."""
    for name, parameter in list(unread.model.named_parameters()):
        if not any(parameter is each for each in layer.parameters()) or name not in unread.sources:
            continue
        source = unread.sources.pop(name)
        if has_values:
            replace_values(parameter, torch.empty(parameter.shape))
            source.copy_to(parameter.detach())


def fill(targets: Mapping[str, Tensor], sources: Mapping[str, Source]) -> None:
    """Read each source into the target of its name, a few at a time. A sharded target gets only its own part.

    Raises:
        ValueError: a file has changed.
    """

    def read(name: str) -> None:
        for cut, part in parts_here(targets[name].detach()):
            sources[name].copy_to(part, cut)

    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="reading") as pool:
        list(pool.map(read, sources))


@torch.no_grad()
def fill_from_main(targets: Mapping[str, Tensor], sources: Mapping[str, Source], device: torch.device) -> None:
    """* Read each source on the main process, and broadcast it: one whole tensor at a time, in fp32.

    Raises:
        ValueError: a file of the main process has changed.
    """
    for name, source in sources.items():
        whole = torch.empty(source.shape, device=device)
        if PartialState().is_main_process:
            source.copy_to(whole)
        dist.broadcast(whole, 0)
        beat()
        for cut, part in parts_here(targets[name].detach()):
            part.copy_(whole[cut])


def filled(model: nn.Module, weights: Tensors, buffers: Tensors, *, keeps_types: bool) -> nn.Module | None:
    """Return a model of the meta device in host memory, with these weights and copies of these buffers.

    Weights move into the model one at a time, so that nothing is held twice. With `keeps_types`, parameters take the
    types of `weights`. Otherwise, weights are converted to the types of the parameters.

    Returns None, and leaves `weights` unchanged, if the model is not on the meta device or does not fit.
    """
    owners = {
        f"{name}.{leaf}".lstrip("."): (part, leaf)
        for name, part in model.named_modules()
        for leaf, _ in part.named_buffers(recurse=False, remove_duplicate=False)
    }
    is_empty = all(each.is_meta for each in model.parameters())
    is_empty &= not any(each.is_meta for each in plain_tensors(model))
    has_own_load = type(model).load_state_dict is not nn.Module.load_state_dict
    if not is_empty or has_own_load or not owners.keys() <= buffers.keys():
        return None
    try:
        check_fit(model_shapes(model), {name: each.shape for name, each in weights.items()})
    except ValueError:
        return None
    for name, (part, leaf) in owners.items():
        part._buffers[leaf] = buffers[name].detach().to("cpu", copy=True)
        weights.pop(name, None)
    for name, parameter in model.named_parameters():
        values = weights.pop(name)
        values = values if keeps_types else values.to(parameter.dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(values, parameter.requires_grad))
    load_extra_state(model, weights)
    return model


@contextmanager
def _parameters_without_values() -> Iterator[None]:
    """Move each new parameter to the meta device inside the context."""

    def look(_: nn.Module, __: str, parameter: Any) -> nn.Parameter | None:
        return None if parameter is None or parameter.is_meta else _without_values(parameter)

    handle = register_module_parameter_registration_hook(look)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter on the meta device; the same one each time, so that modules share it."""
    known = vars(parameter)
    if "stand_in" not in known:
        new = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        vars(new).update(known)
        known["stand_in"] = new
    return known["stand_in"]
