"""Optimizers, schedules, and steps: given, named by `optim`, or overridden, they learn the same as in transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from transformers import TrainerCallback

from accel_train.core.errors import CheckpointError
from accel_train.hf import Trainer
from tests.support.hf_models import (
    CLOSE,
    KINDS,
    Given,
    Plain,
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
    worse_rows,
)
from tests.support.optimizers import KeepsLists, Momentum
from tests.support.wording import raises_golden


def test_given_optimizers_and_overrides_are_used(tmp_path: Path) -> None:
    def given(model: Any) -> Any:
        optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
        return optimizer, StepLR(optimizer, step_size=3, gamma=0.5)

    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer, self.scheduler = given(self.model)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = self.scheduler
            return self.lr_scheduler

    found = []
    for name, kind in (("theirs", transformers.Trainer), ("pair", Trainer), ("overrides", Own)):
        model = Plain()
        setup = {} if kind is Own else {"optimizers": given(model)}
        found.append(trained(tmp_path / name, model, plain_rows(45), kind=kind, logging_steps=1, **setup))
    same(found[0], found[1])
    same(found[0], found[2])


def test_an_optimizer_whose_state_no_checkpoint_holds_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    model = bert()
    lists = (KeepsLists(model.parameters(), 1e-3), None)
    with raises_golden():
        made(tmp_path, model, optimizers=lists)
    given = Momentum(model.parameters(), 1e-3)
    made(tmp_path, model, optimizers=(given, None))
    assert not given.state, "it was another one that was tried"


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
    tmp_path: Path, args: Given
) -> None:
    args |= {"learning_rate": 1e-3, "max_steps": 4, **every(2, "save")}
    theirs, ours, *_ = both(tmp_path, train_dataset=rows(16), **args)
    same(theirs, ours)
    again = trained(tmp_path / "ours", bert(), rows(16), str(tmp_path / "ours" / "checkpoint-2"), **args)
    assert difference(again.model, ours.model) == 0


@pytest.mark.parametrize("by", ["calls", "attributes", "both at once"])
def test_what_was_made_before_train_is_what_train_uses(tmp_path: Path, by: str) -> None:
    def act(trainer: Any) -> None:
        if by == "attributes":
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
        elif by == "calls":
            trainer.create_optimizer()
            trainer.create_scheduler(100)
        else:
            trainer.create_optimizer_and_scheduler(100)
        given = trainer.optimizer
        trainer.train()
        assert by == "attributes" or not isinstance(trainer, Trainer) or trainer.optimizer is given

    theirs, ours, *_ = both(tmp_path, Plain, act=act, logging_steps=1, train_dataset=plain_rows(24))
    same(theirs, ours)


def test_an_override_of_both_makers_at_once_is_used(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.lr_scheduler = StepLR(self.optimizer, step_size=num_training_steps // 2)

    trainer = trained_plain(tmp_path, 45, kind=Own, max_steps=4, logging_steps=1)
    assert rates(trainer) == pytest.approx([0.5, 0.5, 0.05, 0.05])


def test_state_that_a_checkpoint_cannot_hold_is_said_at_the_first_step(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, own: Any) -> None:  # nothing that another one could be made with
            super().__init__(params, lr=0.1)

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for parameter in (each for group in self.param_groups for each in group["params"]):
                self.state[parameter]["notes"] = ["a list"]

    model, steps = Plain(), []

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    given = (Odd(model.parameters(), own=None), None)
    with raises_golden(CheckpointError):
        trained(tmp_path, model, plain_rows(45), optimizers=given, callbacks=[Count()])
    assert steps == []


def plateau(kind: Any, folder: Path, resume: str | None = None) -> list[float]:
    args = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}}
    args |= {"max_steps": 4, "learning_rate": 0.5, **every(1, "eval", "save", "logging")}
    return rates(trained_plain(folder, 24, resume, kind=kind, eval_dataset=worse_rows(16), **args))


def test_a_schedule_that_follows_a_metric_gives_the_rates_of_transformers_also_after_a_resume(tmp_path: Path) -> None:
    expected, found = (plateau(kind, tmp_path / kind.__module__) for kind in KINDS)
    assert found == expected
    assert found[-1] < found[0]
    ours = tmp_path / Trainer.__module__
    assert plateau(Trainer, ours, str(ours / "checkpoint-2")) == expected


def test_a_given_schedule_that_follows_a_metric_is_used(tmp_path: Path) -> None:
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {
        "optimizers": (optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.1)),
        "eval_dataset": worse_rows(8),
    }
    trained(tmp_path, model, plain_rows(24), max_steps=3, **every(1, "eval", "logging"), **given)
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_an_optimizer_whose_rate_is_a_tensor_trains_and_resumes_as_one_with_a_number(tmp_path: Path) -> None:
    """As torchao's, which take nothing else."""
    models = []
    for rate in (0.01, torch.tensor(0.01)):
        folder = tmp_path / type(rate).__name__
        for resume in (None, str(folder / "checkpoint-2")):
            model = Plain()
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
            args = {"optimizers": (optimizer, None), "max_steps": 4, "logging_steps": 1, **every(2, "save")}
            trainer = trained(folder, model, plain_rows(16), resume, **args)
            assert rates(trainer) == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
            models.append(trainer.model)
        assert isinstance(optimizer.param_groups[0]["lr"], type(rate))
    assert difference(models[0], models[1]) == difference(models[2], models[3]) == 0
    assert difference(models[0], models[2]) < CLOSE


# Steps


def test_losses_handed_to_backward_one_after_the_other_are_added(tmp_path: Path) -> None:
    class Twice(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            for _ in range(2):
                loss = self.compute_loss(model, inputs)
                self.accelerator.backward(0.5 * loss)
            return loss.detach()

    args = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    once, twice = (trained_plain(tmp_path / kind.__name__, 16, kind=kind, **args) for kind in (Trainer, Twice))
    assert difference(once.model, twice.model) < 1e-6


def test_a_training_step_that_hands_no_loss_over_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Silent(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return self.compute_loss(model, inputs).detach()

    error = refused(lambda: trained_plain(tmp_path, 8, kind=Silent), "Silent.training_step")
    assert "self.accelerator.backward" in error.problem


def test_the_context_of_compute_loss_is_around_each_loss_of_training_and_evaluation(tmp_path: Path) -> None:
    class Own(Trainer):
        entered = 0

        @contextmanager
        def compute_loss_context_manager(self) -> Iterator[None]:
            self.entered += 1
            yield

    trainer = trained_plain(tmp_path, 16, kind=Own, max_steps=2, eval_dataset=plain_rows(8))
    assert trainer.entered == 2
    trainer.evaluate()
    assert trainer.entered == 3


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes))


def language_rows(count: int) -> list[Given]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(count, length=8)]


MATCHED: dict[str, tuple[Any, Given]] = {
    "targets of GPT-2": (gpt2, {"train_dataset": language_rows(24), "max_steps": 2}),
    "weights of micro-batches": (
        Plain,
        {"train_dataset": plain_rows(22), "gradient_accumulation_steps": 3, "num_train_epochs": 1}
        | {"per_device_train_batch_size": 4, "optim": "sgd"},
    ),
    "loss of an evaluation": (
        token_bert,
        {"data_collator": pad, "eval_dataset": token_rows(21), "dataloader_drop_last": True},
    ),
}


@pytest.mark.parametrize("what", MATCHED)
def test_match_transformers_takes_their_count_where_ours_differs_on_purpose(tmp_path: Path, what: str) -> None:
    make, given = MATCHED[what]

    def losses(name: str, **more: Any) -> list[float]:
        setup = dict(given)
        trainer = made(tmp_path / name, make(), setup.pop("train_dataset", None), **setup, **more)
        if "eval_dataset" in given:
            return [trainer.evaluate()["eval_loss"]]
        trainer.train()
        return [line["loss"] for line in history(trainer) if "loss" in line]

    expected = losses("theirs", kind=transformers.Trainer)
    assert losses("match", match_transformers=True) == pytest.approx(expected, abs=CLOSE)
    assert losses("own") != pytest.approx(expected, abs=CLOSE)


def test_a_script_may_say_that_a_model_takes_no_count_also_for_models_made_later(tmp_path: Path) -> None:
    """transformers' own tests set this attribute; the loss stays the mean of the step either way."""
    args = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "model_init": llama}
    taking, other = (made(tmp_path / name, None, language_rows(16), **args) for name in "ab")
    assert taking.model_accepts_loss_kwargs is True
    other.model_accepts_loss_kwargs = False
    taking.train(), other.train()
    assert other.model_accepts_loss_kwargs is False
    assert difference(taking.model, other.model) < CLOSE
