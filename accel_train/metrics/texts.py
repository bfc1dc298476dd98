"""Scores of generated texts against their references: BLEU, chrF, ROUGE and exact matches (packages sacrebleu and rouge-score)."""

import math
from collections.abc import Sequence
from importlib.util import find_spec

_PACKAGES = {"sacrebleu": "sacrebleu", "rouge_score": "rouge-score"}
_ROUGE = ("rouge1", "rouge2", "rougeL")
TEXT_SCORES = ("bleu", "chrf", *_ROUGE, "exact_match")
"""Names of what `text_scores` returns."""


def require_packages() -> None:
    """Refuse to score texts where a package for it is missing.

    Raises:
        ValueError: names the package and the extra that installs it.
    """
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ValueError(
            f"seq2seq scores generated texts by {' and '.join(missing)}; install it: pip install 'accel-train[seq2seq]', or set "
            "evaluate.generation.max_samples to 0"
        )


def text_scores(
    generated: Sequence[str], references: Sequence[str], *, bleu_tokenizer: str = "13a"
) -> dict[str, float]:
    """Return corpus BLEU and chrF, 0 to 100, as sacrebleu computes them, and mean F1 of ROUGE and exact matches, 0 to 1.

    BLEU is over n-grams of up to 4 words, fewer where no text is so long. ROUGE is Google's (rouge-score, without stemming), which reads the letters a to z and digits alone. NaN without a text.
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
