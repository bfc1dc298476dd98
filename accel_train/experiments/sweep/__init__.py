"""Runs of one recipe with different values of some settings: which values, training them, and comparing them.

Nothing here trains in this process: each run is started as a user starts it, and resumes as any other."""
