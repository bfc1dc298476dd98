"""Short runs that answer a question: rehearsals, learning-rate tests, sweeps, and comparisons of runs.

They start runs as a user would, and do not change existing runs."""
