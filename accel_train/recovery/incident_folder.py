"""Write and read the folder of an incident, with its micro-batches and weights.

The folder is published as a whole or not at all.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from accel_train.checkpoint.store import remove_leftovers
from accel_train.core.files import TAIL_BYTES, follow_umask, publish_folder, sync, write_atomically
from accel_train.core.json_io import parse_json, write_json
from accel_train.engine.step import MicroBatch
from accel_train.model.isolation import RandomState
from accel_train.observe.incident_record import INCIDENTS, RECORD, TEXT, WEIGHTS, Incident, format_incident
from accel_train.observe.run_folder import METRICS_FILE, parse_line

MAX_BATCH_BYTES = 2**28
"""Size limit of one process's micro-batches kept with an incident, in bytes."""
HOST, CUDA = "random_state.host", "random_state.cuda"


@dataclass(frozen=True)
class KeptMicroBatch:
    """A micro-batch from an incident's folder, on the device."""

    number: int  # of the micro-batch in its step, from 0
    micro_batch: MicroBatch
    state: RandomState
    """Random numbers from before the micro-batch was computed, as far as they were kept."""
    samples: list[int] | None
    """Indices in the data set. None if not known."""


def write_incident(
    run_folder: Path, incident: Incident, batches: Mapping[str, bytes], weights: Mapping[str, Tensor] | None
) -> Path:
    """Publish an incident's folder: JSON, Markdown, micro-batches by file name, and weights. Return its path.

    Raises:
        Exception: the folder could not be written, for example on a full disk. Nothing is left behind.
    """
    root = run_folder / INCIDENTS
    final = root / incident.folder
    staging = root / f".tmp-{final.name}-{os.getpid()}"
    root.mkdir(exist_ok=True)
    remove_leftovers(root)
    with publish_folder(final, staging):
        for name, content in batches.items():
            write_atomically(staging / name, content)
        if weights is not None:
            path = staging / WEIGHTS
            save_file(dict(weights), path)
            follow_umask(path)
            sync(path)
        write_json(staging / RECORD, asdict(incident))
        write_atomically(staging / TEXT, format_incident(incident).encode(errors="backslashreplace"))
    return final


def pack_micro_batches(
    micro_batches: Sequence[MicroBatch],
    numbers: Sequence[int],
    states: Sequence[RandomState],
    samples: list[list[int]] | None,
) -> bytes | None:
    """Return the micro-batches with these `numbers` as a safetensors file; None if too large or not packable.

    Tensors are named `0/input_ids`. The file includes the random state before each micro-batch, if known.
    """
    tensors: dict[str, Tensor] = {}
    num_targets: dict[int, int] = {}
    try:
        for number in numbers:
            batch, num_targets[number] = micro_batches[number]
            kept = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            tensors |= {f"{number}/{name}": each.detach().cpu().contiguous().clone() for name, each in kept.items()}
            if number < len(states):
                tensors[f"{number}/{HOST}"] = states[number].host
                if (on_device := states[number].on_device) is not None:
                    tensors[f"{number}/{CUDA}"] = on_device
        if sum(tensor.nbytes for tensor in tensors.values()) > MAX_BATCH_BYTES:
            return None
        facts = {"num_targets": json.dumps(num_targets), "samples": json.dumps(samples)}
        return save(tensors, metadata=facts)
    except Exception:  # the other processes wait for this one
        return None


def read_micro_batches(path: Path, device: torch.device) -> list[KeptMicroBatch]:
    """Read the micro-batches of a file, in the order of the step.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("not a regular file")
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
        num_targets, samples = parse_json(facts["num_targets"]), parse_json(facts["samples"])
        num_targets = {key: int(targets) for key, targets in num_targets.items()}
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    kept: list[KeptMicroBatch] = []
    for key, targets in num_targets.items():
        named = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.partition("/")[0] == key}
        number, state = int(key), RandomState(device)
        state.host, on_device = named.pop(HOST, state.host), named.pop(CUDA, state.on_device)
        # Another kind of device has another state, and a CPU has none.
        if state.on_device is not None and on_device.shape == state.on_device.shape:
            state.on_device = on_device
        batch = {name: tensor.to(device) for name, tensor in named.items()}
        kept.append(KeptMicroBatch(number, (batch, targets), state, samples and samples[number]))
    return kept


def last_losses(run_folder: Path) -> list[tuple[int, float]]:
    """Return the last 50 logged training losses with their steps; empty if the log cannot be read."""
    path = run_folder / METRICS_FILE
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            records = [parse_line(line, "split")[0] for line in file]
    except OSError:
        return []
    train = [record for record in records if record is not None and record["split"] == "train"]
    return [(each["step"], each["step_loss"]) for each in train if isinstance(each.get("step_loss"), float)][-50:]
