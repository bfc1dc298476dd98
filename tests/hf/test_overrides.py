"""What overridden methods find on the trainer: the state, the rates, helpers, and the base's loader."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_train.hf import Trainer
from tests.support import hf_models as hf


def with_own_log(base: Any) -> Any:
    """The Trainer of a script whose loss depends on the step, and which logs a mean that it keeps by itself."""

    class Own(base):  # type: ignore[misc]
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

    return Own


def test_overrides_of_loss_and_log_see_the_steps_and_rates_of_transformers(tmp_path: Path) -> None:
    kinds = tuple(map(with_own_log, hf.KINDS))
    theirs, ours, *_ = hf.both(tmp_path, hf.Plain, kinds, max_steps=5, train_dataset=hf.plain_rows(24))
    assert ours.seen == theirs.seen
    assert [step for step, _ in ours.seen] == [0, 1, 2, 3, 4]
    assert len(hf.history(ours)) == 3
    hf.same_log(theirs, ours)


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
    kinds = tuple(map(with_base_loader, hf.KINDS))
    theirs, ours, *_ = hf.both(tmp_path, hf.Plain, kinds, num_train_epochs=3, train_dataset=hf.plain_rows(24))
    assert ours.state.global_step == theirs.state.global_step == 9
    assert hf.difference(theirs.model, ours.model) < hf.CLOSE


def test_a_loader_of_the_base_with_another_collator_is_read_as_it_is_and_shuffled_anew(tmp_path: Path) -> None:
    firsts: list[Any] = []

    class Collated(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = super().get_train_dataloader()
            own = loader.collate_fn
            loader.collate_fn = lambda samples: own(samples[:1] * len(samples))
            return loader

        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
            assert inputs["features"].std(0).max() == 0.0
            firsts.append(inputs["features"][0].tolist())
            return super().compute_loss(model, inputs, **kwargs)

    hf.trained(tmp_path, hf.Plain(), hf.plain_rows(16), kind=Collated)
    assert len(firsts) == 4
    assert firsts[:2] != firsts[2:]


def with_helpers(base: Any) -> Any:
    """The Trainer of a script that was written after transformers' own methods."""

    class Own(base):  # type: ignore[misc]
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

    return Own


def test_helpers_that_overrides_call_are_there(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{**row, "text": "?"} for row in hf.rows(24)])
    theirs, ours, *_ = hf.both(tmp_path, hf.bert, tuple(map(with_helpers, hf.KINDS)), max_steps=4, train_dataset=table)
    assert hf.difference(theirs.model, ours.model) < hf.CLOSE


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("_prepare_inputs", "training_step"),
        ("_get_train_sampler", "get_train_dataloader"),
        ("_set_signature_columns_if_needed", "callback"),
    ],
)
def test_a_method_that_is_never_called_is_refused_as_an_override(tmp_path: Path, name: str, remedy: str) -> None:
    own = type("Own", (Trainer,), {name: lambda self, *args: None})
    assert remedy in hf.refused(lambda: own(hf.Plain()), f"Own.{name}").problem


class Counted(IterableDataset[Any]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(hf.plain_rows(20))


def test_a_stream_that_knows_its_length_needs_no_max_steps(tmp_path: Path) -> None:
    theirs, ours, *_ = hf.both(tmp_path, hf.Plain, make_train_dataset=Counted)
    assert ours.state.global_step == theirs.state.global_step == 6
    assert ours.state.epoch == theirs.state.epoch == 2.0
    assert hf.difference(theirs.model, ours.model) < hf.CLOSE


def test_weights_in_bf16_are_trained(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in hf.rows(24)]
    theirs, ours, *_ = hf.both(tmp_path, lambda: hf.llama().to(torch.bfloat16), max_steps=4, train_dataset=data)
    assert hf.difference(theirs.model, ours.model) < 1e-2
    assert hf.history(ours)[0]["loss"] == pytest.approx(hf.history(theirs)[0]["loss"], abs=0.02)
