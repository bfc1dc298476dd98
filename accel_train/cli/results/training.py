"""Results of the commands that start from a recipe or read checkpoints, as `--json` prints them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number. JSON lacks three floats, so their names replace them, as in metrics.jsonl."""


class RunResult(TypedDict):
    """`run`: a finished run. A run that ends otherwise has an error and no result."""

    output_dir: str
    """Run folder."""
    summary: Mapping[str, Any]
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
    notes: Sequence[str]
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
    settings: Mapping[str, Any]
    """Every setting by dotted name."""
    notes: Sequence[str]


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
    files: Sequence[str]
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
    changed_settings: Mapping[str, Any]
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
    changed: Sequence[str]
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
    runs: Sequence[Mapping[str, Any]]
    """Runs as in sweep.json: `name`, `settings`, `status`, `exit_code`, `seconds`, `metric`, `value`."""
    combinations: Sequence[Mapping[str, Any]]
    """Combinations, best first, each over all its seeds: `combination`, `metric`, `mean`, `spread`, `values`, `runs`.
    """
    report: str | None
