"""accel_train.Trainer held to transformers.Trainer, in one process: the same arguments and data, the same weights, log,
metrics, and checkpoints.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import (
    AutoModelForSequenceClassification,
    BertForQuestionAnswering,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from accel_train.core.errors import TrainingStopped
from accel_train.hf import get_last_checkpoint
from accel_train.hf.callbacks import Flow
from tests.support import hf_models as hf

SCHEDULES: list[tuple[str, dict[str, Any] | None]] = [
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 2}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
    ("constant", None),
    ("constant_with_warmup", None),
    ("inverse_sqrt", None),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 4}),
]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"gradient_accumulation_steps": 3, "warmup_steps": 2, "lr_scheduler_type": "cosine"},
        {"max_steps": 7, "weight_decay": 0.1, "warmup_steps": 0.3, "max_grad_norm": 0.05},
        {"num_train_epochs": 2.5, "optim": "sgd", "learning_rate": 0.1, "logging_strategy": "epoch", "data_seed": 5},
        {"optim": "adamw_bnb_8bit", "warmup_steps": 2, "weight_decay": 0.1},
        {"dataloader_drop_last": True, "train_sampling_strategy": "sequential", "logging_first_step": True},
        {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.0, "logging_steps": 0.3, "seed": 3},
    ],
    ids=lambda args: ",".join(args) or "defaults",
)
def test_weights_and_log_are_those_of_transformers(tmp_path: Path, args: dict[str, Any]) -> None:
    # Under accumulation, theirs weighs a short micro-batch as much as a full one.
    data = hf.plain_rows(48 if "gradient_accumulation_steps" in args else 45)
    theirs, ours, expected, found = hf.both(
        tmp_path, hf.Plain, train_dataset=data, args={"learning_rate": 1e-2, **args}
    )
    hf.same(theirs, ours)
    assert found.global_step == expected.global_step
    assert found.training_loss == pytest.approx(expected.training_loss, abs=hf.CLOSE)
    assert found.metrics.keys() == expected.metrics.keys()


@pytest.mark.parametrize(("kind", "kwargs"), SCHEDULES)
def test_learning_rates_are_those_of_transformers(tmp_path: Path, kind: str, kwargs: dict[str, Any] | None) -> None:
    args = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs, "warmup_steps": 2, "max_steps": 8}
    theirs, ours, *_ = hf.both(tmp_path, hf.Plain, train_dataset=hf.plain_rows(16), logging_steps=1, **args)
    assert hf.rates(ours) == pytest.approx(hf.rates(theirs), rel=1e-9)


def test_evaluations_and_best_model_are_those_of_transformers(tmp_path: Path) -> None:
    args = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 5e-3}
    data = {"train_dataset": hf.rows(45), "eval_dataset": hf.rows(24, seed=2), "compute_metrics": hf.accuracy}
    theirs, ours, *_ = hf.both(
        tmp_path, **args, **data, **hf.every(4, "eval", "save"), num_train_epochs=3, weight_decay=0.1
    )
    hf.same(theirs, ours)  # both went back to the best
    assert ours.state.best_metric == theirs.state.best_metric
    assert ours.state.best_global_step == theirs.state.best_global_step
    best = ours.state.best_model_checkpoint
    assert Path(best) == tmp_path / "ours" / f"checkpoint-{ours.state.best_global_step}"
    assert hf.difference(AutoModelForSequenceClassification.from_pretrained(best), ours.model) == 0
    assert ours.evaluate()["eval_accuracy"] == ours.state.best_metric


def getting_worse(folder: Path, resume: Any = None, **more: Any) -> Any:
    """A trainer whose evaluations are best at step 2 of 4, after train()."""
    args = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5, **more}
    worse = [{**row, "labels": 2} for row in hf.plain_rows(8)]
    args |= {"max_steps": 4, "eval_dataset": worse, **hf.every(2, "eval", "save")}
    return hf.trained(folder, hf.Plain(), hf.plain_rows(16), resume, **args)


def evaluations(trainer: Any) -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]


def test_best_weights_are_evaluated_once_also_where_another_sitting_ends_the_run(tmp_path: Path) -> None:
    whole = getting_worse(tmp_path)
    (first_step, best), (last_step, _) = evaluations(whole)
    assert (first_step, last_step) == (2, 4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["loss"]) for line in lines if line["split"] in ("eval", "eval_final")]
    assert found[-1] == (4, best)  # of the best weights, where the run ended
    again = getting_worse(tmp_path, str(tmp_path / "checkpoints" / "step-00000004"))
    assert evaluations(again)[-1][0] == 4
    assert (4, best) not in evaluations(again)
    assert hf.difference(again.model, whole.model) == 0


def test_what_was_evaluated_after_the_step_that_a_rollback_goes_to_is_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_resume_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    args = {"eval_dataset": hf.rows(16, seed=2), **hf.every(4, "eval", "save")}
    whole = hf.trained(tmp_path, hf.bert(), hf.rows(45), **args)
    again = hf.made(tmp_path, hf.bert(), hf.rows(45), **args)
    result = again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))  # a link to checkpoints/step-00000008
    assert hf.difference(whole.model, again.model) == 0
    assert result.global_step == whole.state.global_step == 12
    assert result.metrics["train_samples_per_second"] > 0
    assert hf.history(again)[:-1] == hf.history(whole)[:-1]  # the last line is the mean loss of each call
    last = hf.trained(tmp_path, hf.bert(), hf.rows(45), True, **args)
    assert last.state.global_step == 12  # nothing left to do


def test_checkpoints_are_where_transformers_looks_for_them(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "model.safetensors").exists())

    def run(steps: int, resume: Any = None, **more: Any) -> Any:
        args = {**hf.every(2, "save"), "max_steps": steps, "save_total_limit": 2, "callbacks": [Look()], **more}
        return hf.trained(tmp_path, hf.bert(), hf.rows(32), resume, **args)

    first = run(6)
    assert seen == [True, True, True]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    newest = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
    assert newest == str(tmp_path / "checkpoint-6")
    assert hf.difference(AutoModelForSequenceClassification.from_pretrained(newest), first.model) == 0
    longer = run(8, newest)
    assert [line["step"] for line in hf.history(longer) if "loss" in line][-1] == longer.state.global_step == 8
    run(2, save_strategy="no")  # anew: what was there is archived
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_what_has_the_name_of_a_checkpoint_already_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "checkpoint-2"
    theirs.mkdir()
    (theirs / "weights").write_text("of another program")
    hf.trained(tmp_path, hf.Plain(), hf.plain_rows(16), max_steps=4, **hf.every(2, "save"))
    assert (theirs / "weights").read_text() == "of another program"
    assert (tmp_path / "checkpoint-4").resolve() == (tmp_path / "checkpoints" / "step-00000004").resolve()
    assert f"{theirs} already exists" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_finished_run_is_resumed_for_more_epochs(tmp_path: Path, schedule: str) -> None:
    args = {"learning_rate": 1e-2, "lr_scheduler_type": schedule, "save_strategy": "epoch"}
    for epochs in (1, 2):
        theirs, ours = (
            hf.trained(
                tmp_path / name, hf.Plain(), hf.plain_rows(45), epochs > 1, kind=kind, num_train_epochs=epochs, **args
            )
            for name, kind in zip(("theirs", "ours"), hf.KINDS, strict=True)
        )
    assert ours.state.global_step == theirs.state.global_step == 12
    assert hf.rates(ours) == pytest.approx(hf.rates(theirs), rel=1e-9)
    # After a linear schedule, theirs takes the first step with the last rate of the first run, which is 0.
    assert schedule == "linear" or hf.difference(ours.model, theirs.model) < hf.CLOSE


def test_going_on_without_a_checkpoint_is_refused_and_starting_anew_keeps_what_was_there(tmp_path: Path) -> None:
    trainer = hf.made(tmp_path / "run", hf.Plain(), hf.plain_rows(16), max_steps=2, learning_rate=0.1)
    error = hf.refused(lambda: trainer.train(resume_from_checkpoint=True), "resume_from_checkpoint")
    assert str(tmp_path / "run") in error.problem
    first = trainer.train().training_loss
    assert trainer.train().training_loss < first, "a second train() goes on from the weights of the first"
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "step-00000002").is_dir()


def test_model_init_makes_a_new_model_for_each_train(tmp_path: Path) -> None:
    trainer = hf.made(tmp_path, None, hf.plain_rows(16), model_init=hf.Plain, max_steps=2)
    assert trainer.train().training_loss == trainer.train().training_loss


def test_the_guard_stops_a_run_that_only_gives_nan(tmp_path: Path) -> None:
    data = [{**row, "features": row["features"] * float("nan")} for row in hf.plain_rows(64)]
    with pytest.raises(TrainingStopped, match="in a row"):
        hf.trained(tmp_path, hf.Plain(), data)


# Data


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


@pytest.mark.parametrize("kind", ["datasets", "columns", "stream"])
def test_data_sets_of_all_kinds_train_the_same(tmp_path: Path, kind: str) -> None:
    data = hf.rows(24)
    columns = {name: torch.stack([torch.as_tensor(row[name]) for row in data]) for name in data[0]}
    table = datasets.Dataset.from_dict({**{k: v.tolist() for k, v in columns.items()}, "text": ["unused"] * 24})
    given = {"datasets": table, "columns": columns, "stream": Stream(data)}[kind]
    args = {"max_steps": 4, "train_sampling_strategy": "sequential"}
    theirs = hf.trained(tmp_path / "theirs", hf.bert(), data, kind=transformers.Trainer, **args)
    ours = hf.trained(tmp_path / "ours", hf.bert(), given, **args)
    assert hf.difference(theirs.model, ours.model) < hf.CLOSE
    assert ours.state.epoch == pytest.approx(4 / 3 if kind != "stream" else 1.0)


def test_a_stream_is_resumed_by_reading_to_its_place(tmp_path: Path) -> None:
    args = {"max_steps": 5, "gradient_accumulation_steps": 2, **hf.every(3, "save")}
    whole, again = (
        hf.trained(tmp_path, hf.bert(), Stream(hf.rows(45)), resume, **args)
        for resume in (None, str(tmp_path / "checkpoint-3"))
    )
    assert hf.difference(whole.model, again.model) == 0


def test_an_overridden_train_dataloader_is_what_is_trained_on(tmp_path: Path) -> None:
    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        data = self.train_dataset
        return DataLoader(data, batch_size=5, sampler=SequentialSampler(data), collate_fn=self.data_collator)

    kinds = tuple(type("Own", (base,), {"get_train_dataloader": get_train_dataloader}) for base in hf.KINDS)
    theirs, ours, *_ = hf.both(
        tmp_path, hf.Plain, kinds, train_dataset=hf.plain_rows(30), gradient_accumulation_steps=2
    )
    hf.same(theirs, ours)
    assert ours.state.global_step == theirs.state.global_step == 6


def test_data_that_cannot_be_trained_on_are_refused_by_name(tmp_path: Path) -> None:
    hf.trained(tmp_path, hf.Plain(), [{**row, "text": "unused"} for row in hf.plain_rows(16)], max_steps=1)
    table = datasets.Dataset.from_dict({"text": ["a"] * 8})
    error = hf.refused(lambda: hf.trained(tmp_path, hf.Plain(), table, max_steps=1), "remove_unused_columns")
    assert "(text)" in error.problem
    hf.refused(lambda: hf.trained(tmp_path, hf.bert(), Stream(hf.rows(8))), "train_dataset", "max_steps")


def test_batches_of_like_length_have_less_padding(tmp_path: Path) -> None:
    spreads: dict[str, list[int]] = {"random": [], "group_by_length": []}
    for strategy, seen in spreads.items():

        def collate(samples: list[Any], seen: list[int] = seen) -> Any:
            lengths = [len(sample["input_ids"]) for sample in samples]
            seen.append(max(lengths) - min(lengths))
            return hf.pad(samples)

        args = {"max_steps": 8, "train_sampling_strategy": strategy, "data_collator": collate}
        hf.trained(tmp_path / strategy, hf.token_bert(), hf.token_rows(64), **args)
    assert np.mean(spreads["group_by_length"]) < np.mean(spreads["random"]) / 2


# Loss


def test_token_losses_over_accumulation_are_those_of_transformers(tmp_path: Path) -> None:
    """Both divide the summed loss by the targets of the whole step: ragged micro-batches and short steps included."""
    data = [{"input_ids": row["input_ids"], "labels": [-100, *row["input_ids"][1:]]} for row in hf.token_rows(42)]
    args = {"gradient_accumulation_steps": 2, "learning_rate": 3e-3, "eval_strategy": "epoch", "data_collator": hf.pad}
    theirs, ours, *_ = hf.both(tmp_path, hf.llama, train_dataset=data, eval_dataset=data[:8], **args)
    hf.same(theirs, ours)


def test_an_overridden_compute_loss_is_used_and_weighs_targets(tmp_path: Path) -> None:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs[0], labels, label_smoothing=0.3)
        return (loss, outputs) if return_outputs else loss

    kinds = tuple(type("Own", (base,), {"compute_loss": compute_loss}) for base in hf.KINDS)
    data = {"train_dataset": hf.plain_rows(45), "eval_dataset": hf.plain_rows(16)}
    theirs, ours, *_ = hf.both(tmp_path, hf.Plain, kinds, eval_strategy="epoch", **data)
    hf.same(theirs, ours)


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    flat = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return flat / num_items_in_batch


@pytest.mark.parametrize("given", [{"compute_loss_func": summed}, {"label_smoothing_factor": 0.2}], ids=str)
def test_other_losses_are_those_of_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    args = {"gradient_accumulation_steps": 2, "data_collator": hf.pad, **given}
    theirs, ours, *_ = hf.both(tmp_path, hf.token_bert, train_dataset=hf.token_rows(42), **args)
    hf.same(theirs, ours)


def regression() -> tuple[Any, list[Any]]:
    return hf.bert(num_labels=1), [{**row, "labels": float(row["labels"])} for row in hf.rows(24)]


def multi_label() -> tuple[Any, list[Any]]:
    model = hf.bert(problem_type="multi_label_classification")
    return model, [{**row, "labels": torch.eye(3)[row["labels"]]} for row in hf.rows(24)]


def question_answering() -> tuple[Any, list[Any]]:
    data = [
        {"input_ids": row["input_ids"], "start_positions": row["labels"], "end_positions": 5} for row in hf.rows(24)
    ]
    return hf.bert(BertForQuestionAnswering, num_labels=2), data


def images() -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "image_size": 16, "patch_size": 8, "num_labels": 3}
    pixels = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    model = ViTForImageClassification(ViTConfig(hidden_dropout_prob=0.0, **sizes))
    return model, [{"pixel_values": one, "label": i % 3} for i, one in enumerate(pixels)]


@pytest.mark.parametrize("kind", [regression, multi_label, question_answering, images])
def test_other_kinds_of_labels_are_trained_and_evaluated_as_in_transformers(tmp_path: Path, kind: Any) -> None:
    _, data = kind()
    # The clip rounds otherwise, which Adam makes visible in biases of attention keys, whose gradient is 0.
    args = {"eval_on_start": True, "eval_delay": 2, "dataloader_num_workers": 1, "max_grad_norm": 100.0}
    args |= {"logging_first_step": True, "max_steps": 4, **hf.every(3, "eval")}
    theirs, ours, *_ = hf.both(tmp_path, lambda: kind()[0], train_dataset=data, eval_dataset=data[:16], **args)
    hf.same(theirs, ours)


def test_smoothing_labels_that_are_several_at_once_is_refused(tmp_path: Path) -> None:
    model = hf.bert(problem_type="multi_label_classification")
    hf.refused(lambda: hf.made(tmp_path, model, label_smoothing_factor=0.1), "label_smoothing_factor")


def test_noise_on_embeddings_is_that_of_transformers_and_ends_with_train(tmp_path: Path) -> None:
    trainer = hf.made(tmp_path, hf.bert(), hf.rows(24), neftune_noise_alpha=5.0, max_steps=2)
    embeddings = trainer.model.get_input_embeddings()
    seen = []
    embeddings.register_forward_hook(lambda *_: seen.append(len(embeddings._forward_hooks)))
    trainer.train()
    assert set(seen) == {2}
    assert len(embeddings._forward_hooks) == 1
    assert hf.difference(trainer.model, hf.trained(tmp_path / "plain", hf.bert(), hf.rows(24), max_steps=2).model) > 0
    error = hf.refused(
        lambda: hf.trained(tmp_path, hf.Plain(), hf.plain_rows(8), neftune_noise_alpha=5.0), "neftune_noise_alpha"
    )
    assert "Plain" in error.problem


def test_a_model_that_overflows_is_named_module_by_module_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = hf.bert()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="DebugUnderflowOverflow"):
        hf.trained(tmp_path, model, hf.rows(24), debug="underflow_overflow")
    assert "Detected inf/nan" in capsys.readouterr().out


# Files


def test_everything_that_is_saved_can_be_loaded(tmp_path: Path) -> None:
    trainer = hf.made(tmp_path / "run", hf.bert(), hf.rows(24), **hf.every(3, "save"))
    result = trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    trainer.log_metrics("train", result.metrics)
    for folder in (tmp_path / "saved", tmp_path / "run" / "model", get_last_checkpoint(tmp_path / "run")):
        assert hf.difference(AutoModelForSequenceClassification.from_pretrained(folder), trainer.model) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert state["log_history"] == trainer.state.log_history
    assert json.loads((tmp_path / "run" / "train_results.json").read_text())["train_loss"] == result.training_loss
    trainer.create_model_card(model_name="tiny", tags="test")
    assert "tiny" in (tmp_path / "run" / "README.md").read_text()


def test_pushing_without_a_hub_says_what_to_do_and_keeps_what_was_trained(tmp_path: Path) -> None:
    hf.refused(lambda: hf.made(tmp_path, hf.Plain(), push_to_hub=True, hub_token="hf_secret"), "push_to_hub")
    error = hf.refused(hf.made(tmp_path, hf.Plain()).push_to_hub, "push_to_hub")
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, expected: list[str | None]
) -> None:
    uploads: list[dict[str, Any]] = []

    class Hub:
        def __init__(self, token: str | None) -> None:
            assert token == "hf_secret"

        def create_repo(self, name: str, **settings: Any) -> Any:
            return SimpleNamespace(repo_id=f"someone/{name}")

        def upload_folder(self, **what: Any) -> Any:
            uploads.append(what)
            return SimpleNamespace(done=lambda: True, result=lambda: None)

    monkeypatch.setattr("accel_train.hf.hub.HfApi", Hub)
    args = {"push_to_hub": True, "hub_strategy": strategy, "hub_token": "hf_secret", "max_steps": 4}
    hf.trained(tmp_path / "tiny", hf.bert(), hf.rows(16), **args, **hf.every(2, "save")).push_to_hub()
    assert [upload["path_in_repo"] for upload in uploads] == expected
    assert {upload["repo_id"] for upload in uploads} == {"someone/tiny"}
    assert "checkpoints/*" in uploads[-1]["ignore_patterns"]
    assert "hf_secret" not in "".join(path.read_text() for path in (tmp_path / "tiny").rglob("*.json"))


@pytest.mark.parametrize("own", [False, True])
def test_a_changed_learning_rate_is_an_event_of_a_resume_and_nothing_else_is(tmp_path: Path, own: bool) -> None:
    for rate, resume in ((0.01, None), (0.01, tmp_path / "checkpoint-2"), (0.02, tmp_path / "checkpoint-2")):
        model = hf.Plain()
        given = {"optimizers": (torch.optim.SGD(model.parameters(), lr=rate), None)} if own else {}
        args = {"max_steps": 3, "learning_rate": rate, **hf.every(2, "save"), **given}
        hf.trained(tmp_path, model, hf.plain_rows(16), resume and str(resume), **args)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [found] = [line for line in lines if line["event"] == "settings_changed"]
    assert (found["setting"], found["was"], found["now"]) == ("optimizer.learning_rate", 0.01, 0.02)
    assert ("the program's own optimizer" in found["message"]) == own
