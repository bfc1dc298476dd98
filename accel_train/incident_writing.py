"""The folder of an incident: published whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.checkpoint import remove_leftovers
from accel_train.files import follow_umask, sync, write_atomically
from accel_train.observe.incident_record import INCIDENTS, RECORD, TEXT, WEIGHTS
from accel_train.observe.incident_text import format_incident
from accel_train.observe.ledger import METRICS_FILE, NONFINITE_NAMES, write_json
from accel_train.snapshot import copy_to_host, model_tensors
from accel_train.tensor_parts import gathered

MAX_WEIGHTS_BYTES = 2**31
TAIL_BYTES = 2**16


def free_name(run_folder: Path, step: int) -> str:
    """`step-00000412`, with a number behind it where a step went wrong before (on a branch that was given up)."""
    root, name, number = run_folder / INCIDENTS, f"step-{step:08d}", 1
    while (root / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return name if number == 1 else f"{name}-{number}"


def weights_of(model: nn.Module) -> dict[str, Tensor] | None:
    """The model's tensors in host memory; None where they are too large to be kept with each incident."""
    tensors = model_tensors(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return copy_to_host(tensors) if size < MAX_WEIGHTS_BYTES else None


def gathered_weights_of(model: nn.Module) -> dict[str, Tensor] | None:
    """As `weights_of`, where each process holds a part of them: all call it at once, and only the main one has them then."""
    tensors = model_tensors(model)
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) >= MAX_WEIGHTS_BYTES:
        return None
    kept = {}
    for name, tensor in tensors.items():
        whole = gathered(tensor)  # one at a time
        if dist.get_rank() == 0:
            kept[name] = whole.to("cpu", copy=True)
    return kept


def write_incident(
    run_folder: Path, record: Mapping[str, Any], batches: Mapping[str, bytes], weights: Mapping[str, Tensor] | None
) -> Path:
    """Publish an incident's folder: JSON, Markdown, micro-batches by file name, and weights.

    Raises:
        Exception: it could not be written (a full disk); nothing of it is left behind.
    """
    root = run_folder / INCIDENTS
    final = root / str(record["folder"])
    aside = root / f".tmp-{final.name}-{os.getpid()}"
    try:
        root.mkdir(exist_ok=True)
        remove_leftovers(root)
        aside.mkdir()
        for name, content in batches.items():
            write_atomically(aside / name, content)
        if weights is not None:
            path = aside / WEIGHTS
            save_file(dict(weights), path)
            follow_umask(path)
            sync(path)
        write_json(aside / RECORD, record)
        write_atomically(aside / TEXT, format_incident(record).encode())
        sync(aside)
        aside.rename(final)
        sync(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def last_losses(run_folder: Path, most: int = 50) -> list[tuple[int, float]]:
    """The last training losses that were logged, with their steps; empty where there are none to be read."""
    path = run_folder / METRICS_FILE
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()[1 if path.stat().st_size > TAIL_BYTES else 0 :]
    except OSError:
        return []
    last: list[tuple[int, float]] = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # a damaged line costs itself alone
            record = json.loads(line)
            if record["split"] == "train":
                loss = record.get("step_loss", record["loss"])
                last.append((record["step"], NONFINITE_NAMES.get(loss, loss)))
    return last[-most:]
