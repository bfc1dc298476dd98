"""Read the records in a run's folder for the report. The run may still be running or may have been killed."""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from shlex import quote
from typing import Any

from accel_train.core.model_card import FILE, FOLDER
from accel_train.core.state import JsonRecord
from accel_train.observe import run_folder
from accel_train.observe.goodput import goodput_of, read_launches
from accel_train.observe.incident_record import INCIDENTS, RECORD, TEXT, incident_folders, main_facts, read_incident
from accel_train.observe.metrics_reader import MetricsReader
from accel_train.recipe.names import look_up
from accel_train.recipe.tasks import DEFAULT_TASK, TASKS, targets_of
from accel_train.recipe.yaml_core import parse_yaml
from accel_train.task import target_rate

EVALUATION_FILE = "evaluation.json"
MOST_LINES = 5
"""Lines of Python that a terminal shows of a model card."""
SUMMARY_KINDS: dict[str, Any] = {
    **dict.fromkeys(
        ("eval", "baselines", "not_beaten", "sample", "data", "peak_memory_bytes", "choices", "environment"), dict
    ),
    **dict.fromkeys(
        ("steps", "num_targets", "parameters", "world_size", "skipped_steps", "train_seconds"), (int, float)
    ),
}
"""Required types of summary values: the page formats them as a mapping or as a number."""


@dataclass(frozen=True)
class Run:
    """The records in a run's folder.

    `summary` is empty if the run has not ended, and `evaluation` if the run was never evaluated.
    """

    name: str
    train: Sequence[JsonRecord] = ()
    """Lines of metrics.jsonl about training steps, sorted by step. `evals` has the lines about evaluations."""
    evals: Sequence[JsonRecord] = ()
    events: Sequence[JsonRecord] = ()
    summary: JsonRecord = field(default_factory=dict)
    recipe_text: str = ""
    example: str = ""
    """Python lines that use the model, from the README next to its weights."""
    evaluation: JsonRecord = field(default_factory=dict)
    """Contents of evaluation.json: `step`, `metrics`, `details`."""
    examples: JsonRecord = field(default_factory=dict)
    """Contents of examples.json: held-out samples that the model gets wrong."""
    incidents: Sequence[JsonRecord] = ()
    """Records of the run's incidents, sorted by step."""
    system: Sequence[JsonRecord] = ()
    """Lines of metrics.jsonl about the machine, with memory in GiB."""
    launches: Sequence[JsonRecord] = ()
    """Lines of launches.jsonl, sorted by start time."""
    profiles: Sequence[str] = ()
    """Paths of traces, operation tables and memory snapshots, relative to the folder."""
    damage: Sequence[str] = ()
    """Messages about files that cannot be read."""
    folder: Path = Path()

    def final_metrics(self) -> JsonRecord:
        """Return the metrics of the last evaluation, from evaluation.json, the summary, or the last evaluation line."""
        for found in (self.evaluation.get("metrics"), self.summary.get("eval"), *reversed(self.evals)):
            if isinstance(found, dict) and found:
                return found
        return {}

    def details(self, part: str) -> JsonRecord:
        """Return a part of evaluation.json's details, or an empty mapping if it is missing."""
        found = look_up(self.evaluation, f"details.{part}")
        return found if isinstance(found, dict) else {}

    @cached_property
    def goodput(self) -> JsonRecord:
        """Goodput of all launches, or an empty dict if launches are not recorded."""
        return goodput_of(self.launches) if self.launches else {}

    @cached_property
    def recipe(self) -> JsonRecord | None:
        """Settings of the recipe, or None if the recipe cannot be read."""
        try:
            recipe = parse_yaml(self.recipe_text, run_folder.RECIPE_FILE)[0] or {}
        except ValueError:
            return None
        return recipe if isinstance(recipe, dict) else None

    @property
    def task(self) -> str:
        """Task of the recipe, or an empty text if the recipe cannot be read."""
        return "" if self.recipe is None else str(self.recipe.get("task", DEFAULT_TASK))

    @property
    def targets(self) -> str:
        """Unit of `num_targets`: `tokens`, `images`, ... For a custom task, `targets`."""
        return targets_of(self.task)


def load_run(folder: Path, name: str | None = None, reader: MetricsReader | None = None) -> Run:
    """Read the records of a run, also if the run is still running or was killed.

    Damaged records are left out and listed in `damage`. A later call with the same `reader` only reads new lines.

    Raises:
        ValueError: the folder does not hold a run; the message names the missing file or folder.
    """
    if not (folder / run_folder.METRICS_FILE).is_file():
        missing = run_folder.METRICS_FILE if folder.is_dir() else "folder"
        raise ValueError(f"{folder} is not a run folder: {missing} not found. Name the output_dir of a run")
    damage: list[str] = []
    lines = sorted(
        (reader or MetricsReader(folder / run_folder.METRICS_FILE)).read(damage), key=lambda line: line["step"]
    )
    train, evals = ([line for line in lines if line["split"] == split] for split in ("train", "eval"))
    system = [_in_gib(line) for line in lines if line["split"] == "system"]
    # A killed run may not have written any events yet.
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
        example=_example(folder / "model"),
        evaluation=run_folder.read_record(folder / EVALUATION_FILE, damage),
        examples=run_folder.read_record(folder / run_folder.EXAMPLES_FILE, damage),
        system=system,
        launches=read_launches(folder),
        incidents=_usable_incidents(folder, damage),
        profiles=[
            path.relative_to(folder).as_posix() for path in sorted((folder / run_folder.PROFILE_FOLDER).glob("rank-*"))
        ],
        damage=damage,
        folder=folder,
    )


def _example(model: Path) -> str:
    """Return the first Python lines in the README of a model, with its path."""
    card = model / FILE
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    found = re.search(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return "" if found is None else found[1].replace(FOLDER, model.as_posix()).rstrip()


def command_to_use(folder: Path, recipe: JsonRecord | None) -> str:
    """Return the command that uses the model of a run; empty for a custom task."""
    spec = TASKS.get(str(look_up(recipe, "task") or DEFAULT_TASK))
    if recipe is None or spec is None or look_up(recipe, "tokenizer") == "none":
        return ""
    run = quote(str(folder))
    if spec.gives == "continuation":
        is_chat = look_up(recipe, "data.format") == "chat"
        return f"accel-train chat {run}" if is_chat else f"accel-train generate {run} --prompt 'Once upon a time'"
    train = look_up(recipe, "data.train")
    first = train[0] if isinstance(train, list) and train else train
    suffix = PurePath(str(first.get("source") if isinstance(first, dict) else first)).suffix
    data = "FOLDER" if "image_size" in spec.data.model_fields else f"NEW{suffix or '.csv'}"
    return f"accel-train predict {run} {data} --out predictions.csv"


def how_to_use(folder: Path, recipe: JsonRecord | None) -> list[str]:
    """Return lines that show how to use the model of a finished run: the command, and the code of its card.

    A Trainer writes neither.
    """
    code = [f"  {line}" for line in _example(folder / "model").splitlines() if line.strip()]
    if len(code) > MOST_LINES:
        code = [f"  in Python: see {folder / 'model' / FILE}"]
    command = command_to_use(folder, recipe)
    lines = [*([f"  {command}"] if command else []), *code]
    return ["Use it:", *lines] if lines else []


def _usable_incidents(folder: Path, damage: list[str]) -> list[JsonRecord]:
    """Return the records of readable incidents, with their `facts` and the `link` to their text."""
    found = []
    for path in incident_folders(folder):
        try:
            incident = read_incident(path)
            facts = main_facts(incident)
        # The record has values that were not written by a run.
        except Exception as error:
            kind = "" if type(error) is ValueError else f"{path / RECORD}: {type(error).__name__}: "
            run_folder.note_damage(f"{kind}{error}; it is ignored", damage)
        else:
            link = f"{INCIDENTS}/{path.name}/{TEXT}"
            found.append({**asdict(incident), "facts": facts, "link": link})
    return found


def _in_gib(line: JsonRecord) -> JsonRecord:
    """Return a line with the values `..._bytes` as `..._gib`, too."""
    sizes = [name for name, value in line.items() if name.endswith("_bytes") and isinstance(value, int | float)]
    return line | {name.replace("_bytes", "_gib"): line[name] / 2**30 for name in sizes}


def _usable_summary(path: Path, damage: list[str]) -> JsonRecord:
    """Return a summary without missing values and values of the wrong type."""
    summary = run_folder.read_record(path, damage)
    odd = [
        name
        for name, kinds in SUMMARY_KINDS.items()
        if summary.get(name) is not None and not isinstance(summary[name], kinds)
    ]
    if odd:
        damage.append(f"{path} is damaged ({', '.join(odd)}): unreadable parts are ignored")
        print(damage[-1], file=sys.stderr)
    return {name: value for name, value in summary.items() if name not in odd and value is not None}
