"""Seq2SeqTrainer: transformers' own losses and token ids, generated once for every sample on any
number of processes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import GenerationConfig

from accel_train.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from tests.support.hf_models import difference, every, history, refused
from tests.support.hf_seq2seq import collate, seq2seq_arguments, seq2seq_model, seq2seq_rows
from tests.support.runs import TESTS, run_forked_command

KINDS = (transformers.Seq2SeqTrainer, Seq2SeqTrainer)


def test_the_arguments_are_those_of_transformers() -> None:
    assert Seq2SeqTrainingArguments is transformers.Seq2SeqTrainingArguments


def metrics(found: Any) -> dict[str, float]:
    return {
        "sum": float(np.where(found.predictions > 0, found.predictions, 0).sum()),
        "width": found.predictions.shape[1],
    }


def made(kind: Any, folder: Path, compute_metrics: Any = metrics, **changes: Any) -> Any:
    data = {"eval_dataset": seq2seq_rows(8, seed=2), "train_dataset": seq2seq_rows(24)}
    args = seq2seq_arguments(folder, **changes)
    return kind(seq2seq_model(), args, collate, compute_metrics=compute_metrics, **data)


SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "arguments": ({"generation_max_length": 9, "generation_num_beams": 3}, {}),
    "call": ({"generation_max_length": 9}, {"num_beams": 2, "max_length": 15}),
    "new tokens": ({}, {"max_new_tokens": 5, "repetition_penalty": 1.7}),
    "config": ({"generation_config": GenerationConfig(max_new_tokens=14, num_beams=2, **SPECIAL)}, {}),
    "logits": ({"predict_with_generate": False, "compute_metrics": None}, {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_ids_labels_and_metrics_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """One batch: there eval_loss is the mean of batch means."""
    given, call = CALLS[case]
    found = []
    for kind in KINDS:
        trainer = made(kind, tmp_path / kind.__module__, **given)
        found.append((trainer.evaluate(**call), trainer.predict(seq2seq_rows(8, seed=3), **call)))
    (their_scores, theirs), (our_scores, ours) = found
    assert our_scores["eval_loss"] == pytest.approx(their_scores["eval_loss"], abs=1e-5)
    assert our_scores.get("eval_sum") == their_scores.get("eval_sum")
    assert our_scores.get("eval_width") == their_scores.get("eval_width")
    if case == "logits":
        np.testing.assert_allclose(ours.predictions[0], theirs.predictions[0], atol=1e-5)
    else:
        assert len({len(set(row.tolist())) for row in ours.predictions}) > 1, "texts of one token would show nothing"
        assert ours.predictions.tolist() == theirs.predictions.tolist()
    assert ours.label_ids.tolist() == theirs.label_ids.tolist()


def test_training_with_evaluations_that_generate_is_that_of_transformers(tmp_path: Path) -> None:
    args = {"max_steps": 4, **every(2, "eval"), "label_smoothing_factor": 0.1}
    trained = []
    for kind in KINDS:
        trained.append(made(kind, tmp_path / kind.__module__, **args))
        trained[-1].train()
    assert difference(trained[0].model, trained[1].model) < 1e-5
    expected, found = map(history, trained)
    assert [sorted(line) for line in found] == [sorted(line) for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        compared = [name for name in theirs if name not in ("total_flos", "train_loss")]
        assert [ours[name] for name in compared] == pytest.approx([theirs[name] for name in compared], abs=1e-4)


def test_each_data_set_of_a_dict_is_evaluated_with_the_settings_of_the_call(tmp_path: Path) -> None:
    widths: list[int] = []

    def width(found: Any) -> dict[str, float]:
        widths.append(found.predictions.shape[1])
        return {}

    sets = {"a": seq2seq_rows(3), "b": seq2seq_rows(4, seed=5)}
    model = seq2seq_model()
    model.generation_config.max_length = 2
    trainer = Seq2SeqTrainer(model, seq2seq_arguments(tmp_path), collate, eval_dataset=sets, compute_metrics=width)
    assert {"eval_a_loss", "eval_b_loss"} <= trainer.evaluate(max_new_tokens=4, min_new_tokens=4).keys()
    assert widths == [5, 5]


def test_a_trainer_that_generates_nothing_refuses_to_and_names_the_one_that_does(tmp_path: Path) -> None:
    error = refused(lambda: made(Trainer, tmp_path), "predict_with_generate")
    assert "accel_train.hf.Seq2SeqTrainer" in error.remedy
    made(Seq2SeqTrainer, tmp_path, sortish_sampler=True)  # which nothing reads, there as here


@pytest.mark.slow
def test_two_processes_generate_every_sample_once_in_order(tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        done = run_forked_command([str(folder)], processes, TESTS / "support/programs/hf_seq2seq.py")
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
        found.append(json.loads((folder / "result.json").read_text()))
    one, two = found
    for count in ("7", "40"):
        assert two[count]["seen"] == [int(count)] * 2
        assert two[count]["loss"] == pytest.approx(one[count]["loss"], rel=1e-5)
        for name in ("predictions", "labels", "first"):
            assert two[count][name] == one[count][name], name
