"""Strategies that spread a model over processes: DDP, FSDP2, ZeRO, tensor and sequence parallelism, mixed precision.

Other packages ask a `Strategy` instead of knowing how the model is spread.
"""
