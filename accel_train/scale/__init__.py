"""What a run on many GPUs takes, before there are any: memory, traffic, time, failures. Arithmetic and models, never a measurement."""
