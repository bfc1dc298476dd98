"""Any `nn.Module` as a task: data, model and loss are enough."""

import copy
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from accel_train.recipe.schema import Recipe
from accel_train.task import Scores, Task, TaskData

_ITEM, _ALONE = "item ", "alone"
"""Names under which the parts of a batch that is no mapping travel to the device."""


class ModuleTask(Task):
    """A task of three methods: `data`, `model` and `loss`.

    `batch` is what `collate` makes of the samples, on the device: for samples `(x, y)` the list of two tensors, for mappings a
    mapping, for tensors one tensor. `self.recipe` is there in all methods.
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
        sizes = {"num_train": len(cast("Any", train)), "num_eval": len(cast("Any", evaluation)) if evaluation else 0}
        return TaskData(
            train, evaluation, self._named, _digest(cast("Any", train), sizes), facts=sizes, seeds_reading=True
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Return `model()`, with the weights of a finished run where the recipe names its folder."""
        model = self.model()
        if recipe.model.pretrained is not None and not any(weight.is_meta for weight in model.parameters()):
            load_model(model, Path(recipe.model.pretrained) / "model.safetensors")
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over the samples, fp32."""
        return _summed(self.loss(model, _given(batch)), _size(batch), "loss")

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum up the loss and the metrics over the samples."""
        found = self.metrics(model, _given(batch))
        sums = {name: _summed(value, _size(batch), name).double() for name, value in found.items()}
        size = torch.tensor(_size(batch), device=next(iter(batch.values())).device)
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
        batch = self.collate(samples)
        if isinstance(batch, Tensor):
            batch = {_ALONE: batch}
        elif not isinstance(batch, Mapping):
            batch = {f"{_ITEM}{number}": part for number, part in enumerate(batch)}
        return {**batch, "num_targets": len(samples)}


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

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return what the program's function does."""
        return self.functions["loss"](model, batch)  # type: ignore[misc]

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return what the program's function does; nothing without one."""
        function = self.functions.get("metrics")
        return {} if function is None else function(model, batch)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch by the program's function, else as torch's DataLoader does."""
        function = self.functions.get("collate")
        return super().collate(samples) if function is None else function(samples)


def _given(batch: Mapping[str, Tensor]) -> Any:
    """Return the batch in the form in which `collate` made it."""
    if _ALONE in batch:
        return batch[_ALONE]
    parts = [part for name, part in batch.items() if name.startswith(_ITEM)]
    return parts if parts else batch


def _size(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _summed(value: Tensor, size: int, name: str) -> Tensor:
    """Return the sum over samples of a value for each sample, or of their mean.

    Raises:
        ValueError: it has another shape.
    """
    if value.dim() == 0:
        return value.float() * size
    if value.shape[0] != size:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} for {size} samples; return one number for each sample, or their mean"
        )
    return value.float().reshape(size, -1).mean(dim=1).sum()


def _digest(train: Any, sizes: Mapping[str, int]) -> str:
    """Return a digest of the sizes, and of 16 samples where they are tensors that are kept: code may make others each time."""
    digest = hashlib.sha256(json.dumps(sizes).encode())
    for tensor in getattr(train, "tensors", ()):
        for row in np.linspace(0, len(tensor) - 1, 16).astype(int):
            digest.update(np.ascontiguousarray(tensor[row].cpu().float().numpy()).tobytes())
    return digest.hexdigest()
