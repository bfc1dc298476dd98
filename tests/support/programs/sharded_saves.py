"""Four saves of sharded tensors, and a layout that changes before the third: `sharded_saves.py FOLDER`.

Prints, a line of JSON: how often this process planned for all, the checkpoints that read back other values than
were saved, and the copies and the new host tensors of each save.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.checkpoint.sharded import CheckpointReader, KnownPlan, ShardWriter
from accel_train.checkpoint.store import folder_of
from accel_train.model.tensors import local_part


class Copies(TorchDispatchMode):
    """Counts copies of plain tensors. A copy of a DTensor is one of its part."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += name in ("copy_", "_to_copy", "clone") and not isinstance(args[0], DTensor)
        return func(*args, **(kwargs or {}))


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
    wrong, copies, memory = [], [], set[int]()
    for step in range(1, 5):
        generator = torch.Generator().manual_seed(step)
        whole = {"model/a": torch.randn(5, 3, generator=generator), "model/b": torch.randn(1, 2, generator=generator)}
        if step > 2:
            whole["optimizer/a.exp_avg"] = torch.randn(5, 3, generator=generator)
        tensors: dict[str, torch.Tensor] = {name: distribute_tensor(each, mesh) for name, each in whole.items()}
        alike = {f"optimizer/{name}.step": torch.tensor(float(step + len(name))) for name in ("a", "bb")}
        alike |= {"model/table": torch.full((3, 2), step).T, "model/number": torch.tensor(step)}
        whole |= alike
        with Copies() as counted_copies:
            writer = ShardWriter(tensors | alike, group, known)
        writer.publish(root, step, {}, lambda: False)
        held = {each.untyped_storage().data_ptr() for each in map(local_part, known.copies.values())}
        copies.append((counted_copies.count, len(held - memory)))
        memory |= held
        folder = folder_of(root, step)
        read = {
            f"{kind}/{name}": reader.read(name)
            for kind in ("model", "optimizer")
            for reader in [CheckpointReader(folder, kind)]
            for name in reader.shapes
        }
        if read.keys() != whole.keys() or not all(torch.equal(read[name], whole[name]) for name in whole):
            wrong.append(folder.name)
    print(json.dumps([planned, wrong, copies]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
