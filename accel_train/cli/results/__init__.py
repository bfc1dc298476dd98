"""Types of the results that `--json` prints, one per command. The JSON Schema and its documentation page use them.

The package `cli.commands` computes the results. This module only declares types.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

Record = Mapping[str, Any]
Strings = Sequence[str]

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number. JSON lacks three floats, so their names replace them, as in metrics.jsonl."""


class RunResult(TypedDict):
    """`run`: a finished run. A run that ends otherwise has an error and no result."""

    output_dir: str
    """Run folder."""
    summary: Record
    """Contents of the folder's summary.json."""


class FinetuneResult(TypedDict):
    """`finetune`: the data, and the recipe that was written for them."""

    recipe: str
    """File of the recipe."""
    recipe_is_new: bool
    """Whether the file was written. False if it existed with the same settings."""
    task: str
    """Task that was found."""
    description: str
    """Description of the data: path, sizes, columns."""
    notes: Strings
    """Sentences about how the data are read."""
    choices: Mapping[str, str]
    """Settings by dotted name, each with the reason for its value."""
    run: RunResult | None
    """Result of the training. Null with --dry-run."""


class MemoryOfPlan(TypedDict):
    """One part of a process's memory."""

    name: str
    bytes: int | None
    """Size in bytes. Null if unknown."""
    how: str
    """Formula or source of the estimate."""


class PlanResult(TypedDict):
    """`plan`: a resolved run. Bytes are per process, and null means unknown."""

    output_dir: str
    processes: int
    device: str
    precision: str
    parameters: int
    trainable_parameters: int
    global_batch_size: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    steps: int | None
    epochs: float | None
    learning_rate: float
    """Peak learning rate that the optimizer gets."""
    training_samples: int | None
    """Number of samples in an epoch."""
    targets: int | None
    """Number of targets of the whole run. A target of a language model is a token with a label."""
    memory_bytes: int | None
    memory: Sequence[MemoryOfPlan]
    device_bytes: int | None
    """Memory of the GPU, in bytes."""
    fits: bool | None
    """Whether the memory is sufficient."""
    disk_bytes: int
    """Largest size of the checkpoints and final weights, in bytes."""
    step_seconds: Number | None
    """Seconds per step, from a model of the hardware."""
    train_seconds: Number | None
    """Seconds for all steps, from that model or from the FLOPs."""
    choices: Mapping[str, str]
    """Choices for the model, each with its reason."""
    settings: Record
    """Every setting by dotted name."""
    notes: Strings


class FindingOfData(TypedDict):
    """Something about the data that harms a training."""

    kind: str
    sentence: str
    count: int
    total: int
    """Samples, steps, classes, or positions among which it was counted."""
    examples: Strings
    """Files and rows of the first ones."""
    stops: bool
    """Whether a batch would teach nothing. The exit code is then 2."""


class DataResult(TypedDict):
    """`data`: what a run of the recipe will read."""

    findings: Sequence[FindingOfData]
    """Findings, the most harmful first."""
    training_samples: int
    """Training samples that were read: all of them, or evenly spaced ones of many."""
    evaluation_samples: int
    labels: Mapping[str, int]
    """Training samples that have a class, by its name."""
    sources: Mapping[str, int]
    """Training samples by file. Empty for one file."""
    lengths: Sequence[int]
    """Histogram of the tokens of a training sample, in equal parts from the shortest to the longest."""
    notes: Strings
    file: str
    """HTML page with the same, and with decoded samples and images."""


class PreparedPart(TypedDict):
    """Data sets, tokens, samples, a tokenizer, or weights."""

    name: str
    about: str
    path: str | None
    """Folder with the files. Null if there is nothing to download or to cache."""
    bytes: int
    was_there: bool
    """Whether nothing was downloaded or tokenized for it."""


class PrepareResult(TypedDict):
    """`prepare`: what a run of the recipe reads from caches."""

    parts: Sequence[PreparedPart]
    seconds: float


class RateOfTest(TypedDict):
    """A step of a learning-rate range test."""

    learning_rate: float
    """Learning rate of the step."""
    loss: Number
    smoothed_loss: Number | None


class FindLrResult(TypedDict):
    """`find-lr`: the suggested learning rate, and the curve that it comes from."""

    learning_rate: float | None
    """Suggested value of `optimizer.learning_rate`. Null if none was found."""
    learning_rate_after_scaling: float | None
    lr_scaling: str
    reason: str
    diverged: bool
    steps: Sequence[RateOfTest]
    files: Strings
    """Files with the same data, as JSON and as a picture."""


class ComparisonOfRuns(TypedDict):
    """One kind of number, compared between the killed run and the uninterrupted run."""

    name: str
    extent: str
    """Extent of the comparison."""
    difference: str | None
    """First difference. Null if the numbers are bit-identical."""


class EqualityResult(TypedDict):
    """The recipe's layout at toy size, in fp32 on a CPU, compared with one plain process."""

    processes: int
    """Processes of the layout. 0 if nothing was compared."""
    steps: int
    difference: Number | None
    """Largest relative difference of a loss, a gradient norm, or a weight. Null if nothing was compared."""
    first: str | None
    """First step and number that differ. Null if the layout is equal."""
    reason: str | None
    """Reason why nothing was compared. Null if it was."""


class RehearseResult(TypedDict):
    """`rehearse`: whether a run that is killed and resumed equals an uninterrupted run, and a layout one process.

    Exit code 4: something differs.
    """

    same: bool
    processes: int
    killed_after_step: int
    compared: Sequence[ComparisonOfRuns]
    equality: EqualityResult | None
    """Comparison of the layout with one process. Null for `verify --resume-proof`."""
    changed_settings: Record
    """Settings that differ from the recipe."""
    startup_seconds: Sequence[Number]
    """Seconds of each launch's startup."""
    stop_seconds: Number | None
    """Seconds from SIGTERM to the end. Null if this took too long."""
    checkpoint_bytes: int


class CheckpointOfRun(TypedDict):
    """A checkpoint."""

    path: str
    step: int
    problem: str | None
    """Problem of the checkpoint. Null if every digest is right."""
    changed: Strings
    """Files that changed after the save and that a resume does not need (config, tokenizer)."""
    healthy: bool
    """Whether a rollback would use the checkpoint."""
    abandoned: bool
    """Whether a rollback has gone back to an earlier step."""


class ModelOfRun(TypedDict):
    """A written model: `model/`, `adapter/`, or an export."""

    path: str
    has_digests: bool
    """False for a model of an older version. Its weights are not compared."""
    changed: Mapping[str, str]
    """Problems by name of a file that differs from the run's."""


class VerifyResult(TypedDict):
    """`verify`: the checkpoints of a run, oldest first. Exit code 4: all are invalid, or weights of a model changed."""

    run: str
    newest: str | None
    """Checkpoint that a resume would use."""
    checkpoints: Sequence[CheckpointOfRun]
    models: Sequence[ModelOfRun]
    resume_proof: RehearseResult | None
    """Result of the comparison with --resume-proof."""


class SweepResult(TypedDict):
    """`sweep`: the runs and their comparison."""

    output_dir: str
    runs: Sequence[Record]
    """Runs as in sweep.json: `name`, `settings`, `status`, `exit_code`, `seconds`, `metric`, `value`."""
    combinations: Sequence[Record]
    """Combinations, best first, each over all its seeds: `combination`, `metric`, `mean`, `spread`, `values`, `runs`.
    """
    report: str | None


class EvaluateResult(TypedDict):
    """`evaluate`: metrics of a finished run."""

    run: str
    data: str | None
    """Data to evaluate on. Null for the data that the run held out."""
    metrics: Mapping[str, Number | int]
    details: Record
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
    min_score: float | None
    """Least score of the boxes in the table. Null for other predictions."""
    pictures: str | None
    """Folder of the pictures. Null without `--draw`."""


class ExportResult(TypedDict):
    """`export`: the folder that was written."""

    folder: str
    quantize: str | None
    onnx: bool
    details: Record
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
    left_out: Strings
    """Files of model/ that are not sent: pickles, hidden files, and code that the model does not name."""
    kept: Strings
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
    runs: Strings


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
    metrics: Record
    """Last training line of metrics.jsonl."""
    evaluation: Record
    """Last evaluation."""
    events: Sequence[Record]
    """Last five events."""


class ReplayedMicroBatch(TypedDict):
    """A micro-batch that was computed again."""

    file: str
    number: int
    happens_again: bool
    loss_sum: Number
    gradient_norm: Number
    not_finite: Strings
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
    verdict: Strings
    """Sentence with the verdict, and a remedy."""


class FindingOfDoctor(TypedDict):
    """One finding of the examination."""

    status: Literal["ok", "warn", "bad"]
    subject: str
    text: str
    remedy: str


class DoctorResult(TypedDict):
    """`doctor`: the findings of the examination. Exit code 2, or 1 with --gpus: at least one is bad."""

    findings: Sequence[FindingOfDoctor]
    file: str | None
    """File with every number of --gpus."""


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
    tasks: Strings
    """Tasks that the setting belongs to. Empty if it does not depend on the task."""


class ExplainResult(TypedDict):
    """`explain`: the setting, and all settings below it."""

    settings: Sequence[ExplainedSetting]


class CompletionResult(TypedDict):
    """`completion`: the script that makes a shell complete the commands."""

    shell: str
    script: str
