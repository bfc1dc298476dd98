"""Documents that share a window: the same attention, losses and gradients as under a dense mask, in memory linear in
the length.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2Config

from accel_train.data.text.tokens import collate_windows
from accel_train.model.activation_checkpointing import checkpoint_activations, keep_or_recompute
from accel_train.model.compile import repeated_blocks
from accel_train.model.fake_step import simulate_step
from accel_train.model.kernels import documents
from accel_train.model.kernels.attention import (
    _CHECKED_MODEL_TYPES,
    CAUSAL_SDPA,
    DENSE,
    PER_DOCUMENT,
    SEQUENCE_SDPA,
    SHORTEST,
    causal_sdpa,
    choose_document_attention,
    describe_document_attention,
    document_mask,
    use_for_generation,
)
from accel_train.model.kernels.documents import attend_within_documents, document_starts, same_document_mask
from accel_train.recipe.schema import Precision
from accel_train.tasks.causal_lm.packing import PackedRows, TokenRows, collate_packed
from accel_train.tasks.causal_lm.task import CausalLM
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run
from tests.model.test_activation_checkpointing import ATTENTION, CountOperators
from tests.support.comparisons import assert_same_bits
from tests.support.hf_models import small_config
from tests.support.memory import peak_bytes
from tests.support.runs import TINY_MODEL, Settings, events, metrics, tiny_recipe
from tests.support.wording import assert_golden

SEPARATOR = 0
LENGTH = 2 * SHORTEST
LENGTHS = torch.tensor([[5, 1, 200, 50, 256], [512, 0, 0, 0, 0], [1, 511, 0, 0, 0]])
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "mistral")


@pytest.fixture(autouse=True)
def registered() -> None:
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)


def ids_of(lengths: Tensor) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in lengths])


def windows(num_rows: int = 3, length: int = LENGTH) -> dict[str, Any]:
    """Windows of text in documents of very different lengths; the last window ends in padding."""
    rows = torch.randint(1, 60, (num_rows, length + 1), generator=torch.Generator().manual_seed(2)).numpy()
    rows[:, [0, 3, 4]] = rows[0, [length // 2]] = rows[1, [length // 3, length // 3 + 70]] = SEPARATOR
    rows[-1, -100:] = -1
    batch = collate_windows(rows, separator_id=SEPARATOR, mask_documents=True)
    batch.pop("num_targets")
    return batch


def packed_rows() -> dict[str, Any]:
    """Windows of rows to fine-tune on, the second mostly padding."""
    lengths = np.array([40, 300, 172, 3, 90])
    starts = np.concatenate([[0], np.cumsum(lengths + 1)])
    tokens = np.random.default_rng(0).integers(1, 60, starts[-1]).astype(np.int32)
    is_target = np.random.default_rng(1).random(starts[-1]) < 0.5
    rows = PackedRows(
        TokenRows(tokens, is_target, starts), [np.arange(3), np.array([3, 4])], sequence_length=LENGTH, padding_id=0
    )
    batch = collate_packed([rows[0], rows[1]])
    batch.pop("num_targets")
    return batch


def model_of(model_type: str, attention: str = CAUSAL_SDPA) -> Any:
    config = small_config(model_type)
    config.max_position_embeddings, config.initializer_range = LENGTH, 0.2  # so wide that attention matters
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
        setattr(config, name, 0.0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = CausalLM().loss_sum(model, batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    """Losses within 1e-6, and each gradient within 1e-5 of the norm of all, both relative."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    norm = torch.stack([gradient.norm() for gradient in expected[1].values()]).norm()
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        assert (gradient - expected[1][name]).norm() < 1e-5 * norm, name


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1)])
def test_attention_within_documents_is_that_under_a_dense_mask(heads: int, key_heads: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, LENGTH, number, 16).transpose(1, 2) for number in (heads, key_heads, key_heads)]
    weight = torch.randn(3, LENGTH, heads, 16)
    starts = document_starts(LENGTHS)
    results = []
    for way in ("kernel", "mask of starts", "mask"):
        leaves = [each.clone().requires_grad_() for each in tensors]
        if way == "kernel":
            output = attend_within_documents(*leaves, starts, 0.0, 0.3)
        elif way == "mask of starts":
            output = documents._under_a_mask(*leaves, starts, 0.0, 0.3)
        else:
            mask = same_document_mask(ids_of(LENGTHS))
            output = scaled_dot_product_attention(*leaves, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
        assert output.shape == weight.shape
        (output * weight).sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for found in results[:2]:
        for ours, exact in zip(found, results[2], strict=True):
            assert (ours - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("make_batch", [windows, packed_rows])
def test_losses_and_gradients_are_those_under_a_dense_mask(model_type: str, make_batch: Any) -> None:
    batch, model = make_batch(), model_of(model_type)
    with CountOperators() as count:
        found = loss_and_gradients(model, batch)
    assert count.calls[ATTENTION] == 2 * int((batch["document_lengths"] > 0).sum())  # one for each, in each layer
    model.set_attn_implementation("sdpa")
    expected = loss_and_gradients(model, batch)
    assert_close(found, expected)
    model.set_attn_implementation(CAUSAL_SDPA)
    whole = {name: value for name, value in batch.items() if not name.startswith("document")}
    assert abs(loss_and_gradients(model, whole)[0] / expected[0] - 1) > 1e-4, "without documents the loss is another"


@pytest.mark.parametrize("model_type", sorted(_CHECKED_MODEL_TYPES))
def test_every_model_passes_the_documents_on_to_its_attention(model_type: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type), attn_implementation=CAUSAL_SDPA).eval()
    lengths = torch.tensor([[9, 14, 1], [24, 0, 0]])
    positions = torch.tensor([[*range(9), *range(14), 0], [*range(24)]])
    inputs = {"input_ids": torch.randint(1, 60, (2, 24)), "position_ids": positions, "use_cache": False}
    if not model._supports_attention_backend:
        return  # it cannot be exchanged, and so keeps its mask
    with torch.no_grad():
        found = model(attention_mask=document_starts(lengths), **inputs).logits
        model.set_attn_implementation("sdpa")
        expected = model(attention_mask=same_document_mask(ids_of(lengths)), **inputs).logits
        with pytest.raises(RuntimeError, match="attn_mask"):  # nobody takes it for a mask in silence
            model(attention_mask=document_starts(lengths), **inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("checkpointing", ["blocks", "selective"])
def test_checkpointed_blocks_give_the_same_bits_and_selective_ones_compute_no_attention_again(
    model_type: str, checkpointing: Any
) -> None:
    batch, plain, model = windows(), model_of(model_type), model_of(model_type)
    checkpoint_activations(model, Precision(gradient_checkpointing=checkpointing))
    expected = loss_and_gradients(plain, batch)
    with CountOperators() as count:
        found = loss_and_gradients(model, batch)
    assert found[0] == expected[0]
    assert_same_bits(found[1], expected[1])
    once = 2 * int((batch["document_lengths"] > 0).sum())
    assert count.calls[ATTENTION] == (once if checkpointing == "selective" else 2 * once)


def test_selective_checkpointing_keeps_the_attention_over_documents_of_cuda() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    op = torch.ops.torch_attn._varlen_attn.default
    assert keep_or_recompute(None, op, *[torch.zeros(1)] * 3) == CheckpointPolicy.MUST_SAVE  # type: ignore[arg-type]


def test_dropout_differs_between_documents_and_gradients_stay_finite() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, LENGTH, 8).requires_grad_() for _ in range(3)]
    first, second = (attend_within_documents(*leaves, document_starts(LENGTHS[:1]), 0.5, None) for _ in range(2))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_memory_grows_with_the_length_and_under_a_dense_mask_with_its_square() -> None:
    peaks: dict[str, list[int]] = {"sdpa": [], CAUSAL_SDPA: []}
    for attention, sizes in peaks.items():
        for length in (512, 2048):
            config = GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=length, vocab_size=64, attn_pdrop=0.0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
            row = torch.ones(1, length + 1, dtype=torch.int64).numpy()
            row[:, :: length // 8] = SEPARATOR
            batch = collate_windows(row, separator_id=SEPARATOR, mask_documents=True)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            forward = partial(CausalLM().loss_sum, model, batch)
            sizes.append(peak_bytes(lambda forward=forward: forward().backward()))  # type: ignore[misc]
    ours, dense = (sizes[1] / sizes[0] for sizes in (peaks[CAUSAL_SDPA], peaks["sdpa"]))
    assert ours < 4.2
    assert dense > 7
    assert peaks[CAUSAL_SDPA][1] < 0.5 * peaks["sdpa"][1]


def test_a_plan_counts_no_mask_where_none_is_made() -> None:
    activations = []
    for attention in (CAUSAL_SDPA, "sdpa"):
        with torch.device("meta"):
            model = model_of("gpt2", attention)
        activations.append(simulate_step(CausalLM(), model, windows())["activations"])
    assert activations[1] - activations[0] > 3 * LENGTH**2


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({}, PER_DOCUMENT),
        ({"attention": "sdpa"}, DENSE),
        ({"compiled": True}, DENSE),
        ({"compiled": True, "device": "cuda", "dtype": torch.bfloat16, "length": 16}, PER_DOCUMENT),
        ({"compiled": True, "device": "cuda"}, DENSE),
        ({"device": "cuda", "dtype": torch.bfloat16}, PER_DOCUMENT),
        ({"length": SHORTEST - 1}, DENSE),
        ({"length": SHORTEST - 1, "attention": SEQUENCE_SDPA}, PER_DOCUMENT),
        ({"device": "mps"}, DENSE),
    ],
    ids=[
        "cpu", "another attention", "compiled", "compiled for cuda", "compiled in 32 bits", "cuda", "short",
        "short slices", "mps",
    ],
)  # fmt: skip
def test_choice_says_what_is_done_and_why(monkeypatch: pytest.MonkeyPatch, changes: Settings, value: str) -> None:
    monkeypatch.setattr(documents, "_has_varlen_attention", lambda: True)
    usual = {"attention": CAUSAL_SDPA, "device": "cpu", "length": LENGTH, "compiled": False, "dtype": torch.float32}
    choice = choose_document_attention(config=small_config("llama"), **(usual | changes))
    assert choice.value == value
    assert_golden(choice.reason)


@pytest.mark.parametrize(
    "facts",
    [
        (torch.bfloat16, 64, 0.0),
        (torch.float32, 64, 0.0),
        (torch.float16, 64, 0.1),
        (torch.float16, 36, 0.0),
        (torch.float16, 264, 0.0),
    ],
    ids=["possible", "32 bits", "dropout", "heads of 36", "heads of 264"],
)
def test_what_the_kernel_of_cuda_cannot_do_is_a_reason_for_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch, facts: Any
) -> None:
    monkeypatch.setattr(documents, "_has_varlen_attention", lambda: False)
    without = documents.why_no_kernel("cuda", *facts)
    monkeypatch.setattr(documents, "_has_varlen_attention", lambda: True)
    assert_golden(f"{without}\n{documents.why_no_kernel('cuda', *facts)}")


def attend_like_varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int, longest_key: int,
    *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What torch documents of `varlen_attn`, which has no kernel on a CPU: (total, heads, size), by the starts of
    sequences.
    """
    assert starts.dtype == torch.int32
    assert starts is key_starts
    assert window_size == (-1, 0)
    assert longest == longest_key >= int(starts.diff().max())
    parts = zip(*(each.split(starts.diff().tolist()) for each in (query, key, value)), strict=True)
    outputs = []
    for part in parts:
        q, k, v = (each.transpose(0, 1) for each in part)
        mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        outputs.append(
            scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat([output[0].transpose(0, 1) for output in outputs])


@pytest.mark.parametrize("key_heads", [4, 2])
def test_one_call_for_all_documents_gets_what_torch_documents_for_it(
    monkeypatch: pytest.MonkeyPatch, key_heads: int
) -> None:
    monkeypatch.setattr(pytest.importorskip("torch.nn.attention.varlen"), "varlen_attn", attend_like_varlen)
    torch.manual_seed(0)
    tensors = [torch.randn(3, LENGTH, heads, 16).transpose(1, 2) for heads in (4, key_heads, key_heads)]
    starts = document_starts(LENGTHS)  # documents without a token among them
    expected = attend_within_documents(*tensors, starts, 0.0, 0.3)
    rows = [each.transpose(1, 2).flatten(0, 1) for each in tensors]
    found = documents._in_one_call(rows, starts.flatten(), LENGTH, 0.0, 0.3)
    torch.testing.assert_close(found.view(expected.shape), expected, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert documents._in_one_call(rows, starts.flatten(), LENGTH, 0.0, 0.3).dtype == torch.bfloat16


def test_torchs_kernel_for_documents_has_the_arguments_that_it_is_called_with() -> None:
    """It cannot run here; that it would be called rightly is all that can be seen."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    query, key = torch.zeros(4, 4, 8, dtype=torch.bfloat16), torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    bounds = (torch.tensor([0, 1, 4], dtype=torch.int32),) * 2
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):  # no kernel of the CPU, after all checks
        varlen.varlen_attn(query, key, key, *bounds, 4, 4, scale=None, window_size=(-1, 0), enable_gqa=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compiled_for_a_cpu_get_a_dense_mask_and_are_compiled_once_for_all_lengths() -> None:
    batches = [windows(), {name: value.roll(1, 0) for name, value in windows().items()}]
    batches[1]["document_lengths"] = torch.full((3, 2), LENGTH // 2)
    batches[1]["document_ids"] = ids_of(batches[1]["document_lengths"])
    task, model = CausalLM(), model_of("llama")
    expected = [task.loss_sum(model, batch).item() for batch in batches]
    task.compiled = True
    torch._dynamo.reset()
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in repeated_blocks(model):
        block.compile(backend=keep)
    found = [task.loss_sum(model, batch).item() for batch in batches]
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_model_put_back_for_generation_gets_a_dense_mask() -> None:
    model, batch = model_of("gpt2"), windows()
    assert document_mask(model, batch, compiled=False).dtype == torch.int32
    mask = document_mask(use_for_generation(model), batch, compiled=False)
    assert (mask.dtype, mask.shape) == (torch.bool, (3, 1, LENGTH, LENGTH))
    only_ids = {name: value for name, value in batch.items() if name != "document_lengths"}  # of a task of one's own
    assert document_mask(model_of("gpt2"), only_ids, compiled=False).dtype == torch.bool


def test_a_run_says_how_it_keeps_documents_apart_and_one_setting_turns_it_off(
    corpus: Path,
) -> None:
    losses = []
    for name, attention in (("alone", "auto"), ("dense", "sdpa")):
        sections: Settings = {
            "task": "causal-lm",
            "output_dir": str(corpus / name),
            "model": {"config": {**TINY_MODEL, "n_positions": LENGTH}, "attn_implementation": attention},
            "data": {"mask_documents": True, "sequence_length": LENGTH},
            "batch": {"global_batch_size": 2},
            "schedule": {"max_steps": 4},
        }
        run = prepare_run(tiny_recipe(corpus, **sections))
        with run.resources:
            run_steps(run)
        said = events(corpus / name, "start")[0]["choices"]["document mask"]
        assert (PER_DOCUMENT if attention == "auto" else f"{DENSE} (model.attn_implementation") in said
        losses.append([line["loss"] for line in metrics(corpus / name)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    packed = tiny_recipe(corpus, task="causal-lm", data={"format": "chat", "sequence_length": LENGTH})
    config = small_config("gpt2")
    config._attn_implementation = CAUSAL_SDPA
    config.attn_pdrop = 0.0
    assert "memory linear" in describe_document_attention(packed, config).reason


def test_a_run_that_is_set_to_the_cpu_describes_attention_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"format": "chat", "sequence_length": 4096}
    packed = tiny_recipe(tmp_path, task="causal-lm", data=data)
    config = small_config("gpt2")
    config._attn_implementation, config.attn_pdrop = CAUSAL_SDPA, 0.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert describe_document_attention(packed, config).reason.startswith("CPU:")
