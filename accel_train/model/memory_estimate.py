"""How much memory a run needs, without any: its own forward and backward, on tensors that have a shape and no storage.

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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from accel_train.loading import Drawn, fetch
from accel_train.model_check import pretrained_config
from accel_train.recipe import Recipe
from accel_train.recipe_optimizer import Optimizer
from accel_train.step import checked_loss
from accel_train.task import TASKS, Task, TaskData

CUDA_CONTEXT_BYTES = 600 * 2**20
"""CUDA context, kernels and cuBLAS workspaces of one process: 0.5 to 0.7 GiB with recent drivers."""


@dataclass(frozen=True)
class MemoryPart:
    """One share of the memory of a process; `num_bytes` is None where it could not be found out."""

    name: str
    num_bytes: int | None
    kind: Literal["arithmetic", "estimate"]
    how: str


def num_moments(section: Optimizer) -> int:
    """Tensors that the optimizer keeps beside each weight."""
    return (1 if section.momentum else 0) if section.name == "sgd" else 2


def is_averaged(section: Optimizer) -> bool:
    """Whether there is one more copy of the trained weights: their moving average."""
    return section.ema_decay is not None


def largest_samples(data: TaskData, seed: int, count: int) -> Sequence[Any]:
    """The samples of the micro-batch that takes the most memory: as training draws them, the longest where they differ in length."""
    num_samples = len(data.train)  # type: ignore[arg-type]
    if data.lengths is not None:
        longest = np.argsort(data.lengths)[::-1][:count].tolist()
        indices = (longest * count)[:count]
    else:
        indices = [0] * count if data.draw is None else [number % num_samples for number in range(count)]
    return fetch(data.train if data.draw is None else Drawn(data.draw, seed, num_samples), indices)


def build_without_weights(recipe: Recipe, task: Task, data: TaskData) -> nn.Module:
    """The model that a run would build, on the meta device; of a pretrained one only the configuration is loaded.

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
    """The memory of one process that holds the whole model and trains on micro-batches like `batch`, part by part.

    `model` is on the meta device (and is not afterwards), `batch` is what the task's collate makes without `num_targets`,
    `device_type` is what the run computes on. `gathered`: the weights of a forward are in 16 bits already (FSDP2 in mixed
    precision), so that autocast keeps no copies of them.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    section, moments = recipe.optimizer, num_moments(recipe.optimizer)
    shape = " x ".join(map(str, next(iter(batch.values())).shape))
    eager = f"a micro-batch of {shape}, eager, mixed_precision {mixed_precision}"
    eager += ", checkpointed" if recipe.precision.gradient_checkpointing else ""
    parts = [
        MemoryPart("parameters", 4 * count, "arithmetic", "4 bytes each (fp32)"),
        MemoryPart("gradients", 4 * trainable, "arithmetic", "4 bytes each (fp32)"),
        MemoryPart("optimizer", 4 * moments * trainable, "arithmetic", f"{section.name}: {moments} x 4 bytes each"),
    ]  # fmt: skip
    if is_averaged(section):
        parts.append(MemoryPart("averaged weights", 4 * trainable, "arithmetic", "ema_decay: 4 bytes each (fp32)"))
    try:
        like_cuda = device_type == "cuda"
        peak = simulate_step(
            task, model, batch, mixed_precision=mixed_precision, like_cuda=like_cuda, gathered=gathered
        )
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
    *,
    mixed_precision: str = "no",
    like_cuda: bool = False,
    gathered: bool = False,
) -> Counter[str]:
    """Bytes beyond parameters and gradients at the worst moment of a forward and backward: `activations`, `logits`.

    Raises:
        RuntimeError: the forward depends on values (`.item()`), and there are none.
    """
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed_precision]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _take_shapes_only(model, dtype if gathered else None)
        inputs = {name: fake.from_tensor(tensor) for name, tensor in batch.items()}
        with PeakTracker(vocabulary_rows(model)) as tracker, _like_cuda() if like_cuda else nullcontext():
            with torch.autocast("cpu", dtype=dtype, enabled=mixed_precision != "no"):
                loss = checked_loss(task.loss_sum(model.train(), inputs))
            loss.backward()
    return tracker.peak


def _take_shapes_only(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Move a model from the meta device to fake CPU tensors (of the active mode), tied weights kept tied, with gradients.

    Weights in `dtype`, or as they are.
    """
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


class PeakTracker(TorchDispatchMode):
    """Adds up the storages that operators make and that are still alive; `peak` holds the worst moment, by kind."""

    def __init__(self, vocabulary_rows: int | None) -> None:
        super().__init__()
        self.vocabulary_rows = vocabulary_rows
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(storage) for storage in self._storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, lambda tensor: self._add(tensor, given), result)
        return result

    def _storages(self, tree: Any) -> list[torch.UntypedStorage]:
        found: list[torch.UntypedStorage] = []
        tree_map_only(Tensor, lambda tensor: found.append(tensor.untyped_storage()), tree)
        return found

    def _add(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in given or storage in self._known:
            return
        self._known.add(storage)
        kind = "logits" if tensor.dim() and tensor.shape[-1] == self.vocabulary_rows else "activations"
        size = storage.nbytes()
        self.now[kind] += size
        weakref.finalize(storage, self._remove, kind, size)
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def _remove(self, kind: str, size: int) -> None:
        self.now[kind] -= size


@contextmanager
def _like_cuda() -> Iterator[None]:
    """What differs on a GPU: its autocast takes powers in fp32, and its attention keeps no scores for dropout's sake.

    Patched, because no mode of torch reaches the recomputation of a checkpointed block.
    """
    attention, power = functional.scaled_dot_product_attention, torch.pow

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, **{**kwargs, "dropout_p": 0.0})

    def raise_to(base: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return power(base.float() if torch.is_autocast_enabled("cpu") else base, *args, **kwargs)

    setattr(functional, "scaled_dot_product_attention", attend)  # noqa: B010 (mypy refuses the assignment)
    setattr(torch, "pow", raise_to)  # noqa: B010
    try:
        yield
    finally:
        setattr(functional, "scaled_dot_product_attention", attention)  # noqa: B010
        setattr(torch, "pow", power)  # noqa: B010
