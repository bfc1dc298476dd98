"""Image classification: one class per image.

`config.py` has the settings of `data`, `data.py` reads samples, and `task.py` has model, loss, and scores. Other tasks
do not import this package.
"""
