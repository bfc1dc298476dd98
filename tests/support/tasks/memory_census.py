"""A task for the tests of the plan: writes down what each process holds when the optimizer steps, and what it sends."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM
from benchmarks.counting import count_collectives, per_step


def local_bytes(tensors: list[torch.Tensor]) -> int:
    """Of all storages of this process that the tensors lie in, each counted once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


class HeldTask(CausalLM):
    """Language modelling; writes held-RANK.json into `options.held` after the last step."""

    def build_model(self, recipe: Recipe, data: TaskData) -> torch.nn.Module:
        """The usual model; from here on steps and collectives are watched."""
        if not recipe.options.get("planned"):
            watch(Path(recipe.options["held"]), recipe.schedule.max_steps or 0, recipe.options.get("calls_a_step", 1))
        return super().build_model(recipe, data)


def watch(folder: Path, max_steps: int, calls_a_step: int) -> None:
    """Once a process; DeepSpeed's stage 3 calls the optimizer for each of its groups."""
    if hasattr(dist, "_watched"):
        return
    dist._watched = True  # type: ignore[attr-defined]
    sent = count_collectives()
    calls = 0

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == calls_a_step:
            sent.clear()  # what a start sends is not of a step
        if calls < max_steps * calls_a_step:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        record = {
            "parameters": local_bytes([parameter.detach() for parameter in parameters]),
            "gradients": local_bytes([parameter.grad for parameter in parameters if parameter.grad is not None]),
            "optimizer": local_bytes(moments),
            "sent": per_step(sent, max_steps - 1),
        }
        (folder / f"held-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record))

    register_optimizer_step_post_hook(after_step)
