"""Any `nn.Module` as a task: data, model and loss are enough."""

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from numpy.typing import NDArray
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from accel_train.core.json_io import json_digest
from accel_train.data.digest import digest_of_code, digest_of_data, digest_of_module
from accel_train.recipe.schema import Recipe
from accel_train.task import Scores, Task, TaskData

_SAMPLES, _STRUCTURE = "samples", "structure"
"""Names under which a batch carries a row for each sample, and the structure that `collate` gave it."""
_LEFT: "WeakKeyDictionary[nn.Module, tuple[str, str]]" = WeakKeyDictionary()
"""Digests of modules that this process has fitted: as they were given, and as the run left them."""


class ModuleTask(Task):
    """A task of three methods: `data`, `model` and `loss`.

    `batch` is what `collate` makes of the samples, on the device, nested or not: for samples `(x, y)` the list of two tensors, for
    mappings a mapping, for tensors one tensor. `self.recipe` is there in all methods.
    """

    recipe: Recipe

    @abstractmethod
    def data(self) -> "tuple[Dataset[Any], Dataset[Any] | None]":
        """Return the training and the evaluation data: objects with `__len__` and `__getitem__`; None: nothing is evaluated."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model on the CPU, in fp32; the seed is set."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss: one number for each sample, or 0-dim their mean."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return further numbers for an evaluation, by name, each as `loss`; they are averaged over all samples. By default none."""
        return {}

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples; by default as torch's DataLoader does."""
        return default_collate(list(samples))

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Return what `data` returns, with a digest of its size and of some of its samples.

        Raises:
            ValueError: there are no training samples.
        """
        self.recipe = recipe
        train, evaluation = self.data()
        if not len(cast("Any", train)):
            raise ValueError("the training data are empty; give at least one sample")
        facts: dict[str, Any] = {"num_train": len(cast("Any", train)), "num_eval": len(cast("Any", evaluation or ()))}
        digests = {}
        for name, data in (("training", train), ("evaluation", evaluation or ())):
            digests[name], is_stable = digest_of_data(data)
            if not is_stable:
                note = f"{name} data differ from read to read: a resume compares their number, not their content"
                facts["notes"] = [*facts.get("notes", ()), note]
        return TaskData(
            train,
            evaluation,
            self._named,
            fingerprint=json_digest(digests),
            inputs={f"{name} data": digest for name, digest in digests.items()} | self.code(),
            facts=facts,
            seeds_reading=True,
        )

    def code(self) -> dict[str, str]:
        """Return digests of code that decides the result, by name; by default none, as a run digests the task's class."""
        return {}

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Return `model()`, with the weights of a finished run where the recipe names its folder."""
        model = self.model()
        if recipe.model.pretrained is not None and not any(weight.is_meta for weight in model.parameters()):
            load_model(model, Path(recipe.model.pretrained) / "model.safetensors")
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over the samples, fp32."""
        return _summed(self.loss(model, self._given(batch)), len(batch[_SAMPLES]), "loss")

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum up the loss and the metrics over the samples."""
        samples = batch[_SAMPLES]
        found = self.metrics(model, self._given(batch))
        sums = {name: _summed(value, len(samples), f"metric {name}").double() for name, value in found.items()}
        size = torch.tensor(len(samples), device=samples.device)
        return {"loss_sum": self.loss_sum(model, batch), **sums, "num_samples": size}

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Return the mean of each metric over all samples."""
        number = max(int(totals["num_samples"]), 1)
        own = {name: total for name, total in totals.items() if name not in ("num_samples", "loss_sum", "num_targets")}
        return Scores({name: float(total) / number for name, total in own.items()})

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration of a transformers model, else the name of the class: a finished run is known by this file."""
        super().save_description(model, data, folder)
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text(json.dumps({"module": type(model).__qualname__}) + "\n")

    def _named(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return the tensors of a batch by name, and what `_given` needs to make the batch of them again."""
        tensors: dict[str, Any] = {}

        def take(leaf: Any, name: str) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            while not name or name in (_SAMPLES, _STRUCTURE, "num_targets", *tensors):
                name += "_"
            tensors[name] = leaf
            return _Name(name)

        structure = _Structure(_mapped(self.collate(samples), take))
        # `collate` alone decides on shapes (time first, nodes of all graphs), so the count of samples has a tensor of its own.
        # Without columns: it is not known which dimension is of the samples.
        rows = torch.zeros((len(samples),) if self._stacks() else (len(samples), 0), dtype=torch.uint8)
        return {**tensors, _SAMPLES: rows, _STRUCTURE: structure, "num_targets": len(samples)}

    def _stacks(self) -> bool:
        """Return whether `collate` is torch's, which puts samples one after the other in the first dimension."""
        return type(self).collate is ModuleTask.collate

    def _given(self, batch: Mapping[str, Any]) -> Any:
        """Return the batch in the form in which `collate` made it."""
        structure, samples = batch.get(_STRUCTURE), batch[_SAMPLES]
        if structure is None:  # a batch of an incident, which keeps tensors alone
            example = self._named([cast("Any", self.data()[0])[0]] * len(samples))
            structure = example[_STRUCTURE]
            if {name for name, value in example.items() if isinstance(value, Tensor)} != batch.keys():
                raise ValueError("this micro-batch has another structure than a batch of the first training sample")

        def put(leaf: Any, name: str) -> Any:
            if isinstance(leaf, _Name):
                return batch[leaf]
            return leaf.to(samples.device) if hasattr(leaf, "to") else leaf

        return _mapped(structure.tree, put)


class FittedModule(ModuleTask):
    """The task of `accel_train.fit`: a model, data and functions of a program."""

    def __init__(
        self,
        module: nn.Module | None = None,
        train: Any = None,
        evaluation: Any = None,
        functions: Mapping[str, Callable[..., Any] | None] | None = None,
    ) -> None:
        if module is None:
            raise TypeError("it was trained by accel_train.fit(...) in a program; load model/model.safetensors there")
        self.module, self.train, self.evaluation, self.functions = module, train, evaluation, functions or {}

    def data(self) -> "tuple[Dataset[Any], Dataset[Any] | None]":
        """Return the program's data."""
        return self.train, self.evaluation

    def model(self) -> nn.Module:
        """Return the program's module itself, so that it is what is trained; without values a copy of it."""
        if torch.get_default_device().type == "meta":
            return copy.deepcopy(self.module).to("meta")
        return self.module

    def code(self) -> dict[str, str]:
        """Return digests of the functions, and of the module as it was before an earlier `fit` trained it in place."""
        names = ("loss", "metrics", "collate")
        return {name: digest_of_code(self.functions.get(name)) for name in names} | {"model": self._as_given()}

    def _as_given(self) -> str:
        now = digest_of_module(self.module)
        given, left = _LEFT.get(self.module, ("", ""))
        return given if now == left else now

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """On leaving, remember how the module was given and how it is left (frozen, say): it may be given again."""
        given = self._as_given()
        try:
            yield
        finally:
            _LEFT[self.module] = given, digest_of_module(self.module)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return what the program's function does."""
        return self.functions["loss"](model, batch)  # type: ignore[misc]

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return what the program's function does; nothing without one."""
        function = self.functions.get("metrics")
        return {} if function is None else function(model, batch)

    def _stacks(self) -> bool:
        return self.functions.get("collate") is None

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch by the program's function, else as torch's DataLoader does."""
        function = self.functions.get("collate")
        return super().collate(samples) if function is None else function(samples)


class _Name(str):
    """The name of a tensor, in its place in a structure."""


class _Structure:
    """The nested batch that `collate` made, with names in place of tensors: a plain object, so that no wrapper looks inside."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


def _mapped(part: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return a nested batch with `change(leaf, name)` in place of each leaf; an object that moves itself (`to`) is a leaf."""
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
    """Return the sum over samples of a value for each sample, or of their mean.

    Raises:
        ValueError: it has another shape.
    """
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}; return a tensor of one number for each sample, or their mean"
        )
    if value.dim() == 0:
        return value.float() * size
    if value.shape != (size,):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} for {size} samples; return one number for each sample, or their mean"
        )
    return value.float().sum()
