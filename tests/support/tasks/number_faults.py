"""A task whose samples break on demand: in a module, on the way back through one, in the loss, in a gradient, or as
read.

A fault belongs to a sample, wherever the sample is read, so that it happens again when its step is computed again; or,
with `once`, it is gone after the first time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Task, TaskData
from accel_train.tasks.causal_lm.task import CausalLM

NUM_FEATURES = 6


@dataclass
class Fault:
    """What breaks, and for which sample."""

    sample: int
    """-1: each."""
    place: str
    """`forward`, `backward`, `gradient`, `loss`, or `data`."""
    name: str = ""
    """Of the module, the parameter, or the column (`features` or `wanted`)."""
    value: float = math.nan
    """What the broken numbers become; the loss is multiplied by it."""
    once: bool = False
    done: bool = False

    def strikes(self, samples: Tensor) -> Tensor | None:
        """Which rows break now; None where no row does."""
        rows = (samples == self.sample) | (self.sample < 0)
        if (self.once and self.done) or not bool(rows.any()):
            return None
        self.done = True
        return rows


class Spoil(torch.autograd.Function):
    """The same numbers on the way there; on the way back the gradient of some rows is another."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, value: float) -> Tensor:
        ctx.rows, ctx.value = rows, value
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        spoilt = gradient.clone()
        spoilt[ctx.rows] = ctx.value
        return spoilt, None, None


class Faults:
    """Puts faults into a model and a loss; `samples` are the indices of the micro-batch that is computed."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.samples = torch.zeros(0, dtype=torch.int64)

    def put_into(self, model: nn.Module, faults: Sequence[Fault]) -> None:
        self.faults = list(faults)
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        for fault in faults:
            if fault.place in ("forward", "backward"):
                modules[fault.name].register_forward_hook(partial(self._break_output, fault))
            elif fault.place == "gradient":
                parameters[fault.name].register_hook(partial(self._break_gradient, fault))

    def _break_output(self, fault: Fault, module: nn.Module, args: Any, output: Any) -> Any:
        rows = fault.strikes(self.samples)
        if rows is None:
            return None
        first = output[0] if isinstance(output, tuple) else output
        if fault.place == "backward":
            broken = Spoil.apply(first, rows, fault.value)
        else:
            broken = first.masked_fill(rows.view(-1, *[1] * (first.dim() - 1)), fault.value)
        return (broken, *output[1:]) if isinstance(output, tuple) else broken

    def _break_gradient(self, fault: Fault, gradient: Tensor) -> Tensor | None:
        return None if fault.strikes(self.samples) is None else torch.full_like(gradient, fault.value)

    def break_loss(self, loss: Tensor) -> Tensor:
        for fault in self.faults:
            if fault.place == "loss" and fault.strikes(self.samples) is not None:
                loss = loss * fault.value
        return loss


class Features(Dataset[tuple[int, NDArray[np.float32]]]):
    """Random features by sample, some of them broken from the start; the last number is what is to be learnt."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.broken: dict[int, tuple[int, float]] = {}
        """Which number of a sample is another, and what it is."""

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, NDArray[np.float32]]:
        row = np.random.default_rng((7, index)).normal(size=NUM_FEATURES + 1).astype(np.float32)
        row[NUM_FEATURES] = row[:3].sum()
        if index in self.broken:
            which, value = self.broken[index]
            row[which] = value
        return index, row


class Block(nn.Module):
    """A residual block: normalise, widen, squash, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.drop(self.act(self.widen(self.norm(x)))))


class Regressor(nn.Module):
    """Features to one number, with batch norm in front and dropout inside."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, width)
        self.statistics = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.statistics(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


class FaultyRegression(Task):
    """A regression on random features; `options`: num_samples, width, faults (each a `Fault` as a mapping)."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.ignored: set[int] = set()
        """Samples without a target."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        def collate(rows: Sequence[tuple[int, NDArray[np.float32]]]) -> dict[str, Any]:
            table = torch.from_numpy(np.stack([row for _, row in rows]))
            counts = torch.tensor([float(index not in self.ignored) for index, _ in rows])
            return {
                "sample": torch.tensor([index for index, _ in rows]),
                "features": table[:, :NUM_FEATURES].contiguous(),
                "wanted": table[:, NUM_FEATURES].contiguous(),
                "counts": counts,
                "num_targets": int(counts.sum()),
            }

        data = Features(int(recipe.options["num_samples"]))
        return TaskData(
            data, None, collate, "features", reading_is_free=True, where=lambda index: f"row {index} of nowhere"
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        model = Regressor(int(recipe.options.get("width", 16)))
        self.put_in([Fault(**fault) for fault in recipe.options.get("faults", ())], model, data)
        return model

    def put_in(self, faults: Sequence[Fault], model: nn.Module, data: TaskData) -> None:
        """Break these samples from now on."""
        self.faults.put_into(model, faults)
        data.train.broken = {  # type: ignore[attr-defined]
            fault.sample: (NUM_FEATURES if fault.name == "wanted" else 2, fault.value)
            for fault in faults
            if fault.place == "data"
        }

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        self.faults.samples = batch["sample"]
        errors = (model(batch["features"]).float() - batch["wanted"]).square() * batch["counts"]
        return self.faults.break_loss(errors.sum())

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Nothing to describe."""

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Nothing to keep."""


class NumberedWindows(Dataset[Any]):
    """Windows of tokens, each with its index."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> tuple[list[int], NDArray[np.int64]]:
        return list(indices), self.inner.__getitems__(indices)


class FaultyLanguageModel(CausalLM):
    """Language modelling on samples that break, in all places but the data."""

    def __init__(self) -> None:
        self.faults = Faults()

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        data = super().load_data(recipe, progress=progress)

        def collate(numbered: tuple[list[int], NDArray[np.int64]]) -> dict[str, Any]:
            indices, rows = numbered
            return {**data.collate(rows), "sample": torch.tensor(indices)}

        windows = NumberedWindows(data.train)
        return TaskData(windows, None, collate, data.fingerprint, data.facts, data.reading_is_free, data.source)

    def put_in(self, faults: Sequence[Fault], model: nn.Module, data: TaskData) -> None:
        """Break these samples from now on."""
        self.faults.put_into(model, faults)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        self.faults.samples = batch["sample"]
        return self.faults.break_loss(super().loss_sum(model, batch))


class Uncounted(FaultyRegression):
    """The regression with `options.targets` in the place of the count of each batch, and samples ignored by
    `options.ignored`.

    With `options.classes` it tells numbers above 0 from others by `cross_entropy`, whose gradient of ignored labels is
    exactly 0.
    With `options.of_mean` the loss is their mean times the rows: NaN where all are ignored, with gradients of exactly
    0.
    """

    classes = of_mean = False

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        data = super().load_data(recipe, progress=progress)
        self.ignored, self.classes = set(recipe.options.get("ignored", ())), bool(recipe.options.get("classes"))
        self.of_mean = bool(recipe.options.get("of_mean"))

        def collate(rows: Sequence[tuple[int, NDArray[np.float32]]]) -> dict[str, Any]:
            batch = data.collate(rows)
            if "targets" in recipe.options:
                batch["num_targets"] = recipe.options["targets"]
            return batch

        return replace(data, collate=collate, eval=data.train if recipe.options.get("evaluates") else None)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        if not self.classes:
            return super().loss_sum(model, batch)
        score = model(batch["features"]).float()
        labels = torch.where(batch["counts"] > 0, (batch["wanted"] > 0).long(), -100)
        logits = torch.stack((-score, score), 1)
        if self.of_mean:
            return nn.functional.cross_entropy(logits, labels) * len(labels)
        return nn.functional.cross_entropy(logits, labels, reduction="sum")
