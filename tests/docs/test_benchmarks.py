"""The benchmarks run end to end, compare like with like, and print tables that a program can read. Nothing is timed
here.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from accel_train.core.json_io import read_json
from benchmarks import golden, gpu, step_path
from benchmarks.common import (
    FetchClock,
    child_environment,
    common_time,
    run_child,
    run_children_in_turns,
    run_to_end,
    step_times,
    write_tokens,
)
from benchmarks.gpu import bars
from benchmarks.gpu_loops import CHECKS, MODELS, model_config
from benchmarks.gpu_watch import gpu_idle, synchronizing_line
from benchmarks.loops import PRESETS, gpt2_config
from benchmarks.nanogpt_style import GPT, GPTShape, cosine_multiplier, random_batch, train
from benchmarks.optimizers import Trained, compare
from benchmarks.optimizers import verdict as shares_verdict
from benchmarks.overhead import bar_verdict, count_host_reads, step_table
from benchmarks.published import NUM_PARAMETERS, SERIES
from benchmarks.scaling_model import check_rows, simulate
from tests.support.runs import REPOSITORY, write_file, write_lines


def run(module: str, *arguments: str, expect: int = 0) -> str:
    """Run a benchmark, and return what it prints; of one that fails, what it says on standard error."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stderr if expect else done.stdout


def parse_table(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, rule, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert set("".join(rule)) <= set("-:|"), rule
    return [dict(zip(header, row, strict=True)) for row in rows]


def measured(module: str, folder: Path, *arguments: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The table that a benchmark prints, and the record that it saves."""
    rows = parse_table(run(module, *arguments, "--save", str(folder)))
    return rows, read_json(folder / f"{module}.json")


# --- end to end ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_four_loops_train_the_same_model_and_accel_train_reads_no_tensor(tmp_path: Path) -> None:
    printed = run("overhead", "--preset", "micro", "--count-reads", "--in-order", "--save", str(tmp_path))
    reads = parse_table(printed)
    assert {row["variant"] for row in reads} == {"raw", "accelerate", "hf_trainer", "accel_train"}
    assert [row["line"] for row in reads if row["variant"] == "accel_train"] == ["none"]
    assert [row["line"] for row in reads if row["variant"] == "raw"] == ["none"]

    saved = read_json(tmp_path / "overhead-micro-reads.json")
    assert saved["machine"]["cores"] >= 1
    assert saved["versions"]["torch"] == torch.__version__
    runs = {variant: rounds[0] for variant, rounds in saved["runs"].items()}
    assert len({figures["num_parameters"] for figures in runs.values()}) == 1
    for variant, figures in runs.items():  # same start, same batches, same learning rates: the same end
        assert figures["weights_l1"] == pytest.approx(runs["raw"]["weights_l1"], rel=1e-6), variant


@pytest.mark.slow
def test_model_path_compares_families_whose_outputs_are_the_librarys(tmp_path: Path) -> None:
    sizes = {"layers": 2, "heads": 2, "width": 16, "block": 8, "batch": 2, "rounds": 2, "steps": 1, "compile": 0}
    rows, saved = measured("model_path", tmp_path, "--families", "gpt2", "llama", "--sizes", json.dumps(sizes))
    assert [row["model"] for row in rows] == ["gpt2", "llama"]
    assert [row["fused"] for row in rows] == ["2 x tanh GELU", "none"]
    for row in rows:
        assert float(row["largest difference"]) < 1e-6
        assert float(row["eager"].split(" (")[0]) > 0
        assert row["compiled"] == "-"
    assert len(saved["runs"]) == 2


@pytest.mark.slow
def test_the_compile_benchmark_counts_one_graph_and_none_again_for_other_lengths(tmp_path: Path) -> None:
    sizes = {"layers": 2, "heads": 2, "width": 24, "block": 16, "batch": 2}
    flags = ("--families", "llama", "--sizes", json.dumps(sizes), "--backend", "eager")
    rows, saved = measured("compile", tmp_path, *flags)
    assert [row["model"] for row in rows] == ["llama"]
    assert {(row["graphs"], row["compiled again"]) for row in rows} == {("1", "0")}
    assert all(float(row["cold s"]) > 0 and float(row["warm s"]) > 0 for row in rows)
    assert set(saved["runs"]["llama"]) == {"cold", "warm", "varying"}


def test_overhead_prints_one_row_per_variant_and_judges_accel_train_alone() -> None:
    clocks = ("cpu_us", "wall_us", "cpu_us_quick", "cpu_us_mean")
    results = {"raw": [dict.fromkeys(clocks, 4000.0)] * 2, "accel_train": [dict.fromkeys(clocks, 4100.0)] * 2}
    rows = parse_table(step_table(results, PRESETS["micro"]))
    assert [row["variant"] for row in rows] == ["raw", "accel_train"]
    assert rows[0]["CPU / raw"] == "1.000 (1.000 to 1.000)"
    assert rows[1]["CPU - raw, us"] == "+100 (+100 to +100)"
    assert rows[1]["bar"] == "<= +60 us MISSED"
    assert rows[0]["bar"] == "-"


@pytest.mark.parametrize(
    ("module", "words", "named"),
    [("overhead", ("--variants", "raw"), "hf_trainer"), ("gpu", ("--only", "124M"), "'fairseq'")],
)
def test_a_variant_or_row_that_does_not_exist_is_refused(module: str, words: tuple[str, ...], named: str) -> None:
    assert named in run(module, *words, "fairseq", expect=2)


def test_gpu_says_in_one_line_that_there_is_no_cuda(without_cuda: None) -> None:
    assert len(run("gpu").splitlines()) == 1


@pytest.mark.slow
def test_gpu_measures_each_variant_and_writes_what_it_printed(tmp_path: Path) -> None:
    loops = ["accel_train", "nanogpt"]
    names = [f"124M {loop} eager" for loop in loops]
    printed = run("gpu", "--device", "cpu", "--only", "loss", "checkpoints", *names, "--save", str(tmp_path))
    rows = parse_table(printed)
    assert [row["variant"] for row in rows] == ["accel_train", *loops]
    for row in rows:
        assert float(row["ms/step"]) > 0
        assert int(row["tokens/s"].replace(",", "")) > 0
        assert row["host sync"] == "not checked"  # there is no GPU to wait for
        assert row["MFU of peak"] == row["peak GiB"] == row["GPU idle"] == "-"
    assert parse_table((tmp_path / "gpu-check.md").read_text()) == rows
    assert len(read_json(tmp_path / "gpu-check.json")["rows"]) == 4


@pytest.mark.slow
def test_time_to_loss_trains_both_loops_and_judges_them(tmp_path: Path) -> None:
    sizes = ["--steps", "20", "--share", "0.5", "--rounds", "1", "--windows", "24"]
    [row], saved = measured("time_to_loss", tmp_path, *sizes)
    assert all(float(value) > 0 for value in row.values())
    [found] = saved["rounds"]
    assert all(each["wall"] > each["training"] > 0 for each in found.values())


def test_gpu_names_its_rows() -> None:
    rows = run("gpu", "--list").splitlines()
    assert rows[:3] == ["124M accel_train", "124M whole logits accel_train", "124M whole model accel_train"]
    assert {"loss", "tests", "llama-8B LoRA accel_train eager", "llama-1.4B float8 accel_train"} < set(rows)


def test_gpu_keeps_what_it_measured_over_failures_interruptions_and_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, planned = list[str](), [row["row"] for row in gpu.planned_rows()]

    def measure(row: dict[str, Any], *_: Any) -> dict[str, Any]:
        measured.append(row["row"])
        if row["row"] == planned[1]:
            raise ZeroDivisionError("broken")
        if row["row"] == planned[3] and len(measured) < 5:
            raise KeyboardInterrupt
        return {"step_ms": 1.0, "stall_ms": math.nan}

    def saved() -> dict[str, dict[str, Any]]:
        return {row["row"]: row for row in read_json(tmp_path / "gpu-check.json")["rows"]}

    monkeypatch.setattr(gpu, "measure", measure)
    arguments = gpu.parse_arguments(["--device", "cpu", "--save", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        gpu.run_rows(arguments, tmp_path, math.inf)
    assert list(saved()) == planned[:3]
    assert saved()[planned[1]]["problem"] == "ZeroDivisionError: broken"
    assert (saved()["124M accel_train"]["step_ms"], saved()["124M accel_train"]["stall_ms"]) == (1.0, None)
    measured.clear()
    assert not gpu.run_rows(gpu.parse_arguments(["--device", "cpu", "--save", str(tmp_path), "--only", "loss"]),
                            tmp_path, math.inf)  # fmt: skip
    assert (measured, len(saved())) == (["loss"], 3)
    measured += ["other"] * 5
    assert gpu.run_rows(arguments, tmp_path, math.inf)
    assert [name for name in planned if name not in measured] == [planned[0], planned[2]]
    assert list(saved()) == planned
    of_other_torch = read_json(tmp_path / "gpu-check.json")
    of_other_torch["versions"]["torch"] = "1.0"
    (tmp_path / "gpu-check.json").write_text(json.dumps(of_other_torch))
    assert gpu.saved_record(tmp_path / "gpu-check.json") == {"rows": []}


def test_gpu_compares_each_row_that_was_measured_before() -> None:
    before = [{"row": "a", "step_ms": 80.0, "peak_gib": 12.0}, {"row": "b", "step_ms": 1.0}, {"row": "c"}]
    now = [{"row": "a", "step_ms": 60.0}, {"row": "c", "step_ms": 1.0}, {"row": "b", "problem": "no time left"}]
    [line] = parse_table(gpu.comparison(now, before))
    assert [*line.values()] == ["a", "80.00", "60.00", "0.750", "12.0", "-"]


def test_gpu_leaves_out_what_does_not_fit_into_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(gpu, "measure", lambda *words: given.append(words[-1]) or {})
    arguments = gpu.parse_arguments(["--device", "cpu", "--row-minutes", "2", "--only", "loss", "tests"])
    assert not gpu.run_rows(arguments, tmp_path, time.monotonic() + 3600)
    assert given == [120.0, 120.0]
    assert not gpu.run_rows(arguments, tmp_path, time.monotonic() + 30)
    assert len(given) == 2


def test_gpu_names_the_error_of_a_child_and_not_the_hint_after_it() -> None:
    child = "RuntimeError: python ended with exit code 1:\nTraceback\ntorch.AcceleratorError: no kernel\nCompile with X"
    assert gpu.problem_in(child) == "torch.AcceleratorError: no kernel"
    assert gpu.problem_in("RuntimeError: python\nValueError: old\npython -m a ran past 240 s").endswith("past 240 s")
    assert gpu.problem_in("KeyboardLost: x") == "KeyboardLost: x"


def test_gpu_counts_outcomes_of_tests_also_of_those_that_ran_out_of_time() -> None:
    printed = """collecting ... collected 4 items

tests/gpu/test_gpu.py::test_a[1-no] PASSED                     [ 25%]
tests/gpu/test_gpu.py::test_b FAILED                           [ 50%]
tests/gpu/test_gpu.py::test_c SKIPPED (needs 2 GPUs)           [ 75%]
tests/gpu/test_gpu.py::test_d """
    outcomes, failed = gpu.outcomes_of(printed)
    assert outcomes == {"PASSED": 1, "FAILED": 1, "SKIPPED": 1}
    assert failed == ["FAILED tests/gpu/test_gpu.py::test_b"]


def test_what_a_measured_process_leaves_behind_ends_with_it() -> None:
    code, printed = run_to_end(["sh", "-c", "sleep 600 & echo $!"], environment=os.environ, timeout_seconds=600)
    assert code == 0
    deadline = time.monotonic() + 300
    while psutil.pid_exists(int(printed)) and psutil.Process(int(printed)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)
    assert run_to_end(["sleep", "600"], environment=os.environ, timeout_seconds=0.1)[0] is None


def test_data_prints_every_part(tmp_path: Path) -> None:
    for number in range(20):
        write_file(tmp_path / "corpus" / f"{number}.txt", f"The number {number} is followed by {number + 1}. " * 50)
    sizes = {
        "corpus": str(tmp_path / "corpus"),
        "shard_tokens": 20_001,
        "sequence_length": 64,
        "batches": 4,
        "order_steps": 3,
        "resume_samples": 1000,
        "resume_batches": 20,
        "rounds": 2,
        "encoded_bytes": 200_000,
        "encode_rounds": 1,
        "first_step_gib": [],
        "token_file_bytes": 1_000_000,
    }
    rows, saved = measured("data", tmp_path, "--sizes", json.dumps(sizes))
    parts = {"tokenise", "encode", "first step", "memory", "read", "order", "first batch"}
    assert {row["part"] for row in rows} == parts
    assert {row["what"].rpartition(": ")[2] for row in rows if row["part"] == "encode"} == {"1", str(os.cpu_count())}
    for row in rows:
        assert float(row["median (least to most)"].split(" (")[0].replace(",", "")) > 0
    assert sum(row["bar"] != "-" for row in rows) == 3
    assert len(saved["figures"]) == len(rows)


def test_the_page_on_architecture_has_the_first_sentences_of_its_modules() -> None:
    listed = re.findall(r"^\d+\. `([\w/]+\.py)` \(.*?\): (.+)\.$", step_path.PAGE.read_text(), re.MULTILINE)
    assert len(listed) > 30
    assert {module: told for module, told in listed if told != step_path.first_sentence(module)} == {}


@pytest.mark.slow
def test_the_page_on_architecture_lists_the_modules_that_a_step_enters(tmp_path: Path) -> None:
    found = run_child("benchmarks.step_path", ["--child", str(tmp_path / "run")], timeout_seconds=500).result
    assert {"training/loop.py", "engine/step.py", "optim/update.py", "data/order.py"} <= set(found["entered"])
    page = step_path.PAGE.read_text()
    assert step_path.replaced(page, step_path.listing(found["entered"])) == page, (
        "run python -m benchmarks.step_path --write"
    )


@pytest.mark.slow
def test_golden_finds_no_difference_in_one_revision_and_each_number_that_a_changed_seed_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "FOLDER", tmp_path / "golden")
    only = ["text_ngrams-one"]
    before = golden.Revision.unpack("HEAD", again=False)
    golden.make_records(before, only, jobs=1)
    record = read_json(before.folder / "records" / "text_ngrams-one.json")
    losses = [float.fromhex(row["loss"]) for row in record["metrics"] if row["split"] == "train"]
    assert len(losses) == golden.STEPS
    assert losses[-1] < losses[0]
    assert {record[name]["exit_code"] for name in ("plan", "evaluate", "predict", "verify", "report")} == {0}
    assert len(record["predictions"]) == 200
    assert golden.differences(before, before, only) == []

    after = replace(before, folder=tmp_path / "after")
    shutil.copytree(before.folder / "source", after.folder / "source")
    for part in ("work", "records", "cache", "home"):
        (after.folder / part).mkdir()
    recipe = after.folder / "source" / "recipes" / "text_ngrams.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 0", "seed: 1"))
    golden.make_records(after, only, jobs=1)
    lines = golden.differences(before, after, only)
    changed = {line.split()[2] for line in lines}
    assert changed >= {"metrics.*.loss", "settings.seed", "weights.model/model.safetensors"}
    assert not changed & {"exit_code", "files", "plan.exit_code"}


def test_golden_keeps_every_bit_of_a_float_and_leaves_out_prose_paths_and_times() -> None:
    value = {
        "loss": 0.1,
        "seconds": 1.5,
        "note": "it fell",
        "file": "/a/b",
        "choices": {"precision": "no (cpu: exact)"},
    }
    assert golden.comparable(value) == {
        "loss": (0.1).hex(),
        "note": "...",
        "file": "...",
        "choices": {"precision": "no"},
    }
    assert golden.comparable(0.1) != golden.comparable(float(np.nextafter(0.1, 1)))
    assert dict(golden.flat({"a": [{"b": 1}, {}], "c": None})) == {"a.0.b": 1, "a.1": {}, "c": None}


def test_the_losses_benchmark_compares_one_loss_in_two_ways(tmp_path: Path) -> None:
    sizes = ("--tokens", "48", "--vocabulary", "500", "--width", "8", "--rounds", "2")
    (whole, chunks), saved = measured("loss", tmp_path, *sizes)
    assert (whole["loss"], whole["of whole"], whole["bar of peak"]) == ("whole logits", "100.0%", "-")
    assert chunks["bar of peak"].startswith("<= 10% ")
    assert chunks["bar of time"].startswith("<= 1.1 ")
    one, other = saved["figures"].values()
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert (len(one["seconds"]), len(other["seconds"])) == (2, 2)


@pytest.mark.slow
def test_the_document_masks_benchmark_compares_one_loss_in_two_ways_at_two_lengths(tmp_path: Path) -> None:
    rows, saved = measured("document_mask", tmp_path, "--layers", "1", "--width", "32", "--rounds", "1")
    assert [row["tokens"] for row in rows] == ["1,024", "1,024", "4,096", "4,096"]
    assert rows[3]["bar of growth"].endswith("met")
    figures = list(saved["figures"].values())
    for dense, alone in (figures[:2], figures[2:]):
        assert alone["loss"] == pytest.approx(dense["loss"], rel=1e-6)
        assert alone["peak_bytes"] < dense["peak_bytes"]


@pytest.mark.slow
def test_scaling_counts_what_the_plan_says_for_every_variant(tmp_path: Path) -> None:
    short = ("--most-processes", "2", "--steps", "3", "--warmup", "1")
    rows, saved = measured("scaling", tmp_path, "--only", "measured", *short)
    variants = [("one", "1"), ("ddp", "2"), ("ddp, after", "2"), ("fsdp2", "2")]
    assert [(row["variant"], row["processes"]) for row in rows] == variants
    assert {row["as planned"] for row in rows} == {"yes"}
    assert len(saved["measured"]) == 4


@pytest.mark.slow
def test_optimizers_are_compared_at_the_last_loss_of_adamw(tmp_path: Path) -> None:
    write_lines(tmp_path / "text.txt", *(f"The number {number} is followed by {number + 1}." for number in range(2000)))
    settings = (
        f"--data.train {tmp_path}/text.txt --data.cache_dir {tmp_path}/cache --tokenizer bytes "
        "--data.sequence_length 32 --model.config.n_layer 2 --model.config.n_embd 32 "
        "--batch.global_batch_size 4 --evaluate.max_samples 16"
    )
    sizes = ("--seeds", "1", "--steps", "20", "--every", "5", "--share", "0.5", "--settings", settings)
    (row,), saved = measured("optimizers", tmp_path, *sizes)
    (figures,) = saved["seeds"]
    assert f"{figures['adamw_loss']:.4f}" == row["AdamW's final loss"]
    assert figures["steps"] is None or figures["steps"] in (0.25, 0.5)
    assert (figures["cpu_time"] is None) == (figures["steps"] is None)


# --- the parts -----------------------------------------------------------------------------------------------------


def test_the_reference_model_is_gpt2() -> None:
    """With GPT-2's weights copied in, nanogpt_style gives transformers' loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    preset = PRESETS["micro"]
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(**gpt2_config(preset))).double().eval()
    for parameter in theirs.parameters():  # fresh weights are so small that every activation looks linear
        torch.nn.init.normal_(parameter, std=0.3)
    ours = GPT(GPTShape(preset.vocab, preset.block, preset.layers, preset.heads, preset.width)).double()
    names = {
        "transformer.wte": "tokens",
        "transformer.wpe": "positions",
        "transformer.h": "blocks",
        "transformer.ln_f": "norm",
        "ln_1": "norm_1",
        "ln_2": "norm_2",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.projection",
        "mlp.c_fc": "up",
        "mlp.c_proj": "down",
    }
    state = {}
    for name, value in theirs.state_dict().items():
        transposed = any(part in name for part in ("c_attn", "c_proj", "c_fc")) and value.dim() == 2
        for theirs_part, ours_part in names.items():
            name = name.replace(theirs_part, ours_part)
        state[name.replace("lm_head", "head")] = value.T if transposed else value
    ours.load_state_dict(state)
    tokens = torch.randint(preset.vocab, (3, preset.block + 1))
    logits = theirs(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(ours(tokens[:, :-1], tokens[:, 1:]), expected, rtol=1e-10, atol=0)


def test_the_reference_loop_learns(tmp_path: Path) -> None:
    tokens_path = tmp_path / "tokens.bin"
    write_tokens(tokens_path, num_tokens=20_000, vocab_size=16, seed=0)
    shape = GPTShape(16, 8, 1, 2, 32)
    cpu = torch.device("cpu")
    model = train(
        shape, tokens_path, batch_size=16, num_steps=120, device=cpu, bf16=False, compile=False, learning_rate=1e-2
    )
    batch = random_batch(np.fromfile(tokens_path, np.uint16), 64, 8, cpu)
    assert model(*batch).item() < 0.75 * np.log(16)  # log(16) is what knowing nothing costs


@pytest.mark.parametrize("name, gflops", [("124M", 0.8552), ("350M", 2.4245)])
def test_flops_per_token_are_those_of_the_literature(name: str, gflops: float) -> None:
    assert MODELS[name].flops_per_token == pytest.approx(gflops * 1e9, rel=1e-3)


def test_flops_per_token_count_the_parameters_of_the_model() -> None:
    setup = CHECKS["124M"]
    model = GPT(setup.shape)
    padding = (setup.shape.vocab_size - setup.vocab_size) * setup.shape.width
    parameters = sum(p.numel() for p in model.parameters()) - model.positions.weight.numel() - padding
    attention = 12 * setup.shape.num_layers * setup.shape.width * setup.shape.block_size
    assert setup.flops_per_token == 6 * parameters + attention


@pytest.mark.parametrize("name", ["124M", "llama-1.4B"])
def test_parameters_of_a_benchmarked_model_are_those_of_transformers(name: str) -> None:
    setup = CHECKS[name]
    config = model_config(replace(setup, shape=replace(setup.shape, vocab_size=setup.vocab_size)))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    positions = setup.shape.block_size * setup.shape.width if setup.llama is None else 0
    assert setup.num_parameters == model.num_parameters() - positions


def test_gpu_bars_are_judged_on_the_compiled_run() -> None:
    def row(variant: str, compiled: bool, rate: float, mfu: float) -> dict[str, Any]:
        figures = {"tokens_per_second": rate, "mfu": mfu}
        name = f"124M {variant}{'' if compiled else ' eager'}"
        return {"row": name, "model": "124M", "setting": "bf16", "variant": variant, "compile": compiled, **figures}

    rows = [
        row("accel_train", True, 400.0, 0.41),
        row("hf_trainer", True, 300.0, 0.30),
        row("accel_train", False, 200.0, 0.20),
        row("nanogpt", True, 390.0, 0.40),
        {"model": "124M", "variant": "hf_trainer", "compile": False, "problem": "no time left"},
    ]
    assert bars(rows) == [
        "- 124M: MFU of accel_train, compiled: 0.410, bar 0.4 met",
        "- 124M: accel_train / nanogpt, both compiled: 1.026, bar 1.05 MISSED",
        "- 124M: accel_train / hf_trainer, both compiled: 1.333, bar 1.5 MISSED",
        "- 124M: accel_train compiled / not: 2.000, bar 1.3 met",
    ]


def test_gpu_idle_counts_overlapping_kernels_once() -> None:
    def event(category: str, start: float, duration: float) -> dict[str, Any]:
        return {"cat": category, "name": category, "ts": start, "dur": duration}

    events = [
        event("kernel", 0, 10),
        event("kernel", 5, 10),  # runs beside the first: busy until 15
        event("gpu_memcpy", 35, 5),  # idle from 15 to 35
        event("gpu_user_annotation", 0, 40),  # a label, not work
        {"cat": "cuda_runtime", "ts": 0, "dur": 40},
    ]
    longest = {"kernel": 0.007, "gpu_memcpy": 0.002}  # ms a step, of us
    assert gpu_idle(events, num_steps=3) == {"gpu_idle": 0.5, "kernels_per_step": 1.0, "longest_kernels_ms": longest}


def test_the_line_that_made_the_host_wait_is_found_behind_other_errors() -> None:
    def wait() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    def step() -> None:
        try:
            wait()
        except RuntimeError as error:
            raise ValueError("the step failed") from error

    with pytest.raises(ValueError, match="the step failed") as raised:
        step()
    line = synchronizing_line(raised.value)
    assert line is not None
    assert line.startswith("docs/test_benchmarks.py:")
    assert synchronizing_line(ValueError("another error")) is None


def test_host_reads_are_counted_with_their_line_between_the_given_steps() -> None:
    from torch.optim import optimizer as optimizer_module

    hooks = dict(optimizer_module._global_optimizer_post_hooks)
    reads = count_host_reads(first_step=1, num_steps=2)
    try:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight], fused=True)
        for _ in range(5):
            weight.grad = torch.ones(2)
            optimizer.step()
            weight.sum().item()
    finally:
        optimizer_module._global_optimizer_post_hooks.clear()
        optimizer_module._global_optimizer_post_hooks.update(hooks)
    assert isinstance(reads, Counter)
    (place,) = reads
    assert place.endswith("weight.sum().item()")
    assert reads[place] == 2


def test_the_clock_leaves_out_the_warm_up_and_the_median_leaves_out_a_slow_step() -> None:
    clock = FetchClock()
    clock.wall_ns = [0, 90_000, 91_000, 92_000, 93_000, 99_000]
    clock.cpu_ns = [0, 45_000, 45_500, 46_000, 46_500, 49_500]
    stamps = clock.stamps(warmup_steps=1, num_steps=6)
    assert step_times(stamps, (0, 10**9)) == {
        **{"num_steps": 4.0, "wall_us": 1.0, "wall_us_mean": 2.25},
        **{"cpu_us": 0.5, "cpu_us_mean": 1.125, "cpu_us_quick": 0.5},
    }


def test_processes_are_compared_over_the_time_in_which_all_of_them_trained() -> None:
    early = {"wall_ns": [0, 1000, 2000, 3000, 4000], "cpu_ns": [0, 500, 900, 1500, 2900]}
    late = {"wall_ns": [1500, 2500, 3500, 9000], "cpu_ns": [0, 700, 1500, 1600]}
    between = common_time([early, late])
    assert between == (1500, 4000)
    assert step_times(early, between)["num_steps"] == 2
    assert step_times(early, between)["cpu_us_mean"] == pytest.approx(1.0)
    assert step_times(late, between)["cpu_us"] == pytest.approx(0.75)


def test_children_in_turns_compute_one_at_a_time_and_a_failed_one_is_told_of(tmp_path: Path) -> None:
    busy = (
        "import time, json, pathlib, sys; began = time.monotonic(); log = []\n"
        "while time.process_time() < 1.2: log.append(time.monotonic())\n"
        "from benchmarks.common import print_result; print_result({'first': log[0], 'last': log[-1], 'seen': "
        "log[::2000]})"
    )
    (tmp_path / "busy.py").write_text(busy)
    environment = {**child_environment(1), "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    one, two = run_children_in_turns("busy", [[], []], environment=environment, timeout_seconds=120)
    assert one.result["first"] < two.result["last"]
    assert two.result["first"] < one.result["last"]  # both were there at the same time ...
    turns = sorted([(at, 1) for at in one.result["seen"]] + [(at, 2) for at in two.result["seen"]])
    changes = sum(before[1] != after[1] for before, after in pairwise(turns))
    assert changes < len(turns) / 10  # ... and took turns, where two that run freely alternate all the time
    (tmp_path / "fails.py").write_text("raise SystemExit('out of ink')")
    with pytest.raises(RuntimeError, match="out of ink"):
        run_children_in_turns("fails", [[]], environment=environment, timeout_seconds=120)


def test_bars_are_judged_by_ratio_or_by_microseconds() -> None:
    assert bar_verdict(PRESETS["tiny"], "accel_train", 0.999, 5000.0) == "<= 1.00 met"
    assert bar_verdict(PRESETS["tiny"], "accel_train", 1.001, 1.0) == "<= 1.00 MISSED"
    assert bar_verdict(PRESETS["micro"], "accel_train", 1.5, 59.0) == "<= +60 us met"
    assert bar_verdict(PRESETS["micro"], "accel_train", 1.001, 61.0) == "<= +60 us MISSED"
    assert bar_verdict(PRESETS["micro"], "accelerate", 9.0, 999.0) == "-"


def test_the_cosine_of_the_references_warms_up_from_zero_and_ends_at_zero() -> None:
    curve = [cosine_multiplier(step, num_steps=20, warmup_steps=4) for step in range(21)]
    assert curve[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert curve[12] == pytest.approx(0.5)
    assert curve[20] == pytest.approx(0.0)


def test_muon_is_measured_at_its_first_evaluation_that_is_no_higher_than_the_last_of_adamw() -> None:
    adamw = Trained(1, {40: 2.5}, {40: 4.0}, 0.02)
    muon = Trained(1, {10: 2.6, 20: 2.5, 22: 2.4}, {10: 1.5, 20: 3.2, 22: 3.3}, 0.024)
    found = compare(adamw, muon)
    assert (found.adamw_loss, found.muon_loss, found.steps, found.time) == (2.5, 2.4, 0.5, 0.8)
    assert found.cpu_seconds_a_step == pytest.approx(1.2)
    assert found.cpu_time == pytest.approx(0.6)  # half of the steps
    late = compare(adamw, Trained(1, {22: 2.6}, {22: 3.3}, 0.024))
    assert (late.steps, late.time, late.cpu_time) == (None, None, None)
    assert shares_verdict([0.5, 0.53, 0.6], 0.55) == "53.0% (50.0% to 60.0%), bar 55% met"
    assert shares_verdict([0.5, 0.56, None], 0.55) == "53.0% (50.0% to 56.0%), bar 55% MISSED"
    assert shares_verdict([0.5, None], 0.55) == "not reached, bar 55% MISSED"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "blocks", "turns", "timed"),
    # Turns: those of 6 blocks without the last and the first.
    [("guard", "6", 4, ["with the guard us"]), ("paired", "8", 4, ["hand-written us", "accel_train us"])],
)
def test_a_benchmark_in_turns_times_each_variant(module: str, blocks: str, turns: int, timed: list[str]) -> None:
    (row,) = parse_table(run(module, "--preset", "micro", "--blocks", blocks))
    assert row["preset"] == "micro"
    assert int(row["turns"]) >= turns
    assert all(float(row[name]) > 0 for name in timed)
    assert row.get("bar", "<= 0.3%").startswith("<= 0.3%")


@pytest.mark.slow
def test_the_start_up_benchmark_times_a_bare_script_a_start_and_a_resume_and_names_what_is_imported(
    tmp_path: Path,
) -> None:
    printed = run("startup", "--rounds", "1", "--layers", "1", "--save", str(tmp_path))
    stages, packages = printed.split("Imports of")
    ends = [row for row in parse_table(stages) if row["stage"] == "two steps"]
    assert [row["start"] for row in ends] == ["bare script", "accel-train run", "accel-train run, resumed"]
    assert "torch" in {row["package"] for row in parse_table(packages)}
    for rounds in read_json(tmp_path / "startup.json")["rounds"].values():
        seconds = list(rounds[0].values())
        assert seconds == sorted(seconds), "stages come one after the other"


@pytest.mark.slow
def test_the_start_up_benchmark_times_both_trainers() -> None:
    rows = parse_table(run("startup", "--trainer", "--rounds", "1"))
    assert [row["call"] for row in rows] == ["first", "imports too", "second"]
    assert all(float(row[name]) > 0 for row in rows for name in ("transformers.Trainer", "accel_train.Trainer"))


def test_the_shapes_of_published_models_have_their_published_parameters() -> None:
    sizes = {series.name: series.shape.weights().numel for series in SERIES}
    assert {name: sizes[name] for name in NUM_PARAMETERS} == NUM_PARAMETERS
    assert sizes["Llama 3.1 8B, eager"] == 8_030_261_248


def test_the_model_of_a_step_is_within_10_percent_of_what_was_published_for_up_to_128_gpus() -> None:
    rows = check_rows()
    outlier = [row for row in rows if row.series.remark.startswith("the row of 32 GPUs") and row.num_gpus == 32]
    assert len(outlier) == 1
    errors = [row.error for row in rows if row is not outlier[0]]
    assert len(errors) == 40
    assert max(map(abs, errors)) < 0.1
    assert sum(abs(error) < 1e-6 for error in errors) == len(SERIES)  # the rows that were taken for computing
    assert {row.num_gpus for row in rows} == {8, 16, 32, 64, 128}


def test_more_gpus_never_make_a_simulated_run_more_efficient() -> None:
    rows = simulate()
    assert max(row.layout.world_size for row in rows) == 1024
    for name in {row.name for row in rows}:
        efficiencies = [row.step.efficiency for row in rows if row.name == name]
        assert efficiencies == sorted(efficiencies, reverse=True)
        assert 0.5 < efficiencies[-1] < 1
