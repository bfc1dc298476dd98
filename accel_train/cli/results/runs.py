"""Results of the commands for runs, this machine, and the package, as `--json` prints them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from accel_train.cli.results.training import Number


class EvaluateResult(TypedDict):
    """`evaluate`: metrics of a finished run."""

    run: str
    data: str | None
    """Data to evaluate on. Null for the data that the run held out."""
    metrics: Mapping[str, Number | int]
    details: Mapping[str, Any]
    """Details that depend on the task: metrics by class, confusion matrix, ..."""
    file: str
    """File that holds the metrics."""


class PredictResult(TypedDict):
    """`predict`: the table that was written."""

    run: str
    data: str | None
    """Data to predict. Null for the data that the run held out."""
    file: str
    rows: int


class ExportResult(TypedDict):
    """`export`: the folder that was written."""

    folder: str
    quantize: str | None
    onnx: bool
    details: Mapping[str, Any]
    """Contents of the folder's export.json: sizes and files left out; for int8 and ONNX, metrics and speed before and
    after; for ONNX, the inputs, the outputs, and the largest difference of each. For both, `onnx` is the fp32 graph.
    """


class PushResult(TypedDict):
    """`push`: the model that was sent to the Hub, or would be."""

    run: str
    repository: str
    """Repository, as owner/name. A dry run does not add the owner."""
    private: bool
    url: str | None
    """Address of the commit. Null for a dry run."""
    files: Mapping[str, int]
    """Sizes in bytes by path in the repository."""
    left_out: Sequence[str]
    """Files of model/ that are not sent: pickles, hidden files, and code that the model does not name."""
    kept: Sequence[str]
    """Files that the repository has from before, and this model does not have."""
    card: str
    """README.md of the repository."""


class GenerateResult(TypedDict):
    """`generate`: a text."""

    prompt: str
    text: str
    """Generated text, including the prompt."""


class ChatResult(TypedDict):
    """`chat`: the conversation."""

    messages: Sequence[Mapping[str, str]]
    """What was typed (`role: user`) and answered (`role: assistant`), each with its `content`."""


class ReportResult(TypedDict):
    """`report`: the page that was written."""

    file: str
    runs: Sequence[str]


class WatchResult(TypedDict):
    """`watch`: the current state of a run. With --json, the run is read once."""

    run: str
    state: str
    """State in words."""
    has_ended: bool
    """Whether the run has ended. It continues only if it is started again."""
    status: str | None
    """Field `status` of summary.json: finished, stopped early. Null if the run has no summary."""
    step: int
    total_steps: int | None
    seconds_left: Number | None
    metrics: Mapping[str, Any]
    """Last training line of metrics.jsonl."""
    evaluation: Mapping[str, Any]
    """Last evaluation."""
    events: Sequence[Mapping[str, Any]]
    """Last five events."""


class ReplayedMicroBatch(TypedDict):
    """A micro-batch that was computed again."""

    file: str
    number: int
    happens_again: bool
    loss_sum: Number
    gradient_norm: Number
    not_finite: Sequence[str]
    """Parameters whose gradients are not finite."""
    first_module: str | None
    """First module whose output is not finite although its inputs are; empty for the model."""


class ReplayResult(TypedDict):
    """`replay`: an incident that was computed again."""

    incident: str
    step: int
    kind: str
    sentence: str
    classification: str
    """Classification as in incident.json: deterministic, transient, unknown."""
    device: str
    precision: str
    weights: str
    """Source of the weights."""
    micro_batches: Sequence[ReplayedMicroBatch]
    verdict: Sequence[str]
    """Sentence with the verdict, and a remedy."""


class FindingOfDoctor(TypedDict):
    """One finding of the examination."""

    status: Literal["ok", "warn", "bad"]
    subject: str
    text: str
    remedy: str


class DoctorResult(TypedDict):
    """`doctor`: the findings of the examination. Exit code 2: at least one is bad."""

    findings: Sequence[FindingOfDoctor]


class RecipeOfPackage(TypedDict):
    """A recipe that comes with the package."""

    name: str
    about: str
    file: str
    notes: Mapping[str, str]
    """Notes by name: Hardware, Time, Expected, Data, Needs."""


class RecipesResult(TypedDict):
    """`recipes`: the recipes that come with the package."""

    recipes: Sequence[RecipeOfPackage]


class InitResult(TypedDict):
    """`init`: the copy that was written."""

    recipe: str
    file: str


class ExplainedSetting(TypedDict):
    """A setting or a section of the recipe."""

    name: str
    takes: str
    """Rule for the value."""
    default: str | None
    """Default as a recipe writes it. Null for a required setting and for a section."""
    meaning: str
    example: Any
    tasks: Sequence[str]
    """Tasks that the setting belongs to. Empty if it does not depend on the task."""


class ExplainResult(TypedDict):
    """`explain`: the setting, and all settings below it."""

    settings: Sequence[ExplainedSetting]


class CompletionResult(TypedDict):
    """`completion`: the script that makes a shell complete the commands."""

    shell: str
    script: str
