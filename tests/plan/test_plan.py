"""A plan says what a run will be, in the run's own numbers, without weights."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from torch import Tensor, nn

from accel_train.cli.main import main
from accel_train.core.errors import SettingError
from accel_train.data.samples import fetch
from accel_train.engine.resolve import change_model
from accel_train.model.fake_step import simulate_step
from accel_train.model.kernels.attention import DENSE, PER_DOCUMENT
from accel_train.model.memory_estimate import build_without_weights, estimate_memory, largest_samples
from accel_train.plan import place
from accel_train.plan.format import format_plan
from accel_train.plan.plan import Plan, resolve_plan
from accel_train.recipe.loader import load_recipe
from accel_train.task import TaskData, load_task
from tests.support.commands import error_line
from tests.support.memory import peak_bytes
from tests.support.plan_recipe import GOOD, parts_of, rows_of
from tests.support.runs import Capture, refused, summary_of
from tests.support.tasks.number_faults import FaultyRegression
from tests.support.wording import assert_golden, raises_golden

GPT2 = "{model_type: gpt2, vocab_size: 50304}"
LLAMA = "{model_type: llama, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 2, intermediate_size: 128}"


def plan(*flags: str, world_size: int | None = 1, gpu: str | None = None) -> Plan:
    return resolve_plan(load_recipe("r.yaml", arguments=flags), world_size, gpu)


def test_the_final_weights_are_counted_in_their_type() -> None:
    wide, narrow = plan(), plan("--checkpoint.model_dtype", "bf16")
    assert wide.model_bytes == 2 * narrow.model_bytes == 4 * wide.num_parameters
    assert wide.disk_bytes - narrow.disk_bytes == 2 * wide.num_parameters


def test_the_numbers_of_a_run_are_those_of_its_parts() -> None:
    resolved = plan(world_size=4)
    assert (resolved.sizes.global_batch_size, resolved.sizes.gradient_accumulation_steps) == (16, 2)
    assert resolved.learning_rate.value == pytest.approx(1e-3 * 16 / 4)
    assert (resolved.steps.max_steps, resolved.steps.warmup_steps) == (10, 3)
    tokens = resolved.data_facts.train_tokens
    assert tokens == 14 * 400 + 1  # bytes, and the separator of the one document
    assert resolved.num_samples == -(-(tokens - 1) // 64)
    assert resolved.num_targets == pytest.approx(10 * 16 * 64, rel=0.02)


def test_flops_of_gpt2_are_those_of_the_convention() -> None:
    resolved = plan("--model.config", GPT2, "--data.sequence_length", "1024")
    assert resolved.num_parameters == 124_475_904  # 124,439,808 with the 50,257 rows of GPT-2, and 47 more of 768
    # 6 N + 12 L D T with N without position embeddings (nanoGPT's estimate_mfu)
    expected = 6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert resolved.flops_per_target == expected
    assert resolved.total_flops == expected * resolved.num_targets


@pytest.mark.parametrize("compiled, share", [(True, 0.4), (False, 0.3)])
def test_time_follows_from_the_peak_and_the_assumed_share_of_it(compiled: bool, share: float) -> None:
    resolved = plan("--precision.compile", str(compiled).lower(), world_size=8, gpu="NVIDIA H200")
    assert resolved.total_flops is not None
    assert resolved.peak_flops == pytest.approx(989.4e12)
    assert resolved.scale.step is not None
    computing = resolved.steps.max_steps * resolved.scale.step.compute_seconds
    assert computing == pytest.approx(resolved.total_flops / (8 * 989.4e12 * share))
    assert f"MFU of {share:.3g} of 8 x 989.4 " in format_plan(resolved)


def test_time_is_unknown_where_the_peak_is(without_cuda: None) -> None:
    resolved = plan()
    assert (resolved.device, resolved.peak_flops, resolved.train_seconds) == ("cpu", None, None)
    assert_golden(rows_of(format_plan(resolved), "time"))


@pytest.mark.parametrize(
    "gpu, asked, precision",
    [("H200", "auto", "bf16"), ("Tesla V100-SXM2-16GB", "auto", "fp16"), ("H200", "no", "no"), ("T4", "fp16", "fp16")],
)  # fmt: skip
def test_precision_is_that_of_the_planned_gpu(gpu: str, asked: str, precision: str) -> None:
    assert plan("--precision.mixed_precision", asked, gpu=gpu).precision.value == precision


@pytest.mark.parametrize("gpu", ["H200", "L40S"])
def test_fp8_is_planned_as_bf16(gpu: str) -> None:
    llama = "{model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 128}"
    fp8, bf16 = (
        plan("--model.config", llama, "--precision.mixed_precision", precision, gpu=gpu)
        for precision in ("fp8", "bf16")
    )
    assert fp8.precision.value == "fp8"
    assert_golden(fp8.precision.reason)
    assert fp8.peak_flops == bf16.peak_flops is not None
    assert parts_of(fp8) == parts_of(bf16)


@pytest.mark.parametrize(
    "strategy, precision, said", [("fsdp2", "auto", True), ("ddp", "auto", False), ("fsdp2", "no", False)]
)
def test_16_bits_under_fsdp2_are_said_to_be_further_from_fp32_than_under_ddp(
    strategy: str, precision: str, said: bool
) -> None:
    flags = ("--parallel.strategy", strategy, "--precision.mixed_precision", precision)
    assert ("fsdp2" in plan(*flags, world_size=2, gpu="H100").precision.reason) == said


@pytest.mark.parametrize("gpu", ["V100", "H20O"])
def test_bf16_on_a_gpu_without_it_and_an_unknown_gpu_are_refused(gpu: str) -> None:
    with raises_golden():
        plan("--precision.mixed_precision", "bf16", gpu=gpu)


@pytest.mark.parametrize(
    "optimizer, moments",
    [("{name: adamw}", 2), ("{name: sgd}", 1), ("{name: sgd, momentum: 0}", 0), ("{name: lion}", 1)],
)
def test_weights_gradients_and_optimizer_are_arithmetic(optimizer: str, moments: int) -> None:
    resolved = plan("--optimizer", optimizer)
    weights = 4 * resolved.num_parameters
    sizes = parts_of(resolved)
    assert (sizes["parameters"], sizes["gradients"], sizes["optimizer"]) == (weights, weights, moments * weights)
    assert resolved.checkpoint_bytes == (1 + moments) * weights
    assert {part.name: part.kind for part in resolved.memory}["activations"] == "estimate"


def test_muon_keeps_a_number_for_each_weight_of_a_matrix_in_a_block_and_two_for_others(without_cuda: None) -> None:
    resolved = plan("--optimizer.name", "muon")
    model = resolved.recipe.model.config
    assert model is not None
    in_matrices = 12 * model["n_embd"] ** 2 * model["n_layer"]
    state = 4 * (2 * resolved.num_parameters - in_matrices)
    assert parts_of(resolved)["optimizer"] == state
    assert resolved.checkpoint_bytes == 4 * resolved.num_parameters + state
    assert_golden("\n".join(resolved.notes))


def test_an_optimizer_that_the_host_steps_says_what_that_costs(without_cuda: None) -> None:
    constant = ("--schedule.type", "constant", "--schedule.warmup_steps", "0")
    assert_golden("\n".join(plan("--optimizer.name", "schedule_free_adamw", *constant).notes), "schedule_free_adamw")
    assert plan("--optimizer.name", "adafactor", *constant).notes == plan().notes
    unknown = next(part for part in plan("--optimizer.name", "torch.optim:NAdam").memory if part.name == "optimizer")
    assert unknown.kind == "estimate"
    assert_golden(unknown.how, "NAdam")
    refused_under_fsdp2("adafactor")


def test_a_new_model_on_a_cpu_is_told_what_its_activation_costs(without_cuda: None) -> None:
    assert_golden("\n".join(plan().notes))
    exact = plan("--model.config.activation_function", "gelu")
    assert exact.notes == plan(gpu="H100").notes == ()


def refused_under_fsdp2(optimizer: str) -> None:
    named = f"={optimizer} |parallel.strategy ddp"
    refused(plan, "--optimizer.name", optimizer, "--parallel.strategy", "fsdp2", world_size=2, named=named)


def test_8_bits_are_planned_as_they_are_kept_and_refused_where_weights_are_sharded(without_cuda: None) -> None:
    resolved, whole = plan("--optimizer.name", "adamw_8bit"), plan("--optimizer.name", "adamw")
    model = resolved.recipe.model.config
    assert model is not None
    in_blocks = 12 * model["n_embd"] ** 2 * model["n_layer"]
    small = whole.checkpoint_bytes - resolved.checkpoint_bytes
    assert small == parts_of(whole)["optimizer"] - parts_of(resolved)["optimizer"]
    assert 5.8 * in_blocks < small < 6 * in_blocks
    assert_golden("\n".join(resolved.notes))
    refused_under_fsdp2("adamw_8bit")


def test_bf16_moments_are_planned_as_half_of_fp32_and_refused_under_zero() -> None:
    flags = ("--optimizer.name", "adamw", "--optimizer.state_dtype")
    halved, whole = plan(*flags, "bf16"), plan(*flags, "fp32")
    assert parts_of(halved)["optimizer"] == 4 * whole.num_parameters
    assert parts_of(whole)["optimizer"] - parts_of(halved)["optimizer"] == 4 * whole.num_parameters
    assert whole.checkpoint_bytes - halved.checkpoint_bytes == 4 * whole.num_parameters
    with pytest.raises(SettingError) as caught:
        plan(*flags, "bf16", "--parallel.strategy", "deepspeed", world_size=2)
    assert caught.value.settings == ("parallel.strategy", "optimizer.state_dtype")


def test_schedule_free_keeps_an_average_in_its_checkpoints_and_while_it_evaluates() -> None:
    free = plan(
        "--optimizer.name", "schedule_free_adamw", "--schedule.type", "constant", "--schedule.warmup_ratio", "0"
    )
    assert free.checkpoint_bytes == 4 * 4 * free.num_parameters
    assert parts_of(free)["averaged weights"] == 4 * free.num_parameters


def peak_by_profiler(recipe_flags: list[str], mixed_precision: str) -> int:
    """Bytes beyond parameters and gradients that torch's own profiler saw at the worst moment of a real step."""
    recipe = load_recipe("r.yaml", arguments=recipe_flags)
    task = load_task(recipe.task)
    data = task.load_data(recipe, progress=False)
    model, *_ = change_model(recipe, task, task.build_model(recipe, data))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = data.collate(fetch(data.train, [0, 0]))
    batch.pop("num_targets")

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed_precision == "bf16"):
            loss = task.loss_sum(model, batch)
        loss.backward()

    return peak_bytes(step)


@pytest.mark.parametrize("config", [GPT2.replace("50304", "4096, n_layer: 2, n_embd: 64, n_head: 2"), LLAMA])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("checkpointing", ["false", "true", "selective"])
@pytest.mark.parametrize("chunked", ["auto", "true"])
def test_activations_are_what_a_real_step_takes(
    config: str, mixed_precision: str, checkpointing: str, chunked: str
) -> None:
    flags = ["--model.config", config, "--precision.gradient_checkpointing", checkpointing, "--loss.chunked", chunked]
    flags += ["--precision.mixed_precision", mixed_precision]
    sizes = parts_of(plan(*flags))
    estimated = sizes["activations"] + sizes["logits"]
    assert estimated == pytest.approx(peak_by_profiler(flags, mixed_precision), rel=0.03)


def test_logits_beyond_a_chunk_are_none_of_the_memory(without_cuda: None) -> None:
    flags = ("--model.config.vocab_size", "1000000", "--model.config.n_embd", "8")
    whole, chunked = (plan(*flags, "--loss.chunked", each) for each in ("false", "auto"))
    assert parts_of(whole)["logits"] == 3 * 4 * 2 * 64 * 1_000_000
    # A chunk's logits, and their log-probabilities.
    assert parts_of(chunked)["logits"] < 2.02 * 4 * 2**26
    assert_golden("\n".join(rows_of(format_plan(each), "loss in chunks") for each in (chunked, whole)))


def test_a_split_output_layer_gathers_no_logits_where_the_loss_is_in_chunks() -> None:
    flags = ("--model.config", LLAMA, "--parallel.strategy", "fsdp2", "--parallel.tp_size", "2")
    whole, chunked = (plan(*flags, "--loss.chunked", each, world_size=2) for each in ("false", "auto"))
    sent = [
        {each.kind: each.payload_bytes for each in resolved.scale.traffic if each.purpose.startswith("activations")}
        for resolved in (whole, chunked)
    ]
    positions, tokens = 16 * 64, chunked.vocabulary[1] if chunked.vocabulary else 0
    assert sent[0]["all-gather"] == 4 * positions * tokens
    assert "all-gather" not in sent[1]
    # The gradients of hidden states are among both; the loss sums four numbers of a position over the halves.
    assert sent[1]["all-reduce"] == sent[0]["all-reduce"] + 4 * 4 * positions
    assert chunked.model_choices["loss.chunked"].value is True


def test_checkpointing_lowers_the_activations_and_half_precision_too() -> None:
    plain, checkpointed, selective, half = (
        parts_of(plan("--model.config.n_layer", "8", *flags))["activations"]
        for flags in (
            (),
            ("--precision.gradient_checkpointing", "true"),
            ("--precision.gradient_checkpointing", "selective"),
            ("--precision.mixed_precision", "bf16"),
        )
    )
    assert checkpointed < 0.5 * plain
    assert checkpointed < selective < 0.7 * plain
    assert half < plain


def test_the_plan_says_which_kernels_the_model_has_and_that_they_keep_less(without_cuda: None) -> None:
    fused, python = plan(), plan("--model.fused_kernels", "false")
    for name, found in (("fused", fused), ("python", python)):
        assert_golden(rows_of(format_plan(found), "attention", "fused kernels"), name)
    assert parts_of(fused)["activations"] < parts_of(python)["activations"]


def test_attention_on_a_gpu_keeps_no_scores_and_a_process_has_a_context() -> None:
    flags = ("--data.sequence_length", "1024", "--precision.mixed_precision", "no")
    on_cpu, on_gpu = parts_of(plan(*flags)), parts_of(plan(*flags, gpu="H200"))
    scores = 2 * 2 * 2 * 1024 * 1024 * 4  # layers, samples, heads, pairs of positions, bytes
    assert on_cpu["activations"] - on_gpu["activations"] > scores
    assert on_gpu["logits"] == 3 * 4 * 2 * 1024 * 320  # themselves, their logarithms, a gradient
    assert on_cpu["logits"] == 0  # the worst moment is in the attention, before there are any
    assert "CUDA context" in on_gpu
    assert "CUDA context" not in on_cpu


@pytest.mark.parametrize("compiled", ["false", "true", "model"])
def test_a_plan_for_a_gpu_shows_the_kernel_for_documents_and_counts_no_mask(without_cuda: None, compiled: str) -> None:
    length = 1024
    flags = (
        "--precision.compile", compiled, "--precision.mixed_precision", "bf16", "--data.mask_documents", "true",
        "--data.sequence_length", str(length), "--model.config.attn_pdrop", "0.0",
    )  # fmt: skip
    ours, dense = plan(*flags, gpu="H100"), plan(*flags, "--model.attn_implementation", "sdpa", gpu="H100")
    dropped, on_cpu = plan(*flags, "--model.config.attn_pdrop", "0.1", gpu="H100"), plan(*flags)
    mask_bytes = 2 * length**2  # a bool for each pair of positions in both rows
    assert parts_of(dense)["activations"] - parts_of(ours)["activations"] > mask_bytes
    assert parts_of(dropped)["activations"] - parts_of(ours)["activations"] > mask_bytes
    assert [each.model_choices["document mask"].value for each in (ours, dense, dropped, on_cpu)] == [
        PER_DOCUMENT, DENSE, DENSE, PER_DOCUMENT if compiled == "false" else DENSE,
    ]  # fmt: skip
    assert ours.model_choices["document mask"].reason.startswith("CUDA: one call of varlen_attn for all")


def test_a_plan_of_billions_of_parameters_needs_no_memory_for_them() -> None:
    plan()  # imports, and tokenises
    before = psutil.Process().memory_info().rss
    resolved = plan("--model.config", "{model_type: gpt2, n_embd: 8192, n_head: 64, n_layer: 4, n_positions: 64}")
    assert resolved.num_parameters > 3e9
    assert psutil.Process().memory_info().rss - before < 300 * 2**20


@pytest.mark.parametrize("flags", [(), ("--optimizer.ema_decay", "0.9")])
def test_the_planned_checkpoint_is_the_size_of_a_real_one(flags: tuple[str, ...]) -> None:
    flags = ("--schedule.max_steps", "1", "--model.config.n_embd", "128", *flags)
    resolved = plan(*flags)
    assert main(["run", "r.yaml", *flags]) == 0
    written = sum(path.stat().st_size for path in Path("out/checkpoints/step-00000001").iterdir())
    assert written == pytest.approx(resolved.checkpoint_bytes, rel=0.02)
    summary = summary_of(Path("out"))
    assert summary["parameters"] == resolved.num_parameters
    assert "step-00000001: " in " ".join(plan().notes)


def test_a_pretrained_model_is_planned_from_its_configuration_alone() -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=100, bos_token_id=0, eos_token_id=0).save_pretrained("small")
    resolved = plan("--model.pretrained", "small", "--tokenizer", "bytes", "--model.pad_vocab_to_multiple_of", "128")
    assert resolved.vocabulary == (257, 384)  # grown to the tokenizer's, and padded
    assert_golden(rows_of(format_plan(resolved), "vocabulary"))


def test_the_model_has_no_storage() -> None:
    recipe = load_recipe("r.yaml")
    task = load_task(recipe.task)
    model = build_without_weights(recipe, task, task.load_data(recipe, progress=False))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


class Rows(list[int]):
    """Samples that are seen as they are when they are evaluated."""


@pytest.mark.parametrize("is_drawn", [False, True])
def test_the_largest_micro_batch_has_the_longest_samples_as_training_draws_them(is_drawn: bool) -> None:
    def draw(index: int, generator: Any) -> tuple[str, int]:
        return "drawn", index

    data = TaskData(Rows(range(5)), None, dict, "", draw=draw if is_drawn else None)  # type: ignore[arg-type]
    of_one_length = largest_samples(data, 0, 6)
    assert of_one_length == ([("drawn", index) for index in (0, 1, 2, 3, 4, 0)] if is_drawn else [0] * 6)
    longest = largest_samples(replace(data, lengths=np.array([3, 9, 1, 7, 5])), 0, 3)
    assert longest == ([("drawn", index) for index in (1, 3, 4)] if is_drawn else [1, 3, 4])


class ReadsValues(FaultyRegression):
    """A task whose loss depends on values."""

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(batch["x"]).sum()
        return loss * loss.item()


def test_a_model_that_needs_values_has_unknown_activations() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    task: Any = ReadsValues()
    recipe = load_recipe("r.yaml")
    found = estimate_memory(recipe, task, model, {"x": torch.ones(2, 4)}, mixed_precision="no", device_type="cpu")
    assert [(part.name, part.num_bytes) for part in found][-1] == ("activations", None)
    assert_golden(found[-1].how.partition(":")[0])


class Two(FaultyRegression):
    """A task whose memory can be counted by hand."""

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(batch["x"]).relu().sum()
        return loss


def test_a_step_counted_by_hand() -> None:
    with torch.device("meta"):
        model = nn.Linear(256, 512, bias=False)
    task: Any = Two()
    peak = simulate_step(task, model, {"x": torch.ones(1024, 256)})
    output, weight_gradient = 4 * 1024 * 512, 4 * 512 * 256
    # Backward of relu holds its output and the gradient it makes; then that gradient, and the weight's before it is
    # added.
    assert peak["activations"] == pytest.approx(max(2 * output, output + weight_gradient), abs=16)


def test_the_world_size_comes_from_the_launcher_or_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert plan(world_size=None).world_size == 2
    assert plan(world_size=8).world_size == 8


@pytest.mark.parametrize(("is_there", "expected"), [(True, 4), (False, 1)])
def test_without_a_launcher_the_world_size_is_the_number_of_accelerators_of_any_kind(
    monkeypatch: pytest.MonkeyPatch, not_launched: None, is_there: bool, expected: int
) -> None:
    monkeypatch.setattr(place, "has_accelerator", lambda: is_there)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert place.count_processes(None, None) == expected
    assert place.count_processes(None, "H100") == 1
    assert place.count_processes(2, None) == 2


def test_a_plan_is_five_lines_and_all_of_it_is_shown_when_asked_for(capsys: Capture) -> None:
    assert main(["plan", "r.yaml", "--gpu", "H100"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert short[0] == "Plan"
    assert [line.split()[0] for line in short[1:6]] == ["trains", "data", "memory", "time", "disk"]
    assert short[3].endswith(": it fits")
    assert "--all" in short[-1]
    assert len(short) < 15
    assert main(["plan", "r.yaml", "--gpu", "H100", "--all"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert every[:6] == short[:6]
    assert "weight_decay 0.1 <- default" in [" ".join(line.split()) for line in every]
    assert not any(line.startswith("--all") for line in every)


def test_the_text_says_who_set_each_value_and_fills_in_the_formulas(capsys: Capture) -> None:
    assert main(["plan", "r.yaml", "--world-size", "2", "--seed", "3", "--all"]) == 0
    captured = capsys.readouterr()
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    assert "seed 3 <- --seed" in lines
    line = 1 + Path("r.yaml").read_text().splitlines().index("  learning_rate: 0.001")
    assert f"learning_rate 0.001 <- line {line}" in lines
    assert any("r.yaml" in line for line in lines)
    assert_golden(rows_of(captured.out, "global batch", "learning rate", "vocabulary"))
    assert "\x1b" not in captured.out
    assert "--no-data" in captured.err
    assert not Path("out").exists()


def test_colour_is_for_terminals() -> None:
    assert "\x1b[2m" in format_plan(plan(), colour=True)


def test_secrets_stay_out_of_the_plan() -> None:
    text = format_plan(plan("--options.hub_token", "s3cr3t", "--log.project", "https://me:s3cr3t@host/"))
    assert "s3cr3t" not in text


def test_a_plan_without_data_is_that_of_full_windows_and_says_what_it_does_not_know(
    capsys: Capture,
) -> None:
    with_data = plan(world_size=4, gpu="H200")
    Path("text.txt").unlink()
    recipe = load_recipe("r.yaml", arguments=["--data.cache_dir", "elsewhere"])
    found = resolve_plan(recipe, 4, "H200", no_data=True)
    same = ("sizes", "memory", "num_parameters", "vocabulary", "flops_per_target", "checkpoint_bytes", "learning_rate")
    for name in same:
        assert getattr(found, name) == getattr(with_data, name), name
    assert (found.steps.max_steps, found.steps.warmup_steps) == (10, 3)
    assert found.num_targets == 10 * 16 * 64
    assert found.scale.traffic == with_data.scale.traffic
    assert not Path("elsewhere").exists()
    capsys.readouterr()
    assert main(["plan", "r.yaml", "--no-data", "--gpu", "H200", "--world-size", "4", "--all"]) == 0
    assert_golden(rows_of(capsys.readouterr().out, "steps", "in total", "tokens", "sources"))
    assert main(["plan", "r.yaml"]) == 2  # the data is still missed where it is to be read


def test_the_steps_of_epochs_are_unknown_without_data(without_cuda: None, capsys: Capture) -> None:
    settings = {**GOOD, "schedule": {"num_epochs": 2.5}, "tokenizer": {"train_bpe": {"vocab_size": 1000}}}
    Path("r.yaml").write_text(yaml.safe_dump(settings))
    for flags in ((), ("--gpu", "H200", "--world-size", "8")):
        assert main(["plan", "r.yaml", "--no-data", "--all", *flags]) == 0
        names = ("time", "schedule", "steps", "tokens", "vocabulary", "FLOPs", "training")
        assert_golden(rows_of(capsys.readouterr().out, *names), "on GPUs" if flags else "")


def test_a_task_that_needs_its_data_says_so() -> None:
    settings = {**GOOD, "task": "text-classification", "data": {"train": "t.csv", "text_columns": ["text"]}}
    settings["model"] = {
        "config": {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1}
    }
    Path("r.yaml").write_text(yaml.safe_dump(settings))
    assert_golden(error_line("plan", "r.yaml", "--no-data"))


def test_python_and_torch_are_a_row_of_their_own_on_a_cpu(without_cuda: None) -> None:
    sizes = parts_of(plan())
    program = (
        "import psutil, accel_train.training.train, transformers.models.gpt2; print(psutil.Process().memory_info().rss)"
    )
    resident = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert 0.5 * resident < sizes["Python and torch"] < 2 * resident
    assert "Python and torch" not in parts_of(plan(gpu="H200"))
