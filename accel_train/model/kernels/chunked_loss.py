"""The loss of a language model without whole logits: from hidden states to loss and gradients, a chunk of positions at a time.

Logits are the largest tensor of a step (4,096 positions x 152,064 tokens in fp32: 2.3 GiB), and a plain cross-entropy holds
three of that size. Here the logits of a chunk are turned into its loss and its gradients, and forgotten, before those of the
next one are made: the head's part of the backward is done in the forward, and the backward only scales it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from accel_train.core.state import Choice
from accel_train.data.labels import IGNORED_LABEL

LOGITS_AT_ONCE = 2**26
"""Logits of a chunk at most: 256 MiB in fp32."""
PRODUCT_AT_ONCE = 2**24
"""Elements of the head's gradient that a chunk's product is added to at once: 64 MiB in fp32."""
GRADIENT_SCALE = {torch.float16: 2.0**12}
"""What gradients of logits are multiplied by before they are rounded to fp16, whose smallest number is 6e-8."""
_CHECKED_CLASSES = frozenset(
    ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
     "GPTNeoXForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM", "OlmoForCausalLM",
     "Olmo2ForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM")
)  # fmt: skip
"""Classes of transformers whose logits are nothing but the output layer of the base model's hidden states: a test compares them."""


def choose_chunking(requested: bool | str, model: nn.Module, tp_size: int) -> Choice[bool]:
    """Return whether the loss is computed in chunks: as asked, or wherever the model is known to allow it.

    Raises:
        ValueError: the recipe asks for it, and the model does not allow it.
    """
    if requested is False:
        return Choice(False, "as the recipe says")
    problem = why_whole(model) if tp_size == 1 else "parallel.tp_size splits the output layer over processes"
    if problem is not None and requested is True:
        raise ValueError(f"loss.chunked=True: {problem}, so that the logits are needed whole; set it to auto or false")
    if problem is not None:
        return Choice(False, f"whole logits: {problem}")
    rows = rows_at_once(model.get_output_embeddings())  # type: ignore[operator]
    if requested is True:
        return Choice(True, f"as the recipe says; the logits of at most {rows:,} positions at a time")
    return Choice(True, f"the logits of {rows:,} positions at a time; a micro-batch with no more has its logits whole")


def why_whole(model: nn.Module) -> str | None:
    """Return why the logits of this model are needed whole; None where its loss can be computed in chunks."""
    kind = type(model)
    if kind.__name__ not in _CHECKED_CLASSES or not kind.__module__.startswith("transformers.models."):
        return f"{kind.__name__} is not among the models checked for a loss in chunks"
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or "forward" in vars(head):  # LoRA, 8 and 4 bits, a replaced forward
        return f"the output layer is a {type(head).__name__} with a forward of its own"
    return "the output layer is split over processes" if isinstance(head.weight, DTensor) else None


def head_for_chunks(requested: bool | str, model: nn.Module, num_positions: int) -> nn.Linear | None:
    """Return the output layer of a model whose loss is to be computed in chunks; None where the logits are made whole.

    `auto` leaves those whole that are no more than a chunk.
    """
    if requested is False or why_whole(model) is not None:
        return None
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    return None if requested == "auto" and num_positions <= rows_at_once(head) else head


def rows_at_once(head: nn.Linear) -> int:
    """Return the positions of a chunk; a multiple of 64, which suits matrix products, where there are so many."""
    rows = max(LOGITS_AT_ONCE // head.out_features, 1)
    return rows - rows % 64 if rows > 64 else rows


@torch.compiler.disable  # the loop would be unrolled: the body is one graph, and the loss is outside of it
def chunked_loss(
    head: nn.Linear, hidden: Tensor, labels: Tensor, label_smoothing: float = 0.0, chunk_rows: int | None = None
) -> Tensor:
    """Sum the cross-entropy of `head(hidden)` over the labels that are not -100: 0-dim, softmax and sums in fp32.

    With smoothing e, a target is (1 - e) x its label + e / V for each of V tokens (Szegedy et al. 2016, section 7).

    Args:
        hidden: (B, T, H) hidden states.
        labels: (B, T) token ids.
        chunk_rows: positions whose logits are there at once; by default `rows_at_once`.
    """
    if not torch.is_grad_enabled():
        return chunked_counts(head, hidden, labels, chunk_rows)[0]
    rows = chunk_rows or rows_at_once(head)

    def forward(hidden: Tensor, labels: Tensor) -> Any:
        return _ChunkedLoss.apply(hidden, head.weight, head.bias, labels, label_smoothing, rows)

    loss: Tensor = _call_with(forward, head, hidden, labels)
    return loss


@torch.compiler.disable
def chunked_counts(
    head: nn.Linear, hidden: Tensor, labels: Tensor, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss as `chunked_loss`, and at how many labels the likeliest token is the right one; no gradients.

    Shapes are those of `chunked_loss`; both results are 0-dim.
    """
    rows = chunk_rows or rows_at_once(head)

    def forward(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, hits = torch.zeros((), device=hidden.device), labels.new_zeros(())
        with _without_autocast(head.weight, head.bias) as (weight, bias):
            for part in _parts(labels, rows):
                of_part = _count(hidden[part].to(weight.dtype), weight, bias, labels[part])
                loss, hits = loss + of_part[0], hits + of_part[1]
        return loss, hits

    with torch.no_grad():
        counts: tuple[Tensor, Tensor] = _call_with(forward, head, hidden, labels)
    return counts


def _call_with(forward: Callable[[Tensor, Tensor], Any], head: nn.Linear, hidden: Tensor, labels: Tensor) -> Any:
    """Call the head with another forward, so that the hooks that gather its weights (ZeRO's stage 3, FSDP2) are called, too."""
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    # Ignored positions cost nothing on a CPU. Elsewhere finding them would wait for the device; a fake tensor has no values.
    if labels.device.type == "cpu" and type(labels) is Tensor:
        kept = (labels != IGNORED_LABEL).nonzero()[:, 0]
        if len(kept) < len(labels):
            hidden, labels = hidden.index_select(0, kept), labels[kept]
    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        return head(hidden, labels)
    finally:
        del head.forward


class _ChunkedLoss(torch.autograd.Function):
    """hidden (N, H), weight (V, H), bias (V,) or None, labels (N,), smoothing, rows -> the loss, 0-dim fp32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, rows: int
    ) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        inputs = (hidden, weight, bias)
        sums = [
            torch.zeros_like(each, dtype=wide) if each is not None and is_wanted else None
            for each, is_wanted in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        with _without_autocast(weight, bias) as head:
            for part in _parts(labels, rows):
                of_hidden = None if sums[0] is None else sums[0][part]
                total += _add_chunk(hidden[part], head, labels[part], smoothing, [of_hidden, *sums[1:]])
        ctx.sums, ctx.dtypes = sums, [None if each is None else each.dtype for each in inputs]
        ctx.scale = GRADIENT_SCALE.get(head[0].dtype, 1.0)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums is None:
            raise RuntimeError(
                "a loss in chunks is differentiated once: its gradients were made with it, and are used up"
            )
        (sums, ctx.sums), factor = (ctx.sums, None), gradient / ctx.scale
        scaled = [
            None if each is None else each.mul_(factor).to(dtype) for each, dtype in zip(sums, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def _add_chunk(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None],
    labels: Tensor,
    smoothing: float,
    sums: list[Tensor | None],
) -> Tensor:
    """Add the gradients of a chunk to their sums, and return its loss. The logits end with this call."""
    weight, bias = head
    hidden = hidden.to(weight.dtype)
    logits = _logits(hidden, weight, bias)
    kept = (labels != IGNORED_LABEL)[:, None]
    targets = labels[:, None].where(kept, 0)
    of_target = logits.gather(1, targets)
    mean = logits.mean(1, keepdim=True) if smoothing else of_target
    largest = logits.amax(1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    totals = exponentials.sum(1, keepdim=True)
    losses = totals.log() + largest - (1 - smoothing) * of_target - smoothing * mean
    # The gradient, softmax - target, in the memory of the logits; one that is ignored is divided by infinity.
    gradient = exponentials.div_(totals.masked_fill(~kept, math.inf))
    if smoothing:
        gradient.sub_(kept * (smoothing / len(weight)))
    gradient.scatter_add_(1, targets, kept.to(gradient.dtype) * (smoothing - 1))
    if weight.dtype in GRADIENT_SCALE:
        gradient.mul_(GRADIENT_SCALE[weight.dtype])
    of_hidden, of_weight, of_bias = sums
    if of_bias is not None:
        of_bias += gradient.sum(0)
    rounded = gradient.to(weight.dtype)
    if of_hidden is not None:
        of_hidden.copy_(product(rounded, weight))
    if of_weight is not None:
        rows = max(PRODUCT_AT_ONCE // hidden.shape[1], 1)
        for own, their in zip(of_weight.split(rows), rounded.t().split(rows), strict=True):
            own += product(their, hidden)
    return losses.masked_fill(~kept, 0).sum()


def _count(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, and its number of hits."""
    logits = _logits(hidden, weight, bias)
    loss = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum()


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = product(hidden, weight.t())
    return logits if bias is None else logits.add_(bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b; of 16-bit numbers in fp32, so that nothing is rounded twice."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@contextmanager
def _without_autocast(weight: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Turn autocast off, and yield the head as autocast would have rounded it."""
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        yield weight.to(dtype), None if bias is None else bias.to(dtype)


def _parts(labels: Tensor, rows: int) -> Iterator[slice]:
    yield from (slice(begin, begin + rows) for begin in range(0, len(labels), rows))
