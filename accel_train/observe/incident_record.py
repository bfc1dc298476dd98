"""The record of an incident: classification, one-sentence summary, recommended actions, and the text as Markdown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from accel_train.core.format import format_count
from accel_train.core.json_io import read_json
from accel_train.core.state import JsonRecord

Facts = list[tuple[str, Any]]
"""Rows of a name and a value."""

INCIDENTS = "incidents"
RECORD, TEXT, WEIGHTS = "incident.json", "incident.md", "weights.safetensors"
FORMAT = 1
SAME_SPIKE, SAME_SPIKE_AFTER_UPDATE = 0.98, 0.5
"""Fractions of the original loss and gradient norm that define a reproduced spike, without and with an applied update.

The spike is reproduced if both recomputed values reach the fraction. It is lower if the update was applied.
"""
Classification = Literal["deterministic", "transient", "unknown"]


@dataclass(frozen=True)
class HeavySample:
    """A sample of a spike with its own loss and gradient norm."""

    sample: int
    micro_batch: int
    loss: float
    gradient_norm: float


@dataclass
class Finding:
    """Result of one process's diagnosis, filled as far as the diagnosis got."""

    rank: int
    device: str
    happens_again: bool | None = None
    """Whether the problem recurs. None if not recomputed, and None for spikes, because only all processes together can
    decide."""
    place: str | None = None
    """Origin of the first number that is not finite: `weights`, `batch`, `module`, `loss`, or `gradient`."""
    micro_batch: int | None = None  # first bad micro-batch, from 0
    samples: list[int] = field(default_factory=list)
    """First samples that are bad alone: indices in the data set, or rows if it has no indices."""
    num_samples: int = 0  # number of samples that are bad alone
    suspects: list[int] = field(default_factory=list)
    """All samples of the bad micro-batch, or of the whole step if the problem does not recur."""
    module: str | None = None
    module_kind: str | None = None
    weights_not_finite: list[str] = field(default_factory=list)
    gradients_not_finite: list[str] = field(default_factory=list)
    num_gradients_not_finite: int = 0
    largest_gradients: list[tuple[str, float]] = field(default_factory=list)
    """Finite gradient norms by parameter, of this process only."""
    loss_sum: float | None = None  # of this process, recomputed
    gradient_norm: float | None = None
    """Recomputed gradient norm of this process only: the sum over its micro-batches, an upper bound."""
    columns: dict[str, JsonRecord] = field(default_factory=dict)
    """Shape, minimum, maximum, and count of NaN and Inf of each tensor of the bad (otherwise the first) micro-batch."""
    heaviest: list[HeavySample] = field(default_factory=list)
    """Samples of a spike, largest gradient norm first."""
    seconds: float = 0.0
    error: str | None = None  # error that ended the diagnosis early
    loss_sum_then: float = 0.0  # of this process, in the step itself
    gradients_finite_then: bool = True
    unit: str = "sample"  # what `samples` counts: sample or row
    origins: list[str] = field(default_factory=list)
    host: str = ""


@dataclass(frozen=True)
class KeptBatch:
    """A file with the micro-batches of one process."""

    file: str
    rank: int


@dataclass(frozen=True)
class KeptWeights:
    """The weights to recompute an incident with: a file of its folder, or a checkpoint."""

    file: str | None
    checkpoint: str | None
    of: str


@dataclass(kw_only=True)
class Incident:
    """A bad step, as incident.json has it."""

    format: int = FORMAT
    run: str
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float | None
    max_grad_norm: float
    skipped: bool
    num_targets: int
    time: str
    kind: str
    action: str
    reason: str
    precision: str
    seed: int
    world_size: int
    num_sharing: int
    not_diagnosed: str | None
    """Why the run could not diagnose the step; None if it did."""
    processes: list[Finding]
    seconds: float
    classification: str = "unknown"
    sentence: str = ""
    batches: list[KeptBatch] = field(default_factory=list)
    folder: str = ""
    weights: KeptWeights = KeptWeights(None, None, "")
    last_losses: list[tuple[int, float]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    next: list[str] = field(default_factory=list)


def batch_file(rank: int) -> str:
    """Return the name of the file with a process's micro-batches in an incident's folder."""
    return f"batch-rank-{rank}.safetensors"


def incident_folders(run_folder: Path) -> list[Path]:
    """Return the incident folders of a run, in the order of their steps."""
    root = run_folder / INCIDENTS
    return sorted(path.parent for path in root.glob(f"step-*/{RECORD}")) if root.is_dir() else []


def read_incident(folder: Path) -> Incident:
    """Read an incident from its folder.

    Raises:
        ValueError: the folder does not hold an incident, or the record is damaged.
    """
    path = folder / RECORD
    if not path.is_file():
        problem = f"it does not contain {RECORD}" if folder.is_dir() else "the folder does not exist"
        raise ValueError(f"{folder} is not an incident: {problem}; give a folder of RUN/{INCIDENTS}")
    try:
        record = read_json(path)
        if isinstance(record, dict) and record.get("format", FORMAT) != FORMAT:
            raise ValueError(f"it has format {record['format']!r:.40}, and this version reads {FORMAT}")
        return incident_of(record)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def incident_of(record: object) -> Incident:
    """Return the incident of a JSON object.

    Raises:
        ValueError: a field is missing, or has a value of another type.
    """
    try:
        return TypeAdapter(Incident).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, ('incident', *first['loc'])))}: {first['msg']}") from error


def classify(incident: Incident) -> Classification:
    """Return whether an incident is deterministic (same samples and weights reproduce it), transient, or unknown."""
    findings = incident.processes
    if incident.kind != "spike":
        if any(finding.happens_again for finding in findings):
            return "deterministic"
        return "transient" if all(finding.happens_again is False for finding in findings) else "unknown"
    measured = [
        (each.loss_sum, each.gradient_norm)
        for each in findings
        if each.loss_sum is not None and each.gradient_norm is not None and not each.error
    ]
    if len(measured) < len(findings):
        return "unknown"
    loss = sum(loss for loss, _ in measured) / max(incident.num_targets, 1)
    # The norm of the mean gradient is at most the mean of the gradient norms.
    norm = sum(norm for _, norm in measured) / len(findings)
    part = SAME_SPIKE if incident.skipped else SAME_SPIKE_AFTER_UPDATE
    return "transient" if loss < part * incident.loss or norm < part * incident.grad_norm else "deterministic"


def summarise_incident(incident: Incident) -> str:
    """Return a one-sentence summary: whether the fault is reproducible, and its samples, process and module."""
    if incident.not_diagnosed is not None:
        return f"Not diagnosed in the run: {incident.not_diagnosed}"
    findings, kind = incident.processes, incident.classification
    failed = [f"process {finding.rank} ({finding.error})" for finding in findings if finding.error]
    if kind == "unknown":
        return f"Unknown: the step could not be computed again on {' and '.join(failed)}"
    if incident.kind == "spike":
        if kind == "transient":
            return "Transient: computed again, loss and gradients are nothing out of the ordinary"
        return f"Deterministic: computed again it is as large; {describe_heaviest(incident)}"
    if kind == "deterministic":
        bad = [finding for finding in findings if finding.happens_again]
        blamed = map(_blame, bad[:3])
        more = f"; and so on {format_count(len(bad) - 3, 'more process', 'more processes')}" if len(bad) > 3 else ""
        return f"Deterministic: {'; '.join(blamed)}{more}"
    there = not_finite_then(findings)
    if there:
        where = " and ".join(f"process {each.rank} ({each.device}, host {each.host})" for each in there)
        had_loss = all(math.isfinite(each.loss_sum_then) for each in there)
        what = "every loss was, too, and gradients were not" if had_loss else "its loss was not finite"
        return f"Transient: computed again the step is finite; {what} on {where}"
    return (
        "Transient: computed again the step is finite on all processes; every loss was, too, and gradients are summed "
        "over all processes before anything looks at them, so which one it was cannot be said"
    )


def not_finite_then(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of processes whose own loss was not finite in the bad step.

    If every loss was finite, return the processes whose gradients were not finite.
    """
    losses = [each for each in findings if not math.isfinite(each.loss_sum_then)]
    return losses or [each for each in findings if not each.gradients_finite_then]


def _blame(finding: Finding) -> str:
    """Return the cause on one process, for example `sample 1234 on process 1 makes transformer.h.3.mlp not finite`."""
    who = f"{_samples(finding)} on process {finding.rank}"
    module = "the model" if finding.module == "" else finding.module
    place = finding.place
    if place == "weights":
        return f"weights are not finite on process {finding.rank}: {named(finding.weights_not_finite)}"
    if place == "batch":
        broken = [name for name, column in finding.columns.items() if column["not_finite"]]
        seen = f", first seen in {module}" if module is not None else ""
        return f"{who} is not finite as it was read (column {named(broken)}){seen}"
    if place == "module":
        return f"{who} makes {module} not finite"
    if place == "loss":
        return f"{who} makes the loss not finite, and no module's output"
    gradients = named(finding.gradients_not_finite, finding.num_gradients_not_finite)
    at = f" by {module}" if module is not None else " by the loss itself"
    return f"{who} makes gradients not finite{at} ({gradients})"


def _samples(finding: Finding) -> str:
    unit, samples, number = finding.unit, finding.samples, finding.num_samples
    if number == 1:
        return f"{unit} {samples[0]}"
    if number == 0:
        return f"{unit}s {named(finding.suspects)} together"
    return f"each of {number} {unit}s ({named(samples, number)})"


def describe_heaviest(incident: Incident) -> str:
    """Return a description of the sample that contributes most to a spike, with its own loss and gradient norm."""
    heaviest = heaviest_sample(incident)
    if heaviest is None:
        return "no sample of it could be looked at alone"
    finding, sample = heaviest
    return (
        f"the most comes from {finding.unit} {sample.sample} on process {finding.rank} "
        f"(loss {sample.loss:.4g}, gradient norm {sample.gradient_norm:.4g} alone)"
    )


def heaviest_sample(incident: Incident) -> tuple[Finding, HeavySample] | None:
    """Return the finding and the sample of a spike with the largest gradient norm, or None."""
    pairs = [(finding, each) for finding in incident.processes for each in finding.heaviest]
    # NaN counts as the largest.
    return max(pairs, key=lambda pair: (math.isnan(norm := pair[1].gradient_norm), norm), default=None)


def next_actions(incident: Incident, *, is_replayed: bool = False) -> list[str]:
    """Return recommended actions for an incident, most likely helpful first.

    Leaves out the replay if `is_replayed`.
    """
    if incident.not_diagnosed is not None:
        return _next_replay(incident)
    command = f"accel-train replay {INCIDENTS}/{incident.folder} (from the run folder)"
    replay = [] if is_replayed else [f"{command} computes it again, module by module; --debug stops where it breaks."]
    places = {finding.place for finding in incident.processes if finding.happens_again}
    if incident.classification == "transient":
        clipped = "" if incident.skipped else " or clipped"
        return [
            f"Nothing, if it stays the only one: the update was not applied{clipped}, and training continues.",
            "If it comes again on the same device or host, take that device out of use, and let its memory be tested.",
        ]
    if "weights" in places:
        return [
            "The weights are damaged: roll back to a checkpoint before. The guard does so after max_consecutive_skips."
        ]
    if "batch" in places:
        return [
            "Correct these samples or leave them out of the data; they are skipped each time they are read.",
            *replay,
        ]
    hints = ["Look at the samples named above: are they correct? They are skipped each time they are read.", *replay]
    if incident.loss_scale is not None:
        hints.append("fp16 holds nothing above 65504: precision.mixed_precision bf16 has no such limit.")
    elif incident.precision == "bf16":
        hints.append("precision.mixed_precision no computes the same in fp32. It shows whether precision is the cause.")
    hints.append("If other samples follow, the run diverges: lower optimizer.learning_rate, or warm up for longer.")
    return hints


def can_replay(incident: Incident) -> bool:
    """Return whether the incident kept its batches and the weights to recompute them."""
    weights = incident.weights
    return bool(incident.batches) and (weights.file or weights.checkpoint) is not None


def _next_replay(incident: Incident) -> list[str]:
    if not can_replay(incident):
        return [
            "Neither sample nor module can be named: batches or weights were too large to keep, and no checkpoint "
            "preceded them. Set checkpoint.every_steps lower."
        ]
    replay = [
        f"Run accel-train replay {INCIDENTS}/{incident.folder} (from the run folder): it names sample and module."
    ]
    kept = incident.weights.checkpoint
    if kept is not None:
        replay.append(
            f"Do so before {kept} is removed (checkpoint.keep): the weights of the step were too large to be kept."
        )
    return replay


def named(names: Sequence[Any], number: int | None = None, most: int = 3) -> str:
    """Return the first names and the number of the others: `a, b, c and 9 more`."""
    more = (len(names) if number is None else number) - len(names[:most])
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def format_incident(incident: Incident) -> str:
    """Return an incident as Markdown."""
    title = "a spike" if incident.kind == "spike" else "a loss or gradient that is not finite"
    lines = [
        f"# Step {incident.step} of {incident.run}: {title}",
        "",
        f"**{incident.sentence}.**",
        "",
        f"{incident.reason}. Written {incident.time}, after {incident.seconds:.1f} s of diagnosis.",
        "",
        "## What to do",
        "",
        *(f"{number}. {action}" for number, action in enumerate(incident.next, start=1)),
        "",
        "## The step",
        "",
        *_rows(("", ""), _step_facts(incident)),
    ]
    for finding in incident.processes:
        lines += _process_lines(finding)
    if incident.last_losses:
        losses = [(step, _number(loss)) for step, loss in incident.last_losses]
        lines += ["", "## The losses before", "", *_rows(("step", "loss"), losses)]
    lines += ["", "## Versions", "", *_rows(("", ""), list(incident.environment.items()))]
    return "\n".join(lines) + "\n"


def _process_lines(finding: Finding) -> list[str]:
    lines = ["", f"## Process {finding.rank}", "", *_rows(("", ""), _finding_facts(finding))]
    if finding.columns:
        columns = [
            (f"`{name}`", str(c["shape"]), c["dtype"], _number(c.get("min")), _number(c.get("max")), c["not_finite"])
            for name, c in finding.columns.items()
        ]
        lines += ["", *_rows(("column", "shape", "kind", "smallest", "largest", "not finite"), columns)]
    if finding.heaviest:
        alone = [(each.sample, *map(_number, (each.loss, each.gradient_norm))) for each in finding.heaviest]
        lines += ["", *_rows((finding.unit, "loss, alone", "gradient norm, alone"), alone)]
    if finding.largest_gradients:
        norms = [(f"`{name}`", _number(norm)) for name, norm in finding.largest_gradients]
        lines += ["", *_rows(("largest gradients", "norm"), norms)]
    return lines


def _step_facts(incident: Incident) -> Facts:
    weights = incident.weights
    kept = weights.file or (f"checkpoint {weights.checkpoint}" if weights.checkpoint else "not kept")
    return [
        ("Whether it happens again", incident.classification),
        ("Update", "not applied" if incident.skipped else f"applied, clipped to {_number(incident.max_grad_norm)}"),
        ("Loss", _number(incident.loss)),
        ("Gradient norm", _number(incident.grad_norm)),
        ("Learning rate", _number(incident.learning_rate)),
        ("Loss scale", "none" if incident.loss_scale is None else _number(incident.loss_scale)),
        ("Precision", {"no": "fp32"}.get(incident.precision, incident.precision)),
        ("Targets in the global batch", incident.num_targets),
        ("Processes", incident.world_size),
        ("Weights", f"{kept} ({weights.of})"),
        ("Batches", ", ".join(each.file for each in incident.batches) or "not kept"),
    ]


def main_facts(incident: Incident) -> Facts:
    """Return the facts of the step as (name, value) pairs, and one pair for each process involved in the incident."""
    facts = _step_facts(incident)
    for finding in incident.processes:
        if finding.happens_again or finding.error or finding.heaviest:
            facts.append((f"Process {finding.rank}", describe_finding(finding)))
    return facts


def describe_finding(finding: Finding) -> str:
    """Return the facts of one process's part of a step in one line, without its device."""
    return "; ".join(f"{name.lower()} {value}" for name, value in _finding_facts(finding)[1:]).replace("`", "")


def _finding_facts(finding: Finding) -> Facts:
    gradients = named(finding.gradients_not_finite, finding.num_gradients_not_finite)
    then_and_again = f"{_number(finding.loss_sum_then)}, {_number(finding.loss_sum) or 'not computed'}"
    again = {True: "yes", False: "no", None: "not computed" if finding.loss_sum is None else "see above"}
    facts = [
        ("Device", f"{finding.device}, host {finding.host}"),
        ("Happens again here", again[finding.happens_again]),
        ("Could not be finished", finding.error),
        ("Micro-batch", finding.micro_batch),
        (f"Bad {finding.unit}s", named(finding.samples, finding.num_samples)),
        ("Where they come from", "; ".join(finding.origins)),
        (f"All {finding.unit}s it read", named(finding.suspects, most=64)),
        ("First in", finding.module and f"`{finding.module}` ({finding.module_kind})"),
        ("Weights not finite", named(finding.weights_not_finite)),
        ("Gradients not finite", gradients),
        ("Loss sum then, and again", then_and_again),
        ("Gradient norm again", _number(finding.gradient_norm)),
    ]
    return [(name, value) for name, value in facts if value not in (None, "", [])]


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
