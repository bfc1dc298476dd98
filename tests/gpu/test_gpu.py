"""What only a CUDA device can show: no synchronisation in the steady state, and the guard in its own kernels."""

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from torch import nn
from transformers import ModernBertConfig, ModernBertForMaskedLM

from accel_train import Recipe
from accel_train.guard.guard import Limits
from accel_train.model.kernels.attention import masks_without_reading
from accel_train.model.kernels.chunked_loss import chunked_loss
from accel_train.model.kernels.documents import (
    attend_within_documents,
    document_starts,
    same_document_mask,
    why_no_kernel,
)
from accel_train.optim.optimizers import build_optimizer
from accel_train.optim.update import update_within
from accel_train.parallel.precision import has_float8
from accel_train.plan.plan import resolve_plan
from accel_train.recipe.optimizer import Optimizer
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run
from tests.support.runs import (
    LLAMA,
    REPOSITORY,
    TINY_MODEL,
    events,
    losses,
    metrics,
    summary_of,
    tiny_recipe,
    write_corpus,
    write_recipe_file,
)
from tests.support.runs import run as run_command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning"),  # torchao calls it
]


def train_steps(folder: Path, **sections: Any) -> dict[int, float]:
    """Train in this process, on a small corpus where the folder has none; return the losses."""
    folder.mkdir(exist_ok=True)
    if not (folder / "corpus.jsonl").exists():
        write_corpus(folder)
    run = prepare_run(tiny_recipe(folder, **{"task": "causal-lm", **sections}))
    with run.resources:
        run_steps(run)
    return losses(folder / "run")


class TwoBlocks(nn.Module):
    """Two matrices, for Muon to make orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_a_nonfinite_step_is_refused_to_the_bit_without_waiting_for_the_device(name: str) -> None:
    device = torch.device("cuda")
    Accelerator()
    model = TwoBlocks().to(device)
    optimizer = build_optimizer(model, Optimizer.model_validate({"name": name, "learning_rate": 0.1}), device)
    parameters = list(model.parameters())
    for poison in (0.0, math.nan, 0.0, math.inf):
        before = [p.detach().clone() for p in parameters] + [
            t.clone() for p in parameters for t in optimizer.state[p].values()
        ]
        model(torch.randn(4, 16, device=device)).square().mean().backward()
        assert parameters[0].grad is not None
        parameters[0].grad[0, 0] += poison
        torch.cuda.set_sync_debug_mode("error")
        try:
            _, skipped, _ = update_within(Limits(1.0), optimizer, parameters, None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after = [p.detach() for p in parameters] + [t for p in parameters for t in optimizer.state[p].values()]
        if poison == 0.0:
            assert skipped.item() == 0.0
        else:
            assert skipped.item() == 1.0
            assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_a_run_that_is_resumed_ends_with_the_same_bits(corpus: Path) -> None:
    recipe = write_recipe_file(
        corpus,
        task="causal-lm",
        options={},
        precision={"mixed_precision": "bf16", "deterministic": True},
        schedule={"max_steps": 6},
        checkpoint={"every_steps": 3},
    )
    run = corpus / "run"
    weights = run / "model" / "model.safetensors"
    run_command(recipe)
    whole = weights.read_bytes()
    # As after a kill in step 4.
    for leftover in (run / "model", run / "checkpoints" / "step-00000006"):
        shutil.rmtree(leftover)
    run_command(recipe)
    assert [event["step"] for event in events(run, "resume")] == [3]
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("mixed_precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("chunked", [False, True])
def test_steady_steps_do_not_synchronise(corpus: Path, mixed_precision: str, chunked: bool) -> None:
    sections: dict[str, Any] = {"schedule": {"max_steps": 40}, "precision": {"mixed_precision": mixed_precision}}
    watch_steps(tiny_recipe(corpus, task="causal-lm", loss={"chunked": chunked}, **sections))


OFFLINE_RECIPES = (
    "image_classification",
    "masked_lm",
    "multiple_choice",
    "question_answering",
    "segmentation",
    "sentence_embedding",
    "seq2seq",
    "text_classification",
    "text_ngrams",
    "token_classification",
)


@pytest.mark.parametrize("name", OFFLINE_RECIPES)
def test_no_task_waits_for_the_device_in_a_steady_step(tmp_path: Path, name: str) -> None:
    fields = yaml.safe_load((REPOSITORY / "recipes" / f"{name}.yaml").read_text())
    del fields["schedule"]["num_epochs" if "num_epochs" in fields["schedule"] else "max_steps"]
    fields["schedule"]["max_steps"] = 40
    fields["evaluate"] = {"every_steps": 0} | ({"generation": {"max_samples": 0}} if name == "seq2seq" else {})
    fields["checkpoint"] = {"every_steps": 0}
    fields |= {"output_dir": str(tmp_path / "run"), "log": {"every_steps": 10}}
    fields["data"]["cache_dir"] = str(tmp_path / "cache")
    watch_steps(Recipe.model_validate(fields))
    assert losses(tmp_path / "run")[40] < losses(tmp_path / "run")[10]
    assert not any(line["skipped"] for line in metrics(tmp_path / "run") if "skipped" in line)


def watch_steps(recipe: Recipe) -> None:
    """Train 40 steps; from step 5 to 35, an operation that waits for the device is an error."""
    run = prepare_run(recipe)
    seen = 0
    on_step = run.observer.on_step

    def watch(result: Any, learning_rate: float) -> None:
        nonlocal seen
        seen += 1
        on_step(result, learning_rate)
        torch.cuda.set_sync_debug_mode("error" if 5 <= seen < 35 else "default")

    run.observer.on_step = watch  # type: ignore[method-assign]
    try:
        with run.resources:
            run_steps(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == 40


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_chunks_in_16_bits_is_no_worse_than_one_of_whole_logits(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(256, 8000, bias=False, device="cuda")
    hidden, labels = torch.randn(1, 600, 256, device="cuda"), torch.randint(0, 8000, (1, 600), device="cuda")
    labels[0, ::3] = -100

    def gradients(of: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        own, states = copy.deepcopy(head).to(dtype), hidden.to(dtype).requires_grad_()
        (of(own, states) / 400).backward()
        assert states.grad is not None
        assert own.weight.grad is not None
        return [states.grad.double(), own.weight.grad.double()]

    def whole(own: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        logits = own(states).flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

    exact = gradients(whole, torch.float64)
    ours = gradients(lambda own, states: chunked_loss(own, states, labels, chunk_rows=128, compiled=compiled), dtype)
    for found, plain, right in zip(ours, gradients(whole, dtype), exact, strict=True):
        assert (found - right).norm() <= 1.02 * (plain - right).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_within_documents_is_that_under_a_dense_mask_and_waits_for_nothing(
    dtype: torch.dtype, key_heads: int
) -> None:
    if why_no_kernel("cuda", dtype, 64, 0.0) is not None:
        pytest.skip(str(why_no_kernel("cuda", dtype, 64, 0.0)))
    torch.manual_seed(0)
    lengths = torch.tensor([[5, 1, 250], [256, 0, 0]])  # with documents of no length, which fill up the lists
    ids = torch.stack([torch.arange(3).repeat_interleave(row) for row in lengths]).cuda()
    wide = [torch.randn(2, heads, 256, 64, device="cuda", dtype=torch.float64) for heads in (4, key_heads, key_heads)]
    weight = torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.float64)
    lengths = lengths.cuda()

    def compute(dtype: torch.dtype, *, by_documents: bool) -> list[torch.Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in wide]
        torch.cuda.set_sync_debug_mode("error" if by_documents else "default")
        try:
            if by_documents:
                output = attend_within_documents(*leaves, document_starts(lengths), 0.0, None)
            else:
                mask = same_document_mask(ids)
                output = nn.functional.scaled_dot_product_attention(*leaves, mask, enable_gqa=True).transpose(1, 2)
            output.backward(weight.to(dtype))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [output.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None)]

    exact, dense, ours = (
        compute(torch.float64, by_documents=False),
        compute(dtype, by_documents=False),
        compute(dtype, by_documents=True),
    )
    assert len(ours) == 4
    for found, masked, right in zip(ours, dense, exact, strict=True):
        assert (found - right).norm() < max(1.2 * (masked - right).norm(), 1e-2 * right.norm())


def test_compiled_attention_within_documents_is_the_plain_one_in_one_graph() -> None:
    if (obstacle := why_no_kernel("cuda", torch.bfloat16, 64, 0.0)) is not None:
        pytest.skip(obstacle)
    from torch._dynamo.testing import CompileCounterWithBackend as compile_counter

    torch.manual_seed(0)
    wide = [torch.randn(2, 256, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    weight, counter = torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16), compile_counter("inductor")
    compiled = torch.compile(attend_within_documents, backend=counter, fullgraph=True)
    for lengths in ([[5, 1, 250], [256, 0, 0]], [[256, 0, 0], [1, 1, 254]], [[80, 90, 86], [3, 253, 0]]):
        starts, results = document_starts(torch.tensor(lengths).cuda()), []
        for attend in (attend_within_documents, compiled):
            leaves = [each.transpose(1, 2).detach().requires_grad_() for each in wide]
            output = attend(*leaves, starts, 0.0, None)
            output.backward(weight)
            results.append([output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
        for plain, found in zip(*results, strict=True):
            assert (found - plain).norm() <= 1e-3 * plain.norm()
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_outside_every_window_leaves_gradients_finite(dtype: torch.dtype) -> None:
    """Queries deep in the padding have no key to attend to, which kernels of GPUs make NaN in the backward."""
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"vocab_size": 100, "local_attention": 8, "layer_types": ["sliding_attention", "full_attention"]}
    fields |= {"embedding_dropout": 0.0, "pad_token_id": 0, "max_position_embeddings": 128}
    model = ModernBertForMaskedLM(ModernBertConfig(**fields, attn_implementation="sdpa")).cuda()
    ids, mask = torch.randint(1, 100, (4, 64), device="cuda"), torch.ones(4, 64, dtype=torch.long, device="cuda")
    for row, length in enumerate((64, 40, 9, 3)):
        mask[row, length:] = 0
    labels = torch.where(mask == 1, ids, -100)
    found = {}
    for name, device in (("cuda", "cuda"), ("cpu", "cpu")):
        own = copy.deepcopy(model).to(device)
        with (
            masks_without_reading(),
            torch.autocast(device, dtype, enabled=device == "cuda" and dtype != torch.float32),
        ):
            logits = own(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.to(device).flatten())
        loss.backward()
        found[name] = torch.cat([each.grad.flatten().cpu() for each in own.parameters() if each.grad is not None])
    assert found["cuda"].isfinite().all()
    # In fp32, an earlier test may have allowed TF32.
    limit = 5e-3 if dtype == torch.float32 else 5e-2
    assert (found["cuda"] - found["cpu"]).norm() < limit * found["cpu"].norm()


def test_documents_train_as_under_a_dense_mask(tmp_path: Path) -> None:
    traces = []
    for name, attention in (("alone", "auto"), ("dense", "sdpa")):
        model = {"config": {**TINY_MODEL, "n_positions": 256}, "attn_implementation": attention}
        sections = {"model": model, "data": {"mask_documents": True, "sequence_length": 256}}
        traces.append(train_steps(tmp_path / name, precision={"mixed_precision": "bf16"}, **sections))
    assert traces[0] == pytest.approx(traces[1], rel=2e-2)


def test_fp16_finds_its_scale_and_trains_like_fp32(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "exact": {"mixed_precision": "no"},
        "scaled": {"mixed_precision": "fp16"},
        "high": {"mixed_precision": "fp16", "fp16_init_scale": 2.0**30},
    }
    found = {}
    for name, precision in settings.items():
        found[name] = train_steps(tmp_path / name, precision=precision, schedule={"max_steps": 60})
    lines = metrics(tmp_path / "scaled" / "run")
    assert not any(line["skipped"] for line in lines)
    assert found["scaled"][60] == pytest.approx(found["exact"][60], rel=0.02)
    lines = metrics(tmp_path / "high" / "run")
    overflows = [line for line in lines if line["skipped"]]
    assert len(overflows) > 5, "a scale of 2^30 must overflow at first"
    assert lines[-1]["loss_scale"] < 2.0**25
    assert not any(line["skipped"] for line in lines[30:])
    assert found["high"][60] < 0.9 * found["high"][30]


def test_compiled_blocks_train_like_eager_ones(tmp_path: Path) -> None:
    traces = []
    for compiled in (False, True):
        precision = {"mixed_precision": "bf16", "compile": compiled}
        traces.append(train_steps(tmp_path / str(compiled), model={"config": TINY_MODEL}, precision=precision))
    assert traces[1] == pytest.approx(traces[0], rel=2e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_float8_trains_like_bf16(tmp_path: Path, compiled: bool) -> None:
    if not has_float8(torch.device("cuda", 0)):
        pytest.skip("this GPU does not multiply float8")
    traces = []
    for name in ("bf16", "fp8"):
        sections = {"model": {"config": LLAMA}, "precision": {"mixed_precision": name, "compile": compiled}}
        traces.append(train_steps(tmp_path / name, schedule={"max_steps": 40}, **sections))
    assert traces[1] == pytest.approx(traces[0], rel=5e-2)
    assert traces[1] != traces[0], "the setting had no effect"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_takes_the_memory_that_was_planned(tmp_path: Path, processes: int) -> None:
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    write_corpus(tmp_path, num_documents=400)
    model = {**TINY_MODEL, "n_layer": 8, "n_embd": 768, "n_head": 12, "n_positions": 512}
    sections: dict[str, Any] = {
        "task": "causal-lm",
        "model": {"config": model},
        "data": {"sequence_length": 512, "eval_fraction": 0},
        "batch": {"global_batch_size": 8 * processes, "per_device_batch_size": 8},
        "schedule": {"max_steps": 6},
        "precision": {"mixed_precision": "bf16"},
    }
    run_command(write_recipe_file(tmp_path, **sections), processes=processes)
    peaks = summary_of(tmp_path / "run")["peak_memory_bytes"]
    plan = resolve_plan(tiny_recipe(tmp_path, **sections), processes)
    not_allocated_by_torch = ("CUDA context", "NCCL buffers", "fragmentation")
    planned = sum(part.num_bytes or 0 for part in plan.memory if part.name not in not_allocated_by_torch)
    # torch also allocates cuBLAS's workspace, 32 MiB on Hopper, which a plan counts as CUDA context.
    assert peaks["train"] == pytest.approx(planned, rel=0.05)


def test_search_takes_what_leaves_headroom_and_the_losses_stay(tmp_path: Path) -> None:
    """Most of the GPU is taken by somebody else, so that the whole share of a step does not fit."""
    write_corpus(tmp_path, 400)
    sections: dict[str, Any] = {
        "model": {"config": {**TINY_MODEL, "n_layer": 8, "n_embd": 256, "n_positions": 512}},
        "data": {"sequence_length": 512},
        "schedule": {"max_steps": 4},
        "precision": {"mixed_precision": "no"},
    }
    whole = train_steps(tmp_path, batch={"global_batch_size": 64, "per_device_batch_size": 64}, **sections)
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.empty(free - total // 10 - 2 * 2**30, dtype=torch.uint8, device=device)
    sections |= {"output_dir": str(tmp_path / "found"), "batch": {"global_batch_size": 64}}
    recipe = tiny_recipe(tmp_path, task="causal-lm", **sections)
    run = prepare_run(recipe)
    assert 1 < run.sizes.per_device_batch_size < 64, run.plan.choices["batch.per_device_batch_size"]
    assert "measured on " in run.plan.choices["batch.per_device_batch_size"].reason
    with run.resources:
        run_steps(run)
    assert losses(tmp_path / "found") == pytest.approx(whole, rel=1e-5)
    again = prepare_run(recipe.model_copy(update={"output_dir": str(tmp_path / "again")}))
    again.resources.close()
    assert again.plan.choices["batch.per_device_batch_size"].reason.startswith("found 20")
    del taken


def test_memory_that_ran_out_is_written_into_the_run_folder(tmp_path: Path) -> None:
    write_corpus(tmp_path, 400)
    # The limit is only asked when memory is taken from the device, not when freed memory of other tests is used again.
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        config = {**TINY_MODEL, "n_layer": 8, "n_embd": 512, "n_positions": 512}
        batch = {"global_batch_size": 256, "per_device_batch_size": 256}
        sections: dict[str, Any] = {"model": {"config": config}, "data": {"sequence_length": 512}, "batch": batch}
        train_steps(tmp_path, **sections, schedule={"max_steps": 2})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    table = (tmp_path / "run" / "profile" / "rank-0-memory-step-1.txt").read_text()
    assert " allocated of " in table
    assert "GPU reserved memory" in table
    assert (tmp_path / "run" / "profile" / "rank-0-memory-step-1.json.gz").stat().st_size > 0
