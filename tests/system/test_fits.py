"""Reported faults of training with `fit` and recipes: losses, metrics, mixed machines."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from accel_train import fit, train
from accel_train.core.errors import DataError
from accel_train.core.json_io import read_json
from accel_train.hf import Trainer
from accel_train.task import Scores
from accel_train.tasks.causal_lm.task import CausalLM
from tests.support.commands import call
from tests.support.hf_models import Plain, arguments, plain_rows
from tests.support.runs import (
    SCENES,
    losses,
    metrics,
    refused,
    run,
    run_forked_command,
    tiny_recipe,
    write_lines,
    write_recipe_file,
    write_yaml,
)
from tests.support.wording import assert_golden
from tests.system.test_attacks import QUIET

pytestmark = pytest.mark.usefixtures("empty_folder")


def by_graph(model: nn.Module, batch: Any) -> Tensor:
    """Sum of a model's outputs for each graph of a batch."""
    return torch.zeros(len(batch[1])).index_add(0, batch[2], model(batch[0])[:, 0])


def graphs(samples: Sequence[Any]) -> list[Tensor]:
    """Graphs of four nodes, with the graph of each node."""
    nodes, targets = [row[:4] for row, _ in samples], [target for _, target in samples]
    return [torch.cat(nodes), torch.stack(targets), torch.arange(len(samples)).repeat_interleave(4)]


def time_first(*first: Tensor) -> Callable[[Sequence[Any]], Any]:
    """Batches whose sequences have the time before the sample, after other tensors."""
    return lambda samples: (
        *first,
        pad_sequence([row for row, _ in samples]),
        torch.stack([target for _, target in samples]),
    )


def over_time(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[-2]).sum(0)[:, 0]


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    """Squared error of each sample."""
    return (model(batch[0])[:, 0] - batch[1]).square()


# How a batch is made (None: as usual, of samples that are nested), what the model returns for it, and where its targets
# are.
BATCHES: dict[str, tuple[Callable[[Sequence[Any]], Any] | None, Callable[[nn.Module, Any], Tensor], int]] = {
    "time first": (time_first(), over_time, -1),
    "graphs": (graphs, by_graph, 1),
    "nested": (None, lambda model, batch: model(batch[0]["x"] + batch[0]["z"])[:, 0], 1),
    "weights first": (time_first(torch.ones(3)), over_time, -1),
    "0-dim first": (time_first(torch.tensor(2.0)), over_time, -1),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_bugs_01_loss_is_divided_by_the_samples(batch: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randn(length, 3, generator=generator) for length in (10, 5, 7, 6)]
    samples: list[Any] = list(zip(sequences, torch.randn(4, generator=generator), strict=True))
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    collate, predict, place = BATCHES[batch]
    if collate is None:
        samples = [({"x": row[0], "z": row[1]}, target) for row, target in samples]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (predict(model, batch) - batch[place]).square().mean()

    def off(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"off": (predict(model, batch) - batch[place]).abs()}

    whole = (collate or default_collate)(samples)
    expected = loss(model, whole)
    gradient = torch.linalg.vector_norm(
        torch.stack([each.norm() for each in torch.autograd.grad(expected, list(model.parameters()))])
    )
    common: dict[str, Any] = {"loss": loss, "collate": collate, "max_steps": 1, "batch_size": 4, **QUIET}
    result = fit(model, samples, eval_data=samples, metrics=off, output_dir=tmp_path / "run", **common)
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert line["grad_norm"] == pytest.approx(gradient.item(), rel=1e-5)
    with torch.no_grad():
        assert result.metrics["off"] == pytest.approx(off(model, whole)["off"].mean().item(), rel=1e-5)
        assert result.metrics["loss"] == pytest.approx(loss(model, whole).item(), rel=1e-5)


TINY: dict[str, Any] = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
TINY |= {"bos_token_id": 0, "eos_token_id": 1}
STEPS: dict[str, Any] = {"per_device_train_batch_size": 2, "logging_steps": 1}
STEPS |= {"learning_rate": 0.01, "weight_decay": 0.1}


def test_bugs_02_a_trainer_whose_labels_are_all_ignored_changes_no_bit_and_ends(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(**TINY))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = [{"input_ids": torch.arange(8) + 2, "labels": torch.full((8,), -100)} for _ in range(10)]
    args = arguments(tmp_path / "run", max_steps=20, **STEPS)
    with pytest.raises(DataError):
        Trainer(model, args, train_dataset=rows).train()
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    lines = metrics(tmp_path / "run")
    assert lines
    assert all(line["skipped"] and line["loss"] == "NaN" and line["num_targets"] == 0 for line in lines)


def test_bugs_02_one_ignored_batch_of_a_trainer_changes_no_bit_and_counts_in_no_mean(tmp_path: Path) -> None:
    """The second step reads rows 2 and 3, whose labels are ignored."""
    ids = [(torch.arange(8) * (row + 3)) % 30 + 2 for row in range(6)]
    rows = [
        {"input_ids": each, "labels": torch.full((8,), -100) if row in (2, 3) else each} for row, each in enumerate(ids)
    ]
    weights, means = [], []
    for steps in (1, 2, 3):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**TINY, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        order = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
        args = arguments(tmp_path / str(steps), max_steps=steps, **STEPS, **order)
        means.append(Trainer(model, args, train_dataset=rows).train().training_loss)
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert not all(weights[1][name].equal(weights[2][name]) for name in weights[0])
    assert means[1] == means[0] > 1


def test_bugs_02_masks_that_are_all_ignored_end_a_run_with_exit_2(tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for number in range(8):
        image = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(image).save(f"data/images/{number}.png")
        Image.fromarray(np.full((32, 32), 255, np.uint8)).save(f"data/masks/{number}.png")
    data = {"train": "data", "eval_fraction": 0, "image_size": 32, "label_names": ["a", "b"], "num_workers": 0}
    run = {"output_dir": "run", "batch": {"global_batch_size": 4}, "schedule": {"max_steps": 12}}
    write_yaml("recipe.yaml", {**SCENES, "data": data, **run})
    call("run", "recipe.yaml", code=2)
    assert not Path("run/model").exists()


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
    assert read_json(tmp_path / "eval_results.json")["eval_f1_by_class"] == [0.5, 0.7]


def test_bugs_03_a_metric_that_json_cannot_hold_is_refused_by_name_at_the_first_evaluation(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train_dataset": plain_rows(16), "eval_dataset": plain_rows(8)}
    trainer = Trainer(Plain(), arguments(tmp_path, **EVALUATING), compute_metrics=lambda _: {"plot": object()}, **data)
    refused(trainer.train, named="eval_plot")
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
    saved = read_json(tmp_path / "array" / "checkpoint-1" / "trainer_state.json")
    assert saved["stateful_callbacks"]["Remembers"]["attributes"] == {"value": [0, 1, 2]}
    refused(trained, tmp_path / "object", object(), named="callback")
    assert not (tmp_path / "object" / "checkpoints" / "step-00000001").exists()


class ArrayScores(CausalLM):
    """A task whose metrics and data facts are what NumPy and torch return."""

    def score(self, loss: float, totals: Mapping[str, Any], data: Any) -> Scores:
        found: Any = {"worst": np.float32(loss), "by_class": np.array([1.0, 2.0])}
        return Scores(found, {"matrix": torch.eye(2), "kind": {1}})

    def baselines(self, data: Any) -> dict[str, float]:
        return {}


def test_bugs_03_a_task_may_return_arrays_as_metrics_and_the_best_may_be_a_numpy_number(corpus: Path) -> None:
    recipe = tiny_recipe(
        corpus,
        task=f"{__name__}:ArrayScores",
        schedule={"max_steps": 2},
        evaluate={"every_steps": 1, "metric_for_best_model": "worst"},
        checkpoint={"every_steps": 1},
    )
    result = train(recipe)
    assert result.summary["eval"]["by_class"] == [1.0, 2.0]
    assert [line["by_class"] for line in metrics(corpus / "run", "eval")] == [[1.0, 2.0]] * 2
    assert type(result.summary["best_metric"]) is float
    assert read_json(corpus / "run" / "evaluation.json")["details"]["matrix"] == [[1.0, 0.0], [0.0, 1.0]]
    other = tiny_recipe(
        corpus,
        task=f"{__name__}:ArrayScores",
        output_dir=str(corpus / "refused"),
        schedule={"max_steps": 1},
        evaluate={"every_steps": 1, "metric_for_best_model": "by_class"},
    )
    refused(train, other, named="metric_for_best_model=by_class")


@pytest.mark.parametrize("where", ["whole", "part"])
def test_bugs_04_weights_of_a_compiled_module_have_its_own_names(tmp_path: Path, where: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    given: Any = torch.compile(plain, backend="eager")
    if where == "part":
        given = nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1])
    data = TensorDataset(torch.randn(8, 3), torch.randn(8))
    result = fit(given, data, loss=squared_error, output_dir=tmp_path, max_steps=2, batch_size=4, **QUIET)
    assert result.model is given
    saved = load_file(tmp_path / "model/model.safetensors")
    assert saved.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(saved["0.weight"], plain[0].weight)
    assert plain._compiled_call_impl is not None or where == "part"


def test_bugs_05_a_loss_of_another_shape_than_the_samples_is_refused(tmp_path: Path) -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1))
    arguments: dict[str, Any] = {"output_dir": tmp_path / "run", "max_steps": 1, "batch_size": 4, **QUIET}
    wrong: dict[str, dict[str, Any]] = {
        "loss has shape (4, 4) for 4 samples": {"loss": lambda model, batch: (model(batch[0]) - batch[1]).square()},
        "loss has shape (4, 1) for 4 samples": {"loss": lambda model, batch: model(batch[0]).square()},
        "wide |(4, 4)| 4 samples": {
            "loss": squared_error,
            "metrics": lambda model, batch: {"wide": model(batch[0]) - batch[1]},
            "eval_data": data,
        },
    }
    for named, given in wrong.items():
        refused(fit, nn.Linear(3, 1), data, **given, **arguments, named=named)


def test_bugs_06_a_part_of_a_section_is_enough(tmp_path: Path) -> None:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            seen.extend(batch[0][:, 0].tolist())
        return model(batch[0])[:, 0].square()

    rows = torch.arange(8.0)[:, None].expand(8, 3)
    more: dict[str, Any] = {"data": {"shuffle": False}}
    fit(
        nn.Linear(3, 1), TensorDataset(rows), loss=loss, output_dir=tmp_path, max_steps=2, batch_size=4, **more, **QUIET
    )
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


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
    assert "with statistics of" not in said[0]
    lines = [line for line in said[1].splitlines() if "with statistics of" in line]
    assert len(lines) == (norm == "own")
    if lines:
        assert_golden(lines[0])


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


MIXED = """
import os
import sys

import accel_train.parallel.precision as precision
import accel_train.training.build as build
from accel_train.cli.main import main
from accel_train.core.state import Choice

kind, rank = sys.argv[1], int(os.environ["RANK"])
if kind == "precision":
    value = ("bf16", "no")[rank]
    precision.choose_mixed_precision = lambda section, device: Choice(value, f"as a GPU of kind {rank}")
else:
    wrap = build.wrap_model
    build.wrap_model = lambda plan, *rest: wrap(plan, *rest).with_choices({"document mask": Choice(rank, "")})
sys.exit(main(["run", sys.argv[2]]))
"""
"""Two processes as on machines of two kinds."""


def test_mixed_01_processes_train_in_the_weakest_precision_of_all(corpus: Path) -> None:
    program = corpus / "mixed.py"
    program.write_text(MIXED)
    path = write_recipe_file(corpus, schedule={"max_steps": 2}, parallel={"strategy": "ddp"})
    done = run_forked_command(["precision", str(path)], 2, program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "GPU of kind 1" in done.stdout
    run(write_recipe_file(corpus, output_dir=str(corpus / "fp32"), schedule={"max_steps": 2}), processes=2)
    mixed, fp32 = ([each["step_loss"] for each in metrics(corpus / name)] for name in ("run", "fp32"))
    assert mixed == fp32


def test_mixed_02_choices_that_differ_between_processes_are_refused(corpus: Path) -> None:
    program = corpus / "mixed.py"
    program.write_text(MIXED)
    path = write_recipe_file(corpus, schedule={"max_steps": 2})
    done = run_forked_command(["choice", str(path)], 2, program)
    assert done.returncode == 2, done.stderr[-3000:]
    # The process that ends first says so, with its rank.
    (line,) = {line for line in done.stderr.splitlines() if "document mask" in line}
    assert_golden(line[line.index("the processes") :])


def test_new_01_of_equal_accuracies_the_weights_with_the_lowest_held_out_loss_are_kept() -> None:
    texts = ("customer wants a refund for order", "customer wants help with login")
    rows = [f"ticket {number}: {texts[number % 2]} {number * 37 % 9973},{'ba'[number % 2]}" for number in range(300)]
    write_lines("easy.csv", "text,label", *rows)
    recipe = {
        "task": "text-classification",
        "output_dir": "run",
        "model": {"config": {"model_type": "ngrams"}},
        "tokenizer": "bytes",
        "data": {"train": "easy.csv", "eval_fraction": 0.2, "max_length": 32, "num_workers": 0, "cache_dir": "cache"},
        "batch": {"global_batch_size": 16},
        "optimizer": {"learning_rate": 0.02},
        "schedule": {"max_steps": 60},
        "evaluate": {"every_steps": 10, "metric_for_best_model": "accuracy"},
        "log": {"progress": False},
        "checkpoint": {"load_best_model_at_end": True, "every_steps": 0},
    }
    write_yaml("recipe.yaml", recipe)
    printed = call("run", "recipe.yaml").out
    lines = metrics(Path("run"), "eval")
    assert sum(line["accuracy"] == 1.0 for line in lines) >= 3, "no tie, so nothing is tested"
    lowest = min((line for line in lines if line["accuracy"] == 1.0), key=lambda line: line["loss"])
    summary = read_json(Path("run/summary.json"))
    assert summary["best_step"] == lowest["step"] > lines[0]["step"]
    assert summary["eval"]["loss"] == pytest.approx(lowest["loss"])
    assert "overfitting" not in printed
