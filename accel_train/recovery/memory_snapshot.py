"""Write the contents of a GPU's memory when it ran out: the allocator's snapshot and a table, in the run folder."""

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_train.core.files import make_folders
from accel_train.core.format import format_bytes
from accel_train.core.ownership import write_file
from accel_train.engine.run import RunContext
from accel_train.observe.run_folder import PROFILE_FOLDER

NUM_SIZES = 20


def write_memory_snapshot(run: RunContext) -> None:
    """Write `profile/rank-R-memory-step-N.json.gz` and a table of the same name in `.txt`; on a CPU do nothing.

    Call it while the error is alive: the error keeps the step's activations, and these did not fit. The JSON is the
    result of `torch.cuda.memory_snapshot()`. Nothing is recorded before memory runs out, so a normal run has no cost.
    """
    if run.accelerator.device.type != "cuda":
        return
    home, rank = run.plan.output_dir, run.accelerator.process_index
    name = f"{PROFILE_FOLDER}/rank-{rank}-memory-step-{run.state.step + 1}"
    segments = torch.cuda.memory_snapshot()
    text = f"{block_table(segments)}\n\n{torch.cuda.memory_summary(run.accelerator.device)}\n"
    try:
        make_folders(home / PROFILE_FOLDER)
        write_file(home / f"{name}.json.gz", gzip.compress(json.dumps(segments).encode()), home)
        write_file(home / f"{name}.txt", text.encode(), home)
    except OSError as error:
        run.observer.note(f"the snapshot of the memory could not be written ({error})")
        return
    run.observer.note(f"what the memory of process {rank} held when it ran out: {name}.txt")


def block_table(segments: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the allocated blocks by size, the sizes that take the most memory first.

    Args:
        segments: result of `torch.cuda.memory_snapshot()`; sizes are in bytes.
    """
    sizes: Counter[int] = Counter()
    for segment in segments:
        sizes.update(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
    allocated = sum(size * count for size, count in sizes.items())
    reserved = sum(segment["total_size"] for segment in segments)
    largest = sorted(sizes.items(), key=lambda item: item[0] * item[1], reverse=True)[:NUM_SIZES]
    lines = [f"{format_bytes(allocated)} allocated of {format_bytes(reserved)} reserved, the largest first:", ""]
    lines.append(f"{'block':>12} {'blocks':>8} {'together':>12} {'share':>7}")
    for size, count in largest:
        together = size * count
        lines.append(f"{format_bytes(size):>12} {count:>8} {format_bytes(together):>12} {together / allocated:>7.1%}")
    return "\n".join(lines)
