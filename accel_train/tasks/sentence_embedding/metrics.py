"""Scores of sentence embeddings: rank correlation of scored pairs, and retrieval of each anchor's positives."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.metrics.scores import pearson_correlation, spearman_correlation

Floats = NDArray[np.floating[Any]]
CORRELATIONS = ("spearman", "pearson")
RETRIEVAL = ("recall_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10")
_LARGEST_CHUNK = 2**24
"""Most similarities in memory at a time."""


def correlations(similarities: Floats, scores: Floats) -> dict[str, float]:
    """Return Spearman's and Pearson's correlation of similarities with the scores of the pairs."""
    return {
        "spearman": spearman_correlation(similarities, scores),
        "pearson": pearson_correlation(similarities, scores),
    }


def retrieval(
    texts: NDArray[np.int64], similarities: Callable[[NDArray[Any], NDArray[Any]], Floats]
) -> dict[str, float]:
    """Return the mean over distinct anchors of recall@1, recall@10, MRR@10, and nDCG@10.

    The documents are the distinct positives of all rows. Those of an anchor are the positives of its rows. A document
    with an equal similarity counts as ranked before, so equal vectors score nothing.

    Args:
        texts: (N, K) a hash of each text: anchor, positive, and others that are not read.
        similarities: returns the matrix between the anchors of some rows and the positives of other rows.
    """
    _, rows, queries = np.unique(texts[:, 0], return_index=True, return_inverse=True)
    _, documents, targets = np.unique(texts[:, 1], return_index=True, return_inverse=True)
    pairs = np.unique(np.stack([queries, targets]), axis=1)
    ranks = []
    for chunk in np.array_split(pairs, -(-pairs.shape[1] * len(documents) // _LARGEST_CHUNK) or 1, axis=1):
        found = similarities(rows[chunk[0]], documents)
        own = np.take_along_axis(found, chunk[1][:, None], axis=1)
        # A NaN ranks last.
        ranks.append(len(documents) - (found < own).sum(1))
    rank, query = np.concatenate(ranks), pairs[0]

    def summed(values: NDArray[Any]) -> Floats:
        return np.bincount(query, values.astype(np.float64), minlength=len(rows)).astype(np.float64)

    number = np.bincount(query)
    gains = 1 / np.log2(np.arange(2, 12))
    ideal = np.cumsum(gains)[np.minimum(number, 10) - 1]
    best = np.full(len(rows), np.iinfo(np.int64).max)
    np.minimum.at(best, query, rank)
    scores = {
        "recall_at_1": summed(rank <= 1) / number,
        "recall_at_10": summed(rank <= 10) / number,
        "mrr_at_10": np.where(best <= 10, 1 / best, 0.0),
        "ndcg_at_10": summed(np.where(rank <= 10, 1 / np.log2(rank + 1), 0.0)) / ideal,
    }
    return {name: float(values.mean()) for name, values in scores.items()}
