"""The parts of a training step: batches, forward and backward, step sync, evaluation, and saving.

`training` holds the order of these parts. `recovery` handles their failures.
"""
