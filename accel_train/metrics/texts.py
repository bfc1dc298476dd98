"""Score generated texts (with sacrebleu and rouge-score) and answers to questions (as SQuAD 1.1 and 2.0 do)."""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

Texts = Sequence[str]

_ROUGE = ("rouge1", "rouge2", "rougeL")
TEXT_SCORES = ("bleu", "chrf", *_ROUGE, "exact_match")
"""Names of the scores that `text_scores` returns."""

_OF_ANSWERS = ("exact_match", "f1")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def text_scores(generated: Texts, references: Texts, *, bleu_tokenizer: str = "13a") -> dict[str, float]:
    """Return corpus BLEU and chrF (0 to 100), and mean ROUGE F1 and exact match (0 to 1); NaN without texts.

    BLEU and chrF are sacrebleu's. BLEU uses n-grams of up to 4 words, or fewer if all texts are shorter. ROUGE is
    Google's (rouge-score, no stemming) and reads only the letters a to z and digits.
    """
    if not generated:
        return dict.fromkeys(TEXT_SCORES, math.nan)
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF

    scorer = RougeScorer(_ROUGE)
    rouge = [scorer.score(reference, text) for text, reference in zip(generated, references, strict=True)]
    found = {name: sum(each[name].fmeasure for each in rouge) / len(rouge) for name in _ROUGE}
    right = sum(text == reference for text, reference in zip(generated, references, strict=True))
    return {
        "bleu": BLEU(tokenize=bleu_tokenizer, effective_order=True).corpus_score(generated, [references]).score,
        "chrf": CHRF().corpus_score(generated, [references]).score,
        **found,
        "exact_match": right / len(generated),
    }


def normalized(answer: str) -> str:
    """Return an answer in lower case, without punctuation and articles (a, an, the), with single blanks."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(answer: str, wanted: Texts) -> float:
    """Return 1.0 if the answer equals a wanted answer, otherwise 0.0.

    Without wanted answers, the empty answer is right.
    """
    return float(normalized(answer) in {normalized(each) for each in _counting(wanted)})


def f1(answer: str, wanted: Texts) -> float:
    """Return the best F1 of the words of the answer and a wanted answer.

    Without wanted answers, the empty answer is right.
    """
    return max(_f1(normalized(answer).split(), normalized(each).split()) for each in _counting(wanted))


def _counting(wanted: Texts) -> Texts:
    """Return the answers that SQuAD 2 compares with: those not empty after normalization, or the empty answer."""
    return [each for each in wanted if normalized(each)] or [""]


def _f1(words: Texts, wanted: Texts) -> float:
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


def answer_scores(
    answers: Texts, null_scores: Sequence[float], wanted: Sequence[Texts], threshold: float | None
) -> dict[str, float]:
    """Return `exact_match` and `f1` (0 to 1), means over questions; NaN without questions.

    With a threshold, the answer is empty if the null score is above the threshold. The null score says how much
    likelier no answer is than this answer. Then the result also has `has_answer_f1`, `no_answer_accuracy`, the best
    `f1` of any threshold, and that threshold.
    """
    hits = np.array([[exact_match(answer, each), f1(answer, each)] for answer, each in zip(answers, wanted)])
    if not len(hits):
        return dict.fromkeys(_OF_ANSWERS, math.nan)
    if threshold is None:
        return dict(zip(_OF_ANSWERS, hits.mean(0).tolist()))
    scores, without = np.asarray(null_scores), np.array([not any(map(normalized, each)) for each in wanted])
    given = np.where((scores > threshold)[:, None], without[:, None].astype(float), hits)
    found = dict(zip(_OF_ANSWERS, given.mean(0).tolist()))
    for name, column, chosen in (("has_answer_f1", 1, ~without), ("no_answer_accuracy", 0, without)):
        found[name] = float(given[chosen, column].mean()) if chosen.any() else math.nan
    best, at = _best_threshold(scores, hits[:, 1], without)
    return {**found, "best_f1": best, "best_f1_threshold": at}


def _best_threshold(scores: np.ndarray, hits: np.ndarray, without: np.ndarray) -> tuple[float, float]:
    """Return the best mean over thresholds, and its threshold.

    A threshold answers the questions whose null score is not above it.
    """
    order = np.argsort(scores, kind="stable")
    gained = np.cumsum(hits[order] - without[order])
    ends = np.append(scores[order][1:] != scores[order][:-1], True)  # questions with equal scores are answered together
    totals = np.where(ends, gained, -np.inf)
    place = int(totals.argmax())
    if totals[place] <= 0:  # answering no question is as good
        return float(without.mean()), float(scores.min()) - 1.0
    return float((without.sum() + totals[place]) / len(scores)), float(scores[order][place])
