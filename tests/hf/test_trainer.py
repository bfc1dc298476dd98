"""accel_train.Trainer held to transformers.Trainer, in one process: the same arguments and data, the same weights, log
and metrics.
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
    EarlyStoppingCallback,
    EvalPrediction,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.trainer_callback import ExportableState

import accel_train
from accel_train.core.errors import TrainingStopped
from accel_train.hf import Trainer, get_last_checkpoint
from accel_train.hf.callbacks import Flow
from tests.support.hf_models import (
    Plain,
    arguments,
    bert,
    both,
    difference,
    history,
    llama,
    pad,
    plain_rows,
    rows,
    token_bert,
    token_rows,
)
from tests.support.optimizers import KeepsLists, Momentum

CLOSE = 1e-5


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the report takes longer than everything else here together."""
    monkeypatch.setattr("accel_train.training.finish.write_report", lambda runs: runs[0] / "report.html")


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean()), "count": len(found.label_ids)}


def same_log(theirs: Any, ours: Any) -> None:
    assert [sorted(line) for line in history(theirs)] == [sorted(line) for line in history(ours)]
    for one, other in zip(history(theirs), history(ours), strict=True):
        assert other == pytest.approx(one, abs=CLOSE)


def test_the_package_exports_the_trainer() -> None:
    assert accel_train.Trainer is Trainer


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
    theirs, ours, expected, found = both(
        tmp_path,
        Plain,
        # Under accumulation, theirs weighs a short micro-batch as much as a full one.
        train_dataset=plain_rows(48 if "gradient_accumulation_steps" in args else 45),
        args={"learning_rate": 1e-2, **args},
    )
    assert difference(theirs.model, ours.model) < CLOSE
    assert found.global_step == expected.global_step
    assert found.training_loss == pytest.approx(expected.training_loss, abs=CLOSE)
    assert found.metrics.keys() == expected.metrics.keys()
    same_log(theirs, ours)


def test_evaluations_and_best_model_are_those_of_transformers(tmp_path: Path) -> None:
    args = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "learning_rate": 5e-3,
        "num_train_epochs": 3,
        "weight_decay": 0.1,
    }
    theirs, ours, *_ = both(
        tmp_path, train_dataset=rows(45), eval_dataset=rows(24, seed=2), compute_metrics=accuracy, args=args
    )
    same_log(theirs, ours)
    assert ours.state.best_metric == theirs.state.best_metric
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert difference(theirs.model, ours.model) < CLOSE  # both went back to the best
    best = ours.state.best_model_checkpoint
    assert Path(best) == tmp_path / "ours" / f"checkpoint-{ours.state.best_global_step}"
    assert difference(AutoModelForSequenceClassification.from_pretrained(best), ours.model) == 0
    assert ours.evaluate()["eval_accuracy"] == ours.state.best_metric


def getting_worse(folder: Path, **more: Any) -> Trainer:
    """A trainer whose evaluations are best at step 2 of 4."""
    args = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    args |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5, **more}
    worse = [{**row, "labels": 2} for row in plain_rows(8)]
    return Trainer(Plain(), arguments(folder, **args), train_dataset=plain_rows(16), eval_dataset=worse)


def test_best_weights_are_evaluated_once_also_where_another_sitting_ends_the_run(tmp_path: Path) -> None:
    whole = getting_worse(tmp_path)
    whole.train()
    logged = [line["eval_loss"] for line in whole.state.log_history if "eval_loss" in line]
    assert [line["step"] for line in whole.state.log_history if "eval_loss" in line] == [2, 4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["loss"]) for line in lines if line["split"] in ("eval", "eval_final")]
    assert found[-1] == (4, logged[0])  # of the best weights, where the run ended
    again = getting_worse(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-00000004"))
    assert [line["step"] for line in again.state.log_history if "eval_loss" in line][-1] == 4
    assert logged[0] not in [
        line["eval_loss"] for line in again.state.log_history[2:] if line["step"] == 4 and "eval_loss" in line
    ]
    assert difference(again.model, whole.model) == 0


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
    trainer.train()
    for to_step, num_evaluations in ((4, 2), (2, 3)):
        flows[0].on_event("rollback", 4, "back", to_step=to_step)
        flows[0].evaluate()
        assert len([line for line in trainer.state.log_history if "eval_loss" in line]) == num_evaluations


def test_token_losses_over_accumulation_are_those_of_transformers(tmp_path: Path) -> None:
    """Both divide the summed loss by the targets of the whole step: ragged micro-batches and short steps included."""
    data = [{"input_ids": row["input_ids"], "labels": [-100, *row["input_ids"][1:]]} for row in token_rows(42)]
    args = {"gradient_accumulation_steps": 2, "learning_rate": 3e-3, "eval_strategy": "epoch"}
    theirs, ours, *_ = both(tmp_path, llama, train_dataset=data, eval_dataset=data[:8], data_collator=pad, args=args)
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        ("linear", None),
        ("cosine", None),
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("constant", None),
        ("constant_with_warmup", None),
        ("inverse_sqrt", None),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}),
        ("warmup_stable_decay", {"num_decay_steps": 4}),
    ],
)
def test_learning_rates_are_those_of_transformers(tmp_path: Path, kind: str, kwargs: dict[str, Any] | None) -> None:
    args = {
        "lr_scheduler_type": kind,
        "lr_scheduler_kwargs": kwargs,
        "warmup_steps": 2,
        "max_steps": 12,
        "logging_steps": 1,
    }
    theirs, ours, expected, found = both(tmp_path, Plain, train_dataset=plain_rows(16), args=args)
    expected, found = ([line["learning_rate"] for line in history(one) if "loss" in line] for one in (theirs, ours))
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_resume_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    setup = {"train_dataset": rows(45), "eval_dataset": rows(16, seed=2)}
    args = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    whole = Trainer(bert(), arguments(tmp_path, **args), **setup)
    whole.train()
    again = Trainer(bert(), arguments(tmp_path, **args), **setup)
    result = again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))  # a link to checkpoints/step-00000008
    assert difference(whole.model, again.model) == 0
    assert result.global_step == whole.state.global_step == 12
    assert result.metrics["train_samples_per_second"] > 0
    assert history(again)[:-1] == history(whole)[:-1]  # the last line is the mean loss of each call
    last = Trainer(bert(), arguments(tmp_path, **args), **setup)
    assert last.train(resume_from_checkpoint=True).global_step == 12  # nothing left to do


def test_checkpoints_are_where_transformers_looks_for_them(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "model.safetensors").exists())

    def trainer(steps: int, **more: Any) -> Trainer:
        args = {"save_strategy": "steps", "save_steps": 2, "max_steps": steps, "save_total_limit": 2, **more}
        return Trainer(bert(), arguments(tmp_path, **args), train_dataset=rows(32), callbacks=[Look()])

    first = trainer(6)
    first.train()
    assert seen == [True, True, True]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    newest = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
    assert newest == str(tmp_path / "checkpoint-6")
    assert difference(AutoModelForSequenceClassification.from_pretrained(newest), first.model) == 0
    longer = trainer(8)
    assert longer.train(resume_from_checkpoint=newest).global_step == 8
    assert [line["step"] for line in history(longer) if "loss" in line][-1] == 8
    trainer(2, save_strategy="no").train()  # anew: what was there is archived
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_what_has_the_name_of_a_checkpoint_already_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "checkpoint-2"
    theirs.mkdir()
    (theirs / "weights").write_text("of another program")
    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    Trainer(Plain(), args, train_dataset=plain_rows(16)).train()
    assert (theirs / "weights").read_text() == "of another program"
    assert (tmp_path / "checkpoint-4").resolve() == (tmp_path / "checkpoints" / "step-00000004").resolve()
    assert f"{theirs} was there before and is left alone" in capsys.readouterr().out


def test_a_run_that_a_callback_stopped_is_trained_to_its_end_without_the_callback(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    data, args = plain_rows(45), {"learning_rate": 1e-2}
    whole = Trainer(Plain(), arguments(tmp_path / "whole", **args), train_dataset=data)
    whole.train()
    folder = tmp_path / "stopped"
    stopped = Trainer(Plain(), arguments(folder, **args), train_dataset=data, callbacks=[Stop()])
    assert stopped.train().global_step == 3
    again = Trainer(Plain(), arguments(folder, **args), train_dataset=data)
    assert again.train(resume_from_checkpoint=True).global_step == whole.state.global_step
    assert difference(again.model, whole.model) == 0


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_finished_run_is_resumed_for_more_epochs(tmp_path: Path, schedule: str) -> None:
    def trained(kind: Any, epochs: int) -> Any:
        args = {"learning_rate": 1e-2, "lr_scheduler_type": schedule, "save_strategy": "epoch"}
        folder = tmp_path / kind.__module__.partition(".")[0]
        trainer = kind(Plain(), arguments(folder, num_train_epochs=epochs, **args), train_dataset=plain_rows(45))
        trainer.train(resume_from_checkpoint=epochs > 1)
        return trainer

    for kind in (transformers.Trainer, Trainer):
        trained(kind, 1)
    theirs, ours = (trained(kind, 2) for kind in (transformers.Trainer, Trainer))
    assert ours.state.global_step == theirs.state.global_step == 12
    rates = [[line["learning_rate"] for line in history(one) if "learning_rate" in line] for one in (theirs, ours)]
    assert rates[1] == pytest.approx(rates[0], rel=1e-9)
    if (
        schedule == "constant"
    ):  # else theirs takes the first step with the rate at which the first run ended, which is 0
        assert difference(ours.model, theirs.model) < CLOSE


def test_going_on_without_a_checkpoint_is_refused_and_starting_anew_keeps_what_was_there(tmp_path: Path) -> None:
    trainer = Trainer(Plain(), arguments(tmp_path / "run", max_steps=2), train_dataset=plain_rows(16))
    with pytest.raises(ValueError, match="resume_from_checkpoint=True: No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    trainer.train()
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "step-00000002").is_dir()


def test_a_second_train_goes_on_from_the_weights_of_the_first(tmp_path: Path) -> None:
    trainer = Trainer(Plain(), arguments(tmp_path, max_steps=3, learning_rate=0.1), train_dataset=plain_rows(16))
    first = trainer.train().training_loss
    assert trainer.train().training_loss < first


def test_model_init_makes_a_new_model_for_each_train(tmp_path: Path) -> None:
    trainer = Trainer(model_init=Plain, args=arguments(tmp_path, max_steps=3), train_dataset=plain_rows(16))
    assert trainer.train().training_loss == trainer.train().training_loss


# Data


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


@pytest.mark.parametrize("kind", ["datasets", "columns", "stream"])
def test_data_sets_of_all_kinds_train_the_same(tmp_path: Path, kind: str) -> None:
    data = rows(24)
    columns = {
        "input_ids": torch.stack([row["input_ids"] for row in data]),
        "attention_mask": torch.stack([row["attention_mask"] for row in data]),
        "labels": torch.tensor([row["labels"] for row in data]),
    }
    table = datasets.Dataset.from_dict({**{k: v.tolist() for k, v in columns.items()}, "text": ["unused"] * 24})
    given = {"datasets": table, "columns": columns, "stream": Stream(data)}[kind]
    args = {"max_steps": 7, "gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential"}
    theirs = transformers.Trainer(bert(), arguments(tmp_path / "theirs", **args), train_dataset=data)
    theirs.train()
    ours = Trainer(bert(), arguments(tmp_path / "ours", **args), train_dataset=given)
    ours.train()
    assert difference(theirs.model, ours.model) < CLOSE
    assert ours.state.epoch == pytest.approx(7 / 3 if kind != "stream" else 1.0)


def test_a_stream_is_resumed_by_reading_to_its_place(tmp_path: Path) -> None:
    args = {"max_steps": 7, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    whole = Trainer(bert(), arguments(tmp_path, **args), train_dataset=Stream(rows(45)))
    whole.train()
    again = Trainer(bert(), arguments(tmp_path, **args), train_dataset=Stream(rows(45)))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-00000004"))
    assert difference(whole.model, again.model) == 0


def test_a_stream_needs_max_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set max_steps"):
        Trainer(bert(), arguments(tmp_path), train_dataset=Stream(rows(8))).train()


def test_an_overridden_train_dataloader_is_what_is_trained_on(tmp_path: Path) -> None:
    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        data = self.train_dataset
        return DataLoader(data, batch_size=5, sampler=SequentialSampler(data), collate_fn=self.data_collator)

    kinds = tuple(
        type("Own", (base,), {"get_train_dataloader": get_train_dataloader}) for base in (transformers.Trainer, Trainer)
    )
    theirs, ours, expected, found = both(
        tmp_path, Plain, kinds, train_dataset=plain_rows(30), args={"gradient_accumulation_steps": 2}
    )
    assert difference(theirs.model, ours.model) < CLOSE
    assert found.global_step == expected.global_step == 6
    same_log(theirs, ours)


def test_columns_that_the_model_does_not_take_never_reach_it(tmp_path: Path) -> None:
    data = [{**row, "text": "unused"} for row in plain_rows(16)]
    Trainer(Plain(), arguments(tmp_path, max_steps=1), train_dataset=data).train()
    table = datasets.Dataset.from_dict({"text": ["a"] * 8})
    with pytest.raises(ValueError, match=r"no column of the data set \(text\)"):
        Trainer(Plain(), arguments(tmp_path, max_steps=1), train_dataset=table).train()


def test_batches_of_like_length_have_less_padding(tmp_path: Path) -> None:
    seen: list[float] = []

    def collate(samples: list[Any]) -> Any:
        lengths = [len(sample["input_ids"]) for sample in samples]
        seen.append(max(lengths) - min(lengths))
        return pad(samples)

    spreads = {}
    for strategy in ("random", "group_by_length"):
        seen.clear()
        args = arguments(tmp_path / strategy, max_steps=8, train_sampling_strategy=strategy)
        Trainer(token_bert(), args, collate, token_rows(64)).train()
        spreads[strategy] = np.mean(seen)
    assert spreads["group_by_length"] < spreads["random"] / 2


# Loss


def test_an_overridden_compute_loss_is_used_and_weighs_targets(tmp_path: Path) -> None:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs[0], labels, label_smoothing=0.3)
        return (loss, outputs) if return_outputs else loss

    kinds = tuple(type("Own", (base,), {"compute_loss": compute_loss}) for base in (transformers.Trainer, Trainer))
    theirs, ours, *_ = both(
        tmp_path,
        Plain,
        kinds,
        train_dataset=plain_rows(45),
        eval_dataset=plain_rows(16),
        args={"eval_strategy": "epoch"},
    )
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


@pytest.mark.parametrize("how", ["compute_loss_func", "label_smoothing"])
def test_other_losses_are_those_of_transformers(tmp_path: Path, how: str) -> None:
    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        flat = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return flat / num_items_in_batch

    setup: dict[str, Any] = {"compute_loss_func": loss_of} if how == "compute_loss_func" else {}
    args = {"label_smoothing_factor": 0.2 if how == "label_smoothing" else 0.0, "gradient_accumulation_steps": 2}
    theirs, ours, *_ = both(tmp_path, token_bert, train_dataset=token_rows(42), data_collator=pad, args=args, **setup)
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


def regression() -> tuple[Any, list[Any]]:
    return bert(num_labels=1), [{**row, "labels": float(row["labels"])} for row in rows(24)]


def multi_label() -> tuple[Any, list[Any]]:
    model = bert(problem_type="multi_label_classification")
    return model, [{**row, "labels": torch.eye(3)[row["labels"]]} for row in rows(24)]


def question_answering() -> tuple[Any, list[Any]]:
    data = [{"input_ids": row["input_ids"], "start_positions": row["labels"], "end_positions": 5} for row in rows(24)]
    return bert(BertForQuestionAnswering, num_labels=2), data


def images() -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = ViTConfig(image_size=16, patch_size=8, num_labels=3, hidden_dropout_prob=0.0, **sizes)
    pixels = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return ViTForImageClassification(config), [{"pixel_values": one, "label": i % 3} for i, one in enumerate(pixels)]


@pytest.mark.parametrize("kind", [regression, multi_label, question_answering, images])
def test_other_kinds_of_labels_are_trained_and_evaluated_as_in_transformers(tmp_path: Path, kind: Any) -> None:
    _, data = kind()
    setup = {"train_dataset": data, "eval_dataset": data[:16]}
    args = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "eval_on_start": True,
        "eval_delay": 2,
        "dataloader_num_workers": 1,
    }
    # The clip rounds otherwise, which Adam makes visible in biases of attention keys, whose gradient is 0.
    args |= {"logging_first_step": True, "max_grad_norm": 100.0}
    theirs, ours, *_ = both(tmp_path, lambda: kind()[0], args=args, **setup)
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


def test_smoothing_labels_that_are_several_at_once_is_refused(tmp_path: Path) -> None:
    model = bert(problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1"):
        Trainer(model, arguments(tmp_path, label_smoothing_factor=0.1))


# Optimizers


def test_given_optimizers_classes_and_overrides_are_used(tmp_path: Path) -> None:
    def given(model: Any) -> Any:
        optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=3e-3)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
            return self.lr_scheduler

    data, args = plain_rows(45), {"logging_steps": 1}
    model = Plain()
    theirs = transformers.Trainer(
        model, arguments(tmp_path / "theirs", **args), train_dataset=data, optimizers=given(model)
    )
    theirs.train()
    for name, kind in (("pair", Trainer), ("overrides", Own)):
        model = Plain()
        setup = {"optimizers": given(model)} if kind is Trainer else {}
        ours = kind(model, arguments(tmp_path / name, **args), train_dataset=data, **setup)
        ours.train()
        assert difference(theirs.model, ours.model) < CLOSE
        same_log(theirs, ours)


def test_an_optimizer_whose_state_no_checkpoint_holds_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    model = bert()
    with pytest.raises(
        ValueError, match="optimizers: KeepsLists keeps history as a list, and a checkpoint holds tensors"
    ):
        Trainer(model, arguments(tmp_path), optimizers=(KeepsLists(model.parameters(), 1e-3), None))
    given = Momentum(model.parameters(), 1e-3)
    Trainer(model, arguments(tmp_path), optimizers=(given, None))
    assert not given.state, "it was another one that was tried"


def test_an_optimizer_class_gets_transformers_groups_and_schedule(tmp_path: Path) -> None:
    given = (torch.optim.NAdam, {"lr": 2e-3})
    theirs, ours, *_ = both(
        tmp_path, train_dataset=rows(24), optimizer_cls_and_kwargs=given, args={"weight_decay": 0.1, "warmup_steps": 2}
    )
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


@pytest.mark.parametrize(
    "args",
    [
        {"optim": "adafactor", "warmup_steps": 2},
        {"optim": "adamw_torch", "optim_args": "amsgrad=True"},
        {"optim": "rmsprop"},
        {"optim": "adagrad", "lr_scheduler_type": "cosine"},
        {"optim": "lion_32bit", "weight_decay": 0.1},
    ],
    ids=lambda args: args["optim"],
)
def test_optimizers_that_transformers_makes_learn_the_same_and_are_resumed_to_the_bit(
    tmp_path: Path, args: dict[str, Any]
) -> None:
    args = {"learning_rate": 1e-3, **args}
    theirs, ours, *_ = both(tmp_path, train_dataset=rows(24), args=args)
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)
    folder, saving = tmp_path / "resumed", {"save_strategy": "steps", "save_steps": 2, **args}
    whole = Trainer(bert(), arguments(folder, **saving), train_dataset=rows(24))
    whole.train()
    again = Trainer(bert(), arguments(folder, **saving), train_dataset=rows(24))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert difference(again.model, whole.model) == 0


@pytest.mark.parametrize("by", ["calls", "attributes", "both at once"])
def test_what_was_made_before_train_is_what_train_uses(tmp_path: Path, by: str) -> None:
    trained = []
    for kind in (transformers.Trainer, Trainer):
        folder = tmp_path / kind.__module__.partition(".")[0]
        trainer = kind(Plain(), arguments(folder, logging_steps=1), train_dataset=plain_rows(45))
        if by == "attributes":
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
        elif by == "calls":
            trainer.create_optimizer()
            trainer.create_scheduler(100)
        else:
            trainer.create_optimizer_and_scheduler(100)
        assert trainer.get_num_trainable_parameters() == 27
        made = trainer.optimizer
        trainer.train()
        assert by == "attributes" or kind is transformers.Trainer or trainer.optimizer is made
        trained.append(trainer)
    theirs, ours = trained
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


def test_an_override_of_both_makers_at_once_is_used(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=num_training_steps // 2)

    trainer = Own(Plain(), arguments(tmp_path, max_steps=4, logging_steps=1), train_dataset=plain_rows(45))
    trainer.train()
    rates = [line["learning_rate"] for line in history(trainer) if "learning_rate" in line]
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05])


def test_state_that_a_checkpoint_cannot_hold_is_said_at_the_first_step(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, own: Any) -> None:  # nothing that another one could be made with
            super().__init__(params, lr=0.1)

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["notes"] = ["a list"]

    model, steps = Plain(), []

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    given = (Odd(model.parameters(), own=None), None)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=plain_rows(45), optimizers=given, callbacks=[Count()])
    with pytest.raises(accel_train.core.errors.CheckpointError, match="notes of layer"):
        trainer.train()
    assert steps == []


def test_noise_on_embeddings_is_that_of_transformers_and_ends_with_train(tmp_path: Path) -> None:
    trainer = Trainer(bert(), arguments(tmp_path, neftune_noise_alpha=5.0, max_steps=2), train_dataset=rows(24))
    embeddings = trainer.model.get_input_embeddings()
    seen = []
    embeddings.register_forward_hook(lambda *_: seen.append(len(embeddings._forward_hooks)))
    plain = Trainer(bert(), arguments(tmp_path / "plain", max_steps=2), train_dataset=rows(24))
    plain.train()
    trainer.train()
    assert set(seen) == {2}
    assert len(embeddings._forward_hooks) == 1
    assert difference(trainer.model, plain.model) > 0
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=5\.0: Plain has no get_input_embeddings"):
        Trainer(Plain(), arguments(tmp_path, neftune_noise_alpha=5.0), train_dataset=plain_rows(8)).train()


def test_full_evaluations_in_bf16_and_metrics_of_memory_are_those_of_transformers(tmp_path: Path) -> None:
    setup = {"eval_dataset": rows(16), "compute_metrics": accuracy}
    args = {"bf16_full_eval": True, "skip_memory_metrics": False}
    expected = transformers.Trainer(bert(), arguments(tmp_path, **args), **setup).evaluate()
    ours = Trainer(bert(), arguments(tmp_path, **args), **setup)
    found = ours.evaluate()
    assert found.keys() == expected.keys() - {"eval_model_preparation_time"} >= {"eval_mem_cpu_alloc_delta"}
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-2)
    assert next(ours.model.parameters()).dtype == torch.bfloat16


def test_a_model_that_overflows_is_named_module_by_module_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bert()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("inf"))
    trainer = Trainer(model, arguments(tmp_path, debug="underflow_overflow"), train_dataset=rows(24))
    with pytest.raises(ValueError, match="DebugUnderflowOverflow"):
        trainer.train()
    assert "Detected inf/nan" in capsys.readouterr().out


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

    setup = {"eval_dataset": rows(21), "compute_metrics": accuracy}
    expected = transformers.Trainer(bert(), arguments(tmp_path), **setup).evaluate()
    found = Answers(bert(), arguments(tmp_path), **setup).evaluate()
    assert found["accuracy"] == expected["eval_accuracy"]
    assert found["count"] == 21
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-3)
    marked = Marked(bert(), arguments(tmp_path), **setup)
    assert marked.evaluate().keys() >= {"eval_marked", "eval_accuracy", "eval_runtime"}
    assert marked.predict(rows(7)).metrics["test_loss"] > 0


# Evaluate and predict


def test_predictions_come_in_order_and_padded_as_in_transformers(tmp_path: Path) -> None:
    data = token_rows(21)
    *_, expected, found = both(tmp_path, token_bert, data_collator=pad, act=lambda trainer: trainer.predict(data))
    np.testing.assert_allclose(found.predictions, expected.predictions, atol=CLOSE)
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    assert found.predictions.shape[0] == 21
    assert set(found.metrics) >= {"test_loss", "test_runtime", "test_samples_per_second", "test_steps_per_second"}


def test_a_dict_of_data_sets_is_evaluated_one_by_one(tmp_path: Path) -> None:
    parts = {"easy": rows(16, seed=2), "hard": rows(8, seed=3)}
    args = {"eval_strategy": "epoch", "metric_for_best_model": "eval_hard_loss", "load_best_model_at_end": True}
    theirs, ours, *_ = both(
        tmp_path,
        train_dataset=rows(24),
        eval_dataset=parts,
        compute_metrics=accuracy,
        args={**args, "save_strategy": "epoch"},
    )
    same_log(theirs, ours)
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric)
    assert {"eval_easy_loss", "eval_hard_accuracy"} <= ours.evaluate().keys()
    assert {"test_a_loss"} <= ours.evaluate({"a": parts["easy"]}, metric_key_prefix="test").keys()


def test_inputs_and_losses_are_handed_to_compute_metrics(tmp_path: Path) -> None:
    shapes = {}

    def look(found: EvalPrediction) -> dict[str, float]:
        shapes["inputs"], shapes["losses"] = found.inputs.shape, found.losses.shape
        return {}

    args = arguments(tmp_path, include_for_metrics=["inputs", "loss"])
    Trainer(bert(), args, eval_dataset=rows(11), compute_metrics=look).evaluate()
    assert shapes == {"inputs": (11, 12), "losses": (11,)}


def test_batch_metrics_see_every_sample_once_and_are_asked_for_a_result_at_the_end(tmp_path: Path) -> None:
    calls = []

    def by_batch(found: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        calls.append((len(found.label_ids), compute_result))
        return {"count": sum(number for number, _ in calls)} if compute_result else {}

    trainer = Trainer(
        bert(), arguments(tmp_path, batch_eval_metrics=True), eval_dataset=rows(19), compute_metrics=by_batch
    )
    assert trainer.evaluate()["eval_count"] == 19
    assert calls == [(8, False), (8, False), (3, True)]


def test_logits_are_preprocessed_and_batches_kept_apart_if_asked(tmp_path: Path) -> None:
    setup = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = Trainer(bert(), arguments(tmp_path, eval_do_concat_batches=False), **setup)
    found = trainer.predict(rows(11))
    assert [part.shape for part in found.predictions] == [(8,), (3,)]
    only = Trainer(bert(), arguments(tmp_path, prediction_loss_only=True)).predict(rows(11))
    assert only.predictions is None
    assert "test_loss" in only.metrics


def test_overridden_evaluation_methods_are_called_in_training(tmp_path: Path) -> None:
    called = []

    class Own(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            called.append("evaluate")
            return {**super().evaluate(*args, **kwargs), "eval_of_mine": 0.5}

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            called.append("prediction_step")
            return super().prediction_step(*args, **kwargs)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            called.append("get_eval_dataloader")
            return DataLoader(self.eval_dataset, batch_size=4, collate_fn=self.data_collator)

        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            called.append("log")
            super().log(logs, start_time)

    args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=1)
    trainer = Own(Plain(), args, train_dataset=plain_rows(16), eval_dataset=plain_rows(8))
    trainer.train()
    assert [name for name in called if name != "log"] == [
        "evaluate",
        "get_eval_dataloader",
        "prediction_step",
        "prediction_step",
    ]
    assert called.count("log") == 3
    line = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert line["of_mine"] == 0.5


def test_an_overridden_method_that_is_never_called_is_an_error(tmp_path: Path) -> None:
    own = type("Own", (Trainer,), {"_get_train_sampler": lambda self, *args: None})
    with pytest.raises(ValueError, match=r"Own\._get_train_sampler: override get_train_dataloader"):
        own(Plain(), arguments(tmp_path))


# Callbacks


class Listener(TrainerCallback):
    """Writes down what it is told, and at which step."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.heard.append((name, state.global_step))
        return super().__getattribute__(name)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_callbacks_are_told_what_transformers_tells_them_in_its_order(tmp_path: Path, strategy: str) -> None:
    args = {f"{what}_strategy": strategy for what in ("eval", "save", "logging")} | {"eval_steps": 4, "save_steps": 4}
    args |= {"num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    listeners = [Listener(), Listener()]
    for kind, listener, name in zip((transformers.Trainer, Trainer), listeners, ("theirs", "ours"), strict=True):
        data = {"train_dataset": plain_rows(24), "eval_dataset": plain_rows(8)}
        kind(Plain(), arguments(tmp_path / name, **args), callbacks=[listener], **data).train()
    assert listeners[1].heard == listeners[0].heard


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize(
    ("flag", "step"), [("should_training_stop", 4), ("should_epoch_stop", 8), ("should_epoch_stop", 6)]
)
def test_a_stop_within_an_epoch_ends_the_epoch_as_in_transformers(
    tmp_path: Path, strategy: str, flag: str, step: int
) -> None:
    """Two epochs of six steps: the last one can end early, and the end of an epoch is one already."""

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                setattr(control, flag, True)

    args = {f"{what}_strategy": strategy for what in ("eval", "save", "logging")} | {"eval_steps": 4, "save_steps": 4}
    args |= {"num_train_epochs": 2, "per_device_train_batch_size": 4}
    listeners = [Listener(), Listener()]
    for kind, listener, name in zip((transformers.Trainer, Trainer), listeners, ("theirs", "ours"), strict=True):
        data = {"train_dataset": plain_rows(24), "eval_dataset": plain_rows(8)}
        kind(Plain(), arguments(tmp_path / name, **args), callbacks=[Stops(), listener], **data).train()
    assert listeners[1].heard[-1] == ("on_train_end", 12 if (flag, step) == ("should_epoch_stop", 6) else step)
    assert listeners[1].heard == listeners[0].heard


def test_callbacks_stop_save_evaluate_and_log_at_the_very_step(tmp_path: Path) -> None:
    class StepSignals(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = state.global_step in (1, 3)
            control.should_evaluate = state.global_step == 2
            control.should_save = state.global_step == 3
            control.should_training_stop = state.global_step == 5

    data = {"train_dataset": plain_rows(80), "eval_dataset": plain_rows(8)}
    trainer = Trainer(Plain(), arguments(tmp_path), callbacks=[StepSignals()], **data)
    result = trainer.train()
    assert result.global_step == 5
    assert [(line["step"], "loss" in line) for line in history(trainer)] == [
        (1, True),
        (2, False),
        (3, True),
        (5, False),
    ]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]


def test_early_stopping_stops_where_transformers_stops(tmp_path: Path) -> None:
    args = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.5,
        "num_train_epochs": 10,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    data = {"train_dataset": plain_rows(24, seed=4), "eval_dataset": [{**row, "labels": 2} for row in plain_rows(16)]}
    theirs, ours, expected, found = both(
        tmp_path, Plain, make_callbacks=lambda: [EarlyStoppingCallback(2)], args=args, **data
    )
    assert found.global_step == expected.global_step < 30
    assert difference(theirs.model, ours.model) < CLOSE
    same_log(theirs, ours)


def test_callbacks_that_export_a_state_get_it_back(tmp_path: Path) -> None:
    args = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    args |= {"metric_for_best_model": "loss", "restore_callback_states_from_checkpoint": True, "learning_rate": 0.5}
    worse = [{**row, "labels": 2} for row in plain_rows(8)]
    callbacks = [EarlyStoppingCallback(9), EarlyStoppingCallback(9)]
    for callback, resume in zip(callbacks, (None, str(tmp_path / "checkpoints" / "step-00000002")), strict=True):
        data = {"train_dataset": plain_rows(16), "eval_dataset": worse}
        trainer = Trainer(Plain(), arguments(tmp_path, **args), callbacks=[callback], **data)
        trainer.train(resume_from_checkpoint=resume)
    assert callbacks[1].early_stopping_patience_counter == callbacks[0].early_stopping_patience_counter == 1


def test_a_resume_without_the_callback_that_stopped_trains_to_the_end_as_transformers_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class StopsAt5(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step == 5

    def stop_and_resume(trainer: Any) -> Any:
        assert trainer.train().global_step == 5
        again = type(trainer)(Plain(), trainer.args, train_dataset=trainer.train_dataset)
        return again, again.train(resume_from_checkpoint=True)

    args = {"save_strategy": "steps", "save_steps": 5, "max_steps": 9}
    data = {"train_dataset": plain_rows(24), "make_callbacks": lambda: [StopsAt5()]}
    *_, (theirs, expected), (ours, found) = both(tmp_path, Plain, act=stop_and_resume, args=args, **data)
    assert found.global_step == expected.global_step == 9
    assert difference(theirs.model, ours.model) < CLOSE
    assert json.loads((tmp_path / "ours" / "summary.json").read_text())["status"] == "finished"
    assert "stopped early at step 5 of 9; nothing stops it now" in capsys.readouterr().out


def test_several_callbacks_of_one_class_get_their_states_back_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counts(TrainerCallback, ExportableState):
        def __init__(self, by: int = 1) -> None:
            self.by, self.count = by, 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.count += self.by

        def state(self) -> dict[str, Any]:
            return {"args": {"by": self.by}, "attributes": {"count": self.count}}

    def run(callbacks: list[TrainerCallback], max_steps: int, resume: bool) -> None:
        args = {"save_strategy": "steps", "save_steps": 2, "max_steps": max_steps, "lr_scheduler_type": "constant"}
        chosen = arguments(tmp_path, restore_callback_states_from_checkpoint=True, **args)
        Trainer(Plain(), chosen, callbacks=callbacks, train_dataset=plain_rows(16)).train(
            resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-00000002") if resume else None
        )

    run([Counts(1), Counts(10), EarlyStopsNever()], 3, resume=False)
    capsys.readouterr()
    again = [Counts(), Counts(), Counts(7)]
    run(again, 3, resume=True)
    assert [(callback.by, callback.count) for callback in again] == [(1, 3), (10, 30), (7, 7)]
    said = capsys.readouterr().out
    assert "the checkpoint has the state of 1 EarlyStopsNever, and there are 0" in said
    assert "the checkpoint has the state of 2 Counts, and there are 3" in said


class EarlyStopsNever(TrainerCallback, ExportableState):
    """A callback with a state, which a later trainer leaves out."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {}}


def test_what_a_callback_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    class EndsEpochs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = True

    with pytest.raises(ValueError, match="should_epoch_stop at step 1"):
        Trainer(Plain(), arguments(tmp_path), callbacks=[EndsEpochs()], train_dataset=plain_rows(16)).train()


def test_without_callbacks_of_the_user_the_host_waits_for_no_step(tmp_path: Path) -> None:
    from accel_train.hf.step import may_ask

    trainer = Trainer(Plain(), arguments(tmp_path), train_dataset=plain_rows(16))
    assert not may_ask(trainer.callback_handler.callbacks)
    trainer.add_callback(Listener)
    assert may_ask(trainer.callback_handler.callbacks)
    assert isinstance(trainer.pop_callback(Listener), Listener)
    trainer.remove_callback(transformers.PrinterCallback)
    assert [type(callback).__name__ for callback in trainer.callback_handler.callbacks] == ["DefaultFlowCallback"]


def test_the_guard_stops_a_run_that_only_gives_nan(tmp_path: Path) -> None:
    data = [{**row, "features": row["features"] * float("nan")} for row in plain_rows(64)]
    with pytest.raises(TrainingStopped, match="in a row"):
        Trainer(Plain(), arguments(tmp_path), train_dataset=data).train()


# Files


def test_everything_that_is_saved_can_be_loaded(tmp_path: Path) -> None:
    trainer = Trainer(bert(), arguments(tmp_path / "run", save_strategy="steps", save_steps=3), train_dataset=rows(24))
    result = trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    trainer.log_metrics("train", result.metrics)
    for folder in (tmp_path / "saved", tmp_path / "run" / "model", get_last_checkpoint(tmp_path / "run")):
        assert difference(AutoModelForSequenceClassification.from_pretrained(folder), trainer.model) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert state["log_history"] == trainer.state.log_history
    assert json.loads((tmp_path / "run" / "train_results.json").read_text())["train_loss"] == result.training_loss
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())
    assert len(trainer.get_learning_rates()) >= 1
    trainer.create_model_card(model_name="tiny", tags="test")
    assert "tiny" in (tmp_path / "run" / "README.md").read_text()


def test_pushing_without_a_hub_says_what_to_do_and_keeps_what_was_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the Hugging Face Hub did not take it"):
        Trainer(Plain(), arguments(tmp_path, push_to_hub=True, hub_token="hf_secret"))
    trainer = Trainer(Plain(), arguments(tmp_path))
    with pytest.raises(ValueError, match="hf auth login"):
        trainer.push_to_hub()


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
    args |= {"save_strategy": "steps", "save_steps": 2}
    trainer = Trainer(bert(), arguments(tmp_path / "tiny", **args), train_dataset=rows(16))
    trainer.train()
    trainer.push_to_hub()
    assert [upload["path_in_repo"] for upload in uploads] == expected
    assert {upload["repo_id"] for upload in uploads} == {"someone/tiny"}
    assert "checkpoints/*" in uploads[-1]["ignore_patterns"]
    assert "hf_secret" not in "".join(path.read_text() for path in (tmp_path / "tiny").rglob("*.json"))


@pytest.mark.parametrize("own", [False, True])
def test_a_changed_learning_rate_is_an_event_of_a_resume_and_nothing_else_is(tmp_path: Path, own: bool) -> None:
    def trainer(rate: float) -> Trainer:
        args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, learning_rate=rate)
        model = Plain()
        optimizers = (torch.optim.SGD(model.parameters(), lr=rate), None) if own else (None, None)
        return Trainer(model, args, train_dataset=plain_rows(16), optimizers=optimizers)

    trainer(0.01).train()
    for rate in (0.01, 0.02):
        trainer(rate).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [found] = [line for line in lines if line["event"] == "settings_changed"]
    assert (found["setting"], found["was"], found["now"]) == ("optimizer.learning_rate", 0.01, 0.02)
    assert ("the program's own optimizer" in found["message"]) == own
