"""Causal attention within documents that share a row, without a mask, so that the flash kernel works.

A dense mask has a number for every pair of positions, and every kernel that takes one computes all pairs. Here each
document attends only to its own tokens, and memory is linear in the length. A CPU uses one SDPA call per document. CUDA
uses one call of torch's `varlen_attn` for all documents.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel_train.runtime.private import constant_in_graphs

LARGEST_HEAD = 256
"""Largest head size of CUDA's flash kernel. Head sizes must also be multiples of 8."""


def document_starts(lengths: Tensor) -> Tensor:
    """Return the start of each document in a micro-batch whose rows follow one another: (1, 1, 1, N + 1) int32.

    The last number is the end of the last document. An empty document starts where the next one does. transformers
    models pass a 4-D mask to their attention unchanged. The integer type distinguishes the result from a mask.

    Args:
        lengths: (B, D) integers, the document lengths of each row, padded with 0. All rows have equal length.
    """
    return pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)[None, None, None]


def is_document_starts(mask: Tensor) -> bool:
    """Return whether the `mask` argument is a result of `document_starts`."""
    return mask.dtype == torch.int32


def same_document_mask(document_ids: Tensor) -> Tensor:
    """Return the attention mask (B, 1, T, T), true where the key is in the query's document and not after it."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    length = document_ids.shape[1]
    return same & torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()


def attend(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, mask: Tensor | None = None
) -> Tensor:
    """Compute SDPA, which is causal without a mask: (B, heads, T, size) -> a view of shape (B, T, heads, size).

    Keys and values may have fewer heads than queries.
    """
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Compute causal attention within each document: (B, heads, T, size) -> (B, T, heads, size).

    Keys and values may have fewer heads than queries. If the kernel does not fit (`why_no_kernel`), a dense mask is
    used.

    Args:
        starts: see `document_starts`.
        scaling: factor of the scores; None: 1 / sqrt(size).
    """
    device, shape = device_of(query), query.transpose(1, 2).shape
    if device != "cpu" and why_no_kernel(device, dtype_of(query), shape[3], dropout) is not None:
        return _under_a_mask(query, key, value, starts, dropout, scaling)
    rows = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]  # (B x T, heads, size)
    compute = _one_by_one if device == "cpu" else _in_one_call
    return compute(rows, starts.flatten(), shape[1], dropout, scaling).view(shape)


def device_of(tensor: Tensor) -> str:
    """Return the kind of device that attends to documents. A plan puts the kind of the planned device in its place."""
    return tensor.device.type


@constant_in_graphs
def why_no_kernel(device: str, dtype: torch.dtype, head_size: int, dropout: float) -> str | None:
    """Return why documents on this kind of device need a dense mask; None if they do not."""
    if device == "cpu":
        return None
    if device != "cuda":
        return f"no kernel for documents exists on {device}"
    if not _has_varlen_attention():
        return "this GPU, or this version of torch, has no flash attention over documents (varlen_attn of torch 2.13)"
    if dtype not in (torch.bfloat16, torch.float16):
        return "the flash kernel of CUDA is for 16 bits (precision.mixed_precision)"
    if dropout > 0:
        return "torch's varlen_attn has no dropout, and the model's attention has"
    if head_size % 8 or head_size > LARGEST_HEAD:
        return (
            f"the flash kernel of CUDA takes heads of a multiple of 8 up to {LARGEST_HEAD}, and the model's have "
            f"{head_size}"
        )
    return None


def _one_by_one(rows: list[Tensor], starts: Tensor, length: int, dropout: float, scaling: float | None) -> Tensor:
    """Attend with one call per document, (B x T, heads, size). `starts` are on the host."""
    # Only the plan of a run uses tensors without values. It computes as if each row were one document.
    has_values = type(starts) is Tensor
    lengths = starts.diff().tolist() if has_values else [length] * (len(rows[0]) // length)
    documents = zip(*(each.split([length for length in lengths if length]) for each in rows), strict=True)
    outputs = []
    for document in documents:
        query, key, value = (each.transpose(0, 1)[None] for each in document)
        outputs.append(attend(query, key, value, dropout, scaling)[0])
    return torch.cat(outputs)


def _in_one_call(rows: list[Tensor], starts: Tensor, length: int, dropout: float, scaling: float | None) -> Tensor:
    """Attend to all documents with one call of torch's kernel, (B x T, heads, size). The host reads nothing."""
    from torch.nn.attention import varlen

    compute: Any = varlen.varlen_attn
    dtype = dtype_of(rows[0])
    # Autocast does not cover this operator.
    query, key, value = (each.to(dtype) for each in rows)
    # A document is at most as long as a row. A tighter bound would have to be read from the device, and torch.compile
    # would compile for each.
    bounds = (starts, starts, length, length)
    is_grouped = query.shape[1] != key.shape[1]
    return compute(query, key, value, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=is_grouped)


def _under_a_mask(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    batch, _, length, _ = query.shape
    positions = torch.arange(batch * length, dtype=torch.int32, device=starts.device)
    documents = torch.searchsorted(starts.flatten()[1:].contiguous(), positions, right=True).view(batch, length)
    return attend(query, key, value, dropout, scaling, same_document_mask(documents)).contiguous()


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the precision in which a kernel receives this tensor."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


@cache
def _has_varlen_attention() -> bool:
    """Return whether this GPU and this torch have attention over sequences of different lengths.

    Since torch 2.13, `window_size=(-1, 0)` makes it causal. Earlier versions use another argument.
    """
    # Without a GPU here, a plan asks for the one that the run will use.
    if torch.cuda.is_available():
        if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
            return False
        # On older GPUs the kernel refuses its inputs.
        if torch.cuda.get_device_capability() < (8, 0):
            return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", "scale"} <= inspect.signature(varlen_attn).parameters.keys()
