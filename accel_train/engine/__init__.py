"""A prepared run and its step: batches, forward and backward, agreement, evaluation, saving.

The order in which they happen is in `training`, what happens when one fails in `recovery`."""
