"""The base of a run: pretrained weights that the recipe freezes. Checkpoints leave them out and keep their digests, and a resume
checks that it trains on the same ones."""

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.checkpoint.store import read_trainer
from accel_train.core.errors import CheckpointError
from accel_train.core.files import HASHING_THREADS

BASE = "base"
"""The entry of trainer.json that names the weights which the checkpoint leaves out; a checkpoint of all weights has none."""


def digests_of_base(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of these weights by name, as they were loaded: type, shape and bytes. 0.5 to 2 GB/s on each of 4 threads."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}
    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hashing") as pool:
        return dict(zip(weights, pool.map(_digest, weights.values()), strict=True))


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    content: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    digest.update(content)
    return digest.hexdigest()


def base_record(pretrained: str | None, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what trainer.json says of a base: where it came from, one digest over all its weights, and one of each."""
    total = hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()
    return {BASE: {"pretrained": pretrained, "sha256": total, "tensors": dict(digests)}} if digests else {}


def left_out(folder: Path) -> dict[str, str]:
    """Return the digests of the weights that a checkpoint leaves out, by name; empty where it holds all.

    Raises:
        CheckpointError: trainer.json is not what a run writes.
    """
    base = read_trainer(folder).get(BASE)
    try:
        return {} if base is None else {str(name): str(digest) for name, digest in base["tensors"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {BASE} in trainer.json cannot be read ({type(error).__name__})") from error


def base_problem(folder: Path, digests: Mapping[str, str]) -> str:
    """Return why a model on a base with these digests cannot take the weights of a checkpoint; empty if it can, or if it holds all."""
    was = left_out(folder)
    if not was:
        return ""
    if wrong := sorted(name for name in was.keys() & digests.keys() if was[name] != digests[name]):
        name, pretrained = wrong[0], read_trainer(folder)[BASE].get("pretrained")
        return (
            f"{folder} was trained on another base, model.pretrained={pretrained} as it was: {name} has SHA-256 {digests[name][:12]} now, "
            f"and had {was[name][:12]} ({len(wrong)} of {len(was)} frozen weights differ); put those weights back, or start anew: "
            "--checkpoint.resume never"
        )
    if other := sorted(was.keys() ^ digests.keys()):
        return (
            f"{folder} leaves out the frozen weights, and now others are frozen: {other[0]} (of {len(other)}). Set model.freeze, "
            "model.freeze_batch_norm and model.lora as they were, or start anew: --checkpoint.resume never"
        )
    return ""
