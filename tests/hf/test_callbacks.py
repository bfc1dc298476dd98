"""What callbacks see of a step: the gradients of an update, micro-batches, tokens."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import TrainerCallback

from accel_train.hf import Trainer
from tests.support.hf_models import Plain, arguments, bert, both, history, pad, plain_rows, rows, token_bert, token_rows

CLOSE = 1e-5


class Gradients(TrainerCallback):
    """Notes weights and gradients around each update."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def note(self, model: Any) -> None:
        weight = model.layer.weight
        self.seen.append((float(weight.detach().double().sum()), float(weight.grad.double().norm())))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(kwargs["model"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(kwargs["model"])


@pytest.mark.parametrize("optim", ["adamw_torch", "adagrad"])
def test_a_callback_sees_the_clipped_gradients_before_and_after_the_update_as_in_transformers(
    tmp_path: Path, optim: str
) -> None:
    args = {"max_grad_norm": 0.05, "learning_rate": 0.1, "optim": optim, "max_steps": 3}
    seen = []
    for kind, name in ((transformers.Trainer, "theirs"), (Trainer, "ours")):
        callback = Gradients()
        kind(Plain(), arguments(tmp_path / name, **args), callbacks=[callback], train_dataset=plain_rows(24)).train()
        seen.append(callback.seen)
    assert len(seen[1]) == 6
    for one, other in zip(*seen, strict=True):
        assert other == pytest.approx(one, abs=CLOSE)
    assert all(norm < 0.051 for _, norm in seen[1])


def test_hooks_of_a_callback_end_with_train(tmp_path: Path) -> None:
    callback = Gradients()
    trainer = Trainer(Plain(), arguments(tmp_path, max_steps=1), callbacks=[callback], train_dataset=plain_rows(8))
    trainer.train()
    assert len(callback.seen) == 2
    trainer.optimizer.step()
    assert len(callback.seen) == 2


@pytest.mark.parametrize("which", ["all", "non_padding"])
def test_input_tokens_are_counted_as_in_transformers(tmp_path: Path, which: str) -> None:
    args = {"include_num_input_tokens_seen": which, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    data = {"data_collator": pad, "train_dataset": token_rows(20)}
    theirs, ours, *_ = both(tmp_path, token_bert, args=args, **data)
    assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen > 0
    counts = [[line["num_input_tokens_seen"] for line in history(each)] for each in (theirs, ours)]
    assert counts[1] == counts[0]


def test_a_freed_cache_and_further_readers_change_nothing(tmp_path: Path) -> None:
    plain = Trainer(bert(), arguments(tmp_path / "a", max_steps=2), train_dataset=rows(16)).train()
    args = {"torch_empty_cache_steps": 1, "dataloader_num_workers": 1, "dataloader_prefetch_factor": 2}
    args |= {"dataloader_multiprocessing_context": "fork", "max_steps": 2}
    other = Trainer(bert(), arguments(tmp_path / "b", **args), train_dataset=rows(16)).train()
    assert other.training_loss == plain.training_loss
