"""`fit` tries loss and metrics on a few samples: a loss that depends on how a step is cut is said, or refused."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from accel_train import RunResult, fit
from accel_train.core.errors import SettingError
from tests.support.runs import Capture, Settings, losses, run_forked_command
from tests.support.wording import assert_golden, raises_golden

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


pytestmark = pytest.mark.usefixtures("empty_folder")


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    vectors = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(5 * vectors @ vectors.T, torch.arange(len(vectors)))


def cross_entropy(**options: Any) -> Loss:
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], **options)


def trained(folder: str, loss: Loss, data: Any = DATA, model: nn.Module | None = None, **settings: Any) -> RunResult:
    return fit(model or linear(), data, loss=loss, output_dir=folder, **SETTINGS, **settings)


def num_labels(batch: Any) -> int:
    return int((batch[1] != -100).sum())


def without_means(text: str) -> str:
    return re.sub(r"\(\S+ of (\d+) samples, \S+ by", r"(# of \1 samples, # by", text)


def notes(capsys: Capture) -> str:
    lines = capsys.readouterr().out.splitlines()
    return without_means("\n".join(line for line in lines if "the loss" in line or "metric" in line))


NOT_MEANS: dict[str, tuple[Loss, TensorDataset]] = {
    "contrastive": (contrastive, DATA),
    "contrastive, one number per sample": (lambda model, batch: contrastive(model, batch).expand(len(batch[0])), DATA),
    "ignore_index": (cross_entropy(), PARTLY),
    "class weights": (cross_entropy(weight=torch.tensor([1.0, 5.0])), DATA),
    "sum": (cross_entropy(reduction="sum"), DATA),
}


@pytest.mark.parametrize("name", NOT_MEANS)
def test_a_loss_that_is_no_mean_over_samples_is_said_and_refused_where_a_step_is_cut(
    name: str, capsys: Capture
) -> None:
    loss, data = NOT_MEANS[name]
    cut = {"per_device_batch_size": 2}
    with pytest.raises(SettingError) as refused:
        trained("cut", loss, data, batch=cut)
    assert not losses(Path("cut"))
    assert refused.value.settings == ("loss",)
    for word in ("4 micro-batches", "class weights", "ignore_index", "reduction='none'", "count_targets"):
        assert word in str(refused.value)
    trained("whole", loss, data)
    assert_golden(notes(capsys))
    assert len(losses(Path("whole"))) == 2
    trained("per batch", loss, data, loss_is_per_batch=True, batch=cut)


MEANS: dict[str, Loss] = {
    "mean": cross_entropy(),
    "one number per sample": cross_entropy(reduction="none"),
    "weighted, one number per sample": cross_entropy(reduction="none", weight=torch.tensor([1.0, 5.0])),
    "dropout": lambda model, batch: F.cross_entropy(F.dropout(model(batch[0]), 0.5, model.training), batch[1]),
    "fails for one sample": lambda model, batch: F.cross_entropy(model(batch[0]).squeeze(0), batch[1]),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("size", [8, 2])
def test_a_mean_over_samples_is_accepted_in_silence(name: str, size: int, capsys: Capture) -> None:
    trained("run", MEANS[name], batch={"per_device_batch_size": size})
    assert "mean over samples" not in capsys.readouterr().out


class Augmented(Dataset[Any]):
    """Samples that are other ones at each read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index] + random.random() + float(np.random.rand()) + torch.rand(3), CLASSES[index]


def test_random_samples_are_no_difference_and_a_random_loss_is_said_to_be_unchecked(
    capsys: Capture,
) -> None:
    batch = {"per_device_batch_size": 2}
    trained("samples", cross_entropy(), Augmented(), batch=batch)
    assert "the loss" not in capsys.readouterr().out

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0] + torch.randn(batch[0].shape)) - 1).square().mean()

    trained("loss", noisy, batch=batch)
    assert_golden(notes(capsys))


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
    trained("run", loss, model=model)
    assert model.at_step == [(1, 1, 1.0, True), (2, 2, 2.0, True)]
    assert len(drawn) == 2


def test_a_sum_over_counted_targets_is_the_same_for_any_cut(tmp_path: Path) -> None:
    """The first step reads the first 8 samples, of which 4 have labels."""
    weight = {}
    for size in (8, 2):
        model = linear()
        expected = F.cross_entropy(model(INPUTS[:8]), LABELS[:8]).item()
        batch, summed = {"per_device_batch_size": size}, cross_entropy(reduction="sum")
        result = trained(f"run-{size}", summed, PARTLY, model, count_targets=num_labels, batch=batch, eval_data=PARTLY)
        assert losses(Path(f"run-{size}"))[1] == pytest.approx(expected, rel=1e-6)
        with torch.no_grad():
            whole = F.cross_entropy(model(INPUTS), LABELS).item()
        assert result.metrics["loss"] == pytest.approx(whole, rel=1e-5)
        weight[size] = model.weight.detach().clone()
    assert torch.allclose(weight[8], weight[2], atol=1e-6)
    trained("each", cross_entropy(reduction="none"), PARTLY, count_targets=num_labels)
    assert losses(Path("each")) == pytest.approx(losses(Path("run-8")), rel=1e-6)
    with pytest.raises(SettingError) as refused:
        trained("mean", cross_entropy(), PARTLY, count_targets=num_labels, batch={"per_device_batch_size": 2})
    assert refused.value.settings == ("loss",)


def test_a_metric_that_counts_is_refused_before_the_first_step_or_said(capsys: Capture) -> None:
    def hits(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).argmax(1) == batch[1]).sum()

    with raises_golden(case="count"):
        trained("count", cross_entropy(), eval_data=DATA, metrics=lambda *given: {"hits": hits(*given)})
    assert not losses(Path("count"))
    trained("float", cross_entropy(), eval_data=DATA, metrics=lambda *given: {"hits": hits(*given).float()})
    assert_golden(notes(capsys), "float")


PROGRAM = """
from tests.training.test_trial import PARTLY, cross_entropy, num_labels, trained

trained("sum", cross_entropy(reduction="sum"), PARTLY, count_targets=num_labels)
trained("mean", cross_entropy(), PARTLY)
"""


def test_2_processes_refuse_such_a_loss_and_share_a_sum_over_targets(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_forked_command([], 2, program)
    assert done.returncode == 1
    [line, *_] = [line for line in done.stderr.splitlines() if "SettingError: " in line]
    assert_golden(without_means(line))
    assert not losses(Path("mean"))
    expected = F.cross_entropy(linear()(INPUTS[:8]), LABELS[:8]).item()
    assert losses(Path("sum"))[1] == pytest.approx(expected, rel=1e-6)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def test_what_fit_cannot_train_is_refused_in_one_sentence() -> None:
    with raises_golden(case="stream"):
        trained("run", cross_entropy(), Stream())
    with torch.no_grad(), raises_golden(case="no_grad"):
        trained("run", cross_entropy())
    with raises_golden(case="meta device"):
        trained("run", cross_entropy(), model=nn.Linear(3, 2, device="meta"))
