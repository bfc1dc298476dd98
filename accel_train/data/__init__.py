"""Turn files into ordered samples: sources, splits, labels, caches, batch sizes, and the sample order of a run.

`tasks` defines how a task uses a sample. `engine` reads the batches of a step.
"""
