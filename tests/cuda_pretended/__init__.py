SMALL_BYTES = 4096
"""Most bytes of a collective that a plan leaves out: step sync, the gradient norm, counters of batch norms."""
