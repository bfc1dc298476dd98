"""Estimate the memory of a run without allocating it: run forward and backward on tensors with shapes but no storage.

Weights, gradients, and optimizer state follow from counts. Activations and the loss are measured. One micro-batch of
the task runs on `FakeTensorMode` tensors in eager mode, and the peak of the live storages is recorded. This works for
any model and loss, with and without gradient checkpointing. FSDP2's buffers come and go in the same step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from accel_train.core.errors import first_line
from accel_train.data.samples import Drawn, fetch, first_readable
from accel_train.model.fake_step import OF_FSDP2, WHOLE, Holding, simulate_step
from accel_train.model.freeze import check_rows_train
from accel_train.model.pretrained import pretrained_config, value_of
from accel_train.model.tensors import numel, trained, without_values
from accel_train.model.weights import embeddings, hidden_matrices
from accel_train.recipe.optimizer import Optimizer, optimizer_kind
from accel_train.recipe.schema import Recipe
from accel_train.task import TASKS, Batch, Task, TaskData

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


def total_bytes(parts: Iterable[MemoryPart]) -> int | None:
    """Return the bytes of all parts, or None if one is unknown."""
    sizes = [part.num_bytes for part in parts]
    return None if None in sizes else sum(filter(None, sizes))


def num_moments(section: Optimizer) -> int:
    """Return the number of tensors that the optimizer keeps per weight; for muon, per matrix in a block."""
    if section.name == "sgd" and not section.momentum:
        return 0
    return optimizer_kind(section.name).moments


def state_bytes(model: nn.Module, section: Optimizer) -> int:
    """Return the optimizer's state in bytes. A custom optimizer class is counted as AdamW."""
    weights = trained(model).values()
    size = numel(weights)
    state = optimizer_kind(section.name).state
    # One row and one column per matrix.
    if state == "rows_and_columns":
        matrices = [weight for weight in weights if weight.dim() > 1]
        factors = sum(matrix.numel() // matrix.shape[dim] for matrix in matrices for dim in (-1, -2))
        return 4 * (size - numel(matrices) + factors)
    # AdamW, with two moments, for every weight that is not a matrix in a block.
    if state == "muon":
        return 4 * (2 * size - numel(hidden_matrices(model)))
    if state == "8_bits":
        whole = {id(weight) for weight in embeddings(model)}
        return sum(_bytes_in_8_bits(weight, whole=id(weight) in whole) for weight in weights)
    return moment_bytes(section) * num_moments(section) * size


def moment_bytes(section: Optimizer) -> int:
    """Return the bytes of one number of a moment."""
    return 2 if section.state_dtype == "bf16" else 4


def _bytes_in_8_bits(weight: Tensor, *, whole: bool) -> int:
    """Return the bytes of two moments: 1 per element, 4 per block, and the code table; 4 per element with `whole`."""
    if whole or weight.numel() < LEAST_IN_8_BITS:
        return 8 * weight.numel()
    return 2 * (weight.numel() + 4 * -(-weight.numel() // BLOCK_OF_8_BITS) + 4 * 256)


def largest_samples(data: TaskData, seed: int, count: int) -> Sequence[Any]:
    """Return the samples of the micro-batch that takes the most memory.

    The samples are drawn as in training. If their lengths are known, the longest are used.
    """
    if data.shards is not None:
        return fetch(data.train, [data.shards.first_sample()] * count)
    num_samples = len(data.train)  # type: ignore[arg-type]
    if data.lengths is not None:
        longest = np.argsort(data.lengths)[::-1][:count].tolist()
        indices = (longest * count)[:count]
    else:
        indices = [0] * count if data.draw is None else [number % num_samples for number in range(count)]
    dataset = data.train if data.draw is None else Drawn(data.draw, seed, num_samples)
    if data.max_broken:
        return [*first_readable(dataset, data.max_broken)] * count
    return fetch(dataset, indices)


def build_without_weights(recipe: Recipe, task: Task, data: TaskData) -> nn.Module:
    """Return the model of a run on the meta device. For a pretrained model, only the configuration is loaded.

    Raises:
        ValueError: the model cannot be built from its configuration, or lacks tokens and freezes the embeddings.
    """
    given = recipe
    if recipe.model.pretrained is not None and recipe.task in TASKS:
        config = pretrained_config(recipe)
        fields = config.to_dict()
        if (size := getattr(data.source, "vocab_size", None)) is not None:
            multiple = recipe.model.pad_vocab_to_multiple_of or 1
            rows = -(-size // multiple) * multiple
            fields["vocab_size"] = max(fields.get("vocab_size") or 0, rows)
        section = recipe.model.model_copy(update={"pretrained": None, "config": fields})
        recipe = recipe.model_copy(update={"model": section})
    with without_values():
        model = task.build_model(recipe, data)
    tokenizer = getattr(data.source, "tokenizer", None)
    if given is not recipe and tokenizer is not None and (rows := value_of(config.get_text_config(), "vocab_size")):
        check_rows_train(given, model, tokenizer, rows)
    return model


def estimate_memory(
    recipe: Recipe,
    task: Task,
    model: nn.Module,
    batch: Batch,
    *,
    mixed_precision: str,
    device_type: str,
    holding: Holding = WHOLE,
) -> list[MemoryPart]:
    """Return the memory parts of one process that trains on micro-batches like `batch`.

    Parameters, optimizer and averaged weights belong to the whole model. The other parts follow `holding`, and add
    up at the peak of a step.

    Args:
        model: on the meta device. It is moved to fake CPU tensors.
        batch: the result of the task's collate, without `num_targets`.
        device_type: device type that the run computes on.
    """
    held_bytes = sum(parameter.nbytes for parameter in model.parameters())
    is_fp32 = all(parameter.element_size() == 4 for parameter in model.parameters())
    trainable = numel(trained(model).values())
    section, state = recipe.optimizer, state_bytes(model, recipe.optimizer)
    of_state = {
        "moments": f"{num_moments(section)} x {moment_bytes(section)} bytes each",
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
        MemoryPart("optimizer", state, "estimate" if ":" in section.name else "arithmetic", kept),
    ]  # fmt: skip
    if section.averages:
        why = "ema_decay" if section.ema_decay is not None else f"{section.name}, while it is evaluated"
        parts.append(MemoryPart("averaged weights", 4 * trainable, "arithmetic", f"{why}: 4 bytes each (fp32)"))
    try:
        like_cuda = device_type == "cuda"
        peak = simulate_step(task, model, batch, mixed_precision, like_cuda=like_cuda, holding=holding)
        how = "4 bytes each (fp32)"
        if not holding.keeps_gradients:
            how += ", at the peak of the step" if peak["gradients"] else " after the peak of the step, none at it"
        parts += [
            MemoryPart("gradients", peak["gradients"], "arithmetic", how),
            MemoryPart("activations", peak["activations"], "estimate", eager),
            MemoryPart("logits", peak["logits"], "estimate", "all that is as wide as the vocabulary"),
        ]
        if holding.shard_size > 1:
            parts += (MemoryPart(name, peak[name], "estimate", how) for name, how in OF_FSDP2.items())
    # An operator needs values, or has no fake implementation.
    except (RuntimeError, TypeError) as error:
        how = f"this model does not run without values: {first_line(error)[:80]}"
        parts.append(MemoryPart("gradients", 4 * trainable, "arithmetic", "4 bytes each (fp32)"))
        parts.append(MemoryPart("activations", None, "estimate", how))
    if device_type == "cuda":
        parts.append(MemoryPart("CUDA context", CUDA_CONTEXT_BYTES, "estimate", "with recent drivers"))
    return parts
