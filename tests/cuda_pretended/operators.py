"""Count the operators that a step on a pretended GPU runs outside of compiled code: python operators.py CASES (JSON).

Here compiled code also runs operator by operator, but is marked. A forward of it counts as one graph. An operator is at
least one kernel. Views and empty tensors launch nothing. An operator of torch's `foreach` counts once.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad

from accel_train.model.kernels.chunked_loss import fused_differentiate
from benchmarks import nanogpt_style
from benchmarks.gpu_loops import MODELS
from tests.cuda_pretended import SMALL_BYTES
from tests.cuda_pretended.drive import STEPS, WARM_STEPS, drive
from tests.cuda_pretended.pretend import FakeTensor, Pretend, pretended_gpus, tree_leaves

LAUNCH_NOTHING = frozenset(
    ("_pin_memory", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like",
     "empty_strided", "expand", "is_pinned", "lift_fresh", "new_empty", "new_empty_strided", "permute", "select",
     "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view")
)  # fmt: skip
PARTS = {
    "accel_train/engine/loader.py": "batch",
    "accel_train/tasks/causal_lm/task.py": "model",
    "accel_train/model/kernels/": "loss",
    "accel_train/parallel/ddp.py": "gradients",
    "accel_train/engine/step.py": "step",
    "accel_train/optim/update.py": "clip",
    "accel_train/optim/adam.py": "optimizer",
    "torch/nn/utils/clip_grad.py": "clip",
    "torch/optim/adam.py": "optimizer",
    "torch/autograd/__init__.py": "step",
    "benchmarks/nanogpt_style.py": "batch",
}
"""The part of a step that an operator belongs to, by the innermost of these files on the stack."""


class Operators:
    """Operators of the steps in which `pretend.counts` is true, by part of the step and by name."""

    def __init__(self) -> None:
        self.outside: dict[str, Counter[str]] = {}
        self.graphs = 0
        self._depth = 0
        # By the sequence number of an autograd node: the part that its forward belongs to, and whether it was compiled.
        self._nodes: dict[int, tuple[str, bool]] = {}

    @contextmanager
    def compiled(self, counts: bool) -> Iterator[None]:
        """Mark what runs inside the context as one graph."""
        self.graphs += counts and not self._depth
        self._depth += 1
        yield
        self._depth -= 1

    def see(self, name: str, on_gpu: bool, counts: bool) -> None:
        """Count an operator, which runs next."""
        node, number = torch._C._current_autograd_node(), torch._C._autograd._get_sequence_nr() - 1
        if node is None:
            part, is_compiled = part_of_stack(), self._depth > 0
            self._nodes.setdefault(number, (part, is_compiled))
        elif "AccumulateGrad" in node.name():
            part, is_compiled = "gradients", False
        else:
            part, is_compiled = self._nodes.get(node._sequence_nr(), ("unknown", False))
        if counts and on_gpu and not is_compiled and name not in LAUNCH_NOTHING:
            self.outside.setdefault(part, Counter())[name] += 1


def part_of_stack() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        for path, part in PARTS.items():
            if path in frame.f_code.co_filename:
                return part
        frame = frame.f_back
    return "unknown"


@contextmanager
def watched() -> Iterator[tuple[Operators, Callable[[], Pretend]]]:
    """Count the operators of all pretended GPUs inside the context."""
    found, last, dispatch = Operators(), list[Pretend](), Pretend.__torch_dispatch__

    def see(self: Pretend, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        last[:] = [self]
        given, place = [each for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)], kwargs or {}
        on_gpu = bool(given) or torch.device(place.get("device") or "cpu").type == "cuda"
        found.see(func._overloadpacket.__name__, on_gpu, self.counts)
        return dispatch(self, func, types, args, kwargs)

    def compile_module(module: nn.Module, **_: Any) -> None:
        call = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with found.compiled(bool(last) and last[0].counts):
                return call(*args, **kwargs)

        module.forward = forward

    def compile(function: Any, **_: Any) -> Any:
        if isinstance(function, nn.Module):
            compile_module(function)
            return function

        def call(*args: Any) -> Any:
            with found.compiled(bool(last) and last[0].counts):
                return function(*args)

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Pretend, "__torch_dispatch__", see))
        stack.enter_context(mock.patch.object(nn.Module, "compile", compile_module))
        stack.enter_context(mock.patch.object(torch, "compile", compile))
        # Pretended tensors have another class, for which torch would take one operator per gradient.
        stack.enter_context(mock.patch.object(clip_grad, "_has_foreach_support", return_value=True))
        yield found, lambda: last[0]


def drive_nanogpt(folder: Path) -> None:
    """Take steps of the plain loop."""
    model, num_reads = MODELS["124M"], 0
    tokens = folder / "tokens.bin"
    np.zeros(10**5, np.uint16).tofile(tokens)
    with pretended_gpus(1) as pretend:

        def on_read() -> None:
            nonlocal num_reads
            pretend.counts = WARM_STEPS <= num_reads < STEPS
            num_reads += 1

        nanogpt_style.train(
            model.shape, tokens, batch_size=model.batch_size, num_steps=STEPS + 1, device=torch.device("cuda"),
            bf16=True, compile=True, on_read=on_read,
        )  # fmt: skip


def count(case: tuple[int, dict[str, Any]] | None, folder: Path) -> dict[str, Any]:
    """Return the operators of one step of a case, by part and name; None is nanoGPT's loop."""
    reductions, steps = 0, STEPS - WARM_STEPS
    fused_differentiate.cache_clear()
    with watched() as (found, pretend):
        if case is None:
            drive_nanogpt(folder)
        else:
            size, recipe = case
            drive(recipe, size)
            reductions = sum(num_bytes > SMALL_BYTES for _, num_bytes in pretend().collectives)
    outside = {part: {name: each / steps for name, each in names.items()} for part, names in found.outside.items()}
    return {"outside": outside, "graphs": found.graphs / steps, "reductions": reductions / steps}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    for name, case in json.loads(path.read_text()).items():
        print(json.dumps({"case": name, **count(case, path.parent)}), flush=True)
