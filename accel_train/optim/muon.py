"""Muon: momentum whose matrices are made orthogonal before they are added (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.model.tensors import like, part_of, whole_of
from accel_train.optim.skippable import SkippableOptimizer, decay_and_add, replace

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's polynomial, which drives singular values to between 0.68 and 1.13; of the smallest, 0.003 of the norm arrives there."""
ITERATIONS = 5
UPDATE_RMS = 0.2
"""The root mean square of AdamW's usual update, in units of the learning rate: rates found for AdamW carry over."""


class Muon(SkippableOptimizer):
    """Muon for the groups with `is_matrix`, torch's fused AdamW for all others.

    M = momentum M + (1 - momentum) G;  U = momentum M + (1 - momentum) G (Nesterov);  O = the orthogonal matrix nearest to U;
    W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) O.

    O is computed in fp32 (its products in TF32 where `precision.tf32` is on), by every process for all matrices: under FSDP2
    the update of each matrix is gathered once.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float, **adamw: Any) -> None:
        rest = [group for group in groups if not group["is_matrix"]]
        self._adamw = torch.optim.AdamW(rest, lr=lr, fused=True, **adamw) if rest else None
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def update(self, skip: Tensor | None) -> None:
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            for parameter, gradient in self.gradients(group) if group["is_matrix"] else ():
                self._update_matrix(parameter, gradient, group, skip)
        if self._adamw is not None:
            # Of this moment: `load_state_dict` makes new ones.
            self._adamw.state = self.state
            self._adamw.param_groups = [group for group in self.param_groups if not group["is_matrix"]]
            self._adamw.found_inf, self._adamw.grad_scale = self.found_inf, self.grad_scale  # type: ignore[attr-defined]
            self._adamw.step()

    def _update_matrix(
        self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], skip: Tensor | None
    ) -> None:
        momentum, kept = group["momentum"], self.state_of(parameter, "momentum_buffer")
        moved = torch.lerp(gradient, kept, momentum)
        direction = orthogonalise(whole_of(like(torch.lerp(gradient, moved, momentum), parameter)))
        factor = UPDATE_RMS * math.sqrt(max(parameter.shape))
        decay_and_add(parameter, part_of(direction, parameter), group, factor, skip)
        replace(kept, moved, skip)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return about U V^T for the matrix U S V^T, fp32, by five Newton-Schulz iterations (Jordan et al. 2024).

    fp32, because 16 bits turn the rounding of a sum over processes (1e-7) into 1e-3 of the update.
    """
    x = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
