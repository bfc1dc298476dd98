"""Tasks: data, model, loss and scores of what is trained; the loop knows no more of them than `Task`.

A custom task is one file: a class derived from `Task` with three methods, and no registration
(`task: my_module:MyTask` in the recipe), looked up on PYTHONPATH, and then in the current folder.
"""

import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from accel_train.core.format import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch.utils.data import Dataset

    from accel_train.core.state import Choice
    from accel_train.recipe.schema import Recipe

TASKS = {
    "causal-lm": "accel_train.tasks.causal_lm:CausalLM",
    "text-classification": "accel_train.tasks.text_classification:TextClassification",
    "image-classification": "accel_train.tasks.image_classification:ImageClassification",
    "semantic-segmentation": "accel_train.tasks.semantic_segmentation:SemanticSegmentation",
    "token-classification": "accel_train.tasks.token_classification:TokenClassification",
    "seq2seq": "accel_train.tasks.seq2seq:Seq2Seq",
    "masked-lm": "accel_train.tasks.masked_lm:MaskedLM",
    "question-answering": "accel_train.tasks.question_answering:QuestionAnswering",
    "multiple-choice": "accel_train.tasks.multiple_choice:MultipleChoice",
}
"""The package's own tasks by the name a recipe uses; imported only when chosen."""
TARGET_UNITS = {
    "causal-lm": "tokens",
    "text-classification": "samples",
    "image-classification": "images",
    "semantic-segmentation": "pixels",
    "token-classification": "words",
    "seq2seq": "tokens",
    "masked-lm": "targets",
    "question-answering": "samples",
    "multiple-choice": "samples",
}
"""The unit that a task's loss is divided by; `targets` for a custom task."""


def rate_name(targets: str) -> str:
    """Return the name under which the rate of targets is logged: `tokens_per_second`; where a target is a whole sample, that of samples."""
    return "samples_per_second" if targets in ("samples", "images") else f"{targets}_per_second"


def target_rate(record: Mapping[str, Any]) -> Any:
    """Return the rate of targets in a line of metrics.jsonl or in a summary, whichever its name; None where there is none."""
    names = map(rate_name, ("tokens", "pixels", "words", "targets", "samples"))
    return next((record[name] for name in names if isinstance(record.get(name), int | float)), None)


@dataclass(frozen=True)
class TaskData:
    """The data of a task: map-style data sets, and how samples become a micro-batch."""

    train: "Dataset[Any]"
    eval: "Dataset[Any] | None"
    collate: Callable[[Sequence[Any]], dict[str, Any]]
    """Samples -> tensors by name, with `num_targets`: the int that the loss sum is divided by (its count of targets)."""
    fingerprint: str
    """Changes when the data changes; a checkpoint is resumed only with the same data."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain JSON values for the plan and the report."""
    reading_is_free: bool = False
    """Reading a sample costs microseconds (memory-mapped tokens), so processes that read ahead would only cost."""
    source: Any = None
    """Anything else that the task keeps (a tokenizer, label names)."""
    draw: "Callable[[int, np.random.Generator], Any] | None" = None
    """Draws a training sample with its augmentation: (index, generator) -> a sample as `train[index]`, the default. The generator
    is seeded by (seed, epoch, index), so neither workers nor the number of processes change what is drawn."""
    seeds_reading: bool = False
    """Samples or `collate` take random numbers from the process's generators, which are seeded before each micro-batch."""
    lengths: "NDArray[np.int64] | None" = None
    """Tokens of each training sample, which `data.group_by_length` needs."""
    lengths_vary: bool = False
    """Micro-batches are of different lengths: `precision.compile` then compiles for any length from the start."""
    step_batches: "Callable[[int], Iterator[list[tuple[dict[str, Any], int]]]] | None" = None
    """For data with an order of its own (a stream, a loader of the user): from a 0-based step on, this process's micro-batches
    of each step with their number of targets. `train` is then used for its length only; finding the place of a resume is up to it."""
    where: "Callable[[int], str] | None" = None
    """Names the source of a training sample: its file, or file and row."""
    large_files: Mapping[Path, str] = field(default_factory=dict)
    """SHA-256 by path of files too large to be verified beforehand: the loop verifies them while it trains."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of what else decides the result (code, structure), by name; a resume says which have changed."""

    def add_notes(self, notes: Sequence[str]) -> None:
        """Add sentences for the plan and the report to `facts["notes"]`, each once: a model may be built several times."""
        self.facts["notes"] = list(dict.fromkeys([*self.facts.get("notes", ()), *notes]))


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation, beside the mean loss."""

    metrics: dict[str, float]
    """Names and numbers: for metrics.jsonl, progress, trackers, and `evaluate.metric_for_best_model`."""
    details: dict[str, Any] = field(default_factory=dict)
    """Plain JSON values for evaluation.json and report.html: a classification report, a confusion matrix."""


class Task(ABC):
    """Base of all tasks: `load_data`, `build_model` and `loss_sum` have to be written; the other methods have defaults.

    `load_data` is called first, once: it keeps in `self` what `loss_sum` needs of recipe and data. A class that is not
    derived from this one is a task, too, if it has all of these methods.

    The class that defines `loss_sum` or `evaluate_batch` may set `loss_is_by_position = True`: what they sum up depends on each
    position's logits and label alone. Then sequences may be split over processes (`parallel.sp_size`). A task may set
    `metric_names = (...)`, the names that its `score` reports beside the loss; else a few samples are evaluated before the first
    step, where `evaluate.metric_for_best_model` is not the loss.
    """

    @abstractmethod
    def load_data(self, recipe: "Recipe", *, progress: bool) -> TaskData:
        """Read the data. Called on every process; a user's mistake is a ValueError."""

    @abstractmethod
    def build_model(self, recipe: "Recipe", data: TaskData) -> "torch.nn.Module":
        """Build the model on the CPU, in fp32, with the same weights on every process (the seed is set)."""

    def choices(self, recipe: "Recipe", model: "torch.nn.Module") -> "dict[str, Choice[Any]]":
        """Return what the task chooses for the user once the model is there, by setting; by default nothing. A run and its plan print it."""
        return {}

    @abstractmethod
    def loss_sum(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Compute the loss of a micro-batch, summed (not averaged) over its targets, fp32, 0-dim."""

    def flops_per_target(self, recipe: "Recipe", model: "torch.nn.Module") -> float | None:
        """Count floating-point operations of forward and backward per target; None, the default, where they are unknown."""
        return None

    def evaluate_batch(
        self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]"
    ) -> "dict[str, torch.Tensor]":
        """Count what an evaluation needs of a batch, on the device, by name: `loss_sum` (0-dim, the default) and whatever adds up.

        Tensors of one name are summed over batches and processes (counts as integers, so that sums are exact; floating-point
        ones in fp64), and memory stays flat. A name that begins with `rows_` is kept instead, one row a sample, in the order
        of the samples: that costs host memory, for figures that no sums can give (rank correlation).
        """
        return {"loss_sum": self.loss_sum(model, batch)}

    def score(self, loss: float, totals: "Mapping[str, NDArray[Any]]", data: TaskData) -> Scores:
        """Compute the metrics that follow from the mean evaluation loss and from what `evaluate_batch` counted; by default none."""
        return Scores({})

    def predict_batch(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Predict what `accel-train predict` writes for each sample of a batch, by column: tensors with a row a sample.

        `label` (an index into `data.source.label_names`, where there are such), `score`, `scores` (one for each class, in
        their order) ...; empty, the default, for a task that predicts nothing for a sample.
        """
        return {}

    def prediction_columns(self, rows: "Mapping[str, NDArray[Any]]", data: TaskData) -> dict[str, list[Any]]:
        """Return the table of predictions, without `id`, by column: plain values, one for each sample number in `rows["index"]`.

        `rows` hold what `predict_batch` returned. Empty, the default, where its names (`label`, `score`, ...) say it all.
        """
        return {}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Compute figures that a trained model should beat, named as in `score` with a prefix; by default none."""
        return {}

    def save_description(self, model: "torch.nn.Module", data: TaskData, folder: Path) -> None:
        """Write what loading the model needs beside its weights: it goes into each checkpoint.

        By default the configuration of a transformers model; most tasks add a tokenizer or an image processor.
        """
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            model.config.save_pretrained(folder)

    def save(self, model: "torch.nn.Module", data: TaskData, folder: Path) -> None:
        """Write the trained model into a folder that others can load: weights (safetensors) and description."""
        from safetensors.torch import save_model
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            model.save_pretrained(folder)
        else:
            save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        self.save_description(model, data, folder)

    def sample(self, recipe: "Recipe", model: "torch.nn.Module", data: TaskData) -> dict[str, Any] | None:
        """Make something to look at after training, as `prompt` and `text`; by default None."""
        return None


def load_task(name: str) -> Task:
    """Return the task a recipe names: one of the package, or `module:Class`, looked up on PYTHONPATH and last in the current folder.

    Raises:
        ValueError: no such task, module or class, or one that lacks a method of `Task`.
    """
    target = TASKS.get(name, name)
    if ":" not in target:
        hint = did_you_mean(name, TASKS, f"there are {', '.join(sorted(TASKS))}", show=repr)
        raise ValueError(f"task={name!r} is no task of accel_train; {hint} A custom task is written module:Class")
    found = load_class("task", target, "accel_train.task.Task")
    methods = [name for name in vars(Task) if not name.startswith("_")]
    abstract = sorted(getattr(found, "__abstractmethods__", ()))
    missing = abstract or [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise ValueError(
            f"task={name!r} lacks {', '.join(missing)}; see accel_train.task.Task, the base class with defaults for most methods"
        )
    try:
        task: Task = found()
    except TypeError as error:
        raise ValueError(
            f"task={name!r} cannot be made without arguments: {error}; a task is made by {found.__name__}()"
        ) from error
    return task


def load_class(setting: str, name: str, base: str) -> type[Any]:
    """Return the class that a setting names as `module:Class`, looked up on PYTHONPATH and last in the current folder.

    Raises:
        ValueError: there is none; the text says what to derive one from, `base`.
    """
    module_name, class_name = name.split(":", 1)
    # Not for an installed module: its optional imports would be looked up in the current folder as well.
    if not _places(module_name.partition(".")[0], sys.path):
        _see_current_folder()
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:  # of an empty name, a ValueError
        raise ValueError(
            f"{setting}={name!r} cannot be imported: {error}; it is looked up on PYTHONPATH and in the current folder as module:Class"
        ) from error
    if not isinstance(found, type):
        raise ValueError(
            f"{setting}={name!r} is {_kind(found)} and no class; name a class derived from {base}, as module:Class"
        )
    return found


def prove_forward(task: Task, recipe: "Recipe") -> "dict[str, Choice[Any]]":
    """Return what a task proves of its forward before data is read; nothing unless it has a method `prove`.

    Raises:
        ValueError: a setting changes what the model computes; the text names the setting and the fix.
    """
    prove = getattr(task, "prove", None)
    return {} if prove is None else prove(recipe)


def read_data(task: Task, recipe: "Recipe", *, progress: bool) -> TaskData:
    """Return what the task's `load_data` reads.

    Raises:
        ValueError: it is no TaskData with training samples; and whatever `load_data` itself raises.
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
    """Return the kind of a value, in words."""
    if found is None or isinstance(found, type):
        return str(found)
    kind = type(found).__name__
    return f"a {kind}" if kind in ("function", "module") else f"an object of {kind}"


def _see_current_folder() -> None:
    """Put the current folder on the path: the installed command does not have it there, `python -m` does."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))  # at the end, where it hides no package


def refuse_code_of_a_run(setting: str, name: str, folder: Path) -> None:
    """Refuse a class that a run's recipe names, unless its module is one that the reader has installed.

    An installed module is found without the current folder: a package, or one on an absolute path of PYTHONPATH.

    Raises:
        ValueError: names the file to read, and the flag that allows it.
    """
    package = name.partition(":")[0].partition(".")[0]
    if ":" not in name or not package:
        return
    path, here = sys.path, Path.cwd()
    own = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]
    installed = [place for place in path if place in own or (os.path.isabs(place) and Path(place).resolve() != here)]
    places, trusted = _places(package, [*path, str(here)]), _places(package, installed)
    if any(place.is_relative_to(folder.resolve()) for place in places) or places != trusted:
        raise ValueError(
            f"{setting}={name!r} of {folder} would run {places[0]}, which is not installed. "
            f"It may have come with the run: read it, and add --{setting} {quote(name)} if you trust it."
        )


def _places(package: str, path: list[str]) -> list[Path]:
    """Return the files and folders that importing a package from this path would read; empty if it is not found."""
    before, sys.path = sys.path, path
    try:
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    except (ImportError, ValueError):
        return []  # load_class reports it
    finally:
        sys.path = before
    return [Path(place).resolve() for place in places if place is not None]
