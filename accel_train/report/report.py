"""The report of one run, or the comparison of several, as one HTML file that does not need a network."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from accel_train.core.ownership import check_file, write_file
from accel_train.core.state import JsonRecord
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.report.charts import describe_charts
from accel_train.report.evaluation import describe_evaluation
from accel_train.report.html import (
    compare_baselines,
    compare_headlines,
    compare_recipes,
    compare_times,
    describe_run,
    differ_in_evaluation_data,
    shared_targets,
)
from accel_train.report.run import Run, load_run


def made_by() -> str:
    """Return the last line of a page."""
    return f"Made by accel_train, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def write_report(
    run_folders: Sequence[Path],
    out: Path | None = None,
    *,
    refuse: bool = False,
    home: Path | None = None,
    tables: Sequence[JsonRecord] = (),
) -> Path:
    """Write the report of a run, or the comparison of several, as one HTML file.

    Args:
        run_folders: folders of the runs, in the order of display.
        out: output file, or a folder for it. Default: `report.html` in the folder of a single run, or `comparison.html`
            next to the first of several runs.
        refuse: whether to raise instead of moving a user's file to `previous-N/`.
        home: folder that keeps the digest of the file. Default: folder of the first run.
        tables: tables shown first, each with `title`, `head` (texts), and `rows` with `name` and `cells`.

    Returns:
        The written file.

    Raises:
        ValueError: no folder is given, a folder does not hold a run, or a user's file is in the way.
        OSError: the report cannot be written.
    """
    if not run_folders:
        raise ValueError("no run folder is named. Name at least one run folder")
    runs = load_runs(run_folders)
    home = home or Path(run_folders[0])
    out = _output_file([Path(folder) for folder in run_folders], out)
    if refuse:
        check_file(out, home, str(out))
    return write_file(out, render_page(runs, tables).encode(errors="replace"), home)


def load_runs(run_folders: Sequence[Path], readers: Sequence[MetricsReader | None] = ()) -> list[Run]:
    """Return the records of runs, each named after its folder. `readers` and errors are as for `load_run`."""
    named = zip(run_folders, _names(run_folders), readers or [None] * len(run_folders), strict=True)
    return [load_run(Path(folder), name, reader) for folder, name, reader in named]


@cache
def page_template(name: str = "report.html") -> Template:
    """Return the cached template of a page. Compiling it takes longer than rendering it."""
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template(name)


def render_page(runs: Sequence[Run], tables: Sequence[JsonRecord] = ()) -> str:
    """Return the HTML page as text. Everything that comes from a run is escaped."""
    several = len(runs) > 1
    title = "Comparison of runs" if several else runs[0].name
    charts = describe_charts(runs, shared_targets(runs))
    data = {"title": title, "runs": [run.name for run in runs], "charts": charts}
    return page_template().render(
        title=title,
        tables=tables,
        blocks=describe_evaluation(runs),
        evaluated_at=None if several else runs[0].evaluation.get("step"),
        baselines=compare_baselines(runs),
        pages=[describe_run(run) for run in runs],
        charts=charts,
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c"),
        script=_read("report.js"),
        uplot={
            "license": _read("uplot/LICENSE"),
            "script": _read("uplot/uPlot.iife.min.js"),
            "css": _read("uplot/uPlot.min.css"),
        },
        comparison=compare_headlines(runs) if several else [],
        other_evaluation_data=several and differ_in_evaluation_data(runs),
        times=compare_times(runs) if several else [],
        recipe_differences=compare_recipes(runs) if several else [],
        footer=made_by(),
    )


@cache
def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the runs' folders. Equal names get the parent folder's name as a prefix."""
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
        raise ValueError(f"--out {out}: {above} is a file. Name another place")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out
