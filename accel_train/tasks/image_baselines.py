"""What a trained image classifier should beat: the commonest class, and a linear model on thumbnails."""

import warnings

import numpy as np
from numpy.typing import NDArray

from accel_train.data.decoding import to_mode
from accel_train.data.labelled_images import LabelledImages

MAX_IMAGES = 2_000
"""Of each side, evenly spaced: a few seconds where images have to be decoded."""
_EDGE = 8


def image_baselines(train: LabelledImages, held_out: LabelledImages) -> dict[str, float]:
    """majority_accuracy, and logistic_regression_accuracy (on 8 x 8 grey thumbnails), where scikit-learn is installed."""
    majority = int(np.bincount(train.labels).argmax())
    found = {"majority_accuracy": float((held_out.labels == majority).mean())}
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        return found
    inputs, labels = thumbnails(train)
    if len(np.unique(labels)) < 2:
        return found
    mean, scale = inputs.mean(0), inputs.std() + 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline need not be the best of its kind
        model = LogisticRegression(max_iter=200).fit((inputs - mean) / scale, labels)
    inputs, labels = thumbnails(held_out)
    right = model.predict((inputs - mean) / scale) == labels
    return {**found, "logistic_regression_accuracy": float(right.mean())}


def thumbnails(images: LabelledImages) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(n, 64) grey values of 0 to 1 and (n,) labels, of at most MAX_IMAGES of the images."""
    count = min(len(images), MAX_IMAGES)
    chosen = np.arange(count) * len(images) // count
    rows = [
        np.asarray(to_mode(images.image(index), "L", images.where(index)).resize((_EDGE, _EDGE)), dtype=np.float32)
        for index in chosen.tolist()
    ]
    return np.stack(rows).reshape(count, -1) / np.float32(255), images.labels[chosen]
