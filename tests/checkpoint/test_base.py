"""Frozen base weights stay out of checkpoints, and a resume needs the same ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_train import train
from accel_train.checkpoint.base import digests_of_base
from accel_train.checkpoint.verify import verify
from accel_train.cli.main import main
from accel_train.inference.export import export_run, load_exported
from accel_train.training.setup import prepare_run
from tests.support.comparisons import assert_same_bits, tensors
from tests.support.marks import slow
from tests.support.runs import (
    Capture,
    Settings,
    checkpoint,
    events,
    forget,
    losses,
    model_of,
    run,
    steps_of,
    tiny_recipe,
    write_base,
    write_recipe_file,
)
from tests.support.wording import assert_golden, raises_golden

LORA: Settings = {"rank": 2}
SAVES: Settings = {"task": "causal-lm", "checkpoint": {"every_steps": 4, "keep": 9}}


def sections_in(folder: Path, **model: Any) -> Settings:
    changes = {"config": None, "pretrained": str(folder / "base"), **(model or {"lora": LORA})}
    return {**SAVES, "output_dir": str(folder / "run"), "model": changes}


def train_with(folder: Path, **sections: Any) -> Path:
    return train(tiny_recipe(folder, **sections)).output_dir


def flip_one_bit(base: Path, name: str) -> None:
    weights = load_file(base / "model.safetensors")
    weights[name].view(torch.int32).flatten()[3] ^= 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})


def without_digests(text: str) -> str:
    return re.sub(r"(SHA-256|now) [0-9a-f]+", r"\1 #", text)


@pytest.fixture
def based(corpus: Path) -> Path:
    """A folder with a corpus and a base."""
    write_base(corpus)
    return corpus


@pytest.mark.parametrize(
    "model", [{"lora": LORA}, {"freeze": ["*.wte.*", "*.h.0.*"]}], ids=["adapters", "frozen parts"]
)
def test_a_checkpoint_holds_what_is_trained_and_resumes_to_the_bit(based: Path, model: Settings) -> None:
    folder = train_with(based, **sections_in(based, **model))
    stored = tensors(folder, 12, "model")
    moments = tensors(folder, 12, "optimizer")
    assert {name.partition(".")[2] for name in moments} == stored.keys()
    assert not (folder / "checkpoints" / "step-00000012" / "config.json").exists()
    before, ended = checkpoint(folder, 12), model_of(folder)
    forget(folder, 8)
    train_with(based, **sections_in(based, **model))
    assert steps_of(folder, "resume") == [4]
    assert_same_bits(checkpoint(folder, 12), before)
    assert_same_bits(model_of(folder), ended)
    assert verify(folder).newest == folder / "checkpoints" / "step-00000012"


def test_a_base_with_one_flipped_bit_is_refused_by_name(based: Path, capsys: Capture) -> None:
    folder = train_with(based, **sections_in(based))
    forget(folder, 8)
    flip_one_bit(based / "base", "transformer.h.1.mlp.c_fc.weight")
    path = write_recipe_file(based, **sections_in(based))
    assert main(["run", str(path)]) == 2
    assert_golden(without_digests(capsys.readouterr().err.strip().splitlines()[-1]))


@pytest.mark.slow
def test_a_flipped_bit_in_a_trained_weight_of_the_base_costs_nothing(based: Path) -> None:
    model = {"freeze": ["*.h.0.*"]}
    folder = train_with(based, **sections_in(based, **model))
    before = checkpoint(folder, 12)
    forget(folder, 8)
    flip_one_bit(based / "base", "transformer.h.1.mlp.c_fc.weight")
    train_with(based, **sections_in(based, **model))
    assert_same_bits(checkpoint(folder, 12), before)


def test_weights_that_are_frozen_after_they_were_trained_stay_in_the_checkpoints(based: Path) -> None:
    # Without moments, which would be of other parameters.
    sections = {**sections_in(based, freeze=[]), "optimizer": {"name": "sgd", "momentum": 0, "learning_rate": 0.1}}
    folder = train_with(based, **sections)
    forget(folder, 8)
    sections["model"]["freeze"] = ["*.h.0.*"]
    sections["checkpoint"] = {**sections["checkpoint"], "accept_changes": True}
    train_with(based, **sections)
    before, after = tensors(folder, 4, "model"), tensors(folder, 12, "model")
    assert before.keys() == after.keys()
    assert {name for name in after if torch.equal(before[name], after[name])} == {
        name for name in after if ".h.0." in name
    }


def test_other_frozen_weights_are_refused_even_where_changes_are_accepted(based: Path) -> None:
    folder = train_with(based, **sections_in(based, freeze=["*.h.0.*"]))
    forget(folder, 8)
    sections = sections_in(based, freeze=["*.h.*"])
    sections["checkpoint"] = {**sections["checkpoint"], "accept_changes": True}
    with raises_golden():
        prepare_run(tiny_recipe(based, **sections))


def test_random_weights_stay_in_the_checkpoint_though_frozen(corpus: Path) -> None:
    sections = {**SAVES, "model": {"lora": LORA}}
    folder = train_with(corpus, **sections)
    path = folder / "checkpoints" / "step-00000012"
    assert "transformer.wte.weight" in load_file(path / "model.safetensors")
    assert "base" not in json.loads((path / "trainer.json").read_text())


def test_weights_that_the_task_freezes_itself_stay_in_the_checkpoint(based: Path) -> None:
    sections = {**sections_in(based), "task": "tests.support.tasks.frozen:TeacherTask"}
    folder = train_with(based, **sections)
    stored = tensors(folder, 12, "model")
    assert [name for name in stored if "lora_" not in name] == ["teacher.weight"]


@pytest.mark.parametrize("merge", [slow(True), False])
def test_a_resumed_run_is_exported_and_evaluated(based: Path, merge: bool, capsys: Capture) -> None:
    sections = sections_in(based, lora={**LORA, "merge": merge})
    folder = train_with(based, **sections)
    forget(folder, 8)
    train_with(based, **sections)
    loss = json.loads((folder / "evaluation.json").read_text())["metrics"]["loss"]
    assert main(["evaluate", str(folder)]) == 0
    assert f"{loss:.4f}" in capsys.readouterr().out
    assert main(["generate", str(folder), "--prompt", "step"]) == 0
    assert load_exported(export_run(folder).folder).num_parameters() > 0


def test_a_rollback_keeps_the_base(based: Path) -> None:
    sections = {
        **sections_in(based),
        "task": "tests.support.tasks.disk_faults:DiskTask",
        "data": {"shuffle": False},
        "schedule": {"type": "constant", "max_steps": 24, "warmup_steps": 2},
        "guard": {"healthy_after_steps": 3, "max_consecutive_skips": 2, "rollback_skip_steps": 4, "lowered_steps": 2},
        "options": {"poisoned": [14, 15, 16]},
    }
    folder = train_with(based, **sections)
    assert [event["to_step"] for event in events(folder, "rollback")] == [8]
    before, after = (load_file(path / "model.safetensors") for path in (based / "base", folder / "model"))
    assert torch.equal(before["transformer.wte.weight"], after["transformer.wte.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [(1, 2), (2, 1)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "deepspeed"])
def test_checkpoints_without_a_base_resume_on_any_number_of_processes(
    based: Path, strategy: str, layouts: tuple[int, int]
) -> None:
    sections = {**sections_in(based), "parallel": {"strategy": strategy}, "log": {"progress": False}}
    path = write_recipe_file(based, **sections)
    run(path, processes=layouts[0])
    folder = based / "run"
    before = losses(folder)
    forget(folder, 8)
    run(path, processes=layouts[1])
    assert steps_of(folder, "resume") == [4]
    assert losses(folder) == pytest.approx(before, rel=1e-6)
    assert all("lora_" in name for name in tensors(folder, 12, "model"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_process_refuses_the_other_base(based: Path, strategy: str) -> None:
    path = write_recipe_file(based, **{**sections_in(based), "parallel": {"strategy": strategy}})
    run(path, processes=2)
    forget(based / "run", 8)
    flip_one_bit(based / "base", "transformer.wte.weight")
    [told] = re.findall(r"^error: rank [01]: (.*SHA-256.*)", run(path, processes=2, expect=2).stderr, re.MULTILINE)
    assert_golden(without_digests(told))


def test_digests_tell_types_and_shapes_apart() -> None:
    module = nn.Module()
    for name, tensor in {"a": torch.zeros(2, 3), "b": torch.zeros(3, 2), "c": torch.zeros(2, 3).bfloat16()}.items():
        module.register_parameter(name, nn.Parameter(tensor))
    found = digests_of_base(module, ["a", "b", "c"])
    assert len(set(found.values())) == 3
