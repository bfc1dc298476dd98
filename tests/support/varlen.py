"""CUDA's attention over documents on a CPU: torch's own `varlen_attn` over a plain kernel for its two operators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from accel_train.model.kernels import attention, documents


def scores_of(
    query: Tensor, key: Tensor, starts: Tensor, key_starts: Tensor, longest: Any, longest_key: Any, scale: float | None
) -> Tensor:
    """Return (heads, total, total): causal within each document, -inf elsewhere. Keys have as many heads as queries."""
    lengths, total = starts.diff(), query.shape[0]
    assert starts.dtype == torch.int32
    assert starts.dim() == 1
    assert torch.equal(starts, key_starts)
    assert int(starts[0]) == 0
    assert int(starts[-1]) == total == key.shape[0]
    assert int(lengths.min()) >= 0
    assert longest == longest_key >= int(lengths.max())
    number = torch.arange(len(lengths)).repeat_interleave(lengths)
    allowed = (number[:, None] == number[None]).tril()
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    products = torch.einsum("qhd,khd->hqk", query, key) * factor
    return products.masked_fill(~allowed, -torch.inf)


def forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: Any, longest_key: Any,
    dropout: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: Any = None, window_size_right: Any = None, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (dropout, is_causal, window_size_left, window_size_right) == (0.0, True, -1, 0)
    assert all(each is None for each in others.values())
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = scores_of(query, key, starts, key_starts, longest, longest_key, scale)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    empty = torch.zeros(2, dtype=torch.uint64)
    return laid_out_like(query, output), scores.logsumexp(-1).float(), empty, empty.clone(), query.new_empty(0)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, starts: Tensor,
    key_starts: Tensor, longest: Any, longest_key: Any, *_: Any, scale: float | None = None, **__: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients by the formula of the softmax; automatic differentiation is below this operator."""
    groups, heads = query.shape[1] // key.shape[1], key.shape[1]
    wide_key, wide_value = (each.repeat_interleave(groups, 1) for each in (key, value))
    weights = scores_of(query, wide_key, starts, key_starts, longest, longest_key, scale).softmax(-1)
    of_weights = torch.einsum("qhd,khd->hqk", grad, wide_value)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_scores *= query.shape[-1] ** -0.5 if scale is None else scale
    of_query = torch.einsum("hqk,khd->qhd", of_scores, wide_key)
    wide = torch.einsum("hqk,qhd->khd", of_scores, query), torch.einsum("hqk,qhd->khd", weights, grad)
    of_key, of_value = (each.unflatten(1, (heads, groups)).sum(2) for each in wide)
    return laid_out_like(query, of_query), laid_out_like(key, of_key), laid_out_like(value, of_value)


def laid_out_like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return the values in the type and with the strides that torch's fake operators promise."""
    return torch.empty_like(tensor).copy_(values)


@contextmanager
def cuda_kernel_on_a_cpu(monkeypatch: pytest.MonkeyPatch, *, any_dtype: bool = True) -> Iterator[None]:
    """Keep documents apart as on CUDA. With `any_dtype`, also in 32 and 64 bits, to compare numbers."""
    pytest.importorskip("torch.nn.attention.varlen")
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    for owner in (attention, documents):
        monkeypatch.setattr(owner, "device_of", lambda tensor: "cuda")
        if any_dtype:
            monkeypatch.setattr(owner, "why_no_kernel", lambda *facts: None)
    try:
        yield
    finally:
        library._destroy()
