"""Measure speed and metrics before and after an int8 or ONNX export, and format what `accel-train export` prints."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from accel_train.core.format import format_count
from accel_train.engine.evaluation import EvaluationReader, evaluation_mode
from accel_train.inference.evaluate import measure
from accel_train.inference.finished_run import TrainedRun
from accel_train.runtime.doctor import device_name

Record = Mapping[str, Any]
"""Contents of export.json, or a part of it."""

_TIMED_BATCHES = 4
_TIMED_SECONDS = 1.0


class Contender(NamedTuple):
    """A run with another model, to compare with the run as it is."""

    run: TrainedRun
    text: str
    """Label of its evaluation."""
    timed: TrainedRun | None = None
    """Run whose speed is measured. None: `run`."""


class Comparison(TypedDict):
    """Metrics and speed of runs that differ in their model, by name."""

    metrics: dict[str, dict[str, float]]
    samples_per_second: dict[str, float]
    measured_on: str
    """Device of the runs, and its threads."""


def compare(
    before: TrainedRun, others: Mapping[str, Contender], timed: Literal["counts", "predictions"] = "counts"
) -> Comparison:
    """Return the comparison of runs on their evaluation data.

    The first run is named `before`. `timed` are the results whose computation is timed.
    """
    metrics = {"before": measure(before, "evaluating the model as it is").metrics}
    metrics |= {name: measure(each.run, each.text).metrics for name, each in others.items()}
    runs = [before, *(each.timed or each.run for each in others.values())]
    rates = samples_per_second(runs, seconds=_TIMED_SECONDS, wanted=timed)
    return {
        "metrics": metrics,
        "samples_per_second": dict(zip(metrics, rates, strict=True)),
        "measured_on": describe_device(before.accelerator.device),
    }


def describe_device(device: torch.device) -> str:
    """Return a description of the device. For a CPU, it includes the number of threads."""
    threads = format_count(torch.get_num_threads(), "thread")
    return device_name(device) + (f", {threads}" if device.type == "cpu" else "")


def samples_per_second(
    runs: list[TrainedRun], *, seconds: float, wanted: Literal["counts", "predictions"] = "counts"
) -> list[float]:
    """Return each run's evaluation speed on the same preloaded batches: the best of several alternating rounds."""
    size, accelerator = runs[0].sizes.per_device_eval_batch_size, runs[0].accelerator
    assert runs[0].data.eval is not None
    num_samples = min(len(runs[0].data.eval), _TIMED_BATCHES * size)  # type: ignore[arg-type]
    reader = EvaluationReader(accelerator, runs[0].data, size, max_samples=num_samples)
    batches = [batch for batch, _ in reader.batches()]
    best = [float("inf")] * len(runs)
    begin = time.perf_counter()
    for number in range(1000):
        for which, run in enumerate(runs):
            with evaluation_mode(run.inner):
                started = _now(accelerator.device)
                for batch in batches:
                    run.inner(batch, wanted)
                took = _now(accelerator.device) - started
            # The first round warms up.
            if number:
                best[which] = min(best[which], took)
        if number >= 2 and time.perf_counter() - begin > seconds * len(runs):
            break
    return [num_samples / took for took in best]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def format_export(folder: Path, record: Record) -> str:
    """Return a description of the export. For int8 and ONNX, a table of size, speed and metrics before and after."""
    sizes = record["weights_bytes"]
    left_out = ", ".join(record["left_out"])
    notes = [f"left out, because only weights, configurations and texts are copied: {left_out}"] if left_out else []
    if "onnx" in record:
        onnx = record["onnx"]
        inputs = ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in onnx["inputs"].items())
        lines = [
            f"onnx (opset {onnx['opset']}; {onnx['library']}): from {inputs} to {', '.join(onnx['outputs'])}",
            *_lines_of_differences(onnx),
        ]
        if record["quantize"] is not None:
            lines += _lines_of_int8(record["int8"])
        lines += _table("onnx" if record["quantize"] is None else record["quantize"], record)
        use = f'onnxruntime.InferenceSession("{folder}/{onnx["file"]}") takes what the processor in the folder gives'
        return "\n".join([*lines, f"{folder}: {use}"])
    if record["quantize"] is None:
        reason = record.get("not_for_from_pretrained")
        use = "for from_pretrained" if reason is None else f"as its task saved them; not for from_pretrained ({reason})"
        return "\n".join([*notes, f"{folder}: {_megabytes(sizes['after'])} of weights, {use}"])
    int8 = record["int8"]
    rest = ", ".join(f"{kind} {count:,}" for kind, count in int8["left_alone"].items())
    lines = [
        f"int8 ({int8['how']}; {int8['library']}): {format_count(len(int8['matrices']), 'matrix', 'matrices')}, "
        f"{int8['share_of_parameters']:.0%} of the parameters",
        f"left in floating point (parameters): {rest}",
        *_table("int8", record),
    ]
    if "metrics" not in record:
        lines.append(f"\nspeed and metrics are not compared: {record['not_compared']}")
    elif record["samples_per_second"]["after"] < 0.95 * record["samples_per_second"]["before"]:
        lines.append(
            "int8 is slower here: the weights are turned back into floating point for each product; it saves "
            "memory, not time"
        )
    lines += [*notes, f"{folder}: load it with accel_train.load_exported; from_pretrained refuses it"]
    return "\n".join(lines)


def _lines_of_int8(int8: Record) -> list[str]:
    """Return lines about the int8 weights of a graph."""
    rest = ", ".join(f"{operator} {count:,}" for operator, count in int8["left_alone"].items())
    counts = [
        format_count(int8[f"num_{kind}"], one, several) + how
        for kind, one, several, how in (
            ("matrices", "matrix", "matrices", ", computed in integers"),
            ("convolutions", "convolution", "convolutions", ", smaller in the file and computed in fp32"),
        )
        if int8[f"num_{kind}"]
    ]
    return [
        f"int8 ({int8['how']}): {'; '.join(counts)}; {int8['share_of_parameters']:.0%} of the parameters",
        f"left in fp32 (numbers, by operator): {rest}",
        *(f"largest difference of {name} with int8: {value:.2g}" for name, value in int8["largest_difference"].items()),
    ]


def _lines_of_differences(onnx: Record) -> list[str]:
    """Return a line about each output of a graph, and about images that were not compared."""
    lines = [
        f"largest difference of {name}: {difference:.2g} (allowed: {onnx['allowed_difference'][name]:.2g}; "
        f"largest value: {onnx['largest_value'][name]:,.4g})"
        for name, difference in onnx["largest_difference"].items()
    ]
    if onnx["num_ties"]:
        lines.append(
            f"not compared: {onnx['num_ties']:,} of {onnx['num_images']:,} images, where a rounding decides "
            "which queries the detector chooses"
        )
    return lines


def _table(kind: str, record: Record) -> list[str]:
    """Return the lines of size, speed and metrics, before and after, with the fp32 graph between if there is one."""
    sizes = record["weights_bytes"]
    shown = {name: kind if name == "after" else name for name in ("before", "onnx", "after") if name in sizes}
    lines = ["", _row("", *shown.values()), _row("weights", *(_megabytes(sizes[name]) for name in shown))]
    if "metrics" in record:
        rates, metrics = record["samples_per_second"], record["metrics"]
        lines.append(_row("samples per second", *(f"{rates[name]:,.1f}" for name in shown)))
        for metric, value in metrics["before"].items():
            if isinstance(value, float):
                lines.append(_row(metric.replace("_", " "), *(f"{metrics[name][metric]:,.4f}" for name in shown)))
        if "loss" not in metrics["before"]:
            lines.append("\nthe loss is left out: it reads outputs of inner layers, which the graph does not have")
        lines.append(f"\nspeed: the model alone, on this machine ({record['measured_on']})")
    return lines


def _row(name: str, *cells: str) -> str:
    return f"  {name:24}" + "".join(f"{cell:>14}" for cell in cells)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
