"""Parts that at least two tasks share: heads and models, tokenizing, generation, and losses.

This package imports no single task, except for the vocabulary of a language model.
"""
