"""Frozen base weights: pretrained weights that checkpoints leave out.

A checkpoint keeps their digests. A resume checks that it trains on the same weights.
"""

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.checkpoint.store import read_trainer
from accel_train.core.errors import CheckpointError
from accel_train.core.files import HASHING_THREADS
from accel_train.core.state import JsonRecord
from accel_train.model.tensors import FileTensor

BASE = "base"
"""Entry of trainer.json that names the weights left out. Missing in a checkpoint with all weights."""


def digests_of_base(
    model: nn.Module, names: Collection[str], sources: Mapping[str, FileTensor] = MappingProxyType({})
) -> dict[str, str]:
    """Return the SHA-256 of these weights by name, as loaded: type, shape and bytes.

    Weights in `sources` are read from there, by blocks. Four threads hash 0.5 to 2 GB/s each.
    """
    weights = {name: sources.get(name, each.detach()) for name, each in model.named_parameters() if name in names}
    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hashing") as pool:
        return dict(zip(weights, pool.map(_digest, weights.values()), strict=True))


def _digest(tensor: Tensor | FileTensor) -> str:
    blocks = [tensor] if isinstance(tensor, Tensor) else (block for _, block in tensor.blocks())
    dtype = tensor.dtype if isinstance(tensor, Tensor) else torch.float32
    digest = hashlib.sha256(f"{dtype} {tuple(tensor.shape)}".encode())
    for block in blocks:
        content: Any = block.contiguous().flatten().view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def base_record(pretrained: str | None, digests: Mapping[str, str]) -> JsonRecord:
    """Return the record of frozen base weights for trainer.json: origin, total digest, and digest of each weight."""
    total = hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in sorted(digests)).encode()).hexdigest()
    return {BASE: {"pretrained": pretrained, "sha256": total, "tensors": dict(digests)}} if digests else {}


def left_out(folder: Path) -> dict[str, str]:
    """Return the digests of the weights that a checkpoint leaves out, by name. Empty if it holds all weights.

    Raises:
        CheckpointError: trainer.json does not have the expected content.
    """
    base = read_trainer(folder).get(BASE)
    try:
        return {} if base is None else {str(name): str(digest) for name, digest in base["tensors"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {BASE} in trainer.json cannot be read ({type(error).__name__})") from error


def base_problem(folder: Path, digests: Mapping[str, str]) -> str:
    """Return why a checkpoint does not fit frozen base weights with these digests, or an empty string.

    A checkpoint with all weights always fits.
    """
    was = left_out(folder)
    if not was:
        return ""
    if wrong := sorted(name for name in was.keys() & digests.keys() if was[name] != digests[name]):
        name, pretrained = wrong[0], read_trainer(folder)[BASE].get("pretrained")
        return (
            f"{folder} was trained on other frozen weights, from model.pretrained={pretrained}: {name} had SHA-256 "
            f"{was[name][:12]}, now {digests[name][:12]} ({len(wrong)} of {len(was)} frozen weights differ). Restore "
            "the old weights, or set --checkpoint.resume never to start a new run"
        )
    if other := sorted(was.keys() ^ digests.keys()):
        return (
            f"{folder} leaves out frozen weights, but other weights are frozen now: {other[0]} (of {len(other)}). Set "
            "model.freeze, model.freeze_batch_norm and model.lora as before, or set --checkpoint.resume never to start "
            "a new run"
        )
    return ""
