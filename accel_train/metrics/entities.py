"""Find and count entities in sequences of tags (B-PER I-PER O), on the device, so an evaluation keeps no rows.

The definitions follow seqeval and CoNLL's `conlleval`: an entity counts as found if its first word, its last word, and
its type are right.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accel_train.metrics.tally import count_values

_TAG = re.compile(r"([BIES])(?:-(.+))?", re.DOTALL)


class EntityTags(NamedTuple):
    """Meaning of tags: the type of an entity, and its first and last word."""

    types: tuple[str, ...]
    """Types of entities, sorted."""
    type_of: tuple[int, ...]
    """Index into `types` for each tag. -1 for O."""
    begins: tuple[bool, ...]
    """Whether each tag begins an entity regardless of the previous tag (B, S)."""
    ends: tuple[bool, ...]
    """Whether each tag ends an entity regardless of the next tag (E, S)."""


def entity_tags(names: Sequence[str]) -> EntityTags | None:
    """Return the meaning of IOB1, IOB2, and IOBES tags by id, or None if any name is not such a tag.

    A tag is O, or B-, I-, E-, or S- with a type. Tags without a type (B, I) have the type `_`.
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
    """Return the number of found, predicted, and true entities of each type: (types, 3) int64.

    `labels` and `predictions` are (N, W) tags of the W words of N sentences. A word with a negative label, such as
    padding, is outside every entity, regardless of its prediction.
    """
    predictions = torch.where(labels < 0, -1, predictions)
    true_type, true_first, true_last = _spans(tags, labels)
    type_, first, last = _spans(tags, predictions)
    is_found = true_first & first & (true_type == type_) & (true_last == last)
    groups = ((is_found, true_type), (first, type_), (true_first, true_type))
    return torch.stack([count_values(types[where], len(tags.types)) for where, types in groups], dim=1)


def _spans(tags: EntityTags, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, each (N, W): entity type of each word, whether it begins an entity, and place of the entity's last word.

    The type is -1 for words outside of entities.
    """
    known = torch.where(ids < 0, len(tags.type_of), ids)  # one extra row for words that do not count
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
