"""Helpers of the text tasks: models, baselines, metrics, and model cards.

The tasks are in `accel_train/tasks`."""
