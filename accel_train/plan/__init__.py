"""Plan a run before it starts: steps, memory, traffic, time, and saving.

This package never builds a model's weights.
"""
