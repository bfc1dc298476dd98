"""Images with labels or masks: find, decode, preprocess and augment them.

Image models and their losses are in `tasks`.
"""
