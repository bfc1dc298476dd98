"""What a text classifier should beat: always the same answer, a bag of words, and one whose words are weighted."""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train.data.labelled_texts import LabelledTexts
from accel_train.metrics.scores import classification_scores, multilabel_scores, regression_scores
from accel_train.metrics.tally import confusion_counts, moments, multilabel_counts
from accel_train.task import Scores

MAX_SAMPLES = 20_000
"""Training texts that a bag of words reads, the first ones of a shuffle: some 20 seconds at most."""

_MAX_WORDS = 50_000


def baseline_scores(texts: LabelledTexts) -> dict[str, float]:
    """The two scores by which a classifier is mostly judged, of each baseline, on the evaluation texts."""
    constant = "mean" if texts.scheme.problem_type == "regression" else "majority"
    shown = {
        "single_label": ("accuracy", "f1_macro"),
        "multi_label": ("f1_micro", "f1_macro"),
        "regression": ("rmse", "mae"),
    }[texts.scheme.problem_type]
    answers = {constant: constant_answer(texts), **word_answers(texts)}
    return {
        f"{name}_{metric}": _score(texts, said).metrics[metric] for name, said in answers.items() for metric in shown
    }


def constant_answer(texts: LabelledTexts) -> NDArray[Any]:
    """For each evaluation text the same: the most frequent class, the labels that most texts have, or the mean."""
    assert texts.eval is not None
    labels, num_texts = texts.train_labels, len(texts.eval)
    if texts.scheme.problem_type == "single_label":
        return np.full(num_texts, np.bincount(labels).argmax())
    if texts.scheme.problem_type == "multi_label":
        return np.tile(labels.mean(axis=0) > 0.5, (num_texts, 1))
    return np.full(num_texts, labels.mean())


def word_answers(texts: LabelledTexts) -> dict[str, NDArray[Any]]:
    """What linear models on words answer: logistic regression, one for each label, or ridge regression.

    `bag_of_words` is scikit-learn's as it comes: counts of words, all defaults. `tfidf` is the same made strong: rare words
    weigh more, 1 + log(count) for counts, and C = 10. A pair is counted as one text. Empty where there is nothing to learn
    from: no words, or one class only.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

    kinds = {
        "bag_of_words": (CountVectorizer(max_features=_MAX_WORDS), 1.0),
        "tfidf": (TfidfVectorizer(sublinear_tf=True, max_features=_MAX_WORDS), 10.0),
    }
    answers = {name: _linear_answer(texts, vectorizer, c) for name, (vectorizer, c) in kinds.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def _linear_answer(texts: LabelledTexts, vectorizer: Any, c: float) -> NDArray[Any] | None:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    assert texts.eval is not None
    chosen = np.random.default_rng(0).permutation(len(texts.train))[:MAX_SAMPLES]
    all_texts, labels = texts.train.joined(), texts.train_labels[chosen]
    try:
        features = vectorizer.fit_transform([all_texts[index] for index in chosen])
    except ValueError:  # not one word of two letters in all texts
        return None
    model: Any = LogisticRegression(C=c, max_iter=200)
    if texts.scheme.problem_type == "regression":
        model = Ridge()
    elif texts.scheme.problem_type == "multi_label":
        model = OneVsRestClassifier(model)
    elif len(np.unique(labels)) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Label .* is present in", category=UserWarning)
        answer: NDArray[Any] = model.fit(features, labels).predict(vectorizer.transform(texts.eval.joined()))
    return answer


def _score(texts: LabelledTexts, said: NDArray[Any]) -> Scores:
    names, labels = texts.scheme.names, torch.from_numpy(texts.eval_labels)
    answer = torch.from_numpy(np.asarray(said))
    if texts.scheme.problem_type == "single_label":
        return classification_scores(confusion_counts(labels, answer, len(names)).numpy(), names)
    if texts.scheme.problem_type == "multi_label":
        return multilabel_scores(multilabel_counts(labels.long(), answer.long()).numpy(), names)
    return regression_scores(moments(answer, labels).numpy())
