"""Observe a run while it trains: run folder, metrics, events, progress, throughput, and trackers.

The `report` package draws charts and tables from these records.
"""

from accel_train.observe.run_folder import read_events, read_metrics, read_summary

__all__ = ["read_events", "read_metrics", "read_summary"]
