"""Errors, records, files, JSON and formatting that everything else stands on.

Nothing here imports torch or another package of accel_train."""
