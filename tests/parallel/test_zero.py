"""ZeRO trains as DDP: the same losses, the same guard, checkpoints for any layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.conftest import IMAGES, assert_same_norms, assert_skipped_to_the_bit, nan_at, train_in
from tests.support.comparisons import assert_same_bits, assert_same_run, tensors
from tests.support.marks import slow
from tests.support.runs import Settings, checkpoint, events, losses, model_of, recipe_dict

DDP: Settings = {}
FSDP2 = {"strategy": "fsdp2"}
STAGES = (1, 2, 3)
SLOW_1_AND_2 = (slow(1), slow(2), 3)
TEXT = {
    "batch": {"global_batch_size": 12, "per_device_batch_size": 2},
    "schedule": {"max_steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 5},
    "evaluate": {"every_steps": 4},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5},  # every gradient is clipped
    "options": {"ragged": True},
}


def zero(stage: int) -> Settings:
    return {"strategy": "deepspeed", "zero_stage": stage}


def beside_ddp(folder: Path, stage: int, **sections: Any) -> list[Path]:
    """The same run under ZeRO and DDP."""
    layouts = {"zero": zero(stage), "ddp": DDP}
    return [train_in(folder / name, 2, layout, **sections) for name, layout in layouts.items()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The run under a stage, on two processes: made once, and copied."""
    made: dict[int, Path] = {}

    def run_of(stage: int) -> Path:
        if stage not in made:
            made[stage] = train_in(tmp_path_factory.mktemp(f"stage{stage}"), 2, zero(stage), **TEXT)
        return made[stage]

    return run_of


@pytest.mark.parametrize("stage", SLOW_1_AND_2)
def test_losses_and_gradient_norms_are_those_of_one_process_with_clipping_and_accumulation(
    finished: Callable[[int], Path], undisturbed: Path, stage: int
) -> None:
    assert_same_norms(finished(stage), undisturbed, 1e-6)


@pytest.mark.parametrize("stage", SLOW_1_AND_2)
def test_a_checkpoint_is_that_of_ddp_by_name_and_value(
    finished: Callable[[int], Path], undisturbed: Path, stage: int
) -> None:
    ours, theirs = checkpoint(finished(stage), 8), checkpoint(undisturbed, 8)
    assert {name: (each.shape, each.dtype) for name, each in ours.items()} == {
        name: (each.shape, each.dtype) for name, each in theirs.items()
    }
    # Adam divides noise by its own size where a gradient is nearly zero: a part in 1e4 of the steps made so far.
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=3e-6) for name in ours)
    assert not list((finished(stage) / "checkpoints").rglob("*.pt"))


@pytest.mark.parametrize("stage", SLOW_1_AND_2)
def test_nan_on_one_process_is_skipped_on_both_to_the_bit(tmp_path: Path, stage: int) -> None:
    assert_skipped_to_the_bit(train_in(tmp_path, 2, zero(stage), **nan_at(4)), 4)


def test_a_bias_of_one_number_over_two_processes_is_saved_whatever_lay_in_its_padding(tmp_path: Path) -> None:
    """Deterministic, torch fills all memory that it is not asked to clear with NaN, DeepSpeed's padding with it."""
    run = train_in(
        tmp_path,
        2,
        zero(3),
        task="tests.support.tasks.number_faults:FaultyRegression",
        windows=False,
        precision={"deterministic": True},
        schedule={"max_steps": 2},
        checkpoint={"every_steps": 1, "keep": 3},
        options={"num_samples": 64},
    )
    assert events(run, "checkpoint_refused") == []
    assert tensors(run, 2, "model")["head.bias"].shape == (1,)


@pytest.mark.slow
def test_stopped_and_gone_on_under_other_layouts_the_losses_are_those_of_one_process(
    tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    for parallel, stop in ((zero(3), 3), (DDP, 5), (zero(2), None)):
        begun = len(losses(run)) if run.exists() else 0
        # Three micro-batches a step: the fault is counted in those.
        fault = {} if stop is None else {"term_at": {"step": (stop - begun) * 3 - 1, "rank": 1}}
        sections = {**TEXT, "options": {"ragged": True, **fault}}
        train_in(tmp_path, 2, parallel, code=0 if stop is None else 75, **sections)
    assert len(events(run, "resume")) == 2
    assert_same_run(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_loaded_and_saved_again_under_zero_is_the_same_to_the_bit(tmp_path: Path, stage: int) -> None:
    """A step whose update is not made lies between the two."""
    steps = {
        "schedule": {"max_steps": 6, "warmup_steps": 0, "type": "constant"},
        "checkpoint": {"every_steps": 1, "keep": 9},
    }
    run = train_in(tmp_path, 2, DDP, code=75, **steps, options={"term_at": {"step": 3, "rank": 1}})
    last = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    train_in(tmp_path, 2, zero(stage), **steps, options={"nan_at": {"step": 1, "rank": 0}})
    for kind in ("model", "optimizer"):
        assert_same_bits(tensors(run, last, kind), tensors(run, last + 1, kind))


CHANGES: dict[str, Settings] = {
    "checkpointing": {"precision": {"gradient_checkpointing": True}},
    "untied": {"model": {"config": {"tie_word_embeddings": False}}},
    "sgd": {"optimizer": {"name": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}},
    "short-steps": {
        "data": {"last_batch": "short", "sequence_length": 64}, "schedule": {"max_steps": None, "num_epochs": 1},
    },
    "bf16": {"precision": {"mixed_precision": "bf16"}},
    "adapters": {"model": {"lora": {"rank": 2}}},
    "frozen": {"model": {"freeze": ["*.wte.*", "*.h.0.*"]}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "stage"), [*((change, 3) for change in CHANGES), ("short-steps", 1), ("adapters", 2), ("untied", 2)]
)
def test_losses_are_those_of_ddp_however_the_run_is_changed(tmp_path: Path, change: str, stage: int) -> None:
    sections = CHANGES[change]
    if "config" in sections.get("model", {}):
        config = recipe_dict(tmp_path)["model"]["config"] | sections["model"]["config"]
        sections = {"model": {"config": config}}
    sections = {**TEXT, **sections}
    # In bf16 a sum in another order is another bf16 number.
    is_exact = "mixed_precision" not in sections.get("precision", {})
    ours, theirs = beside_ddp(tmp_path, stage, **sections)
    assert_same_run(ours, theirs, 2e-6 if is_exact else 2e-3)
    left, right = (model_of(run) for run in (ours, theirs))
    assert left.keys() == right.keys()
    assert not is_exact or all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-5) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_averaged_weights_are_those_of_ddp_also_of_a_run_that_was_stopped(tmp_path: Path, stage: int) -> None:
    sections = {**TEXT, "optimizer": {**TEXT["optimizer"], "ema_decay": 0.9}}
    stopped = {**sections, "options": {"ragged": True, "term_at": {"step": 20, "rank": 0}}}
    train_in(tmp_path / "zero", 2, zero(stage), code=75, **stopped)
    ours, theirs = beside_ddp(tmp_path, stage, **sections)
    assert_same_run(ours, theirs)
    left, right = (tensors(run, 8, "average") for run in (ours, theirs))
    assert left.keys() == right.keys()
    assert all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-6) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_after_a_rollback_the_run_is_that_of_ddp(tmp_path: Path, stage: int) -> None:
    """Gradients of the step that is not made are let go, and moments of the checkpoint are put back."""
    sections = {
        "schedule": {"max_steps": 20, "warmup_steps": 0, "type": "constant"},
        "checkpoint": {"every_steps": 2, "keep": 9},
        "guard": {"max_consecutive_skips": 0, "healthy_after_steps": 3, "rollback_skip_steps": 2},
        "options": {"nan_at": {"step": 12, "rank": 1}},
    }
    ours, theirs = beside_ddp(tmp_path, stage, **sections)
    assert len(events(ours, "rollback")) == len(events(theirs, "rollback")) == 1
    assert_same_run(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_image_model_with_running_statistics_trains_as_with_ddp_and_its_best_weights_come_back(
    tmp_path: Path, stage: int
) -> None:
    sections = {**IMAGES, "checkpoint": {"every_steps": 2, "load_best_model_at_end": True}}
    ours, theirs = beside_ddp(tmp_path, stage, **sections)
    # Biases before a batch norm have gradients of rounding noise, which Adam makes steps of.
    assert_same_run(ours, theirs, 2e-5)
    assert len(events(ours, "best_model")) == len(events(theirs, "best_model"))
