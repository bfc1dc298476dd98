"""Reported faults of the Trainer face, rebuilt small: each held a user's run up, or trained on the wrong thing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback

from accel_train import Recipe, train
from accel_train.checkpoint.store import changed_descriptions, check
from accel_train.checkpoint.verify import format_verified, verify
from accel_train.hf import Trainer
from accel_train.task import Scores
from accel_train.tasks.causal_lm import CausalLM
from tests.support.hf_models import Plain, arguments, bert, plain_rows, rows
from tests.support.runs import events, metrics, recipe_dict, write_corpus

EVALUATING: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}


def test_bugs_03_a_metric_that_is_an_array_is_logged_as_a_list_and_the_run_ends_saved(tmp_path: Path) -> None:
    given = {"f1_by_class": np.array([0.5, 0.7]), "best": np.float32(0.25), "spread": torch.tensor([[1.0, 2.0]])}
    trainer = Trainer(
        Plain(),
        arguments(tmp_path, **EVALUATING),
        train_dataset=plain_rows(16),
        eval_dataset=plain_rows(8),
        compute_metrics=lambda prediction: dict(given),
    )
    trainer.train()
    (tmp_path / "model" / "model.safetensors").stat()
    for folder in ("model", "checkpoints/step-00000004"):
        assert (tmp_path / folder).is_dir()
    logged = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    for line in logged:
        found = (line["eval_f1_by_class"], line["eval_best"], line["eval_spread"])
        assert found == ([0.5, 0.7], 0.25, [[1.0, 2.0]])
    assert [line["f1_by_class"] for line in metrics(tmp_path, "eval")] == [[0.5, 0.7]] * 2
    trainer.save_metrics("eval", trainer.evaluate())
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_f1_by_class"] == [0.5, 0.7]


def test_bugs_03_a_metric_that_json_cannot_hold_is_refused_by_name_at_the_first_evaluation(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train_dataset": plain_rows(16), "eval_dataset": plain_rows(8)}
    trainer = Trainer(Plain(), arguments(tmp_path, **EVALUATING), compute_metrics=lambda _: {"plot": object()}, **data)
    with pytest.raises(ValueError, match="eval_plot"):
        trainer.train()
    assert trainer.state.global_step == 2


class Remembers(TrainerCallback, transformers.trainer_callback.ExportableState):
    """A callback whose state holds what it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"value": self.value}}


def test_bugs_03_the_state_of_a_callback_is_saved_as_lists_or_refused_before_the_first_step(tmp_path: Path) -> None:
    def trained(folder: Path, value: Any) -> Trainer:
        args = arguments(folder, max_steps=1)
        trainer = Trainer(Plain(), args, callbacks=[Remembers(value)], train_dataset=plain_rows(16))
        trainer.train()
        return trainer

    trained(tmp_path / "array", np.arange(3))
    saved = json.loads((tmp_path / "array" / "checkpoint-1" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Remembers"]["attributes"] == {"value": [0, 1, 2]}
    with pytest.raises(ValueError, match="callback"):
        trained(tmp_path / "object", object())
    assert not (tmp_path / "object" / "checkpoints" / "step-00000001").exists()


class ArrayScores(CausalLM):
    """A task whose metrics and data facts are what NumPy and torch return."""

    def score(self, loss: float, totals: Mapping[str, Any], data: Any) -> Scores:
        found: Any = {"worst": np.float32(loss), "by_class": np.array([1.0, 2.0])}
        return Scores(found, {"matrix": torch.eye(2), "kind": {1}})

    def baselines(self, data: Any) -> dict[str, float]:
        return {}


def test_bugs_03_a_task_may_return_arrays_as_metrics_and_the_best_may_be_a_numpy_number(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    recipe = recipe_dict(
        tmp_path,
        task="tests.system.test_cases_hf:ArrayScores",
        schedule={"max_steps": 2},
        evaluate={"every_steps": 1, "metric_for_best_model": "worst"},
        checkpoint={"every_steps": 1},
    )
    result = train(Recipe.model_validate(recipe))
    assert result.summary["eval"]["by_class"] == [1.0, 2.0]
    assert [line["by_class"] for line in metrics(tmp_path / "run", "eval")] == [[1.0, 2.0]] * 2
    assert type(result.summary["best_metric"]) is float
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["details"]["matrix"] == [
        [1.0, 0.0],
        [0.0, 1.0],
    ]
    refused = recipe_dict(
        tmp_path,
        task="tests.system.test_cases_hf:ArrayScores",
        output_dir=str(tmp_path / "refused"),
        schedule={"max_steps": 1},
        evaluate={"every_steps": 1, "metric_for_best_model": "by_class"},
    )
    with pytest.raises(ValueError, match=r"metric_for_best_model=by_class"):
        train(Recipe.model_validate(refused))


class Adds(TrainerCallback):
    """Writes a file and a folder into each checkpoint, as callbacks do with an adapter or a metrics file."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "extra.json").write_text("{}")
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")


def test_hf_00_checkpoints_to_which_a_callback_added_files_are_rotated_and_a_foreign_file_is_kept(
    tmp_path: Path,
) -> None:
    args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_total_limit": 1}

    class Drops(Adds):
        """Leaves a file in the checkpoint before, after its save."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (Path(args.output_dir) / "checkpoint-2" / "mine.txt").write_text("mine")

    for name, callback in (("own", Adds()), ("foreign", Drops())):
        trainer = Trainer(
            Plain(), arguments(tmp_path / name, **args), callbacks=[callback], train_dataset=plain_rows(64)
        )
        trainer.train()
        assert (tmp_path / name / "checkpoint-4" / "extra.json").is_file()
    left = [path.name for path in (tmp_path / "own" / "checkpoints").iterdir() if path.is_dir()]
    assert left == ["step-00000004"]
    assert check(tmp_path / "own" / "checkpoints" / "step-00000004").problem is None
    kept = tmp_path / "foreign" / "checkpoints" / "kept-step-00000002"
    assert [path.name for path in kept.rglob("*") if path.is_file()] == ["mine.txt"]
    assert [event["step"] for event in events(tmp_path / "foreign", "kept_files")] == [3]


class Rewrites(TrainerCallback):
    """Writes the configuration of each checkpoint again, and adds a file; or overwrites its weights."""

    def __init__(self, name: str = "config.json") -> None:
        self.name = name

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.name == "config.json":
            model.config.id2label = {0: "neg", 1: "pos", 2: "none"}
            model.config.save_pretrained(folder)
            (folder / "extra.json").write_text("{}")
        else:
            (folder / self.name).write_bytes(b"other weights")


def test_hf_01_a_rewritten_config_of_a_checkpoint_does_not_keep_a_run_from_resuming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(callback: Any, steps: int = 2) -> Trainer:
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        return Trainer(bert(), args, callbacks=[callback], train_dataset=rows(16))

    make(Rewrites()).train()
    newest = tmp_path / "checkpoints" / "step-00000002"
    assert (check(newest).problem, changed_descriptions(newest)) == (None, [])
    (newest / "config.json").write_text("{}")  # by hand, later
    (newest / "README.md").write_text("mine")
    (newest / "extra.json").unlink()
    assert changed_descriptions(newest) == ["README.md", "config.json"]
    assert "config.json" in format_verified(verify(tmp_path))
    assert make(Rewrites(), 4).train(resume_from_checkpoint=True).global_step == 4
    assert [event["step"] for event in events(tmp_path, "checkpoint_changed")] == [2]
    assert [line["step"] for line in metrics(tmp_path)][-1] == 4
    make(Rewrites("model.safetensors"), 6).train(resume_from_checkpoint=True)
    assert [event["step"] for event in events(tmp_path, "checkpoint_changed")] == [2, 6]
    assert check(tmp_path / "checkpoints" / "step-00000006").problem is not None
    assert "model.safetensors" in capsys.readouterr().out
