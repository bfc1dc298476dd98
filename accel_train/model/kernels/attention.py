"""Causal attention without a mask, so that SDPA can use its flash kernel.

In every forward without a cache, transformers 5 looks for packed sequences. The check costs one host read per step.
Under `torch.compile` it also builds a dense mask, so SDPA cannot use the flash kernel.

An attention implementation without a registered mask function gets no mask at all. This is right for training on full
windows, and wrong for left padding and for decoding with a cache. It is therefore used for training only, and
`use_for_generation` restores SDPA.

Where rows are padded, the library reads each mask from the device, in case nothing is padded.
`masks_without_reading` builds the mask in every case.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from accel_train.core.state import Choice
from accel_train.model.kernels.documents import (
    attend,
    attend_within_documents,
    device_of,
    document_starts,
    dtype_of,
    is_document_starts,
    same_document_mask,
    why_no_kernel,
)
from accel_train.recipe.schema import Recipe
from accel_train.runtime.driver import uses_cpu
from accel_train.task import Batch

CAUSAL_SDPA = "accel_train_causal_sdpa"
SEQUENCE_SDPA = "accel_train_sequence_sdpa"
"""Name of the same attention over sequences that are split over processes (`sequence_parallel.py`)."""
PER_DOCUMENT, DENSE = "per-document causal attention", "dense mask"
SHORTEST = 256
"""Window length in tokens from which on a CPU attends to each document separately faster than under a mask."""


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
    """Compute causal SDPA over (batch, heads, length, head size).

    A 4-D `attention_mask`, if given, replaces the causal mask. `attention_mask` may also be the result of
    `document_starts`: then attention is causal within each document.

    Raises:
        ValueError: queries and keys differ in length, as with a key-value cache.
    """
    # If a mask is given, it includes causality.
    kwargs["is_causal"] = False
    if query.shape[2] != key.shape[2]:
        raise ValueError("causal attention without a mask is for training; call use_for_generation(model) to decode")
    if attention_mask is not None and is_document_starts(attention_mask):
        return attend_within_documents(query, key, value, attention_mask, dropout, scaling), None
    if attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    # This equals sdpa_attention_forward without a mask, but skips its lookups: 17 us per layer.
    return attend(query, key, value, dropout, scaling).contiguous(), None


def choose_attention(
    requested: str, model_class: type[PreTrainedModel], config: PreTrainedConfig, sequence_length: int
) -> Choice[str]:
    """Return the attention to train with: the requested one, causal SDPA if it is exact, or the library's default."""
    if requested != "auto":
        return Choice(requested, "as set")
    text = config.get_text_config()
    if not (model_class._supports_sdpa and model_class._supports_attention_backend):
        return Choice("library default", f"{model_class.__name__} has no exchangeable attention")
    window = attention_window(config)
    if window is not None and window < sequence_length:
        return Choice("library default", f"{text.model_type} attends within {window} tokens and needs a mask")
    if getattr(text, "is_encoder_decoder", False) or getattr(text, "attn_logit_softcapping", None):
        return Choice("library default", f"{text.model_type} is not plain causal attention")
    if text.model_type not in _CHECKED_MODEL_TYPES:
        return Choice("library default", f"{text.model_type} is not among the models checked against it")
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
    return Choice(
        CAUSAL_SDPA, "causal SDPA without a mask: no host read per forward, and the flash kernel stays possible"
    )


def attention_window(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model's attention spans; None for a model without such a limit."""
    names, text = ("sliding_window", "attention_chunk_size"), config.get_text_config()
    return min((window for name in names if (window := getattr(text, name, None))), default=None)


def describe_attention(model: PreTrainedModel, requested: str, sequence_length: int) -> Choice[str]:
    """Return the attention of a built model, and the reason for it."""
    used: str = model.config._attn_implementation
    if requested != "auto":
        return Choice(used, "as set")
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


def choose_document_attention(
    attention: str, config: PreTrainedConfig, device: str, dtype: torch.dtype, length: int, *, compiled: bool
) -> Choice[str]:
    """Return how documents in windows of `length` tokens are kept apart: `PER_DOCUMENT` or `DENSE`.

    Args:
        attention: name of the model's attention implementation.
        dtype: compute type on this kind of device.
        compiled: whether torch.compile compiles the model.
    """
    text = config.get_text_config()
    if attention not in (CAUSAL_SDPA, SEQUENCE_SDPA):
        return Choice(DENSE, f"model.attn_implementation is {attention}")
    if compiled and device == "cpu":
        why = "a CPU needs one call for each document, and precision.compile would compile for each number and length"
        return Choice(DENSE, why)
    if device == "cpu" and length < SHORTEST and attention == CAUSAL_SDPA:
        return Choice(DENSE, f"windows of {length} tokens; from {SHORTEST} on each document alone is quicker on a CPU")
    names = ("attention_dropout", "attn_pdrop")
    dropout = max(getattr(text, name, None) or 0.0 for name in names)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    obstacle = why_no_kernel(device, dtype, head_size, dropout)
    if obstacle is not None:
        return Choice(DENSE, obstacle)
    how = "one call of SDPA for each" if device == "cpu" else "one call of varlen_attn for all"
    if compiled:
        how += ", in one graph for any lengths"
    return Choice(PER_DOCUMENT, f"{device.upper()}: {how}; the flash kernel, and memory linear in the length")


def describe_document_attention(recipe: Recipe, config: PreTrainedConfig) -> Choice[str]:
    """Return how a run of this recipe keeps documents apart on this machine. `config` belongs to the built model."""
    section, device = recipe.precision, device_of_run()
    attention = SEQUENCE_SDPA if recipe.parallel.sp_size > 1 else config._attn_implementation
    # fp16 gives the same choice as bf16.
    dtype = torch.float32 if section.mixed_precision == "no" else torch.bfloat16
    length, compiled = recipe.data.window or 0, section.compiles
    return choose_document_attention(attention, config, device, dtype, length, compiled=compiled)


def device_of_run() -> str:
    """Return the kind of device that a run on this machine uses. A plan puts the planned one in its place."""
    return "cuda" if torch.cuda.is_available() and not uses_cpu(os.environ) else "cpu"


def document_mask(model: torch.nn.Module, batch: Batch, *, compiled: bool) -> torch.Tensor:
    """Return the model's attention mask that keeps the documents of a batch apart; see `choose_document_attention`.

    With `document_lengths` and per-document attention, the result is the start of each document. Otherwise it is a
    dense mask from `document_ids`.
    """
    lengths, config = batch.get("document_lengths"), getattr(model, "config", None)
    if lengths is not None and isinstance(config, PreTrainedConfig):
        attention, device = config._attn_implementation, device_of(lengths)
        # A slice of sequences has no mask, because its attention spans the whole sequences.
        if attention == SEQUENCE_SDPA or "document_ids" not in batch:
            return document_starts(lengths)
        dtype, length = dtype_of(next(model.parameters())), batch["input_ids"].shape[1]
        choice = choose_document_attention(attention, config, device, dtype, length, compiled=compiled)
        if choice.value == PER_DOCUMENT:
            return document_starts(lengths)
    mask = same_document_mask(batch["document_ids"])
    if isinstance(config, PreTrainedConfig) and config._attn_implementation == "eager":
        # Eager attention adds its mask to the scores, and true and false would count as 1 and 0.
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
    return mask


@contextmanager
def masks_without_reading() -> Iterator[None]:
    """Inside the context, transformers' SDPA gets its mask of padded rows without a read from a GPU, and without NaN.

    The library looks whether a row is padded at all, and the host would wait for the device in every forward. A query
    in the padding, with only padding within its window, may attend to nothing, and kernels of GPUs make that NaN in the
    backward. Here such a query attends to all keys. Nothing reads its output.
    """
    library = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
        if attention_mask is not None and attention_mask.device.type != "cpu":
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        built: torch.Tensor | None = library(*args, attention_mask=attention_mask, **kwargs)
        if built is None or attention_mask is None or built.device.type == "cpu":
            return built
        return with_keys(built)

    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = mask
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = library


def with_keys(mask: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask in which a query that may attend to no key may attend to all."""
    return mask | ~mask.any(-1, keepdim=True)


def use_for_generation(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the library's SDPA and return the model. SDPA supports caches and padding."""
    if model.config._attn_implementation in (CAUSAL_SDPA, SEQUENCE_SDPA):
        model.set_attn_implementation("sdpa")
    return model
