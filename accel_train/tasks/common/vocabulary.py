"""Vocabulary size of a model that is built from a configuration."""

from typing import Any

from accel_train.recipe.schema import Model


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return `vocab_size` rounded up to a multiple of `multiple`. A multiple of 0 leaves it unchanged."""
    return vocab_size if multiple == 0 else -(-vocab_size // multiple) * multiple


def fields_with_vocabulary(section: Model, vocab_size: int) -> dict[str, Any]:
    """Return `model.config` with a vocabulary size: `vocab_size` padded to the recipe's multiple, unless it is set.

    Raises:
        ValueError: the configured size is smaller than `vocab_size`.
    """
    assert section.config is not None
    fields = dict(section.config)
    rows = padded_vocab_size(vocab_size, section.pad_vocab_to_multiple_of)
    if fields.setdefault("vocab_size", rows) < vocab_size:
        raise ValueError(
            f"model.config.vocab_size={fields['vocab_size']} is smaller than the tokenizer's {vocab_size} tokens; "
            f"leave it out, or give at least {vocab_size}"
        )
    return fields
