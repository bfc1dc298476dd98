"""Schedules, optimizers and the average of the weights: how weights change in a step.

Nothing here knows how a model is spread over processes."""
