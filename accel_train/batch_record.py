"""What a search for the micro-batch has found, kept for the next start: a small JSON file for each model, input and device."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train import __version__
from accel_train.batching import BatchSizes
from accel_train.data.cache import cache_root
from accel_train.files import make_folders, write_atomically
from accel_train.recipe import Recipe


class Remembered:
    """The answer for one key: CACHE/micro_batches/DIGEST.json, which holds the key as well."""

    def __init__(self, folder: Path, key: Mapping[str, Any], share: int) -> None:
        self.key = json.loads(json.dumps(key))
        self.share = share
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:32]}.json"

    def read(self) -> tuple[int, str] | None:
        """Samples of a micro-batch, and a sentence on where that comes from; None where there is no answer to go by."""
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            size, said, found = kept["per_device_batch_size"], str(kept["said"]), str(kept["found"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if kept.get("key") != self.key or type(size) is not int or size < 1 or self.share % size:
            return None
        return size, f"found {found[:10]}, {said}; remembered in {self.path}"

    def write(self, size: int, said: str) -> str:
        """Keep an answer in place of the one that is there; returns what became of that."""
        found = datetime.now(UTC).isoformat(timespec="seconds")
        kept = {"per_device_batch_size": size, "said": said, "found": found, "key": self.key}
        try:
            make_folders(self.path.parent)
            write_atomically(self.path, json.dumps(kept, indent=1).encode())
        except OSError as error:
            return f"not remembered: {self.path.parent} cannot be written to ({error.strerror})"
        return f"remembered in {self.path}"


def remembered_for(
    recipe: Recipe,
    inner: nn.Module,
    sizes: BatchSizes,
    sample: Mapping[str, Any],
    *,
    mixed_precision: str,
    device: torch.device,
    device_bytes: int,
) -> Remembered:
    """Where the answer for this model on this device is kept; `sample` is a micro-batch of the longest sample."""
    share = sizes.global_batch_size // sizes.world_size
    parameters = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in inner.named_parameters()]
    settings = recipe.model_dump(
        mode="json",
        include={"task": True, "model": True, "loss": True, "options": True, "parallel": True}
        | {"optimizer": {"name", "momentum", "ema_decay"}},
    )
    key = {
        "accel_train": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "device_bytes": device_bytes,
        "num_parameters": sum(parameter.numel() for parameter in inner.parameters()),
        "model": _digest([settings, parameters]),
        "inputs": {
            name: [str(value.dtype), *value.shape[1:]] for name, value in sample.items() if isinstance(value, Tensor)
        },
        "mixed_precision": mixed_precision,
        "gradient_checkpointing": recipe.precision.gradient_checkpointing,
        "compile": recipe.precision.compile,
        "memory_headroom": recipe.batch.memory_headroom,
        "samples_per_process": share,
        "world_size": sizes.world_size,
    }
    return Remembered(cache_root(recipe.data) / "micro_batches", key, share)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
