"""Results of commands that are about runs, this machine and the package, as `--json` prints them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from accel_train.cli.results.training import Number


class EvaluateResult(TypedDict):
    """`evaluate`: metrics of a finished run."""

    run: str
    data: str | None
    """Null for the data that the run held out."""
    metrics: Mapping[str, Number | int]
    details: Mapping[str, Any]
    """By the task: by class, confusion matrix, ..."""
    file: str
    """Where they are written, too."""


class PredictResult(TypedDict):
    """`predict`: the table that was written."""

    run: str
    data: str | None
    """Null for the data that the run held out."""
    file: str
    rows: int


class ExportResult(TypedDict):
    """`export`: the folder that was written."""

    folder: str
    quantize: str | None
    details: Mapping[str, Any]
    """The contents of its export.json: sizes and what was left out; for int8 metrics and speed before and after."""


class GenerateResult(TypedDict):
    """`generate`: a text."""

    prompt: str
    text: str
    """The prompt is its beginning."""


class ReportResult(TypedDict):
    """`report`: the page that was written."""

    file: str
    runs: Sequence[str]


class WatchResult(TypedDict):
    """`watch`: a run as it is at this moment; with --json it is looked at once."""

    run: str
    state: str
    """In words."""
    has_ended: bool
    """Nothing more comes unless it is started again."""
    status: str | None
    """`status` of summary.json: finished, stopped early; null where it has none."""
    step: int
    total_steps: int | None
    seconds_left: Number | None
    metrics: Mapping[str, Any]
    """The last training line of metrics.jsonl."""
    evaluation: Mapping[str, Any]
    """The last evaluation."""
    events: Sequence[Mapping[str, Any]]
    """The last five."""


class ReplayedMicroBatch(TypedDict):
    """A micro-batch, computed again."""

    file: str
    number: int
    happens_again: bool
    loss_sum: Number
    gradient_norm: Number
    not_finite: Sequence[str]
    """Parameters whose gradients are not finite."""
    first_module: str | None
    """The first module whose output is not finite though its inputs are; empty for the model itself."""


class ReplayResult(TypedDict):
    """`replay`: an incident, computed again."""

    incident: str
    step: int
    kind: str
    sentence: str
    classification: str
    """As in incident.json: deterministic, transient, unknown."""
    device: str
    precision: str
    weights: str
    """Where they come from."""
    micro_batches: Sequence[ReplayedMicroBatch]
    verdict: Sequence[str]
    """A sentence, and what to do."""


class FindingOfDoctor(TypedDict):
    """One thing that was looked at."""

    status: Literal["ok", "warn", "bad"]
    subject: str
    text: str
    remedy: str


class DoctorResult(TypedDict):
    """`doctor`: what was looked at. Exit code 2: something is bad."""

    findings: Sequence[FindingOfDoctor]


class RecipeOfPackage(TypedDict):
    """A recipe that comes with the package."""

    name: str
    about: str
    file: str
    notes: Mapping[str, str]
    """Hardware, Time, Expected, Data, Needs."""


class RecipesResult(TypedDict):
    """`recipes`: those that come with the package."""

    recipes: Sequence[RecipeOfPackage]


class InitResult(TypedDict):
    """`init`: the copy that was written."""

    recipe: str
    file: str


class ExplainedSetting(TypedDict):
    """A setting, or a section of the recipe."""

    name: str
    takes: str
    """The rule for its value."""
    default: str | None
    """As a recipe writes it; null where it must be given, and for a section."""
    meaning: str
    example: Any


class ExplainResult(TypedDict):
    """`explain`: the setting, and those within it."""

    settings: Sequence[ExplainedSetting]


class CompletionResult(TypedDict):
    """`completion`: what makes a shell complete the commands."""

    shell: str
    script: str
