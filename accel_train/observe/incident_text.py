"""An incident as Markdown, for somebody who has never seen the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.observe.incident_record import named


def format_incident(record: Mapping[str, Any]) -> str:
    """The record as Markdown, for somebody who has never seen the run."""
    lines = [
        f"# Step {record['step']} of {record['run']}: {_title(record)}",
        "",
        f"**{record['sentence']}.**",
        "",
        f"{record['reason']}. Written {record['time']}, after {record['seconds']:.1f} s of looking into it.",
        "",
        "## What to do",
        "",
        *(f"{number}. {action}" for number, action in enumerate(record["next"], start=1)),
        "",
        "## The step",
        "",
        *_table(_step_facts(record)),
    ]
    for finding in record["processes"]:
        lines += _process_lines(finding)
    if record["last_losses"]:
        losses = [(step, _number(loss)) for step, loss in record["last_losses"]]
        lines += ["", "## The losses before", "", *_rows(("step", "loss"), losses)]
    lines += ["", "## Versions", "", *_table(list(record["environment"].items()))]
    return "\n".join(lines) + "\n"


def _process_lines(finding: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## Process {finding['rank']}", "", *_table(_finding_facts(finding))]
    if finding["columns"]:
        lines += ["", *_columns_table(finding["columns"])]
    if finding["heaviest"]:
        alone = [(each["sample"], *map(_number, (each["loss"], each["gradient_norm"]))) for each in finding["heaviest"]]
        lines += ["", *_rows((finding["unit"], "loss, alone", "gradient norm, alone"), alone)]
    if finding["largest_gradients"]:
        norms = [(f"`{name}`", _number(norm)) for name, norm in finding["largest_gradients"]]
        lines += ["", *_rows(("largest gradients", "norm"), norms)]
    return lines


def _title(record: Mapping[str, Any]) -> str:
    return "a spike" if record["kind"] == "spike" else "a loss or gradient that is not finite"


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
    """The step, and of each process that had a part in it what it found, a line each."""
    facts = _step_facts(record)
    for finding in record["processes"]:
        if finding["happens_again"] or finding["error"] or finding["heaviest"]:
            said = "; ".join(f"{name.lower()} {value}" for name, value in _finding_facts(finding)[1:])
            facts.append((f"Process {finding['rank']}", said.replace("`", "")))
    return facts


def _finding_facts(finding: Mapping[str, Any]) -> list[tuple[str, Any]]:
    gradients = named(finding["gradients_not_finite"], finding["num_gradients_not_finite"])
    facts = [
        ("Device", f"{finding['device']}, host {finding['host']}"),
        ("Happens again here", {True: "yes", False: "no", None: "see above"}[finding["happens_again"]]),
        ("Could not be finished", finding["error"]),
        ("Micro-batch", finding["micro_batch"]),
        (f"Bad {finding['unit']}s", named(finding["samples"], finding["num_samples"])),
        ("Where they come from", "; ".join(finding["origins"])),
        (f"All {finding['unit']}s it read", named(finding["suspects"], most=64)),
        ("First in", finding["module"] and f"`{finding['module']}` ({finding['module_kind']})"),
        ("Weights not finite", named(finding["weights_not_finite"])),
        ("Gradients not finite", gradients),
        ("Loss sum then, and again", f"{_number(finding['loss_sum_then'])}, {_number(finding['loss_sum'])}"),
        ("Gradient norm again", _number(finding["gradient_norm"])),
    ]
    return [(name, value) for name, value in facts if value not in (None, "", [])]


def _columns_table(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        (f"`{name}`", str(c["shape"]), c["dtype"], _number(c.get("min")), _number(c.get("max")), c["not_finite"])
        for name, c in columns.items()
    ]
    return _rows(("column", "shape", "kind", "smallest", "largest", "not finite"), rows)


def _table(facts: Sequence[tuple[str, Any]]) -> list[str]:
    return _rows(("", ""), facts)


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
