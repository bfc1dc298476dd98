"""Recovery from failures: rollback, out of memory, slow or diverged processes, and the diagnosis of a bad step.

`guard` decides whether a step is bad.
"""
