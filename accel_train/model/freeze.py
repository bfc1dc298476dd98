"""Freeze parts of a model: parameters by name pattern, and batch norms with their running statistics."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from accel_train.core.state import Choice
from accel_train.model.batch_norm import is_batch_norm
from accel_train.recipe.schema import Model


def matching(names: Sequence[str], patterns: Sequence[str], leaf: str) -> set[str]:
    """Return the names that match at least one pattern (`*`, `?`, `[0-3]` as in a shell).

    Raises:
        ValueError: a pattern matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if fnmatchcase(name, pattern)}
        if not hits:
            near = get_close_matches(pattern, names, n=1, cutoff=0.3)
            raise ValueError(
                f"{leaf}: no parameter of the model matches {pattern!r}; there is, for example, "
                f"{(near or list(names))[0]}"
            )
        found |= hits
    return found


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
