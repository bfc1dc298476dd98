"""A task that writes down the initial weights of a run, and the host memory that making them takes."""

import json
import os
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel_train.model.tensors import local_part, tensors_in
from accel_train.parallel import initial
from accel_train.recipe.schema import Recipe
from accel_train.runtime.private import watch_operators
from accel_train.task import TaskData
from accel_train.tasks.causal_lm.task import CausalLM
from accel_train.training import build

RANK = int(os.environ.get("RANK", "0"))


class Live:
    """The bytes of the tensors in host memory that operators make, and the most at once."""

    def __init__(self) -> None:
        self.sizes: dict[StorageWeakRef, int] = {}
        self.peak, self.lock = 0, Lock()

    def see(self, _: Any, result: Any) -> None:
        """Count the storages of an operator's results."""
        storages = [each.untyped_storage() for each in tensors_in([result]) if not isinstance(each, DTensor)]
        with self.lock:
            self.sizes |= {StorageWeakRef(each): each.nbytes() for each in storages if each.device.type == "cpu"}
            self.sizes = {ref: size for ref, size in self.sizes.items() if not ref.expired()}
            self.peak = max(self.peak, sum(self.sizes.values()))


class InitialLM(CausalLM):
    """Language modelling. `options`: folder, for what is written; order: of random numbers is not as expected."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Begin to watch the memory."""
        self.options, self.live = recipe.options, Live()
        vars(initial)["LEAST_JUMP"] = 64
        if self.options.get("order"):
            vars(build)["draws_as_expected"] = lambda: False
        made = super().load_data(recipe, progress=progress)
        copy_to = initial.Drawn.copy_to

        def watched(*arguments: Any) -> None:
            with watch_operators(self.live.see):  # a mode does not see the operators of other threads
                copy_to(*arguments)

        vars(initial)["Drawn"].copy_to = watched
        self.watch = watch_operators(self.live.see)
        self.watch.__enter__()
        return made

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> Any:
        """Write down what the model holds, and the most memory that its build took."""
        self.watch.__exit__(None, None, None)
        folder, whole = Path(self.options["folder"]), dict[str, Tensor]()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, each in tensors.items():
            whole[name] = (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        drawn = torch.rand(3)
        facts = {
            "peak": self.live.peak,
            "held": sum(local_part(each).nbytes for each in tensors.values()),
            "largest_part": max(local_part(each).nbytes for each in tensors.values()),
            "next": drawn.tolist(),
        }
        (folder / f"rank-{RANK}.json").write_text(json.dumps(facts))
        if RANK == 0:
            save_file(whole, folder / "weights.safetensors")
        return super().flops_per_target(recipe, model)
