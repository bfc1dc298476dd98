"""Entities in sequences of tags (B-PER I-PER O): found and counted on the device, so that an evaluation keeps no single rows.

The definitions are those of seqeval and of CoNLL's `conlleval`: an entity counts as found where its first word, its last word
and its type are right.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TAG = re.compile(r"([BIES])(?:-(.+))?", re.DOTALL)


@dataclass(frozen=True)
class EntityTags:
    """The meaning of tags: the type of an entity, and its first and last word."""

    types: tuple[str, ...]
    """Types of entities, sorted."""
    type_of: tuple[int, ...]
    """Each tag's type by its place in `types`; -1 for O."""
    begins: tuple[bool, ...]
    """Each tag: begins an entity whatever stands before it (B, S)."""
    ends: tuple[bool, ...]
    """Each tag: ends an entity whatever follows (E, S)."""


def entity_tags(names: Sequence[str]) -> EntityTags | None:
    """Return the meaning of IOB1, IOB2 and IOBES tags, by id; None where a name is neither O nor B-, I-, E- or S- with a type.

    Tags without a type (B, I, O) are of one type, `_`.
    """
    found = [_TAG.fullmatch(name) for name in names]
    prefixes = [match[1] if match else name for match, name in zip(found, names)]
    if not {"B", "I"} & set(prefixes) or not set(prefixes) <= set("BIESO"):
        return None
    types = [(match[2] or "_") if match else "" for match in found]
    known = tuple(sorted(set(types) - {""}))
    return EntityTags(
        types=known,
        type_of=tuple(known.index(each) if each else -1 for each in types),
        begins=tuple(prefix in "BS" for prefix in prefixes),
        ends=tuple(prefix in "ES" for prefix in prefixes),
    )


def entity_counts(tags: EntityTags, labels: Tensor, predictions: Tensor) -> Tensor:
    """Return for each type of entity how many are found, predicted and true: (types, 3) int64.

    `labels` and `predictions` are (N, W) tags of the W words of N sentences; a word with a negative label, as those have that
    fill up, is outside of every entity, whatever is predicted for it.
    """
    predictions = torch.where(labels < 0, -1, predictions)
    true_type, true_first, true_last = _spans(tags, labels)
    type_, first, last = _spans(tags, predictions)
    is_found = true_first & first & (true_type == type_) & (true_last == last)
    groups = ((is_found, true_type), (first, type_), (true_first, true_type))
    return torch.stack([_count(types[where], len(tags.types)) for where, types in groups], dim=1)


def _spans(tags: EntityTags, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each word the type of its entity (-1: none), whether it is an entity's first, and the place of the last, all (N, W)."""
    known = torch.where(ids < 0, len(tags.type_of), ids)  # one row more, for words that do not count
    types, begins, ends = (
        torch.tensor([*values, outside], device=ids.device)[known]
        for values, outside in ((tags.type_of, -1), (tags.begins, False), (tags.ends, False))
    )
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    differs = types[:, 1:] != types[:, :-1]
    edge = torch.ones_like(types[:, :1], dtype=torch.bool)
    first = begins | torch.cat([edge, differs | ends[:, :-1]], dim=1)
    last = ends | torch.cat([differs | begins[:, 1:], edge], dim=1)
    is_inside = types >= 0
    place_of_last = torch.where(is_inside & last, places, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return types, is_inside & first, place_of_last


def _count(types: Tensor, num_types: int) -> Tensor:
    return torch.zeros(num_types, dtype=torch.int64, device=types.device).scatter_add_(0, types, torch.ones_like(types))
