"""Sweeps: runs of one recipe with different values of some settings, and their comparison.

Every run is a separate process, started as a user starts it, and resumes like any other run."""
