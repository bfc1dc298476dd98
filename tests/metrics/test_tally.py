"""Counting on the device: nothing is read by the host, and what is counted is what scikit-learn would count."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.metrics.scores import auroc, auroc_from_histogram
from accel_train.metrics.tally import (
    MAX_HISTOGRAM_CELLS,
    confusion_counts,
    histogram_bits,
    multilabel_counts,
    one_vs_rest_log_odds,
    score_histogram,
)
from tests.support.predictions import confusion, draw

READS_BY_THE_HOST = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique", "unique", "equal")


class HostRead(Exception):
    """Raised where a device would have to be waited for."""


class NoHostRead(TorchDispatchMode):
    """Fails where a CUDA device would have to be waited for; `tolist` and `.cpu()` are seen on a GPU only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in flat[1:]
        )
        if name.startswith(READS_BY_THE_HOST) or by_mask:
            raise HostRead(func)
        return func(*args, **(kwargs or {}))


def auroc_error_bound(histogram: Any) -> float:
    """How far the area from a histogram can be from the exact one: half the share of pairs whose
    scores lie in one bin.
    """
    problems = histogram.double()[1 if len(histogram) == 2 else 0 :]
    bounds = [(n * p).sum() / (2 * n.sum() * p.sum()) for n, p in problems]
    return float(np.nanmean(bounds))


def test_the_watch_for_host_reads_sees_them() -> None:
    values = torch.arange(4)
    for read in (
        lambda: values[0].item(),
        lambda: bool(values.any()),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: values.bincount(),
    ):
        with NoHostRead(), pytest.raises(HostRead):
            read()


def test_counting_reads_nothing_on_the_host() -> None:
    labels, predictions = torch.tensor([0, 2, -100, 1, 255]), torch.tensor([0, 1, 1, 1, 2])
    logits = torch.randn(5, 3)
    with NoHostRead():
        counted = [
            confusion_counts(labels, predictions, 3),
            multilabel_counts(logits > 0, logits > 0.5),
            score_histogram(one_vs_rest_log_odds(logits), labels, 3),
            score_histogram(logits[:, :2], labels, 2),
        ]
    assert [None if counts is None else counts.dtype for counts in counted] == [torch.int64] * 4


@pytest.mark.gpu
def test_counting_does_not_wait_for_the_gpu() -> None:
    labels, logits = torch.randint(-1, 4, (4096,)), torch.randn(4096, 4)
    on_device = (labels.cuda(), logits.cuda())

    def count(labels: torch.Tensor, logits: torch.Tensor) -> list[torch.Tensor | None]:
        return [
            confusion_counts(labels, logits.argmax(1), 4),
            multilabel_counts(logits > 0, logits > 1),
            score_histogram(logits, labels, 4),
        ]

    torch.cuda.set_sync_debug_mode("error")
    try:
        counted = [*count(*on_device), one_vs_rest_log_odds(on_device[1])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [*count(labels, logits), one_vs_rest_log_odds(logits)]
    for there, here in zip(counted, expected, strict=True):
        assert there is not None
        torch.testing.assert_close(there.cpu(), here)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_confusion_counts_are_sklearns_and_leave_out_what_is_no_class(dtype: torch.dtype) -> None:
    labels, predictions = draw(500, 5)
    assert (confusion(labels, predictions, 5) == sk.confusion_matrix(labels, predictions)).all()
    masks = torch.tensor([[0, 255], [1, 1]]).to(dtype)
    assert confusion_counts(masks, torch.tensor([[0, 0], [1, 7]]).to(dtype), 2).tolist() == [[1, 0], [0, 1]]
    assert confusion_counts(torch.tensor([-100, 3, 0]), torch.tensor([0, 0, -1]), 3).sum() == 0


def test_a_negative_label_is_counted_nowhere() -> None:
    assert multilabel_counts(torch.tensor([[1, -1], [0, -1]]), torch.ones(2, 2)).tolist() == [[1, 1, 0, 0], [0] * 4]


@pytest.mark.parametrize("num_classes", [2, 5, 40])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_auroc_of_the_histogram_is_sklearns_within_the_stated_bound(num_classes: int, scale: float) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, num_classes, (3000,))
    logits = scale * (torch.randn(3000, num_classes) + torch.nn.functional.one_hot(labels, num_classes))
    odds = one_vs_rest_log_odds(logits)
    halves = [score_histogram(odds[part], labels[part], num_classes) for part in (slice(1000), slice(1000, None))]
    histogram = halves[0] + halves[1]
    probabilities = logits.double().softmax(1).numpy()
    if num_classes == 2:
        exact = sk.roc_auc_score(labels, logits[:, 1].double() - logits[:, 0].double())
    else:
        exact = np.mean([sk.roc_auc_score(labels == label, odds[:, label]) for label in range(num_classes)])
        wanted = sk.roc_auc_score(labels, probabilities, multi_class="ovr")
        assert exact == pytest.approx(wanted, abs=1e-5)  # of probabilities that fp64 does not round to 1
    bound = auroc_error_bound(histogram)
    assert abs(auroc_from_histogram(histogram) - exact) <= bound + 1e-12
    assert bound < {2: 1e-4, 5: 2e-4, 40: 5e-4}[num_classes]


def test_auroc_counts_ties_half_as_sklearn_does() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 1000)
    scores = (generator.integers(0, 4, 1000) + labels) / 8  # five values, which no cut touches
    columns = torch.tensor(np.stack([-scores, scores], axis=1), dtype=torch.float32)
    histogram = score_histogram(columns, torch.tensor(labels), 2)
    exact = sk.roc_auc_score(labels, scores)
    assert auroc_from_histogram(histogram) == pytest.approx(exact, abs=1e-12)
    assert auroc(scores, labels) == pytest.approx(exact, abs=1e-12)
    assert auroc_error_bound(histogram) > 0.05  # it cannot know that these were ties before


def test_bins_follow_the_order_of_numbers() -> None:
    values = [
        -math.inf,
        -1e9,
        -65504.0,
        -1.001,
        -1.0,
        -1e-4,
        -1e-6,
        -0.0,
        0.0,
        1e-6,
        1e-4,
        1.0,
        1.001,
        65504.0,
        1e9,
        math.inf,
    ]
    for num_classes in (2, 4096):  # the most bits, and the fewest
        column = torch.tensor([*values, math.nan])
        histograms = [score_histogram(score.expand(1, num_classes), torch.tensor([1]), num_classes) for score in column]
        bins = [int(histogram[1, 1].argmax()) for histogram in histograms if histogram is not None]
        assert bins[:-1] == sorted(bins[:-1])
        assert bins[0] == bins[1] == bins[-1] < bins[2] < bins[4] < bins[5] < bins[6]
        assert len(set(bins[6:10])) == 1  # zero, with either sign and nearly
        assert bins[9] < bins[10] < bins[11] <= bins[12] < bins[13] < bins[14] == bins[15]
        assert num_classes > 2 or (bins[3] < bins[4] and bins[11] < bins[12])


def test_the_log_odds_are_those_of_the_softmax_also_where_it_is_one() -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0], [40.0, 0.0, -3.0], [2.0, 2.0, 2.0]])
    exact = torch.special.logit(logits.double().softmax(1))
    odds = one_vs_rest_log_odds(logits) - math.log(2)  # as against chance, which is 1 to 2
    torch.testing.assert_close(odds[[0, 2]].double(), exact[[0, 2]], rtol=1e-5, atol=1e-5)
    assert odds[1, 0].item() == pytest.approx(40 - math.log(1 + math.exp(-3)), rel=1e-6)
    assert exact[1, 0].isinf()  # what a probability in fp64 has lost


def test_a_class_that_is_missing_or_alone_is_left_out_of_the_auroc() -> None:
    labels = torch.tensor([0, 0, 1, 1, -1])
    scores = torch.tensor([[2.0, 1, 0], [0, 1, 2], [0, 3, 0], [1, 0, 5], [9, 9, 9]])
    expected = np.mean([sk.roc_auc_score(labels[:4] == label, scores[:4, label]) for label in (0, 1)])
    assert auroc_from_histogram(score_histogram(scores, labels, 3)) == pytest.approx(expected, abs=1e-12)
    assert auroc(scores[:4], labels[:4]) == pytest.approx(expected, abs=1e-12)
    for alone in (torch.zeros(5), torch.full((5,), -1)):
        assert math.isnan(auroc_from_histogram(score_histogram(scores, alone, 3)))


def test_the_histogram_of_many_classes_stays_bounded_and_ends_where_it_means_nothing() -> None:
    for num_classes in range(1, 4097):
        bits = histogram_bits(num_classes)
        assert bits is not None
        assert num_classes * 2 * 2**bits <= MAX_HISTOGRAM_CELLS
    assert [histogram_bits(num_classes) for num_classes in (2, 16, 17, 100, 1000, 4096)] == [16, 16, 15, 13, 10, 8]
    assert score_histogram(torch.zeros(1, 4097), torch.zeros(1), 4097) is None
