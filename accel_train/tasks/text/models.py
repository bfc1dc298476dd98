"""Models of text classification: any of transformers that reads a sequence and answers with one row of numbers."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from accel_train.data.labels import LabelScheme
from accel_train.model_check import check_model_config, pretrained_config
from accel_train.recipe import Recipe
from accel_train.tasks.causal_lm import fields_with_vocabulary, padded_vocab_size, quiet_bars

_PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def check_model(recipe: Recipe) -> None:
    """Refuse, before any data is read, a model that transformers does not know or that classifies no text.

    Raises:
        ValueError: an unknown model_type or field of `model.config`, or no model for sequence classification.
    """
    # The length that counts here is data.max_length, which is compared with the positions once the tokenizer is there.
    check_model_config(recipe.model_copy(update={"data": recipe.data.model_copy(update={"sequence_length": 2})}))
    if recipe.model.config is not None:
        model_type = recipe.model.config["model_type"]
        if CONFIG_MAPPING[model_type] not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            known = [config.model_type for config in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING]
            near = get_close_matches(model_type, known, n=3)
            raise ValueError(
                f"model.config.model_type={model_type!r} has no model for sequence classification in transformers; "
                f"{' or '.join(near or ['bert', 'modernbert'])} has one"
            )


def classifier_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, scheme: LabelScheme) -> PreTrainedConfig:
    """The configuration of the recipe's model, with the labels and the tokenizer's special tokens in it.

    Raises:
        ValueError: it cannot be loaded, classifies no sequences, or has too few rows for the tokenizer.
    """
    section = recipe.model
    labels = {
        "id2label": dict(enumerate(scheme.names)),
        "label2id": {name: index for index, name in enumerate(scheme.names)},
        "problem_type": _PROBLEM_TYPES[scheme.problem_type],
    }
    num_tokens = num_rows(tokenizer)
    if section.pretrained is not None:
        config = pretrained_config(recipe)
        for name, value in labels.items():
            setattr(config, name, value)
        if config.get_text_config().pad_token_id is None:
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
    else:
        fields = fields_with_vocabulary(section, num_tokens)
        known = CONFIG_MAPPING[fields["model_type"]]().to_dict()
        for role in ("pad", "bos", "eos", "cls", "sep"):
            if f"{role}_token_id" in known:
                fields.setdefault(f"{role}_token_id", getattr(tokenizer, f"{role}_token_id"))
        config = AutoConfig.for_model(**fields, **labels)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not section.trust_remote_code:
        raise ValueError(
            f"model.pretrained={section.pretrained!r} is of type {config.model_type!r}, which has no model for sequence "
            "classification in transformers; name another, or set model.trust_remote_code if it brings its own"
        )
    return config


def order_of_names(recipe: Recipe, names: tuple[str, ...]) -> tuple[str, ...]:
    """Classes in the order of the outputs of a pretrained classifier that knows exactly these; else as they are.

    Raises:
        ValueError: there is no such model.
    """
    if recipe.model.pretrained is None:
        return names
    id2label = pretrained_config(recipe).id2label
    its_names = tuple(id2label[index] for index in sorted(id2label))
    return its_names if sorted(its_names) == sorted(names) else names


def num_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding needs for a tokenizer, ids with gaps included."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def num_positions(config: PreTrainedConfig) -> int | None:
    """Tokens that a model of this configuration can read at most; None where nothing limits it.

    Read off the position embeddings: RoBERTa and its like count from pad_token_id + 1, so they have fewer than they say.
    """
    said: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return said
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith(("position_embeddings", "wpe", "embed_positions")):
            rows = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
            return rows if said is None else min(rows, said)
    is_rotary = getattr(config.get_text_config(), "rope_parameters", None) is not None
    return said if is_rotary else None


def takes_token_types(config: PreTrainedConfig) -> bool:
    """Whether the model can be told which text of a pair a token is of."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return False
    forward = inspect.signature(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].forward)
    return "token_type_ids" in forward.parameters and getattr(config, "type_vocab_size", 0) > 1


def build_classifier(recipe: Recipe, config: PreTrainedConfig, num_tokens: int) -> tuple[PreTrainedModel, list[str]]:
    """The model in fp32 on the CPU (or without weights, on the meta device), and notes on what of it is new.

    Raises:
        ValueError: the weights cannot be loaded, or are no safetensors.
    """
    section = recipe.model
    config = deepcopy(config)  # growing the embedding writes into it
    kwargs: dict[str, Any] = {}
    if section.attn_implementation != "auto":
        kwargs["attn_implementation"] = section.attn_implementation
    notes: list[str] = []
    is_meta = torch.get_default_device().type == "meta"
    if section.pretrained is None or is_meta:
        model = AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, trust_remote_code=section.trust_remote_code, **kwargs
        )
    else:
        try:
            with _silence():
                model, loaded = AutoModelForSequenceClassification.from_pretrained(
                    section.pretrained,
                    config=config,
                    dtype=torch.float32,
                    trust_remote_code=section.trust_remote_code,
                    use_safetensors=True,  # a pickled weight file could run code
                    ignore_mismatched_sizes=True,  # a head for other labels: it is new, and the notes say so
                    output_loading_info=True,
                    **kwargs,
                )
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise ValueError(f"model.pretrained={section.pretrained!r} cannot be loaded: {first_line}") from error
        notes += _what_is_new(model, loaded)
    rows = padded_vocab_size(num_tokens, section.pad_vocab_to_multiple_of)
    before = model.get_input_embeddings().num_embeddings
    if before < num_tokens:
        model.resize_token_embeddings(rows, mean_resizing=False)
        notes.append(f"the embedding grew from {before} to {rows} rows: the tokenizer has {num_tokens} tokens")
    if recipe.precision.gradient_checkpointing:
        # transformers renamed it in 5.23
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, notes


@contextmanager
def _silence() -> Iterator[None]:
    """No table of transformers about what is new inside: the notes say it, where the rest of the run is said."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with quiet_bars():
            yield
    finally:
        logging.set_verbosity(before)


def _what_is_new(model: PreTrainedModel, loaded: Mapping[str, Any]) -> list[str]:
    mismatched = [entry[0] for entry in loaded["mismatched_keys"]]
    body = model.base_model_prefix + "."
    wrong = [name for name in mismatched if name.startswith(body)]
    if wrong:
        raise ValueError(
            f"model.pretrained: the weights of {', '.join(sorted(wrong))} have another shape than its configuration says; "
            "the folder or its config.json is damaged"
        )
    new = sorted({*loaded["missing_keys"], *mismatched})
    return [f"not pretrained, so new: {', '.join(new)}"] if new else []


def forward_flops(model: PreTrainedModel, num_tokens: int) -> float | None:
    """Floating-point operations of the matrix products of one forward pass of one text; None where they cannot be counted.

    Counted on a copy without weights; models that look at the values of their input cannot run there.
    """
    if type(model.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    counter = FlopCounterMode(display=False)
    try:
        with torch.device("meta"), torch.no_grad():
            copy = AutoModelForSequenceClassification.from_config(model.config).eval()
            with counter:
                copy(input_ids=torch.zeros(1, num_tokens, dtype=torch.long))
    except RuntimeError:
        return None
    return float(counter.get_total_flops())
