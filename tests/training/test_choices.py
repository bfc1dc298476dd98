"""What a recipe chooses beside the plain loop: early stopping, the best weights, averages, adapters, short steps,
augmentation.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from accel_train import Recipe, train
from accel_train.core.errors import RecipeError
from accel_train.core.state import Requests
from accel_train.engine.run import Extensions
from accel_train.optim.update import FlooredGradScaler
from accel_train.parallel.precision import start_accelerator
from accel_train.recipe.evaluate import Evaluate
from accel_train.task import Scores, TaskData
from accel_train.training.setup import prepare_run
from tests.support.comparisons import assert_same_bits, tensors
from tests.support.processes import run_forked
from tests.support.runs import (
    TINY_MODEL,
    Capture,
    Settings,
    checkpoint,
    events,
    forget,
    losses,
    metrics,
    model_of,
    recipe_dict,
    run,
    steps_of,
    summary_of,
    tiny_recipe,
    write_recipe_file,
)
from tests.support.tasks.probe import ProbeTask
from tests.support.wording import assert_golden, raises_golden


class ScriptedScores(ProbeTask):
    """Evaluations report the next of `options.scores` as `quality`, and of `options.losses`, where
    given, as the loss.
    """

    metric_names = ("quality",)

    def score(self, loss: float, totals: Mapping[str, Any], data: TaskData) -> Scores:
        self.asked = getattr(self, "asked", 0) + 1
        scores = self.options["scores"]
        now = {"quality": float(scores[min(self.asked, len(scores)) - 1])}
        if losses_said := self.options.get("losses"):
            now["loss"] = float(losses_said[min(self.asked, len(losses_said)) - 1])
        return Scores(now, {"asked": self.asked})


class NoisySamples(ProbeTask):
    """Training windows are changed by the generator of their draw, and each draw is written down."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        data = super().load_data(recipe, progress=progress)
        path = Path(recipe.options["draws"])

        def draw(index: int, generator: np.random.Generator) -> Any:
            number = int(generator.integers(1 << 30))
            with path.open("a") as file:
                file.write(json.dumps([index, number]) + "\n")
            return data.train[index]

        return TaskData(
            data.train, data.eval, data.collate, data.fingerprint, data.facts, source=data.source, draw=draw
        )


def scripted(folder: Path, scores: list[float], **sections: Any) -> Recipe:
    sections = {"evaluate": {"every_steps": 2, "metric_for_best_model": "quality"}, **sections}
    return tiny_recipe(folder, options={"scores": scores}, **sections)


def run_with(recipe: Recipe, task: Any = None, extensions: Extensions | None = None) -> Any:
    """Train a recipe with a task object; returns the run."""
    from accel_train.training.train import train_run

    prepared = prepare_run(recipe, task, extensions or Extensions())
    train_run(prepared)
    return prepared


def assert_written(folder: Path, step: int) -> None:
    """`model/` has the weights of a step."""
    assert_same_bits(model_of(folder), tensors(folder, step, "model"))


def test_early_stopping_ends_the_run_after_so_many_evaluations_without_a_better_metric(corpus: Path) -> None:
    settings = {"every_steps": 2, "metric_for_best_model": "eval_quality", "early_stopping_patience": 2}
    recipe = scripted(corpus, [0.5, 0.7, 0.6, 0.65, 0.6], evaluate=settings)
    done = run_with(recipe, ScriptedScores())
    folder = corpus / "run"
    assert done.state.step == 8
    assert max(losses(folder)) == 8
    summary = summary_of(folder)
    assert (summary["status"], summary["best_step"], summary["best_metric"]) == ("stopped early", 4, 0.7)
    assert "best at step 4" in events(folder, "early_stop")[0]["message"]
    assert (folder / "model" / "model.safetensors").exists()
    again = run_with(recipe, ScriptedScores())
    assert again.state.step == 8, "a resume must not train on"
    assert max(losses(folder)) == 8


@pytest.mark.parametrize(
    ("losses_said", "best_step", "ends_at"),
    [
        ([3, 2, 1, 0.5, 0.4, 0.3], 12, 12),  # falls to the end
        ([3, 1, 2, 2.5, 2, 2], 4, 8),  # rises after the second: patience is spent
        ([3, 1, 1, 1, 1, 1], 8, 8),  # stays: the later step is kept, and patience is spent
        ([math.nan] * 3 + [1], 6, 6),  # not finite, which is no progress; then the evaluation at the end
    ],
    ids=["falls", "rises", "stays", "not finite"],
)
def test_of_equal_metrics_the_lower_loss_is_best_and_progress_and_then_the_later_step(
    corpus: Path, losses_said: list[float], best_step: int, ends_at: int
) -> None:
    settings = {"every_steps": 2, "metric_for_best_model": "quality", "early_stopping_patience": 2}
    options = {"scores": [0.9] * 6, "losses": losses_said}
    done = run_with(tiny_recipe(corpus, options=options, evaluate=settings), ScriptedScores())
    assert (done.state.step, done.state.best_step) == (ends_at, best_step)
    assert_written(corpus / "run", best_step)


@pytest.mark.parametrize(("patience", "last_step"), [(2, 6), (1, 6), (3, 8), (None, 12)])
def test_a_run_that_stopped_early_trains_on_where_its_patience_was_raised_or_removed(
    corpus: Path, patience: int | None, last_step: int
) -> None:
    def recipe(patience: int | None) -> Recipe:
        settings = {"every_steps": 2, "metric_for_best_model": "quality", "early_stopping_patience": patience}
        options = {"scores": [0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], "losses": [1.0]}  # equal losses are no progress
        return tiny_recipe(corpus, options=options, evaluate=settings)

    assert run_with(recipe(2), ScriptedScores()).state.step == 6
    again = run_with(recipe(patience), ScriptedScores())
    assert again.state.step == last_step
    lifted = [event["message"] for event in events(corpus / "run", "early_stop_lifted")]
    assert len(lifted) == (last_step > 6)
    now = "is not set" if patience is None else f"is {patience}"
    assert all("step 6 of 12" in each and f"early_stopping_patience {now}" in each for each in lifted)


def test_the_weights_that_evaluated_best_are_the_ones_at_the_end(corpus: Path) -> None:
    checkpoints = {"load_best_model_at_end": True, "keep": 1}
    run_with(scripted(corpus, [0.1, 0.9, 0.3, 0.2], checkpoint=checkpoints), ScriptedScores())
    folder = corpus / "run"
    assert_written(folder, 4)
    with pytest.raises(AssertionError):
        assert_written(folder, 12)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["details"]["asked"] == 7
    assert events(folder, "best_model")


@pytest.mark.parametrize("choice", ["auto", False])
def test_early_stopping_keeps_the_best_weights_unless_the_recipe_says_otherwise_and_then_says_what_is_lost(
    corpus: Path, capsys: Capture, choice: bool | str
) -> None:
    evaluations = {"every_steps": 2, "metric_for_best_model": "quality", "early_stopping_patience": 2}
    sections = {"evaluate": evaluations, "checkpoint": {"load_best_model_at_end": choice}}
    run_with(scripted(corpus, [0.1, 0.9, 0.3, 0.2, 0.2], **sections), ScriptedScores())
    folder = corpus / "run"
    assert_written(folder, 4 if choice == "auto" else 8)
    said = capsys.readouterr().out
    assert bool(re.search(r"^model/ .* step 4 .*quality 0\.9", said, re.M)) == (not choice)
    chosen = events(folder, "start")[0]["choices"].get("checkpoint.load_best_model_at_end", "False")
    assert chosen.startswith("True") == (choice == "auto")


def test_last_weights_that_evaluate_as_well_as_the_best_are_not_called_worse(corpus: Path, capsys: Capture) -> None:
    settings = {"every_steps": 6, "metric_for_best_model": "quality"}
    run_with(scripted(corpus, [0.9, 0.9, 0.9], evaluate=settings), ScriptedScores())
    assert "evaluated better" not in capsys.readouterr().out


@pytest.mark.parametrize(("last", "kept"), [(0.95, 6), (0.3, 4)])
def test_the_last_step_competes_for_the_best_on_the_samples_of_the_evaluations_before_it(
    corpus: Path, last: float, kept: int
) -> None:
    sections = {
        "schedule": {"max_steps": 6},
        "checkpoint": {"load_best_model_at_end": True},
        "evaluate": {"every_steps": 2, "max_samples": 2, "metric_for_best_model": "quality"},
    }
    recipe = scripted(corpus, [0.1, 0.9, last, 0.5], **sections)
    for _ in range(2):  # the second time it is finished already, and only evaluated again
        run_with(recipe, ScriptedScores())
        folder = corpus / "run"
        recorded = [(line["step"], line["quality"]) for line in metrics(folder, "eval")]
        assert recorded[:2] == [(2, 0.1), (4, 0.9)]
        assert [step for step, _ in recorded] == [2, 4, 6]
        [final] = metrics(folder, "eval_final")
        assert final["num_targets"] > metrics(folder, "eval")[0]["num_targets"]
        if _ == 0:
            assert (recorded[2], final["quality"]) == ((6, last), 0.5)
            summary = summary_of(folder)
            assert (summary["best_step"], summary["best_metric"]) == (kept, max(0.9, last))
            assert summary["eval"]["quality"] == 0.5
            assert_written(folder, kept)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_metric_that_no_evaluation_reports_is_found_before_the_first_step(corpus: Path, processes: int) -> None:
    recipe = write_recipe_file(corpus, evaluate={"every_steps": 2, "metric_for_best_model": "eval_perplexty"})
    forked = run_forked(["run", str(recipe)], processes, folder=corpus / "processes")
    forked.expect(2)
    lines = [line for rank in range(processes) for line in forked.stderr(rank).splitlines()]
    [line] = [line for line in lines if line.startswith("error: ")]
    told = re.fullmatch(r"error: (.*)" if processes == 1 else r"error: rank [01]: (.*)", line)
    assert told
    assert_golden(told[1])
    assert not (corpus / "run" / "metrics.jsonl").read_text()


def test_a_metric_that_is_not_reported_is_a_mistake_that_names_those_that_are(corpus: Path) -> None:
    recipe = scripted(corpus, [1.0], evaluate={"every_steps": 2, "metric_for_best_model": "qualty"})
    with raises_golden(RecipeError):
        run_with(recipe, ScriptedScores())


@pytest.mark.parametrize(
    ("name", "greater", "better"),
    [("loss", "auto", False), ("f1_macro", "auto", True), ("rmse", "auto", False), ("odd", False, False)],
)
def test_which_way_is_better_follows_from_the_name_unless_it_is_said(name: str, greater: Any, better: bool) -> None:
    from accel_train.training.model_selection import is_better

    section = Evaluate(metric_for_best_model=name, greater_is_better=greater, early_stopping_threshold=0.1)
    assert is_better(0.7, 0.5, section) is better
    assert is_better(0.3, 0.5, section) is not better
    assert not is_better(0.55, 0.5, section)
    assert not is_better(0.45, 0.5, section)
    assert not is_better(float("nan"), 0.5, section)
    assert is_better(0.5, None, section)


def test_evaluations_by_epochs_come_at_the_ends_of_epochs(corpus: Path) -> None:
    recipe = recipe_dict(corpus, data={"last_batch": "short"}, schedule={"max_steps": None, "num_epochs": 2})
    recipe["evaluate"] = {"every_epochs": 1}
    result = train(Recipe.model_validate(recipe))
    steps = [line["step"] for line in metrics(result.output_dir, "eval")]
    assert steps == [result.summary["steps"] // 2, result.summary["steps"]]
    assert metrics(result.output_dir)[-1]["epoch"] == 2.0


def test_averaged_weights_are_evaluated_saved_and_resumed_within_the_warmup(corpus: Path) -> None:
    sections: Settings = {
        "optimizer": {"ema_decay": 0.8},
        "schedule": {"warmup_steps": 9},
        "checkpoint": {"every_steps": 1, "keep": 12},
    }
    whole = tiny_recipe(corpus, **sections)
    folder = train(whole).output_dir
    averages = tensors(folder, 1, "average")
    for step in range(1, 12):
        of_step = tensors(folder, step + 1, "model")
        decay = min(0.8, (1 + step) / (10 + step))
        averages = {name: decay * average + (1 - decay) * of_step[name] for name, average in averages.items()}
    stored = tensors(folder, 12, "average")
    torch.testing.assert_close(stored, averages)
    averages = stored
    final = model_of(folder)
    assert_same_bits(final, averages)
    live = tensors(folder, 12, "model")
    assert not all(torch.equal(final[name], live[name]) for name in final)

    resumed = recipe_dict(corpus, **sections, output_dir=str(corpus / "resumed"))
    resumed["checkpoint"]["resume"] = str(folder / "checkpoints" / "step-00000006")
    again = train(Recipe.model_validate(resumed)).output_dir
    other = tensors(again, 12, "average")
    assert_same_bits(averages, other)
    rates = {line["step"]: line["learning_rate"] for line in metrics(folder)}
    assert rates[6] < rates[7] < rates[8] < rates[9]
    assert {line["step"]: line["learning_rate"] for line in metrics(again)} == {
        step: rates[step] for step in range(7, 13)
    }


def test_the_loss_scale_of_fp16_grows_at_the_same_step_after_a_resume(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*given: Any) -> Accelerator:
        accelerator = start_accelerator(*given)
        accelerator.scaler = FlooredGradScaler("cpu", init_scale=64.0, growth_interval=5, floor=1.0)
        return accelerator

    monkeypatch.setattr("accel_train.training.setup.start_accelerator", start)
    sections: Settings = {"checkpoint": {"every_steps": 1, "keep": 12}}
    whole = train(tiny_recipe(corpus, **sections)).output_dir
    sections["checkpoint"]["resume"] = str(whole / "checkpoints" / "step-00000007")
    again = train(tiny_recipe(corpus, **sections, output_dir=str(corpus / "again"))).output_dir
    scales = [[line["loss_scale"] for line in metrics(folder) if line["step"] > 7] for folder in (whole, again)]
    assert scales[0] == [128, 128, 128, 256, 256]
    assert scales[1] == scales[0]


def test_a_checkpoint_is_a_folder_that_from_pretrained_reads(corpus: Path) -> None:
    folder = train(tiny_recipe(corpus)).output_dir
    path = folder / "checkpoints" / "step-00000012"
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    final = model_of(folder)
    assert all(torch.equal(final[name], tensor) for name, tensor in model.state_dict().items() if name in final)
    assert transformers.AutoTokenizer.from_pretrained(path).decode([104, 105]) == "hi"


def test_adapters_alone_are_trained_and_merged_into_the_saved_model(corpus: Path) -> None:
    base = train(tiny_recipe(corpus)).output_dir / "model"
    sections = {
        "model": {"config": None, "pretrained": str(base), "lora": {"rank": 2}},
        "output_dir": str(corpus / "lora"),
    }
    folder = train(tiny_recipe(corpus, **sections)).output_dir
    before, after = load_file(base / "model.safetensors"), model_of(folder)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".c_" in name and name.endswith("weight")}
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    assert losses(folder)[12] < losses(corpus / "run")[1]


def test_a_pretrained_model_is_trained_with_its_dropout(corpus: Path) -> None:
    base = train(tiny_recipe(corpus)).output_dir / "model"
    sections = {"model": {"config": None, "pretrained": str(base)}, "output_dir": str(corpus / "more")}
    prepared = prepare_run(tiny_recipe(corpus, **sections))
    with prepared.resources:
        assert all(module.training for module in prepared.strategy.inner.modules())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_short_last_steps_give_the_same_losses_on_any_number_of_processes(corpus: Path, processes: int) -> None:
    sections: Settings = {
        "data": {"last_batch": "short", "sequence_length": 64},
        "batch": {"global_batch_size": 32},
        "schedule": {"max_steps": None, "num_epochs": 3},
        "options": {"ragged": True},
    }
    alone = train(tiny_recipe(corpus, **sections)).output_dir
    path = write_recipe_file(corpus, **sections, output_dir=str(corpus / "several"))
    run(path, processes=processes)
    several = losses(corpus / "several")
    assert several.keys() == losses(alone).keys()
    for step, loss in losses(alone).items():
        assert several[step] == pytest.approx(loss, rel=1e-6), step


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_seed_epoch_and_sample_and_not_on_who_reads(corpus: Path, workers: int) -> None:
    def draws(name: str, **sections: Any) -> list[list[int]]:
        path = corpus / f"draws {name}"
        recipe = recipe_dict(corpus, output_dir=str(corpus / name), options={"draws": str(path)}, **sections)
        run_with(Recipe.model_validate(recipe), NoisySamples())
        return sorted(map(json.loads, path.read_text().splitlines()))

    one = draws("one", data={"num_workers": workers})
    other = draws("other", data={"num_workers": 0}, batch={"global_batch_size": 8, "per_device_batch_size": 2})
    assert one[: len(other)] == other or sorted(one) == sorted(other)
    assert len({number for _, number in other}) == len(other), "two draws of one sample must differ between epochs"


def test_requests_of_an_observer_are_met_at_the_step_it_was_told_of(corpus: Path) -> None:
    from accel_train.observe.observer import Observer

    requests = Requests()
    told: list[int] = []

    class Asking(Observer):
        def on_step(self, result: Any, learning_rate: float) -> None:
            told.append(result.step)
            requests.save = result.step == 3
            requests.stop = result.step == 5

    recipe = tiny_recipe(corpus, checkpoint={"keep": 9})
    done = run_with(recipe, None, Extensions(observers=(Asking(),), requests=requests))
    assert told == [1, 2, 3, 4, 5]
    assert done.state.step == 5
    assert sorted(path.name for path in (corpus / "run" / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000005",
    ]


def test_a_programs_own_optimizer_and_rates_take_the_place_of_the_recipes(corpus: Path) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=9.0, fused=True)

    extensions = Extensions(build_optimizer=build, group_learning_rates=lambda step: [0.1 / (1 + step)])
    run_with(tiny_recipe(corpus, optimizer={"max_grad_norm": 0.0}), None, extensions)
    rates = [line["learning_rate"] for line in metrics(corpus / "run")]
    assert rates == pytest.approx([0.1 / (1 + step) for step in range(12)])
    assert isinstance(checkpoint(corpus / "run", 12), dict)


def test_selective_checkpointing_accumulates_and_resumes_to_the_same_bits(corpus: Path) -> None:
    sections = {
        "task": "causal-lm",
        "model": {"config": {**TINY_MODEL, "resid_pdrop": 0.1}},
        "batch": {"global_batch_size": 8, "gradient_accumulation_steps": 2},
        "checkpoint": {"every_steps": 4},
        "schedule": {"max_steps": 8},
    }
    for name in ("off", "selective", "resumed"):
        checkpointing = {"gradient_checkpointing": "off" if name == "off" else "selective"}
        recipe = recipe_dict(corpus, **sections, precision=checkpointing, output_dir=str(corpus / name))
        train(Recipe.model_validate(recipe))
        if name == "resumed":
            forget(corpus / name, 8)
            train(Recipe.model_validate(recipe))
            assert steps_of(corpus / name, "resume") == [4]
    off, *others = (checkpoint(corpus / name, 8) for name in ("off", "selective", "resumed"))
    for other in others:
        assert_same_bits(off, other)
