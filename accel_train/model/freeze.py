"""Freeze parts of a model: parameters by name pattern, and batch norms with their running statistics. Check names."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_train.core.errors import SettingError
from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.text.tokenizers import vocabulary_of
from accel_train.model.batch_norm import is_batch_norm
from accel_train.recipe.schema import Model, Recipe
from accel_train.task import is_of_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        kind: noun for a name, for the message.
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


def set_training(model: Any) -> Choice[int] | None:
    """Set a model to training mode except parts that the program set to evaluation mode; return their number.

    A model that is in evaluation mode itself is set to training with all of its parts: `from_pretrained` returns it so.
    The same holds for a part from transformers with weights to train. None if nothing stays and no such part exists.
    """
    # The wrapper of peft is new, and trains.
    if not model.training or (hasattr(model, "peft_config") and not model.get_base_model().training):
        model.train()
        return None
    woken = []
    for name, part in model.named_modules():
        is_pretrained = is_of_transformers(part) and any(each.requires_grad for each in part.parameters())
        if is_pretrained and not part.training:
            part.train()
            woken.append(name)
    kept: list[str] = []
    for name, part in model.named_modules():
        if not part.training and not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    if not kept and not woken:
        return None
    reasons = [f"{named(kept)} {'stays' if len(kept) == 1 else 'stay'} in eval(), as given"] if kept else []
    if woken:
        reasons.append(f"{named(woken)} came in eval() from from_pretrained with weights to train: set to train()")
    return Choice(len(kept), "; ".join(reasons))


def named(names: Sequence[str]) -> str:
    """Return the first three names, and the number of others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(repr, names[:3]))}{more}"


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
    what = f"model.freeze matches {format_count(len(frozen), 'tensor')}"
    return Choice(count, what + (f", {format_count(len(norms), 'batch norm')} with their statistics" if norms else ""))


def check_rows_train(recipe: Recipe, model: Any, tokenizer: "PreTrainedTokenizerBase", num_rows: int) -> None:
    """Check that the embeddings of a pretrained model train if the tokenizer has tokens that pretraining has not seen.

    Args:
        model: a model of transformers, which may have no values, and more rows already.
        num_rows: the number of pretrained rows.

    Raises:
        SettingError: the recipe trains adapters, or freezes the embeddings.
    """
    lora, frozen = recipe.model.lora, recipe.model.freeze
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {id(layer.weight) for layer in layers if isinstance(layer, nn.Module)}
    names = [name for name, each in model.named_parameters() if id(each) in weights]
    leaf, remedy, kept = "model.freeze", "Change the patterns", [name for name in names if matches(name, frozen)]
    if lora is not None and not kept:
        kept = [name for name in names if not matches(name, lora.train_also)]
        leaf, remedy = "model.lora.train_also", f"Add {' and '.join(f'*{name}' for name in kept)}"
    if kept and (num_tokens := num_unknown(recipe, tokenizer, num_rows)):
        tokens, rows = format_count(num_tokens, "token"), " and ".join(kept)
        raise SettingError(
            f"the tokenizer has {tokens} without a pretrained row, and {rows} would stay frozen",
            f"{remedy}, or use a tokenizer whose tokens {recipe.model.pretrained} knows.",
            leaf,
            (leaf, "tokenizer"),
        )


def num_unknown(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", rows: int) -> int:
    """Return the number of tokens whose row of `rows` belongs to another token in the pretrained tokenizer.

    Padding, which no model reads, does not count.
    """
    known = None if recipe.tokenizer_in_use == recipe.model.pretrained else vocabulary_of(recipe.model)
    # transformers makes an empty tokenizer for weights without one.
    if known is not None and 2 * len(known) <= rows:
        known = None
    others = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.sep_token, tokenizer.cls_token, tokenizer.mask_token)
    padding = None if tokenizer.pad_token in others else tokenizer.pad_token
    return sum(
        token != padding and (number >= rows or (known is not None and known.get(token) != number))
        for token, number in tokenizer.get_vocab().items()
    )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns, as in `matching`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
