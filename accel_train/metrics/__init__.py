"""Metrics: counted on the device during an evaluation, scored on the host, and as modules of Hugging Face's `evaluate`."""

from accel_train.metrics.registry import METRICS, load_metric

__all__ = ["METRICS", "load_metric"]
