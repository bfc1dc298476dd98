"""The report of one run, or of several side by side: one HTML file that needs no network, and PNG charts beside it."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from accel_train.files import is_written_into
from accel_train.observe.curves import Curves
from accel_train.observe.evaluation import MAX_CLASSES, confusion_matrix, describe_evaluation
from accel_train.observe.headlines import Run, shared_targets
from accel_train.observe.incident_record import RECORD, incident_folders
from accel_train.observe.ledger import (
    METRICS_FILE,
    SUMMARY_FILE,
    read_events,
    read_metrics,
    read_record,
)
from accel_train.observe.pages import compare_baselines, compare_headlines, compare_recipes, describe_run
from accel_train.ownership import check_file, recipe_of_run, write_file
from accel_train.state import JsonRecord
from accel_train.task import target_rate

if TYPE_CHECKING:
    from accel_train.observe.charts import Chart

T = TypeVar("T")

EVALUATION_FILE = "evaluation.json"
SUMMARY_KINDS: dict[str, Any] = {
    **dict.fromkeys(("eval", "baselines", "sample", "data", "peak_memory_bytes", "choices", "environment"), dict),
    **dict.fromkeys(
        ("steps", "num_targets", "parameters", "world_size", "skipped_steps", "train_seconds"), (int, float)
    ),
}
"""What the page formats as a mapping or as a number, and what it has to be for that."""


def write_report(run_folders: Sequence[Path], out: Path | None = None, *, refuse: bool = False) -> Path:
    """Write the report of a run (or the comparison of several), and its charts as PNG beside it.

    Args:
        run_folders: the folders of the runs, in the order in which they are shown.
        out: the HTML file, or a folder for it; none: `report.html` in the run's folder, and `comparison.html`
            beside the first of several runs.
        refuse: rather than move what is not ours to `previous-N/`, refuse to replace it.

    Returns:
        The HTML file. The charts are called after it: `report-loss.png`, ...

    Raises:
        ValueError: no folder is given, one holds no run, or a file of the user's is in the way.
        OSError: the report cannot be written.
    """
    if not run_folders:
        raise ValueError("give at least one run folder to report on")
    runs = [load_run(Path(folder), name) for folder, name in zip(run_folders, _names(run_folders), strict=True)]
    home = Path(run_folders[0])
    out = _output_file([Path(folder) for folder in run_folders], out)
    if refuse:
        check_file(out, home, str(out))
    charts = draw_all(runs)
    pictures = {out.with_name(f"{out.stem}-{chart.name}.png"): chart.png for chart in charts}
    if is_written_into(out):
        pictures = {}  # the page holds the charts as well
    for path in pictures if refuse else ():
        check_file(path, home, str(path))
    for path, content in pictures.items():
        write_file(path, content, home)
    return write_file(out, render_page(runs, charts).encode(), home)


def load_run(folder: Path, name: str | None = None) -> Run:
    """Read what a run left behind, also one that is still running or was killed; what is damaged is left out and named.

    Raises:
        ValueError: the folder holds no run; the text says what is missing.
    """
    if not (folder / METRICS_FILE).is_file():
        missing = f"it has no {METRICS_FILE}" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"{folder} holds no run: {missing}; give the output_dir of a run")
    damage: list[str] = []
    metrics = read_metrics(folder, damage)
    by_split = {
        split: sorted((line for line in metrics if line["split"] == split), key=lambda line: line["step"])
        for split in ("train", "eval")
    }
    for line in by_split["train"]:
        line["throughput"] = target_rate(line)
    events: list[JsonRecord] = _read_or(lambda: read_events(folder, damage), [])
    curves = Curves(name or folder.resolve().name, by_split["train"], by_split["eval"], events)
    summary = _usable(read_record(folder / SUMMARY_FILE, damage), folder / SUMMARY_FILE, damage)
    evaluation = read_record(folder / EVALUATION_FILE, damage)
    recipe = recipe_of_run(folder)
    recipe_text = "" if recipe is None else _read_or(lambda: recipe.read_text(encoding="utf-8", errors="replace"), "")
    incidents = [record for path in incident_folders(folder) if (record := read_record(path / RECORD, damage))]
    return Run(curves, summary, recipe_text, evaluation, incidents, damage)


def draw_all(runs: Sequence[Run]) -> list["Chart"]:
    """The curves of the runs, and of a single run the confusion matrix."""
    from accel_train.observe.charts import draw_charts, draw_metric_charts  # matplotlib takes a second to import
    from accel_train.observe.matrix import draw_confusion_matrix

    curves = [run.curves for run in runs]
    charts = [*draw_charts(curves, shared_targets(list(runs))), *draw_metric_charts(curves)]
    found = confusion_matrix(runs[0].details("classification")) if len(runs) == 1 else None
    if found and len(found[1]) <= MAX_CLASSES:
        charts.append(draw_confusion_matrix(*found))
    return charts


def render_page(runs: Sequence[Run], charts: Sequence["Chart"]) -> str:
    """The whole HTML page as text; everything that comes from a run is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = environment.from_string((files("accel_train.observe") / "report.html").read_text(encoding="utf-8"))
    shown: dict[str, list[dict[str, Any]]] = {"run": [], "evaluation": [], "details": []}
    for chart in charts:
        forms = {"svg": Markup(chart.svg), "narrow": chart.narrow and Markup(chart.narrow), "width": chart.width}
        shown[chart.group].append(forms)
    several = len(runs) > 1
    return template.render(
        title="Comparison of runs" if several else runs[0].name,
        blocks=describe_evaluation(runs),
        evaluated_at=None if several else runs[0].evaluation.get("step"),
        baselines=compare_baselines(runs),
        pages=[describe_run(run) for run in runs],
        charts=shown,
        comparison=compare_headlines(runs) if several else [],
        recipe_differences=compare_recipes(runs) if several else [],
        footer=f"Made by accel_train, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _read_or(read: Callable[[], T], default: T) -> T:
    """What a run that was killed has not written yet is not an error."""
    try:
        return read()
    except FileNotFoundError:
        return default


def _usable(summary: JsonRecord, path: Path, damage: list[str]) -> JsonRecord:
    """A summary without the values that are not of the kind that a run writes."""
    odd = [
        name
        for name, kinds in SUMMARY_KINDS.items()
        if summary.get(name) is not None and not isinstance(summary[name], kinds)
    ]
    if odd:
        damage.append(f"{path} is damaged ({', '.join(odd)}): what cannot be read is not used")
        print(damage[-1], file=sys.stderr)
    return {name: value for name, value in summary.items() if name not in odd and value is not None}


def _names(folders: Sequence[Path]) -> list[str]:
    """The runs by their folders' names, longer where those are equal."""
    resolved = [Path(folder).resolve() for folder in folders]
    times_used = Counter(folder.name for folder in resolved)
    return [
        folder.name if times_used[folder.name] == 1 else f"{folder.parent.name}/{folder.name}" for folder in resolved
    ]


def _output_file(folders: Sequence[Path], out: Path | None) -> Path:
    name = "report.html" if len(folders) == 1 else "comparison.html"
    if out is None:
        return folders[0] / name if len(folders) == 1 else folders[0].resolve().parent / name
    if out.is_dir():
        return out / name
    above = next(path for path in out.absolute().parents if path.exists())
    if not above.is_dir():
        raise ValueError(f"--out {out}: {above} is a file; give another place")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out
