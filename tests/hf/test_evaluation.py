"""evaluate and predict give what they give in transformers, every sample once, in order."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import EvalPrediction

from accel_train.hf import Trainer
from tests.support.hf_models import (
    CLOSE,
    Plain,
    accuracy,
    bert,
    both,
    made,
    pad,
    plain_rows,
    refused,
    rows,
    same_log,
    token_bert,
    token_rows,
    trained_plain,
)


def test_full_evaluations_in_bf16_and_metrics_of_memory_are_those_of_transformers(tmp_path: Path) -> None:
    args = {"bf16_full_eval": True, "skip_memory_metrics": False, "compute_metrics": accuracy}
    act = {"act": lambda trainer: trainer.evaluate(), "eval_dataset": rows(16)}
    _, ours, expected, found = both(tmp_path, **act, **args)
    assert found.keys() == expected.keys() - {"eval_model_preparation_time"} >= {"eval_mem_cpu_alloc_delta"}
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-2)
    assert next(ours.model.parameters()).dtype == torch.bfloat16


def test_the_evaluation_loop_is_called_as_in_run_qa_and_an_override_is_used(tmp_path: Path) -> None:
    class Answers(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            loader = self.get_eval_dataloader(self.eval_dataset)
            output = self.evaluation_loop(loader, description="Questions", prediction_loss_only=None)
            self.compute_metrics = compute_metrics
            found = EvalPrediction(predictions=output.predictions, label_ids=output.label_ids)
            return {**output.metrics, **compute_metrics(found)}

    class Marked(Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            return output._replace(metrics={**output.metrics, "eval_marked": 1.0})

    setup = {"act": lambda trainer: trainer.evaluate(), "eval_dataset": rows(21), "compute_metrics": accuracy}
    *_, expected, found = both(tmp_path, bert, (transformers.Trainer, Answers), **setup)
    marked = made(tmp_path, bert(), kind=Marked, eval_dataset=rows(21), compute_metrics=accuracy)
    assert (found["accuracy"], found["count"]) == (expected["eval_accuracy"], 21)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-3)
    assert marked.evaluate().keys() >= {"eval_marked", "eval_accuracy", "eval_runtime"}
    assert marked.predict(rows(7)).metrics["test_loss"] > 0


def test_predictions_come_in_order_and_padded_as_in_transformers(tmp_path: Path) -> None:
    data = token_rows(21)
    *_, expected, found = both(tmp_path, token_bert, data_collator=pad, act=lambda trainer: trainer.predict(data))
    np.testing.assert_allclose(found.predictions, expected.predictions, atol=CLOSE)
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    assert found.predictions.shape[0] == 21
    assert set(found.metrics) >= {"test_loss", "test_runtime", "test_samples_per_second", "test_steps_per_second"}


def test_a_dict_of_data_sets_is_evaluated_one_by_one(tmp_path: Path) -> None:
    parts = {"easy": rows(16, seed=2), "hard": rows(8, seed=3)}
    args = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "eval_dataset": parts}
    args |= {"metric_for_best_model": "eval_hard_loss", "compute_metrics": accuracy}
    theirs, ours, *_ = both(tmp_path, train_dataset=rows(24), **args)
    same_log(theirs, ours)
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric)
    assert {"eval_easy_loss", "eval_hard_accuracy"} <= ours.evaluate().keys()
    assert {"test_a_loss"} <= ours.evaluate({"a": parts["easy"]}, metric_key_prefix="test").keys()


def test_inputs_and_losses_are_handed_to_compute_metrics(tmp_path: Path) -> None:
    shapes = {}

    def look(found: EvalPrediction) -> dict[str, float]:
        shapes.update(inputs=found.inputs.shape, losses=found.losses.shape)
        return {}

    args = {"include_for_metrics": ["inputs", "loss"], "compute_metrics": look}
    made(tmp_path, bert(), eval_dataset=rows(11), **args).evaluate()
    assert shapes == {"inputs": (11, 12), "losses": (11,)}


def test_batch_metrics_see_every_sample_once_and_are_asked_for_a_result_at_the_end(tmp_path: Path) -> None:
    calls = []

    def by_batch(found: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        calls.append((len(found.label_ids), compute_result))
        return {"count": sum(number for number, _ in calls)} if compute_result else {}

    trainer = made(tmp_path, bert(), eval_dataset=rows(19), batch_eval_metrics=True, compute_metrics=by_batch)
    assert trainer.evaluate()["eval_count"] == 19
    assert calls == [(8, False), (8, False), (3, True)]


def test_metrics_that_are_no_dict_are_an_error_that_says_so(tmp_path: Path) -> None:
    trainer = made(tmp_path, bert(), eval_dataset=rows(8), compute_metrics=lambda found: None)
    assert "None" in refused(trainer.evaluate, "compute_metrics").problem


def test_logits_are_preprocessed_and_batches_kept_apart_if_asked(tmp_path: Path) -> None:
    setup = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    found = made(tmp_path, bert(), eval_do_concat_batches=False, **setup).predict(rows(11))
    assert [part.shape for part in found.predictions] == [(8,), (3,)]
    only = made(tmp_path, bert(), prediction_loss_only=True).predict(rows(11))
    assert only.predictions is None
    assert "test_loss" in only.metrics


def test_overridden_evaluation_methods_are_called_in_training(tmp_path: Path) -> None:
    called = []

    def noted(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            found = getattr(Trainer, name)(self, *args, **kwargs)
            return {**found, "eval_of_mine": 0.5} if name == "evaluate" else found

        return call

    names = ("evaluate", "get_eval_dataloader", "prediction_step", "log")
    own = type("Own", (Trainer,), {name: noted(name) for name in names})
    args = {"eval_strategy": "epoch", "num_train_epochs": 1, "eval_dataset": plain_rows(16)}
    trained_plain(tmp_path, 16, kind=own, **args)
    assert [name for name in called if name != "log"] == [*names[:3], "prediction_step"]
    assert called.count("log") == 3
    line = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert line["of_mine"] == 0.5


@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_after_an_evaluation_the_model_is_ready_for_inference_as_in_transformers(tmp_path: Path, strategy: str) -> None:
    def act(trainer: Any) -> list[bool]:
        trainer.train()
        modes = [trainer.model.training]
        trainer.model.train()
        trainer.predict(plain_rows(8))
        return [*modes, trainer.model.training]

    args = {
        "max_steps": 2,
        "eval_strategy": strategy,
        "train_dataset": plain_rows(16),
        "eval_dataset": plain_rows(8),
    }
    *_, expected, found = both(tmp_path, Plain, act=act, **args)
    assert found == expected == [strategy == "no", False]
