"""Metrics: counted on the device during an evaluation, scored on the host, and usable as modules of `evaluate`.

This package does not depend on a model or a data set. `evaluate` is Hugging Face's package.
"""

from accel_train.metrics.registry import METRICS, fits, load_metric

__all__ = ["METRICS", "fits", "load_metric"]
