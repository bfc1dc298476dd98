"""Causal attention within documents that share a row, without a mask: the flash kernel is kept, and memory is linear in the length.

A dense mask has a number for every pair of positions, and every kernel that takes one computes all pairs. Here each document is
attended to alone: on a CPU one call of SDPA for each, on CUDA one call of torch's `varlen_attn` for all of them.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST_HEAD = 256
"""The largest head that the flash kernel of CUDA takes; it takes multiples of 8."""


def document_starts(lengths: Tensor) -> Tensor:
    """Return where documents start in a micro-batch whose rows stand one after the other: (1, 1, 1, N + 1) int32.

    The last number is where the last document ends; an empty document starts where the next one does. Models of transformers
    hand four dimensions to their attention as they are, in the place of a mask; as whole numbers they cannot be taken for one.

    Args:
        lengths: of the documents of each row, (B, D) integers; shorter lists are filled up with 0. The rows are of equal length.
    """
    return pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)[None, None, None]


def is_document_starts(mask: Tensor) -> bool:
    """Return whether what stands in the place of a mask is what `document_starts` makes."""
    return mask.dtype == torch.int32


def same_document_mask(document_ids: Tensor) -> Tensor:
    """Return the attention mask (B, 1, T, T), true where the key is in the query's document and not after it."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    length = document_ids.shape[1]
    return same & torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Return causal attention within each document: (B, heads, T, size) -> (B, T, heads, size).

    Keys and values may have fewer heads than queries. Where neither way fits (`why_no_kernel`), under a dense mask.

    Args:
        starts: see `document_starts`.
        scaling: factor of the scores; None: 1 / sqrt(size).
    """
    device, shape = query.device.type, query.transpose(1, 2).shape
    if device != "cpu" and why_no_kernel(device, _dtype_of(query), shape[3], dropout) is not None:
        return _under_a_mask(query, key, value, starts, dropout, scaling)
    rows = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]  # (B x T, heads, size)
    attend = _one_by_one if device == "cpu" else _in_one_call
    return attend(rows, starts.flatten(), shape[1], dropout, scaling).view(shape)


def why_no_kernel(device: str, dtype: torch.dtype, head_size: int, dropout: float) -> str | None:
    """Return why documents on this kind of device need a dense mask; None where they need none."""
    if device == "cpu":
        return None
    if device != "cuda":
        return f"there is no kernel for documents on {device}"
    if _varlen_attention() is None:
        return "this GPU, or this version of torch, has no flash attention over documents (varlen_attn of torch 2.13)"
    if dtype not in (torch.bfloat16, torch.float16):
        return "the flash kernel of CUDA is for 16 bits (precision.mixed_precision)"
    if dropout > 0:
        return "torch's varlen_attn has no dropout, and the model's attention has"
    if head_size % 8 or head_size > LARGEST_HEAD:
        return f"the flash kernel of CUDA takes heads of a multiple of 8 up to {LARGEST_HEAD}, and the model's have {head_size}"
    return None


def _one_by_one(rows: list[Tensor], starts: Tensor, length: int, dropout: float, scaling: float | None) -> Tensor:
    """Attend with one call for each document, (B x T, heads, size); `starts` are on the host."""
    is_grouped = rows[0].shape[1] != rows[1].shape[1]
    # Only the plan of a run computes on tensors without values: as if each row were one document.
    has_values = type(starts) is Tensor
    lengths = starts.diff().tolist() if has_values else [length] * (len(rows[0]) // length)
    documents = zip(*(each.split([length for length in lengths if length]) for each in rows), strict=True)
    outputs = []
    for document in documents:
        query, key, value = (each.transpose(0, 1)[None] for each in document)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _in_one_call(rows: list[Tensor], starts: Tensor, length: int, dropout: float, scaling: float | None) -> Tensor:
    """Attend with torch's kernel for sequences of many lengths, (B x T, heads, size); nothing is read on the host."""
    attend, dtype = _varlen_attention(), _dtype_of(rows[0])
    assert attend is not None, "why_no_kernel says so"
    query, key, value = (each.to(dtype) for each in rows)  # autocast does not know this operator
    # No document is longer than a row: a tighter bound would have to be read from the device.
    bounds = (starts, starts, length, length)
    is_grouped = query.shape[1] != key.shape[1]
    output: Tensor = attend(query, key, value, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=is_grouped)
    return output


def _under_a_mask(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    batch, _, length, _ = query.shape
    positions = torch.arange(batch * length, dtype=torch.int32, device=starts.device)
    documents = torch.searchsorted(starts.flatten()[1:].contiguous(), positions, right=True).view(batch, length)
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=same_document_mask(documents),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous()


def _dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the precision that a kernel gets this tensor in."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


@cache
def _varlen_attention() -> Callable[..., Any] | None:
    """Return torch's attention over sequences of many lengths, where GPU and torch have it with the arguments used here.

    Causal is `window_size=(-1, 0)` since torch 2.13; before that it was another argument.
    """
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    if not (is_nvidia and torch.backends.cuda.is_flash_attention_available()):
        return None
    if torch.cuda.get_device_capability() < (8, 0):  # below that the kernel refuses its inputs
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa", "scale"} <= has.keys() else None
