"""Answers as positions in a context: their loss, the likeliest spans of a question, and a baseline without a model."""

import math
import re
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from accel_train.task import Batch, Tensors, Totals
from accel_train.tasks.common.texts import WORD
from accel_train.tasks.question_answering.data import Question

_WORD = re.compile(rf"{WORD}|[^\w\s]")
# Number of words on each side of an answer that are searched for words of the question.
_NEAR = 10


def position_loss_sum(logits: Tensor, positions: Tensor, mask: Tensor, label_smoothing: float) -> Tensor:
    """Return the fp32 cross-entropy of the right position in each window, summed over windows (0-dim).

    With smoothing e, the target is (1 - e) x the right position + e / n for each of a window's n positions.

    Args:
        logits: (W, T).
        positions: (W,) index of the right position.
        mask: (W, T), 0 at padding, where no answer can be.
    """
    is_place = mask > 0
    log_shares = logits.float().masked_fill(~is_place, -torch.inf).log_softmax(dim=1)
    losses = -log_shares.gather(1, positions[:, None])[:, 0]
    if label_smoothing:
        spread = -log_shares.masked_fill(~is_place, 0.0).sum(1) / is_place.sum(1)
        losses = (1 - label_smoothing) * losses + label_smoothing * spread
    return losses.sum()


def best_spans(start: Tensor, end: Tensor, batch: Batch, *, num_best: int, max_answer_length: int) -> Tensors:
    """Return the likeliest answers of each question over all of its windows.

    The score of an answer is the sum of the logits of its first and last token. All spans of up to `max_answer_length`
    tokens of the context are compared.

    Args:
        start, end: logits (W, T) of the first and last token.
        batch: has `context`, `offsets`, and `windows`, as `collate_windows` makes them.

    Returns:
        `spans` (N, num_best, 2): first character and end of each answer in the context.
        `scores` (N, num_best): in falling order, -inf if a question has fewer answers.
        `null` (N,): score of no answer, the minimum over windows of the first token's start plus end logit, as in
            SQuAD 2.0.
    """
    outside, windows = batch["context"] == 0, batch["windows"]
    length = min(max_answer_length, start.shape[1])
    first, last = (logits.masked_fill(outside, -torch.inf) for logits in (start, end))
    # (W, T, length): the last dimension is the number of tokens that follow the answer's first token.
    scores = (first[..., None] + pad(last, (0, length - 1), value=-torch.inf).unfold(1, length, 1)).flatten(1)
    count = min(num_best, scores.shape[1])
    best, place = scores.topk(count)
    begins, ends = place // length, (place // length + place % length).clamp(max=start.shape[1] - 1)
    offsets = batch["offsets"]
    spans = torch.stack([offsets[..., 0].gather(1, begins), offsets[..., 1].gather(1, ends)], dim=-1)
    best, spans = pad(best, (0, num_best - count), value=-torch.inf), pad(spans, (0, 0, 0, num_best - count))
    # Combine the windows of each question.
    missing, windows = windows < 0, windows.clamp(min=0)
    of_question = best[windows].masked_fill(missing[..., None], -torch.inf).flatten(1)
    top, which = of_question.topk(num_best)
    chosen = spans[windows].flatten(1, 2).gather(1, which[..., None].expand(-1, -1, 2))
    null = (start[:, 0] + end[:, 0])[windows].masked_fill(missing, torch.inf).amin(1)
    return {"spans": chosen, "scores": top, "null": null}


class Best(NamedTuple):
    """One of the likeliest answers to a question."""

    text: str
    probability: float
    """Probability among the kept answers and no answer."""
    null_score: float
    """Score of no answer minus the score of this answer. Higher favors no answer."""


def ranked(question: Question, rows: Totals, row: int) -> list[Best]:
    """Return a question's kept answers without repetition, the likeliest first.

    A question without any possible answer gets one empty answer.
    """
    null = float(rows["null"][row])
    scores = rows["scores"][row].astype(np.float64)
    scores = scores[np.isfinite(scores)]
    known = np.append(scores, null)
    weights = np.exp(known - known.max())
    shares = weights / weights.sum()
    found: dict[str, Best] = {}
    for (start, end), score, share in zip(rows["spans"][row].tolist(), scores.tolist(), shares.tolist()):
        text = question.context[start:end].strip()
        if text and text not in found:
            found[text] = Best(text, round(share, 6), round(null - score, 6))
    return list(found.values()) or [Best("", 1.0, math.inf)]


def overlap_answers(train: Sequence[Question], asked: Sequence[Question]) -> list[str]:
    """Return for each question the part of its context with the most words of the question nearby.

    This is the sliding window of Richardson et al. (2013), a baseline of SQuAD. A part has as many words as the median
    training answer. Each word of the question counts once, with 1 / its distance in words. Words of the question inside
    a part lower its score.
    """
    lengths = [len(_WORD.findall(row.answers[0])) for row in train if row.answers]
    length = max(1, median_low(lengths)) if lengths else 1
    return [_overlap_answer(row, length) for row in asked]


def _overlap_answer(row: Question, length: int) -> str:
    wanted = {word.lower() for word in _WORD.findall(row.question)}
    words = list(_WORD.finditer(row.context))
    if not words:
        return ""
    known = [word[0].lower() if word[0].lower() in wanted else "" for word in words]
    best, best_start = -math.inf, 0
    for start in range(max(1, len(words) - length + 1)):
        score = -float(sum(map(bool, known[start : start + length])))
        seen: set[str] = set()
        for distance in range(1, _NEAR + 1):
            before, after = start - distance, start + length - 1 + distance
            around = {known[place] for place in (before, after) if 0 <= place < len(known)} - {""} - seen
            score += len(around) / distance
            seen |= around
        if score > best:
            best, best_start = score, start
    last = min(best_start + length, len(words)) - 1
    return row.context[words[best_start].start() : words[last].end()]
