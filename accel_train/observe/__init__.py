"""Seeing a run while it runs: its folder, metrics and events, progress, throughput, trackers.

What is drawn from them afterwards is in `report`."""

from accel_train.observe.run_folder import read_events, read_metrics, read_summary

__all__ = ["read_events", "read_metrics", "read_summary"]
