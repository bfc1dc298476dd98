"""The five text tasks on several processes, stopped and resumed, with adapters, and with a NaN: the same run as
anywhere else.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.comparisons import assert_same_run
from tests.support.runs import events, losses, metrics, run, write_corpus, write_recipe_file
from tests.tasks import test_masked_lm, test_multiple_choice, test_question_answering
from tests.tasks.test_seq2seq import T5, write_pairs
from tests.tasks.test_token_classification import BERT, write_conll

READER = {**BERT, "num_hidden_layers": 2, "initializer_range": 0.2}
"""Layer decay is for several layers; and with such weights losses move."""
MODELS = {
    "TokenClassification": READER,
    "QuestionAnswering": READER,
    "MultipleChoice": READER,
    "Seq2Seq": T5,
    "MaskedLM": test_masked_lm.BERT,
}
TASKS = pytest.mark.parametrize("task", MODELS)
TWO_TASKS = pytest.mark.parametrize("task", ("QuestionAnswering", "Seq2Seq"))
"""One task on the shared encoder base, and one with its own."""


def data_of(folder: Path, task: str) -> dict[str, Any]:
    """Write the data of a task into a folder, and return their section of a recipe."""
    if task == "MaskedLM":
        write_corpus(folder)
        return {"sequence_length": 32, "num_workers": 0}
    if task == "Seq2Seq":
        write_pairs(folder / "pairs.csv", 60)
        sizes = {"max_length": 16, "max_target_length": 24}
        return {"train": str(folder / "pairs.csv"), "id_column": "name", "eval_fraction": 0.3, **sizes}
    asked = test_question_answering.rows(unanswered=4)
    path = {
        "TokenClassification": lambda: write_conll(folder / "a.conll"),
        "QuestionAnswering": lambda: test_question_answering.write_jsonl(folder / "q.jsonl", asked),
        "MultipleChoice": lambda: test_multiple_choice.write_jsonl(folder / "m.jsonl", test_multiple_choice.rows()),
    }[task]()
    column = None if task == "TokenClassification" else "id"
    return {
        "train": str(path), "id_column": column, "eval_fraction": 0.3, "max_length": 48, "group_by_length": True
    }  # fmt: skip


def recipe(folder: Path, task: str, **sections: Any) -> Path:
    """Six steps with everything that changes a step, on data that `folder` gets."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"class_weights": "balanced"} if task == "TokenClassification" else {}
    generation = {"generation": {"max_samples": 7}} if task == "Seq2Seq" else {}
    settings: dict[str, Any] = {
        "task": f"tests.support.tasks.text_faults:Faulty{task}",
        "model": {"config": MODELS[task]},
        "data": data_of(folder, task),
        "loss": {"label_smoothing": 0.1, **weights},
        "optimizer": {
            "learning_rate": 1e-2 if MODELS[task] is READER else 3e-3,
            "ema_decay": 0.9,
            "layer_decay": 0.9,
        },
        "schedule": {"max_steps": 6},
        "evaluate": {"every_steps": 3, "early_stopping_patience": 9, **generation},
        "checkpoint": {"every_steps": 3},
        "options": {},
    }
    return write_recipe_file(folder, **{"windows": task == "MaskedLM", **settings, **sections})


def last_evaluation(folder: Path) -> dict[str, float]:
    found = metrics(folder, "eval")[-1]
    return {name: value for name, value in found.items() if isinstance(value, float) and name != "seconds"}


@pytest.mark.slow
@TASKS
def test_ddp_fsdp2_zero_and_a_run_that_is_stopped_on_two_processes_and_resumed_on_one_are_one_run(
    tmp_path: Path, task: str
) -> None:
    alone, sharded, zero, elastic = (tmp_path / name for name in ("alone", "sharded", "zero", "elastic"))
    run(recipe(alone, task))
    run(recipe(sharded, task, parallel={"strategy": "fsdp2"}), processes=2)
    run(recipe(zero, task, parallel={"strategy": "deepspeed", "zero_stage": 2}), processes=2)
    run(recipe(elastic, task, options={"term_at": {"step": 2, "rank": 1}}), processes=2, expect=75)
    run(recipe(elastic, task))
    assert len(events(elastic / "run", "resume")) == 1
    for other in (sharded, zero, elastic):
        assert_same_run(other / "run", alone / "run", 1e-5)
        assert last_evaluation(other / "run") == pytest.approx(last_evaluation(alone / "run"), rel=1e-4, abs=1e-5)
        ours, theirs = (json.loads((each / "run" / "evaluation.json").read_text()) for each in (other, alone))
        assert ours["details"] == theirs["details"], "each sample counts once, in order"
    if task == "Seq2Seq":
        generation = theirs["details"]["generation"]
        assert generation["num_texts"] == 7
        assert any(each["generated"] for each in generation["samples"])


@TWO_TASKS
def test_a_nan_is_skipped_and_adapters_are_trained_alone_and_merged(tmp_path: Path, task: str) -> None:
    trained = {"train_also": ["*classifier*", "*qa_outputs*"]} if MODELS[task] is READER else {}
    frozen = {"freeze": ["*embeddings*"]} if MODELS[task] is READER else {}
    done = recipe(
        tmp_path,
        task,
        model={"config": MODELS[task], "lora": {"rank": 2, **trained}, **frozen},
        options={"nan_at": {"step": 2, "rank": 0}},
        optimizer={"learning_rate": 1e-2},
        schedule={"max_steps": 3},
        evaluate={"every_steps": 0},
    )
    run(done)
    folder = tmp_path / "run"
    assert [event["step"] for event in events(folder, "skip")] == [2]
    assert len(losses(folder)) == 3
    weights = load_file(folder / "model" / "model.safetensors")
    assert not any("lora" in name for name in weights)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any("lora_A" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))


@TWO_TASKS
def test_training_stops_early_where_its_metric_gets_no_better(tmp_path: Path, task: str) -> None:
    metric = {"QuestionAnswering": "f1", "Seq2Seq": "chrf"}[task]
    evaluate = {"every_steps": 1, "metric_for_best_model": metric, "early_stopping_patience": 2}
    run(recipe(tmp_path, task, optimizer={"learning_rate": 1e-12}, evaluate=evaluate, checkpoint={"every_steps": 0}))
    assert len(losses(tmp_path / "run")) == 3
    assert f"{metric} was best at step 3" in events(tmp_path / "run", "early_stop")[0]["message"]
