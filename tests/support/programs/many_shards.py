"""Process 300 of 512 reads its parts of a checkpoint in 512 shards: `many_shards.py FOLDER`.

Prints, as JSON, for a checkpoint with its index and one without: opened shards, other opened files, bytes of the opened
files, and whether each part is right.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_train.checkpoint import shard_index, sharded
from accel_train.checkpoint.shard_index import INDEX, Part, ShardIndex
from accel_train.checkpoint.sharded import WHOLE, CheckpointReader, shard_file

WORLD, RANK, ROWS = 512, 300, 2
KINDS = ("model", "optimizer", "average")
NAMES = ("a", "b")


def write(folder: Path) -> None:
    """Write tensors of (WORLD x ROWS, 3), a part of ROWS rows in each shard, as torch writes them."""
    folder.mkdir()
    save_file({"model/step": torch.tensor(5)}, folder / WHOLE)
    parts = []
    for rank in range(WORLD):
        names = [f"{kind}/{name}" for kind in KINDS for name in NAMES]
        places = {name: {"saved_offsets": [rank * ROWS, 0]} for name in names}
        tensors = {name: expected(name)[rank * ROWS : (rank + 1) * ROWS].clone() for name in names}
        save_file(tensors, folder / shard_file(rank), metadata={"DCP_SHARDING_INFO": json.dumps(places)})
        parts += [Part(shard_file(rank), name, "F32", (rank * ROWS, 0), (ROWS, 3)) for name in names]
    (folder / INDEX).write_text(ShardIndex.of(parts).text())


def expected(name: str) -> torch.Tensor:
    """Return a whole tensor."""
    generator = torch.Generator().manual_seed(len(name) + ord(name[-1]))
    return torch.randn(WORLD * ROWS, 3, generator=generator)


def main(folder: Path) -> None:
    write(folder)
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD,))
    opened: list[str] = []

    def counted(file: Any, *arguments: Any) -> Any:
        opened.append(Path(file).name)
        return original(file, *arguments)

    original = sharded.safe_open
    shard_index.safe_open = sharded.safe_open = counted  # type: ignore[assignment, misc]
    found = []
    for has_index in (True, False):
        if not has_index:
            (folder / INDEX).unlink()
        opened.clear()
        right = []
        for kind in KINDS:
            targets = {
                name: DTensor.from_local(torch.empty(ROWS, 3), mesh, [Shard(0)], run_check=False) for name in NAMES
            }
            # Held by every process, as a part of HSDP: it lies in all shards.
            targets["b"] = DTensor.from_local(torch.empty(WORLD * ROWS, 3), mesh, [Replicate()], run_check=False)
            reader = CheckpointReader(folder, kind)
            if kind == "model":
                reader.read_into({"a": targets["a"]})
                reader.read_into({"a": targets["a"]})
            else:
                reader.read_into({"a": targets["a"]})
            right.append(torch.equal(targets["a"].to_local(), expected(f"{kind}/a")[RANK * ROWS : (RANK + 1) * ROWS]))
        num_bytes = sum((folder / name).stat().st_size for name in opened)
        shards = [name for name in opened if name.startswith("shard-")]
        found.append([len(shards), len(opened) - len(shards), num_bytes, all(right)])
        if has_index:
            reader.read_into({"b": targets["b"]})
            assert torch.equal(targets["b"].to_local(), expected("average/b"))
            assert torch.equal(reader.read("b"), expected("average/b"))
            found[0].append((folder / INDEX).stat().st_size)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
