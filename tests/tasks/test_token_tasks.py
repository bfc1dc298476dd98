"""seq2seq and masked-lm on several processes, stopped and resumed, with adapters, and with a NaN: the same run as anywhere else."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.comparisons import assert_same_run
from tests.support.runs import events, losses, metrics, run, write_corpus, write_recipe_file
from tests.tasks.test_masked_lm import BERT
from tests.tasks.test_seq2seq import T5, write_pairs

TASKS = pytest.mark.parametrize("task", ["Seq2Seq", "MaskedLM"])


def recipe(folder: Path, task: str, **sections: Any) -> Path:
    """Six steps with everything that changes a step, on data that `folder` gets."""
    folder.mkdir(parents=True, exist_ok=True)
    write_pairs(folder / "pairs.csv", 60)
    write_corpus(folder)
    data = {
        "Seq2Seq": {
            "train": str(folder / "pairs.csv"),
            "eval_fraction": 0.3,
            "max_length": 16,
            "max_target_length": 24,
            "id_column": "name",
        },
        "MaskedLM": {"sequence_length": 32, "num_workers": 0},
    }
    settings: dict[str, Any] = {
        "task": f"tests.support.tasks.token_faults:Faulty{task}",
        "model": {"config": {"Seq2Seq": T5, "MaskedLM": BERT}[task]},
        "data": data[task],
        "loss": {"label_smoothing": 0.1},
        "optimizer": {"learning_rate": 3e-3, "ema_decay": 0.9, "layer_decay": 0.9},
        "schedule": {"max_steps": 6},
        "evaluate": {"every_steps": 3, "generation": {"max_samples": 7}},
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
    stopping = recipe(elastic, task, options={"term_at": {"step": 2, "rank": 1}})
    run(stopping, processes=2, expect=75)
    run(recipe(elastic, task))
    assert len(events(elastic / "run", "resume")) == 1
    for other in (sharded, elastic):
        assert_same_run(other / "run", alone / "run", 1e-5)
        assert last_evaluation(other / "run") == pytest.approx(last_evaluation(alone / "run"), rel=1e-4)
        if task == "Seq2Seq":
            ours, theirs = (json.loads((each / "run" / "evaluation.json").read_text()) for each in (other, alone))
            assert ours["details"] == theirs["details"], "each row is generated once, in order"
            generation = theirs["details"]["generation"]
            assert generation["num_texts"] == 7
            assert any(each["generated"] for each in generation["samples"])


@pytest.mark.slow
@TASKS
def test_zero_trains_as_one_process_does(tmp_path: Path, task: str) -> None:
    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    run(recipe(alone, task))
    run(recipe(sharded, task, parallel={"strategy": "deepspeed", "zero_stage": 2}), processes=2)
    assert_same_run(sharded / "run", alone / "run", 1e-5)
    assert last_evaluation(sharded / "run") == pytest.approx(last_evaluation(alone / "run"), rel=1e-4)


@TASKS
def test_a_nan_is_skipped_and_adapters_are_trained_alone_and_merged(tmp_path: Path, task: str) -> None:
    base = {"Seq2Seq": T5, "MaskedLM": BERT}[task]
    done = recipe(
        tmp_path, task, model={"config": base, "lora": {"rank": 2}}, options={"nan_at": {"step": 2, "rank": 0}},
        optimizer={"learning_rate": 1e-2}, schedule={"max_steps": 3}, evaluate={"every_steps": 0},
    )  # fmt: skip
    run(done)
    folder = tmp_path / "run"
    assert [event["step"] for event in events(folder, "skip")] == [2]
    assert len(losses(folder)) == 3
    weights = load_file(folder / "model" / "model.safetensors")
    assert not any("lora" in name for name in weights)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any("lora_A" in name for name in load_file(folder / "adapter" / "adapter_model.safetensors"))


@TASKS
def test_training_stops_early_where_its_metric_gets_no_better(tmp_path: Path, task: str) -> None:
    metric = {"Seq2Seq": "chrf", "MaskedLM": "token_accuracy"}[task]
    evaluate = {"every_steps": 1, "metric_for_best_model": metric, "early_stopping_patience": 2}
    run(recipe(tmp_path, task, optimizer={"learning_rate": 1e-12}, evaluate=evaluate, checkpoint={"every_steps": 0}))
    assert len(losses(tmp_path / "run")) == 3
    assert f"{metric} was best at step 1" in events(tmp_path / "run", "early_stop")[0]["message"]
