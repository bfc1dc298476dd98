"""Callbacks are told what transformers tells them, see the same step, and steer the run as there."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from accel_train.core.json_io import load_object
from accel_train.core.work import current_work
from accel_train.hf.callbacks import may_ask
from tests.support.hf_models import (
    CLOSE,
    Plain,
    accuracy,
    bert,
    both,
    difference,
    every,
    history,
    made,
    plain_rows,
    refused,
    rows,
    trained,
    trained_plain,
    worse_rows,
)
from tests.support.wording import assert_golden


class Listener(TrainerCallback):
    """Writes down what it is told, and at which step."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.heard.append((name, state.global_step))
        return super().__getattribute__(name)


class Sets(TrainerCallback):
    """Sets flags of the control after steps."""

    def __init__(self, **steps_by_flag: int) -> None:
        self.steps_by_flag = steps_by_flag

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for flag, step in self.steps_by_flag.items():
            if state.global_step == step:
                setattr(control, flag, True)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize(
    ("flag", "step", "last"),
    [
        ("should_log", 99, 12),
        ("should_log", 6, 12),
        ("should_training_stop", 4, 4),
        ("should_epoch_stop", 8, 8),
        ("should_epoch_stop", 6, 12),
    ],
)
def test_callbacks_are_told_what_transformers_tells_them_in_its_order(
    tmp_path: Path, strategy: str, flag: str, step: int, last: int
) -> None:
    """Two epochs of six steps, whole or stopped: the last epoch can end early; the first one is over at its end."""
    listeners: list[Listener] = []

    def callbacks() -> list[TrainerCallback]:
        listeners.append(Listener())
        return [Sets(**{flag: step}), listeners[-1]]

    args = {f"{what}_strategy": strategy for what in ("eval", "save", "logging")} | {"eval_steps": 4, "save_steps": 4}
    args |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "eval_dataset": plain_rows(8)}
    both(tmp_path, Plain, make_callbacks=callbacks, train_dataset=plain_rows(24), **args)
    theirs, ours = (each.heard for each in listeners)
    assert ours[-1] == ("on_train_end", last)
    assert ours == theirs


def test_callbacks_stop_save_evaluate_and_log_at_the_very_step(tmp_path: Path) -> None:
    class StepSignals(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = state.global_step in (1, 3)
            control.should_evaluate = state.global_step == 2
            control.should_save = state.global_step == 3
            control.should_training_stop = state.global_step == 5

    trainer = trained_plain(tmp_path, 80, eval_dataset=plain_rows(8), callbacks=[StepSignals()])
    assert trainer.state.global_step == 5
    lines = [(line["step"], "loss" in line) for line in history(trainer)]
    assert lines == [(1, True), (2, False), (3, True), (5, False)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]


def test_a_resume_without_the_callback_that_stopped_trains_to_the_end_as_transformers_does(
    tmp_path: Path, capsys: Any
) -> None:
    def stop_and_resume(trainer: Any) -> Any:
        assert trainer.train().global_step == 5
        again = type(trainer)(Plain(), trainer.args, train_dataset=trainer.train_dataset)
        return again, again.train(resume_from_checkpoint=True)

    args = {"max_steps": 9, "learning_rate": 1e-2, **every(5, "save")}
    data = {"train_dataset": plain_rows(24), "make_callbacks": lambda: [Sets(should_training_stop=5)]}
    *_, (theirs, expected), (ours, found) = both(tmp_path, Plain, act=stop_and_resume, **args, **data)
    assert found.global_step == expected.global_step == 9
    assert difference(theirs.model, ours.model) < CLOSE
    assert load_object(tmp_path / "ours" / "summary.json")["status"] == "finished"
    assert "step 5 of 9" in capsys.readouterr().out


class Counts(TrainerCallback, ExportableState):
    def __init__(self, by: int = 1) -> None:
        self.by, self.count = by, 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += self.by

    def state(self) -> dict[str, Any]:
        return {"args": {"by": self.by}, "attributes": {"count": self.count}}


class LeftOut(Counts):
    """A callback with a state, which a later trainer leaves out."""


def test_callbacks_get_their_states_back_in_order_and_a_line_names_other_numbers(tmp_path: Path, capsys: Any) -> None:
    args = {"max_steps": 4, "lr_scheduler_type": "constant", "restore_callback_states_from_checkpoint": True}
    args |= {**every(2, "save", "eval"), "metric_for_best_model": "loss", "learning_rate": 0.5}
    args["eval_dataset"] = worse_rows(8)  # so that each evaluation is worse
    stops = [EarlyStoppingCallback(9), EarlyStoppingCallback(9)]
    again = [Counts(), Counts(), Counts(7)]
    trained_plain(tmp_path, 16, callbacks=[stops[0], Counts(1), Counts(10), LeftOut()], **args)
    capsys.readouterr()
    trained_plain(tmp_path, 16, str(tmp_path / "checkpoint-2"), callbacks=[stops[1], *again], **args)
    assert [(callback.by, callback.count) for callback in again] == [(1, 4), (10, 40), (7, 14)]
    assert stops[1].early_stopping_patience_counter == stops[0].early_stopping_patience_counter == 1
    said = capsys.readouterr().out.splitlines()
    assert_golden("\n".join(line for line in said if "LeftOut" in line or "Counts" in line))


def test_an_end_of_an_epoch_before_the_last_is_refused_by_name(tmp_path: Path) -> None:
    ends = [Sets(should_epoch_stop=1)]
    error = refused(lambda: trained_plain(tmp_path, 16, callbacks=ends), "num_train_epochs")
    assert_golden(str(error))


def test_without_callbacks_of_the_user_the_host_waits_for_no_step(tmp_path: Path) -> None:
    trainer = made(tmp_path, Plain(), plain_rows(16))
    assert not may_ask(trainer.callback_handler.callbacks)
    trainer.add_callback(Listener)
    assert may_ask(trainer.callback_handler.callbacks)
    assert isinstance(trainer.pop_callback(Listener), Listener)
    trainer.remove_callback(transformers.PrinterCallback)
    assert [type(callback).__name__ for callback in trainer.callback_handler.callbacks] == ["DefaultFlowCallback"]


# The update


class Gradients(TrainerCallback):
    """Notes weights and gradients around each update."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = kwargs["model"].layer.weight
        self.seen.append((float(weight.detach().double().sum()), float(weight.grad.double().norm())))

    on_optimizer_step = on_pre_optimizer_step


@pytest.mark.parametrize("optim", ["adamw_torch", "adagrad"])
def test_a_callback_sees_the_clipped_gradients_before_and_after_the_update_as_in_transformers(
    tmp_path: Path, optim: str
) -> None:
    callbacks: list[Gradients] = []

    def make_callbacks() -> list[Gradients]:
        callbacks.append(Gradients())
        return callbacks[-1:]

    args = {"max_grad_norm": 0.05, "learning_rate": 0.1, "optim": optim, "max_steps": 3}
    _, ours, *_ = both(tmp_path, Plain, make_callbacks=make_callbacks, train_dataset=plain_rows(24), **args)
    theirs, seen = (each.seen for each in callbacks)
    assert len(seen) == 6
    for one, other in zip(theirs, seen, strict=True):
        assert other == pytest.approx(one, abs=CLOSE)
    assert all(norm < 0.051 for _, norm in seen)
    ours.optimizer.step()
    assert len(seen) == 6, "the hooks end with train()"


class ChangesRates(TrainerCallback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self.change)

    def change(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] *= 0.1


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end"])
def test_rates_that_a_callback_changes_hold_for_a_step_as_in_transformers(tmp_path: Path, event: str) -> None:
    setup = {
        "max_steps": 4,
        "learning_rate": 0.1,
        "train_dataset": plain_rows(24),
        "callbacks": [ChangesRates(event)],
    }
    theirs, ours, *_ = both(tmp_path, Plain, **setup)
    assert difference(theirs.model, ours.model) < CLOSE
    assert theirs.lr_scheduler.get_last_lr()[0] == ours.lr_scheduler.get_last_lr()[0] == 0.0


def test_a_freed_cache_and_further_readers_change_nothing(tmp_path: Path) -> None:
    args = {"torch_empty_cache_steps": 1, "dataloader_num_workers": 1, "dataloader_prefetch_factor": 2}
    args |= {"dataloader_multiprocessing_context": "fork"}
    plain, other = (
        made(tmp_path / name, bert(), rows(16), max_steps=2, **given).train().training_loss
        for name, given in (("plain", {}), ("other", args))
    )
    assert other == plain


class NotesWork(TrainerCallback):
    """Notes what the watchdog would see in each event, and its beats."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.beats = [0]

    def on_save(self, *_: Any, **__: Any) -> None:
        self.seen["on_save"] = current_work()[0]

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.seen["on_evaluate"] = current_work()[0]

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.beats.append(current_work()[1])

    def compute_metrics(self, prediction: Any) -> dict[str, float]:
        self.seen["compute_metrics"] = current_work()[0]
        return accuracy(prediction)


def test_callbacks_and_compute_metrics_are_exempt_from_the_hang_timeout_and_evaluation_batches_are_progress(
    tmp_path: Path,
) -> None:
    notes = NotesWork()
    setup = {"callbacks": [notes], "compute_metrics": notes.compute_metrics, "eval_dataset": rows(21)}
    trained(tmp_path, bert(), rows(16), max_steps=1, **every(1, "eval", "save"), **setup)
    assert notes.seen == {name: f"calling {name}" for name in ("on_save", "on_evaluate", "compute_metrics")}
    assert len(notes.beats) > 3
    assert all(before < after for before, after in itertools.pairwise(notes.beats))
    assert current_work()[0] == ""
