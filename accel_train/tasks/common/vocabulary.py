"""Vocabulary size of a model: from its configuration, or grown to the tokenizer's."""

from typing import TYPE_CHECKING, Any

from accel_train.core.format import format_count
from accel_train.data.text.tokenizers import vocab_size_of
from accel_train.model.freeze import check_rows_train
from accel_train.model.pretrained import grow_embedding, value_of
from accel_train.recipe.schema import Model, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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


def grow_vocabulary(
    recipe: Recipe, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", *, pads: bool = False
) -> list[str]:
    """Give a pretrained model, in place, a row for each token of the tokenizer; return a note about new rows.

    With `pads`, it also gets rows of padding if each token has its row (`model.pad_vocab_to_multiple_of`).

    Raises:
        SettingError: tokens have rows that pretraining has not seen, and the recipe freezes the embeddings.
    """
    if recipe.model.pretrained is None:
        return []
    num_tokens = vocab_size_of(tokenizer)
    # The input embedding of Perceiver is its latent vectors, a parameter.
    before = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if before is None:
        if (before := value_of(model.config.get_text_config(), "vocab_size")) is not None and before < num_tokens:
            raise ValueError(
                f"the tokenizer has {num_tokens:,} tokens and {model.config.model_type} {before:,} rows, which cannot "
                f"grow; use the tokenizer of {recipe.model.pretrained}"
            )
        return []
    check_rows_train(recipe, model, tokenizer, before)
    rows = padded_vocab_size(num_tokens, recipe.model.pad_vocab_to_multiple_of)
    if before >= (rows if pads else num_tokens):
        return []
    grow_embedding(model, rows)
    many = format_count(num_tokens - before, "token that the model lacks", "tokens that the model lacks")
    why = f"the tokenizer has {many}" if before < num_tokens else "model.pad_vocab_to_multiple_of"
    return [f"the embedding grew from {before:,} to {rows:,} rows ({why}). New rows start as the mean of the others"]
