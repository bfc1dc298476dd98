"""Checkpoints that transformers' own Trainer wrote are resumed, and a resume says what has changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils.data import Dataset

from accel_train.hf import Trainer
from accel_train.hf.checkpoints import load_stock_weights
from tests.support.hf_models import (
    CLOSE,
    Given,
    Plain,
    adapted,
    bert,
    both,
    difference,
    every,
    history,
    plain_rows,
    refused,
    rows,
    trained,
    trained_plain,
    vit,
)
from tests.support.runs import events
from tests.support.wording import assert_golden

SAVING = {**every(3, "save"), "max_steps": 6, "weight_decay": 0.1, "logging_steps": 1}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with checkpoint-3 and checkpoint-6 of transformers, and the trainer that wrote them."""
    folder = tmp_path_factory.mktemp("stock")
    return folder, trained(folder, bert(), rows(32), kind=transformers.Trainer, **SAVING)


@pytest.mark.parametrize("by", ["name", "True"])
def test_a_checkpoint_that_transformers_wrote_is_resumed_to_the_same_weights(
    tmp_path: Path, stock: tuple[Path, Any], by: str, capsys: Any
) -> None:
    folder, theirs = stock
    own = tmp_path / "checkpoint-3"
    shutil.copytree(folder / "checkpoint-3", own)
    ours = trained(tmp_path, bert(seed=5), rows(32), True if by == "True" else str(own), **SAVING)
    assert ours.state.global_step == 6
    assert difference(theirs.model, ours.model) < CLOSE
    assert [line["step"] for line in history(ours)] == [line["step"] for line in history(theirs)]
    assert f"resumes {own}" in capsys.readouterr().out
    assert (own / "optimizer.pt").is_file()  # left as it was
    assert (tmp_path / "checkpoint-6").is_symlink()


def test_a_checkpoint_of_transformers_without_an_optimizer_is_resumed_and_that_is_said(
    tmp_path: Path, stock: tuple[Path, Any], capsys: Any
) -> None:
    shutil.copytree(stock[0] / "checkpoint-3", tmp_path / "old")
    (tmp_path / "old" / "optimizer.pt").unlink()
    trainer = trained(tmp_path / "run", bert(), rows(32), str(tmp_path / "old"), **SAVING)
    assert trainer.state.global_step == 6
    said = capsys.readouterr().out.splitlines()
    assert_golden(next(line for line in said if "optimizer.pt" in line))


@pytest.mark.parametrize(
    ("model", "weight"), [(bert(hidden_size=16), "bert.embeddings.LayerNorm.bias"), (Plain(), "bert.embeddings")]
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, stock: tuple[Path, Any], model: Any, weight: str
) -> None:
    data, old = plain_rows(16) if isinstance(model, Plain) else rows(16), str(stock[0] / "checkpoint-3")
    error = refused(lambda: trained(tmp_path, model, data, old), "resume_from_checkpoint")
    assert old in error.at
    assert weight in error.problem


def test_weights_that_transformers_saves_under_other_names_are_all_loaded(tmp_path: Path) -> None:
    saved, fresh = map(vit, range(2))
    saved.save_pretrained(tmp_path)
    load_stock_weights(fresh, tmp_path)
    assert difference(saved, fresh) == 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_a_checkpoint_of_an_adapted_model_is_loaded_by_peft_and_operations_are_counted_on_after_a_resume(
    tmp_path: Path,
) -> None:
    args = {"max_steps": 4, **every(2, "save")}
    theirs, ours, *_ = both(tmp_path, adapted, train_dataset=rows(24), **args)
    loaded = peft.PeftModel.from_pretrained(bert(), str(tmp_path / "ours/checkpoint-4"))
    assert difference(loaded, ours.model) == 0.0
    resumed = trained(tmp_path / "ours", adapted(), rows(24), str(tmp_path / "ours/checkpoint-2"), **args)
    assert difference(resumed.model, ours.model) == 0.0
    assert theirs.state.total_flos == ours.state.total_flos == resumed.state.total_flos > 0


def adapted_twice(seed: int = 1) -> Any:
    """A model with two adapters of other layers and ranks, of which the second is trained."""
    first, second = (
        peft.LoraConfig(task_type="SEQ_CLS" if r == 2 else None, r=r, target_modules=[name], init_lora_weights=False)
        for r, name in ((2, "query"), (4, "value"))
    )
    model = bert()
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, first, adapter_name="first")
    model.add_adapter("second", second)
    model.set_adapter("second")
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_each_adapter_is_saved_with_its_weights_and_configuration_where_peft_puts_it(tmp_path: Path) -> None:
    args = {"max_steps": 4, **every(2, "save"), "save_total_limit": 1}
    theirs, ours, *_ = both(tmp_path, adapted_twice, train_dataset=rows(24), **args)
    for name, trainer in (("theirs", theirs), ("ours", ours)):
        trainer.save_model(str(tmp_path / name / "saved"))
    for place in ("saved", "checkpoint-4"):
        here, there = (tmp_path / who / place for who in ("ours", "theirs"))
        found, expected = (
            {path.relative_to(folder).as_posix() for path in folder.rglob("adapter_*")} for folder in (here, there)
        )
        assert found == expected
        assert found == {f"{a}/adapter_{b}" for a in ("first", "second") for b in ("config.json", "model.safetensors")}
        for adapter in ("first", "second"):
            texts = [(folder / adapter / "adapter_config.json").read_text() for folder in (here, there)]
            assert json.loads(texts[0]) == json.loads(texts[1])
            weights = load_file(here / adapter / "adapter_model.safetensors")
            torch.testing.assert_close(
                weights, peft.get_peft_model_state_dict(ours.model, adapter_name=adapter), rtol=0, atol=0
            )
    resumed = trained(tmp_path / "ours", adapted_twice(2), rows(24), True, **{**args, "max_steps": 6})
    assert resumed.state.global_step == 6
    assert not list((tmp_path / "ours/checkpoints").glob("kept-*"))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("make", [adapted, adapted_twice])
def test_an_adapter_checkpoint_of_transformers_is_resumed_to_the_same_weights(tmp_path: Path, make: Any) -> None:
    theirs = trained(tmp_path, make(), rows(32), kind=transformers.Trainer, **SAVING)
    shutil.rmtree(tmp_path / "checkpoint-6")
    model = make()
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.zero_()
    ours = trained(tmp_path, model, rows(32), True, **SAVING)
    assert ours.state.global_step == 6
    assert difference(theirs.model, ours.model) < CLOSE
    found, expected = ([line["loss"] for line in history(each) if "loss" in line] for each in (ours, theirs))
    assert found == pytest.approx(expected, abs=CLOSE)
    other = adapted_twice() if make is adapted else adapted()
    old = str(tmp_path / "old")
    shutil.copytree(tmp_path / "checkpoint-3", old)
    error = refused(lambda: trained(tmp_path / "other", other, rows(32), old, **SAVING), "resume_from_checkpoint")
    assert_golden(str(error))


class Scaled(Dataset[Given]):
    """A data set of a script: its items are made by code."""

    def __init__(self, factor: float, *, is_random: bool = False) -> None:
        self.rows, self.factor, self.is_random = plain_rows(16), factor, is_random
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Given:
        row, self.num_reads = self.rows[index], self.num_reads + 1
        factor = self.num_reads if self.is_random else self.factor
        return {**row, "features": row["features"] * factor}


def doubled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(outputs[0], labels)


class Doubled(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def test_a_resume_says_which_data_and_code_of_the_program_have_changed(tmp_path: Path) -> None:
    args = {"max_steps": 3, **every(2, "save")}
    trained(tmp_path, Plain(), Scaled(1.0), **args)
    changed: list[str] = []
    for data, further, expected in (
        (Scaled(1.0), {}, None),
        (Scaled(2.0), {}, "inputs.training data"),
        (Scaled(1.0), {"compute_loss_func": doubled}, "inputs.compute_loss_func"),
        (Scaled(1.0), {"kind": Doubled}, "inputs.the class of the trainer"),
    ):
        trained(tmp_path, Plain(), data, str(tmp_path / "checkpoint-2"), **args, **further)
        changed += [expected] if expected else []
        assert [event["setting"] for event in events(tmp_path, "settings_changed")] == changed


def test_data_that_differ_from_read_to_read_are_resumed_without_an_event(tmp_path: Path) -> None:
    for resume in (None, str(tmp_path / "checkpoint-2")):
        trained(tmp_path, Plain(), Scaled(1.0, is_random=True), resume, max_steps=3, **every(2, "save"))
    assert "settings_changed" not in (tmp_path / "events.jsonl").read_text()


def test_a_compiled_model_is_saved_under_plain_names(tmp_path: Path) -> None:
    compiled = torch.compile(Plain(), backend="eager")
    trainer = trained(tmp_path, compiled, plain_rows(16), max_steps=2, **every(2, "save"))
    trainer.save_model(str(tmp_path / "saved"))
    plain = trained_plain(tmp_path / "plain", 16, max_steps=2)
    for folder in ("model", "checkpoint-2", "saved"):
        weights = load_file(tmp_path / folder / "model.safetensors")
        assert not any("_orig_mod" in name for name in weights), folder
        torch.testing.assert_close(weights, dict(plain.model.state_dict()))
