"""Muon: momentum matrices, orthogonalized before the update (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.model.tensors import holders, parts_in
from accel_train.model.weights import hidden_matrices, in_rounds
from accel_train.optim.adam import FusedAdam
from accel_train.optim.update import SkippableOptimizer, decay_and_add, replace
from accel_train.recipe.optimizer import Group, Groups, Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic. The iterations map singular values from 0.003 of the norm up into [0.68, 1.13]."""
ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of AdamW's usual update, in units of the learning rate. Rates tuned for AdamW carry over."""


class Muon(SkippableOptimizer):
    """Muon for the groups with `is_matrix`, torch's fused AdamW for the others.

        M = momentum M + (1 - momentum) G
        U = momentum M + (1 - momentum) G (Nesterov)
        O = the orthogonal matrix nearest to U
        W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) O

    O is computed in fp32; its products use TF32 if `precision.tf32` is on. One process in `group` computes each O.
    `group` holds either full copies of U or the parts of a sharded U.
    """

    group: dist.ProcessGroup | None = None
    """Processes that share the matrices; None if each process orthogonalizes all of them."""

    def __init__(self, groups: Groups, *, lr: float, momentum: float, **adamw: Any) -> None:
        rest = [group for group in groups if not group["is_matrix"]]
        self._adamw = FusedAdam(rest, lr=lr, decoupled_weight_decay=True, **adamw) if rest else None
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        first = next(each for group in self.param_groups if group["is_matrix"] for each in group["params"])
        if isinstance(first, DTensor):
            self.group = holders(first)

    def update(self, skip: Tensor | None) -> None:
        """Update all weights that have a gradient."""
        matrices = [
            (parameter, gradient, group)
            for group in self.param_groups
            if group["is_matrix"]
            for parameter, gradient in self.gradients(group)
        ]
        costs = [parameter.numel() * min(parameter.shape) for parameter, _, _ in matrices]
        for some in in_rounds(matrices, costs, 1 if self.group is None else self.group.size()):
            self._update_matrices(some, skip)
        if self._adamw is not None:
            # Assign these at each step, because `load_state_dict` creates new objects.
            self._adamw.state = self.state
            self._adamw.param_groups = [group for group in self.param_groups if not group["is_matrix"]]
            self._adamw.found_inf, self._adamw.grad_scale = self.found_inf, self.grad_scale
            self._adamw.step()

    def _update_matrices(self, some: Sequence[tuple[nn.Parameter, Tensor, Group]], skip: Tensor | None) -> None:
        moved, updates = [], []
        for parameter, gradient, group in some:
            moved.append(torch.lerp(gradient, self.state_of(parameter, "momentum_buffer"), group["momentum"]))
            updates.append(torch.lerp(gradient, moved[-1], group["momentum"]))
        found = self._orthogonal(updates, [parameter for parameter, _, _ in some])
        for (parameter, _, group), kept, direction in zip(some, moved, found, strict=True):
            factor = UPDATE_RMS * math.sqrt(max(parameter.shape))
            decay_and_add(parameter, direction, group, factor, skip)
            replace(self.state_of(parameter, "momentum_buffer"), kept, skip)

    def _orthogonal(self, updates: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """* Return this process's part of one round of matrices, orthogonalized."""
        if self.group is None:
            return [orthogonalise(each) for each in updates]
        sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        return share_parts(updates, sharded, self.group) if sharded else share(updates, self.group)


def share(matrices: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """* Return orthogonalized matrices, fp32. The n-th process computes the n-th matrix, at most one per process.

    The results are gathered in rows as wide as the largest matrix.
    """
    rank, width = group.rank(), max(matrix.numel() for matrix in matrices)
    own = matrices[0].new_zeros(width, dtype=torch.float32)
    if rank < len(matrices):
        own[: matrices[rank].numel()] = orthogonalise(matrices[rank]).reshape(-1)
    found = own.new_empty(group.size() * width)
    # The function has this name before torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(found, own, group)
    return [row[: matrix.numel()].view(matrix.shape) for row, matrix in zip(found.split(width), matrices, strict=False)]


def share_parts(parts: Sequence[Tensor], sharded: Sequence[DTensor], group: dist.ProcessGroup) -> list[Tensor]:
    """* Return this process's parts of orthogonalized matrices, fp32. The n-th process computes the n-th matrix.

    `parts` are this process's parts of matrices that are sharded like `sharded`: at most one matrix per process. Each
    process gathers only the matrix that it computes.
    """
    rank, nothing = group.rank(), parts[0].new_empty(0, dtype=torch.float32)
    rest = [nothing] * (group.size() - len(parts))
    whole, views = nothing, [nothing] * group.size()
    if rank < len(sharded):
        whole = nothing.new_empty(sharded[rank].shape)
        views = parts_in(whole, sharded[rank])
    exchange([*parts, *rest], views, group)
    if rank < len(sharded):
        whole.copy_(orthogonalise(whole))
    found = [torch.empty_like(part, dtype=torch.float32) for part in parts]
    exchange(views, [*found, *rest], group)
    return found


def exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """* Send the n-th tensor to the n-th process, and write its tensor into the n-th of `received`: one all-to-all."""
    values = torch.cat([each.reshape(-1) for each in sent])
    sizes, own_sizes = ([each.numel() for each in some] for some in (received, sent))
    found = values.new_empty(sum(sizes))
    dist.all_to_all_single(found, values, sizes, own_sizes, group)
    for each, part in zip(received, found.split(sizes), strict=True):
        each.copy_(part.view(each.shape))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return approximately U V^T for the matrix U S V^T, fp32, by five Newton-Schulz iterations (Jordan et al. 2024).

    fp32 is needed: 16 bits amplify the rounding of a sum over processes (1e-7) to 1e-3 of the update.
    """
    x = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def build_muon(groups: Groups, section: Optimizer, model: nn.Module, device: torch.device) -> Muon:
    """Return Muon for the matrices of the model's blocks and AdamW for its other weights.

    Raises:
        ValueError: the model has no such matrices.
    """
    matrices = {id(parameter) for parameter in hidden_matrices(model)}
    found = [
        {**group, "params": some, "is_matrix": is_matrix}
        for group in groups
        for is_matrix in (True, False)
        if (some := [each for each in group["params"] if (id(each[1]) in matrices) == is_matrix])
    ]
    adamw = {"betas": section.betas, "eps": section.eps}
    return Muon(found, lr=section.learning_rate, momentum=section.momentum, **adamw)
