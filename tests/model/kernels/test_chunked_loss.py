"""The loss in chunks is the loss of the logits: value, gradients, memory, and which models have theirs whole."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from accel_train.core.errors import DataError
from accel_train.model.kernels import chunked_loss as module
from accel_train.model.kernels import products
from accel_train.model.kernels.chunked_loss import (
    _CHECKED_CLASSES,
    _ChunkedLoss,
    choose_chunking,
    chunked_counts,
    chunked_loss,
    fused_differentiate,
    head_for_chunks,
    rows_at_once,
    summed_loss,
    why_whole,
)
from accel_train.model.kernels.held_rows import HeldRows
from accel_train.model.kernels.products import has_wide_products
from accel_train.model.lora import add_adapters
from accel_train.model.training_module import TrainingModule
from accel_train.recipe.schema import LoRA
from accel_train.recovery.module_watch import ModuleWatch
from accel_train.runtime.private import watch_operators
from accel_train.tasks.causal_lm.task import CausalLM, hidden_states, next_token_logits
from tests.support.hf_models import small_config
from tests.support.memory import peak_bytes
from tests.support.runs import tiny_recipe
from tests.support.wording import assert_golden, raises_golden

NUM_POSITIONS, WIDTH, VOCABULARY = 60, 48, 211
CHECKED_TYPES = (
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt_neox",
    "opt",
    "phi",
    "phi3",
    "gemma",
    "olmo",
    "olmo2",
    "smollm3",
    "stablelm",
    "starcoder2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
Losses = Callable[..., Tensor]


def model_of(model_type: str, **changes: Any) -> PreTrainedModel:
    config = small_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def batch_of(num_ignored: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[:, :num_ignored] = -100
    return {"input_ids": ids, "labels": labels}


def case(
    *, bias: bool, ignored: int, dtype: torch.dtype = torch.float32, seed: int = 3
) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    hidden = torch.randn(2, NUM_POSITIONS // 2, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCABULARY, (2, NUM_POSITIONS // 2), generator=generator)
    labels.view(-1)[torch.randperm(NUM_POSITIONS, generator=generator)[:ignored]] = -100
    return head, hidden, labels


def plain(head: nn.Linear, hidden: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return summed_loss(head(hidden), labels, smoothing)


def in_fp64(head: nn.Linear, hidden: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    logits = head(hidden).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)


def gradients(of: Losses, head: nn.Linear, hidden: Tensor, labels: Tensor, smoothing: float = 0.0) -> list[Tensor]:
    """The loss, and the gradients of hidden states and head, of a loss that is scaled as a step scales it."""
    head, hidden = copy.deepcopy(head), hidden.clone().requires_grad_()
    loss = of(head, hidden, labels, smoothing)
    (loss * 0.37).backward()
    found = [loss.detach(), hidden.grad, *(parameter.grad for parameter in head.parameters())]
    assert all(each is not None for each in found)
    return [each.double() for each in found if each is not None]


def exactly(
    head: nn.Linear, hidden: Tensor, labels: Tensor, smoothing: float = 0.0, of: Losses = in_fp64
) -> list[Tensor]:
    """`gradients` in fp64."""
    return gradients(of, copy.deepcopy(head).double(), hidden.double(), labels, smoothing)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("ignored", [0, 31])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_in_fp32_are_within_1e_6_of_fp64(
    rows: int, ignored: int, smoothing: float, bias: bool
) -> None:
    given = (*case(bias=bias, ignored=ignored), smoothing)
    found = gradients(lambda *args: chunked_loss(*args, chunk_rows=rows), *given)
    assert max(errors(found, exactly(*given))) < 1e-6


@pytest.mark.parametrize("how", ["whole logits", "in chunks", "in chunks with ignored positions", "fused"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
def test_z_loss_and_its_gradients_in_fp32_are_within_1e_6_of_fp64(how: str, smoothing: float, bias: bool) -> None:
    z_loss, given = 0.03, (*case(bias=bias, ignored=31), smoothing)

    def with_z(head: nn.Linear, hidden: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        logits = head(hidden)[labels != -100]
        cross = in_fp64(head, hidden, labels, smoothing)
        return cross + z_loss * logits.exp().sum(-1).log().pow(2).sum()

    def ours(head: nn.Linear, hidden: Tensor, labels: Tensor, smoothing: float) -> Any:
        if how == "whole logits":
            return summed_loss(head(hidden), labels, smoothing, z_loss)
        if how == "in chunks":
            return chunked_loss(head, hidden, labels, smoothing, 7, z_loss=z_loss)
        arguments = (hidden.flatten(0, 1), head.weight, head.bias, labels.flatten(), (smoothing, z_loss), 7)
        return _ChunkedLoss.apply(*arguments, HeldRows(VOCABULARY, VOCABULARY), how == "fused")

    exact = exactly(*given, of=with_z)
    assert min(errors(exactly(*given), exact)) > 0.01, "the z-loss is large enough to be seen"
    assert max(errors(gradients(ours, *given), exact)) < 1e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_positions_that_are_not_left_out_count_nothing(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, fused: bool
) -> None:
    monkeypatch.setattr(products, "PRODUCT_AT_ONCE", 64 * WIDTH)  # of the head's gradient, 64 rows at a time
    given = (*case(bias=True, ignored=31), smoothing)

    def as_on_a_gpu(head: nn.Linear, hidden: Tensor, labels: Tensor, smoothing: float) -> Any:
        arguments = (hidden.flatten(0, 1), head.weight, head.bias, labels.flatten(), (smoothing, 0.0), 7)
        return _ChunkedLoss.apply(*arguments, HeldRows(VOCABULARY, VOCABULARY), fused)

    assert max(errors(gradients(as_on_a_gpu, *given), exactly(*given))) < 1e-6


@pytest.mark.parametrize("terms", [(0.0, 0.0), (0.1, 0.01)], ids=["cross-entropy", "smoothing and z-loss"])
def test_a_fused_loss_is_compiled_once_for_every_number_of_positions(terms: tuple[float, float]) -> None:
    torch._dynamo.reset()
    fused_differentiate.cache_clear()
    head, hidden, labels = case(bias=False, ignored=9)
    held = HeldRows(VOCABULARY, VOCABULARY)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 17, 3, 64):
            logits, targets = head(hidden.flatten(0, 1)[:rows]).detach(), labels.flatten()[:rows, None]
            found = fused_differentiate()(logits.clone(), targets, held, terms, torch.bfloat16)
            plainly = module._differentiate(logits.clone(), targets, held, terms, torch.bfloat16)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, plainly, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_gradients_in_16_bits_are_no_worse_than_those_of_whole_logits(
    dtype: torch.dtype, autocast: bool
) -> None:
    ours, theirs = [], []
    for seed in range(12):  # the error of one sum is as much chance as precision
        given = case(bias=True, ignored=20, dtype=torch.float32 if autocast else dtype, seed=seed)
        exact = exactly(*given)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            ours.append(errors(gradients(lambda *args: chunked_loss(*args, chunk_rows=16), *given), exact))
            theirs.append(errors(gradients(plain, *given), exact))
    found, whole = (torch.tensor(each).square().mean(0).sqrt() for each in (ours, theirs))
    assert (found <= 1.001 * whole).all(), (found, whole)


def test_a_step_s_gradients_in_fp16_do_not_vanish() -> None:
    head, hidden, labels = case(bias=False, ignored=0, dtype=torch.float16)
    head.weight.data *= 6  # some tokens are all but impossible: 1e-10
    exact = exactly(head, hidden, labels)
    ours, theirs = (errors(gradients(each, head, hidden, labels), exact) for each in (chunked_loss, plain))
    assert ours[2] <= theirs[2]


@pytest.mark.parametrize("model_type", CHECKED_TYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_checked_model_s_loss_and_gradients_are_those_of_its_logits(
    monkeypatch: pytest.MonkeyPatch, model_type: str, tied: bool
) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 900)
    model = model_of(model_type, tie_word_embeddings=tied)
    assert why_whole(model) is None
    losses, weights = [], []
    for chunked in (True, False):
        task = CausalLM()
        task.chunked = chunked
        model.zero_grad()
        loss = task.loss_sum(model, batch_of())
        loss.backward()
        losses.append(loss.detach())
        weights.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    assert weights[0].keys() == weights[1].keys()
    largest = max(float(each.abs().max()) for each in weights[1].values())
    for name, gradient in weights[0].items():
        torch.testing.assert_close(gradient, weights[1][name], rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("label", [-1, -101, 211])
def test_a_label_that_is_no_token_is_refused_and_on_a_device_makes_the_loss_nan(label: int) -> None:
    head, hidden, labels = case(bias=True, ignored=4)
    labels[1, 3] = label
    for compute in (chunked_loss, chunked_counts):
        with raises_golden(DataError):
            compute(head, hidden, labels)  # type: ignore[operator]
    inputs = [hidden.flatten(0, 1), head.weight, head.bias, labels.flatten()]
    assert _ChunkedLoss.apply(*inputs, (0.0, 0.0), 16, HeldRows(VOCABULARY, VOCABULARY), False).isnan()


def test_every_checked_class_is_compared() -> None:
    assert {type(model_of(each)).__name__ for each in CHECKED_TYPES} == _CHECKED_CLASSES


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("what", ["head", "body"])
def test_what_is_frozen_gets_no_gradient_and_costs_no_memory_for_it(smoothing: float, what: str) -> None:
    head, hidden, labels = case(bias=False, ignored=9)
    expected = gradients(chunked_loss, head, hidden, labels, smoothing)
    head.requires_grad_(what == "body")
    hidden.requires_grad_(what == "head")
    made: list[torch.Size] = []
    with watch_operators(lambda arguments, result: made.extend(t.shape for t in [result] if isinstance(t, Tensor))):
        loss = chunked_loss(head, hidden, labels, smoothing, chunk_rows=8)
        (loss * 0.37).backward()
    assert ((VOCABULARY, WIDTH) in {tuple(each) for each in made}) == (what == "body")
    trained, number = (hidden, 1) if what == "head" else (head.weight, 2)
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad.double(), expected[number], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch, checkpointing: bool, mode: str) -> None:
    model = model_of("llama").train(mode == "train")
    if checkpointing:
        model.activation_checkpointing_enable()
    batch, task = batch_of(0), CausalLM()
    vocabulary, num_positions = model.lm_head.out_features, batch["labels"].numel()
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 8 * vocabulary)
    rows: list[int] = []

    def see(arguments: Any, result: Any) -> None:
        is_wide = isinstance(result, Tensor) and result.dim() and result.shape[-1] == vocabulary
        if is_wide and result.data_ptr() != model.lm_head.weight.data_ptr():
            rows.append(result.numel() // vocabulary)

    for chunked in ("auto", False):
        task.chunked, task.counts_hits = chunked, True
        with watch_operators(see), torch.set_grad_enabled(mode == "train"):
            if mode == "train":
                task.loss_sum(model, batch).backward()
            else:
                task.evaluate_batch(model, batch)
        largest = max(rows)
        assert largest == (8 if chunked else num_positions), "the second shows that the first can fail"
        rows.clear()


def test_peak_memory_is_that_of_a_chunk() -> None:
    head, hidden, labels = nn.Linear(16, 4096, bias=False), torch.randn(1, 512, 16), torch.randint(0, 4096, (1, 512))
    whole, chunk = 512 * 4096 * 4, 32 * 4096 * 4
    hidden.requires_grad_()
    head_gradient = 4 * head.weight.numel()
    assert peak_bytes(lambda: plain(head, hidden, labels, 0.0).backward()) > 2 * whole
    peak = peak_bytes(lambda: chunked_loss(head, hidden, labels, chunk_rows=32).backward())
    assert peak < 1.2 * chunk + 3 * head_gradient


def test_counts_are_those_of_the_logits() -> None:
    head, hidden, labels = case(bias=True, ignored=11)
    loss, hits = chunked_counts(head, hidden, labels, chunk_rows=9)
    assert hits == (head(hidden).argmax(-1) == labels).sum()
    assert loss.item() == pytest.approx(plain(head, hidden, labels, 0.0).item(), rel=1e-6)
    labels.fill_(-100)
    assert [each.item() for each in chunked_counts(head, hidden, labels)] == [0, 0]


def test_a_batch_without_targets_has_a_loss_of_0_and_gradients_of_0() -> None:
    given = case(bias=False, ignored=NUM_POSITIONS)
    assert [float(each.norm()) for each in gradients(chunked_loss, *given)] == [0, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_makes_the_loss_not_finite_unless_it_is_ignored(value: float) -> None:
    head, hidden, labels = case(bias=False, ignored=0)
    hidden[0, 3] = value
    assert not chunked_loss(head, hidden, labels).isfinite()
    labels[0, 3] = -100
    assert chunked_loss(head, hidden, labels).isfinite()


def test_a_second_backward_is_refused() -> None:
    loss = chunked_loss(*case(bias=False, ignored=0))
    loss.backward(retain_graph=True)
    with raises_golden(RuntimeError):
        loss.backward()


def test_auto_leaves_logits_whole_that_are_no_more_than_a_chunk() -> None:
    model = model_of("gpt2")
    fits = rows_at_once(model.lm_head)
    assert head_for_chunks("auto", model, fits) is None
    assert head_for_chunks("auto", model, fits + 1) is model.lm_head
    assert head_for_chunks(True, model, 1) is model.lm_head
    assert head_for_chunks(False, model, fits + 1) is None
    assert rows_at_once(nn.Linear(1, 152_064)) == 384
    assert rows_at_once(nn.Linear(1, 152_064, device="meta"), on_gpu=True) == 832


def test_a_head_that_is_no_plain_layer_has_its_logits_whole_and_the_choice_says_why() -> None:
    model = model_of("llama")
    assert choose_chunking("auto", model, 1).value is True
    assert choose_chunking(False, model, 1).reason == "as set"
    add_adapters(model, LoRA(target_modules=("q_proj", "lm_head")))
    adapted = choose_chunking("auto", model, 1)
    assert adapted.value is False
    assert_golden(adapted.reason, case="adapters")
    with raises_golden(case="asked for"):
        choose_chunking(True, model, 1)
    assert head_for_chunks("auto", model, 10**9) is None
    other = model_of("gemma2")
    assert_golden(choose_chunking("auto", other, 1).reason, case="gemma2")

    class Own(type(model_of("gpt2"))):  # type: ignore[misc]
        """A class derived elsewhere, whose forward may do anything to its logits."""

    assert why_whole(Own(small_config("gpt2"))) is not None


def test_a_split_output_layer_stays_in_chunks_unless_a_process_would_hold_no_row() -> None:
    model = model_of("llama")
    split = choose_chunking("auto", model, 2)
    assert split.value is True
    assert_golden(split.reason.partition("; ")[2], case="split")
    assert choose_chunking(True, model, 2).reason == f"as set; {split.reason}"
    assert rows_at_once(model.lm_head, 2) > 1.9 * rows_at_once(model.lm_head)
    model.lm_head = nn.Linear(32, 5, bias=False)  # 2, 2, 1 and 0 rows
    empty = choose_chunking("auto", model, 4)
    assert empty.value is False
    assert_golden(empty.reason, case="no row")


def test_adapters_in_the_body_leave_the_loss_in_chunks() -> None:
    model = model_of("llama")
    add_adapters(model, LoRA())
    task, batch = CausalLM(), batch_of()
    task.chunked = True
    loss = task.loss_sum(model, batch)
    torch.testing.assert_close(loss, summed_loss(next_token_logits(model, batch), batch["labels"]), rtol=1e-6, atol=0)
    loss.backward()
    assert model.lm_head.weight.grad is None
    assert any(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # as `compile_module` does
def test_compiled_the_body_is_one_graph_and_the_loss_is_outside_of_it() -> None:
    model, task = model_of("llama"), CausalLM()
    task.chunked = True
    batch = batch_of()
    expected = task.loss_sum(model, batch)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    loss = torch.compile(TrainingModule(model, task), backend=look)(batch)
    torch._dynamo.reset()
    with_products = [graph for graph in graphs if any("linear" in str(node.target) for node in graph.graph.nodes)]
    assert len(with_products) == 1
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend, is_fused", [("inductor", True), ("aot_eager", False)])
def test_the_loss_is_fused_with_torchs_default_backend_alone(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, backend: str, is_fused: bool
) -> None:
    precision = {"compile": True, "compile_backend": backend}
    recipe = tiny_recipe(corpus, task="causal-lm", precision=precision)
    asked = []

    def see(*_: Any, compiled: bool, **_others: Any) -> Tensor:
        asked.append(compiled)
        return torch.zeros(())

    monkeypatch.setattr("accel_train.tasks.causal_lm.task.chunked_loss", see)
    task = CausalLM()
    model = task.build_model(recipe, task.load_data(recipe, progress=False))
    task.chunked = True
    task.loss_sum(model, batch_of())
    assert asked == [is_fused]


def test_a_head_that_makes_nan_is_what_a_watch_of_modules_finds() -> None:
    model, task = model_of("gpt2", tie_word_embeddings=False), CausalLM()
    task.chunked = True
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with ModuleWatch(model) as watch:
        task.loss_sum(model, batch_of())
    found = watch.first_not_finite()
    assert found is not None
    assert found.name == "lm_head"


def test_hidden_states_are_what_the_head_sees() -> None:
    model, batch = model_of("opt"), batch_of()
    torch.testing.assert_close(model.lm_head(hidden_states(model, batch)), next_token_logits(model, batch))


@pytest.mark.parametrize("operator", ["mm", "addmm"])
def test_a_build_without_wide_products_is_found_by_trying_one(
    operator: Literal["mm", "addmm"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*operands: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
        raise RuntimeError("expected all operands to have the same dtype")

    def multiply(*operands: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
        return operands[0].to(out_dtype)

    for own, has_it in ((refuse, False), (multiply, True)):
        monkeypatch.setattr(torch, operator, own)
        assert has_wide_products.__wrapped__(operator, "cpu") == has_it
