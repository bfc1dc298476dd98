"""Muon: momentum matrices, orthogonalized before the update (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982)."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.core.state import Choice
from accel_train.model.tensors import holders, numel, parts_in
from accel_train.model.weights import hidden_matrices, in_shares
from accel_train.optim.adam import FusedAdam
from accel_train.optim.update import SkippableOptimizer, decay_and_add, replace
from accel_train.recipe.optimizer import Group, Groups, Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic. The iterations map singular values from 0.003 of the norm up into [0.68, 1.13]."""
ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of AdamW's usual update, in units of the learning rate. Rates tuned for AdamW carry over."""


Matrix = tuple[nn.Parameter, Tensor, Group]
"""A weight, its gradient (of a sharded weight, this process's part), and its group."""
Shares = Sequence[Sequence[Tensor]]
"""Tensors by process."""


class Muon(SkippableOptimizer):
    """Muon for the groups with `is_matrix`, torch's fused AdamW for the others.

        M = momentum M + (1 - momentum) G
        U = momentum M + (1 - momentum) G (Nesterov)
        O = the orthogonal matrix nearest to U
        W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) O

    O is computed in `dtype`; products in fp32 use TF32 if `precision.tf32` is on. M is in the type of the weight. One
    process in `group` computes each O. `group` holds either full copies of U or the parts of a sharded U.
    """

    group: dist.ProcessGroup | None = None
    """Processes that share the matrices; None if each process orthogonalizes all of them."""
    dtype = torch.float32
    """Type of O, and of the products."""

    def __init__(self, groups: Groups, *, lr: float, momentum: float, **adamw: Any) -> None:
        rest = [group for group in groups if not group["is_matrix"]]
        self._adamw = FusedAdam(rest, lr=lr, decoupled_weight_decay=True, **adamw) if rest else None
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.orthogonalise: Callable[[Tensor], Tensor] = orthogonalise
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
        shapes = [parameter.shape for parameter, _, _ in matrices]
        for shares in in_shares(matrices, shapes, 1 if self.group is None else self.group.size()):
            self._update_matrices(shares, skip)
        if self._adamw is not None:
            # Assign these at each step, because `load_state_dict` creates new objects.
            self._adamw.state = self.state
            self._adamw.param_groups = [group for group in self.param_groups if not group["is_matrix"]]
            self._adamw.found_inf, self._adamw.grad_scale = self.found_inf, self.grad_scale
            self._adamw.step()

    def _update_matrices(self, shares: Sequence[Sequence[Matrix]], skip: Tensor | None) -> None:
        some = [*chain(*shares)]
        for parameter, gradient, group in some:
            momentum = self.state_of(parameter, "momentum_buffer")
            replace(momentum, torch.lerp(gradient, momentum, group["momentum"]), skip)
        for (parameter, _, group), direction in zip(some, self._orthogonal(shares), strict=True):
            factor = UPDATE_RMS * math.sqrt(max(parameter.shape))
            decay_and_add(parameter, direction, group, factor, skip)

    def _orthogonal(self, shares: Sequence[Sequence[Matrix]]) -> list[Tensor]:
        """* Return this process's part of one stage of matrices, orthogonalized, in the order of `shares`."""
        if self.group is None:
            return self._make_orthogonal(self._updates(shares[0]))
        weights: Any = [[parameter for parameter, _, _ in share] for share in shares]
        if isinstance(weights[0][0], DTensor):
            return self._share_parts([*map(self._updates, shares)], weights)
        return self._share(self._updates(shares[self.group.rank()]), weights)

    def _updates(self, share: Sequence[Matrix]) -> list[Tensor]:
        """Return U of some matrices from the new M. After a skipped step, M is the old one, and U is discarded."""
        return [
            torch.lerp(gradient, self.state_of(parameter, "momentum_buffer"), group["momentum"])
            for parameter, gradient, group in share
        ]

    def _make_orthogonal(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return orthogonalized matrices. Those of one shape are stacked, those with more rows transposed."""
        wide = [each.T if each.shape[0] > each.shape[1] else each for each in matrices]
        found = list(matrices)
        for shape in {each.shape for each in wide}:
            numbers = [number for number, each in enumerate(wide) if each.shape == shape]
            stack = self.orthogonalise(torch.stack([wide[number] for number in numbers]).to(self.dtype))
            for number, made in zip(numbers, stack, strict=True):
                found[number] = made if made.shape == matrices[number].shape else made.T
        return found

    def _share(self, own: Sequence[Tensor], weights: Shares) -> list[Tensor]:
        """* Return the orthogonalized matrices of all processes: `own`, and those for the weights of each process.

        They are gathered in rows as wide as the largest share.
        """
        assert self.group is not None
        width = max(map(numel, weights))
        row = weights[0][0].new_zeros(width, dtype=self.dtype)
        for part, made in zip(pieces(row, own), self._make_orthogonal(own), strict=True):
            part.copy_(made)
        found = row.new_empty(self.group.size() * width)
        # The function has this name before torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found, row, self.group)
        return [each for some, part in zip(weights, found.split(width), strict=True) for each in pieces(part, some)]

    def _share_parts(self, parts: Shares, sharded: Sequence[Sequence[DTensor]]) -> list[Tensor]:
        """* Return this process's parts of orthogonalized matrices.

        `parts` are its parts of each process's matrices, which are sharded like `sharded`. Each process gathers only
        the matrices that it computes.
        """
        assert self.group is not None
        own = sharded[self.group.rank()]
        whole = [parts[0][0].new_empty(each.shape, dtype=self.dtype) for each in own]
        views = cut(whole, own, self.group)
        for view, part in zip(chain(*views), exchange(parts, views, self.group, self.dtype), strict=True):
            view.copy_(part)
        return exchange(cut(self._make_orthogonal(whole), own, self.group), parts, self.group, self.dtype)


def pieces(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the first elements of a row, shaped like some tensors."""
    found = row[: numel(like)].split([*map(Tensor.numel, like)])
    return [part.view(each.shape) for part, each in zip(found, like, strict=True)]


def cut(matrices: Sequence[Tensor], sharded: Sequence[DTensor], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Return views of whole matrices: for each process of `group`, the parts that it holds."""
    parts = [*map(parts_in, matrices, sharded)]
    return [[each[rank] for each in parts] for rank in range(group.size())]


def exchange(sent: Shares, like: Shares, group: dist.ProcessGroup, dtype: torch.dtype) -> list[Tensor]:
    """* Send the n-th tensors to the n-th process; return those of all processes in order, in `dtype`: one all-to-all.

    The n-th process sends tensors of the shapes of the n-th in `like`.
    """
    given, taken = [*chain(*sent)], [*chain(*like)]
    found = (given or taken)[0].new_empty(numel(taken), dtype=dtype)
    values = torch.cat([found[:0], *map(torch.flatten, given)]).to(dtype)
    dist.all_to_all_single(found, values, [*map(numel, like)], [*map(numel, sent)], group)
    return pieces(found, taken)


def orthogonalise(stack: Tensor) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T, by five Newton-Schulz iterations (Jordan et al. 2024).

    `stack` has shape (matrices, rows, columns) with rows <= columns. The products are in its type.
    """
    norms = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = stack / (norms + 1e-7).to(stack.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def choose_dtype(section: Optimizer, mixed_precision: str, device_type: str) -> Choice[str]:
    """Return the type of Muon's products, fp32 or bf16, with the reason."""
    if section.muon_dtype != "auto":
        return Choice(section.muon_dtype, "as set")
    if device_type == "cuda" and mixed_precision in ("bf16", "fp8"):
        return Choice("bf16", f"mixed_precision is {mixed_precision}, which rounds the gradients as much")
    return Choice("fp32", "bf16 would amplify the rounding of a sum over processes (1e-7) to 1e-3 of the update")


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
    return Muon(found, lr=section.learning_rate, momentum=section.momentum, betas=section.betas, eps=section.eps)
