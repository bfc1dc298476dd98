"""Freeze parts of a model: parameters by name pattern, and batch norms with their running statistics."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from accel_train.core.errors import SettingError
from accel_train.core.state import Choice
from accel_train.model.batch_norm import is_batch_norm
from accel_train.recipe.schema import Model


def ends_with(name: str, end: str) -> bool:
    """Return whether a dotted name is `end`, or ends with the part or parts `end`, as peft compares them."""
    return name == end or name.endswith(f".{end}")


def matching(
    names: Sequence[str],
    patterns: Iterable[str],
    leaf: str,
    *,
    kind: str = "parameter",
    match: Callable[[str, str], bool] = fnmatchcase,
) -> set[str]:
    """Return the names that match at least one pattern.

    Args:
        names: dotted names of the model's parameters or modules.
        leaf: the setting that holds the patterns.
        kind: what the names are, for the message.
        match: compares a name with a pattern. Default: `*`, `?`, `[0-3]` as in a shell.

    Raises:
        SettingError: patterns match nothing. The message names each, with the nearest name.
    """
    hits = {pattern: {name for name in names if match(name, pattern)} for pattern in patterns}
    if missing := [pattern for pattern, found in hits.items() if not found]:
        each = " and ".join(f"{pattern!r}; {_nearest(pattern, names)}" for pattern in missing)
        raise SettingError(f"no {kind} of the model matches {each}", at=leaf, settings=(leaf,))
    return set().union(*hits.values())


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Return a hint with the name, or the part of a name with as many dots, that is most similar to a pattern."""
    length = pattern.count(".") + 1
    parts = {
        ".".join(split[begin : begin + length])
        for split in (name.split(".") for name in names)
        for begin in range(len(split) - length + 1)
    }
    near = get_close_matches(pattern.strip("*."), sorted(parts), n=1, cutoff=0.6)
    near = near or get_close_matches(pattern, names, n=1, cutoff=0.3) or list(names)[:1]
    return f"there is, for example, {near[0]}" if near else "it has none"


def freeze(model: nn.Module, section: Model) -> Choice[int]:
    """Freeze the weights that the recipe names; return the number of frozen elements. Call it in training mode.

    Raises:
        ValueError: a pattern matches no parameter, or `freeze_batch_norm` is set and the model has no batch norm.
    """
    parameters = dict(model.named_parameters())
    frozen = matching(list(parameters), section.freeze, "model.freeze")
    for name in frozen:
        parameters[name].requires_grad_(False)
    norms = [module for module in model.modules() if section.freeze_batch_norm and is_batch_norm(module)]
    if section.freeze_batch_norm and not norms:
        raise ValueError("model.freeze_batch_norm is set, but this model has no batch norm; leave it out")
    for norm in norms:
        # In evaluation mode, a batch norm uses its running statistics and does not update them.
        norm.eval()
        norm.requires_grad_(False)
    count = sum(parameter.numel() for parameter in parameters.values() if not parameter.requires_grad)
    what = f"{len(frozen)} tensors match model.freeze"
    return Choice(count, what + (f", {len(norms)} batch norms with their statistics" if norms else ""))
