"""Linear layers with frozen weights in 4 bits: nf4 by bitsandbytes (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BLOCK, NESTED_BLOCK = 64, 256
"""Weights per scale, and scales per scale of scales."""
NF4_BYTES = 0.5 + 1 / BLOCK + 4 / (BLOCK * NESTED_BLOCK)
"""Bytes per nf4 weight: 4 bits, an 8-bit scale per 64 weights, and a 32-bit scale per 256 of those scales."""


class Packed(NamedTuple):
    """A matrix in 4 bits. The first three parts are bytes, and belong to the matrix."""

    weight: Tensor
    """(rows, columns / 2), two weights per byte."""
    scales: Tensor
    """(blocks,), an 8-bit scale per block of weights."""
    scales_of_scales: Tensor
    """(4 * (nested blocks + 1),), the bytes of an fp32 scale per block of scales, and of the mean of all scales."""
    code: Tensor
    """(16,), the fp32 value of each code of a weight, the same for all matrices."""
    code_of_scales: Tensor
    """(256,), the fp32 value of each code of a scale, the same for all matrices."""

    def unpacked(self) -> Tensor:
        """Return the matrix that the bits stand for, in fp32: (rows, columns)."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.weight.view(-1, 1), self.state(torch.float32))

    def state(self, dtype: torch.dtype) -> Any:
        """Return bitsandbytes' description of the scales. It dequantizes to `dtype`."""
        from bitsandbytes.functional import QuantState

        rows, half = self.weight.shape
        numbers = self.scales_of_scales.view(torch.float32)
        nested = QuantState(numbers[:-1], code=self.code_of_scales, blocksize=NESTED_BLOCK, dtype=torch.float32)
        shape = torch.Size((rows, 2 * half))
        return QuantState(self.scales, shape, self.code, BLOCK, "nf4", dtype, offset=numbers[-1], state2=nested)


def pack(weight: Tensor) -> Packed:
    """Return a matrix with an even number of columns in 4 bits, on its device. On the meta device, only shapes."""
    rows, columns = weight.shape
    if weight.is_meta:
        blocks = -(-weight.numel() // BLOCK)
        shapes = ((rows, columns // 2), (blocks,), (4 * (-(-blocks // NESTED_BLOCK) + 1),))
        matrix, scales, numbers = (torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes)
        return Packed(matrix, scales, numbers, *(torch.empty(size, device="meta") for size in (16, 256)))
    from bitsandbytes.functional import quantize_4bit

    # The bits do not depend on the type in which a file holds the weights.
    whole = weight.detach().float().contiguous()
    packed, state = quantize_4bit(whole, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    numbers = torch.cat([state.state2.absmax, state.offset.reshape(1)])
    packed = packed.view(rows, columns // 2)
    return Packed(packed, state.absmax, numbers.view(torch.uint8), state.code, state.state2.code)


class Nf4Linear(nn.Module):
    """Linear layer with a frozen matrix in 4 bits.

    The parts are parameters of bytes. FSDP2 shards and gathers them like other weights, and casts only floats.
    """

    code: Tensor
    code_of_scales: Tensor

    def __init__(self, packed: Packed, bias: nn.Parameter | None, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.scales, self.scales_of_scales = (nn.Parameter(each, False) for each in packed[:3])
        self.register_buffer("code", packed.code, persistent=False)
        self.register_buffer("code_of_scales", packed.code_of_scales, persistent=False)
        self.bias, self.compute_dtype = bias, compute_dtype
        self.out_features, self.in_features = packed.weight.shape[0], 2 * packed.weight.shape[1]

    def packed(self, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> Packed:
        """Return the matrix and its codes. `whole` gathers each part of the matrix."""
        weight, scales, numbers = (whole(each) for each in (self.weight, self.scales, self.scales_of_scales))
        return Packed(weight, scales, numbers, self.code, self.code_of_scales)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product with the dequantized matrix, computed in `compute_dtype`, in the type of the inputs."""
        from bitsandbytes import matmul_4bit

        packed, dtype = self.packed(), self.compute_dtype
        assert packed.weight.dtype == torch.uint8, "FSDP2 of this torch casts bytes: use torch 2.13 or newer"
        bias = None if self.bias is None else self.bias.to(dtype)
        # bitsandbytes before 0.50 takes the bytes as a row.
        row = packed.weight.view(-1, 1).t()
        return matmul_4bit(inputs.to(dtype), row, bias=bias, quant_state=packed.state(dtype)).to(inputs.dtype)


def packed_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """Return the layers of a model with weights in 4 bits, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
