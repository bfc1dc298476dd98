"""Scores of answers to questions, with the definitions of SQuAD's own evaluation (versions 1.1 and 2.0)."""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(answer: str) -> str:
    """Return an answer as it is compared: in lower case, without punctuation and the articles a, an, the, one blank between words."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(answer: str, wanted: Sequence[str]) -> float:
    """Return 1.0 where an answer is one of those wanted, else 0.0; without any the empty answer is wanted."""
    return float(normalized(answer) in {normalized(each) for each in _counting(wanted)})


def f1(answer: str, wanted: Sequence[str]) -> float:
    """Return the best F1 of the words of an answer and those of one that is wanted; without any the empty answer is wanted."""
    return max(_f1(normalized(answer).split(), normalized(each).split()) for each in _counting(wanted))


def _counting(wanted: Sequence[str]) -> Sequence[str]:
    """The answers that SQuAD 2 compares with: those of which something is left, else the empty one."""
    return [each for each in wanted if normalized(each)] or [""]


def _f1(words: Sequence[str], wanted: Sequence[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


def answer_scores(
    answers: Sequence[str], null_scores: Sequence[float], wanted: Sequence[Sequence[str]], threshold: float | None
) -> dict[str, float]:
    """Return `exact_match` and `f1`, 0 to 1, means over questions; NaN without one.

    With a threshold, the answer is empty where the null score (how much likelier no answer is than this one) is above it, and there
    are also `has_answer_f1`, `no_answer_accuracy`, and the best `f1` that any threshold gives, with that threshold.
    """
    hits = np.array([[exact_match(answer, each), f1(answer, each)] for answer, each in zip(answers, wanted)])
    if not len(hits):
        return dict.fromkeys(("exact_match", "f1"), math.nan)
    if threshold is None:
        return dict(zip(("exact_match", "f1"), hits.mean(0).tolist()))
    scores, without = np.asarray(null_scores), np.array([not any(map(normalized, each)) for each in wanted])
    given = np.where((scores > threshold)[:, None], without[:, None].astype(float), hits)
    found = dict(zip(("exact_match", "f1"), given.mean(0).tolist()))
    for name, column, chosen in (("has_answer_f1", 1, ~without), ("no_answer_accuracy", 0, without)):
        found[name] = float(given[chosen, column].mean()) if chosen.any() else math.nan
    best, at = _best_threshold(scores, hits[:, 1], without)
    return {**found, "best_f1": best, "best_f1_threshold": at}


def _best_threshold(scores: np.ndarray, hits: np.ndarray, without: np.ndarray) -> tuple[float, float]:
    """Return the best mean over all thresholds, of which each answers the questions whose null score is not above it, and where."""
    order = np.argsort(scores, kind="stable")
    gained = np.cumsum(hits[order] - without[order])
    ends = np.append(scores[order][1:] != scores[order][:-1], True)  # questions of one score are answered together
    totals = np.where(ends, gained, -np.inf)
    place = int(totals.argmax())
    if totals[place] <= 0:  # no answer at all is as good
        return float(without.mean()), float(scores.min()) - 1.0
    return float((without.sum() + totals[place]) / len(scores)), float(scores[order][place])
