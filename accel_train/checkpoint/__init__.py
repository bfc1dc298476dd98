"""Checkpoints: their files, how they are written, verified, found, kept and removed, and which run they belong to.

When a run saves is decided in `engine` and `training`."""
