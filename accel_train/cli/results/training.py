"""Results of commands that begin with a recipe or look at checkpoints, as `--json` prints them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""JSON lacks three floats, whose names stand for them, as in metrics.jsonl."""


class RunResult(TypedDict):
    """`run`: a finished run. One that ends otherwise has no result, and an error."""

    output_dir: str
    """The run folder."""
    summary: Mapping[str, Any]
    """The contents of its summary.json."""


class FinetuneResult(TypedDict):
    """`finetune`: the data, and the recipe that was written for them."""

    recipe: str
    """The recipe's file."""
    recipe_is_new: bool
    """False where the file was there already, with the same settings."""
    task: str
    """The task that was found."""
    description: str
    """The data: path, sizes, columns."""
    notes: Sequence[str]
    """Sentences on how the data are read."""
    choices: Mapping[str, str]
    """Settings by dotted name, each with the reason for its value."""
    run: RunResult | None
    """The training; null with --dry-run."""


class MemoryOfPlan(TypedDict):
    """A part of a process's memory."""

    name: str
    bytes: int | None
    """Null where it is not known."""
    how: str
    """The formula or the estimate."""


class PlanResult(TypedDict):
    """`plan`: a run, resolved. Bytes are of one process; null stands for what is not known."""

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
    """The peak, as the optimizer gets it."""
    training_samples: int | None
    """Samples in an epoch."""
    targets: int | None
    """Targets of the whole run: tokens with a label, for a language model."""
    memory_bytes: int | None
    memory: Sequence[MemoryOfPlan]
    device_bytes: int | None
    """Memory of the GPU."""
    fits: bool | None
    """Whether the memory is enough."""
    disk_bytes: int
    """Checkpoints and final weights, at most."""
    step_seconds: Number | None
    """A step, by a model of the hardware."""
    train_seconds: Number | None
    """All steps, by that model or by the FLOPs."""
    choices: Mapping[str, str]
    """What was chosen for the model, each with the reason."""
    settings: Mapping[str, Any]
    """Every setting by dotted name."""
    notes: Sequence[str]


class RateOfTest(TypedDict):
    """A step of a learning-rate range test."""

    learning_rate: float
    """As the optimizer had it."""
    loss: Number
    smoothed_loss: Number | None


class FindLrResult(TypedDict):
    """`find-lr`: the suggestion, and the curve that it comes from."""

    learning_rate: float | None
    """For `optimizer.learning_rate`; null where none can be found."""
    learning_rate_after_scaling: float | None
    lr_scaling: str
    reason: str
    diverged: bool
    steps: Sequence[RateOfTest]
    files: Sequence[str]
    """The same as JSON, and as a picture."""


class ComparisonOfRuns(TypedDict):
    """One kind of number, in the run that was killed and in the one that was not."""

    name: str
    extent: str
    """What was compared."""
    difference: str | None
    """The first difference; null where they are the same to the bit."""


class RehearseResult(TypedDict):
    """`rehearse`: whether a run that is killed and resumed is the run that was never killed. Exit code 4: it is not."""

    same: bool
    processes: int
    killed_after_step: int
    compared: Sequence[ComparisonOfRuns]
    changed_settings: Mapping[str, Any]
    """Settings that differ from the recipe's."""
    startup_seconds: Sequence[Number]
    """Of each launch."""
    stop_seconds: Number | None
    """From SIGTERM to the end; null where that took too long."""
    checkpoint_bytes: int


class CheckpointOfRun(TypedDict):
    """A checkpoint."""

    path: str
    step: int
    problem: str | None
    """Null where every digest is right."""
    changed: Sequence[str]
    """Files that were changed since the save and that a resume does without (config, tokenizer)."""
    healthy: bool
    """A rollback would use it."""
    abandoned: bool
    """A rollback went back behind it."""


class VerifyResult(TypedDict):
    """`verify`: the checkpoints of a run, oldest first. Exit code 4: none is valid."""

    run: str
    newest: str | None
    """The checkpoint that a resume would use."""
    checkpoints: Sequence[CheckpointOfRun]
    resume_proof: RehearseResult | None
    """With --resume-proof."""


class SweepResult(TypedDict):
    """`sweep`: the runs and their comparison."""

    output_dir: str
    runs: Sequence[Mapping[str, Any]]
    """As in sweep.json: `name`, `settings`, `status`, `exit_code`, `seconds`, `metric`, `value`."""
    combinations: Sequence[Mapping[str, Any]]
    """Best first, the seeds of each together: `combination`, `metric`, `mean`, `spread`, `values`, `runs`."""
    report: str | None
