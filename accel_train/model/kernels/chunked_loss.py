"""The loss of a language model without whole logits: from hidden states to loss and gradients, a chunk of positions at a time.

Logits are the largest tensor of a step (4,096 positions x 152,064 tokens in fp32: 2.3 GiB), and a plain cross-entropy holds
three of that size. Here the logits of a chunk are turned into its loss and its gradients, and forgotten, before those of the
next one are made: the head's part of the backward is done in the forward, and the backward only scales it.

Where processes split the head's rows (tensor parallelism), each makes the logits of its own tokens, and they tell each other three
numbers of a position: the largest logit, the sum of exponentials, the logit of the label (Shoeybi et al. 2019, section 3).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from accel_train.core.errors import DataError
from accel_train.core.state import Choice
from accel_train.data.labels import IGNORED_LABEL
from accel_train.model.kernels.held_rows import HeldRows, held_rows, num_parts

LOGITS_AT_ONCE = 2**26
"""Logits of a chunk at most: 256 MiB in fp32."""
PRODUCT_AT_ONCE = 2**24
"""Elements of the head's gradient that a chunk's product is added to at once: 64 MiB in fp32."""
GRADIENT_SCALE = {torch.float16: 2.0**12}
"""What gradients of logits are multiplied by before they are rounded to fp16, whose smallest number is 6e-8."""
_CHECKED_CLASSES = frozenset(
    ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
     "GPTNeoXForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM", "OlmoForCausalLM",
     "Olmo2ForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "MixtralForCausalLM",
     "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
)  # fmt: skip
"""Classes of transformers whose logits are nothing but the output layer of the base model's hidden states: a test compares them."""


def choose_chunking(requested: bool | str, model: nn.Module, tp_size: int) -> Choice[bool]:
    """Return whether the loss is computed in chunks: as asked, or wherever the model is known to allow it.

    Raises:
        ValueError: the recipe asks for it, and the model does not allow it.
    """
    if requested is False:
        return Choice(False, "as set")
    problem = why_whole(model, tp_size)
    if problem is not None and requested is True:
        raise ValueError(f"loss.chunked=True: {problem}, so that the logits are needed whole; set it to auto or false")
    if problem is not None:
        return Choice(False, f"whole logits: {problem}")
    rows = rows_at_once(model.get_output_embeddings(), tp_size)  # type: ignore[operator]
    if tp_size > 1:
        split = f"the logits of {rows:,} positions at a time, each process those of its share of the vocabulary"
        return Choice(True, f"as set; {split}" if requested is True else split)
    if requested is True:
        return Choice(True, f"as set; the logits of at most {rows:,} positions at a time")
    return Choice(True, f"the logits of {rows:,} positions at a time; a micro-batch with no more has its logits whole")


def why_whole(model: nn.Module, tp_size: int = 1) -> str | None:
    """Return why the logits of this model are needed whole; None where its loss can be computed in chunks.

    `tp_size` processes are to split its output layer, or do so already.
    """
    if not has_plain_head(model):
        return f"{type(model).__name__} is not among the models checked for a loss in chunks"
    head = model.get_output_embeddings()  # type: ignore[operator]
    is_linear = type(head) is nn.Linear
    split = head.weight.placements if is_linear and isinstance(head.weight, DTensor) else None
    if not is_linear or ("forward" in vars(head)) != (split is not None):  # LoRA, 8 and 4 bits, a replaced forward
        return f"the output layer is a {type(head).__name__} with a forward of its own"
    if split not in (None, (Shard(0),)):
        return "the output layer is split over processes, and not by its rows"
    size = tp_size if split is None else num_parts(head)
    if (size - 1) * -(-head.out_features // size) >= head.out_features:
        return f"{head.out_features} tokens leave one of {size} processes without a row of the output layer"
    return None


def has_plain_head(model: nn.Module) -> bool:
    """Return whether the logits of a model are known to be nothing but its output layer of the base model's hidden states."""
    kind = type(model)
    return kind.__name__ in _CHECKED_CLASSES and kind.__module__.startswith("transformers.models.")


def head_for_chunks(requested: bool | str, model: nn.Module, num_positions: int) -> nn.Linear | None:
    """Return the output layer of a model whose loss is to be computed in chunks; None where the logits are made whole.

    `auto` leaves those whole that are no more than a chunk, unless processes would have to gather them.
    """
    if requested is False or why_whole(model) is not None:
        return None
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    is_small = num_positions <= rows_at_once(head) and num_parts(head) == 1
    return None if requested == "auto" and is_small else head


def rows_at_once(head: nn.Linear, tp_size: int = 1) -> int:
    """Return the positions of a chunk; a multiple of 64, which suits matrix products, where there are so many."""
    rows = max(LOGITS_AT_ONCE // -(-head.out_features // max(tp_size, num_parts(head))), 1)
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
        weight, bias, held = held_rows(head)
        return _ChunkedLoss.apply(hidden, weight, bias, labels, label_smoothing, rows, held)

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
        weight, bias, held = held_rows(head)
        with _without_autocast(weight, bias) as cast:
            for part in _parts(labels, rows):
                of_part = _count(hidden[part].to(cast[0].dtype), cast, held, labels[part])
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
        if len(labels):
            _check_labels(labels, head.out_features)
    of_split_layer = vars(head).get("forward")  # which gathers the logits
    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        return head(hidden, labels)
    finally:
        del head.forward
        if of_split_layer is not None:
            head.forward = of_split_layer  # type: ignore[method-assign]


class _ChunkedLoss(torch.autograd.Function):
    """hidden (N, H), weight (rows held, H), bias (rows held,) or None, labels (N,), smoothing, rows at once, which are held -> the loss, 0-dim fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        rows: int,
        held: HeldRows,
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
                total += _add_chunk(hidden[part], (*head, held), labels[part], smoothing, [of_hidden, *sums[1:]])
        if sums[0] is not None:
            held.sum_in_place(sums[0])  # each process has the share of its own tokens
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
        return *scaled, None, None, None, None


def _add_chunk(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None, HeldRows],
    labels: Tensor,
    smoothing: float,
    sums: list[Tensor | None],
) -> Tensor:
    """Add the gradients of a chunk to their sums, and return its loss. The logits end with this call."""
    weight, bias, held = head
    hidden, labels = hidden.to(weight.dtype), labels[:, None]
    logits = _logits(hidden, weight, bias)
    losses, totals = _losses(logits, held.largest(logits.amax(1, keepdim=True)), labels, held, smoothing)
    # The gradient, softmax - target, in the memory of the logits; one that is ignored is divided by infinity.
    kept = labels != IGNORED_LABEL
    gradient = logits.div_(totals.masked_fill_(~kept, math.inf))
    if smoothing:
        gradient.sub_(kept * (smoothing / held.vocabulary))
    targets, is_here = held.find(labels)
    gradient.scatter_add_(1, targets, is_here.to(gradient.dtype) * (smoothing - 1))
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
    return losses.sum()


def _losses(logits: Tensor, largest: Tensor, labels: Tensor, held: HeldRows, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk (N, 1), and the sums of its exponentials, which the logits turn into."""
    targets, is_here = held.find(labels)
    of_target = logits.gather(1, targets).where(is_here, 0)
    mean = logits.sum(1, keepdim=True) / held.vocabulary if smoothing else of_target
    exponentials = logits.sub_(largest).exp_()
    totals, of_target, mean = held.summed(exponentials.sum(1, keepdim=True), of_target, mean)
    losses = totals.log() + largest - (1 - smoothing) * of_target - smoothing * mean
    # Where the host would have to wait for the device to refuse a label, the loss is NaN, and the step is not applied.
    losses = losses.masked_fill((labels < 0) | (labels >= held.vocabulary), math.nan)
    return losses.masked_fill(labels == IGNORED_LABEL, 0), totals


def _check_labels(labels: Tensor, vocabulary: int) -> None:
    """Refuse a label that is no token.

    Raises:
        DataError: names the first.
    """
    lowest, highest = labels.aminmax()
    if lowest < 0 or highest >= vocabulary:
        wrong = labels[(labels < 0) | (labels >= vocabulary)][0].item()
        raise DataError(
            f"a label is {wrong}, and labels are tokens from 0 to {vocabulary - 1}, or {IGNORED_LABEL} for no target. Repair the "
            "labels that `collate` returns"
        )


def _count(hidden: Tensor, head: tuple[Tensor, Tensor | None], held: HeldRows, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, and its number of hits."""
    logits, labels = _logits(hidden, *head), labels[:, None]
    own, token = logits.max(1, keepdim=True)
    largest = held.largest(own)
    token = held.smallest((token + held.first).where(own == largest, held.vocabulary))  # of equal ones the first
    return _losses(logits, largest, labels, held, 0.0)[0].sum(), (token == labels).sum()


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
