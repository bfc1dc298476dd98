"""Scores of counts are those of scikit-learn and scipy, also where classes are missing or there is nothing to score."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from accel_train.metrics.scores import (
    classification_scores,
    multilabel_scores,
    pearson_correlation,
    regression_scores,
    segmentation_scores,
    spearman_correlation,
)
from accel_train.metrics.tally import multilabel_counts
from tests.support.predictions import confusion, draw


def averages(labels: Any, predictions: Any) -> dict[str, float]:
    """Return scikit-learn's averages of precision, recall, and F1."""
    found = {}
    for average in ("macro", "micro", "weighted"):
        figures = sk.precision_recall_fscore_support(labels, predictions, average=average, zero_division=0)
        found |= {f"{name}_{average}": value for name, value in zip(("precision", "recall", "f1"), figures[:3])}
    return found


@pytest.mark.parametrize(
    "num_classes, absent", [(2, ()), (4, ()), (6, (2, 5)), (1, ())], ids=["binary", "four", "absent", "one"]
)
@pytest.mark.parametrize("seed", range(4))
def test_classification_scores_are_sklearns(num_classes: int, absent: tuple[int, ...], seed: int) -> None:
    labels, predictions = draw(80, num_classes, seed)
    labels, predictions = (np.where(np.isin(values, absent), 0, values) for values in (labels, predictions))
    labels[:5] = 0
    predictions = np.where(predictions == 1, 0, predictions)  # class 1 occurs and is never predicted
    names = [f"class {label}" for label in range(num_classes)]
    scores = classification_scores(confusion(labels, predictions, num_classes), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a single class
        mcc = sk.matthews_corrcoef(labels, predictions)
    expected = {"accuracy": sk.accuracy_score(labels, predictions), "mcc": mcc}
    assert scores.metrics == pytest.approx(expected | averages(labels, predictions), abs=1e-12)
    report = scores.details["classification"]["report"]
    occurring = sorted({*labels.tolist(), *predictions.tolist()})
    wanted = sk.classification_report(
        labels, predictions, target_names=[names[label] for label in occurring], output_dict=True, zero_division=0
    )
    for name, row in wanted.items():
        assert report[name] == pytest.approx(row, abs=1e-12)
    for label in absent:
        assert report[names[label]] == {"precision": None, "recall": None, "f1-score": None, "support": 0}


def test_the_report_as_text_is_sklearns_to_the_letter() -> None:
    labels, predictions = draw(300, 3)
    names = ["a", "a rather long name", "c"]
    text = classification_scores(confusion(labels, predictions, 3), names).details["classification"]["report_text"]
    assert text == sk.classification_report(labels, predictions, target_names=names)
    absent = classification_scores([[3, 0], [0, 0]], ["here", "gone"]).details["classification"]["report_text"]
    assert [line.split() for line in absent.splitlines()][3] == ["gone", "-", "-", "-", "0"]


def test_an_evaluation_without_samples_scores_nan() -> None:
    for scores in (
        classification_scores(np.zeros((3, 3)), "abc"),
        multilabel_scores(np.zeros((2, 4)), "ab"),
        segmentation_scores(np.zeros((2, 2)), "ab"),
        regression_scores([], []),
    ):
        assert scores.metrics
        assert all(math.isnan(value) for value in scores.metrics.values())
    assert classification_scores(np.zeros((0, 0)), []).details["classification"]["confusion_matrix"] == []


def test_a_class_that_is_called_like_a_row_of_averages_keeps_its_own() -> None:
    report = classification_scores([[3, 1], [0, 4]], ["accuracy", "macro avg"]).details["classification"]["report"]
    assert report["accuracy"] == pytest.approx(7 / 8)
    assert report["accuracy (class)"]["support"] == 4
    assert report["macro avg (class)"]["recall"] == 1.0


def test_matthews_correlation_of_more_pixels_than_64_bits_can_square() -> None:
    small = np.array([[9, 1], [2, 8]])
    metrics = classification_scores(small * 10**12, "ab").metrics
    assert metrics["mcc"] == pytest.approx(classification_scores(small, "ab").metrics["mcc"], abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_multilabel_scores_are_sklearns(seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels, predictions = generator.random((60, 5)) < 0.3, generator.random((60, 5)) < 0.4
    labels[:, 4] = predictions[:, 4] = False  # a label that never occurs
    scores = multilabel_scores(multilabel_counts(torch.tensor(labels), torch.tensor(predictions)), "abcde")
    expected = {"hamming_loss": sk.hamming_loss(labels, predictions)}
    assert scores.metrics == pytest.approx(expected | averages(labels, predictions), abs=1e-12)
    wanted = sk.classification_report(labels, predictions, target_names=list("abcde"), zero_division=0)
    text = scores.details["classification"]["report_text"]
    assert text == "".join(line for line in wanted.splitlines(keepends=True) if "samples avg" not in line)


def test_segmentation_scores_are_those_of_sklearns_jaccard() -> None:
    labels, predictions = draw(400, 5)
    labels, predictions = np.where(labels == 3, 0, labels), np.where(predictions == 3, 0, predictions)
    scores = segmentation_scores(confusion(labels, predictions, 5), list("abcde"))
    each = sk.jaccard_score(labels, predictions, average=None, labels=[0, 1, 2, 4])
    details = scores.details["segmentation"]
    assert details["iou"][3] is None
    assert [iou for iou in details["iou"] if iou is not None] == pytest.approx(each, abs=1e-12)
    assert scores.metrics == pytest.approx(
        {"mean_iou": each.mean(), "pixel_accuracy": (labels == predictions).mean()}, abs=1e-12
    )


def test_regression_scores_are_sklearns_and_scipys() -> None:
    generator = np.random.default_rng(0)
    targets = generator.normal(3, 2, 200).round(1)  # with ties
    predictions = targets + generator.normal(0, 1, 200)
    scores = regression_scores(predictions, targets)
    expected = {
        "mse": sk.mean_squared_error(targets, predictions),
        "rmse": sk.root_mean_squared_error(targets, predictions),
        "mae": sk.mean_absolute_error(targets, predictions),
        "r2": sk.r2_score(targets, predictions),
        "pearson": stats.pearsonr(predictions, targets).statistic,
        "spearman": stats.spearmanr(predictions, targets).statistic,
    }
    assert scores.metrics == pytest.approx(expected, abs=1e-12)


def test_correlations_of_constant_short_or_nan_values_are_nan() -> None:
    for first, second in (([1.0, 1.0], [1.0, 2.0]), ([1.0], [2.0]), ([], []), ([1.0, math.nan], [1.0, 2.0])):
        assert math.isnan(pearson_correlation(first, second))
        assert math.isnan(spearman_correlation(first, second))
        assert math.isnan(regression_scores(first, second).metrics["pearson"])
    assert spearman_correlation([1.0, 2.0, math.inf], [1.0, 2.0, 3.0]) == pytest.approx(1.0)
