"""Estimate the memory of a run without allocating it: run forward and backward on tensors with shapes but no storage.

Weights, gradients, and optimizer state follow from counts. Activations and the loss are measured. One micro-batch of
the task runs on `FakeTensorMode` tensors in eager mode, and the peak of the live storages is recorded. This works for
any model and loss, with and without gradient checkpointing.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from accel_train.data.samples import Drawn, fetch
from accel_train.model.kernels import chunked_loss
from accel_train.model.pretrained import pretrained_config
from accel_train.model.tensors import tensors_in
from accel_train.model.training_module import checked_loss
from accel_train.model.weights import embeddings, hidden_matrices
from accel_train.recipe.optimizer import Optimizer, optimizer_kind
from accel_train.recipe.schema import Recipe
from accel_train.runtime.private import fake_tensors, watch_operators
from accel_train.task import TASKS, Task, TaskData

CUDA_CONTEXT_BYTES = 600 * 2**20
"""Memory of one process for its CUDA context, kernels, and cuBLAS workspaces, in bytes. Recent drivers take 0.5 to 0.7
GiB.
"""

LEAST_IN_8_BITS = 4096
"""Number of elements from which on bitsandbytes keeps a tensor's moments in 8 bits."""
BLOCK_OF_8_BITS = 256
"""Number of 8-bit elements that share one scale."""


@dataclass(frozen=True)
class MemoryPart:
    """One share of a process's memory. `num_bytes`: None if unknown."""

    name: str
    num_bytes: int | None
    kind: Literal["arithmetic", "estimate"]
    how: str


def num_moments(section: Optimizer) -> int:
    """Return the number of tensors that the optimizer keeps per weight; for muon, per matrix in a block."""
    if section.name == "sgd" and not section.momentum:
        return 0
    return optimizer_kind(section.name).moments


def state_bytes(model: nn.Module, section: Optimizer) -> int:
    """Return the optimizer's state in bytes. A custom optimizer class is counted as AdamW."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = sum(weight.numel() for weight in weights)
    state = optimizer_kind(section.name).state
    # One row and one column per matrix.
    if state == "rows_and_columns":
        matrices = [weight for weight in weights if weight.dim() > 1]
        factors = sum(matrix.numel() // matrix.shape[dim] for matrix in matrices for dim in (-1, -2))
        return 4 * (trained - sum(matrix.numel() for matrix in matrices) + factors)
    # AdamW, with two moments, for every weight that is not a matrix in a block.
    if state == "muon":
        return 4 * (2 * trained - sum(matrix.numel() for matrix in hidden_matrices(model)))
    if state == "8_bits":
        whole = {id(weight) for weight in embeddings(model)}
        return sum(_bytes_in_8_bits(weight, whole=id(weight) in whole) for weight in weights)
    return 4 * num_moments(section) * trained


def _bytes_in_8_bits(weight: Tensor, *, whole: bool) -> int:
    """Return the bytes of two moments: 1 per element, 4 per block, and the code table; 4 per element with `whole`."""
    if whole or weight.numel() < LEAST_IN_8_BITS:
        return 8 * weight.numel()
    return 2 * (weight.numel() + 4 * -(-weight.numel() // BLOCK_OF_8_BITS) + 4 * 256)


def largest_samples(data: TaskData, seed: int, count: int) -> Sequence[Any]:
    """Return the samples of the micro-batch that takes the most memory.

    The samples are drawn as in training. If their lengths are known, the longest are used.
    """
    num_samples = len(data.train)  # type: ignore[arg-type]
    if data.lengths is not None:
        longest = np.argsort(data.lengths)[::-1][:count].tolist()
        indices = (longest * count)[:count]
    else:
        indices = [0] * count if data.draw is None else [number % num_samples for number in range(count)]
    return fetch(data.train if data.draw is None else Drawn(data.draw, seed, num_samples), indices)


def build_without_weights(recipe: Recipe, task: Task, data: TaskData) -> nn.Module:
    """Return the model of a run on the meta device. For a pretrained model, only the configuration is loaded.

    Raises:
        ValueError: the model cannot be built from its configuration.
    """
    if recipe.model.pretrained is not None and recipe.task in TASKS:
        fields = pretrained_config(recipe).to_dict()
        if recipe.task == "causal-lm":
            multiple = recipe.model.pad_vocab_to_multiple_of or 1
            rows = -(-data.source.vocab_size // multiple) * multiple
            fields["vocab_size"] = max(fields["vocab_size"], rows)
        model = recipe.model.model_copy(update={"pretrained": None, "config": fields})
        recipe = recipe.model_copy(update={"model": model})
    with torch.device("meta"):
        return task.build_model(recipe, data)


def estimate_memory(
    recipe: Recipe,
    task: Task,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    mixed_precision: str,
    device_type: str,
    gathered: bool = False,
) -> list[MemoryPart]:
    """Return the memory parts of one process that holds the whole model and trains on micro-batches like `batch`.

    Args:
        model: on the meta device. It is moved to fake CPU tensors.
        batch: the result of the task's collate, without `num_targets`.
        device_type: device type that the run computes on.
        gathered: the forward gets 16-bit weights (FSDP2 in mixed precision), so autocast keeps no copies of them.
    """
    held_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    is_fp32 = all(parameter.element_size() == 4 for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    section, state = recipe.optimizer, state_bytes(model, recipe.optimizer)
    of_state = {
        "moments": f"{num_moments(section)} x 4 bytes each",
        "muon": "1 x 4 bytes each for the matrices in blocks, 2 x 4 bytes for the rest (AdamW)",
        "rows_and_columns": "4 bytes for each row, column and vector element",
        "8_bits": "2 x 1 byte each, and scales; 2 x 4 for embeddings and tensors of fewer than "
        f"{LEAST_IN_8_BITS:,} numbers",
    }[optimizer_kind(section.name).state]
    kept = f"{section.name}: {of_state}"
    if ":" in section.name:
        kept = f"{section.name}: as of AdamW, {of_state}; its own is not known"
    shape = " x ".join(map(str, next(iter(batch.values())).shape))
    eager = f"a micro-batch of {shape}, eager, mixed_precision {mixed_precision}"
    eager += {
        "nothing": "",
        "blocks": ", checkpointed",
        "selective": ", checkpointed but for attention and most products",
        "budget": ", of which memory_budget leaves a part that only the compiler knows",
    }[recipe.precision.recomputed]
    parts = [
        MemoryPart(
            "parameters", held_bytes, "arithmetic",
            "4 bytes each (fp32)" if is_fp32 else "2 bytes each (bf16) of frozen matrices, 4 of the others",
        ),
        MemoryPart("gradients", 4 * trainable, "arithmetic", "4 bytes each (fp32)"),
        MemoryPart("optimizer", state, "estimate" if ":" in section.name else "arithmetic", kept),
    ]  # fmt: skip
    if section.averages:
        why = "ema_decay" if section.ema_decay is not None else f"{section.name}, while it is evaluated"
        parts.append(MemoryPart("averaged weights", 4 * trainable, "arithmetic", f"{why}: 4 bytes each (fp32)"))
    try:
        like_cuda = device_type == "cuda"
        peak = simulate_step(task, model, batch, mixed_precision, like_cuda=like_cuda, gathered=gathered)
        parts.append(MemoryPart("activations", peak["activations"], "estimate", eager))
        parts.append(MemoryPart("logits", peak["logits"], "estimate", "all that is as wide as the vocabulary"))
    # An operator needs values, or has no fake implementation.
    except (RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0][:80] or type(error).__name__
        parts.append(MemoryPart("activations", None, "estimate", f"this model does not run without values: {reason}"))
    if device_type == "cuda":
        parts.append(MemoryPart("CUDA context", CUDA_CONTEXT_BYTES, "estimate", "with recent drivers"))
    return parts


def simulate_step(
    task: Task,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    mixed_precision: str = "no",
    *,
    like_cuda: bool = False,
    gathered: bool = False,
) -> Counter[str]:
    """Return the bytes beyond parameters and gradients at the peak of a forward and backward: `activations`, `logits`.

    Raises:
        RuntimeError: the forward depends on values (`.item()`). Fake tensors do not have values.
    """
    # fp8 counts as bf16. The float8 copies take slightly more memory than float8 saves.
    dtype = {"no": torch.float32, "fp16": torch.float16}.get(mixed_precision, torch.bfloat16)
    with fake_tensors() as fake:
        _take_shapes_only(model, dtype if gathered else None)
        inputs = {name: fake.from_tensor(each) if isinstance(each, Tensor) else each for name, each in batch.items()}
        tracker = PeakTracker(vocabulary_rows(model))
        with watch_operators(tracker.see), _like_cuda() if like_cuda else nullcontext():
            with torch.autocast("cpu", dtype=dtype, enabled=mixed_precision != "no"):
                loss = checked_loss(task.loss_sum(model.train(), inputs))
            loss.backward()
    return tracker.peak


def _take_shapes_only(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Move a model from the meta device to fake CPU tensors of the active mode, with gradients and ties.

    `dtype` is the new element type; None keeps the types.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                new = nn.Parameter(
                    torch.empty_like(parameter, device="cpu", dtype=dtype), requires_grad=parameter.requires_grad
                )
                # Gradients exist from the start with DDP's buckets and with accumulation. Otherwise this is an upper
                # bound.
                new.grad = torch.empty_like(new) if parameter.requires_grad else None
                moved[id(parameter)] = new
            setattr(module, name, moved[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))


def vocabulary_rows(model: nn.Module) -> int | None:
    """Return the rows of the first embedding, the token embedding in transformers models; None without an embedding."""
    return next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)


class PeakTracker:
    """Sums the live storages that operators allocate. `peak` holds the largest sum, by kind."""

    def __init__(self, vocabulary_rows: int | None) -> None:
        self.vocabulary_rows = vocabulary_rows
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def see(self, arguments: Any, result: Any) -> None:
        """Add the storages that an operator has allocated for its result."""
        given = [tensor.untyped_storage() for tensor in tensors_in(arguments)]
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage in self._known or any(storage is each for each in given):
                continue
            self._known.add(storage)
            kind = "logits" if tensor.dim() and tensor.shape[-1] == self.vocabulary_rows else "activations"
            held = {kind: storage.nbytes()}
            self.now.update(held)
            weakref.finalize(storage, self.now.subtract, held)
            if self.now.total() > self.peak.total():
                self.peak = self.now.copy()


@contextmanager
def _like_cuda() -> Iterator[None]:
    """Make operators allocate as on a GPU while the context is active.

    Autocast computes powers in fp32, attention keeps no scores for dropout, and a chunked loss does not copy 16-bit
    factors to fp32. The functions are patched, because torch's modes do not reach the recomputation of a checkpointed
    block.
    """
    attention, power, product = functional.scaled_dot_product_attention, torch.pow, chunked_loss.product

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, **{**kwargs, "dropout_p": 0.0})

    def raise_to(base: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return power(base.float() if torch.is_autocast_enabled("cpu") else base, *args, **kwargs)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch.empty(a.shape[0], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))

    setattr(chunked_loss, "product", multiply)  # noqa: B010
    setattr(functional, "scaled_dot_product_attention", attend)  # noqa: B010 (mypy refuses the assignment)
    setattr(torch, "pow", raise_to)  # noqa: B010
    try:
        yield
    finally:
        setattr(functional, "scaled_dot_product_attention", attention)  # noqa: B010
        setattr(torch, "pow", power)  # noqa: B010
        setattr(chunked_loss, "product", product)  # noqa: B010
