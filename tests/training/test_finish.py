"""What a run publishes at its end, and what it refuses to: weights that are no numbers, scores of other samples."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM

from accel_train import fit, train
from accel_train.inference.evaluate import measure
from accel_train.inference.export import export_run
from accel_train.inference.finished_run import open_run
from accel_train.model.weights import in_bf16
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.schema import Recipe
from accel_train.task import TaskData
from accel_train.training.train import RunResult
from tests.support.comparisons import assert_same_bits, tensors
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.report import Page
from tests.support.runs import (
    LLAMA,
    Capture,
    Settings,
    events,
    model_of,
    run,
    summary_of,
    write_base,
    write_recipe_file,
)
from tests.support.tasks.probe import RANK, ProbeTask
from tests.support.wording import assert_golden


class PoisonTask(ProbeTask):
    """`options.poison` in an evaluation: `loss`, or `weight`: one element of a weight on the last process."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        self.rank = recipe.options.get("rank", 0)
        return super().load_data(recipe, progress=progress)

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        counts = super().evaluate_batch(model, batch)
        if self.options["poison"] == "loss":
            counts["loss_sum"] = counts["loss_sum"] * torch.nan
        elif self.rank == RANK:
            for each in model.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()  # else what is changed is a gathered copy
            weight = dict(model.named_parameters())["transformer.h.0.ln_1.weight"].detach()
            getattr(weight, "to_local", lambda: weight)()[0] = torch.nan
        return counts


@pytest.mark.parametrize(
    ("poison", "processes", "strategy"), [("loss", 1, "ddp"), ("weight", 1, "ddp"), ("weight", 2, "fsdp2")]
)
def test_a_model_that_is_not_finite_is_not_published(corpus: Path, poison: str, processes: int, strategy: str) -> None:
    recipe = write_recipe_file(
        corpus,
        task="tests.training.test_finish:PoisonTask",
        schedule={"max_steps": 2},
        optimizer={"learning_rate": 3e-3, "ema_decay": 0.9},
        parallel={"strategy": strategy},
        options={"poison": poison, "rank": processes - 1},
    )
    forked = run_forked(["run", str(recipe)], processes, folder=corpus / "processes")
    forked.expect(3)
    [line] = [line for line in forked.stderr(0).splitlines() if line.startswith("error: ")]
    assert_golden(line)
    assert not (corpus / "run" / "model").exists()
    assert not (corpus / "run" / "summary.json").exists()
    assert events(corpus / "run", "stop")[0]["step"] == 2


@pytest.mark.parametrize(("processes", "strategy"), [(1, "ddp"), slow(2, "fsdp2")])
def test_a_model_in_bf16_is_the_rounded_last_checkpoint_and_is_evaluated_and_exported(
    corpus: Path, processes: int, strategy: str
) -> None:
    sections = {"checkpoint": {"model_dtype": "bf16"}, "parallel": {"strategy": strategy}}
    recipe = write_recipe_file(corpus, task="causal-lm", model={"config": {**LLAMA, "vocab_size": 320}}, **sections)
    run(recipe, processes=processes)
    folder = corpus / "run"
    found, trained = model_of(folder), tensors(folder, 12, "model")
    assert_same_bits(found, {name: each.bfloat16() for name, each in trained.items()})
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert json.loads((folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {each.dtype for each in loaded.parameters()} == {torch.bfloat16}
    loss = json.loads((folder / "evaluation.json").read_text())["metrics"]["loss"]
    assert measure(open_run(folder)).metrics["loss"] == pytest.approx(loss, rel=1e-3)
    assert_same_bits(load_file(export_run(folder).folder / "model.safetensors"), found)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_adapters_are_merged_in_fp32_before_the_model_is_rounded(corpus: Path, precision: str) -> None:
    base = write_base(corpus, {**LLAMA, "tie_word_embeddings": False})
    model = {"config": None, "pretrained": str(base), "lora": {"rank": 4}, "frozen_dtype": "auto"}
    if precision == "bf16":
        model["frozen_dtype"] = "bf16"
    recipe = write_recipe_file(
        corpus,
        task="causal-lm",
        model=model,
        precision={"mixed_precision": precision},
        parallel={"strategy": "fsdp2"},
        optimizer={"learning_rate": 0.02},
        checkpoint={"model_dtype": "bf16"},
        evaluate={"sample_prompt": "step", "sample_tokens": 4},
    )
    run(recipe, processes=2)
    assert summary_of(corpus / "run")["sample"]["text"].startswith("step")
    adapters = load_file(corpus / "run" / "adapter" / "adapter_model.safetensors")
    expected = load_file(base / "model.safetensors")
    for name, down in adapters.items():
        if "lora_A" in name:
            where = name.removeprefix("base_model.model.").replace("lora_A.", "")
            kept = expected[where].bfloat16().float() if precision == "bf16" else expected[where]
            # `alpha` / `rank` = 16 / 4.
            expected[where] = kept + 4 * adapters[name.replace("lora_A", "lora_B")] @ down
    found = model_of(corpus / "run")
    assert_same_bits(found, {name: each.bfloat16() for name, each in expected.items()})


def test_a_model_in_bf16_is_the_rounded_best_checkpoint(corpus: Path) -> None:
    recipe = write_recipe_file(
        corpus,
        schedule={"max_steps": 4},
        evaluate={"every_steps": 2},
        optimizer={"learning_rate": 100.0},
        checkpoint={"load_best_model_at_end": True, "model_dtype": "bf16"},
    )
    assert train(load_recipe(recipe)).summary["best_step"] == 2
    found, best, last = (
        model_of(corpus / "run"),
        *(tensors(corpus / "run", step, "model") for step in (2, 4)),
    )
    assert_same_bits(found, {name: each.bfloat16() for name, each in best.items()})
    assert any(not torch.equal(found[name], each.bfloat16()) for name, each in last.items())


@pytest.mark.slow
def test_unmerged_adapters_leave_the_rounded_base_and_are_exported_in_bf16(corpus: Path) -> None:
    base = write_base(corpus, {**LLAMA, "tie_word_embeddings": False})
    recipe = write_recipe_file(
        corpus,
        task="causal-lm",
        model={"config": None, "pretrained": str(base), "lora": {"rank": 4, "merge": False}},
        checkpoint={"model_dtype": "bf16"},
    )
    run(recipe)
    before = load_file(base / "model.safetensors")
    rounded = {name: each.bfloat16() for name, each in before.items()}
    assert_same_bits(model_of(corpus / "run"), rounded)
    exported = load_file(export_run(corpus / "run").folder / "model.safetensors")
    assert {each.dtype for each in exported.values()} == {torch.bfloat16}
    assert not torch.equal(exported["model.layers.0.mlp.up_proj.weight"], rounded["model.layers.0.mlp.up_proj.weight"])


def test_a_model_in_bf16_keeps_running_statistics_and_what_transformers_keeps_in_fp32() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model._keep_in_fp32_modules_strict = {"1.bias"}  # type: ignore[assignment]
    found = {name: each.dtype for name, each in in_bf16(model).state_dict().items()}
    assert {name for name, dtype in found.items() if dtype == torch.bfloat16} == {"0.weight", "0.bias", "1.weight"}
    assert found["1.running_mean"] == found["1.bias"] == torch.float32
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_run_that_is_stopped_before_its_first_checkpoint_says_that_there_is_none(corpus: Path) -> None:
    sections: Settings = {"options": {"nan_from": 1}, "guard": {"on_nonfinite": "stop"}}
    done = run(write_recipe_file(corpus, **sections), expect=3)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert_golden(line)


def test_a_model_that_loses_to_its_baseline_says_so_with_what_to_try(corpus: Path) -> None:
    done = run(write_recipe_file(corpus, schedule={"max_steps": 2}))
    lines = done.stdout.splitlines()
    place = next(number for number, line in enumerate(lines) if "Likely causes" in line)
    # The last evaluation was the best one: too few steps come first.
    assert_golden(re.sub(r"\d+\.\d+", "#", "\n".join(lines[place : place + 4])))
    page = Page((corpus / "run" / "report.html").read_text()).text
    assert lines[place] in page
    assert all(line.removeprefix("  - ") in page for line in lines[place + 1 : place + 4])


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and time of the last change of each file but the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_finished_run_that_is_started_again_says_so_and_how_to_use_it_and_changes_no_file(
    corpus: Path, processes: int
) -> None:
    sections: Settings = {
        "schedule": {"max_steps": 4},
        "evaluate": {"every_steps": 2},
        "optimizer": {"ema_decay": 0.9},
        "parallel": {"strategy": "fsdp2" if processes == 2 else "ddp"},
    }
    recipe = write_recipe_file(corpus, **sections)
    run(recipe, processes=processes)
    before = files_of(corpus / "run")
    again = run(recipe, processes=processes)
    assert files_of(corpus / "run") == before
    [_, line, use, *_] = again.stdout.splitlines()
    assert use == "Use it:"
    assert_golden(re.sub(r"\d+\.\d+", "#", line))
    answer = run(recipe, "--json", processes=processes)
    summary = summary_of(corpus / "run")
    assert json.loads(answer.stdout)["result"]["summary"] == summary
    assert files_of(corpus / "run") == before


def test_a_finished_run_whose_settings_changed_or_whose_model_is_gone_is_finished_again(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, schedule={"max_steps": 2})
    run(recipe)
    for change in ("evaluate.max_samples", "model"):
        if change == "model":
            shutil.rmtree(corpus / "run" / "model")
        again = run(recipe, *(("--evaluate.max_samples", "3") if change != "model" else ()))
        assert "finished at step" not in again.stdout
        assert (corpus / "run" / "model").is_dir()


def test_fit_returns_the_weights_of_a_run_that_has_finished_and_changes_no_file(tmp_path: Path) -> None:
    torch.manual_seed(5)  # the last step is best
    data = TensorDataset(torch.randn(16, 3), torch.randn(16))

    def train() -> tuple[RunResult, nn.Module]:
        torch.manual_seed(0)
        module = nn.Linear(3, 1)
        folder = tmp_path / "run"
        sections: Settings = {"checkpoint": {"load_best_model_at_end": True, "keep": 9}}
        return fit(
            module, data, loss=squares, output_dir=folder, eval_data=data, max_steps=8, batch_size=8, **sections
        ), module

    first, module = train()
    before = files_of(tmp_path / "run")
    again, other = train()
    assert files_of(tmp_path / "run") == before
    assert again.metrics == first.metrics
    assert all(weight.equal(other.state_dict()[name]) for name, weight in module.state_dict().items())


def squares(module: nn.Module, batch: Any) -> Tensor:
    return (module(batch[0])[:, 0] - batch[1]).square()


def test_a_run_that_was_killed_while_it_was_finished_with_another_recipe_is_not_taken_for_finished(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    sections: Settings = {"schedule": {"max_steps": 4}, "evaluate": {"every_steps": 2}}
    recipe = write_recipe_file(corpus, **sections, optimizer={"learning_rate": 100.0})
    best = ["--checkpoint.load_best_model_at_end", "true"]
    train(load_recipe(recipe))
    last = model_of(corpus / "run")

    class Killed(Exception):
        pass

    def killed(_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("accel_train.training.train.finish_run", killed)
        with pytest.raises(Killed):
            train(load_recipe(recipe, arguments=best))
    summary = train(load_recipe(recipe, arguments=best)).summary
    assert summary["best_step"] == 2, "else the weights of the last step are right"
    model = model_of(corpus / "run")
    assert any(not torch.equal(model[name], last[name]) for name in model)
    capsys.readouterr()
    train(load_recipe(recipe, arguments=[*best, "--checkpoint.resume", "unchanged"]))
    assert "finished at step 4" in capsys.readouterr().out


def test_a_finished_run_writes_the_report_that_a_kill_has_cost(corpus: Path) -> None:
    recipe = load_recipe(write_recipe_file(corpus, schedule={"max_steps": 2}))
    train(recipe)
    report = corpus / "run" / "report.html"
    report.unlink()
    train(recipe)
    written = report.stat().st_mtime_ns
    train(recipe)
    assert report.stat().st_mtime_ns == written
    os.utime(report, (1, 1))  # of a shorter run before
    train(recipe)
    assert report.stat().st_mtime_ns > written


def test_a_finished_run_whose_best_checkpoint_is_damaged_says_where_the_best_weights_are(
    corpus: Path, capsys: Capture
) -> None:
    settings: Settings = {
        "schedule": {"max_steps": 4},
        "evaluate": {"every_steps": 2},
        "optimizer": {"learning_rate": 100.0},
        "checkpoint": {"load_best_model_at_end": True},
    }
    recipe = load_recipe(write_recipe_file(corpus, **settings))
    assert train(recipe).summary["best_step"] == 2
    model = corpus / "run" / "model" / "model.safetensors"
    best = model.read_bytes()
    (corpus / "run" / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"damaged")
    capsys.readouterr()
    train(recipe)
    assert_golden(re.sub(r"loss [^)]+", "loss #", capsys.readouterr().out.splitlines()[0]))
    assert model.read_bytes() == best
