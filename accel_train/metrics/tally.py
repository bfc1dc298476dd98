"""Count on the device during an evaluation, in sums of fixed size.

So batches do not wait for the host, and memory stays constant.
"""

import math

import torch
from torch import Tensor

MAX_HISTOGRAM_CELLS = 2**21  # cells of one AUROC histogram: 16 MiB of int64
MOST_BITS, FEWEST_BITS = 16, 8
"""Maximum and minimum bits of a score in an AUROC histogram: sign, 5 bits of exponent, and the rest for the
mantissa."""

_SMALLEST_EXPONENT, _MANTISSA_BITS = 127 - 15, 23


def confusion_counts(labels: Tensor, predictions: Tensor, num_classes: int) -> Tensor:
    """Return the confusion matrix: (C, C) int64, with the truth in rows and the predictions in columns.

    `labels` and `predictions` are integers of one shape (any). A pair counts only if both lie in 0..C-1. So ignored
    places (-100, 255) and padding rows do not count.
    """
    labels, predictions = labels.reshape(-1).long(), predictions.reshape(-1).long()
    valid = (labels >= 0) & (labels < num_classes) & (predictions >= 0) & (predictions < num_classes)
    cells = num_classes * num_classes
    index = torch.where(valid, labels * num_classes + predictions, cells)
    return count_values(index, cells).view(num_classes, num_classes)


def multilabel_counts(labels: Tensor, predictions: Tensor) -> Tensor:
    """Return true positives, false positives, false negatives, and true negatives of each label: (C, 4) int64.

    Both inputs are (N, C), bool or numbers. Values above 0 are set. A negative label does not count.
    """
    known, truth, predicted = labels >= 0, labels > 0, predictions > 0
    counted = (truth & predicted, ~truth & predicted & known, truth & ~predicted, ~truth & ~predicted & known)
    return torch.stack([cells.sum(0) for cells in counted], dim=1)


def one_vs_rest_log_odds(logits: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of each class's softmax probability, minus its value at chance: (N, C) fp32 to rank by.

    Chance is p = 1/C. The result orders samples like the probability, but still separates probabilities such as 0.99999
    or 1e-9. It is 0 at chance, where an untrained model's probabilities lie and `score_histogram` has the finest bins.
    """
    logits = logits.float()
    log_probabilities = logits.log_softmax(dim=1)
    # Rounding would lose 1 - p of the likeliest class, so it is computed as the sum of the other classes.
    top = logits.argmax(dim=1, keepdim=True)
    rest = logits.scatter(1, top, -torch.inf).logsumexp(dim=1, keepdim=True)
    others = log_probabilities - torch.log1p(-log_probabilities.exp())
    return others.scatter(1, top, logits.gather(1, top) - rest) + math.log(max(logits.shape[1] - 1, 1))


def score_histogram(scores: Tensor, labels: Tensor, num_classes: int) -> Tensor | None:
    """Return the distribution of each class's scores, over the rest and over the class itself: (C, 2, bins) int64.

    Scores are cut to 10 bits of mantissa, so bins are 0.1 % apart and in numerical order. Magnitudes below 2**-15 share
    one bin, and magnitudes beyond 2**17 share one bin per sign. NaN counts as the lowest score. Cutting can tie two
    scores but never reverses them. Beyond 16 classes, the mantissa is shortened to stay within MAX_HISTOGRAM_CELLS (7
    bits for 100 classes, 4 for 1,000). Beyond 4,096 classes, bins would be too coarse, and the result is None.

    Args:
        scores: (N, C) real numbers. Only their order matters. `one_vs_rest_log_odds` has the best resolution.
        labels: (N,) integers. Values outside 0..C-1 do not count. For labels that may occur together, (N, C)
            numbers: above 0 is set, and a negative number does not count.
    """
    bits = histogram_bits(num_classes)
    if bits is None:
        return None
    bins = 2**bits
    if labels.dim() == 2:
        positive, valid = labels > 0, labels >= 0
    else:
        positive = labels[:, None] == torch.arange(num_classes, device=labels.device)
        valid = ((labels >= 0) & (labels < num_classes))[:, None]
    classes = torch.arange(num_classes, device=labels.device).expand_as(positive)
    cells = num_classes * 2 * bins
    index = (classes * 2 + positive) * bins + _ordered_keys(scores, bits)
    return count_values(torch.where(valid, index, cells).reshape(-1), cells).view(num_classes, 2, bins)


def histogram_bits(num_classes: int) -> int | None:
    """Return the bits of a score that the histogram of `num_classes` classes keeps; None if it would be too coarse."""
    choices = range(MOST_BITS, FEWEST_BITS - 1, -1)
    return next((bits for bits in choices if num_classes * 2 * 2**bits <= MAX_HISTOGRAM_CELLS), None)


def count_values(index: Tensor, cells: int) -> Tensor:
    """Count how often each of 0..cells-1 occurs in `index`. Entries equal to `cells` do not count."""
    # `bincount` would read the greatest index from the device and wait for it.
    counts = torch.zeros(cells + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, index, torch.ones_like(index))[:cells]


def _ordered_keys(scores: Tensor, bits: int) -> Tensor:
    """Return keys in 0..2**bits - 1 in the order of the scores.

    A key is the leading bits of an fp32 number with a smaller exponent.
    """
    scores = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    half = 2 ** (bits - 1)
    # Positive floats keep their order when read as integers. 5 of the 8 exponent bits are kept, from 2**-15 (key 0) on.
    magnitude = scores.abs().view(torch.int32) - (_SMALLEST_EXPONENT << _MANTISSA_BITS)
    magnitude = (magnitude >> (5 + _MANTISSA_BITS + 1 - bits)).clamp(0, half - 1).long()
    return torch.where(scores < 0, half - magnitude, half + magnitude)
