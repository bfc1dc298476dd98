"""Object detection: boxes around the objects of an image, each with a class.

`config.py` has the settings of `data`, `data.py` reads samples, `losses.py` has the loss, `metrics.py` the scores, and
`task.py` joins them. Other tasks do not import this package.
"""
