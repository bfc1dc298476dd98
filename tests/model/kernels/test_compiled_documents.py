"""Compiled models keep documents apart with CUDA's kernel: in one graph for any documents, with the numbers of each
document alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM

from accel_train import train
from accel_train.data.text.tokens import LEAST_COMPILED, collate_windows
from accel_train.model.compile import GraphCount, compile_module
from accel_train.model.kernels import attention
from accel_train.model.kernels.attention import CAUSAL_SDPA, PER_DOCUMENT, causal_sdpa, document_mask
from accel_train.model.kernels.documents import attend_within_documents
from accel_train.model.training_module import TrainingModule
from accel_train.recipe.schema import Precision
from accel_train.tasks.causal_lm.packing import PackedRows, TokenRows, collate_packed
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.hf_models import small_config
from tests.support.runs import TINY_MODEL, events, losses, tiny_recipe, write_jsonl
from tests.support.varlen import cuda_kernel_on_a_cpu

LENGTH, SEPARATOR = 48, 0
STARTS = [
    [[0, 5, 6, 30], [0], [47]],
    [[0], [0], [0]],
    [[3, 4, 5, 6, 7, 8, 9, 40], [24], [1, 2, 46]],
]
"""Positions of separators in the rows of three batches: 1 to 9 documents in a row."""


def model_of(model_type: str) -> Any:
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)
    config = small_config(model_type)
    config.max_position_embeddings, config.initializer_range = LENGTH, 0.2
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
        setattr(config, name, 0.0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL_SDPA).double().train()


def text(seed: int, starts: list[list[int]]) -> dict[str, Any]:
    """Windows of text as `collate_windows` makes them for compiled code; the last one ends in padding."""
    rows = np.random.default_rng(seed).integers(1, 60, (len(starts), LENGTH + 1))
    for row, places in zip(rows, starts, strict=True):
        row[places] = SEPARATOR
    rows[-1, -7:] = -1
    return collate_windows(rows, separator_id=SEPARATOR, mask_documents=True, compiled=True)


def packed(lengths: list[int]) -> dict[str, Any]:
    """Two windows of packed rows, the first with all rows but the last one."""
    starts = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)])
    random = np.random.default_rng(starts[-1])
    tokens = random.integers(1, 60, starts[-1]).astype(np.int32)
    windows = [np.arange(len(lengths) - 1), np.array([len(lengths) - 1])]
    rows = PackedRows(
        TokenRows(tokens, random.random(starts[-1]) < 0.5, starts), windows, sequence_length=LENGTH, padding_id=0
    )
    return collate_packed([rows[0], rows[1]], compiled=True)


TEXT = [text(seed, starts) for seed, starts in enumerate(STARTS)]
PACKED = [packed([20, 28, 48]), packed([1, 2, 3, 4, 5, 6, 7, 9]), packed([47, 1])]


def loss_and_gradients(module: nn.Module, *batches: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    module.zero_grad()
    losses = [module(batch) for batch in batches]
    for loss in losses:
        loss.backward()
    gradients = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    return float(sum(loss.item() for loss in losses)), gradients


def each_alone(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a batch of one row for each document that has a label."""
    found = []
    for row in range(len(batch["input_ids"])):
        for document in batch["document_ids"][row].unique():
            where = batch["document_ids"][row] == document
            alone = {name: batch[name][row, where][None] for name in ("input_ids", "labels", "position_ids")}
            assert alone["position_ids"][0].tolist() == list(range(int(where.sum())))
            if (alone["labels"] >= 0).any():
                found.append(alone)
    return found


@pytest.fixture
def graphs() -> Iterator[dict[str, int]]:
    """Number of graphs that the backend `counted` is given, of forwards and backwards."""
    found = {"forward": 0, "backward": 0}

    def count(name: str) -> Any:
        def keep(graph: Any, _: Any) -> Any:
            found[name] += 1
            return make_boxed_func(graph)

        return keep

    torch.compiler.reset()
    torch._dynamo.register_backend(
        aot_autograd(fw_compiler=count("forward"), bw_compiler=count("backward")), name="counted"
    )
    yield found
    del torch._dynamo.backends.registry._COMPILER_FNS["counted"]
    torch.compiler.reset()


def compiled_module(
    model: nn.Module, part: Any, backend: str = "counted", count: GraphCount | None = None
) -> TrainingModule:
    task = CausalLM()
    task.compiled = True
    module = TrainingModule(model, task)
    compile_module(module, Precision(compile=part, compile_backend=backend), count)
    return module


@pytest.mark.parametrize("part", ["blocks", "model"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("batches", [TEXT, PACKED], ids=["text", "packed rows"])
def test_one_graph_for_all_documents_gives_loss_and_gradients_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, graphs: dict[str, int], batches: Any, model_type: str, part: str
) -> None:
    model, plain = model_of(model_type), TrainingModule(model_of(model_type), CausalLM())
    module = compiled_module(model, part)
    with cuda_kernel_on_a_cpu(monkeypatch):
        assert document_mask(model, batches[0], compiled=True).dtype == torch.int32
        found = [loss_and_gradients(module, batch) for batch in batches]
    assert graphs == {"forward": 1, "backward": 1}
    assert_each_alone(found, batches, plain, rel=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_torchs_default_backend_keeps_the_numbers_and_the_one_graph(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    count, plain = GraphCount(), TrainingModule(model_of(model_type), CausalLM())
    torch.compiler.reset()
    module = compiled_module(model_of(model_type), "model", "inductor", count)
    with cuda_kernel_on_a_cpu(monkeypatch):
        found = [loss_and_gradients(module, batch) for batch in TEXT]
    torch.compiler.reset()
    assert count.num_graphs == 1
    # Llama's norms and rotations are computed in fp32.
    assert_each_alone(found, TEXT, plain, rel=2e-6)


def assert_each_alone(
    found: list[tuple[float, dict[str, Tensor]]], batches: list[dict[str, Any]], plain: TrainingModule, rel: float
) -> None:
    """Losses within 1e-6 of those of each document alone, and each gradient within `rel` of the norm of all."""
    lengths = {tuple(batch["document_lengths"].flatten().tolist()) for batch in batches}
    assert len(lengths) == len(batches) == len(found) == 3
    for (loss, gradients), batch in zip(found, batches, strict=True):
        expected, exact = loss_and_gradients(plain, *each_alone(batch))
        # The loss is computed in fp32.
        assert loss == pytest.approx(expected, rel=1e-6)
        norm = torch.stack([each.norm() for each in exact.values()]).norm()
        assert gradients.keys() == exact.keys()
        for name, gradient in gradients.items():
            assert (gradient - exact[name]).norm() < rel * norm, name


def test_more_documents_than_a_power_of_two_cost_one_more_graph_and_none_after_that(
    monkeypatch: pytest.MonkeyPatch, graphs: dict[str, int]
) -> None:
    module = compiled_module(model_of("llama"), "blocks")
    counts = []
    with cuda_kernel_on_a_cpu(monkeypatch):
        for number in (2, LEAST_COMPILED, LEAST_COMPILED + 1, 40, 3):
            batch = text(number, [list(range(number)), [0], [0]])
            size = LEAST_COMPILED if number <= LEAST_COMPILED else 32 if number <= 32 else 64
            assert batch["document_lengths"].shape == (3, size)
            loss_and_gradients(module, batch)
            counts.append(graphs["forward"])
    assert counts == [1, 1, 2, 2, 2]
    assert graphs["backward"] == 2


@pytest.mark.parametrize("part", ["blocks", "model"])
def test_in_16_bits_one_graph_computes_what_the_plain_model_does(
    monkeypatch: pytest.MonkeyPatch, graphs: dict[str, int], part: str
) -> None:
    model = model_of("llama").float()
    module = compiled_module(model, part)
    with cuda_kernel_on_a_cpu(monkeypatch, any_dtype=False):
        assert document_mask(model, TEXT[0], compiled=True).dtype == torch.bool, "32 bits have no kernel"
        with torch.autocast("cpu", torch.bfloat16):
            assert document_mask(model, TEXT[0], compiled=True).dtype == torch.int32
            plain = TrainingModule(model, CausalLM())
            for batch in TEXT:
                found, exact = loss_and_gradients(module, batch), loss_and_gradients(plain, batch)
                assert found[0] == pytest.approx(exact[0], rel=1e-3)
    assert graphs == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("part", ["blocks", "model"])
@pytest.mark.parametrize("data_format", ["text", "prompt_completion"])
def test_a_run_compiles_nothing_again_and_learns_what_the_plain_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: dict[str, int], data_format: str, part: str
) -> None:
    texts = ["a" * (number * number % 11 + 1) for number in range(400)]
    rows = [{"text": each, "prompt": f"{len(each)}?", "completion": each} for each in texts]
    data = {"train": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "format": data_format, "sequence_length": 40}
    if data_format == "text":
        data["mask_documents"] = True
    found, said = [], []
    for name, precision in (("plain", {}), ("compiled", {"compile": part, "compile_backend": "counted"})):
        recipe = tiny_recipe(
            tmp_path, task="causal-lm", output_dir=str(tmp_path / name), options={}, schedule={"max_steps": 6},
            data={**data, "eval_fraction": 0}, precision={"mixed_precision": "bf16", **precision},
            model={"config": {**TINY_MODEL, "n_positions": 40, "attn_pdrop": 0.0}}, batch={"global_batch_size": 4},
        )  # fmt: skip
        with cuda_kernel_on_a_cpu(monkeypatch, any_dtype=False):
            monkeypatch.setattr(attention, "device_of_run", lambda: "cuda")
            train(recipe)
        found.append([*losses(tmp_path / name).values()])
        said.append(events(tmp_path / name, "start")[0]["choices"]["document mask"])
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert graphs == {"forward": 1, "backward": 1}
    assert not events(tmp_path / "compiled", "recompiled")
    assert all(each.startswith(f"{PER_DOCUMENT} (CUDA: one call of varlen_attn for all") for each in said)
    assert ["one graph" in each for each in said] == [False, True]


@pytest.mark.parametrize(("key_heads", "size"), [(4, 64), (2, 64), (1, 96)])
def test_torchs_operator_is_traced_whole_on_tensors_of_cuda(key_heads: int, size: int) -> None:
    """Without values and kernels: a graph break or a read by the host is an error."""
    pytest.importorskip("torch.nn.attention.varlen")
    traced = []

    def keep(graph: Any, _: Any) -> Any:
        traced.append(graph)
        return graph.forward

    torch.compiler.reset()
    attend = torch.compile(attend_within_documents, backend=keep, fullgraph=True)
    with FakeTensorMode(), torch.no_grad():
        query, key = (
            torch.empty(2, 128, heads, size, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            for heads in (4, key_heads)
        )
        for number in (17, 17, 33):
            starts = torch.empty(1, 1, 1, 2 * number, dtype=torch.int32, device="cuda")
            output = attend(query, key, key, starts, 0.0, None)
            assert (output.shape, output.device.type) == ((2, 128, 4, size), "cuda")
    torch.compiler.reset()
    assert len(traced) == 2
    for graph in traced:
        calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert calls.count(torch.ops.torch_attn._varlen_attn) == 1
        assert torch.nn.functional.scaled_dot_product_attention not in calls
