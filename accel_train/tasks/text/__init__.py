"""Helpers of the text tasks: models, baselines, metrics, model cards.

The tasks themselves are one folder up."""
