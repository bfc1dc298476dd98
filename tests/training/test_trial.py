"""`fit` tries loss and metrics on a few samples: a loss that depends on how a step is cut is said, or refused."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from accel_train import fit
from tests.support.runs import Settings, losses, run_forked_command

Loss = Callable[[nn.Module, Any], Tensor]

INPUTS = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
CLASSES = (INPUTS.sum(1) > 0).long()
LABELS = CLASSES.clone()
LABELS[[0, 1, 2, 5]] = -100
DATA, PARTLY = TensorDataset(INPUTS, CLASSES), TensorDataset(INPUTS, LABELS)
SETTINGS: Settings = {
    "max_steps": 2,
    "batch_size": 8,
    "data": {"num_workers": 0, "shuffle": False},
    "log": {"every_steps": 1, "progress": False},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    """An empty folder."""
    monkeypatch.chdir(tmp_path)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    vectors = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(5 * vectors @ vectors.T, torch.arange(len(vectors)))


def cross_entropy(**options: Any) -> Loss:
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], **options)


def num_labels(batch: Any) -> int:
    return int((batch[1] != -100).sum())


NOT_MEANS: dict[str, tuple[Loss, TensorDataset]] = {
    "contrastive": (contrastive, DATA),
    "contrastive, one number per sample": (lambda model, batch: contrastive(model, batch).expand(len(batch[0])), DATA),
    "ignore_index": (cross_entropy(), PARTLY),
    "class weights": (cross_entropy(weight=torch.tensor([1.0, 5.0])), DATA),
    "sum": (cross_entropy(reduction="sum"), DATA),
}


@pytest.mark.parametrize("name", NOT_MEANS)
def test_a_loss_that_is_no_mean_over_samples_is_said_and_refused_where_a_step_is_cut(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loss, data = NOT_MEANS[name]
    cut = {"per_device_batch_size": 2}
    with pytest.raises(ValueError, match="not a mean over samples") as refused:
        fit(linear(), data, loss=loss, output_dir="cut", batch=cut, **SETTINGS)
    assert not losses(Path("cut"))
    for word in ("4 micro-batches", "class weights", "ignore_index", "reduction='none'", "count_targets"):
        assert word in str(refused.value)
    fit(linear(), data, loss=loss, output_dir="whole", **SETTINGS)
    assert "the loss is not a mean over samples" in capsys.readouterr().out
    assert len(losses(Path("whole"))) == 2
    fit(linear(), data, loss=loss, output_dir="per batch", loss_is_per_batch=True, batch=cut, **SETTINGS)


MEANS: dict[str, Loss] = {
    "mean": cross_entropy(),
    "one number per sample": cross_entropy(reduction="none"),
    "weighted, one number per sample": cross_entropy(reduction="none", weight=torch.tensor([1.0, 5.0])),
    "dropout": lambda model, batch: F.cross_entropy(F.dropout(model(batch[0]), 0.5, model.training), batch[1]),
    "fails for one sample": lambda model, batch: F.cross_entropy(model(batch[0]).squeeze(0), batch[1]),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("size", [8, 2])
def test_a_mean_over_samples_is_accepted_in_silence(name: str, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    batch = {"per_device_batch_size": size}
    fit(linear(), DATA, loss=MEANS[name], output_dir="run", batch=batch, **SETTINGS)
    assert "mean over samples" not in capsys.readouterr().out


class Augmented(Dataset[Any]):
    """Samples that are other ones at each read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index] + random.random() + float(np.random.rand()) + torch.rand(3), CLASSES[index]


def test_random_samples_are_no_difference_and_a_random_loss_is_said_to_be_unchecked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batch = {"per_device_batch_size": 2}
    fit(linear(), Augmented(), loss=cross_entropy(), output_dir="samples", batch=batch, **SETTINGS)
    assert "the loss" not in capsys.readouterr().out

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0] + torch.randn(batch[0].shape)) - 1).square().mean()

    fit(linear(), DATA, loss=noisy, output_dir="loss", batch=batch, **SETTINGS)
    assert "the loss draws random numbers" in capsys.readouterr().out


class Recording(nn.Module):
    """A layer with a buffer, extra state, and a number that each forward changes, in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra, self.number = linear(), {"calls": 0}, 0
        self.register_buffer("calls", torch.zeros(()))
        self.at_step: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        self.extra["calls"] += 1
        self.number += 1
        self.calls.add_(1)
        if torch.is_grad_enabled():
            self.at_step.append((self.extra["calls"], self.number, self.calls.item(), self.training))
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_the_trial_changes_no_state_of_the_module_and_no_random_number() -> None:
    model, drawn = Recording(), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            drawn.append((random.random(), float(np.random.rand())))
        else:
            random.random(), np.random.rand()
        return F.cross_entropy(model(batch[0]), batch[1])

    random.seed(3)
    np.random.seed(3)
    fit(model, DATA, loss=loss, output_dir="run", eval_data=None, **SETTINGS)
    assert model.at_step == [(1, 1, 1.0, True), (2, 2, 2.0, True)]
    assert len(drawn) == 2


def test_a_sum_over_counted_targets_is_the_same_for_any_cut(tmp_path: Path) -> None:
    """The first step reads the first 8 samples, of which 4 have labels."""
    weight = {}
    for size in (8, 2):
        model = linear()
        expected = F.cross_entropy(model(INPUTS[:8]), LABELS[:8]).item()
        result = fit(
            model, PARTLY, loss=cross_entropy(reduction="sum"), count_targets=num_labels, output_dir=f"run-{size}",
            batch={"per_device_batch_size": size}, eval_data=PARTLY, **SETTINGS,
        )  # fmt: skip
        assert losses(Path(f"run-{size}"))[1] == pytest.approx(expected, rel=1e-6)
        with torch.no_grad():
            whole = F.cross_entropy(model(INPUTS), LABELS).item()
        assert result.metrics["loss"] == pytest.approx(whole, rel=1e-5)
        weight[size] = model.weight.detach().clone()
    assert torch.allclose(weight[8], weight[2], atol=1e-6)
    none = cross_entropy(reduction="none")
    fit(linear(), PARTLY, loss=none, count_targets=num_labels, output_dir="each", **SETTINGS)
    assert losses(Path("each")) == pytest.approx(losses(Path("run-8")), rel=1e-6)
    with pytest.raises(ValueError, match="not a mean over samples"):
        fit(
            linear(), PARTLY, loss=cross_entropy(), count_targets=num_labels, output_dir="mean",
            batch={"per_device_batch_size": 2}, **SETTINGS,
        )  # fmt: skip


def test_a_metric_that_counts_is_refused_before_the_first_step_or_said(capsys: pytest.CaptureFixture[str]) -> None:
    def hits(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).argmax(1) == batch[1]).sum()

    common: Settings = {"loss": cross_entropy(), "eval_data": DATA, **SETTINGS}
    with pytest.raises(ValueError, match="metric hits is a whole number"):
        fit(linear(), DATA, metrics=lambda *given: {"hits": hits(*given)}, output_dir="count", **common)
    assert not losses(Path("count"))
    fit(linear(), DATA, metrics=lambda *given: {"hits": hits(*given).float()}, output_dir="float", **common)
    assert "metric hits is not a mean over samples" in capsys.readouterr().out


PROGRAM = """
from tests.training.test_trial import DATA, PARTLY, SETTINGS, cross_entropy, linear, num_labels
from accel_train import fit

fit(linear(), PARTLY, loss=cross_entropy(reduction="sum"), count_targets=num_labels, output_dir="sum", **SETTINGS)
fit(linear(), PARTLY, loss=cross_entropy(), output_dir="mean", **SETTINGS)
"""


def test_2_processes_refuse_such_a_loss_and_share_a_sum_over_targets(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_forked_command([], 2, program)
    assert done.returncode == 1
    assert "on each of 2 processes" in done.stderr
    assert not losses(Path("mean"))
    expected = F.cross_entropy(linear()(INPUTS[:8]), LABELS[:8]).item()
    assert losses(Path("sum"))[1] == pytest.approx(expected, rel=1e-6)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def test_what_fit_cannot_train_is_refused_in_one_sentence() -> None:
    common: Settings = {"loss": cross_entropy(), "output_dir": "run", **SETTINGS}
    with pytest.raises(ValueError, match="train_data of type Stream"):
        fit(linear(), Stream(), **common)
    with torch.no_grad(), pytest.raises(ValueError, match="no_grad"):
        fit(linear(), DATA, **common)
    with pytest.raises(ValueError, match="meta device"):
        fit(nn.Linear(3, 2, device="meta"), DATA, **common)
