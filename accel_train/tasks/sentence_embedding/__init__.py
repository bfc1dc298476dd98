"""Sentence embedding: one vector per text, near the vectors of texts with the same meaning.

`config.py` has the settings of `data`, `data.py` reads samples, `losses.py` has the losses over the global batch,
`metrics.py` the scores, `folder.py` the files of sentence-transformers, and `task.py` joins them. Other tasks do not
import this package.
"""
