"""The loss of classification is torch's and transformers', summed; weights are scikit-learn's."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torch.testing import assert_close

from accel_train.tasks.common.classification import (
    classification_loss_sum,
    multi_label_loss_sum,
    regression_loss_sum,
    resolve_class_weights,
)
from tests.support.runs import refused

NAMES = ("ant", "bee", "cat")


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels() -> Tensor:
    return torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_without_weights_it_is_torchs_cross_entropy_summed(logits: Tensor, labels: Tensor, smoothing: float) -> None:
    loss = classification_loss_sum(logits, labels, label_smoothing=smoothing)
    assert_close(loss, cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum"))
    assert loss.shape == ()
    assert loss.dtype == torch.float32


def test_half_precision_logits_are_summed_in_fp32(logits: Tensor, labels: Tensor) -> None:
    half = logits.bfloat16()
    loss = classification_loss_sum(half, labels)
    assert loss.dtype == torch.float32
    assert_close(loss, cross_entropy(half.float(), labels, reduction="sum"))


def test_a_weight_multiplies_the_whole_loss_of_its_class(logits: Tensor, labels: Tensor) -> None:
    weights = torch.tensor([0.5, 2.0, 0.0])
    loss = classification_loss_sum(logits, labels, label_smoothing=0.1, class_weights=weights)
    by_hand = sum(
        float(weights[label]) * cross_entropy(row[None], label[None], label_smoothing=0.1)
        for row, label in zip(logits, labels)
    )
    assert_close(loss, by_hand)


def test_without_smoothing_weights_are_torchs(logits: Tensor, labels: Tensor) -> None:
    weights = torch.tensor([0.5, 2.0, 1.0])
    expected = cross_entropy(logits, labels, weight=weights, reduction="sum")
    assert_close(classification_loss_sum(logits, labels, class_weights=weights), expected)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"class_weights": torch.tensor([0.5, 2.0, 1.0])}])
def test_soft_labels_of_one_class_are_that_class(logits: Tensor, labels: Tensor, settings: dict[str, Any]) -> None:
    soft = one_hot(labels, 3).float()
    assert_close(classification_loss_sum(logits, soft, **settings), classification_loss_sum(logits, labels, **settings))


def test_a_mixed_label_costs_the_mixture_of_its_losses(logits: Tensor, labels: Tensor) -> None:
    other = labels.roll(1)
    soft = 0.3 * one_hot(labels, 3).float() + 0.7 * one_hot(other, 3).float()
    expected = 0.3 * classification_loss_sum(logits, labels) + 0.7 * classification_loss_sum(logits, other)
    assert_close(classification_loss_sum(logits, soft), expected)


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_an_ignored_label_counts_nothing_and_gives_no_gradient(
    logits: Tensor, labels: Tensor, ignore_index: int
) -> None:
    ignored = labels.clone()
    ignored[::2] = ignore_index
    weights = torch.tensor([0.5, 2.0, 1.0])
    logits.requires_grad_()
    loss = classification_loss_sum(
        logits, ignored, label_smoothing=0.1, class_weights=weights, ignore_index=ignore_index
    )
    expected = classification_loss_sum(logits[1::2], labels[1::2], label_smoothing=0.1, class_weights=weights)
    assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[::2].any()
    assert gradient[1::2].any()


def test_several_labels_are_averaged_over_labels_and_summed_over_samples(logits: Tensor) -> None:
    truth = (logits.roll(1, dims=0) > 0).float()
    expected = binary_cross_entropy_with_logits(logits, truth) * len(logits)
    assert_close(multi_label_loss_sum(logits, truth), expected)


def test_a_regression_sums_squared_errors() -> None:
    loss = regression_loss_sum(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    assert loss.item() == 5.0


def test_balanced_weights_are_scikit_learns() -> None:
    counts = np.array([10, 30, 2])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=np.repeat(np.arange(3), counts))
    assert resolve_class_weights("balanced", counts, NAMES) == pytest.approx(tuple(expected))


def test_weights_come_by_id_or_by_name() -> None:
    counts = np.array([1, 1, 1])
    assert resolve_class_weights(None, counts, NAMES) is None
    assert resolve_class_weights((1, 2, 3.5), counts, NAMES) == (1.0, 2.0, 3.5)
    assert resolve_class_weights({"cat": 4.0}, counts, NAMES) == (1.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"bea": 1.0}, "'bea', not a label; did you mean 'bee'?"),
        ((1.0, 2.0), "2 weights for 3 classes (ant, bee, cat)"),
        ((0.0, 0.0, 0.0), "all 0"),
    ],
)
def test_weights_that_fit_no_class_are_refused(setting: Any, said: str) -> None:
    refused(resolve_class_weights, setting, np.array([1, 1, 1]), NAMES, named=f"loss.class_weights|{said}")


def test_balance_cannot_be_had_with_a_class_that_has_no_samples() -> None:
    refused(resolve_class_weights, "balanced", np.array([3, 0, 1]), NAMES, named="'bee'")
