"""Models that read text, with a head for sequences, tokens, answers, or choices or without one, and their cards."""

import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MULTIPLE_CHOICE_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from accel_train.core.format import did_you_mean
from accel_train.data.labels import LabelScheme
from accel_train.data.text.tokenizers import vocab_size_of
from accel_train.model import pretrained
from accel_train.model.tensors import without_values
from accel_train.recipe.schema import Recipe
from accel_train.tasks.common.classification import with_labels
from accel_train.tasks.common.vocabulary import fields_with_vocabulary, grow_vocabulary

# Maximum tokens per sample, unless the recipe or the model sets fewer.
DEFAULT_MAX_LENGTH = 512
_PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


class Head(NamedTuple):
    """A kind of output head of the text models of transformers."""

    purpose: str
    """Name of the head in messages."""
    factory: Any
    """Auto class that builds the model."""
    mapping: Any
    """Mapping of configuration classes to model classes."""


SEQUENCES = Head(
    "sequence classification", AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
)
TOKENS = Head("token classification", AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING)
CHOICES = Head("multiple choice", AutoModelForMultipleChoice, MODEL_FOR_MULTIPLE_CHOICE_MAPPING)
ANSWERS = Head("question answering", AutoModelForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING)
ENCODERS = Head("sentence embedding", AutoModel, MODEL_MAPPING)
"""Models without a head, and without the pooler of BERT, which takes no part in the loss."""


def check_model(recipe: Recipe, head: Head = SEQUENCES) -> None:
    """Check, before any data is read, that transformers has a model of the recipe's type with this head.

    Raises:
        ValueError: the model_type or a field of `model.config` is unknown, or no model of this type has the head.
    """
    pretrained.check_model_config(recipe)
    if recipe.model.config is not None:
        model_type = recipe.model.config["model_type"]
        if model_type == "ngrams" and recipe.tokenizer_in_use != "bytes":
            raise ValueError("model.config.model_type=ngrams reads the bytes of a text; set tokenizer: bytes")
        if CONFIG_MAPPING[model_type] not in head.mapping:
            known = [config.model_type for config in head.mapping]
            raise ValueError(
                f"model.config.model_type={model_type!r} has no model for {head.purpose} in transformers; "
                + did_you_mean(model_type, known, "bert and modernbert have one", at_most=3)
            )


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, head: Head) -> PreTrainedConfig:
    """Return the configuration of the recipe's model with the tokenizer's special tokens.

    Raises:
        ValueError: the configuration cannot be loaded, has no model with this head, or has too few rows for the
            tokenizer.
    """
    section = recipe.model
    if section.pretrained is not None:
        config = pretrained.pretrained_config(recipe)
        if pretrained.value_of(config.get_text_config(), "pad_token_id") is None:
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
    else:
        fields = fields_with_vocabulary(section, vocab_size_of(tokenizer))
        known = CONFIG_MAPPING[fields["model_type"]]().to_dict()
        for role in ("pad", "bos", "eos", "cls", "sep"):
            if f"{role}_token_id" in known:
                fields.setdefault(f"{role}_token_id", getattr(tokenizer, f"{role}_token_id"))
        config = AutoConfig.for_model(**fields)
    if type(config) not in head.mapping and not section.trust_remote_code:
        raise ValueError(
            f"model.pretrained={section.pretrained!r} is of type {config.model_type!r}, which has no model for "
            f"{head.purpose} in transformers; name another, or set model.trust_remote_code if it brings its own"
        )
    return config


def classifier_config(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, scheme: LabelScheme, head: Head = SEQUENCES
) -> PreTrainedConfig:
    """Return `model_config` with the label names and the problem type."""
    config = model_config(recipe, tokenizer, head)
    if head is SEQUENCES:
        config.problem_type = _PROBLEM_TYPES[scheme.problem_type]
    return with_labels(config, scheme.names)


def known_names(recipe: Recipe) -> tuple[str, ...] | None:
    """Return the class names in the order of a pretrained classifier's outputs, or None for a new model."""
    if recipe.model.pretrained is None:
        return None
    id2label = pretrained.pretrained_config(recipe).id2label
    return tuple(id2label[index] for index in sorted(id2label))


def num_positions(config: PreTrainedConfig, head: Head = SEQUENCES) -> int | None:
    """Return the maximum number of tokens that a model of this configuration can read, or None without a limit.

    The count comes from the position embeddings. RoBERTa and similar models count from pad_token_id + 1, so they read
    fewer tokens than their configuration has positions.
    """
    configured: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if type(config) not in head.mapping:
        return configured
    with without_values():
        model = head.factory.from_config(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith(("position_embeddings", "wpe", "embed_positions")):
            rows = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
            return rows if configured is None else min(rows, configured)
    is_rotary = getattr(config.get_text_config(), "rope_parameters", None) is not None
    return configured if is_rotary else None


def resolve_max_length(
    asked: int | None, positions: int | None, tokenizer: PreTrainedTokenizerBase, *, is_pair: bool
) -> int:
    """Return the maximum tokens per sample: `data.max_length`, or the limit of model and tokenizer, at most 512.

    Raises:
        ValueError: `data.max_length` exceeds the model's positions, or leaves no room for text.
    """
    if asked is None:
        return min(DEFAULT_MAX_LENGTH, tokenizer.model_max_length, positions or DEFAULT_MAX_LENGTH)
    if positions is not None and asked > positions:
        raise ValueError(
            f"data.max_length={asked} is longer than the {positions} positions of the model; lower it to {positions}, "
            "or raise max_position_embeddings (n_positions) in model.config"
        )
    least = tokenizer.num_special_tokens_to_add(pair=is_pair) + 1 + is_pair
    if asked < least:
        raise ValueError(
            f"data.max_length={asked} leaves no token for {'two texts' if is_pair else 'the text'}; "
            f"give at least {least}"
        )
    return asked


def check_offsets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the tokenizer can map tokens to characters.

    Raises:
        ValueError: the tokenizer cannot.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer: that of {recipe.tokenizer_in_use} does not say which characters a token stands for, "
            f"which {recipe.task} needs; use one that does (a `fast` one of transformers, bytes or train_bpe)"
        )


def with_token_types(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, head: Head = SEQUENCES) -> bool:
    """Return whether the model takes `token_type_ids`, the marks of the two texts of a pair.

    If so, the tokenizer is changed in place to return them by default, even after it is saved and loaded.
    """
    if type(config) not in head.mapping:
        return False
    forward = inspect.signature(head.mapping[type(config)].forward)
    takes = "token_type_ids" in forward.parameters and getattr(config, "type_vocab_size", 0) > 1
    if takes and "token_type_ids" not in tokenizer.model_input_names:
        tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
        # Only `init_kwargs` is saved.
        tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    return takes


def build_model(
    recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, head: Head = SEQUENCES
) -> tuple[PreTrainedModel, list[str]]:
    """Build the model in fp32 on the CPU (or on the meta device), and return it with notes about its new weights.

    Raises:
        ValueError: the weights cannot be loaded, or are not in the safetensors format.
    """
    # Growing the embedding changes the configuration, so a copy is used.
    config = deepcopy(config)
    arguments: dict[str, Any] = {**pretrained.chosen_attention(recipe)}
    if head is ENCODERS:
        arguments |= pretrained.without_pooler(head.mapping.get(type(config), nn.Module))
    model, loaded = pretrained.transformers_model(head.factory, recipe, config, arguments, takes_new_head=True)
    new = pretrained.new_weights(loaded)
    notes = [f"not pretrained, so new: {', '.join(new)}"] if new else []
    return model, [*notes, *grow_vocabulary(recipe, model, tokenizer)]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, max_length: int, folder: Path) -> None:
    """Write the tokenizer, with `max_length` as its limit, to the model's folder."""
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(str(folder))


def reads(max_length: int, rest: str = "longer texts are cut") -> str:
    """Return the line of a model card on the length of texts."""
    return f"Reads: up to {max_length} tokens; {rest}"
