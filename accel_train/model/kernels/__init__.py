"""Parts of a model's forward and backward as few, quick operations: attention, activations, the loss of a vocabulary.

What changes a whole model is in `model`."""
