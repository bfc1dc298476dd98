"""The losses of sources in a batch equal the losses of each source alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.data.labels import IGNORED_LABEL
from accel_train.engine.mixture import SourceCounts
from accel_train.model.kernels.loss_by_source import count_losses
from accel_train.model.training_module import TrainingModule
from accel_train.tasks.common.classification import ClassLoss, multi_label_loss_sum, regression_loss_sum

N, C, SIDE = 12, 5, 4
DRAW = torch.Generator().manual_seed(0)
SOURCES = torch.tensor([0, 2, 2, 0, 1, 1, 2, 0, 0, 2, 1, 0])
CLASSES = torch.randint(0, C, (N,), generator=DRAW)
MASKS = torch.randint(0, C, (N, SIDE, SIDE), generator=DRAW).masked_fill(torch.rand(N, SIDE, SIDE) < 0.3, 255)
WORDS = torch.randint(0, C, (N, SIDE), generator=DRAW).masked_fill(torch.rand(N, SIDE) < 0.3, IGNORED_LABEL)
WEIGHTED = partial(ClassLoss(0.1, [0.5, 1, 2, 3, 4]), training=True)


def of_words(logits: Tensor, labels: Tensor) -> Tensor:
    return WEIGHTED(logits.flatten(0, 1), labels.flatten())


def logits_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW, requires_grad=True)


CASES: dict[str, tuple[Callable[..., Tensor], Tensor, Tensor, int | None]] = {
    "classes": (WEIGHTED, logits_of(N, C), CLASSES, None),
    "mixed classes": (WEIGHTED, logits_of(N, C), torch.rand(N, C, generator=DRAW).softmax(1), None),
    "several labels": (multi_label_loss_sum, logits_of(N, C), (torch.rand(N, C, generator=DRAW) > 0.5).float(), None),
    "numbers": (regression_loss_sum, logits_of(N), torch.rand(N, generator=DRAW), None),
    "words": (of_words, logits_of(N, SIDE, C), WORDS, IGNORED_LABEL),
    "masks": (partial(ClassLoss(0.1, None, 255), training=True), logits_of(N, C, SIDE, SIDE), MASKS, 255),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_targets_of_each_source_are_those_of_its_samples_alone(case: str) -> None:
    loss_sum, logits, labels, ignored = CASES[case]
    counted, model = SourceCounts(6), nn.Identity()
    counted.sources = SOURCES[:, None].expand(N, SIDE).contiguous() if case == "words" else SOURCES
    count_losses(model, counted, loss_sum, logits, labels, ignored=ignored)
    found = counted.take(torch.zeros((), dtype=torch.float64))
    for source in range(3):
        own = source == SOURCES
        count = own.sum() if ignored is None else (labels[own] != ignored).sum()
        assert float(found[source]) == pytest.approx(float(loss_sum(logits[own], labels[own]).detach()), rel=1e-5)
        assert int(found[3 + source]) == int(count) > 0
    assert not found.requires_grad


def test_an_evaluation_counts_nothing() -> None:
    counted = SourceCounts(6)
    count_losses(nn.Identity().eval(), counted, WEIGHTED, *CASES["classes"][1:3])
    assert not counted.take(torch.zeros(())).any()


@pytest.mark.parametrize("counted", [None, SourceCounts(6)])
def test_a_loss_finds_the_sources_of_its_batch_apart_and_only_while_it_is_computed(counted: Any) -> None:
    class Summed:
        def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            assert batch.keys() == {"labels"}
            assert counted is None or counted.sources is SOURCES
            return model(batch["labels"]).sum()

    task: Any = Summed()
    task.counted = counted
    module = TrainingModule(nn.Linear(1, 1), task)
    assert module({"labels": torch.ones(N, 1), "sources": SOURCES}).requires_grad
    assert counted is None or counted.sources is None
