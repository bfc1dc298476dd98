"""Fast implementations of parts of a model's forward and backward: attention, activations, the vocabulary loss.

The package `model` holds the changes to a whole model.
"""
