"""How much memory a run needs, without any: its own forward and backward, on tensors that have a shape and no storage.

The parts that follow from counts (weights, gradients, optimizer) are arithmetic. Activations and the loss are found by
running one micro-batch of the task on `FakeTensorMode` tensors and adding up what is alive at the worst moment, in eager
mode. It holds for any model and loss, with and without gradient checkpointing; what differs on a GPU is in `_LikeCuda`.
"""

import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accel_train.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_train.task import Task

CUDA_CONTEXT_BYTES = 600 * 2**20
"""CUDA context, kernels and cuBLAS workspaces of one process: 0.5 to 0.7 GiB with recent drivers."""


@dataclass(frozen=True)
class MemoryPart:
    """One share of the memory of a process; `num_bytes` is None where it could not be found out."""

    name: str
    num_bytes: int | None
    kind: Literal["arithmetic", "estimate"]
    how: str


def estimate_memory(
    recipe: Recipe,
    task: "Task",
    model: "nn.Module",
    batch: "Mapping[str, torch.Tensor]",
    *,
    mixed_precision: str,
    device_type: str,
) -> list[MemoryPart]:
    """The memory of one process that trains on micro-batches like `batch`, part by part.

    `model` is on the meta device, `batch` is what the task's collate makes, `device_type` what the run computes on.
    """
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trainable
    num_moments = {"adamw": 2, "adam": 2, "sgd": 1 if recipe.optimizer.momentum else 0}[recipe.optimizer.name]
    parts = [
        MemoryPart("parameters", 4 * (trainable + frozen), "arithmetic", "4 bytes each (fp32)"),
        MemoryPart("gradients", 4 * trainable, "arithmetic", "4 bytes each (fp32)"),
        MemoryPart("optimizer", 4 * num_moments * trainable, "arithmetic", f"{recipe.optimizer.name}: {num_moments} x 4 bytes each"),
    ]  # fmt: skip
    shape = " x ".join(map(str, next(iter(batch.values())).shape))
    how = f"forward and backward of a micro-batch of {shape}, eager, mixed_precision {mixed_precision}"
    how += ", checkpointed" if recipe.precision.gradient_checkpointing else ""
    try:
        peak = simulate_step(task, model, batch, mixed_precision=mixed_precision, like_cuda=device_type == "cuda")
        parts.append(MemoryPart("activations", peak["activations"], "estimate", how))
        parts.append(MemoryPart("logits", peak["logits"], "estimate", "what is as wide as the vocabulary, and its gradient"))
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # what an operator says that needs values
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        parts.append(MemoryPart("activations", None, "estimate", f"not known: the model does not run without values ({reason[:80]})"))
    if device_type == "cuda":
        parts.append(MemoryPart("CUDA context", CUDA_CONTEXT_BYTES, "estimate", "as with recent drivers; fragmentation not counted"))
    return parts


def simulate_step(
    task: "Task",
    model: "nn.Module",
    batch: "Mapping[str, torch.Tensor]",
    *,
    mixed_precision: str = "no",
    like_cuda: bool = False,
) -> Counter[str]:
    """Bytes beyond parameters and gradients at the worst moment of a forward and backward, as `activations` and `logits`.

    Raises:
        RuntimeError: the model's forward depends on values (`.item()`), and there are none.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as modes:
        # Under a fake mode `to_empty` and the copies of the batch allocate nothing.
        fake = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model.to_empty(device="cpu")
        model.train()
        for parameter in model.parameters():
            # There from the start, as with DDP's buckets and with accumulation; without both this is an upper bound.
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        inputs = {name: fake.from_tensor(tensor) for name, tensor in batch.items()}
        if mixed_precision != "no":
            dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float16
            autocast = modes.enter_context(torch.autocast("cpu", dtype=dtype))
            assert autocast is not None
        if like_cuda:
            modes.enter_context(_like_cuda_mode())
        tracker = modes.enter_context(_peak_tracker(_vocabulary_rows(model)))
        task.loss_sum(model, inputs).backward()
        return tracker.peak  # type: ignore[no-any-return]
