"""Metrics: counted on the device during an evaluation, scored on the host, and as modules of Hugging Face's `evaluate`.

Nothing here knows a model or a data set."""

from accel_train.metrics.registry import METRICS, load_metric

__all__ = ["METRICS", "load_metric"]
