"""Products of 16-bit matrices with an fp32 result, so that nothing is rounded twice."""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

PRODUCT_AT_ONCE = 2**24
"""Largest number of elements of the head's gradient that one addition updates on a CPU: 64 MiB in fp32."""


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b, written to `out` if given. For 16-bit inputs it is fp32, so that nothing is rounded twice."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out=out)
    if a.is_cuda and has_wide_products("mm"):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` (fp32, or the inputs' own type). The product is never there as a whole."""
    if total.is_cuda and a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    if total.is_cuda and has_wide_products("addmm"):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    # Rows that begin at a multiple of 64 suit matrix products: others took 3 times as long on an H100.
    rows = max(PRODUCT_AT_ONCE // b.shape[1] // 64 * 64, 64)
    for own, their in zip(total.split(rows), a.split(rows), strict=True):
        own += product(their, b)


@cache
def has_wide_products(operator: Literal["mm", "addmm"], device: str = "cuda") -> bool:
    """Return whether an operator of torch multiplies 16-bit matrices into an fp32 one on this kind of device.

    Builds for AMD have neither operator, and in some versions `addmm` wants equal types.
    """
    a, total = torch.ones(16, 16, dtype=torch.bfloat16, device=device), torch.ones(16, 16, device=device)
    try:
        if operator == "mm":
            torch.mm(a, a, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
