"""Train any `nn.Module` as a task, from its data, model, and loss."""

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from accel_train.core.errors import RecipeError, SettingError
from accel_train.core.json_io import json_digest
from accel_train.data.digest import digest_of_code, digest_of_data, digest_of_module
from accel_train.model.tensors import as_tensors
from accel_train.recipe.data import Data
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import TaskSpec
from accel_train.task import Batch, Collated, Facts, Scores, Task, TaskData, Tensors, Totals

_SAMPLES, _STRUCTURE = "samples", "structure"
"""Keys of a batch: one row per sample, and the nested structure that `collate` returned."""
_Batching: TypeAlias = "tuple[Callable[[Sequence[Any]], Any] | None, Callable[[Any], int | None] | None]"
"""Functions that collate samples, and that count the targets of a batch. None: the defaults."""
_LEFT: "WeakKeyDictionary[nn.Module, tuple[str, str]]" = WeakKeyDictionary()
"""Digests of modules that this process has fitted: as given to `fit`, and as the run left them."""


class ModuleTask(Task):
    """A task that is defined by three methods: `data`, `model`, and `loss`.

    `batch` is the result of `collate` on the device, nested or not. With the default `collate`, samples `(x, y)` give a
    list of two tensors, mappings give a mapping, and tensors give one tensor. All methods can read `self.recipe`.
    """

    recipe: Recipe

    @abstractmethod
    def data(self) -> "tuple[Dataset[Any], Dataset[Any] | None]":
        """Return the training data and the evaluation data, or None to skip evaluations.

        Both have `__len__` and `__getitem__`.
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU in fp32. The seed is set before the call."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss: one number per sample (N,), or their mean as a 0-dim tensor.

        With `count_targets`, return the sum over all targets (0-dim), or one number per target (any shape).
        """

    loss_is_per_batch = False
    """Whether each micro-batch's loss counts as it is, although it is not a mean over samples.

    Training then depends on the number of processes and micro-batches. Otherwise, a run with several refuses such a
    loss.
    """

    def count_targets(self, batch: Any) -> int | None:
        """Return the number of targets in a batch on the host, for a mean over targets, such as tokens with a label.

        The loss of a step is the sum over all its targets, divided by their number. None, the default, counts samples.
        """
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Tensors:
        """Return further evaluation metrics by name, shaped like `loss` and averaged over all samples."""
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Return a batch of `samples`. The default is the collation of torch's DataLoader."""
        return default_collate(list(samples))

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Return the result of `data`, with a digest of its size and of some of its samples.

        Raises:
            ValueError: the training data has no samples.
        """
        self.recipe = recipe
        train, evaluation = self.data()
        for name, given in (("train_data", train), ("eval_data", evaluation)):
            is_stream = isinstance(given, IterableDataset) or not hasattr(given, "__len__")
            if given is not None and (is_stream or not hasattr(given, "__getitem__")):
                raise SettingError(
                    "samples are read by index, with __len__ and __getitem__, but it is a stream",
                    "Train with accel_train.Trainer, which reads streams, or with a recipe on jsonl, parquet, or tar "
                    "files, or put the samples in a list",
                    at=f"{name} of type {type(given).__name__}",
                    settings=(name,),
                )
        if not len(cast("Any", train)):
            raise ValueError("the training data are empty; give at least one sample")
        facts = Facts(num_train=len(cast("Any", train)), num_eval=len(cast("Any", evaluation or ())))
        digests = {}
        for name, data in (("training", train), ("evaluation", evaluation or ())):
            digests[name], is_stable = digest_of_data(data)
            if not is_stable:
                note = f"{name} data differ from read to read: a resume compares their number, not their content"
                facts.notes = [*facts.notes, note]
        return TaskData(
            train,
            evaluation,
            _Named(self._batching()),
            fingerprint=json_digest(digests),
            inputs={f"{name} data": digest for name, digest in digests.items()} | self.code(),
            facts=facts,
            seeds_reading=True,
        )

    def code(self) -> dict[str, str]:
        """Return digests, by name, of code that affects the result. A run always digests the task's class."""
        return {}

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Return `model()`, with the weights of a finished run if the recipe names its folder."""
        model = self.model()
        if recipe.model.pretrained is not None and not any(weight.is_meta for weight in model.parameters()):
            with as_tensors(model):
                load_model(model, Path(recipe.model.pretrained) / "model.safetensors")
        return model

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 loss summed over the samples, or over the targets that `count_targets` counts."""
        loss = self.loss(model, self._given(batch))
        if self._batching()[1] is not None and isinstance(loss, Tensor):
            return loss.float().sum()
        return _summed(loss, len(batch[_SAMPLES]), "loss")

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the loss and the metrics, summed over the samples."""
        samples = batch[_SAMPLES]
        found = self.metrics(model, self._given(batch))
        sums = {name: _summed(value, len(samples), f"metric {name}").double() for name, value in found.items()}
        size = torch.tensor(len(samples), device=samples.device)
        return {"loss_sum": self.loss_sum(model, batch), **sums, "num_samples": size}

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return the mean of each metric over all samples."""
        number = max(int(totals["num_samples"]), 1)
        others = ("num_samples", "loss_sum", "num_targets")
        return Scores({name: float(total) / number for name, total in totals.items() if name not in others})

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration of a transformers model, or the class name. `config.json` marks a finished run."""
        super().save_description(model, data, folder)
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text(json.dumps({"module": type(model).__qualname__}) + "\n")

    def _batching(self) -> "_Batching":
        """Return the functions of `_Named`. None for each method that is not overridden, so that it is not pickled."""
        kind = type(self)
        return (
            None if kind.collate is ModuleTask.collate else self.collate,
            None if kind.count_targets is ModuleTask.count_targets else self.count_targets,
        )

    def _given(self, batch: Mapping[str, Any]) -> Any:
        """Return the batch in the structure that `collate` returned."""
        structure, samples = batch.get(_STRUCTURE), batch[_SAMPLES]
        # A batch of an incident keeps only tensors.
        if structure is None:
            example = _Named(self._batching())([cast("Any", self.data()[0])[0]] * len(samples))
            structure = example[_STRUCTURE]
            if {name for name, value in example.items() if isinstance(value, Tensor)} != batch.keys():
                raise ValueError("this micro-batch has another structure than a batch of the first training sample")

        def put(leaf: Any, name: str) -> Any:
            if isinstance(leaf, _Name):
                return batch[leaf]
            return leaf.to(samples.device) if hasattr(leaf, "to") else leaf

        return _mapped(structure.tree, put)


class FitData(Data):
    """Settings of `data` for `fit`, which gets its samples from the program."""

    def unread(self) -> Mapping[str, str]:
        read = ("shuffle", "group_by_length", "last_batch", "num_workers", "pin_memory")
        names = Data.model_fields.keys() - {*read, *(("train",) if self.train == "custom" else ())}
        return dict.fromkeys(sorted(names), "the program's train_data and eval_data are used as they are")


class FittedModule(ModuleTask):
    """The task of `accel_train.fit`, made from a program's model, data, and functions."""

    spec = TaskSpec(data=FitData)

    def __init__(
        self,
        module: nn.Module | None = None,
        train: Any = None,
        evaluation: Any = None,
        functions: Mapping[str, Callable[..., Any] | None] | None = None,
        *,
        loss_is_per_batch: bool = False,
    ) -> None:
        if module is None:
            raise TypeError("it was trained by accel_train.fit(...) in a program; load model/model.safetensors there")
        self.module, self.train, self.evaluation = module, train, evaluation
        self.functions = {name: each for name, each in (functions or {}).items() if each is not None}
        self.loss_is_per_batch = loss_is_per_batch

    def data(self) -> "tuple[Dataset[Any], Dataset[Any] | None]":
        """Return the program's data."""
        return self.train, self.evaluation

    def model(self) -> nn.Module:
        """Return the program's module itself, so that training changes it. On the meta device, return a copy."""
        if torch.get_default_device().type == "meta":
            return copy.deepcopy(self.module).to("meta")
        return self.module

    def code(self) -> dict[str, str]:
        """Return digests of the functions and of the module as it was before an earlier `fit` trained it in place."""
        names = dict.fromkeys(("loss", "metrics", "collate", *self.functions))
        return {name: digest_of_code(self.functions.get(name)) for name in names} | {"model": self._as_given()}

    def _as_given(self) -> str:
        now = digest_of_module(self.module)
        given, left = _LEFT.get(self.module, ("", ""))
        return given if now == left else now

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Record the module's digests on exit, so that a later `fit` recognizes it. Training may have frozen it."""
        given = self._as_given()
        try:
            yield
        finally:
            _LEFT[self.module] = given, digest_of_module(self.module)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the result of the program's loss function."""
        return self.functions["loss"](model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Tensors:
        """Return the result of the program's metrics function, or nothing without one."""
        return self.functions["metrics"](model, batch) if "metrics" in self.functions else {}

    def _batching(self) -> "_Batching":
        return self.functions.get("collate"), self.functions.get("count_targets")


class _Named:
    """Collate that returns the tensors of a batch by name, with the structure that `ModuleTask._given` rebuilds.

    Processes that read ahead get it: it holds two functions, but not the task with its loss and model.
    """

    def __init__(self, batching: "_Batching") -> None:
        self.collate, self.count_targets = batching

    def __call__(self, samples: Sequence[Any]) -> Collated:
        tensors: Collated = {}

        def take(leaf: Any, name: str) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            while not name or name in (_SAMPLES, _STRUCTURE, "num_targets", *tensors):
                name += "_"
            tensors[name] = leaf
            return _Name(name)

        collated = default_collate(list(samples)) if self.collate is None else self.collate(samples)
        structure = _Structure(_mapped(collated, take))
        # Only `collate` decides on shapes (time first, nodes of all graphs), so a separate tensor carries the sample
        # count. It has 0 columns with a custom `collate`, because the sample dimension of the other tensors is then
        # unknown.
        rows = torch.zeros((len(samples),) if self.collate is None else (len(samples), 0), dtype=torch.uint8)
        count = len(samples) if self.count_targets is None else self.count_targets(collated)
        return {**tensors, _SAMPLES: rows, _STRUCTURE: structure, "num_targets": count}


class _Name(str):
    """The name of a tensor, in the tensor's place in a structure."""


class _Structure:
    """The nested batch of `collate` with names in place of tensors. Wrappers do not look inside this plain object."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


def _mapped(part: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return `part` with `change(leaf, name)` in place of each leaf. An object with a `to` method is a leaf."""
    before = f"{name}." if name else ""
    if isinstance(part, Mapping):
        parts = {key: _mapped(value, change, f"{before}{key}") for key, value in part.items()}
        if not isinstance(part, MutableMapping):
            return parts
        twin = copy.copy(part)
        twin.update(parts)
        return twin
    if isinstance(part, list | tuple) and not hasattr(part, "to"):
        items = [_mapped(each, change, f"{before}item {number}") for number, each in enumerate(part)]
        return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
    return change(part, name)


def _summed(value: Tensor, size: int, name: str) -> Tensor:
    """Return the fp32 sum over samples of `value`: one number per sample (size,), or their 0-dim mean.

    Raises:
        RecipeError: `value` is not a tensor, has another shape, or is a whole number, not a mean.
    """
    problem = ""
    if not isinstance(value, Tensor):
        problem = f"is a {type(value).__name__}, not a tensor"
    elif value.dim() == 0 and not value.is_floating_point():
        problem = f"is a whole number of type {value.dtype}, so it is a count, not a mean over samples"
    elif value.shape not in ((), (size,)):
        problem = f"has shape {tuple(value.shape)} for {size} samples"
    if problem:
        raise RecipeError(f"{name} {problem}; return one number for each sample, or their mean")
    return value.float() * size if value.dim() == 0 else value.float().sum()
