"""Helpers of the image tasks: models, baselines, test-time augmentation, maps of segments.

The tasks themselves are one folder up."""
