"""Four saves of sharded tensors, and a layout that changes before the third: `sharded_saves.py FOLDER`.

Prints, a line of JSON: how often this process planned for all, and the checkpoints that read back other values than
were saved.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from accel_train.checkpoint.sharded import CheckpointReader, KnownPlan, ShardWriter
from accel_train.checkpoint.store import folder_of


def main() -> None:
    root, planned = Path(sys.argv[1]), 0
    plan = DefaultSavePlanner.create_global_plan

    def counted(self: Any, plans: Any) -> Any:
        nonlocal planned
        planned += 1
        return plan(self, plans)

    DefaultSavePlanner.create_global_plan = counted  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    mesh, group, known = init_device_mesh("cpu", (dist.get_world_size(),)), dist.new_group(backend="gloo"), KnownPlan()
    wrong = []
    for step in range(1, 5):
        generator = torch.Generator().manual_seed(step)
        whole = {"model/a": torch.randn(5, 3, generator=generator), "model/b": torch.randn(1, 2, generator=generator)}
        if step > 2:
            whole["optimizer/a.exp_avg"] = torch.randn(5, 3, generator=generator)
        ShardWriter({name: distribute_tensor(each, mesh) for name, each in whole.items()}, group, known).publish(
            root, step, {}, lambda: False
        )
        folder = folder_of(root, step)
        read = {
            f"{kind}/{name}": reader.read(name)
            for kind in ("model", "optimizer")
            for reader in [CheckpointReader(folder, kind)]
            for name in reader.shapes
        }
        if read.keys() != whole.keys() or not all(torch.equal(read[name], whole[name]) for name in whole):
            wrong.append(folder.name)
    print(json.dumps([planned, wrong]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
