"""Read the counters of a run from a checkpoint, and refuse impossible values."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from accel_train.checkpoint.store import MANIFEST, TRAINER, read_trainer
from accel_train.core.errors import CheckpointError
from accel_train.core.json_io import read_plain_json
from accel_train.core.state import TrainState

_STATE = TypeAdapter(TrainState)


def read_state(folder: Path) -> TrainState:
    """Return the counters of a checkpoint after checking that a run can have had them.

    Raises:
        CheckpointError: a counter has the wrong type or range, or the step is not the saved step.
    """
    trainer = read_trainer(folder)
    try:
        saved_step = read_plain_json(folder / MANIFEST)["step"]
        state = _STATE.validate_json(json.dumps(trainer["state"]), strict=True)
        unknown = trainer["state"].keys() - {field.name for field in fields(TrainState)}
        last = trainer["identity"]["schedule.max_steps"]
        problems = [f"{name} is unknown" for name in sorted(unknown)]
        # Only losses, metrics and logarithms may be negative.
        signed = ("losses", "grad_norms", "best_metric", "best_loss", "last_loss")
        counters = asdict(state)
        for name, value in counters.pop("untrained").items():
            if not math.isfinite(value):
                problems.append(f"untrained.{name}={value} is out of range")
        for name, value in _numbers(counters):
            if not math.isfinite(value) or (value < 0 and name not in signed):
                problems.append(f"{name}={value} is out of range")
        if state.step != saved_step:
            problems.append(f"step={state.step}, but the checkpoint belongs to step {saved_step}")
        if state.step > last:
            problems.append(f"step={state.step}, but the run has {last} steps")
        scaler = trainer["scaler"] or {}
        for name, value in scaler.items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                problems.append(f"scaler.{name}={value!r} is out of range")
    except ValidationError as error:
        first = error.errors()[0]
        problems = [f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise CheckpointError(f"{folder / TRAINER}: invalid run state: {problems[0]} (of {len(problems)})")
    return state


def _numbers(tree: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _numbers(each)
            elif each is not None:
                yield name, each
