"""A whole compiled model with its loss is one graph, which computes what nanoGPT's does."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from accel_train import train
from benchmarks.nanogpt_style import GPT, GPTShape
from tests.support.runs import TINY_MODEL, tiny_recipe

VIEWS = (
    "_unsafe_view", "alias", "detach", "expand", "getitem", "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view",
)  # fmt: skip


@pytest.fixture
def operations() -> Iterator[list[Counter[str]]]:
    """The operations of each graph that the backend `noted` is given, without views."""
    found: list[Counter[str]] = []

    def note(graph: Any, _: Any) -> Any:
        names = (node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
        found.append(Counter(name.split(".")[0] for name in names))
        for name in VIEWS:
            del found[-1][name]
        return make_boxed_func(graph)

    torch.compiler.reset()
    torch._dynamo.register_backend(aot_autograd(fw_compiler=note, bw_compiler=note), name="noted")
    yield found
    del torch._dynamo.backends.registry._COMPILER_FNS["noted"]
    torch.compiler.reset()


def test_a_gpt_with_its_loss_is_one_graph_with_few_operations_more_than_nanogpt(
    corpus: Path, operations: list[Counter[str]]
) -> None:
    precision = {"compile": "model", "compile_backend": "noted", "mixed_precision": "bf16"}
    sections: dict[str, Any] = {"loss": {"chunked": False}, "data": {"eval_fraction": 0}, "schedule": {"max_steps": 2}}
    train(tiny_recipe(corpus, task="causal-lm", options={}, precision=precision, **sections))
    ours = operations.copy()
    operations.clear()
    sizes: dict[str, Any] = TINY_MODEL
    shape = GPTShape(320, sizes["n_positions"], sizes["n_layer"], sizes["n_head"], sizes["n_embd"])
    model = torch.compile(GPT(shape), backend="noted")
    ids = torch.randint(320, (4, shape.block_size + 1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert len(ours) == len(operations) == 2, "forward and backward"
    assert ours[0] - operations[0] <= Counter(clone=4, add=1)
    assert ours[1] - operations[1] == Counter()
