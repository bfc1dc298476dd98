"""The border between the loop and what is trained: a task brings data, model, loss and score; the loop knows no more.

A task of your own is one file: a class with these methods, no base class and no registration
(`task: my_module:MyTask` in the recipe).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from accel_train.recipe import Recipe

TASKS = {"causal-lm": "accel_train.tasks.causal_lm:CausalLM"}
"""The package's own tasks by the name a recipe uses; imported only when chosen."""


@dataclass(frozen=True)
class TaskData:
    """What a task read: map-style data sets, and how samples become a micro-batch."""

    train: "Dataset[Any]"
    eval: "Dataset[Any] | None"
    collate: Callable[[Sequence[Any]], dict[str, Any]]
    """Samples -> tensors by name, with `num_targets`: the int that the loss sum is divided by (its count of targets)."""
    fingerprint: str
    """Changes when the data changes; a checkpoint goes on only with the same data."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a reader of the plan and the report wants to know; plain JSON values."""
    reading_is_free: bool = False
    """Reading a sample costs microseconds (memory-mapped tokens), so processes that read ahead would only cost."""
    source: Any = None
    """Whatever else the task wants to keep (a tokenizer, label names)."""


@runtime_checkable
class Task(Protocol):
    """What the loop asks of a task."""

    def load_data(self, recipe: "Recipe", *, progress: bool) -> TaskData:
        """Read the data. Called on every process; a user's mistake is a ValueError."""
        ...

    def build_model(self, recipe: "Recipe", data: TaskData) -> "torch.nn.Module":
        """The model on the CPU, in fp32, with the same weights on every process (the seed is set)."""
        ...

    def loss_sum(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """The loss of a micro-batch, summed (not averaged) over its targets, fp32, 0-dim."""
        ...

    def flops_per_target(self, recipe: "Recipe", model: "torch.nn.Module") -> float | None:
        """Floating-point operations of forward and backward per target, None when unknown."""
        ...

    def score(self, loss: float, data: TaskData) -> dict[str, float]:
        """The metrics that follow from the mean evaluation loss."""
        ...

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Figures that a trained model should beat, named as in `score` with a prefix; may be empty."""
        ...

    def save(self, model: "torch.nn.Module", data: TaskData, folder: Path) -> None:
        """Write the trained model into a folder that others can load."""
        ...

    def sample(self, recipe: "Recipe", model: "torch.nn.Module", data: TaskData) -> dict[str, Any] | None:
        """Something to look at after training (a text, say), or None."""
        ...


def load_task(name: str) -> Task:
    """The task a recipe names: one of the package, or `module:Class`.

    Raises:
        ValueError: no such task, module or class, or one that lacks a method of the protocol.
    """
    target = TASKS.get(name, name)
    if ":" not in target:
        near = get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(TASKS))}"
        raise ValueError(f"task={name!r} is no task of accel_train; {hint} A task of your own is written module:Class")
    module_name, class_name = target.split(":", 1)
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"task={name!r} cannot be imported: {error}; it is looked up on PYTHONPATH as module:Class"
        ) from error
    task = factory()
    missing = [method for method in _PROTOCOL_METHODS if not callable(getattr(task, method, None))]
    if missing:
        raise ValueError(f"task={name!r} lacks {', '.join(missing)}; see accel_train/task.py for what a task provides")
    return task


_PROTOCOL_METHODS = tuple(name for name in vars(Task) if not name.startswith("_"))
