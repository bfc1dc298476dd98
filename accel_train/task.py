"""Tasks: the data, model, loss, and scores of a training. The loop only uses the interface `Task`.

A custom task is one file with a class derived from `Task` and three methods, without registration. The recipe names it
by `task: my_module:MyTask`. It is looked up on PYTHONPATH, and then in the current folder.
"""

import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeGuard, cast

from pydantic import BaseModel, ValidationError

from accel_train.buckets.files import fetch_files
from accel_train.core.errors import SettingError
from accel_train.core.model_card import FILE, OF_TENSORS, Use, new_card, of_transformers
from accel_train.core.state import JsonRecord
from accel_train.recipe.data import Data, OwnData, listed, renamed
from accel_train.recipe.tasks import TASKS, check_task
from accel_train.recipe.tasks import TaskSpec as TaskSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch.utils.data import Dataset
    from transformers import PreTrainedModel

    from accel_train.core.state import Choice
    from accel_train.data.order import DataOrder
    from accel_train.data.text.shards import ShardedWindows
    from accel_train.engine.step import Counted
    from accel_train.model.kernels.global_loss import GlobalLoss
    from accel_train.recipe.schema import Recipe


def is_of_transformers(model: object) -> "TypeGuard[PreTrainedModel]":
    """Return whether a model is one of transformers. For any other model, transformers is not imported."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def rate_name(targets: str) -> str:
    """Return the name under which the rate of targets is logged, for example `tokens_per_second`.

    If a target is a whole sample, it is the rate of samples.
    """
    return "samples_per_second" if targets in ("samples", "images") else f"{targets}_per_second"


def target_rate(record: Mapping[str, Any]) -> Any:
    """Return the rate of targets in a line of metrics.jsonl or a summary, under any of its names; None if missing."""
    names = map(rate_name, ("tokens", "pixels", "words", "targets", "samples"))
    return next((record[name] for name in names if isinstance(record.get(name), int | float)), None)


Collated: TypeAlias = dict[str, Any]
"""Collated samples on the host: tensors by name, and `num_targets`."""
Collate: TypeAlias = Callable[[Sequence[Any]], Collated]
"""Function from samples to a micro-batch."""
Batch: TypeAlias = "Mapping[str, torch.Tensor]"
"""Collated samples: tensors by name, on the device."""
Tensors: TypeAlias = "dict[str, torch.Tensor]"
"""Results for a batch, by name, on the device."""
Totals: TypeAlias = "Mapping[str, NDArray[Any]]"
"""Results for all batches of an evaluation or a prediction, by name, on the host."""
FirstFingerprint: TypeAlias = str | Callable[[], str]
"""Fingerprint of data in an earlier format of checkpoints, or a function that computes it if it is needed."""
Columns: TypeAlias = dict[str, list[Any]]
"""A table of plain Python values, by column."""

_OF_SPEC = ("Data", "loss_is_by_position", "loss_is_global", "evaluates_untrained")
"""Attributes that a task had before its `spec`."""


class Facts(BaseModel, extra="forbid"):
    """Facts that a task found in its data, for the plan, the report, and the card. An unset fact is not known.

    A file of a run contains exactly the facts that are set.
    """

    sources: str | None = None
    """Names of the files and data sets."""
    num_documents: int | None = None
    """Documents, with those held out but without empty ones."""
    num_empty_documents: int = 0
    num_eval_documents: int = 0
    num_train: int | None = None
    num_eval: int | None = None
    train_tokens: int | None = None
    eval_tokens: int | None = None
    train_bytes: int | None = None
    eval_bytes: int | None = None
    """Bytes of the held-out text. None: the source holds tokens."""
    eval_sets: dict[str, dict[str, int]] = {}
    """Facts of each set that `data.eval` names, by their names here: `num_eval`, and `eval_tokens`, `eval_bytes`."""
    train_targets: int = 0
    """Labels in an epoch."""
    unigram_bits_per_byte: float | None = None
    """Loss of the training token frequencies on the evaluation targets, without context."""
    xz_bits_per_byte: float | None = None
    """Compressed size of the evaluation text, or of its first 8 MB."""
    unigram_perplexity: float | None = None
    """Perplexity of the evaluation targets under add-one frequencies of the training targets."""
    positions_per_target: float | None = None
    """Computed positions per label. Only for fine-tuning rows."""
    label_names: list[str] | None = None
    """Names of the classes in the order of their ids."""
    num_train_of_label: dict[str, int] = {}
    """Training samples by class. Empty: a regression, or no classes."""
    problem_type: str | None = None
    """Kind of the labels, with the reason."""
    max_length: int = 0
    """Maximum tokens of a sample, or of a source text. Longer ones are cut."""
    mean_length: float | None = None
    cache_folder: str | None = None
    """Folder of the token shards."""
    reused: bool = False
    """Whether the token shards were built by an earlier run."""
    others: JsonRecord = {}
    """Facts of this task alone, as plain JSON values by name. Files contain them next to the other facts."""
    notes: list[str] = []
    """Sentences for the plan and the report."""

    def record(self) -> JsonRecord:
        """Return the facts that are set as plain JSON values, by name."""
        return self.model_dump(exclude_unset=True, exclude={"others"}) | self.others


@dataclass(frozen=True)
class TaskData:
    """The data of a task: map-style data sets, and a function that collates samples into a micro-batch."""

    train: "Dataset[Any]"
    eval: "Dataset[Any] | None"
    """Evaluation data. With named sets in `data.eval`, a `ConcatDataset` with a part for each set, if `source` does not
    tell the file of each sample.
    """
    collate: Collate
    """Function from samples to tensors by name, with `num_targets`: the int that divides the loss sum (its number of
    targets).
    """
    fingerprint: str
    """Digest that changes when the content of the data changes. A checkpoint resumes only with the same data."""
    facts: Facts = field(default_factory=Facts)
    reading_is_free: bool = False
    """Whether reading a sample takes only microseconds (memory-mapped tokens). Processes that read ahead would then
    only cost.
    """
    source: Any = None
    """Any other object that the task keeps (a tokenizer, label names)."""
    draw: "Callable[[int, np.random.Generator], Any] | None" = None
    """Function that draws a training sample with its augmentation: (index, generator) -> sample. Default:
    `train[index]`. The generator is seeded by (seed, epoch, index), so the draw does not depend on workers or the
    number of processes.
    """
    seeds_reading: bool = False
    """Whether samples or `collate` use the process's random generators. They are then seeded before each micro-batch.
    """
    max_broken: int = 0
    """Number of different training samples that may fail with DataError."""
    lengths: "NDArray[np.int64] | None" = None
    """Number of tokens of each training sample, required by `data.group_by_length`."""
    lengths_vary: bool = False
    """Whether micro-batches have different lengths. `precision.compile` then compiles for any length from the start."""
    step_batches: "Callable[[int], Iterator[list[tuple[Collated, int]]]] | None" = None
    """Function for data with a fixed order (a stream, a user's loader). From a 0-based step on, it yields this
    process's micro-batches of each step with their number of targets. `train` is then used only for its length. The
    function must find the position for a resume.
    """
    samples_of: "Sequence[NDArray[np.int64] | range]" = ()
    """Numbers of the training samples of each source in `data.train`, in its order. Weighted sources need them, or
    `where`.
    """
    shards: "ShardedWindows | None" = None
    """Text that is tokenized when it is read. Its samples are numbered by shard, and their count is an estimate."""
    where: "Callable[[int], str] | None" = None
    """Function that names the source of a training sample: its file, or file and row."""
    large_files: Mapping[Path, str | Path] = field(default_factory=dict)
    """SHA-256 by path of files that are too large to verify before training. The loop verifies them during training.
    A path in place of a digest names the file that keeps it: the first run that reads all of the data writes it.
    """
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests by name of other inputs that determine the result (code, structure). A resume reports which have changed.
    """
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Resolved settings that determine the samples, by dotted name, as plain JSON values without defaults. A checkpoint
    resumes only with equal values. Settings do not belong in `fingerprint`, which can only say that data have changed.
    """
    unread: dict[str, str] = field(default_factory=dict)
    """Settings that have no effect on these data, by dotted name, each with the reason. A training refuses them."""
    first_fingerprint: FirstFingerprint = ""
    """Fingerprint of the same data in the first format of checkpoints, which hashed settings, or of copied token files;
    empty if it is equal. A function computes it only for a checkpoint whose fingerprint differs.
    """

    def add_notes(self, notes: Sequence[str]) -> None:
        """Add sentences for the plan and the report to `facts.notes`, without duplicates.

        A model may be built several times.
        """
        self.facts.notes = list(dict.fromkeys([*self.facts.notes, *notes]))


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation, in addition to the mean loss."""

    metrics: dict[str, float]
    """Numbers by name, for metrics.jsonl, progress, trackers, and `evaluate.metric_for_best_model`."""
    details: JsonRecord = field(default_factory=dict)
    """Plain JSON values for evaluation.json and report.html: a classification report, a confusion matrix."""


class Training(NamedTuple):
    """Order, learning rates, and number of steps of a training, for `Task.calibrate`."""

    order: "DataOrder"
    rate: "Callable[[int], float | Sequence[float]]"
    """Function that returns the learning rate of a 0-based step."""
    steps: int
    """Steps until the weights that are kept."""


class Task(ABC):
    """Base class of all tasks, with the methods that the loop, evaluation, and prediction call.

    Subclasses must define `load_data`, `build_model`, and `loss_sum`. The other methods have defaults. `load_data` is
    called first, once. It stores in `self` the parts of recipe and data that `loss_sum` needs.
    """

    spec: ClassVar[TaskSpec] = TaskSpec()
    """Description of the task. A class derived from another task has that task's spec."""
    metric_names: Sequence[str] | None = None
    """Names that `score` reports for this data, in addition to the loss. None: a few samples are evaluated before the
    first step if `evaluate.metric_for_best_model` is not the loss.
    """
    spare_bytes: int = 0
    """Bytes of the device that a step leaves free by its estimate. A loss in chunks may use them."""
    global_loss: "GlobalLoss[Any] | None" = None
    """Loss over the global batch. None for a loss that is a sum over samples."""
    counted: "Counted | None" = None
    """Numbers that `loss_sum` counts in a step in addition to the loss."""
    counts_sources: ClassVar[bool] = False
    """Whether `loss_sum` adds the losses of the sources of a mixture, and then their numbers of targets, to `counted`.
    Meanwhile, `counted.sources` has the number of the source of each label, (N, T), or of each sample, (N,).
    """
    loss_is_per_batch: bool | None = None
    """Whether a loss that is not a mean over samples is accepted. None: the loss is a sum by construction, and is not
    tried before the first step.
    """

    def prove(self, recipe: "Recipe") -> "dict[str, Choice[Any]]":
        """Check the forward of the recipe's model before data is read, and return what was found; by default nothing.

        Raises:
            ValueError: a setting changes the result of the model. The message names the setting and the fix.
        """
        return {}

    @abstractmethod
    def load_data(self, recipe: "Recipe", *, progress: bool) -> TaskData:
        """Read the data on every process; return it. Raise ValueError for a mistake of the user."""

    @abstractmethod
    def build_model(self, recipe: "Recipe", data: TaskData) -> "torch.nn.Module":
        """Build the model on the CPU, in fp32, with the same weights on every process (the seed is set)."""

    def choices(self, recipe: "Recipe", model: "torch.nn.Module") -> "dict[str, Choice[Any]]":
        """Return the task's choices for a built model, by setting; by default none. A run and its plan print them."""
        return {}

    @abstractmethod
    def loss_sum(self, model: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """Compute the loss of a micro-batch, summed (not averaged) over its targets, fp32, 0-dim."""

    def loss_without_values(self, model: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """Compute a loss of the same size in memory that reads no values, for tensors that have a shape only."""
        return self.loss_sum(model, batch)

    def exportable(self, model: "torch.nn.Module") -> "torch.nn.Module":
        """Return the module whose outputs an exported graph has."""
        return model

    def export_batch(self, batch: Batch) -> Batch:
        """Return a batch of samples as `exportable` takes it, with tensors that it may ignore."""
        return batch

    def stand_in_data(self, recipe: "Recipe", num_samples: int) -> TaskData | None:
        """Return data of the recipe's size that reads nothing, for a plan; None, the default, if data decides sizes."""
        return None

    def flops_per_target(self, recipe: "Recipe", model: "torch.nn.Module") -> float | None:
        """Return the floating-point operations of forward and backward per target; None, the default, if unknown."""
        return None

    def evaluate_batch(self, model: "torch.nn.Module", batch: Batch) -> Tensors:
        """Compute the sums of a batch that an evaluation needs, on the device, by name; default: `loss_sum` (0-dim).

        Tensors with the same name are summed over batches and processes, so memory stays constant. Counts are summed as
        integers, so sums are exact. Floating-point tensors are summed in fp64.

        A name that begins with `rows_` is kept instead, one row per sample, in the order of the samples. This costs
        host memory. It is for metrics that sums cannot give (rank correlation). `rows_index` is reserved: `score` gets
        the numbers of the samples there.
        """
        return {"loss_sum": self.loss_sum(model, batch)}

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Compute metrics from the mean evaluation loss and from the sums of `evaluate_batch`; by default none."""
        return Scores({})

    def predict_batch(self, model: "torch.nn.Module", batch: Batch) -> Tensors:
        """Return the predictions for each sample of a batch, by column, as tensors with one row per sample.

        `accel-train predict` writes them. Columns are `label` (an index into `data.source.label_names`, if these
        exist), `score`, `scores` (one per class, in their order), and others. The default is empty, for a task without
        predictions per sample.
        """
        return {}

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return the table of predictions by column, without `id`: one value per sample number in `rows["index"]`.

        `rows` hold the results of `predict_batch`. Values are plain Python values. The default is empty, for names that
        need no conversion (`label`, `score`, ...).
        """
        return {}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Compute metrics that a trained model should beat, named as in `score` with a prefix; by default none."""
        return {}

    def save_description(self, model: "torch.nn.Module", data: TaskData, folder: Path) -> None:
        """Write the files that loading the model needs in addition to its weights. Each checkpoint contains them.

        The default writes the configuration of a transformers model, and the model card. Most tasks add a tokenizer or
        an image processor.
        """
        title, library = type(model).__name__, ""
        kind = title
        if is_of_transformers(model):
            model.config.save_pretrained(folder)
            kind, library = model.config.model_type, self.spec.library
        spec, facts = self.spec, data.facts
        about = self.use(model, data), facts.sources, facts.num_train, facts.num_eval
        card = new_card(title, kind, spec.learns, *about, library, spec.pipeline, spec.tags)
        (folder / FILE).write_text(str(card), encoding="utf-8", errors="backslashreplace")

    def use(self, model: "torch.nn.Module", data: TaskData) -> Use:
        """Return the code for the model card, and facts on the model. The default code loads the model."""
        name, module = type(model).__name__, type(model).__module__
        if not is_of_transformers(model) or (module == "__main__" and not self.spec.auto):
            return Use(OF_TENSORS)
        is_own = not module.startswith("transformers.")
        if self.spec.auto or not is_own:
            name, module = self.spec.auto or name, "transformers"
        return Use(of_transformers(name, module, ", trust_remote_code=True" if is_own and self.spec.auto else ""))

    def save(self, model: "torch.nn.Module", data: TaskData, folder: Path) -> None:
        """Write the trained model into a folder that others can load: weights (safetensors) and description."""
        from safetensors.torch import save_model

        if is_of_transformers(model):
            model.save_pretrained(folder)
        else:
            save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        self.save_description(model, data, folder)

    def calibrate(
        self, recipe: "Recipe", model: "torch.nn.Module", data: TaskData, training: Training
    ) -> tuple[JsonRecord, str] | None:
        """Return settings of the model's configuration that make its scores true shares, with a sentence; default None.

        The main process calls it after the last step, and evaluates afterwards. All processes set the same values.
        """
        return None

    def sample(self, recipe: "Recipe", model: "torch.nn.Module", data: TaskData) -> JsonRecord | None:
        """Return a sample of the trained model's output, as `prompt` and `text`; by default None."""
        return None


def load_task(name: str) -> Task:
    """Return the task that a recipe names: a built-in one, or `module:Class` from PYTHONPATH or the current folder.

    Raises:
        ValueError: the task, module, or class does not exist, or lacks a method of `Task`.
    """
    check_task(name)
    target = TASKS[name].where if name in TASKS else name
    found = load_class("task", target, "accel_train.task.Task")
    if old := [name for name in _OF_SPEC if hasattr(found, name)]:
        raise ValueError(f"task={name!r} sets {', '.join(old)}. Set it in its description: spec = TaskSpec(...)")
    if not issubclass(found, Task):
        raise ValueError(f"task={name!r} is not derived from accel_train.task.Task. Derive it, and add its methods.")
    methods = [name for name, value in vars(Task).items() if callable(value) and not name.startswith("_")]
    missing = sorted(found.__abstractmethods__) or [each for each in methods if not callable(getattr(found, each))]
    if missing:
        raise ValueError(
            f"task={name!r} lacks {', '.join(missing)}. Derive it from accel_train.task.Task, which has defaults for "
            "most methods."
        )
    try:
        task: Task = found()
    except TypeError as error:
        raise ValueError(
            f"task={name!r} cannot be created without arguments: {error}. accel_train calls {found.__name__}()."
        ) from error
    return task


def with_data_of(task: Task, recipe: "Recipe") -> "Recipe":
    """Return the recipe with its `data` as the class that the task declares.

    Only a custom task changes anything: its settings are unknown until the task is loaded.

    Raises:
        SettingError: the task has no such setting, or its class does not take the value.
    """
    kind = task.spec.data
    if isinstance(recipe.data, kind) and type(recipe.data) is not OwnData:
        return recipe
    try:
        data = kind.model_validate(recipe.data.model_dump(exclude_unset=True)).shown_as(recipe.data.train_key)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(["data", *map(str, problem["loc"])])
        own = ", ".join(name for name in kind.model_fields if name not in Data.model_fields)
        unknown = f"task {recipe.task} has {f'the settings {own}' if own else 'only the settings of all tasks'}"
        raise SettingError(
            unknown if problem["type"] == "extra_forbidden" else problem["msg"],
            "correct it, or leave it out",
            at=f"{name}={problem['input']!r} ({recipe.origin(name)})",
            settings=(name,),
        ) from error
    return recipe.model_copy(update={"data": data})


def load_class(setting: str, name: str, base: str) -> type[Any]:
    """Return the class that a setting names as `module:Class`, from PYTHONPATH or, last, the current folder.

    Raises:
        ValueError: the class does not exist. The message names `base`, the class to derive from.
    """
    found = _load(setting, name, "Class")
    if not isinstance(found, type):
        raise ValueError(
            f"{setting}={name!r} is {_kind(found)}, not a class. Name a class derived from {base}, as module:Class."
        )
    return found


def load_function(setting: str, name: str, form: str) -> Callable[..., Any]:
    """Return the function that a setting names as `module:function`, looked up as `load_class` does.

    Raises:
        ValueError: the function does not exist. The message shows its `form`, such as `(t, span)`.
    """
    found: Any = _load(setting, name, "function")
    if not callable(found):
        raise ValueError(f"{setting}={name!r} is {_kind(found)}. Name a function of {form}, as module:function.")
    return found


def _load(setting: str, name: str, kind: str) -> object:
    module_name, own_name = name.split(":", 1)
    # `python -m` has the current folder on the path, but the installed command does not. At the end of the path, it
    # cannot hide a package. Do this only for a module that is not installed. Optional imports of an installed one would
    # also be looked up there.
    if not _places(module_name.partition(".")[0], sys.path) and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), own_name)
    # An empty name raises ValueError.
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{setting}={name!r} cannot be imported: {error}. Put its module on PYTHONPATH or in the current "
            f"folder, and name it as module:{kind}."
        ) from error


def read_data(task: Task, recipe: "Recipe", *, progress: bool) -> TaskData:
    """Return the data that the task's `load_data` reads.

    Raises:
        ValueError: the result is not a TaskData with training samples. Errors of `load_data` pass through.
    """
    # Text is read by ranges, or fetched once its size is known.
    kept = recipe.data.train_names if recipe.data.window else ()
    data_here = renamed(recipe.data, lambda name: name if name in kept else fetch_files(name))
    local = recipe.model_copy(update={"data": data_here})
    data: Any = task.load_data(local, progress=progress)
    wanted = "return an accel_train.task.TaskData with train, eval, collate and fingerprint"
    if not isinstance(data, TaskData):
        raise ValueError(f"load_data of task={recipe.task!r} returned {_kind(data)}; {wanted}")
    for name, samples in (("train", data.train), ("eval", data.eval)):
        if not hasattr(samples, "__len__") and not (name == "eval" and samples is None):
            raise ValueError(
                f"load_data of task={recipe.task!r} returned {_kind(samples)} for {name}, which has no length; "
                f"{wanted}, whose samples have __len__ and __getitem__"
            )
    if not isinstance(data.facts, Facts):
        raise ValueError(
            f"load_data of task={recipe.task!r} returned {_kind(data.facts)} for facts; return an "
            "accel_train.task.Facts, with the task's own in others"
        )
    if sets := recipe.data.eval_sets:
        counts = _counts_of_sets(data, sets)
        if 0 in counts or sum(counts) != len(cast("Sized", data.eval)):
            problem = f"the sets {', '.join(sets)} have {', '.join(map(str, counts))} samples of their own"
            raise SettingError(problem, "Give each set other files", "data.eval", ("data.eval",))
        known = data.facts.eval_sets
        data.facts.eval_sets = {name: known.get(name, {}) | {"num_eval": count} for name, count in zip(sets, counts)}
    return data


def _counts_of_sets(data: TaskData, sets: Mapping[str, Any]) -> Sequence[int]:
    """Return the number of evaluation samples of each set. Without parts, the files of samples tell their sets."""
    samples: Any = data.eval
    parts = getattr(samples, "datasets", [samples])
    if len(parts) == len(sets):
        return [*map(len, parts)]
    images = getattr(data.source, "sets", None)
    if images and images.eval_counts:
        return [*images.eval_counts]
    wheres = [row.where for row in getattr(data.source, "evaluated", ())]
    wheres += map(images.eval.where, range(len(samples))) if images else []
    counts = []
    for names in sets.values():
        paths = [
            path for name in map(os.path.expanduser, listed(names)) for path in glob(name, recursive=True) or [name]
        ]
        starts = tuple(f"{Path(path)}{end}" for path in paths for end in "/:, ")
        counts.append(sum(where.startswith(starts) for where in wheres))
    return counts


def _kind(found: Any) -> str:
    """Return the kind of a value, in words."""
    if found is None or isinstance(found, type):
        return str(found)
    kind = type(found).__name__
    return f"a {kind}" if kind in ("function", "module") else f"an object of {kind}"


def untrusted_place(name: str, folder: Path, *, is_of_a_run: bool = True) -> Path | None:
    """Return the file or folder that code named by a run's recipe would run, unless the reader of the run installed it.

    An installed module is found without the current folder: a package, or a module on an absolute path of PYTHONPATH.
    A recipe outside of a run folder may name other modules, but not below its own `folder`.
    """
    package = name.partition(":")[0].partition(".")[0]
    if ":" not in name or not package:
        return None
    path, here = sys.path, Path.cwd()
    own = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]
    installed = [place for place in path if place in own or (os.path.isabs(place) and Path(place).resolve() != here)]
    places, trusted = _places(package, [*path, str(here)]), _places(package, installed)
    is_below = any(place.is_relative_to(folder.resolve()) for place in places)
    is_refused = (is_below or places != trusted) if is_of_a_run else (is_below and places != trusted)
    return places[0] if is_refused else None


def _places(package: str, path: list[str]) -> list[Path]:
    """Return the files and folders that importing a package from this path would read; empty if it is not found."""
    before, sys.path = sys.path, path
    try:
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    except (ImportError, ValueError):
        # load_class reports the error.
        return []
    finally:
        sys.path = before
    return [Path(place).resolve() for place in places if place is not None]
