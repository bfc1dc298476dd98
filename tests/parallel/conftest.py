"""Train one recipe under several layouts, and compare the runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train.checkpoint.sharded import CheckpointReader
from tests.support.comparisons import Train, assert_same_bits, assert_same_run, tensors
from tests.support.processes import run_forked
from tests.support.runs import Settings, metrics, steps_of, write_corpus, write_recipe_file

RESNET = {
    "model_type": "resnet",
    "num_channels": 1,
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
IMAGES: Settings = {
    "task": "image-classification",
    "model": {"config": RESNET},
    "data": {"train": "digits", "image_size": 16},
    "tokenizer": "auto",
    "schedule": {"max_steps": 5},
    "evaluate": {"every_steps": 2, "max_samples": 30},
}
SHORT_STEPS: Settings = {
    "data": {"last_batch": "short", "sequence_length": 64},
    "batch": {"global_batch_size": 12, "per_device_batch_size": 1},
    "schedule": {"max_steps": None, "num_epochs": 1},
    "optimizer": {"learning_rate": 1e-2},
}


def nan_at(step: int, rank: int = 1, last: int = 6) -> Settings:
    """Sections of a run with checkpoints of every step, and a loss of NaN on one process in one of them."""
    return {
        "schedule": {"max_steps": last, "warmup_steps": 0, "type": "constant"},
        "checkpoint": {"every_steps": 1, "keep": 10},
        "options": {"nan_at": {"step": step, "rank": rank}},
    }


def train_in(folder: Path, processes: int, parallel: Settings | None = None, *, code: int = 0, **sections: Any) -> Path:
    """Train in this folder until all processes end with this code; returns the run folder."""
    folder.mkdir(exist_ok=True)
    write_corpus(folder)
    recipe = write_recipe_file(folder, parallel=parallel or {}, **sections)
    preload = ["deepspeed"] if (parallel or {}).get("strategy") == "deepspeed" else []
    preload += ["deepspeed.runtime.sequence_parallel.ulysses_sp"] if "sp_size" in (parallel or {}) else []
    forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes", preload=preload)
    forked.expect(code)
    assert not preload or "Warning" not in forked.stderr(0)
    return folder / "run"


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`train_in` a folder of this name."""
    return lambda name, *arguments, **sections: train_in(tmp_path / name, *arguments, **sections)


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the module's TEXT on one process."""
    return train_in(tmp_path_factory.mktemp("one") / "one", 1, **request.module.TEXT)


def reads(run: Path, rank: int) -> list[int]:
    """The samples that a process has read."""
    lines = (run.parent / f"rank-{rank}.jsonl").read_text().splitlines()
    return [index for line in lines for index in json.loads(line)]


def assert_same_norms(run: Path, other: Path, tolerance: float = 1e-5) -> None:
    """The losses are the same, and the norms of the gradients."""
    assert_same_run(run, other, min(tolerance, 1e-6))
    ours, theirs = ([each["grad_norm"] for each in metrics(folder)] for folder in (run, other))
    assert ours == pytest.approx(theirs, rel=tolerance)


def assert_skipped_to_the_bit(run: Path, step: int) -> None:
    """This step alone is skipped; no process changed a bit in it, and the next step changed weights."""
    for kind in ("model", "optimizer", "average"):
        if CheckpointReader(run / "checkpoints" / f"step-{step:08d}", kind).shapes:
            assert_same_bits(tensors(run, step - 1, kind), tensors(run, step, kind))
    before, after = (tensors(run, at, "model") for at in (step, step + 1))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert steps_of(run, "skip") == [step]
