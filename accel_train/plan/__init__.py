"""The needs of a run, before it starts: steps, memory, traffic, time, saving.

Nothing here builds a model's weights."""
