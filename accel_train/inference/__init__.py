"""Uses of a finished run: evaluate, predict, generate, export.

None of it trains."""
