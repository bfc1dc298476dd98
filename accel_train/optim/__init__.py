"""Optimizers, learning rate schedules, and averages of the weights: how a step changes weights.

Code in this package does not depend on how a model is spread over processes.
"""
