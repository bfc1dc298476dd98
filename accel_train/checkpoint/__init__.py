"""Checkpoints: how files are written, verified, found, kept and removed, and to which run they belong.

`engine` and `training` decide when a run saves.
"""
