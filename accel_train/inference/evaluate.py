"""A finished run's metrics, on the data it was evaluated on or on other data."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accel_train.core.json_io import json_text
from accel_train.core.ownership import check_file, write_file
from accel_train.engine.evaluation import EvaluationReader, evaluate
from accel_train.inference.finished_run import TrainedRun, check_finished, counted, open_run
from accel_train.metrics.baselines import format_scores
from accel_train.observe.run_folder import SUMMARY_FILE, read_record
from accel_train.task import Scores


def open_for_evaluation(folder: Path, data: str | None, settings: Sequence[str] = ()) -> TrainedRun:
    """Return the run with data to evaluate it on.

    Raises:
        ValueError: there is no finished run, no data to evaluate on, or a file of the user's where the result is to go.
    """
    check_finished(folder)
    path = evaluation_file(folder, data)
    check_file(path, folder, str(path))
    run = open_run(folder, data=data, settings=settings)
    if run.data.eval is None:
        raise ValueError(f"{folder} held out no data to evaluate on; name some: accel-train evaluate {folder} DATA")
    return run


def measure(run: TrainedRun, text: str = "evaluating") -> Scores:
    """Evaluate on all of the data, as the run itself does at its end: with the same weights, the same numbers.

    The metrics are the loss, the task's, and `num_targets`; they are the same on all processes. `text` names the work while it lasts.
    """
    size = run.sizes.per_device_eval_batch_size
    reader = EvaluationReader(run.accelerator, run.data, size, run.reading, counted=partial(counted, text=text))
    result = evaluate(reader, run.inner)
    found = run.task.score(result.loss, result.totals, run.data)
    return Scores({"loss": result.loss, **found.metrics, "num_targets": result.num_targets}, found.details)


def write_evaluation(run: TrainedRun, measured: Scores, data: str | None) -> Path:
    """Write the results to `evaluation_file`, and return its path."""
    metrics = {name: value for name, value in measured.metrics.items() if name != "num_targets"}
    record: dict[str, Any] = {"step": run.steps, "metrics": metrics, "details": measured.details}
    if data is not None:
        record = {"data": data, "num_targets": measured.metrics["num_targets"], **record}
    return write_file(evaluation_file(run.folder, data), json_text(record).encode(), run.folder)


def evaluation_file(folder: Path, data: str | None) -> Path:
    """Return `evaluation.json` for the run's own data, `evaluation-NAME.json` for other data."""
    return folder / ("evaluation.json" if data is None else f"evaluation-{short_name(data)}.json")


def short_name(data: str) -> str:
    """Return a data source's name within a file name: `test` for `tables/test.csv`, `user-set` for `user/set`."""
    path = Path(data)
    stem = path.stem if path.exists() else data
    return re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-") or "data"


def format_augmentation(details: Mapping[str, Any]) -> str:
    """Return the metrics with and without test-time augmentation, a line each; empty where there was none."""
    part = details.get("test_time_augmentation")
    if not part:
        return ""
    rows = [
        f"  {name.replace('_', ' '):24}{value:>14,.4f}   (without: {part['without'][name]:,.4f})"
        for name, value in part["with"].items()
    ]
    return "\n".join(["With test-time augmentation:", *rows])


def baselines_of(folder: Path, data: str | None) -> dict[str, Any]:
    """Return the scores of baselines that the run has written down; none on other data."""
    found = {} if data is not None else read_record(folder / SUMMARY_FILE).get("baselines", {})
    return found if isinstance(found, dict) else {}


def format_measured(measured: Scores, baselines: Mapping[str, Any]) -> str:
    """Return metrics beside the baselines', those with test-time augmentation, and the classification report where there is one."""
    report = str(measured.details.get("classification", {}).get("report_text", "")).rstrip()
    parts = [format_scores(measured.metrics, baselines), format_augmentation(measured.details), report]
    return "\n\n".join(part for part in parts if part)
