"""Helpers of the image tasks: models, baselines, test-time augmentation, and segmentation maps.

The tasks are in `accel_train/tasks`."""
