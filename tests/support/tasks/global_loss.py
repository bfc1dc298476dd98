"""Claims about runs of the tasks whose loss is over the global batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from accel_train.core.json_io import load_json
from tests.support.runs import checkpoint, events


def assert_step_2_is_skipped(run: Path, bad: int) -> None:
    """Assert that step 2 changed no weight, and that the incident names the sample `bad`."""
    assert [each["step"] for each in events(run, "skip")] == [2]
    before, after = (checkpoint(run, step) for step in (1, 2))
    weights = [name for name in before if name.startswith("model.safetensors")]
    assert weights
    assert all(torch.equal(before[name], after[name]) for name in weights)
    incident = load_json(run / "incidents/step-00000002/incident.json")
    assert [each["samples"] for each in incident["processes"] if each["happens_again"]] == [[bad]]


def assert_resumes_to_the_bit(train: Callable[..., Any], folder: Path, step: int, **sections: Any) -> None:
    """Assert that a run that is stopped in a step and resumed has the losses and weights of a run that is not."""
    sections["optimizer"] = {"learning_rate": 1e-3, "ema_decay": 0.9}
    whole = train(folder, "whole", 1, 4, **sections)
    train(folder, "parts", 1, 4, expect=75, options={"term_at": {"step": step, "rank": 0}}, **sections)
    assert train(folder, "parts", 1, 4, **sections) == whole
    ours, theirs = (load_file(folder / name / "model/model.safetensors") for name in ("parts", "whole"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
