"""What overridden methods and callbacks find on the trainer: the state, the rates, the mode of the model, helpers, and
the base's loader.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from accel_train.hf import Trainer
from tests.support.hf_models import Plain, arguments, bert, both, difference, history, llama, plain_rows, rows

CLOSE = 1e-5
KINDS = (transformers.Trainer, Trainer)


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the report takes longer than everything else here together."""
    monkeypatch.setattr("accel_train.training.finish.write_report", lambda runs: runs[0] / "report.html")


def with_sums(base: Any) -> Any:
    """The Trainer of a script whose loss depends on the step, and which logs a mean that it keeps by itself."""

    class Sums(base):  # type: ignore[misc]
        seen, kept = (), ()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.seen = (*self.seen, (self.state.global_step, self.state.epoch))
            loss = super().compute_loss(*args, **kwargs)
            self.kept = (*self.kept, float(loss.detach()))
            return loss

    return Sums


def with_own_log(base: Any) -> Any:
    class Own(with_sums(base)):  # type: ignore[misc]
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            own = {"mean": sum(self.kept) / len(self.kept), "rate": self._get_learning_rate()} if self.kept else {}
            self.kept = ()
            super().log({**logs, **own}, start_time)

    return Own


def test_a_loss_that_depends_on_the_step_sees_the_step_of_transformers(tmp_path: Path) -> None:
    kinds = tuple(map(with_sums, KINDS))
    theirs, ours, *_ = both(tmp_path, Plain, kinds, args={"max_steps": 5}, train_dataset=plain_rows(24))
    assert ours.seen == theirs.seen
    assert [step for step, _ in ours.seen] == [0, 1, 2, 3, 4]


def test_an_overridden_log_sums_up_the_steps_that_transformers_does_and_reads_its_rate(tmp_path: Path) -> None:
    kinds = tuple(map(with_own_log, KINDS))
    theirs, ours, *_ = both(tmp_path, Plain, kinds, args={"max_steps": 5}, train_dataset=plain_rows(24))
    assert len(history(ours)) == 3
    for one, other in zip(history(theirs), history(ours), strict=True):
        assert other == pytest.approx(one, abs=CLOSE)


class ChangesRates(TrainerCallback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self.change)

    def change(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] *= 0.1


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end"])
def test_rates_that_a_callback_changes_hold_for_a_step_as_in_transformers(tmp_path: Path, event: str) -> None:
    setup = {"args": {"max_steps": 4, "learning_rate": 0.1}, "train_dataset": plain_rows(24)}
    theirs, ours, *_ = both(tmp_path, Plain, make_callbacks=lambda: [ChangesRates(event)], **setup)
    assert difference(theirs.model, ours.model) < CLOSE
    assert theirs.lr_scheduler.get_last_lr()[0] == ours.lr_scheduler.get_last_lr()[0] == 0.0


def test_after_an_evaluation_the_model_is_ready_for_inference_as_in_transformers(tmp_path: Path) -> None:
    modes = []

    def act(trainer: Any) -> None:
        trainer.train()
        modes.append(trainer.model.training)
        trainer.model.train()
        trainer.predict(plain_rows(8))
        modes.append(trainer.model.training)

    for strategy in ("no", "epoch"):
        args = {"max_steps": 3, "eval_strategy": strategy}
        both(tmp_path / strategy, Plain, act=act, args=args, train_dataset=plain_rows(24), eval_dataset=plain_rows(8))
    assert modes == [True, False, True, False, False, False, False, False]


def with_base_loader(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            everything, self.train_dataset = self.train_dataset, self.train_dataset[:20]
            loader = super().get_train_dataloader()
            self.train_dataset = everything
            return loader

    return Own


def test_an_override_that_returns_the_loader_of_the_base_trains_on_its_data_in_a_new_order_each_epoch(
    tmp_path: Path,
) -> None:
    kinds = tuple(map(with_base_loader, KINDS))
    theirs, ours, *_ = both(tmp_path, Plain, kinds, args={"num_train_epochs": 3}, train_dataset=plain_rows(24))
    assert ours.state.global_step == theirs.state.global_step == 9
    assert difference(theirs.model, ours.model) < CLOSE


class Collated(Trainer):
    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        own = loader.collate_fn
        loader.collate_fn = lambda samples: own(samples[:1] * len(samples))
        return loader


def test_a_loader_of_the_base_with_another_collator_is_read_as_it_is_and_shuffled_anew(tmp_path: Path) -> None:
    firsts: list[Any] = []

    class Looks(Collated):
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            assert inputs["features"].std(0).max() == 0.0
            firsts.append(inputs["features"][0].tolist())
            return super().compute_loss(model, inputs, **kwargs)

    Looks(Plain(), arguments(tmp_path), train_dataset=plain_rows(16)).train()
    assert len(firsts) == 4
    assert firsts[:2] != firsts[2:]


def with_helpers(base: Any) -> Any:
    """The Trainer of a script that was written after transformers' own methods."""

    class Own(base):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            data = self._remove_unused_columns(self.train_dataset, description="training")
            sampler = self._get_train_sampler()
            assert len(sampler) == len(data)
            return DataLoader(data, batch_size=8, collate_fn=self.data_collator)

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            assert not self.is_deepspeed_enabled
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


def test_helpers_that_overrides_call_are_there(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{**row, "text": "?"} for row in rows(24)])
    kinds = tuple(map(with_helpers, KINDS))
    theirs, ours, *_ = both(tmp_path, bert, kinds, args={"max_steps": 4}, train_dataset=table)
    assert difference(theirs.model, ours.model) < CLOSE


def test_a_helper_that_is_overridden_is_still_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    with pytest.raises(ValueError, match=r"Own\._prepare_inputs: override training_step"):
        Own(Plain(), arguments(tmp_path))


class Counted(IterableDataset[Any]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(plain_rows(20))


def test_a_stream_that_knows_its_length_needs_no_max_steps(tmp_path: Path) -> None:
    theirs, ours, *_ = both(tmp_path, Plain, make_train_dataset=Counted)
    assert ours.state.global_step == theirs.state.global_step == 6
    assert ours.state.epoch == theirs.state.epoch == 2.0
    assert difference(theirs.model, ours.model) < CLOSE


def test_weights_in_bf16_are_trained(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(24)]
    make_model = lambda: llama().to(torch.bfloat16)  # noqa: E731
    theirs, ours, *_ = both(tmp_path, make_model, args={"max_steps": 4}, train_dataset=data)
    assert difference(theirs.model, ours.model) < 1e-2
    assert history(ours)[0]["loss"] == pytest.approx(history(theirs)[0]["loss"], abs=0.02)


def test_metrics_that_are_no_dict_are_an_error_that_says_so(tmp_path: Path) -> None:
    trainer = Trainer(bert(), arguments(tmp_path), eval_dataset=rows(8), compute_metrics=lambda found: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="compute_metrics returned None"):
        trainer.evaluate()
