"""The needs of a run, before it starts: steps, memory, traffic, time, saving, failures.

Nothing here builds a model's weights."""
