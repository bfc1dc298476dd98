"""Encoder-decoders of transformers for sequence-to-sequence tasks: configuration, lengths, and decoder inputs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from accel_train.data.text.tokenizers import vocab_size_of
from accel_train.model.pretrained import pretrained_config, value_of
from accel_train.recipe.schema import Recipe
from accel_train.tasks.common.text_models import DEFAULT_MAX_LENGTH, Head
from accel_train.tasks.common.vocabulary import fields_with_vocabulary
from accel_train.tasks.seq2seq.config import Seq2SeqData

SEQ2SEQ = Head("sequence-to-sequence", AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
_BEGIN_WITH_LAST_LABEL = ("mbart", "plbart")
"""Model types whose decoder begins with the last label, the token that ends a text."""


def encoder_decoder_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the configuration of the recipe's model. A new model gets the tokenizer's special tokens.

    A new model's decoder begins with the token that its family uses: padding (T5, Marian) or end of text (BART).

    Raises:
        ValueError: the configuration cannot be loaded, is not an encoder-decoder for text, or has too few rows for the
            tokenizer.
    """
    section = recipe.model
    if section.pretrained is not None:
        config = pretrained_config(recipe)
    else:
        fields = fields_with_vocabulary(section, vocab_size_of(tokenizer))
        default = CONFIG_MAPPING[fields["model_type"]]()
        known, start = default.to_dict(), getattr(default, "decoder_start_token_id", None)
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        begins_with_end = fields["model_type"] in _BEGIN_WITH_LAST_LABEL or start == value_of(default, "eos_token_id")
        special = {"pad_token_id": pad, "eos_token_id": end, "bos_token_id": end, "forced_eos_token_id": end}
        fields = {name: value for name, value in special.items() if name in known} | fields
        config = AutoConfig.for_model(**{"decoder_start_token_id": end if begins_with_end else pad} | fields)
    if type(config) not in SEQ2SEQ.mapping and not section.trust_remote_code:
        raise ValueError(
            f"model.pretrained={section.pretrained!r} is of type {config.model_type!r}, not an encoder-decoder of "
            f"transformers; t5, bart and marian are"
        )
    return config


def resolve_lengths(recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the maximum lengths of a source (`data.max_length`) and of a target (`data.max_target_length`) in tokens.

    The default is the limit of model and tokenizer, at most 512.

    Raises:
        ValueError: the model has fewer positions, or the length leaves no room for text.
    """
    section = Seq2SeqData.of(recipe.data)
    found = []
    for side, name, asked in (
        ("encoder", "max_length", section.max_length),
        ("decoder", "max_target_length", section.max_target_length),
    ):
        positions = getattr(config, f"max_{side}_position_embeddings", getattr(config, "max_position_embeddings", None))
        if asked is None:
            asked = min(DEFAULT_MAX_LENGTH, tokenizer.model_max_length, positions or DEFAULT_MAX_LENGTH)
        if positions is not None and asked > positions:
            raise ValueError(
                f"data.{name}={asked} is longer than the {positions} positions of the model's {side}; "
                f"lower it to {positions}, or raise max_position_embeddings in model.config"
            )
        least = tokenizer.num_special_tokens_to_add() + 1
        if asked < least:
            raise ValueError(f"data.{name}={asked} leaves no token for the text; give at least {least}")
        found.append(asked)
    return found[0], found[1]


def decoder_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return logits (N, T, vocabulary) for `labels` (N, T). The model shifts the labels for its decoder."""
    labels = batch["labels"]
    # M2M-100 and a few other models do not have this method.
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    decoder: dict[str, Any] = {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels)}
    logits: Tensor = model(**model_inputs(batch), **decoder, use_cache=False).logits
    return logits


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the encoder inputs of a batch."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}
