"""The language model loss without whole logits: computes loss and gradients from hidden states, one chunk at a time.

Logits are the largest tensor of a step (4,096 positions x 152,064 tokens in fp32: 2.3 GiB). A plain cross-entropy holds
three tensors of this size. Here each chunk of logits becomes its loss and gradients, and is freed before the next chunk
is computed. The forward already does the head's part of the backward, and the backward only scales it.

Under tensor parallelism, processes split the head's rows, and each computes the logits of its share of the vocabulary.
They exchange three numbers per position: the largest logit, the sum of exponentials, and the logit of the label
(Shoeybi et al. 2019, section 3).
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy

from accel_train.core.errors import DataError, first_line
from accel_train.core.format import format_bytes
from accel_train.core.state import Choice
from accel_train.data.labels import IGNORED_LABEL
from accel_train.model.kernels.held_rows import HeldRows, held_rows, num_parts, split_of
from accel_train.model.kernels.loss_by_source import LossBySource
from accel_train.model.kernels.products import add_product, product
from accel_train.runtime.driver import uses_cpu

LOGITS_AT_ONCE = 2**26
"""Largest number of logits in a chunk: 256 MiB in fp32. On a GPU twice as many, so that the gradient of the head's
weights, which each chunk reads and writes as a whole, is added up less often.
"""
BYTES_PER_LOGIT = 12
"""Bytes of a chunk for each of its logits: the logit and its log-probability, and its gradient in 16 bits, twice."""
GRADIENT_SCALE = {torch.float16: 2.0**12}
"""Factor of the logits' gradients before they are rounded to fp16, whose smallest number is 6e-8."""
_CHECKED_CLASSES = frozenset(
    ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
     "GPTNeoXForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM", "OlmoForCausalLM",
     "Olmo2ForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "MixtralForCausalLM",
     "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
)  # fmt: skip
"""transformers classes whose logits are exactly the output layer of the base model's hidden states. A test compares
them.
"""


def summed_loss(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    by_source: LossBySource | None = None,
) -> Tensor:
    """Return the fp32 cross-entropy summed over the labels that are not -100.

    With a z-loss of c, each of these labels adds c * logsumexp(logits)^2.
    """
    logits, labels = logits.flatten(0, 1).float(), labels.flatten()
    kind = "sum" if by_source is None else "none"
    loss = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction=kind, label_smoothing=label_smoothing)
    if z_loss:
        squares = logits.logsumexp(1).square().masked_fill(labels == IGNORED_LABEL, 0)
        loss = loss + z_loss * (squares.sum() if by_source is None else squares)
    if by_source is None:
        return loss
    by_source.add(slice(None), loss)
    return loss.sum()


def choose_chunking(requested: bool | str, model: nn.Module, tp_size: int, spare_bytes: int = 0) -> Choice[bool]:
    """Return whether the loss is computed in chunks: as requested, or if the model is known to allow it.

    `spare_bytes` is as in `rows_at_once`.

    Raises:
        ValueError: the recipe asks for chunks, and the model does not allow them.
    """
    if requested is False:
        return Choice(False, "as set")
    problem = why_whole(model, tp_size)
    if problem is not None and requested is True:
        raise ValueError(f"loss.chunked=True: {problem}, so that the logits are needed whole; set it to auto or false")
    if problem is not None:
        return Choice(False, f"whole logits: {problem}")
    # Here the model may still be on the CPU, or have no values.
    on_gpu = torch.cuda.is_available() and not uses_cpu(os.environ)
    rows = rows_at_once(model.get_output_embeddings(), tp_size, spare_bytes, on_gpu=on_gpu)  # type: ignore[operator]
    spare = f", in {format_bytes(spare_bytes)} that a step leaves free" if spare_bytes else ""
    if tp_size > 1:
        split = f"the logits of {rows:,} positions at a time; each process computes its share of the vocabulary"
        return Choice(True, f"as set; {split}" if requested is True else split)
    if requested is True:
        return Choice(True, f"as set; logits of at most {rows:,} positions at a time{spare}")
    if spare:
        return Choice(True, f"the logits of up to {rows:,} positions at a time{spare}")
    return Choice(True, f"the logits of {rows:,} positions at a time; a micro-batch with no more has its logits whole")


def why_whole(model: nn.Module, tp_size: int = 1) -> str | None:
    """Return why this model needs its logits whole; None if its loss can be computed in chunks.

    `tp_size` is the number of processes that split its output layer, now or later.
    """
    if not has_plain_head(model):
        return f"{type(model).__name__} is not among the models checked for a loss in chunks"
    head = model.get_output_embeddings()  # type: ignore[operator]
    # FSDP2 makes a subclass of each class whose weights it shards.
    kind = type(head).__mro__[2] if isinstance(head, FSDPModule) else type(head)
    split = split_of(head) if kind is nn.Linear else None
    # LoRA, 8- and 4-bit layers, and a replaced forward do not qualify.
    if kind is not nn.Linear or ("forward" in vars(head)) != (split is not None):
        return f"the output layer is a {kind.__name__} with its own forward"
    if split is not None and split[1] != Shard(0):
        return "the output layer is split over processes, and not by its rows"
    size = tp_size if split is None else num_parts(head)
    if (size - 1) * -(-head.out_features // size) >= head.out_features:
        return f"{head.out_features} tokens leave one of {size} processes without a row of the output layer"
    return None


def has_plain_head(model: nn.Module) -> bool:
    """Return whether a model's logits are known to be exactly its output layer of the base model's hidden states."""
    kind = type(model)
    return kind.__name__ in _CHECKED_CLASSES and kind.__module__.startswith("transformers.models.")


def head_for_chunks(requested: bool | str, model: nn.Module, num_positions: int) -> nn.Linear | None:
    """Return the output layer of a model whose loss is computed in chunks; None if the logits are computed whole.

    `auto` computes logits whole if they fit into one chunk, unless processes would have to gather them.
    """
    if requested is False or why_whole(model) is not None:
        return None
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    is_small = num_positions <= rows_at_once(head) and num_parts(head) == 1
    return None if requested == "auto" and is_small else head


def rows_at_once(head: nn.Linear, tp_size: int = 1, spare_bytes: int = 0, *, on_gpu: bool = False) -> int:
    """Return the number of positions in a chunk. Above 64 it is a multiple of 64, to suit matrix products.

    Each chunk reads and writes the gradient of the head's weights, so a chunk grows with `spare_bytes` of memory that a
    step leaves free.
    """
    most = LOGITS_AT_ONCE * (2 if on_gpu or is_on_gpu(head) else 1) + spare_bytes // BYTES_PER_LOGIT
    rows = max(most // -(-head.out_features // max(tp_size, num_parts(head))), 1)
    return rows - rows % 64 if rows > 64 else rows


def is_on_gpu(head: nn.Linear) -> bool:
    """Return whether the layer is on a GPU."""
    return head.weight.is_cuda


# torch.compile would unroll the loop. The body is one graph, and the loss stays outside of it.
@torch.compiler.disable
def chunked_loss(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    chunk_rows: int | None = None,
    *,
    z_loss: float = 0.0,
    compiled: bool = False,
    by_source: LossBySource | None = None,
) -> Tensor:
    """Sum the cross-entropy of `head(hidden)` over the labels that are not -100: 0-dim, softmax and sums in fp32.

    With smoothing e, a target is (1 - e) x its label + e / V for each of V tokens (Szegedy et al. 2016, section 7).

    Args:
        hidden: (B, T, H) hidden states.
        labels: (B, T) token ids.
        chunk_rows: positions in a chunk; default: `rows_at_once`.
        z_loss: coefficient of logsumexp(logits)^2, added for each label that is not -100.
        compiled: let torch.compile fuse what is computed for each logit, on a GPU where one process holds them all.
        by_source: gets the losses of the sources of a mixture.
    """
    if not torch.is_grad_enabled():
        return chunked_counts(head, hidden, labels, chunk_rows)[0]
    rows = chunk_rows or rows_at_once(head)

    def forward(hidden: Tensor, kept: Tensor) -> Any:
        weight, bias, held = held_rows(head)
        is_fused = compiled and hidden.is_cuda and held.group is None
        add = None if by_source is None else by_source.at(labels.flatten(), len(kept)).add
        return _ChunkedLoss.apply(hidden, weight, bias, kept, (label_smoothing, z_loss), rows, held, is_fused, add)

    return _call_with(forward, head, hidden, labels)


@torch.compiler.disable
def chunked_counts(
    head: nn.Linear, hidden: Tensor, labels: Tensor, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss as in `chunked_loss`, and the number of labels that are the most likely token; no gradients.

    Both results are 0-dim. The arguments have the shapes of `chunked_loss`.
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
        return _call_with(forward, head, hidden, labels)


def _call_with(forward: Callable[[Tensor, Tensor], Any], head: nn.Linear, hidden: Tensor, labels: Tensor) -> Any:
    """Call the head with another forward, so that hooks that gather its weights (ZeRO stage 3, FSDP2) run too."""
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    # On a CPU, ignored positions are left out. On other devices, finding them would wait for the device. A fake tensor
    # has no values.
    if labels.device.type == "cpu" and type(labels) is Tensor:
        kept = (labels != IGNORED_LABEL).nonzero()[:, 0]
        if len(kept) < len(labels):
            hidden, labels = hidden.index_select(0, kept), labels[kept]
        if len(labels):
            _check_labels(labels, head.out_features)
    # The forward of a split layer gathers the logits.
    of_split_layer = vars(head).get("forward")
    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        return head(hidden, labels)
    finally:
        del head.forward
        if of_split_layer is not None:
            head.forward = of_split_layer  # type: ignore[method-assign]


class _ChunkedLoss(torch.autograd.Function):
    """Differentiable loss in chunks, 0-dim fp32.

    Inputs: hidden (N, H), weight (held rows, H), bias (held rows,) or None, labels (N,), (smoothing, z-loss), positions
    per chunk, the held rows, whether torch.compile fuses the work for each logit, and what gets the losses of a chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: tuple[float, float],
        rows: int,
        held: HeldRows,
        is_fused: bool,
        add: Callable[[slice, Tensor], None] | None = None,
    ) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        inputs = (hidden, weight, bias)
        # Chunks add to the sums of the head, and write their own rows of the hidden states' gradient.
        begin = (torch.empty_like, torch.zeros_like, torch.zeros_like)
        sums = [
            make(each, dtype=wide) if each is not None and is_wanted else None
            for make, each, is_wanted in zip(begin, inputs, ctx.needs_input_grad, strict=False)
        ]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        differentiate = fused_differentiate() if is_fused else _differentiate
        labels = labels[:, None]
        is_ignored = labels == IGNORED_LABEL
        with _without_autocast(weight, bias) as head:
            # A position that is ignored has finite logits, and adds nothing to the gradient of the weights.
            hidden = hidden.to(head[0].dtype).masked_fill(is_ignored, 0)
            for part in _parts(labels, rows):
                of_hidden = None if sums[0] is None else sums[0][part]
                chunk = hidden[part], (*head, held), labels[part], is_ignored[part], terms
                losses = _add_chunk(*chunk, [of_hidden, *sums[1:]], differentiate)
                total += losses.sum()
                if add is not None:
                    add(part, losses[:, 0])
        if sums[0] is not None:
            sums[0].masked_fill_(is_ignored, 0)
            # Each process has the gradients from its own tokens only.
            held.sum_in_place(sums[0])
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
        return *scaled, None, None, None, None, None, None


def _add_chunk(
    hidden: Tensor,
    head: tuple[Tensor, Tensor | None, HeldRows],
    labels: Tensor,
    is_ignored: Tensor,
    terms: tuple[float, float],
    sums: list[Tensor | None],
    differentiate: Callable[..., tuple[Tensor, Tensor]],
) -> Tensor:
    """Add a chunk's gradients to their sums; return its losses (N, 1). The logits are freed when this call returns."""
    weight, bias, held = head
    losses, gradient = differentiate(_logits(hidden, weight, bias), labels, held, terms, weight.dtype)
    of_hidden, of_weight, of_bias = sums
    if of_bias is not None:
        of_bias += product((~is_ignored).to(gradient.dtype).t(), gradient)[0]
    if of_hidden is not None:
        product(gradient, weight, of_hidden)
    if of_weight is not None:
        add_product(of_weight, gradient.t(), hidden)
    return losses


def _differentiate(
    logits: Tensor, labels: Tensor, held: HeldRows, terms: tuple[float, float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk (N, 1), and the gradient of its logits (N, held rows) in `dtype`, scaled for fp16.

    Every pass over the logits costs time, so there are as few as torch's operators allow. The gradient at ignored
    positions is not 0.

    Args:
        terms: label smoothing, and the coefficient of the z-loss.
    """
    smoothing, z_loss = terms
    targets, is_here = held.find(labels)
    log_probabilities, of_target, mean, log_sum = _log_softmax(logits, labels, held, smoothing)
    del logits
    scale, even = GRADIENT_SCALE.get(dtype, 1.0), smoothing / held.vocabulary
    losses, probability = _losses(of_target, mean, labels, held, smoothing), of_target.exp()
    if z_loss:
        losses = losses + (z_loss * log_sum.square()).masked_fill(labels == IGNORED_LABEL, 0)
        # The gradient of logsumexp is the probabilities, as in the cross-entropy.
        grown = 1 + 2 * z_loss * log_sum
        probability = probability * grown
    # In fp32, because a difference of rounded numbers would be wrong by up to their rounding.
    at_target = (probability + (smoothing - 1 - even)) * scale
    is_wide = dtype == log_probabilities.dtype or log_probabilities.device.type == "cpu"
    if is_wide or smoothing or z_loss or scale != 1:
        gradient = log_probabilities.exp_()
        if z_loss:
            gradient.mul_(grown)
        if smoothing:
            gradient.sub_(even)
        if scale != 1:
            gradient.mul_(scale)
    elif torch.compiler.is_compiling():
        gradient = log_probabilities.exp().to(dtype)
    else:
        gradient = torch.exp(log_probabilities, out=torch.empty_like(log_probabilities, dtype=dtype))
    at_target = at_target.to(gradient.dtype).where(is_here, gradient.gather(1, targets))
    gradient = gradient.scatter_(1, targets, at_target).to(dtype)
    return losses, gradient


@cache
def fused_differentiate() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_differentiate` compiled for any number of positions: 2 passes over the logits, and not 5.

    If the compiler fails, `_differentiate` takes its place.
    """
    compute = torch.compile(_differentiate)

    def differentiate(logits: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        nonlocal compute
        for each in (logits, labels):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        try:
            return compute(logits, labels, *others)
        except TorchDynamoException as error:
            warnings.warn(f"the loss is not compiled, because the compiler failed: {first_line(error)}", stacklevel=2)
            compute = _differentiate
            return compute(logits, labels, *others)

    return differentiate


def _log_softmax(
    logits: Tensor, labels: Tensor, held: HeldRows, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the held rows and of the labels (N, 1), their means, and the log of the sums.

    Without smoothing, the means over the vocabulary are not computed. The memory of `logits` may be used again.
    """
    targets, is_here = held.find(labels)
    if held.group is None:
        log_probabilities = torch.log_softmax(logits, 1)
        of_target = log_probabilities.gather(1, targets)
        mean = log_probabilities.mean(1, keepdim=True) if smoothing else of_target
        return log_probabilities, of_target, mean, logits.gather(1, targets) - of_target
    largest = held.largest(logits.amax(1, keepdim=True))
    totals = (logits - largest).exp_().sum(1, keepdim=True)
    of_target = logits.gather(1, targets).where(is_here, 0)
    mean = logits.sum(1, keepdim=True) / held.vocabulary if smoothing else of_target
    totals, of_target, mean = held.summed(totals, of_target, mean)
    shift = largest + totals.log()
    return logits.sub_(shift), of_target - shift, mean - shift, shift


def _losses(of_target: Tensor, mean: Tensor, labels: Tensor, held: HeldRows, smoothing: float) -> Tensor:
    """Return the losses of a chunk (N, 1) from the log-probabilities of its labels, and from their means."""
    losses = (smoothing - 1) * of_target - smoothing * mean
    # Rejecting a label here would make the host wait for the device. Instead the loss is NaN, and the step is not
    # applied.
    losses = losses.masked_fill((labels < 0) | (labels >= held.vocabulary), math.nan)
    return losses.masked_fill(labels == IGNORED_LABEL, 0)


def _check_labels(labels: Tensor, vocabulary: int) -> None:
    """Check that every label is a token of the vocabulary or is ignored.

    Raises:
        DataError: a label is out of range. The message names the first one.
    """
    lowest, highest = labels.aminmax()
    if lowest < 0 or highest >= vocabulary:
        wrong = labels[(labels < 0) | (labels >= vocabulary)][0].item()
        raise DataError(
            f"a label is {wrong}, and labels are tokens from 0 to {vocabulary - 1}, or {IGNORED_LABEL} for no target. "
            "Repair the labels that `collate` returns"
        )


def _count(hidden: Tensor, head: tuple[Tensor, Tensor | None], held: HeldRows, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk and the number of labels that are the most likely token."""
    logits, labels = _logits(hidden, *head), labels[:, None]
    own, token = logits.max(1, keepdim=True)
    largest = held.largest(own)
    # If several tokens are equally likely, take the first.
    token = held.smallest((token + held.first).where(own == largest, held.vocabulary))
    _, of_target, mean, _ = _log_softmax(logits, labels, held, 0.0)
    return _losses(of_target, mean, labels, held, 0.0).sum(), (token == labels).sum()


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = product(hidden, weight.t())
    return logits if bias is None else logits.add_(bias)


@contextmanager
def _without_autocast(weight: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Turn autocast off inside the context, and yield the head's weights as autocast would round them."""
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        yield weight.to(dtype), None if bias is None else bias.to(dtype)


def _parts(labels: Tensor, rows: int) -> Iterator[slice]:
    yield from (slice(begin, begin + rows) for begin in range(0, len(labels), rows))
