"""Checkpoints that transformers' own Trainer wrote are resumed, and schedules that follow a metric are."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from accel_train.hf import Trainer
from accel_train.hf.checkpoints import load_stock_weights
from tests.support.hf_models import Plain, arguments, bert, both, difference, history, plain_rows, rows

CLOSE = 1e-5
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "weight_decay": 0.1, "logging_steps": 1}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with checkpoint-3 and checkpoint-6 of transformers, and the trainer that wrote them."""
    folder = tmp_path_factory.mktemp("stock")
    trainer = transformers.Trainer(bert(), arguments(folder, **SAVING), train_dataset=rows(32))
    trainer.train()
    return folder, trainer


@pytest.mark.parametrize("by", ["name", "True"])
def test_a_checkpoint_that_transformers_wrote_is_resumed_to_the_same_weights(
    tmp_path: Path, stock: tuple[Path, Any], by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, theirs = stock
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    ours = Trainer(bert(seed=5), arguments(tmp_path, **SAVING), train_dataset=rows(32))
    result = ours.train(resume_from_checkpoint=True if by == "True" else str(tmp_path / "checkpoint-3"))
    assert result.global_step == 6
    assert difference(theirs.model, ours.model) < CLOSE
    assert [line["step"] for line in history(ours)] == [line["step"] for line in history(theirs)]
    assert "which transformers' Trainer wrote: weights, optimizer, step and log are taken" in capsys.readouterr().out
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").is_file()  # left as it was
    assert (tmp_path / "checkpoint-6").is_symlink()


def test_a_checkpoint_of_transformers_without_an_optimizer_is_resumed_and_that_is_said(
    tmp_path: Path, stock: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stock[0] / "checkpoint-3", tmp_path / "old")
    (tmp_path / "old" / "optimizer.pt").unlink()
    trainer = Trainer(bert(), arguments(tmp_path / "run", **SAVING), train_dataset=rows(32))
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "old")).global_step == 6
    assert "it has no optimizer.pt, so the optimizer begins anew" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "said"), [(bert(hidden_size=16), "another model, by its weight"), (Plain(), "another model")]
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, stock: tuple[Path, Any], model: Any, said: str
) -> None:
    data = plain_rows(16) if isinstance(model, Plain) else rows(16)
    with pytest.raises(ValueError, match=said):
        Trainer(model, arguments(tmp_path), train_dataset=data).train(
            resume_from_checkpoint=str(stock[0] / "checkpoint-3")
        )


def test_weights_that_transformers_saves_under_other_names_are_all_loaded(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1}
    config = transformers.ViTConfig(**sizes, num_attention_heads=2, intermediate_size=16)
    saved, fresh = (transformers.ViTForImageClassification(config) for _ in range(2))
    saved.save_pretrained(tmp_path)
    load_stock_weights(fresh, tmp_path)
    assert difference(saved, fresh) == 0


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 5,
    "learning_rate": 0.5,
    "logging_steps": 1,
}


def plateau(kind: Any, folder: Path, resume: str | None = None) -> list[float]:
    worse = [{**row, "labels": 2} for row in plain_rows(16)]
    trainer = kind(Plain(), arguments(folder, **PLATEAU), train_dataset=plain_rows(24), eval_dataset=worse)
    trainer.train(resume_from_checkpoint=resume)
    return [line["learning_rate"] for line in history(trainer) if "learning_rate" in line]


def test_a_schedule_that_follows_a_metric_gives_the_rates_of_transformers_also_after_a_resume(tmp_path: Path) -> None:
    expected, found = plateau(transformers.Trainer, tmp_path / "theirs"), plateau(Trainer, tmp_path / "ours")
    assert found == expected
    assert found[-1] < found[0]
    assert plateau(Trainer, tmp_path / "ours", str(tmp_path / "ours" / "checkpoint-3")) == expected


def test_a_given_schedule_that_follows_a_metric_is_used(tmp_path: Path) -> None:
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=3, logging_steps=1)
    data = {"train_dataset": plain_rows(24), "eval_dataset": [{**row, "labels": 2} for row in plain_rows(8)]}
    schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    trainer = Trainer(model, args, optimizers=(optimizer, schedule), **data)
    trainer.train()
    assert optimizer.param_groups[0]["lr"] < 0.1


def noisy(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that draws from all generators of its process."""
    features = torch.stack([sample["features"] for sample in samples])
    noise = torch.rand(features.shape) + torch.from_numpy(np.random.rand(8)).float() + random.random()
    return {"features": features + noise, "labels": torch.tensor([sample["labels"] for sample in samples])}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_collator_draws_is_the_same_after_a_resume_and_with_workers(tmp_path: Path, workers: int) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    setup: dict[str, Any] = {"train_dataset": plain_rows(24), "data_collator": noisy}
    whole = Trainer(Plain(), arguments(tmp_path / "whole", **saving), **setup)
    whole.train()
    args = arguments(tmp_path / "whole", **saving, dataloader_num_workers=workers)
    again = Trainer(Plain(seed=3), args, **setup)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert difference(whole.model, again.model) == 0


def adapted() -> Any:
    """A model with an adapter whose weights are not zero."""
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    model = bert()
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_a_checkpoint_of_an_adapted_model_is_loaded_by_peft_and_operations_are_counted_on_after_a_resume(
    tmp_path: Path,
) -> None:
    import peft

    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    theirs, ours, *_ = both(tmp_path, adapted, args=args, train_dataset=rows(24))
    loaded = peft.PeftModel.from_pretrained(bert(), str(tmp_path / "ours/checkpoint-4"))
    assert difference(loaded, ours.model) == 0.0
    resumed = Trainer(adapted(), arguments(tmp_path / "ours", **args), train_dataset=rows(24))
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2"))
    assert difference(resumed.model, ours.model) == 0.0
    assert theirs.state.total_flos == ours.state.total_flos == resumed.state.total_flos > 0


class Scaled(Dataset[dict[str, Any]]):
    """A data set of a script: its items are made by code."""

    def __init__(self, factor: float, *, is_random: bool = False) -> None:
        self.rows, self.factor, self.is_random = plain_rows(16), factor, is_random
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, self.num_reads = self.rows[index], self.num_reads + 1
        factor = self.num_reads if self.is_random else self.factor
        return {**row, "features": row["features"] * factor}


def doubled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(outputs[0], labels)


class Doubled(Trainer):
    """A trainer of a script, with a loss of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def test_a_resume_says_which_data_and_code_of_the_program_have_changed(tmp_path: Path) -> None:
    def resume(data: Any, kind: Any = Trainer, **further: Any) -> list[str]:
        args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
        kind(Plain(), args, train_dataset=data, **further).train(str(tmp_path / "checkpoint-2"))
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        return [line["setting"] for line in lines if line["event"] == "settings_changed"]

    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    Trainer(Plain(), args, train_dataset=Scaled(1.0)).train()
    assert resume(Scaled(1.0)) == []
    expected = ["inputs.training data"]
    assert resume(Scaled(2.0)) == expected
    expected += ["inputs.compute_loss_func"]
    assert resume(Scaled(1.0), compute_loss_func=doubled) == expected
    expected += ["inputs.the class of the trainer"]
    assert resume(Scaled(1.0), Doubled) == expected


def test_data_that_differ_from_read_to_read_are_resumed_without_an_event(tmp_path: Path) -> None:
    for resume in (None, str(tmp_path / "checkpoint-2")):
        args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
        Trainer(Plain(), args, train_dataset=Scaled(1.0, is_random=True)).train(resume)
    assert "settings_changed" not in (tmp_path / "events.jsonl").read_text()


def test_a_compiled_model_is_saved_under_plain_names(tmp_path: Path) -> None:
    compiled = torch.compile(Plain(), backend="eager")
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = Trainer(compiled, args, train_dataset=plain_rows(16))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    plain = Trainer(Plain(), arguments(tmp_path / "plain", max_steps=2), train_dataset=plain_rows(16))
    plain.train()
    for folder in ("model", "checkpoint-2", "saved"):
        weights = load_file(tmp_path / folder / "model.safetensors")
        assert not any("_orig_mod" in name for name in weights), folder
        torch.testing.assert_close(weights, dict(plain.model.state_dict()))
