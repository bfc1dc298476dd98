"""The text of an incident as Markdown, for readers who do not know the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.observe.incident_record import named


def format_incident(record: Mapping[str, Any]) -> str:
    """Return the record of an incident as Markdown."""
    title = "a spike" if record["kind"] == "spike" else "a loss or gradient that is not finite"
    lines = [
        f"# Step {record['step']} of {record['run']}: {title}",
        "",
        f"**{record['sentence']}.**",
        "",
        f"{record['reason']}. Written {record['time']}, after {record['seconds']:.1f} s of diagnosis.",
        "",
        "## What to do",
        "",
        *(f"{number}. {action}" for number, action in enumerate(record["next"], start=1)),
        "",
        "## The step",
        "",
        *_rows(("", ""), _step_facts(record)),
    ]
    for finding in record["processes"]:
        lines += _process_lines(finding)
    if record["last_losses"]:
        losses = [(step, _number(loss)) for step, loss in record["last_losses"]]
        lines += ["", "## The losses before", "", *_rows(("step", "loss"), losses)]
    lines += ["", "## Versions", "", *_rows(("", ""), list(record["environment"].items()))]
    return "\n".join(lines) + "\n"


def _process_lines(finding: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## Process {finding['rank']}", "", *_rows(("", ""), _finding_facts(finding))]
    if finding["columns"]:
        columns = [
            (f"`{name}`", str(c["shape"]), c["dtype"], _number(c.get("min")), _number(c.get("max")), c["not_finite"])
            for name, c in finding["columns"].items()
        ]
        lines += ["", *_rows(("column", "shape", "kind", "smallest", "largest", "not finite"), columns)]
    if finding["heaviest"]:
        alone = [(each["sample"], *map(_number, (each["loss"], each["gradient_norm"]))) for each in finding["heaviest"]]
        lines += ["", *_rows((finding["unit"], "loss, alone", "gradient norm, alone"), alone)]
    if finding["largest_gradients"]:
        norms = [(f"`{name}`", _number(norm)) for name, norm in finding["largest_gradients"]]
        lines += ["", *_rows(("largest gradients", "norm"), norms)]
    return lines


def _step_facts(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    weights = record["weights"]
    kept = weights["file"] or (f"checkpoint {weights['checkpoint']}" if weights["checkpoint"] else "not kept")
    return [
        ("Whether it happens again", record["classification"]),
        ("Update", "not applied" if record["skipped"] else f"applied, clipped to {_number(record['max_grad_norm'])}"),
        ("Loss", _number(record["loss"])),
        ("Gradient norm", _number(record["grad_norm"])),
        ("Learning rate", _number(record["learning_rate"])),
        ("Loss scale", "none" if record["loss_scale"] is None else _number(record["loss_scale"])),
        ("Precision", {"no": "fp32"}.get(record["precision"], record["precision"])),
        ("Targets in the global batch", record["num_targets"]),
        ("Processes", record["world_size"]),
        ("Weights", f"{kept} ({weights['of']})"),
        ("Batches", ", ".join(each["file"] for each in record["batches"]) or "not kept"),
    ]


def main_facts(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the facts of the step as (name, value) pairs, and one pair for each process involved in the incident."""
    facts = _step_facts(record)
    for finding in record["processes"]:
        if finding["happens_again"] or finding["error"] or finding["heaviest"]:
            facts.append((f"Process {finding['rank']}", describe_finding(finding)))
    return facts


def describe_finding(finding: Mapping[str, Any]) -> str:
    """Return the facts of one process's part of a step in one line, without its device."""
    return "; ".join(f"{name.lower()} {value}" for name, value in _finding_facts(finding)[1:]).replace("`", "")


def _finding_facts(finding: Mapping[str, Any]) -> list[tuple[str, Any]]:
    gradients = named(finding["gradients_not_finite"], finding["num_gradients_not_finite"])
    then_and_again = f"{_number(finding['loss_sum_then'])}, {_number(finding['loss_sum']) or 'not computed'}"
    again = {True: "yes", False: "no", None: "not computed" if finding["loss_sum"] is None else "see above"}
    facts = [
        ("Device", f"{finding['device']}, host {finding['host']}"),
        ("Happens again here", again[finding["happens_again"]]),
        ("Could not be finished", finding["error"]),
        ("Micro-batch", finding["micro_batch"]),
        (f"Bad {finding['unit']}s", named(finding["samples"], finding["num_samples"])),
        ("Where they come from", "; ".join(finding["origins"])),
        (f"All {finding['unit']}s it read", named(finding["suspects"], most=64)),
        ("First in", finding["module"] and f"`{finding['module']}` ({finding['module_kind']})"),
        ("Weights not finite", named(finding["weights_not_finite"])),
        ("Gradients not finite", gradients),
        ("Loss sum then, and again", then_and_again),
        ("Gradient norm again", _number(finding["gradient_norm"])),
    ]
    return [(name, value) for name, value in facts if value not in (None, "", [])]


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
