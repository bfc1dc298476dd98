"""The settings of a run: their schema, reading and writing them, and error messages for mistyped settings.

The package of each feature applies its settings. Code in this package must not import torch.
"""
