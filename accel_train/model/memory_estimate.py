"""Estimate the memory of a run without using any: its own forward and backward, on tensors that have a shape and no storage.

The parts that follow from counts (weights, gradients, optimizer) are arithmetic. Activations and the loss are found by
running one micro-batch of the task on `FakeTensorMode` tensors and adding up what is alive at the worst moment, in eager
mode. It holds for any model and loss, with and without gradient checkpointing.
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
"""CUDA context, kernels and cuBLAS workspaces of one process: 0.5 to 0.7 GiB with recent drivers."""

LEAST_IN_8_BITS = 4096
"""Numbers of the smallest tensor whose moments bitsandbytes keeps in 8 bits."""
BLOCK_OF_8_BITS = 256
"""Numbers that share a scale there."""


@dataclass(frozen=True)
class MemoryPart:
    """One share of the memory of a process; `num_bytes` is None where it could not be found out."""

    name: str
    num_bytes: int | None
    kind: Literal["arithmetic", "estimate"]
    how: str


def num_moments(section: Optimizer) -> int:
    """Return the tensors that the optimizer keeps beside each weight; for muon, beside each matrix in a block."""
    if section.name == "sgd" and not section.momentum:
        return 0
    return optimizer_kind(section.name).moments


def state_bytes(model: nn.Module, section: Optimizer) -> int:
    """Return the bytes that the optimizer keeps beside the weights; of a class of somebody else's, as of AdamW."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = sum(weight.numel() for weight in weights)
    state = optimizer_kind(section.name).state
    if state == "rows_and_columns":  # a row and a column of each matrix
        matrices = [weight for weight in weights if weight.dim() > 1]
        factors = sum(matrix.numel() // matrix.shape[dim] for matrix in matrices for dim in (-1, -2))
        return 4 * (trained - sum(matrix.numel() for matrix in matrices) + factors)
    if state == "muon":  # AdamW's two for all that is no matrix
        return 4 * (2 * trained - sum(matrix.numel() for matrix in hidden_matrices(model)))
    if state == "8_bits":
        whole = {id(weight) for weight in embeddings(model)}
        return sum(_bytes_in_8_bits(weight, whole=id(weight) in whole) for weight in weights)
    return 4 * num_moments(section) * trained


def _bytes_in_8_bits(weight: Tensor, *, whole: bool) -> int:
    """Return the bytes of two moments: 1 for each number, 4 for each block, and the table of codes; or all in fp32."""
    if whole or weight.numel() < LEAST_IN_8_BITS:
        return 8 * weight.numel()
    return 2 * (weight.numel() + 4 * -(-weight.numel() // BLOCK_OF_8_BITS) + 4 * 256)


def largest_samples(data: TaskData, seed: int, count: int) -> Sequence[Any]:
    """Return the samples of the micro-batch that takes the most memory: as training draws them, the longest where they differ in length."""
    num_samples = len(data.train)  # type: ignore[arg-type]
    if data.lengths is not None:
        longest = np.argsort(data.lengths)[::-1][:count].tolist()
        indices = (longest * count)[:count]
    else:
        indices = [0] * count if data.draw is None else [number % num_samples for number in range(count)]
    return fetch(data.train if data.draw is None else Drawn(data.draw, seed, num_samples), indices)


def build_without_weights(recipe: Recipe, task: Task, data: TaskData) -> nn.Module:
    """Return the model that a run would build, on the meta device; of a pretrained one only the configuration is loaded.

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
    """Return the memory of one process that holds the whole model and trains on micro-batches like `batch`, part by part.

    `model` is on the meta device (and is not afterwards), `batch` is what the task's collate makes without `num_targets`,
    `device_type` is what the run computes on. `gathered`: the weights of a forward are in 16 bits already (FSDP2 in mixed
    precision), so that autocast keeps no copies of them.
    """
    held_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    is_fp32 = all(parameter.element_size() == 4 for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    section, state = recipe.optimizer, state_bytes(model, recipe.optimizer)
    of_state = {
        "moments": f"{num_moments(section)} x 4 bytes each",
        "muon": "1 x 4 bytes each for the matrices in blocks, 2 x 4 bytes for the rest (AdamW)",
        "rows_and_columns": "4 bytes for each row, column and vector element",
        "8_bits": f"2 x 1 byte each, and scales; 2 x 4 for embeddings and tensors of fewer than {LEAST_IN_8_BITS:,} numbers",
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
        MemoryPart("parameters", held_bytes, "arithmetic", "4 bytes each (fp32)" if is_fp32 else "2 bytes each (bf16) of frozen matrices, 4 of the others"),
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
    except (RuntimeError, TypeError) as error:  # an operator that needs values, or has no fake form
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
    """Bytes beyond parameters and gradients at the worst moment of a forward and backward: `activations`, `logits`.

    Raises:
        RuntimeError: the forward depends on values (`.item()`), and there are none.
    """
    # fp8 is counted as bf16: float8 copies take a little more than what they save.
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
    """Move a model from the meta device to fake CPU tensors (of the active mode), in `dtype` or as they are, with gradients and ties."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in moved:
                new = nn.Parameter(
                    torch.empty_like(parameter, device="cpu", dtype=dtype), requires_grad=parameter.requires_grad
                )
                # There from the start, as with DDP's buckets and with accumulation; without both, an upper bound.
                new.grad = torch.empty_like(new) if parameter.requires_grad else None
                moved[id(parameter)] = new
            setattr(module, name, moved[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))


def vocabulary_rows(model: nn.Module) -> int | None:
    """Rows of the first embedding, which is that of the tokens in the models of transformers; None without one."""
    return next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)


class PeakTracker:
    """Adds up the storages that operators make and that are still alive; `peak` holds the worst moment, by kind."""

    def __init__(self, vocabulary_rows: int | None) -> None:
        self.vocabulary_rows = vocabulary_rows
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def see(self, arguments: Any, result: Any) -> None:
        """Add what an operator has made of its arguments."""
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
    """Compute as a GPU does inside: autocast takes powers in fp32, attention keeps no scores for dropout's sake, and a loss in
    chunks copies no 16-bit factors to fp32.

    Patched, because no mode of torch reaches the recomputation of a checkpointed block.
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
