"""The records of a run's folder, read for the report: also of a run that is still running or was killed."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accel_train.core.state import JsonRecord
from accel_train.observe import run_folder
from accel_train.observe.goodput import goodput_of, read_launches
from accel_train.observe.incident_record import INCIDENTS, RECORD, TEXT, incident_folders, read_incident
from accel_train.observe.incident_text import main_facts
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.recipe.yaml_core import parse_yaml
from accel_train.task import TARGET_UNITS, target_rate

EVALUATION_FILE = "evaluation.json"
SUMMARY_KINDS: dict[str, Any] = {
    **dict.fromkeys(
        ("eval", "baselines", "not_beaten", "sample", "data", "peak_memory_bytes", "choices", "environment"), dict
    ),
    **dict.fromkeys(
        ("steps", "num_targets", "parameters", "world_size", "skipped_steps", "train_seconds"), (int, float)
    ),
}
"""Types that the page needs of a summary's values, to format them as a mapping or as a number."""


@dataclass(frozen=True)
class Run:
    """The records of a run's folder; `summary` is empty if it has not ended, `evaluation` if it was never evaluated."""

    name: str
    train: Sequence[JsonRecord] = ()
    """Lines of metrics.jsonl about steps, in their order; `evals` are those about evaluations."""
    evals: Sequence[JsonRecord] = ()
    events: Sequence[JsonRecord] = ()
    summary: JsonRecord = field(default_factory=dict)
    recipe_text: str = ""
    evaluation: JsonRecord = field(default_factory=dict)
    """evaluation.json: `step`, `metrics`, `details`."""
    examples: JsonRecord = field(default_factory=dict)
    """examples.json: held-out samples that the run gets wrong."""
    incidents: Sequence[JsonRecord] = ()
    """Records of its incidents, by step."""
    system: Sequence[JsonRecord] = ()
    """Lines of metrics.jsonl about the machine; memory in GiB."""
    launches: Sequence[JsonRecord] = ()
    """Lines of launches.jsonl, by their start."""
    profiles: Sequence[str] = ()
    """Paths of its traces, tables of operations and snapshots of memory, from the folder."""
    damage: Sequence[str] = ()
    """Sentences about files that cannot be read."""

    def final_metrics(self) -> Mapping[str, Any]:
        """Return all of the last evaluation: of evaluation.json, else of the summary, else of the last line."""
        for found in (self.evaluation.get("metrics"), self.summary.get("eval"), *reversed(self.evals)):
            if isinstance(found, Mapping) and found:
                return found
        return {}

    def details(self, part: str) -> Mapping[str, Any]:
        """Return a part of evaluation.json's details; empty where there is none."""
        found = self.evaluation.get("details")
        found = found.get(part) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def goodput(self) -> JsonRecord:
        """The accounts of the time of all launches; empty where they are not recorded."""
        return goodput_of(self.launches) if self.launches else {}

    @cached_property
    def recipe(self) -> dict[str, Any] | None:
        """The settings of the recipe; None where it cannot be read."""
        try:
            recipe = parse_yaml(self.recipe_text, run_folder.RECIPE_FILE)[0] or {}
        except ValueError:
            return None
        return recipe if isinstance(recipe, dict) else None

    @property
    def targets(self) -> str:
        """Unit of `num_targets`: `tokens`, `images` ...; `targets` for a custom task."""
        recipe = self.recipe
        return "targets" if recipe is None else TARGET_UNITS.get(str(recipe.get("task", "causal-lm")), "targets")


def load_run(folder: Path, name: str | None = None, reader: MetricsReader | None = None) -> Run:
    """Read the records of a run, also one that is still running or was killed; what is damaged is left out and named.

    With the same `reader` a later call reads the new lines alone.

    Raises:
        ValueError: the folder holds no run; the text says what is missing.
    """
    if not (folder / run_folder.METRICS_FILE).is_file():
        missing = f"it has no {run_folder.METRICS_FILE}" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"{folder} holds no run: {missing}; give the output_dir of a run")
    damage: list[str] = []
    lines = sorted(
        (reader or MetricsReader(folder / run_folder.METRICS_FILE)).read(damage), key=lambda line: line["step"]
    )
    train, evals = ([line for line in lines if line["split"] == split] for split in ("train", "eval"))
    system = [_in_gib(line) for line in lines if line["split"] == "system"]
    # A run that was killed may not have written one yet.
    events = run_folder.read_events(folder, damage) if (folder / run_folder.EVENTS_FILE).is_file() else []
    summary = _usable_summary(folder / run_folder.SUMMARY_FILE, damage)
    for record in (*train, summary):
        record["throughput"] = target_rate(record)
    recipe = folder / run_folder.RECIPE_FILE
    return Run(
        name or folder.resolve().name,
        train,
        evals,
        events,
        summary,
        recipe_text=recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else "",
        evaluation=run_folder.read_record(folder / EVALUATION_FILE, damage),
        examples=run_folder.read_record(folder / run_folder.EXAMPLES_FILE, damage),
        system=system,
        launches=read_launches(folder),
        incidents=_usable_incidents(folder, damage),
        profiles=[
            path.relative_to(folder).as_posix() for path in sorted((folder / run_folder.PROFILE_FOLDER).glob("rank-*"))
        ],
        damage=damage,
    )


def _usable_incidents(folder: Path, damage: list[str]) -> list[JsonRecord]:
    """Return the records of the incidents that can be shown, with their `facts` and the `link` to their text."""
    found = []
    for path in incident_folders(folder):
        try:
            record = read_incident(path)
            facts, advice = main_facts(record), [str(each) for each in record["next"]]
        except Exception as error:  # of values that no run wrote
            reason = (
                f"{path / RECORD}: {type(error).__name__}: {error}" if type(error) is not ValueError else str(error)
            )
            run_folder.note_damage(f"{reason}; it is not used", damage)
        else:
            link = f"{INCIDENTS}/{path.name}/{TEXT}"
            found.append({**record, "facts": facts, "next": advice, "link": link})
    return found


def _in_gib(line: JsonRecord) -> JsonRecord:
    """Return a line with `..._gib` in place of `..._bytes`."""
    return {
        name.replace("_bytes", "_gib"): value / 2**30
        if name.endswith("_bytes") and type(value) in (int, float)
        else value
        for name, value in line.items()
    }


def _usable_summary(path: Path, damage: list[str]) -> JsonRecord:
    """Return a summary without the values that are not of the kind that a run writes."""
    summary = run_folder.read_record(path, damage)
    odd = [
        name
        for name, kinds in SUMMARY_KINDS.items()
        if summary.get(name) is not None and not isinstance(summary[name], kinds)
    ]
    if odd:
        damage.append(f"{path} is damaged ({', '.join(odd)}): what cannot be read is not used")
        print(damage[-1], file=sys.stderr)
    return {name: value for name, value in summary.items() if name not in odd and value is not None}
