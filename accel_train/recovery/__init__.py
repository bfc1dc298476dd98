"""Recovery after something went wrong: roll back, out of memory, slow or diverged processes, the diagnosis of a bad step.

Whether a step is bad is decided by `guard`."""
