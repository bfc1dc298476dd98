"""Change one model on one device: attention, compilation, freezing, LoRA, memory estimates, loading.

The package `parallel` spreads a model over processes. The package `optim` updates its weights.
"""
