"""Losses of sentence embeddings over the global batch, with gradients that do not depend on how the batch is cut.

Each process receives the vectors of all processes and computes the loss of the whole table. It keeps the loss of its
own rows and the gradient with respect to its own vectors. The backward pass of a micro-batch starts from this gradient,
as in GradCache (Gao et al. 2021). So the gradients of all processes add up to what one process with all rows computes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from accel_train.model.kernels.global_loss import GlobalLoss

_LARGEST_CHUNK = 2**23
"""Most similarities in memory at a time."""
_FAILED = -1

Chunks = Iterator[tuple[Tensor | slice, Tensor]]
"""Some rows of a table, and the loss of each."""


class Table(NamedTuple):
    """Rows of texts as vectors, with the facts that the losses need."""

    vectors: Tensor
    """(N, K, D) fp32, not normalized. Texts of a row: anchor, positive, negatives."""
    texts: Tensor
    """(N, K) int64: a hash of each text. Equal texts do not count as negatives of each other."""
    scores: Tensor
    """(N,) fp32 similarities of scored pairs; 0 for other rows."""

    def packed(self) -> Tensor:
        """Return all columns side by side as (N, W) int32 with the same bits."""
        columns = (self.vectors.detach(), self.texts, self.scores[:, None])
        return torch.cat([each.flatten(1).contiguous().view(torch.int32) for each in columns], dim=1)

    @classmethod
    def unpacked(cls, rows: Tensor, num_texts: int) -> "Table":
        """Return the table of `packed` rows."""
        # A row alone counts as contiguous with any stride, but its type cannot change then.
        columns = rows.split([rows.shape[1] - 2 * num_texts - 1, 2 * num_texts, 1], dim=1)
        vectors, texts, scores = (
            column.clone(memory_format=torch.contiguous_format).view(kind)
            for column, kind in zip(columns, (torch.float32, torch.int64, torch.float32), strict=True)
        )
        return cls(vectors.unflatten(1, (num_texts, -1)), texts, scores[:, 0])


class Part(NamedTuple):
    """A micro-batch's part of the loss of the global batch."""

    loss_sum: Tensor
    """Loss of its rows, 0-dim."""
    gradient: Tensor
    """Gradient of the whole batch's summed loss with respect to its vectors, (n, K, D)."""


@dataclass(frozen=True)
class Objective:
    """A loss on tables, with its settings (see `SentenceEmbeddingData`)."""

    name: Literal["ranking", "cosent", "triplet"]
    num_texts: int
    scale: float
    symmetric: bool
    margin: float
    dims: tuple[int, ...]

    def row_losses(self, table: Table, *, with_gradient: bool = True) -> tuple[Tensor, Tensor]:
        """Return the loss of each row (N,), and the gradient of their sum with respect to the vectors (N, K, D)."""
        device = table.vectors.device
        chunks_of = {"ranking": self._ranking, "cosent": self._cosent, "triplet": self._triplet}[self.name]
        losses, gradient = torch.zeros(len(table.vectors), device=device), torch.zeros_like(table.vectors)
        # Autocast would round the similarities.
        with torch.autocast(device.type, enabled=False), torch.set_grad_enabled(with_gradient):
            for dim in self.dims or (table.vectors.shape[-1],):
                vectors = table.vectors.detach().requires_grad_(with_gradient)
                unit = normalize(vectors[..., :dim], dim=-1)
                leaf, of_unit = unit.detach().requires_grad_(with_gradient), torch.zeros_like(unit)
                for rows, loss in chunks_of(leaf, table):
                    losses[rows] += loss.detach()
                    if with_gradient:
                        of_unit += torch.autograd.grad(loss.sum(), leaf)[0]
                if with_gradient:
                    gradient = gradient + torch.autograd.grad(unit, vectors, of_unit)[0]
        return losses, gradient

    def _ranking(self, unit: Tensor, table: Table) -> Chunks:
        num_rows, step = len(unit), self.num_texts - 1
        anchors, documents = table.texts[:, 0], table.texts[:, 1:].flatten()
        is_positive = torch.arange(len(documents), device=unit.device) % step == 0
        its_anchor = anchors.repeat_interleave(step)
        for rows in torch.arange(num_rows, device=unit.device).split(max(1, _LARGEST_CHUNK // max(len(documents), 1))):
            anchor, positive = anchors[rows, None], table.texts[rows, 1, None]
            is_right = (documents == positive) | (documents == anchor) | (is_positive & (its_anchor == anchor))
            loss = self._chosen(unit[rows, 0] @ unit[:, 1:].flatten(0, 1).T, is_right, rows * step)
            if self.symmetric:
                is_right = (anchors == anchor) | (anchors == positive) | (table.texts[:, 1] == positive)
                loss = (loss + self._chosen(unit[rows, 1] @ unit[:, 0].T, is_right, rows)) / 2
            yield rows, loss

    def _chosen(self, similarities: Tensor, is_right: Tensor, own: Tensor) -> Tensor:
        """Return the cross-entropy of column `own[i]` of each row i. Other columns that `is_right` do not take part."""
        left_out = is_right.scatter(1, own[:, None], False)
        return cross_entropy((self.scale * similarities).masked_fill(left_out, -torch.inf), own, reduction="none")

    def _cosent(self, unit: Tensor, table: Table) -> Chunks:
        """Yield log(1 + sum over pairs i, j with score i > score j of exp(scale (cos j - cos i))), for each row.

        The loss of the batch is one number, so it counts once per row: the mean over rows is this number.
        """
        exact = torch.float32 if unit.device.type == "mps" else torch.float64
        cosines = self.scale * (unit[:, 0].to(exact) * unit[:, 1].to(exact)).sum(-1)
        scores, order = table.scores.sort()
        cosines = cosines[order]
        # The sums of exp(-cos) over all rows from each place on, and the first place with a higher score.
        from_here = torch.logcumsumexp(-cosines.flip(0), 0).flip(0)
        higher = torch.searchsorted(scores, scores, right=True)
        terms = cosines + torch.cat([from_here, cosines.new_full((1,), -torch.inf)])[higher]
        yield slice(None), torch.logsumexp(torch.cat([cosines.new_zeros(1), terms]), 0).float().expand(len(unit))

    def _triplet(self, unit: Tensor, table: Table) -> Chunks:
        cosines = (unit[:, :1] * unit[:, 1:]).sum(-1)
        is_right = (table.texts[:, 2:] == table.texts[:, 1:2]) | (table.texts[:, 2:] == table.texts[:, :1])
        yield slice(None), (cosines[:, 1:] - cosines[:, :1] + self.margin).relu().masked_fill(is_right, 0.0).mean(1)


class GlobalBatch(GlobalLoss["list[Part]"]):
    """Computes an objective over the rows of all micro-batches of all processes."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective
        self._next = 0

    @torch.compiler.disable
    def loss_sum(self, table: Table) -> Tensor:
        """Return the loss of a micro-batch's rows, summed, with the gradient of the whole batch's loss.

        The micro-batches of a step must come in the order of `over`.
        """
        parts, was_in_step = self.whole(table.packed()), self.is_in_step
        part = parts[self._next]
        assert part.gradient.shape == table.vectors.shape, "the micro-batches come in the order of the first forward"
        self._next = (self._next + 1) % len(parts) if was_in_step else 0
        return _Cached.apply(table.vectors, *part)

    def join(self, parts: Sequence[Tensor], weighs: Sequence[bool], *, is_alone: bool) -> list[Part]:
        """* Return the parts of this process's micro-batches, from the rows of all processes."""
        self._next, num_texts = 0, self.objective.num_texts
        own = torch.cat([part if weight else part[:0] for part, weight in zip(parts, weighs, strict=True)])
        rows, first = (own, 0) if is_alone else self._gathered(own)
        shapes = [Table.unpacked(each, num_texts).vectors for each in parts]
        fill = torch.nan if rows is None else 0.0
        found = [Part(torch.full((), fill, device=own.device), torch.full_like(each, fill)) for each in shapes]
        if rows is None:
            return found
        losses, gradient = self.objective.row_losses(Table.unpacked(rows, num_texts))
        for number, (part, weight) in enumerate(zip(parts, weighs, strict=True)):
            if weight:
                end = first + len(part)
                found[number] = Part(losses[first:end].sum(), gradient[first:end])
                first = end
        return found

    def _gathered(self, own: Tensor) -> tuple[Tensor | None, int]:
        """* Return the rows of all processes, and the place of this process's first row; None if a process failed."""
        counts = _exchange_count(len(own), own.device)
        if _FAILED not in counts:
            rank, most = dist.get_rank(), max(counts)
            received = own.new_empty(len(counts), most, own.shape[1])
            sent = received[rank].clone()
            sent[: len(own)] = own
            # A process without memory for the rows says so here, before the others wait for its rows.
            counts = _exchange_count(len(own), own.device)
        self._meets_later = False
        if _FAILED in counts:
            return None, 0
        # The function has this name before torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(received.flatten(0, 1), sent)
        return torch.cat([each[:count] for each, count in zip(received, counts)]), sum(counts[:rank])

    def join_failed(self, device: torch.device) -> None:
        """* Send a mark in place of the number of rows. The others then compute NaN."""
        _exchange_count(_FAILED, device)


class _Cached(torch.autograd.Function):
    """A number with a known gradient with respect to the vectors."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, loss_sum: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss_sum.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        return outer[0] * ctx.saved_tensors[0], None, None


def _exchange_count(count: int, device: torch.device) -> list[int]:
    """* Return the counts of all processes."""
    own = torch.tensor([count], device=device)
    received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(received, own)
    return [int(each) for each in torch.cat(received).tolist()]
