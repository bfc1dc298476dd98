"""Strategies that spread a model over processes: DDP, FSDP2, ZeRO, tensor and sequence parallelism, mixed precision.

Every question about it is answered here, and nowhere else."""
