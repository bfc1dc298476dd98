"""Faults that were found in the guard, the choice of the best weights, batch norm, and what a run says of its data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from accel_train import Trainer
from accel_train.cli.main import main
from accel_train.core.errors import DataError
from tests.support.runs import SCENES, losses, metrics, run_forked_command


def test_bugs_02_a_trainer_whose_labels_are_all_ignored_changes_no_bit_and_ends(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = [{"input_ids": torch.arange(8) + 2, "labels": torch.full((8,), -100)} for _ in range(10)]
    settings: dict[str, Any] = {"max_steps": 20, "learning_rate": 0.01, "weight_decay": 0.1, "logging_steps": 1}
    args = TrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=2, report_to="none", use_cpu=True, **settings
    )
    with pytest.raises(DataError):
        Trainer(model, args, train_dataset=rows).train()
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    lines = metrics(tmp_path / "run")
    assert lines
    assert all(line["skipped"] and line["loss"] == "NaN" and line["num_targets"] == 0 for line in lines)


def test_bugs_02_one_ignored_batch_of_a_trainer_changes_no_bit_and_counts_in_no_mean(tmp_path: Path) -> None:
    """The second step reads rows 2 and 3, whose labels are ignored."""
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip

    ids = [(torch.arange(8) * (row + 3)) % 30 + 2 for row in range(6)]
    rows = [
        {"input_ids": each, "labels": torch.full((8,), -100) if row in (2, 3) else each} for row, each in enumerate(ids)
    ]
    weights, means = [], []
    for steps in (1, 2, 3):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        settings: dict[str, Any] = {"max_steps": steps, "learning_rate": 0.01, "weight_decay": 0.1, "logging_steps": 1}
        args = TrainingArguments(
            str(tmp_path / str(steps)), per_device_train_batch_size=2, report_to="none", use_cpu=True,
            lr_scheduler_type="constant", save_strategy="no", train_sampling_strategy="sequential", **settings,
        )  # fmt: skip
        means.append(Trainer(model, args, train_dataset=rows).train().training_loss)
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert not all(weights[1][name].equal(weights[2][name]) for name in weights[0])
    assert means[1] == means[0] > 1


def test_bugs_02_masks_that_are_all_ignored_end_a_run_with_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for number in range(8):
        image = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(image).save(f"data/images/{number}.png")
        Image.fromarray(np.full((32, 32), 255, np.uint8)).save(f"data/masks/{number}.png")
    data = {"train": "data", "eval_fraction": 0, "image_size": 32, "label_names": ["a", "b"], "num_workers": 0}
    recipe = {
        **SCENES,
        "output_dir": "run",
        "data": data,
        "batch": {"global_batch_size": 4},
        "schedule": {"max_steps": 12},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "recipe.yaml"]) == 2
    assert not Path("run/model").exists()


def test_new_01_of_equal_accuracies_the_weights_with_the_lowest_held_out_loss_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ("customer wants a refund for order", "customer wants help with login")
    rows = [f"ticket {number}: {texts[number % 2]} {number * 37 % 9973},{'ba'[number % 2]}" for number in range(300)]
    Path("easy.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    recipe = {
        "task": "text-classification", "output_dir": "run", "model": {"config": {"model_type": "ngrams"}}, "tokenizer": "bytes",
        "data": {"train": "easy.csv", "eval_fraction": 0.2, "max_length": 32, "num_workers": 0, "cache_dir": "cache"},
        "batch": {"global_batch_size": 16}, "optimizer": {"learning_rate": 0.02}, "schedule": {"max_steps": 60},
        "evaluate": {"every_steps": 10, "metric_for_best_model": "accuracy"}, "log": {"progress": False},
        "checkpoint": {"load_best_model_at_end": True, "every_steps": 0},
    }  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "recipe.yaml"]) == 0
    lines = metrics(Path("run"), "eval")
    assert sum(line["accuracy"] == 1.0 for line in lines) >= 3, "no tie, so nothing is tested"
    lowest = min((line for line in lines if line["accuracy"] == 1.0), key=lambda line: line["loss"])
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["best_step"] == lowest["step"] > lines[0]["step"]
    assert summary["eval"]["loss"] == pytest.approx(lowest["loss"])
    assert "overfitting" not in capsys.readouterr().out


FIT_WITH_BATCH_NORM = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from accel_train import fit

torch.manual_seed(0)
features = torch.randn(36, 3)
# A bias before a batch norm has a gradient of 0, and Adam makes steps of its rounding.
module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))
fit(
    module, TensorDataset(features, features.sum(1)), output_dir=sys.argv[1], max_steps=4, batch_size=8,
    loss=lambda module, batch: (module(batch[0])[:, 0] - batch[1]).square(), learning_rate=0.01,
    log={"every_steps": 1}, parallel={"sync_batch_norm": sys.argv[2] == "synced"},
    data={"train": "custom", "last_batch": sys.argv[3]}, batch={"per_device_batch_size": int(sys.argv[4])},
)
"""


@pytest.mark.parametrize("norm", ["own", "synced"])
def test_bugs_07_batch_norm_is_the_same_on_2_processes_where_it_is_synced_and_said_to_differ_elsewhere(
    tmp_path: Path, norm: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(FIT_WITH_BATCH_NORM)
    said = []
    for processes in (1, 2):
        words = [str(tmp_path / f"run-{processes}"), norm if processes == 2 else "own", "carry", str(8 // processes)]
        done = run_forked_command(words, processes, program)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    alone, together = (load_file(tmp_path / f"run-{number}" / "model" / "model.safetensors") for number in (1, 2))
    assert alone.keys() == together.keys()
    gap = max(float((alone[name].double() - together[name].double()).abs().max()) for name in alone)
    apart = max(abs(losses(tmp_path / "run-1")[step] - losses(tmp_path / "run-2")[step]) for step in (1, 2, 3, 4))
    assert (gap < 2e-6 and apart < 1e-5) == (norm == "synced"), (gap, apart)
    assert "take statistics of" not in said[0]
    assert ("take statistics of 4 samples" in said[1] and "parallel.sync_batch_norm" in said[1]) == (norm == "own")


def test_bugs_07_a_last_batch_of_one_sample_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Of 36 samples in steps of 7, the last step of an epoch has one."""
    program = tmp_path / "program.py"
    program.write_text(
        FIT_WITH_BATCH_NORM.replace("batch_size=8", "batch_size=7").replace("max_steps=4", "max_steps=6")
    )
    dropped = run_forked_command([str(tmp_path / "drop"), "own", "drop", "7"], 1, program)
    assert dropped.returncode == 0, dropped.stderr
    short = run_forked_command([str(tmp_path / "short"), "own", "short", "7"], 1, program)
    assert short.returncode != 0
    assert "data.last_batch" in short.stderr
    assert not (tmp_path / "short" / "metrics.jsonl").exists() or not losses(tmp_path / "short")
