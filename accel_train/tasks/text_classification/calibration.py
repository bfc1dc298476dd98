"""Calibrate the scores of an n-grams model by one temperature, from training texts that other models did not see.

Each fold of the training texts is predicted by a model that trained on the other folds, by the same recipe. The
temperature that gives these predictions the lowest loss divides the logits of the run's model (Guo et al. 2017, "On
Calibration of Modern Neural Networks", ICML), so the order of the classes stays.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from accel_train.core.errors import DataError
from accel_train.data.order import DataOrder
from accel_train.model.ngrams import NgramsForSequenceClassification
from accel_train.optim.optimizers import build_optimizer
from accel_train.optim.schedule import set_learning_rate
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData, Training

FOLDS = 5
LEAST_ROWS = 100
ENOUGH_ROWS = 1500
"""Predictions that tell the temperature well enough: further folds are left out."""
MOST_NGRAMS = 50_000_000
"""n-grams of the training texts that are held in memory, with 12 bytes each."""
_LOG_RANGE = math.log(20)
_TEXTS_AT_ONCE = 64


class LossSum(Protocol):
    """The task's loss of logits, in training with label smoothing and class weights."""

    def __call__(self, logits: Tensor, labels: Tensor, *, training: bool) -> Tensor: ...


class Features(NamedTuple):
    """The n-grams of one text."""

    rows: Tensor
    """Table row of each n-gram."""
    weights: Tensor
    shares: Tensor | None
    """Shares of common n-grams, for a pair."""


def fit_temperature(
    model: NgramsForSequenceClassification, data: TaskData, recipe: Recipe, training: Training, loss_sum: LossSum
) -> tuple[float, str]:
    """Return the temperature, and a sentence about it.

    Raises:
        DataError: there is no temperature. The text says why.
    """
    samples: Any = data.train
    count = len({samples[number].ids.tobytes() for number in range(len(samples))})
    if count < LEAST_ROWS:
        raise DataError(f"too few different training texts: {count}; it takes {LEAST_ROWS}")
    if not recipe.model.config:
        raise DataError("the model did not begin with new weights")
    if recipe.optimizer.averages:
        raise DataError("the weights are averages of those of the last steps")
    if getattr(recipe.data, "group_column", None) is not None:
        raise DataError("data.group_column keeps texts together that other models would have to divide")
    logits, labels = predict_unseen(model, data, recipe, training, loss_sum)
    if bool(_is_right(logits, labels).all()):
        raise DataError("models of four fifths of the training texts make no mistake on the others")

    def loss_at(log_temperature: float) -> float:
        return float(loss_sum(logits / math.exp(log_temperature), labels, training=False)) / len(labels)

    temperature = math.exp(_lowest(loss_at, -_LOG_RANGE, _LOG_RANGE))
    before, after = loss_at(0.0), loss_at(math.log(temperature))
    found = f"logits divided by {temperature:.3g}; cross-validated loss {before:.4g} before, {after:.4g} after"
    return temperature, f"scores are calibrated: {found}"


def predict_unseen(
    model: NgramsForSequenceClassification,
    data: TaskData,
    recipe: Recipe,
    training: Training,
    loss_sum: LossSum,
) -> tuple[Tensor, Tensor]:
    """Return the logits (rows, labels), by models that trained on other folds, and the labels of these rows.

    Equal texts are in one fold.

    Raises:
        DataError: the texts have more n-grams than `MOST_NGRAMS`.
    """
    samples: Any = data.train
    every = [samples[number] for number in range(len(samples))]
    texts = read_features(model, data, every)
    folds = np.array([zlib.crc32(each.ids.tobytes()) % FOLDS for each in every])
    occurring, compact = torch.cat([text.rows for text in texts]).unique(return_inverse=True)
    parts = compact.split([len(text.rows) for text in texts])
    texts = [text._replace(rows=part) for text, part in zip(texts, parts, strict=True)]
    labels = torch.from_numpy(np.stack([np.asarray(each.label) for each in every])).to(model.device)
    found: list[tuple[Tensor, Tensor]] = []
    for fold in sorted({*folds.tolist()}):
        unseen, seen = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        if sum(len(each) for _, each in found) < ENOUGH_ROWS and len(seen):
            own = trained_on(model, len(occurring), texts, labels, seen, recipe, training, loss_sum)
            with torch.no_grad():
                logits = [
                    _logits(own, texts, unseen[at : at + _TEXTS_AT_ONCE])
                    for at in range(0, len(unseen), _TEXTS_AT_ONCE)
                ]
            found.append((torch.cat(logits), labels[unseen]))
    return torch.cat([logits for logits, _ in found]).double(), torch.cat([each for _, each in found])


@torch.no_grad()
def read_features(model: NgramsForSequenceClassification, data: TaskData, samples: Sequence[Any]) -> list[Features]:
    """Return the n-grams of each text.

    Raises:
        DataError: there are more than `MOST_NGRAMS`.
    """
    texts: list[Features] = []
    total = 0
    for start in range(0, len(samples), _TEXTS_AT_ONCE):
        batch = data.collate(samples[start : start + _TEXTS_AT_ONCE])
        names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch]
        rows, weights, shares = model.weighted(**{name: batch[name].to(model.device) for name in names})
        for number, (own, weight) in enumerate(zip(rows, weights, strict=True)):
            there = weight != 0
            texts.append(Features(own[there], weight[there], None if shares is None else shares[number]))
            total += len(texts[-1].rows)
        if total > MOST_NGRAMS:
            raise DataError(f"the training texts have more than {MOST_NGRAMS:,} n-grams")
    return texts


def trained_on(
    model: NgramsForSequenceClassification,
    num_rows: int,
    texts: Sequence[Features],
    labels: Tensor,
    seen: Any,
    recipe: Recipe,
    training: Training,
    loss_sum: LossSum,
) -> NgramsForSequenceClassification:
    """Return a model of the table rows that occur, trained on some texts with the run's order, rates, and epochs."""
    config = deepcopy(model.config)
    config.num_buckets = num_rows
    with torch.random.fork_rng(devices=[]):
        own = NgramsForSequenceClassification(config).to(model.device)
    optimizer = build_optimizer(own, recipe.optimizer, model.device)
    lengths = training.order.lengths
    order: DataOrder = replace(
        training.order,
        num_samples=len(seen),
        last_batch="carry",
        lengths=None if lengths is None else lengths[seen],
        epoch_order=None,
    )
    num_steps = max(1, round(training.steps * len(seen) / len(texts)))
    for step in range(num_steps):
        some = seen[order.step_samples(step)]
        loss = loss_sum(_logits(own, texts, some), labels[some], training=True) / len(some)
        loss.backward()
        if recipe.optimizer.max_grad_norm:
            nn.utils.clip_grad_norm_(own.parameters(), recipe.optimizer.max_grad_norm)
        set_learning_rate(optimizer, training.rate(step * training.steps // num_steps))
        optimizer.step()
        optimizer.zero_grad()
    return own


def _logits(model: NgramsForSequenceClassification, texts: Sequence[Features], numbers: Any) -> Tensor:
    some = [texts[number] for number in numbers]
    rows, weights = (
        nn.utils.rnn.pad_sequence(each, batch_first=True)
        for each in ([text.rows for text in some], [text.weights for text in some])
    )
    shares = [text.shares for text in some if text.shares is not None]
    return model.logits_of(rows, weights, torch.stack(shares) if shares else None).float()


def _is_right(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(dim=1) == labels if labels.ndim == 1 else ((logits > 0) == labels.bool()).all(dim=1)


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one minimum is lowest, to 1e-4."""
    while high - low > 1e-4:
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2
