"""Use a finished run: evaluate, predict, generate, export.

No module here trains.
"""
