"""Compute in fp64 what a program computes in fp32: `Processes(2, doubled.begin)`.

A model that amplifies rounding differs from itself after a few steps in fp32, so its layouts prove nothing there. In
fp64, the same steps differ by rounding alone.
"""

import sys

KEPT = ("accel_train.optim.update",)
"""Modules whose numbers stay in fp32, because torch's fused kernels read them as such."""


class _Single:
    """The module torch, as it was."""

    def __init__(self, single: object) -> None:
        self.float32 = self.float = single

    def __getattr__(self, name: str) -> object:
        import torch

        return getattr(torch, name)


def begin() -> None:
    """Let this process take every fp32 for fp64, in all modules but `KEPT`. There is no way back."""
    import torch

    single, to_single = torch.float32, torch.Tensor.float
    for name in KEPT:
        sys.modules[name].torch = _Single(single)  # type: ignore[attr-defined]

    def to_double(tensor: torch.Tensor, **options: object) -> torch.Tensor:
        is_kept = sys._getframe(1).f_globals["__name__"] in KEPT
        return to_single(tensor) if is_kept else tensor.double()

    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = to_double  # type: ignore[method-assign,assignment]
    torch.nn.Module.float = torch.nn.Module.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
