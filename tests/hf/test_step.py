"""`training_step` and the context of `compute_loss`, overridden as scripts do it; losses weighed as transformers weighs
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accel_train.hf import Trainer
from tests.support.hf_models import (
    Plain,
    arguments,
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

CLOSE = 1e-5


def with_own_step(base: Any, how: str) -> Any:
    """The Trainer with an overridden training_step: around the one of the base, or in full."""

    class Own(base):  # type: ignore[misc]
        steps = 0

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self.steps += 1
            if how == "around":
                return super().training_step(model, inputs, num_items_in_batch)
            model.train()
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


@pytest.mark.parametrize("how", ["around", "in full"])
def test_an_overridden_training_step_is_called_for_each_micro_batch_and_trains_the_same(
    tmp_path: Path, how: str
) -> None:
    kinds = (with_own_step(transformers.Trainer, how), with_own_step(Trainer, how))
    theirs, ours, *_ = both(tmp_path, Plain, kinds, args={"max_steps": 3}, train_dataset=plain_rows(24))
    assert ours.steps == theirs.steps == 3
    assert difference(theirs.model, ours.model) < CLOSE
    assert [line.get("loss") for line in history(ours)] == pytest.approx([line.get("loss") for line in history(theirs)])


def test_losses_handed_to_backward_one_after_the_other_are_added(tmp_path: Path) -> None:
    class Twice(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            for _ in range(2):
                loss = self.compute_loss(model, inputs)
                self.accelerator.backward(0.5 * loss)
            return loss.detach()

    args = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    once = Trainer(Plain(), arguments(tmp_path / "once", **args), train_dataset=plain_rows(16))
    twice = Twice(Plain(), arguments(tmp_path / "twice", **args), train_dataset=plain_rows(16))
    once.train(), twice.train()
    assert difference(once.model, twice.model) < 1e-6


def test_a_training_step_that_hands_no_loss_over_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Silent(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return self.compute_loss(model, inputs).detach()

    with pytest.raises(ValueError, match=r"Silent\.training_step never called self\.accelerator\.backward"):
        Silent(Plain(), arguments(tmp_path), train_dataset=plain_rows(8)).train()


def test_the_context_of_compute_loss_is_around_each_loss_of_training_and_evaluation(tmp_path: Path) -> None:
    class Own(Trainer):
        entered = 0

        @contextmanager
        def compute_loss_context_manager(self) -> Iterator[None]:
            self.entered += 1
            yield

    trainer = Own(Plain(), arguments(tmp_path, max_steps=2), train_dataset=plain_rows(16), eval_dataset=plain_rows(8))
    trainer.train()
    assert trainer.entered == 2
    trainer.evaluate()
    assert trainer.entered == 3


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes))


def language_rows() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(24, length=8)]


@pytest.mark.parametrize("what", ["targets of GPT-2", "weights of micro-batches", "loss of an evaluation"])
def test_match_transformers_takes_their_count_where_ours_differs_on_purpose(tmp_path: Path, what: str) -> None:
    setups: dict[str, Any] = {
        "targets of GPT-2": (gpt2, {"train_dataset": language_rows()}, {"max_steps": 2}),
        "weights of micro-batches": (
            Plain,
            {"train_dataset": plain_rows(22)},
            {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "per_device_train_batch_size": 4, "optim": "sgd"},
        ),
        "loss of an evaluation": (
            token_bert,
            {"data_collator": pad, "eval_dataset": token_rows(21)},
            {"dataloader_drop_last": True},
        ),
    }
    make, data, args = setups[what]
    act = (lambda trainer: trainer.evaluate()) if "eval_dataset" in data else (lambda trainer: trainer.train())
    theirs, _, expected, _ = both(tmp_path / "plain", make, act=act, args=args, **data)
    own = Trainer(make(), arguments(tmp_path / "own", **args), **data)
    matching = Trainer(make(), arguments(tmp_path / "match", **args), match_transformers=True, **data)
    found = [act(own), act(matching)]
    if "eval_dataset" in data:
        distances = [abs(each["eval_loss"] - expected["eval_loss"]) for each in found]
    else:
        distances = [difference(theirs.model, each.model) for each in (own, matching)]
        losses = [[line["loss"] for line in history(each) if "loss" in line] for each in (theirs, own, matching)]
        distances = [max(abs(a - b) for a, b in zip(losses[0], other, strict=True)) for other in losses[1:]]
    assert distances[1] < CLOSE < distances[0]


def test_a_script_may_say_that_a_model_takes_no_count_also_for_models_made_later(tmp_path: Path) -> None:
    """transformers' own tests set this attribute; the loss stays the mean of the step either way."""
    args = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    given = {"train_dataset": [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(16)]}
    taking = Trainer(model_init=llama, args=arguments(tmp_path / "a", **args), **given)
    assert taking.model_accepts_loss_kwargs is True
    other = Trainer(model_init=llama, args=arguments(tmp_path / "b", **args), **given)
    other.model_accepts_loss_kwargs = False
    taking.train(), other.train()
    assert other.model_accepts_loss_kwargs is False
    assert difference(taking.model, other.model) < CLOSE


def test_an_optimizer_whose_rate_is_a_tensor_trains_and_resumes_as_one_with_a_number(tmp_path: Path) -> None:
    """As torchao's, which take nothing else."""
    found = []
    for rate in (0.01, torch.tensor(0.01)):
        folder = tmp_path / type(rate).__name__
        args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
        for resume in (None, str(folder / "checkpoint-2")):
            model = Plain()
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
            given = {"train_dataset": plain_rows(16), "optimizers": (optimizer, None)}
            trainer = Trainer(model, arguments(folder, **args), **given)
            trainer.train(resume)
            found.append((trainer, [line["learning_rate"] for line in history(trainer) if "loss" in line]))
        assert isinstance(optimizer.param_groups[0]["lr"], type(rate))
    models = [trainer.model for trainer, _ in found]
    assert all(rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025]) for _, rates in found)
    assert difference(models[0], models[1]) == difference(models[2], models[3]) == 0
    assert difference(models[0], models[2]) < CLOSE
