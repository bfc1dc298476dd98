"""Compare runs, checkpoints and tensors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_train.checkpoint.sharded import CheckpointReader
from accel_train.checkpoint.weight_files import CARD
from accel_train.core.ownership import MARKER
from tests.support.runs import checkpoint, events, losses, metrics

Train = Callable[..., Path]


def assert_same_run(run: Path, other: Path, tolerance: float = 1e-6) -> None:
    ours, theirs = losses(run), losses(other)
    assert ours.keys() == theirs.keys()
    assert len({round(loss, 2) for loss in theirs.values()}) > len(theirs) / 2, (
        "nothing is compared where nothing moves"
    )
    assert all(ours[step] == pytest.approx(theirs[step], rel=tolerance) for step in ours)
    assert [each["loss"] for each in metrics(run, "eval")] == pytest.approx(
        [each["loss"] for each in metrics(other, "eval")], rel=tolerance
    )


def tensors(run: Path, step: int, kind: str) -> dict[str, torch.Tensor]:
    stored = CheckpointReader(run / "checkpoints" / f"step-{step:08d}", kind)
    found = {name: torch.empty(shape) for name, shape in stored.shapes.items()}
    stored.read_into(found)
    return found


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_same_bits_of_runs(run: Path, other: Path, steps: int) -> None:
    """Each loss, evaluation, weight, and moment of `steps` steps, to the bit."""
    assert list(losses(run)) == list(range(1, steps + 1))
    assert losses(run) == losses(other)
    ours, theirs = ([{**line, "seconds": None} for line in metrics(each, "eval")] for each in (run, other))
    assert ours == theirs
    assert_same_bits(checkpoint(run, steps), checkpoint(other, steps))


def files_of_model(run: Path) -> dict[str, bytes]:
    """Return the files in `model/` by name, without the card, which names the data by their place, and its digest."""
    return {path.name: path.read_bytes() for path in (run / "model").iterdir() if path.name not in (CARD, MARKER)}


Layout = tuple[int, dict[str, Any]]
"""Processes, and the recipe's `parallel`."""


def assert_loaded_to_the_bit(train: Train, saved: Layout, loaded: Layout, steps: int, text: dict[str, Any]) -> None:
    """A finished run, started again: it loads its last checkpoint, trains no step, and writes `model/` of what it
    loaded.
    """
    run = train("run", saved[0], parallel=saved[1], **text)
    wrote = load_file(run / "model" / "model.safetensors")
    weights = tensors(run, steps, "model")
    assert_same_bits({name: weights[name] for name in wrote}, wrote)
    shutil.rmtree(run / "model")
    assert train("run", loaded[0], parallel=loaded[1], **text) == run
    assert [event["step"] for event in events(run, "resume")] == [steps]
    assert_same_bits(load_file(run / "model" / "model.safetensors"), wrote)
