"""Sequence-to-sequence generation: a target text for each source text.

`config.py` has the settings of `data`, `data.py` reads samples, and `task.py` has model, loss, and scores. Other tasks
do not import this package.
"""
