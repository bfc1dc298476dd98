"""Defects of transformers' Trainer (5.23), each run on both: theirs still has it, ours does not."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.trainer_utils import get_last_checkpoint as their_last_checkpoint

from accel_train.hf import get_last_checkpoint
from tests.support.hf_models import (
    KINDS,
    Plain,
    bert,
    both,
    difference,
    every,
    history,
    made,
    pad,
    plain_rows,
    rows,
    token_bert,
    token_rows,
    trained,
    trained_plain,
    vit,
)
from tests.support.runs import events


def test_a_nan_batch_leaves_the_weights_alone_and_is_seen_in_the_log(tmp_path: Path) -> None:
    """transformers: every weight NaN, every later log `loss: 0`, no error."""
    data = plain_rows(80)
    data[20]["features"] = data[20]["features"] * math.nan
    args = {"num_train_epochs": 1, "logging_steps": 1, "train_sampling_strategy": "sequential"}
    theirs, ours, _, found = both(tmp_path, Plain, train_dataset=data, args=args)
    assert all(torch.isnan(parameter).all() for parameter in theirs.model.parameters())
    assert [line["loss"] for line in history(theirs) if "loss" in line][3:] == [0.0] * 7

    assert all(torch.isfinite(parameter).all() for parameter in ours.model.parameters())
    losses = [line["loss"] for line in history(ours) if "loss" in line]
    assert [number for number, loss in enumerate(losses, start=1) if math.isnan(loss)] == [3]
    assert history(ours)[2]["skipped_steps"] == 1
    assert found.metrics["train_skipped_steps"] == 1
    assert math.isfinite(found.training_loss)
    assert [event["step"] for event in events(tmp_path / "ours", "skip")] == [3]


def test_the_evaluation_loss_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    """transformers (issue 39241): the mean of batch means, so a batch of few tokens weighs as much as one of many."""
    setup = {"data_collator": pad, "eval_dataset": token_rows(16)}
    theirs, ours = (
        [
            made(tmp_path, token_bert(), kind=kind, per_device_eval_batch_size=size, **setup).evaluate()["eval_loss"]
            for size in (1, 5, 16)
        ]
        for kind in KINDS
    )
    assert max(theirs) - min(theirs) > 1e-3
    assert max(ours) - min(ours) < 1e-6


def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """transformers: get_last_checkpoint returns the folder with the highest number, whatever is in it."""
    args = {**every(2, "save"), "max_steps": 6}
    _, ours, *_ = both(tmp_path, train_dataset=rows(45), **args)
    for folder in (tmp_path / "theirs" / "checkpoint-99", tmp_path / "ours" / "checkpoints" / "step-00000099"):
        folder.mkdir()
        (folder / "checkpoint-is-incomplete.txt").touch()
    assert their_last_checkpoint(str(tmp_path / "theirs")) == str(tmp_path / "theirs" / "checkpoint-99")

    newest = tmp_path / "ours" / "checkpoints" / "step-00000006"
    assert get_last_checkpoint(tmp_path / "ours") == str(newest)
    (newest / "model.safetensors").write_bytes(b"cut short")
    assert get_last_checkpoint(tmp_path / "ours") == str(tmp_path / "ours" / "checkpoints" / "step-00000004")
    again = trained(tmp_path / "ours", bert(), rows(45), True, **args)
    assert again.state.global_step == 6
    assert difference(again.model, ours.model) == 0


def test_an_out_of_memory_error_never_changes_the_global_batch(tmp_path: Path) -> None:
    """transformers' auto_find_batch_size: 8 samples a step become 7 and 10 steps 12, with the same learning rate."""

    class Tight(Plain):
        def forward(self, features: Any, labels: Any = None) -> Any:
            if len(features) > 7:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(features, labels)

    args = {"num_train_epochs": 1, "auto_find_batch_size": True}
    theirs, ours, *_ = both(tmp_path, Tight, train_dataset=plain_rows(80), **args)
    assert (theirs.state.global_step, ours.state.global_step) == (12, 10)
    whole = trained_plain(tmp_path / "whole", 80, num_train_epochs=1)
    assert difference(ours.model, whole.model) < 1e-6


def test_accumulation_changes_neither_the_loss_nor_the_gradient(tmp_path: Path) -> None:
    """transformers (issue 37766): a model that takes **kwargs and ignores num_items_in_batch has both doubled (BERT
    does).
    """
    args = {"max_steps": 1, "logging_steps": 1, "train_sampling_strategy": "sequential"}
    norms = [[], []]
    for accumulation in (1, 2, 4):
        args |= {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
        for each, trainer in zip(norms, both(tmp_path, train_dataset=rows(16), **args)[:2], strict=True):
            each.append(history(trainer)[0]["grad_norm"])
    theirs, ours = norms
    assert theirs == pytest.approx([theirs[0], 2 * theirs[0], 4 * theirs[0]], rel=1e-3)
    assert ours == pytest.approx([theirs[0]] * 3, rel=1e-4)


def test_a_nan_evaluation_loss_is_reported(tmp_path: Path) -> None:
    """transformers 5.23: logging_nan_inf_filter leaves such batches out of eval_loss; some versions before did not."""
    data = plain_rows(16)
    data[3]["features"] = data[3]["features"] * math.nan
    *_, expected, found = both(tmp_path, Plain, eval_dataset=data, act=lambda trainer: trainer.evaluate()["eval_loss"])
    assert math.isfinite(expected) or transformers.__version__ < "5.23"
    assert math.isnan(found)


def test_the_best_weights_are_loaded_also_where_a_model_is_saved_under_other_names(tmp_path: Path) -> None:
    """transformers 5.23: of a ViT only embeddings and head come back from checkpoints, with a warning; its layers stay
    as they are.
    """

    pixels = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    data = [{"pixel_values": image, "labels": 0} for image in pixels]
    worse = [{**row, "labels": 1} for row in data]  # so that the first evaluation is the best
    args = {"max_steps": 4, "learning_rate": 0.1, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    args |= every(2, "eval", "save")
    theirs, ours, *_ = both(tmp_path, vit, train_dataset=data, eval_dataset=worse, **args)
    assert ours.state.best_global_step == theirs.state.best_global_step == 2
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, abs=1e-6)
    renamed = "vit.layers.0.mlp.fc1.weight" not in load_file(tmp_path / "theirs" / "checkpoint-2" / "model.safetensors")
    assert (abs(theirs.evaluate()["eval_loss"] - theirs.state.best_metric) > 1e-3) == renamed
