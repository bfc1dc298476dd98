"""accel_train.Trainer held to transformers.Trainer, in one process: the same arguments and data, the same weights, log,
metrics, and checkpoints.
"""

import json
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import BertForQuestionAnswering, EarlyStoppingCallback, TrainerCallback

from accel_train.core.errors import TrainingStopped
from accel_train.core.json_io import load_object
from accel_train.hf import get_last_checkpoint
from accel_train.hf.callbacks import Flow
from tests.support.hf_models import (
    CLOSE,
    KINDS,
    Given,
    Plain,
    accuracy,
    adapted,
    bert,
    both,
    difference,
    every,
    history,
    llama,
    made,
    pad,
    plain_rows,
    rates,
    refused,
    rows,
    same,
    token_bert,
    token_rows,
    trained,
    trained_plain,
    vit,
    worse_rows,
)
from tests.support.hub import record_uploads
from tests.support.runs import events
from tests.support.wording import assert_golden, raises_golden


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


class OwnLoader:
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=5, shuffle=False, collate_fn=self.data_collator)


class OwnLoss:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs[0], labels, label_smoothing=0.3)
        return (loss, outputs) if return_outputs else loss


class OwnStep:
    seen = 0

    def training_step(self, *args: Any) -> Any:
        self.seen += 1
        return super().training_step(*args)


class OwnLog:
    """The Trainer of a script whose loss depends on the step, and which logs a mean that it keeps by itself."""

    seen, kept = (), ()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (*self.seen, (self.state.global_step, self.state.epoch))
        loss = super().compute_loss(*args, **kwargs)
        self.kept = (*self.kept, float(loss.detach()))
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        own = {"mean": sum(self.kept) / len(self.kept), "rate": self._get_learning_rate()} if self.kept else {}
        self.kept = ()
        super().log({**logs, **own}, start_time)


class BaseLoader:
    def get_train_dataloader(self) -> Any:
        everything, self.train_dataset = self.train_dataset, self.train_dataset[:20]
        loader = super().get_train_dataloader()
        self.train_dataset = everything
        return loader


class Helpers:
    """The Trainer of a script that was written after transformers' own methods."""

    def get_train_dataloader(self) -> Any:
        data = self._remove_unused_columns(self.train_dataset, description="training")
        assert len(self._get_train_sampler()) == len(data)
        assert len(self._get_eval_sampler(data)) == len(data)
        assert self._get_output_dir(None) == self.args.output_dir
        collate = self._get_collator_with_removed_columns(self.data_collator)
        return DataLoader(data, batch_size=8, collate_fn=collate)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        assert not self.is_deepspeed_enabled
        self.accelerator.backward(loss)
        return loss.detach()


class Counted(IterableDataset[Any]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(plain_rows(20))


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    flat = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return flat / num_items_in_batch


PLAIN, TEXTS, TOKENS = plain_rows(45), rows(24), token_rows(42)
SHIFTED = [{"input_ids": row["input_ids"], "labels": [-100, *row["input_ids"][1:]]} for row in TOKENS]
PIXELS = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))
SPANS = [{"input_ids": row["input_ids"], "start_positions": row["labels"], "end_positions": 5} for row in TEXTS]
TABLE = datasets.Dataset.from_list([{**row, "text": "?"} for row in TEXTS])
BEST: Given = {"load_best_model_at_end": True}
FAST: Given = {"learning_rate": 1e-2}
RAGGED: Given = {"gradient_accumulation_steps": 2, "data_collator": pad}
# The clip rounds otherwise, which Adam makes visible in biases of attention keys, whose gradient is 0.
LABELS: Given = {"eval_on_start": True, "eval_delay": 2, "dataloader_num_workers": 1, "max_grad_norm": 100.0}
LABELS |= {"logging_first_step": True, "max_steps": 4, **every(3, "eval"), "eval_dataset": "of training"}
CASES: dict[str, tuple[Any, list[Any], Given]] = {
    "defaults": (Plain, PLAIN, FAST),
    # Theirs weighs a short micro-batch as much as a full one.
    "accumulation": (
        Plain,
        plain_rows(48),
        {"gradient_accumulation_steps": 3, "warmup_steps": 2, "lr_scheduler_type": "cosine", **FAST},
    ),
    "decay, clip": (Plain, PLAIN, {"max_steps": 7, "weight_decay": 0.1, "warmup_steps": 0.3, "max_grad_norm": 0.05}),
    "epochs": (Plain, PLAIN, {"num_train_epochs": 2.5, "optim": "sgd", "logging_strategy": "epoch", "data_seed": 5}),
    "8 bits": (Plain, PLAIN, {"optim": "adamw_bnb_8bit", "warmup_steps": 2, "weight_decay": 0.1, **FAST}),
    "in order": (Plain, PLAIN, {"dataloader_drop_last": True, "train_sampling_strategy": "sequential", **FAST}),
    "momentum": (
        Plain,
        PLAIN,
        {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.0, "logging_steps": 0.3, "seed": 3, **FAST},
    ),
    "class of optimizer": (
        bert,
        TEXTS,
        {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 2e-3}), "weight_decay": 0.1, "warmup_steps": 2},
    ),
    # Both divide the summed loss by the targets of the whole step, of ragged micro-batches and short steps too.
    "targets": (llama, SHIFTED, {**RAGGED, "eval_strategy": "epoch", "eval_dataset": SHIFTED[:8]}),
    "compute_loss_func": (token_bert, TOKENS, {**RAGGED, "compute_loss_func": summed}),
    "label_smoothing": (token_bert, TOKENS, {**RAGGED, "label_smoothing_factor": 0.2}),
    "compute_loss": (
        Plain,
        PLAIN,
        {"overrides": OwnLoss, "eval_strategy": "epoch", "eval_dataset": PLAIN[:16]},
    ),
    "get_train_dataloader": (
        Plain,
        PLAIN[:30],
        {"overrides": OwnLoader, "gradient_accumulation_steps": 2},
    ),
    "regression": (
        lambda: bert(num_labels=1),
        [{**row, "labels": float(row["labels"])} for row in TEXTS],
        LABELS,
    ),
    "several labels": (
        lambda: bert(problem_type="multi_label_classification"),
        [{**row, "labels": torch.eye(3)[row["labels"]]} for row in TEXTS],
        LABELS,
    ),
    "question answering": (lambda: bert(BertForQuestionAnswering, num_labels=2), SPANS, LABELS),
    "early stopping": (
        Plain,
        plain_rows(24, seed=4),
        {"make_callbacks": lambda: [EarlyStoppingCallback(2)], **every(2, "eval", "save"), **BEST}
        | {"eval_dataset": worse_rows(16), "learning_rate": 0.5, "num_train_epochs": 10, "save_total_limit": 1},
    ),
    "best": (
        bert,
        rows(45),
        {"metric_for_best_model": "accuracy", "compute_metrics": accuracy, "weight_decay": 0.1, **BEST}
        | {"eval_dataset": rows(24, seed=2), "learning_rate": 5e-3, **every(4, "eval", "save")},
    ),
    "step": (Plain, PLAIN[:24], {"overrides": OwnStep, "max_steps": 3}),
    "loss and log": (Plain, PLAIN[:24], {"overrides": OwnLog, "max_steps": 5}),
    "loader of the base": (Plain, PLAIN[:24], {"overrides": BaseLoader, "num_train_epochs": 3}),
    "helpers": (bert, TABLE, {"overrides": Helpers, "max_steps": 4}),
    "stream with a length": (Plain, Counted(), {}),
    **{
        which: (
            token_bert,
            TOKENS[:20],
            {"include_num_input_tokens_seen": which, "label_smoothing_factor": 0.2, **RAGGED},
        )
        for which in ("all", "non_padding")
    },
    "images": (vit, [{"pixel_values": one, "label": i % 3} for i, one in enumerate(PIXELS)], LABELS),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_log_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    make_model, data, given = CASES[case]
    given = {**given, "eval_dataset": data[:16]} if given.get("eval_dataset") == "of training" else given
    theirs, ours, expected, found = both(tmp_path, make_model, train_dataset=data, **given)
    same(theirs, ours)
    assert getattr(ours, "seen", None) == getattr(theirs, "seen", None)
    assert found.global_step == expected.global_step
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert found.training_loss == pytest.approx(expected.training_loss, abs=CLOSE)
    assert found.metrics.keys() == expected.metrics.keys()


SCHEDULES: list[tuple[str, Given | None]] = [
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 2}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
    *((kind, None) for kind in ("constant", "constant_with_warmup", "inverse_sqrt")),
    *((kind, {"min_lr_rate": 0.2}) for kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")),
    ("warmup_stable_decay", {"num_decay_steps": 4}),
]


@pytest.mark.parametrize(("kind", "kwargs"), SCHEDULES)
def test_learning_rates_are_those_of_transformers(tmp_path: Path, kind: str, kwargs: Given | None) -> None:
    args = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs, "warmup_steps": 2, "max_steps": 8}
    theirs, ours, *_ = both(tmp_path, Plain, train_dataset=plain_rows(16), logging_steps=1, **args)
    assert rates(ours) == pytest.approx(rates(theirs), rel=1e-9)


def getting_worse(folder: Path, resume: Any = None, **more: Any) -> Any:
    """A trainer whose evaluations are best at step 2 of 4, after train()."""
    args = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5, **more}
    args |= {"max_steps": 4, "eval_dataset": worse_rows(8), **every(2, "eval", "save")}
    return trained_plain(folder, 16, resume, **args)


def evaluations(trainer: Any) -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]


def test_best_weights_are_evaluated_once_also_where_another_sitting_ends_the_run(tmp_path: Path) -> None:
    whole = getting_worse(tmp_path)
    folder = Path(whole.state.best_model_checkpoint)
    assert folder == tmp_path / "checkpoint-2"
    weights = load_file(folder / "model.safetensors")
    torch.testing.assert_close(weights, dict(whole.model.state_dict()), rtol=0, atol=0)  # it went back to the best
    assert whole.evaluate()["eval_loss"] == whole.state.best_metric
    whole.state.log_history.pop()
    (first_step, best), (last_step, _) = evaluations(whole)
    assert (first_step, last_step) == (2, 4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["loss"]) for line in lines if line["split"] in ("eval", "eval_final")]
    assert found[-1] == (4, best)  # of the best weights, where the run ended
    again = getting_worse(tmp_path, str(tmp_path / "checkpoints" / "step-00000004"))
    assert evaluations(again)[-1][0] == 4
    assert (4, best) not in evaluations(again)
    assert difference(again.model, whole.model) == 0


def test_what_was_evaluated_after_the_step_that_a_rollback_goes_to_is_evaluated_again(
    tmp_path: Path, monkeypatch: Any
) -> None:
    flows: list[Flow] = []

    class Seen(Flow):
        def begin(self, run: Any) -> None:
            flows.append(self)
            super().begin(run)

    monkeypatch.setattr("accel_train.hf.training.Flow", Seen)
    trainer = getting_worse(tmp_path, load_best_model_at_end=False)
    for to_step, num_evaluations in ((4, 2), (2, 3)):
        flows[0].on_event("rollback", 4, "back", to_step=to_step)
        flows[0].evaluate()
        assert len(evaluations(trainer)) == num_evaluations


def noisy(samples: list[Given]) -> dict[str, torch.Tensor]:
    """A collator that draws from all generators of its process."""
    features = torch.stack([sample["features"] for sample in samples])
    noise = torch.rand(features.shape) + torch.from_numpy(np.random.rand(8)).float() + random.random()
    return {"features": features + noise, "labels": torch.tensor([sample["labels"] for sample in samples])}


RESUMED: dict[str, tuple[Any, Any, Given]] = {
    "evaluations": (bert, rows(45), {"eval_dataset": rows(16, seed=2), **every(4, "eval", "save")}),
    "stream": (bert, Stream(rows(45)), {"max_steps": 6, "gradient_accumulation_steps": 2}),
    "collator": (Plain, plain_rows(24), {"max_steps": 6, "data_collator": noisy}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resume_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    make_model, data, given = RESUMED[case]
    args = {**every(4, "save"), **given}
    whole = trained(tmp_path, make_model(), data, **args)
    for workers in (0, 1) if case == "collator" else (0,):
        again = made(tmp_path, make_model(seed=3), data, **args, dataloader_num_workers=workers)
        capsys.readouterr()
        result = again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # a link to step-00000004
        is_told = "train_dataset is read in order: reading 4 steps again" in capsys.readouterr().out
        assert is_told == (case == "stream")
        assert difference(whole.model, again.model) == 0
        assert result.global_step == whole.state.global_step
        assert result.metrics["train_samples_per_second"] > 0
        assert history(again)[:-1] == history(whole)[:-1]  # the last line is the mean loss of each call
    if case == "evaluations":
        last = trained(tmp_path, make_model(), data, True, **args)
        assert last.state.global_step == 12, "nothing is left to do"


def test_checkpoints_are_where_transformers_looks_for_them(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "model.safetensors").exists())

    def run(steps: int, resume: Any = None, **more: Any) -> Any:
        args = {**every(2, "save"), "max_steps": steps, "save_total_limit": 2, "callbacks": [Look()], **more}
        return trained(tmp_path, bert(), rows(32), resume, **args)

    first = run(6)
    assert seen == [True, True, True]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    newest = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
    assert newest == str(tmp_path / "checkpoint-6")
    assert difference(Classifier.from_pretrained(newest), first.model) == 0
    longer = run(8, newest)
    assert [line["step"] for line in history(longer) if "loss" in line][-1] == longer.state.global_step == 8
    run(2, save_strategy="no")  # anew: what was there is archived
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("limit", [None, 1, 2, 3])
@pytest.mark.parametrize("losses", [(3, 2, 1, 4, 5), (5, 4, 3, 2, 1), (1, 2, 3, 4, 5), (2, 5, 1, 4, 3)])
@pytest.mark.parametrize("strategy", ["best", "steps"])
def test_checkpoints_that_are_left_are_those_of_transformers(
    tmp_path: Path, strategy: str, losses: tuple[int, ...], limit: int | None
) -> None:
    class Scripted:
        def evaluate(self: Any, *_: Any, **__: Any) -> dict[str, float]:
            metrics = {"eval_loss": float(losses[self.state.global_step // 2 - 1])}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    args = {"max_steps": 11, "save_strategy": strategy, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    args |= {"metric_for_best_model": "loss", "greater_is_better": False, "save_total_limit": limit}
    args |= {"load_best_model_at_end": strategy == "steps"}
    data = plain_rows(16)
    both(tmp_path, Plain, overrides=Scripted, args=args, train_dataset=data, eval_dataset=data[:4])
    theirs, ours = ({path.name for path in (tmp_path / name).glob("checkpoint-*")} for name in ("theirs", "ours"))
    assert ours == theirs


def test_what_has_the_name_of_a_checkpoint_already_is_left_alone(tmp_path: Path, capsys: Any) -> None:
    theirs = tmp_path / "checkpoint-2"
    theirs.mkdir()
    (theirs / "weights").write_text("of another program")
    trained_plain(tmp_path, 16, max_steps=4, **every(2, "save"))
    assert (theirs / "weights").read_text() == "of another program"
    assert (tmp_path / "checkpoint-4").resolve() == (tmp_path / "checkpoints" / "step-00000004").resolve()
    assert f"{theirs} already exists" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_finished_run_is_resumed_for_more_epochs(tmp_path: Path, schedule: str) -> None:
    args = {"learning_rate": 1e-2, "lr_scheduler_type": schedule, "save_strategy": "epoch"}
    for epochs in (1, 2):
        theirs, ours = (
            trained_plain(tmp_path / name, 45, epochs > 1, kind=kind, num_train_epochs=epochs, **args)
            for name, kind in zip(("theirs", "ours"), KINDS, strict=True)
        )
    assert ours.state.global_step == theirs.state.global_step == 12
    assert rates(ours) == pytest.approx(rates(theirs), rel=1e-9)
    # After a linear schedule, theirs takes the first step with the last rate of the first run, which is 0.
    assert schedule == "linear" or difference(ours.model, theirs.model) < CLOSE


def test_going_on_without_a_checkpoint_is_refused_and_starting_anew_keeps_what_was_there(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", Plain(), plain_rows(16), max_steps=2, learning_rate=0.1)
    error = refused(lambda: trainer.train(resume_from_checkpoint=True), "resume_from_checkpoint")
    assert str(tmp_path / "run") in error.problem
    first = trainer.train().training_loss
    assert trainer.train().training_loss < first, "a second train() goes on from the weights of the first"
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "step-00000002").is_dir()


def test_model_init_makes_a_new_model_for_each_train(tmp_path: Path) -> None:
    trainer = made(tmp_path, None, plain_rows(16), model_init=Plain, max_steps=2)
    assert trainer.train().training_loss == trainer.train().training_loss


def test_the_guard_stops_a_run_that_only_gives_nan(tmp_path: Path) -> None:
    data = [{**row, "features": row["features"] * float("nan")} for row in plain_rows(64)]
    with raises_golden(TrainingStopped):
        trained(tmp_path, Plain(), data)


# Data


@pytest.mark.parametrize("kind", ["datasets", "columns", "stream"])
def test_data_sets_of_all_kinds_train_the_same(tmp_path: Path, kind: str) -> None:
    data = rows(24)
    columns = {name: torch.stack([torch.as_tensor(row[name]) for row in data]) for name in data[0]}
    table = datasets.Dataset.from_dict({**{k: v.tolist() for k, v in columns.items()}, "text": ["unused"] * 24})
    given = {"datasets": table, "columns": columns, "stream": Stream(data)}[kind]
    args = {"max_steps": 4, "train_sampling_strategy": "sequential"}
    theirs = trained(tmp_path / "theirs", bert(), data, kind=transformers.Trainer, **args)
    ours = trained(tmp_path / "ours", bert(), given, **args)
    assert difference(theirs.model, ours.model) < CLOSE
    assert ours.state.epoch == pytest.approx(4 / 3 if kind != "stream" else 1.0)


def test_data_that_cannot_be_trained_on_are_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path, Plain(), [{**row, "text": "unused"} for row in plain_rows(16)], max_steps=1)
    table = datasets.Dataset.from_dict({"text": ["a"] * 8})
    error = refused(lambda: trained(tmp_path, Plain(), table, max_steps=1), "remove_unused_columns")
    assert "(text)" in error.problem
    refused(lambda: trained(tmp_path, bert(), Stream(rows(8))), "train_dataset", "max_steps")


def test_batches_of_like_length_have_less_padding(tmp_path: Path) -> None:
    spreads = {"random": [], "group_by_length": []}
    for strategy, seen in spreads.items():

        def collate(samples: list[Any], seen: list[int] = seen) -> Any:
            lengths = [len(sample["input_ids"]) for sample in samples]
            seen.append(max(lengths) - min(lengths))
            return pad(samples)

        args = {"max_steps": 8, "train_sampling_strategy": strategy, "data_collator": collate}
        trained(tmp_path / strategy, token_bert(), token_rows(64), **args)
    assert np.mean(spreads["group_by_length"]) < np.mean(spreads["random"]) / 2


def test_noise_on_embeddings_is_that_of_transformers_and_ends_with_train(tmp_path: Path) -> None:
    trainer = made(tmp_path, bert(), rows(24), neftune_noise_alpha=5.0, max_steps=2)
    embeddings = trainer.model.get_input_embeddings()
    seen = []
    embeddings.register_forward_hook(lambda *_: seen.append(len(embeddings._forward_hooks)))
    trainer.train()
    assert set(seen) == {2}
    assert len(embeddings._forward_hooks) == 1
    assert difference(trainer.model, trained(tmp_path / "plain", bert(), rows(24), max_steps=2).model) > 0
    error = refused(lambda: trained_plain(tmp_path, 8, neftune_noise_alpha=5.0), "neftune_noise_alpha")
    assert "Plain" in error.problem


def test_a_model_that_overflows_is_named_module_by_module_where_it_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    model = bert()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="DebugUnderflowOverflow"):
        trained(tmp_path, model, rows(24), debug="underflow_overflow")
    assert "Detected inf/nan" in capsys.readouterr().out


# Files


def test_everything_that_is_saved_can_be_loaded(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", bert(), rows(24), **every(3, "save"))
    result = trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    trainer.log_metrics("train", result.metrics)
    for folder in (tmp_path / "saved", tmp_path / "run" / "model", get_last_checkpoint(tmp_path / "run")):
        assert difference(Classifier.from_pretrained(folder), trainer.model) == 0
    state = load_object(tmp_path / "run" / "trainer_state.json")
    assert state["global_step"] == 6
    assert state["log_history"] == trainer.state.log_history
    assert load_object(tmp_path / "run" / "train_results.json")["train_loss"] == result.training_loss
    trainer.create_model_card(model_name="tiny", tags="test")
    assert "tiny" in (tmp_path / "run" / "README.md").read_text()


def test_pushing_without_a_hub_says_what_to_do_and_keeps_what_was_trained(tmp_path: Path) -> None:
    refused(lambda: made(tmp_path, Plain(), push_to_hub=True, hub_token="hf_secret"), "push_to_hub")
    error = refused(made(tmp_path, Plain()).push_to_hub, "push_to_hub")
    assert "hf auth login" in error.remedy
    assert "hf_secret" not in str(error)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("end", [None]),
        ("every_save", [None, None, None]),
        ("checkpoint", [None, "last-checkpoint", None, "last-checkpoint", None]),
        ("all_checkpoints", [None, "checkpoint-2", None, "checkpoint-4", None]),
    ],
)
def test_saves_are_pushed_as_the_strategy_says(
    tmp_path: Path, monkeypatch: Any, strategy: str, expected: list[str | None]
) -> None:
    uploads = record_uploads(monkeypatch, "hf_secret")
    args = {"push_to_hub": True, "hub_strategy": strategy, "hub_token": "hf_secret", "max_steps": 4}
    trained(tmp_path / "tiny", bert(), rows(16), **args, **every(2, "save")).push_to_hub()
    assert [upload["path_in_repo"] for upload in uploads] == expected
    assert {upload["repo_id"] for upload in uploads} == {"someone/tiny"}
    assert "checkpoints/*" in uploads[-1]["ignore_patterns"]
    assert "hf_secret" not in "".join(path.read_text() for path in (tmp_path / "tiny").rglob("*.json"))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_of_an_adapter_run_the_adapter_alone_is_pushed_and_a_checkpoint_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: Any, strategy: str
) -> None:
    uploads = record_uploads(monkeypatch)
    args = {"max_steps": 4, "optim": "adamw_torch", **every(2, "save")}
    pushed = {"push_to_hub": True, "hub_strategy": strategy, **args}
    whole = trained(tmp_path / "tiny", adapted(), rows(16), **pushed)
    whole.push_to_hub()
    assert len(uploads) == 5
    for upload in uploads:
        names = {*upload["files"]}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= names
        assert not names & {"model.safetensors", "pytorch_model.bin"}
        if upload["path_in_repo"] is None:
            assert {name for name in names if name.endswith((".safetensors", ".bin"))} == {"adapter_model.safetensors"}
    (first, _) = (upload for upload in uploads if upload["path_in_repo"] is not None)
    folder = tmp_path / "downloaded" / "checkpoint-2"
    for name, content in first["content"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    again = trained(tmp_path / "again", adapted(), rows(16), str(folder), **args)
    torch.testing.assert_close(dict(again.model.state_dict()), dict(whole.model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("own", [False, True])
def test_a_changed_learning_rate_is_an_event_of_a_resume_and_nothing_else_is(tmp_path: Path, own: bool) -> None:
    for rate, resume in ((0.01, None), (0.01, tmp_path / "checkpoint-2"), (0.02, tmp_path / "checkpoint-2")):
        model = Plain()
        given = {"optimizers": (torch.optim.SGD(model.parameters(), lr=rate), None)} if own else {}
        args = {"max_steps": 3, "learning_rate": rate, **every(2, "save"), **given}
        trained(tmp_path, model, plain_rows(16), resume and str(resume), **args)
    [found] = events(tmp_path, "settings_changed")
    assert (found["setting"], found["was"], found["now"]) == ("optimizer.learning_rate", 0.01, 0.02)
    assert_golden(found["message"])


class _Contrast:
    """Overrides the loss by one of matrix products of the outputs, which autocast would round."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        unit = torch.nn.functional.normalize(outputs.logits, dim=-1)
        weights = (labels[:, None] == labels[None]).float() - 0.5
        loss = -(weights * (unit @ unit.T)).mean() + torch.nn.functional.cross_entropy(outputs.logits, labels)
        self.seen = outputs.logits.dtype
        return (loss, outputs) if return_outputs else loss


def _squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    targets = torch.nn.functional.one_hot(labels, outputs.logits.shape[-1]).to(outputs.logits.dtype)
    return torch.einsum("nc,nc->", outputs.logits - targets, outputs.logits - targets) / num_items_in_batch


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (object, {}),
        (object, {"label_smoothing_factor": 0.1}),
        (object, {"compute_loss_func": _squares}),
        (_Contrast, {}),
    ],
    ids=["the model's loss", "label smoothing", "a loss function", "an overridden loss"],
)
def test_losses_in_bf16_are_those_of_transformers(tmp_path: Path, overrides: type, given: Given) -> None:
    data = rows(32)
    args = {"bf16": True, **every(1, "logging"), **every(4, "eval")}
    theirs, ours, *_ = both(
        tmp_path, overrides=overrides, args=args, train_dataset=data, eval_dataset=data[:8], **given
    )
    for one, other in zip(history(theirs), history(ours), strict=True):
        for name in ("loss", "eval_loss"):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=1e-5)
    if overrides is _Contrast:
        assert theirs.seen == ours.seen == torch.float32
