"""Evaluation of text classifiers: requested metrics, and baselines that a model should beat."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_train.data.labels import LabelScheme
from accel_train.metrics import METRICS, fits, load_metric, scores, tally
from accel_train.recipe.schema import Recipe
from accel_train.task import Scores, Tensors, Totals
from accel_train.tasks.common.texts import characters_as_words, joined
from accel_train.tasks.text_classification.data import LabelledTexts

MAX_SAMPLES = 20_000
"""Training texts that a bag of words reads, drawn at random. Fitting takes at most about 20 seconds."""
_MAX_CHARACTERS = 2_000_000
"""The same limit for texts whose characters are counted, in characters."""
_MAX_WORDS = 50_000


def check_metrics(recipe: Recipe, scheme: LabelScheme) -> None:
    """Load each requested metric before training, and check that it fits the labels.

    Raises:
        ValueError: a metric is unknown, or is for another problem type.
    """
    for name in recipe.evaluate.metrics:
        load_metric(name, allow_hub=recipe.evaluate.allow_hub_metrics)
        if name in METRICS and not fits(name, scheme.problem_type):
            raise ValueError(
                f"evaluate.metrics names {name!r}: it does not fit a {scheme.problem_type} problem "
                f"({scheme.reason}); leave it out: what fits is reported anyway"
            )
        if scheme.problem_type == "multi_label" and name == "auroc" and tally.histogram_bits(len(scheme.names)) is None:
            raise ValueError(f"evaluate.metrics: auroc of {len(scheme.names):,} labels is not counted; leave it out")


def count_label_metrics(names: Sequence[str], logits: Tensor, labels: Tensor) -> Tensors:
    """Return the counts for multi-label metrics that `multilabel_counts` lacks, from logits and labels (N, C)."""
    counted: Tensors = {}
    if "accuracy" in names:
        known = (labels >= 0).all(1)
        right = ((logits > 0) == (labels > 0)).all(1)
        counted["num_right"] = torch.stack([(right & known).sum(), known.sum()])
    if "auroc" in names:
        histogram = tally.score_histogram(logits, labels, logits.shape[1])
        assert histogram is not None, "check_metrics refuses so many labels"
        counted["histogram"] = histogram
    return counted


def label_metrics(names: Sequence[str], totals: Totals, averages: Mapping[str, float]) -> dict[str, float]:
    """Return multi-label metrics: exact-match accuracy, mean AUROC of the labels, and averages (`f1` is macro)."""
    found: dict[str, float] = {}
    for name in names:
        if name == "accuracy":
            right, known = totals["num_right"].tolist()
            found[name] = right / known if known else float("nan")
        elif name == "auroc":
            found[name] = scores.auroc_from_histogram(totals["histogram"], may_occur_together=True)
        else:
            found[name] = averages[name if "_" in name else f"{name}_macro"]
    return found


def baseline_scores(texts: LabelledTexts) -> dict[str, float]:
    """Return the two most common scores of each baseline on the evaluation texts.

    `majority` (or `mean`) always gives the same answer: the most frequent class, the labels that most texts have, or
    the mean. `bag_of_words` and `tfidf` are linear models of words: logistic regression, one per label, or ridge
    regression. `bag_of_words` uses scikit-learn's defaults on word counts. `tfidf` is stronger: rare words weigh more,
    counts enter as 1 + log(count), and C = 10. A pair counts as one text. For texts in scripts without spaces, the two
    count characters too, and are `bag_of_characters` and `tfidf_of_characters`.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

    constant = "mean" if texts.scheme.problem_type == "regression" else "majority"
    chosen = np.random.default_rng(0).permutation(len(texts.train))[:MAX_SAMPLES]
    train = joined(texts.train[index] for index in chosen)
    analyzer = characters_as_words(train)
    if analyzer is not None:
        train = train[: max(1, int(np.searchsorted(np.cumsum([*map(len, train)]), _MAX_CHARACTERS, "right")))]
    labels = texts.train_labels[chosen[: len(train)]]
    names = ("bag_of_words", "tfidf") if analyzer is None else ("bag_of_characters", "tfidf_of_characters")
    words: dict[str, Any] = {"analyzer": analyzer or "word", "max_features": _MAX_WORDS}
    models = ((CountVectorizer(**words), 1.0), (TfidfVectorizer(**words, sublinear_tf=True), 10.0))
    answers: dict[str, NDArray[Any] | None] = {constant: _constant_answer(texts)}
    answers |= {name: _linear_answer(texts, train, labels, *model) for name, model in zip(names, models)}
    shown = {
        "single_label": ("accuracy", "f1_macro"),
        "multi_label": ("f1_micro", "f1_macro"),
        "regression": ("rmse", "mae"),
    }[texts.scheme.problem_type]
    return {
        f"{name}_{metric}": _score(texts, answer).metrics[metric]
        for name, answer in answers.items()
        if answer is not None
        for metric in shown
    }


def _constant_answer(texts: LabelledTexts) -> NDArray[Any]:
    from sklearn.dummy import DummyClassifier, DummyRegressor

    assert texts.eval is not None
    is_regression = texts.scheme.problem_type == "regression"
    model: Any = DummyRegressor() if is_regression else DummyClassifier(strategy="most_frequent")
    return model.fit(texts.train, texts.train_labels).predict(texts.eval)


def _linear_answer(
    texts: LabelledTexts, train: Sequence[str], labels: NDArray[Any], vectorizer: Any, c: float
) -> NDArray[Any] | None:
    """Fit a linear model and return its answers for the evaluation texts, or None if the texts cannot be fitted."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline

    assert texts.eval is not None
    model: Any = LogisticRegression(C=c, max_iter=200)
    if texts.scheme.problem_type == "regression":
        model = Ridge()
    elif texts.scheme.problem_type == "multi_label":
        model = OneVsRestClassifier(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Label .* is present in", category=UserWarning)
        try:
            words = make_pipeline(vectorizer, model)
            words.fit(train, labels)
        # The texts have no word of two letters, or only one class.
        except ValueError:
            return None
        answer: NDArray[Any] = words.predict(joined(texts.eval))
    return answer


def _score(texts: LabelledTexts, answer: NDArray[Any]) -> Scores:
    names, labels = texts.scheme.names, torch.from_numpy(texts.eval_labels)
    predictions = torch.from_numpy(np.asarray(answer))
    if texts.scheme.problem_type == "single_label":
        return scores.classification_scores(tally.confusion_counts(labels, predictions, len(names)).numpy(), names)
    if texts.scheme.problem_type == "multi_label":
        return scores.multilabel_scores(tally.multilabel_counts(labels.long(), predictions.long()).numpy(), names)
    return scores.regression_scores(predictions.numpy(), labels.numpy())
