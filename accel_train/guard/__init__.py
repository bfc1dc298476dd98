"""The guard: what to do about a loss or gradient norm that is not finite or jumps (continue, skip, roll back, stop).

Pure decisions over numbers; who carries them out is in `recovery`."""
