"""A finished run's model in a folder for others: as `from_pretrained` loads it, or with its matrices in int8.

`load_exported(folder)` loads either.
"""

import copy
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from accel_train.evaluating import measure
from accel_train.evaluation import evaluation_mode, evaluation_reader
from accel_train.int8 import int8_tensors, left_alone, put_int8_tensors, quantize_int8, require_torchao
from accel_train.observe.ledger import read_json, write_json
from accel_train.ownership import MARKER, check_folder, replacing
from accel_train.trained import TrainedRun, check_finished, open_run, recipe_of_trained, with_model

EXPORT_FILE = "export.json"
INT8_FILE = "model-int8.safetensors"
"""Not `model.safetensors`: `from_pretrained` would load what it knows of it, and leave the rest random."""
_TIMED_BATCHES = 4
_TIMED_SECONDS = 1.0
_HOW_TO_LOAD = """
## int8

The matrices are int8 (weight-only, by torchao), in `{file}`; `from_pretrained` does not know them. Load it so:

```python
from accel_train.export import load_exported

model = load_exported("PATH OF THIS FOLDER")
```
"""


@dataclass(frozen=True)
class Export:
    """An exported model."""

    folder: Path
    record: dict[str, Any]
    """What export.json holds."""


def export_run(folder: Path, out: Path | None = None, quantize: str | None = None) -> Export:
    """Write a finished run's model into a folder of its own, whole or not at all.

    With `quantize="int8"` its matrices become int8, and size, speed and metrics are compared with what they were.

    Raises:
        ValueError: no finished run, a folder that holds something else, or a package that is not installed.
    """
    check_finished(folder)
    target = out or folder / ("export" if quantize is None else f"export-{quantize}")
    target = target.resolve() if target.is_symlink() else target
    check_folder(target, f"--out {target}")
    if quantize is not None:
        require_torchao()
    recipe = recipe_of_trained(folder)
    is_unmerged = recipe.model.lora is not None and not recipe.model.lora.merge
    run = None if quantize is None and not is_unmerged else open_run(folder, settings=["--precision.compile", "false"])
    record: dict[str, Any] = {"run": str(folder), "quantize": quantize}
    with replacing(target) as aside:
        shutil.copytree(folder / "model", aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MARKER))
        if run is not None:
            run = _merged(run) if is_unmerged else run
            _save_whole(run.inner.model, aside)
        before = _bytes_of_weights(aside)
        record["weights_bytes"] = {"before": before, "after": before}
        if quantize is not None:
            assert run is not None
            record |= _make_int8(run, aside)
            record["weights_bytes"]["after"] = _bytes_of_weights(aside)
        write_json(aside / EXPORT_FILE, record)
    return Export(target, record)


def load_exported(folder: str | Path) -> PreTrainedModel:
    """The model of an exported folder, ready to evaluate: int8 where it was exported so.

    Raises:
        ValueError: the folder holds no export, or is not complete; or torchao is not installed.
    """
    folder = Path(folder)
    if not (folder / EXPORT_FILE).is_file():
        raise ValueError(f"{folder} is no export (it has no {EXPORT_FILE}); `accel-train export RUN` writes one")
    record = read_json(folder / EXPORT_FILE)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class = _class_of(config, folder)
    if record["quantize"] is None:
        whole: PreTrainedModel = model_class.from_pretrained(folder, use_safetensors=True)
        return whole.eval()
    model = model_class(config).eval()
    put_int8_tensors(model, tuple(record["int8"]["matrices"]), load_file(folder / INT8_FILE))
    return model


def _class_of(config: Any, folder: Path) -> Any:
    name = (config.architectures or ["none"])[0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(f"{folder}: architectures={name!r} in config.json is no model of transformers")
    return found


def _merged(run: TrainedRun) -> TrainedRun:
    from accel_train.lora import merge_adapters

    return with_model(run, merge_adapters(run.inner.model))


def _save_whole(model: nn.Module, folder: Path) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers, which this export needs; copy RUN/model as it is"
        )
    _remove_weights(folder)
    logging.disable_progress_bar()
    model.save_pretrained(folder)


def _remove_weights(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        file.unlink()


def _bytes_of_weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _make_int8(run: TrainedRun, folder: Path) -> dict[str, Any]:
    """Replace the weights of a folder by int8 ones; returns what was done and what it did to speed and metrics."""
    whole = run.inner.model
    model = copy.deepcopy(whole)
    names = quantize_int8(model)
    _remove_weights(folder)
    tensors = int8_tensors(model, names)
    save_file(tensors, folder / INT8_FILE)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {type(model).__name__}\n"
    card.write_text(text + _HOW_TO_LOAD.format(file=INT8_FILE), encoding="utf-8")
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    num_int8 = sum(model.get_parameter(f"{name}.weight").numel() for name in names)
    found: dict[str, Any] = {
        "int8": {
            "how": "weight-only, symmetric, one scale for each output",
            "library": f"torchao {version('torchao')}",
            "file": INT8_FILE,
            "matrices": list(names),
            "share_of_parameters": num_int8 / num_parameters,
            "left_alone": left_alone(model, names),
        }
    }
    if run.data.eval is None:
        return found
    after = with_model(run, model)
    before_metrics, after_metrics = measure(run).metrics, measure(after).metrics
    rates = samples_per_second([run, after])
    return {
        **found,
        "metrics": {"before": before_metrics, "after": after_metrics},
        "samples_per_second": {"before": rates[0], "after": rates[1]},
        "measured_on": describe_device(run.accelerator.device),
    }


def describe_device(device: torch.device) -> str:
    """The device in words, with its threads where it is a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads != 1)}"


def samples_per_second(runs: list[TrainedRun], *, seconds: float = _TIMED_SECONDS) -> list[float]:
    """How fast each evaluates the same few batches, already read: the best of several rounds, taken in turns."""
    size, accelerator = runs[0].sizes.per_device_eval_batch_size, runs[0].accelerator
    assert runs[0].data.eval is not None
    num_samples = min(len(runs[0].data.eval), _TIMED_BATCHES * size)  # type: ignore[arg-type]
    reader = evaluation_reader(accelerator, runs[0].data, size, num_samples, 0, False)
    batches = [batch for batch, _ in reader]
    best = [float("inf")] * len(runs)
    begin = time.perf_counter()
    for number in range(1000):
        for which, run in enumerate(runs):
            with evaluation_mode(run.inner):
                started = _now(accelerator.device)
                for batch in batches:
                    run.inner(batch, "counts")
                took = _now(accelerator.device) - started
            if number:  # the first round warms up
                best[which] = min(best[which], took)
        if number >= 2 and time.perf_counter() - begin > seconds * len(runs):
            break
    return [num_samples / took for took in best]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def format_export(export: Export) -> str:
    """What was written; and for int8 a table of size, speed and metrics before and after."""
    record = export.record
    sizes = record["weights_bytes"]
    if record["quantize"] is None:
        return f"{export.folder}: {_megabytes(sizes['after'])} of weights, for from_pretrained"
    int8 = record["int8"]
    rest = ", ".join(f"{kind} {count:,}" for kind, count in int8["left_alone"].items())
    lines = [
        f"int8 ({int8['how']}; {int8['library']}): {len(int8['matrices'])} matrices, "
        f"{int8['share_of_parameters']:.0%} of the parameters",
        f"left in floating point (parameters): {rest}",
        "",
        _row("", "before", "int8"),
        _row("weights", _megabytes(sizes["before"]), _megabytes(sizes["after"])),
    ]
    if "metrics" in record:
        rates, metrics = record["samples_per_second"], record["metrics"]
        lines.append(_row("samples per second", f"{rates['before']:,.1f}", f"{rates['after']:,.1f}"))
        lines += _metric_rows(metrics["before"], metrics["after"])
        lines.append(f"\nspeed: the model alone, on this machine ({record['measured_on']})")
        if rates["after"] < 0.95 * rates["before"]:
            lines.append(
                "int8 is slower here: the weights are turned back into floating point for each product; it saves memory, not time"
            )
    else:
        lines.append("\nthe run held out no data, so speed and metrics are not compared")
    lines.append(f"{export.folder}: load it with accel_train.export.load_exported")
    return "\n".join(lines)


def _metric_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        _row(name.replace("_", " "), f"{value:,.4f}", f"{after[name]:,.4f}")
        for name, value in before.items()
        if isinstance(value, float)
    ]


def _row(name: str, before: str, after: str) -> str:
    return f"  {name:24}{before:>14}{after:>14}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
