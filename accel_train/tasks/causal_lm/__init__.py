"""Causal language modeling: predict each next token of a text, or of rows to fine-tune on.

`config.py` has the settings of `data`, `data.py` reads samples, and `task.py` has model, loss, and scores. Other tasks
do not import this package.
"""
