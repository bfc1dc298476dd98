"""Causal attention without a mask, so that SDPA can take its flash kernel.

transformers 5 looks for packed sequences in every forward without a cache, which costs a host read a step, and builds a
dense mask under `torch.compile`, which rules the flash kernel out. An attention with a name that has no mask function
gets no mask at all: right for training on full windows, wrong for padding on the left and for decoding with a cache. So
it is used for training only, and `use_for_generation` puts SDPA back.
"""

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from accel_train.core.state import Choice

CAUSAL_SDPA = "accel_train_causal_sdpa"
SEQUENCE_SDPA = "accel_train_sequence_sdpa"
"""The same over sequences that are split over processes (`sequence_parallel.py`)."""


def causal_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """SDPA over (batch, heads, length, head size), causal; a 4-D mask, if one is given, says all (causality included).

    Raises:
        ValueError: queries and keys differ in length, as with a key-value cache.
    """
    kwargs["is_causal"] = False  # said by the mask, where there is one
    if query.shape[2] != key.shape[2]:
        raise ValueError("causal attention without a mask is for training; call use_for_generation(model) to decode")
    if attention_mask is not None:
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        return output, weights
    # What sdpa_attention_forward comes to without a mask, less what it looks up: 17 us a layer.
    is_grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=is_grouped
    )
    return output.transpose(1, 2).contiguous(), None


def choose_attention(
    requested: str, model_class: type[PreTrainedModel], config: PreTrainedConfig, sequence_length: int
) -> Choice[str]:
    """Return the attention to train with: as asked, or causal SDPA where it is exact, else the library's own choice."""
    if requested != "auto":
        return Choice(requested, "as the recipe says")
    text = config.get_text_config()
    if not (model_class._supports_sdpa and model_class._supports_attention_backend):
        return Choice("library default", f"{model_class.__name__} has no exchangeable attention")
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    window = min((window for window in windows if window), default=None)
    if window is not None and window < sequence_length:
        return Choice("library default", f"{text.model_type} attends within {window} tokens, which needs a mask")
    if getattr(text, "is_encoder_decoder", False) or getattr(text, "attn_logit_softcapping", None):
        return Choice("library default", f"{text.model_type} is not plain causal attention")
    if text.model_type not in _CHECKED_MODEL_TYPES:
        return Choice("library default", f"{text.model_type} is not among the models checked against it")
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
    return Choice(
        CAUSAL_SDPA, "causal SDPA without a mask: no host read per forward, and the flash kernel stays possible"
    )


def describe_attention(model: PreTrainedModel, requested: str, sequence_length: int) -> Choice[str]:
    """Return the attention of a model that was built, and why it has that one."""
    used: str = model.config._attn_implementation
    if requested != "auto":
        return Choice(used, "as the recipe says")
    causal_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    if causal_class is type(model):
        choice = choose_attention(requested, type(model), model.config, sequence_length)
        if choice.value in (used, "library default"):
            return Choice(used, choice.reason)
    return Choice(used, f"as transformers builds {type(model).__name__}")


_CHECKED_MODEL_TYPES = frozenset(
    ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt", "phi", "phi3", "gemma", "olmo", "olmo2",
     "smollm3", "stablelm", "starcoder2")
)  # fmt: skip
"""Model types whose logits a test compares with the library's own attention."""


def use_for_generation(model: PreTrainedModel) -> PreTrainedModel:
    """Put the library's SDPA back (it knows caches and padding); returns the model."""
    if model.config._attn_implementation in (CAUSAL_SDPA, SEQUENCE_SDPA):
        model.set_attn_implementation("sdpa")
    return model
