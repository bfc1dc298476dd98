"""Files become samples in their order: sources, splits, labels, caches, batch sizes, and the order of a run's samples.

What a task does with a sample lives in `tasks`, who reads batches for a step in `engine`."""
