"""The border between the loop and what is trained: a task brings data, model, loss and score; the loop knows no more.

A task of your own is one file: a class with these methods, no base class and no registration
(`task: my_module:MyTask` in the recipe), looked up on PYTHONPATH, and then in the current folder.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch.utils.data import Dataset

    from accel_train.recipe import Recipe

TASKS = {
    "causal-lm": "accel_train.tasks.causal_lm:CausalLM",
    "text-classification": "accel_train.tasks.text_classification:TextClassification",
    "image-classification": "accel_train.tasks.image_classification:ImageClassification",
    "semantic-segmentation": "accel_train.tasks.semantic_segmentation:SemanticSegmentation",
}
"""The package's own tasks by the name a recipe uses; imported only when chosen."""


TARGET_UNITS = {
    "causal-lm": "tokens",
    "text-classification": "samples",
    "image-classification": "images",
    "semantic-segmentation": "pixels",
}
"""What a task's loss is divided by, in a word; `targets` for a task of somebody's own."""


def rate_name(targets: str) -> str:
    """The name under which the rate of targets is logged: `tokens_per_second`; where a target is a whole sample, that of samples."""
    return "samples_per_second" if targets in ("samples", "images") else f"{targets}_per_second"


def target_rate(record: Mapping[str, Any]) -> Any:
    """The rate of targets in a line of metrics.jsonl or in a summary, whichever its name; None where there is none."""
    names = map(rate_name, ("tokens", "pixels", "targets", "samples"))  # older runs call every target a token
    return next((record[name] for name in names if isinstance(record.get(name), int | float)), None)


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
    draw: "Callable[[int, np.random.Generator], Any] | None" = None
    """A training sample with its augmentation: (index, generator) -> what `train[index]` would be. The generator is seeded
    by (seed, epoch, index), so neither workers nor the number of processes change what is drawn. None: `train[index]`."""
    lengths: "NDArray[np.int64] | None" = None
    """Tokens of each training sample, which `data.group_by_length` needs."""
    step_batches: "Callable[[int], Iterator[list[tuple[dict[str, Any], int]]]] | None" = None
    """For data without an order of ours (a stream, a loader of the user): from a 0-based step on, this process's micro-batches
    of each step with their number of targets. `train` then only tells its length; how a resume finds its place is up to it."""
    where: "Callable[[int], str] | None" = None
    """Where a training sample comes from, for a person who looks for it: its file, or file and row."""
    large_files: Mapping[Path, str] = field(default_factory=dict)
    """SHA-256 by path of files that were too large to be compared with theirs beforehand: the loop does so while it trains."""


@dataclass(frozen=True)
class Scores:
    """What an evaluation found, beside the mean loss."""

    metrics: dict[str, float]
    """Names and numbers: for metrics.jsonl, progress, trackers, and `evaluate.metric_for_best_model`."""
    details: dict[str, Any] = field(default_factory=dict)
    """Plain JSON values for evaluation.json and report.html: a classification report, a confusion matrix."""


@runtime_checkable
class Task(Protocol):
    """What the loop asks of a task.

    The class that defines `loss_sum` or `evaluate_batch` may say `loss_is_by_position = True`: what they sum up is of each position's
    logits and label alone. Then sequences may be split over processes (`parallel.sp_size`). A task may say `metric_names = (...)`,
    what its `score` reports beside the loss; else a few samples are evaluated before the first step, where
    `evaluate.metric_for_best_model` is not the loss.
    """

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

    def evaluate_batch(
        self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]"
    ) -> "dict[str, torch.Tensor]":
        """What an evaluation counts in a batch, on the device, by name: `loss_sum` (0-dim) and whatever adds up.

        Tensors of one name are summed over batches and processes (counts as integers, so that sums are exact; floating-point
        ones in fp64), and memory stays flat. A name that begins with `rows_` is kept instead, one row a sample, in the order
        of the samples: that costs host memory, for figures that no sums can give (rank correlation).
        """
        ...

    def score(self, loss: float, totals: "Mapping[str, NDArray[Any]]", data: TaskData) -> Scores:
        """The metrics that follow from the mean evaluation loss and from what `evaluate_batch` counted."""
        ...

    def predict_batch(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """What `accel-train predict` writes for each sample of a batch, by column: tensors with a row a sample.

        `label` (an index into `data.source.label_names`, where there are such), `score`, `scores` (one for each class, in
        their order) ...; empty for a task that predicts nothing for a sample.
        """
        ...

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Figures that a trained model should beat, named as in `score` with a prefix; may be empty."""
        ...

    def save_description(self, model: "torch.nn.Module", data: TaskData, folder: Path) -> None:
        """Write what loading the model needs beside its weights (configuration, tokenizer): it goes into each checkpoint."""
        ...

    def save(self, model: "torch.nn.Module", data: TaskData, folder: Path) -> None:
        """Write the trained model into a folder that others can load: weights and description."""
        ...

    def sample(self, recipe: "Recipe", model: "torch.nn.Module", data: TaskData) -> dict[str, Any] | None:
        """Something to look at after training (a text, say), or None."""
        ...


def load_task(name: str) -> Task:
    """The task a recipe names: one of the package, or `module:Class`, looked up on PYTHONPATH and last in the current folder.

    Raises:
        ValueError: no such task, module or class, or one that lacks a method of the protocol.
    """
    target = TASKS.get(name, name)
    if ":" not in target:
        near = get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(TASKS))}"
        raise ValueError(f"task={name!r} is no task of accel_train; {hint} A task of your own is written module:Class")
    module_name, class_name = target.split(":", 1)
    if name not in TASKS:
        _see_current_folder()
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"task={name!r} cannot be imported: {error}; it is looked up on PYTHONPATH and in the current folder as module:Class"
        ) from error
    if not isinstance(found, type):
        raise ValueError(
            f"task={name!r} is {_kind(found)} and no class; name a class with the methods of accel_train/task.py, as module:Class"
        )
    try:
        task = found()
    except TypeError as error:
        raise ValueError(
            f"task={name!r} cannot be made without arguments: {error}; a task is made by {class_name}()"
        ) from error
    missing = [method for method in _PROTOCOL_METHODS if not callable(getattr(task, method, None))]
    if missing:
        raise ValueError(f"task={name!r} lacks {', '.join(missing)}; see accel_train/task.py for what a task provides")
    return task


def read_data(task: Task, recipe: "Recipe", *, progress: bool) -> TaskData:
    """Return what the task's `load_data` reads.

    Raises:
        ValueError: it is no TaskData with training samples; and all that `load_data` raises of it.
    """
    data: Any = task.load_data(recipe, progress=progress)
    wanted = "return an accel_train.task.TaskData with train, eval, collate and fingerprint"
    if not isinstance(data, TaskData):
        raise ValueError(f"load_data of task={recipe.task!r} returned {_kind(data)}; {wanted}")
    for name, samples in (("train", data.train), ("eval", data.eval)):
        if not hasattr(samples, "__len__") and not (name == "eval" and samples is None):
            raise ValueError(
                f"load_data of task={recipe.task!r} returned {_kind(samples)} for {name}, which has no length; {wanted}, whose "
                "samples have __len__ and __getitem__"
            )
    return data


def _kind(found: Any) -> str:
    """What a value is, in words."""
    if found is None or isinstance(found, type):
        return str(found)
    kind = type(found).__name__
    return f"a {kind}" if kind in ("function", "module") else f"an object of {kind}"


def _see_current_folder() -> None:
    """Put the current folder on the path: the installed command does not have it there, `python -m` does."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))  # at the end, where it hides no package


def refuse_task_within(name: str, folder: Path) -> None:
    """Refuse a task whose module lies in a run folder: code that came with somebody's run is not run because its recipe says so.

    Raises:
        ValueError: names the file to read, and how to allow it.
    """
    package = name.partition(":")[0].partition(".")[0]
    if name in TASKS or ":" not in name:
        return
    _see_current_folder()
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return  # load_task says what is wrong
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    for place in places:
        if place is not None and Path(place).resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"task={name!r} would run {place}, code that lies in the run folder; read it, and if you trust it put it into "
                "a folder of your own on PYTHONPATH"
            )


_PROTOCOL_METHODS = tuple(name for name in vars(Task) if not name.startswith("_"))
