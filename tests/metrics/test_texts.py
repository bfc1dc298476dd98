"""Answers are scored as SQuAD's own evaluation scores them."""

import math

import numpy as np
import pytest

from accel_train.metrics.texts import answer_scores, exact_match, f1, normalized


@pytest.mark.parametrize(
    ("answer", "wanted", "exact", "words"),
    [
        ("The Cat.", ["a cat"], 1.0, 1.0),
        ("in New York City", ["New York", "York"], 0.0, 2 / 3),
        ("two two", ["two"], 0.0, 2 / 3),
        ("cat", ["dog"], 0.0, 0.0),
        ("", ["dog"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("cat", [], 0.0, 0.0),
        ("the", [], 1.0, 1.0),
        ("", ["the", "dog"], 0.0, 0.0),  # an answer of which nothing is left is none beside others
    ],
)
def test_words_are_compared_without_articles_case_and_punctuation(
    answer: str, wanted: list[str], exact: float, words: float
) -> None:
    assert exact_match(answer, wanted) == exact
    assert f1(answer, wanted) == pytest.approx(words)


def test_what_is_compared_has_one_blank_between_words() -> None:
    assert normalized(" An  over-long\tAnswer, the end!") == "overlong answer end"


def test_an_empty_answer_is_given_above_the_threshold_and_the_best_one_is_found() -> None:
    answers, wanted = ["one", "two", "three", "four"], [["one"], [], ["three"], []]
    scores = [-2.0, 1.0, 2.0, 3.0]
    found = answer_scores(answers, scores, wanted, 0.0)
    assert found["exact_match"] == found["f1"] == 0.75
    assert (found["has_answer_f1"], found["no_answer_accuracy"]) == (0.5, 1.0)
    every = {at: answer_scores(answers, scores, wanted, at)["f1"] for at in (-3.0, -2.0, 1.0, 2.0, 3.0)}
    assert found["best_f1"] == max(every.values())
    assert every[found["best_f1_threshold"]] == max(every.values())
    assert answer_scores(answers, scores, wanted, None) == {"exact_match": 0.5, "f1": 0.5}
    assert math.isnan(answer_scores([], [], [], None)["f1"])


def test_the_best_threshold_is_the_best_of_all(subtests: pytest.Subtests) -> None:
    draw = np.random.default_rng(0)
    for number in range(20):
        with subtests.test(number=number):
            scores = draw.integers(-3, 3, 12).astype(float).tolist()
            wanted = [["yes"] if has else [] for has in draw.random(12) < 0.5]
            answers = ["yes" if right else "no" for right in draw.random(12) < 0.6]
            found = answer_scores(answers, scores, wanted, 0.0)
            tried = [answer_scores(answers, scores, wanted, at)["f1"] for at in (-9.0, *sorted(set(scores)))]
            assert found["best_f1"] == pytest.approx(max(tried))
