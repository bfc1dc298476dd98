"""Evaluate a finished run on its own evaluation data or on other data."""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accel_train.core.json_io import json_text
from accel_train.core.metric_names import label, show_metric
from accel_train.core.ownership import check_file, write_file
from accel_train.core.state import JsonRecord
from accel_train.data.tables import MissingColumn
from accel_train.engine.evaluation import EvaluationReader, evaluate_sets
from accel_train.inference.finished_run import TrainedRun, check_finished, counted, open_run, recipe_of_trained
from accel_train.metrics.baselines import format_scores
from accel_train.observe.run_folder import SUMMARY_FILE, read_record
from accel_train.task import Scores


def open_for_evaluation(folder: Path, data: str | None, settings: Sequence[str] = ()) -> TrainedRun:
    """Return the run, opened with data to evaluate on.

    Raises:
        ValueError: the run is not finished, has no evaluation data, or the result would replace a user's file.
    """
    check_finished(folder)
    path = evaluation_file(folder, data)
    check_file(path, folder, str(path))
    try:
        run = open_run(folder, data=data, settings=settings)
    except MissingColumn as error:
        section = recipe_of_trained(folder, data, settings).data
        labels = getattr(section, "label_columns", None) or [getattr(section, section.label_setting or "", None)]
        if data is None or error.column not in labels:
            raise
        command = shlex.join(["accel-train", "predict", str(folder), data])
        raise ValueError(f"{error}. To predict the labels of data without them, use {command}") from None
    if run.data.eval is None:
        raise ValueError(f"{folder} held out no data to evaluate on; name some: accel-train evaluate {folder} DATA")
    return run


def measure(run: TrainedRun, text: str = "evaluating") -> Scores:
    """Return the scores on all evaluation data. Equal weights give the numbers that the run itself reports at its end.

    The metrics are the loss, the task's metrics, and `num_targets`. They are equal on all processes. `text` labels the
    progress bar.
    """
    size = run.sizes.per_device_eval_batch_size
    reader = EvaluationReader(run.accelerator, run.data, size, run.reading, counted=partial(counted, text=text))
    return evaluate_sets(run.task, reader, run.inner)[1]


def write_evaluation(run: TrainedRun, measured: Scores, data: str | None) -> Path:
    """Write the results to `evaluation_file`, and return its path."""
    metrics = {name: value for name, value in measured.metrics.items() if name != "num_targets"}
    record: JsonRecord = {"step": run.steps, "metrics": metrics, "details": measured.details}
    if data is not None:
        record = {"data": data, "num_targets": measured.metrics["num_targets"], **record}
    return write_file(evaluation_file(run.folder, data), json_text(record).encode(), run.folder)


def evaluation_file(folder: Path, data: str | None) -> Path:
    """Return `evaluation.json` for the run's own data, or `evaluation-NAME.json` for other data."""
    return folder / ("evaluation.json" if data is None else f"evaluation-{short_name(data)}.json")


def short_name(data: str) -> str:
    """Return a data source's name for a file name: `test` for `tables/test.csv`, `user-set` for `user/set`."""
    path = Path(data)
    stem = path.stem if path.exists() else data
    return re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-") or "data"


def format_augmentation(details: Mapping[str, Any]) -> str:
    """Return the metrics with and without test-time augmentation, one per line. Empty without augmentation."""
    part = details.get("test_time_augmentation")
    if not part:
        return ""
    rows = [
        f"  {label(name):24}{show_metric(name, value):>14}   (without: {show_metric(name, part['without'][name])})"
        for name, value in part["with"].items()
    ]
    return "\n".join(["With test-time augmentation:", *rows])


def baselines_of(folder: Path, data: str | None) -> JsonRecord:
    """Return the baseline scores that the run recorded. Empty for other data."""
    found = {} if data is not None else read_record(folder / SUMMARY_FILE).get("baselines", {})
    return found if isinstance(found, dict) else {}


def format_measured(measured: Scores, baselines: Mapping[str, Any]) -> str:
    """Return the text of the results: metrics with baselines, test-time augmentation, and the classification report."""
    report = str(measured.details.get("classification", {}).get("report_text", "")).rstrip()
    parts = [format_scores(measured.metrics, baselines), format_augmentation(measured.details), report]
    return "\n\n".join(part for part in parts if part)
