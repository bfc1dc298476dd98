"""Linear layers in 4 bits: the bits of bitsandbytes, and under FSDP2 the training of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from safetensors.torch import load_file
from torch import nn

from accel_train.model.kernels.nf4 import NF4_BYTES, Nf4Linear, pack
from tests.support.comparisons import assert_same_bits, tensors
from tests.support.runs import LLAMA, forget, losses, model_of, run, summary_of, write_base, write_recipe_file

HELD = sum(n // 2 + -(-n // 64) + 4 * (-(-n // (64 * 256)) + 1) for n in 2 * [1024, 512, 512, 1024, *3 * [1536]])
"""Packed bytes of the matrices in the two blocks of `LLAMA`."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_outputs_and_gradients_are_those_of_bitsandbytes_to_the_bit(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 96, bias=has_bias)
    theirs: Any = Linear4bit(128, 96, bias=has_bias, compute_dtype=dtype, quant_type="nf4")
    theirs.weight = Params4bit(layer.weight.detach().clone(), requires_grad=False, quant_type="nf4", module=theirs)
    theirs.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().to(dtype))
    theirs.support_avx512bf16_for_cpu = False
    theirs.to("cpu")
    found = []
    for made in (Nf4Linear(pack(layer.weight), layer.bias, dtype), theirs):
        inputs = torch.linspace(-1, 1, 5 * 128).view(5, 128).requires_grad_()
        output = made(inputs)
        output.square().sum().backward()
        assert inputs.grad is not None
        found.append((output.detach(), inputs.grad))
    assert all(map(torch.equal, *found))
    assert found[0][0].dtype == torch.float32


def test_a_packed_matrix_has_the_bytes_that_a_plan_counts_and_shapes_without_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 512)
    packed = pack(weight)
    # The mean of the scales takes 4 more bytes.
    assert sum(each.nbytes for each in packed[:3]) == NF4_BYTES * weight.numel() + 4
    assert {each.dtype for each in packed[:3]} == {torch.uint8}
    for size in ((256, 512), (6, 10)):
        empty, whole = pack(torch.empty(size, device="meta")), pack(torch.ones(size))
        assert [(each.shape, each.dtype) for each in empty] == [(each.shape, each.dtype) for each in whole]
    rounded = weight.bfloat16()
    assert all(map(torch.equal, pack(rounded), pack(rounded.float())))
    error = (packed.unpacked() - weight).abs().max()
    assert 0 < error < 0.2 * weight.abs().max()


def train(folder: Path, name: str, processes: int, **sections: Any) -> Path:
    held = folder / f"held-{name}"
    held.mkdir(exist_ok=True)
    settings = {
        "task": "tests.support.tasks.packed:PackedTask",
        "model": {"config": None, "pretrained": str(folder / "base"), "frozen_dtype": "nf4", "lora": {"rank": 4}},
        "optimizer": {"learning_rate": 0.02},
        "checkpoint": {"every_steps": 1, "keep": 12},
        "options": {"held": str(held)},
    }
    recipe = write_recipe_file(folder, **settings, output_dir=str(folder / name), **sections)
    run(recipe, processes=processes)
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "parallel"),
    [(2, {}), (4, {}), (4, {"dp_shard_size": 2})],
    ids=["2 processes", "4 processes", "2 copies of 2 shards"],
)
def test_adapters_train_on_shards_in_4_bits_as_on_one_process_and_resume_to_the_bit(
    corpus: Path, processes: int, parallel: dict[str, int]
) -> None:
    write_base(corpus, {**LLAMA, "tie_word_embeddings": False})
    one = train(corpus, "one", 1)
    sharded = train(corpus, "sharded", processes, parallel={"strategy": "fsdp2", **parallel})
    loading = [summary_of(run)["choices"]["pretrained weights"] for run in (one, sharded)]
    assert [each.partition(" (")[0] for each in loading] == ["one at a time", "in parts"]
    # The loss is a sum over processes: its last bit differs.
    assert losses(sharded) == pytest.approx(losses(one), rel=1e-6)
    assert losses(one)[12] < losses(one)[1] - 0.2
    for step, kind, tolerance in ((1, "optimizer", 1e-7), (1, "model", 1e-6), (12, "model", 1e-4)):
        ours, theirs = tensors(sharded, step, kind), tensors(one, step, kind)
        assert ours.keys() == theirs.keys()
        assert all("lora_" in name for name in ours)
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=tolerance)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        ours, theirs = load_file(sharded / file), load_file(one / file)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-4)
            assert file.startswith("adapter") or "proj" in name or torch.equal(ours[name], tensor)
    shards = processes // (2 if parallel else 1)
    held = [json.loads(path.read_text()) for path in sorted((corpus / "held-sharded").iterdir())]
    packed = [sum(size for name, size in each.items() if "base_layer" in name) for each in held]
    assert len(packed) == processes
    assert sum(packed) == HELD * processes // shards
    # Vectors of scales do not divide evenly: at most 2 bytes in 3 parts of 14 matrices.
    assert max(packed) - HELD / shards <= 14 * 16
    kept = {kind: tensors(sharded, 12, kind) for kind in ("model", "optimizer")}
    ended = model_of(sharded)
    forget(sharded, 8)
    train(corpus, "sharded", processes, parallel={"strategy": "fsdp2", **parallel})
    assert_same_bits(tensors(sharded, 12, "model"), kept["model"])
    assert_same_bits(tensors(sharded, 12, "optimizer"), kept["optimizer"])
    assert_same_bits(model_of(sharded), ended)
