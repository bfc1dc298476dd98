"""A small good recipe to plan with."""

from typing import Any

from accel_train.plan.plan import Plan

GOOD: dict[str, Any] = {
    "output_dir": "out",
    "model": {"config": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 1024}},
    "data": {"train": "text.txt", "eval_fraction": 0, "sequence_length": 64, "cache_dir": "cache"},
    "batch": {"global_batch_size": 16, "per_device_batch_size": 2},
    "optimizer": {"learning_rate": 1e-3, "lr_scaling": {"rule": "linear", "base_batch_size": 4}},
    "schedule": {"max_steps": 10, "warmup_ratio": 0.25},
    "evaluate": {"every_steps": 0},
    "checkpoint": {"every_steps": 0},
    "log": {"progress": False},
}


def parts_of(plan: Plan) -> dict[str, int]:
    """Bytes of each part of a process's memory; 0 if unknown."""
    return {part.name: part.num_bytes or 0 for part in plan.memory}


def rows_of(text: str, *names: str) -> str:
    """The rows of a printed plan that begin with these names, with single spaces."""
    rows = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(row for row in rows if row.startswith(tuple(f"{name} " for name in names)))
