"""Words, questions and choices on several processes, stopped and resumed, with adapters, and with a NaN: the same run as anywhere else."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.comparisons import assert_same_run
from tests.support.runs import events, losses, metrics, run, write_recipe_file
from tests.tasks import test_multiple_choice, test_question_answering
from tests.tasks.test_token_classification import BERT, write_conll

MODEL = {**BERT, "num_hidden_layers": 2, "initializer_range": 0.2}  # layer decay is for several; and losses that move

TASKS = pytest.mark.parametrize("task", ["TokenClassification", "QuestionAnswering", "MultipleChoice"])


def recipe(folder: Path, task: str, **sections: Any) -> Path:
    """Six steps with everything that changes a step, on data that `folder` gets."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {
        "TokenClassification": write_conll(folder / "a.conll"),
        "QuestionAnswering": test_question_answering.write_jsonl(
            folder / "q.jsonl", test_question_answering.rows(unanswered=4)
        ),
        "MultipleChoice": test_multiple_choice.write_jsonl(folder / "m.jsonl", test_multiple_choice.rows()),
    }
    weights = {"class_weights": "balanced"} if task == "TokenClassification" else {}
    settings: dict[str, Any] = {
        "task": f"tests.support.tasks.text_faults:Faulty{task}",
        "model": {"config": MODEL},
        "data": {
            "id_column": None if task == "TokenClassification" else "id",
            "train": str(paths[task]),
            "eval_fraction": 0.3,
            "max_length": 48,
            "group_by_length": True,
        },
        "loss": {"label_smoothing": 0.1, **weights},
        "optimizer": {
            "learning_rate": 1e-2,
            "ema_decay": 0.9,
            "layer_decay": 0.9,
        },
        "schedule": {"max_steps": 6},
        "evaluate": {"every_steps": 3, "early_stopping_patience": 9},
        "checkpoint": {"every_steps": 3},
        "options": {},
    }
    return write_recipe_file(folder, **{**settings, **sections})


def last_evaluation(folder: Path) -> dict[str, float]:
    found = metrics(folder, "eval")[-1]
    return {name: value for name, value in found.items() if isinstance(value, float) and name != "seconds"}


@pytest.mark.slow
@TASKS
def test_ddp_fsdp2_and_a_run_that_is_stopped_on_two_processes_and_resumed_on_one_are_one_run(
    tmp_path: Path, task: str
) -> None:
    alone, sharded, elastic = (tmp_path / name for name in ("alone", "sharded", "elastic"))
    run(recipe(alone, task))
    run(recipe(sharded, task, parallel={"strategy": "fsdp2"}), processes=2)
    run(recipe(elastic, task, options={"term_at": {"step": 2, "rank": 1}}), processes=2, expect=75)
    run(recipe(elastic, task))
    assert len(events(elastic / "run", "resume")) == 1
    for other in (sharded, elastic):
        assert_same_run(other / "run", alone / "run", 1e-5)
        assert last_evaluation(other / "run") == pytest.approx(last_evaluation(alone / "run"), rel=1e-4, abs=1e-5)
        ours, theirs = (json.loads((each / "run" / "evaluation.json").read_text()) for each in (other, alone))
        assert ours["details"] == theirs["details"], "each sample counts once, in order"


@TASKS
def test_a_nan_is_skipped_and_adapters_are_trained_alone_and_merged(tmp_path: Path, task: str) -> None:
    done = recipe(
        tmp_path, task, model={"config": MODEL, "lora": {"rank": 2, "train_also": ["*classifier*", "*qa_outputs*"]}, "freeze": ["*embeddings*"]},
        options={"nan_at": {"step": 2, "rank": 0}}, optimizer={"learning_rate": 1e-2}, schedule={"max_steps": 3}, evaluate={"every_steps": 0},
    )  # fmt: skip
    run(done)
    folder = tmp_path / "run"
    assert [event["step"] for event in events(folder, "skip")] == [2]
    assert len(losses(folder)) == 3
    weights = load_file(folder / "model" / "model.safetensors")
    assert not any("lora" in name for name in weights)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any("lora_A" in name for name in adapters)


@pytest.mark.slow
@TASKS
def test_zero_trains_as_one_process_does(tmp_path: Path, task: str) -> None:
    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    run(recipe(alone, task))
    run(recipe(sharded, task, parallel={"strategy": "deepspeed", "zero_stage": 2}), processes=2)
    assert_same_run(sharded / "run", alone / "run", 1e-5)
    assert last_evaluation(sharded / "run") == pytest.approx(last_evaluation(alone / "run"), rel=1e-4, abs=1e-5)


@TASKS
def test_training_stops_early_where_its_metric_gets_no_better(tmp_path: Path, task: str) -> None:
    metric = "accuracy" if task == "MultipleChoice" else "f1"
    evaluate = {"every_steps": 1, "metric_for_best_model": metric, "early_stopping_patience": 2}
    run(recipe(tmp_path, task, optimizer={"learning_rate": 1e-12}, evaluate=evaluate, checkpoint={"every_steps": 0}))
    assert len(losses(tmp_path / "run")) == 3
    assert f"{metric} was best at step 1" in events(tmp_path / "run", "early_stop")[0]["message"]
