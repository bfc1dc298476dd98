"""Seeing a run: its folder, what it writes down, what it shows, and the report."""

from accel_train.observe.ledger import RunFolder, read_events, read_metrics, read_summary
from accel_train.observe.observer import NoObserver, Observer, RunObserver
from accel_train.observe.progress import Progress, choose_style, format_seconds
from accel_train.observe.report import write_report
from accel_train.observe.throughput import Meter, Rates, model_flops_per_token, peak_flops
from accel_train.observe.trackers import Trackers, check_tracker_names

__all__ = [
    "Meter",
    "NoObserver",
    "Observer",
    "Progress",
    "Rates",
    "RunFolder",
    "RunObserver",
    "Trackers",
    "check_tracker_names",
    "choose_style",
    "format_seconds",
    "model_flops_per_token",
    "peak_flops",
    "read_events",
    "read_metrics",
    "read_summary",
    "write_report",
]
