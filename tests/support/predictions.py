"""Labels and predictions."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train.metrics.tally import confusion_counts


def draw(num_samples: int, num_classes: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Labels, and predictions that are right more often than not."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, num_classes, num_samples)
    guesses = generator.integers(0, num_classes, num_samples)
    return labels, np.where(generator.random(num_samples) < 0.6, labels, guesses)


def confusion(labels: NDArray[Any], predictions: NDArray[Any], num_classes: int) -> NDArray[Any]:
    return confusion_counts(torch.tensor(labels), torch.tensor(predictions), num_classes).numpy()
