"""A finished run's model in a folder for others: as `from_pretrained` loads it, or with its matrices in int8.

`load_exported(folder)` loads either.
"""

import copy
import re
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
from accel_train.model_check import check_weight_files
from accel_train.observe.ledger import read_json, write_json
from accel_train.ownership import MARKER, check_folder, replacing
from accel_train.recipe import Recipe
from accel_train.task import TASKS
from accel_train.trained import (
    DataNotFound,
    TrainedRun,
    check_finished,
    open_run,
    put_in_adapters,
    recipe_of_trained,
    with_model,
)

EXPORT_FILE = "export.json"
INT8_FILE = "model-int8.safetensors"
"""Not `model.safetensors`: `from_pretrained` would load what it knows of it, and leave the rest random."""
COPIED_SUFFIXES = (".safetensors", ".json", ".txt", ".md", ".model", ".spm", ".tiktoken", ".jinja")
COPIED_NAMES = ("LICENSE", "NOTICE")
"""Weights, configurations, tokenizers and texts; no pickle (`*.bin`, `*.pt`) and no code."""
_TIMED_BATCHES = 4
_TIMED_SECONDS = 1.0
_CODE_BLOCK = re.compile(r"```python\n.*?```\n", re.DOTALL)
_HOW_TO_LOAD = """
## int8

The matrices are int8 (weight-only, by torchao), in `{file}`; `from_pretrained` does not know them, and refuses this folder.
Load the model so (a tokenizer or image processor loads with transformers as ever):

```python
from accel_train.export import load_exported

model = load_exported(".")  # this folder; or its path
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
    record: dict[str, Any] = {"run": str(folder), "quantize": quantize}
    is_unmerged = recipe.model.lora is not None and not recipe.model.lora.merge
    if quantize is not None:
        _transformers_class(folder / "model")
    run = _open_to_compare(folder, record)
    whole: nn.Module | None
    if run is not None:
        whole = run.inner.model
    else:
        whole = _load_whole(folder, recipe, record, needed=quantize is not None or is_unmerged)
    if is_unmerged:
        from accel_train.lora import merge_adapters

        assert whole is not None
        whole = merge_adapters(whole)
    with replacing(target) as aside:
        record["left_out"] = copy_known(folder / "model", aside)
        if is_unmerged:
            assert whole is not None
            _save_whole(whole, aside)
        before = _bytes_of_weights(aside)
        record["weights_bytes"] = {"before": before, "after": before}
        if quantize is not None:
            assert whole is not None
            record |= _make_int8(run and with_model(run, whole), whole, aside)
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
    check_weight_files(folder)
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


def _open_to_compare(folder: Path, record: dict[str, Any]) -> TrainedRun | None:
    """The run on its own data, to measure what int8 costs; None where nothing is measured, and then `record` says why."""
    if record["quantize"] is None:
        return None
    try:
        run = open_run(folder, settings=["--precision.compile", "false"])
    except DataNotFound as error:
        record["not_compared"] = str(error).partition(";")[0]
        return None
    if run.data.eval is None:
        record["not_compared"] = "the run held out no data"
    return run


def _load_whole(folder: Path, recipe: Recipe, record: dict[str, Any], *, needed: bool) -> PreTrainedModel | None:
    """The model as `from_pretrained` makes it, adapters put in: what is written can be no worse.

    What a task of the user's own saved may be no model of transformers: `record` says why, and unless it is `needed`, it is
    copied as it is.

    Raises:
        ValueError: the weights are not those of the model; or it is needed, and is none of transformers.
    """
    source = folder / "model"
    logging.disable_progress_bar()
    try:
        model_class = _transformers_class(source)
        model, found = model_class.from_pretrained(
            source, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
        lacking = sorted([*found["missing_keys"], *(str(key[0]) for key in found["mismatched_keys"])])
        if lacking:
            raise ValueError(
                f"{source} does not hold {lacking[0]} of {model_class.__name__}, which from_pretrained would make up"
            )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of another shape
        reason = str(error).strip().partition("\n")[0]
        if needed or recipe.task in TASKS:
            raise ValueError(f"{reason}; copy {source} as it is, if that is what you want") from error
        record["not_for_from_pretrained"] = reason
        return None
    if recipe.model.lora is not None and not recipe.model.lora.merge:
        put_in_adapters(model, recipe.model, folder / "adapter")
    whole: PreTrainedModel = model.eval()
    return whole


def _transformers_class(folder: Path) -> Any:
    """The class of transformers that opens a model folder, without code that lies in the folder.

    Raises:
        ValueError: there is none.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        if "custom code" in reason:
            reason = "it brings code of its own, which export does not run (from_pretrained asks for trust_remote_code)"
        raise ValueError(f"{folder} is no model of transformers: {reason}") from error
    return _class_of(config, folder)


def copy_known(source: Path, target: Path) -> list[str]:
    """Copy the files of a model that run no code when they are read; returns those that were left out (pickles, code, others)."""
    left_out: list[str] = []

    def unknown(folder: str, names: list[str]) -> list[str]:
        found = [name for name in names if name != MARKER and not _is_known(Path(folder, name))]
        left_out.extend(sorted(str(Path(folder, name).relative_to(source)) for name in found))
        return [*found, MARKER]

    shutil.copytree(source, target, ignore=unknown, dirs_exist_ok=True)
    return left_out


def _is_known(path: Path) -> bool:
    if path.is_dir():
        return not path.name.startswith(".")
    return (path.suffix in COPIED_SUFFIXES and ".bin." not in path.name) or path.name in COPIED_NAMES


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


def _make_int8(run: TrainedRun | None, whole: nn.Module, folder: Path) -> dict[str, Any]:
    """Replace the weights of a folder by int8 ones; returns what was done and what it did to speed and metrics."""
    model = copy.deepcopy(whole)
    names = quantize_int8(model)
    _remove_weights(folder)
    tensors = int8_tensors(model, names)
    save_file(tensors, folder / INT8_FILE)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {type(model).__name__}\n"
    text = _CODE_BLOCK.sub("", text)  # it loads what is no longer there
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
    if run is None or run.data.eval is None:
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
    left_out = ", ".join(record["left_out"])
    notes = [f"left out, because only weights, configurations and texts are copied: {left_out}"] if left_out else []
    if record["quantize"] is None:
        reason = record.get("not_for_from_pretrained")
        use = "for from_pretrained" if reason is None else f"as its task saved them; not for from_pretrained ({reason})"
        return "\n".join([*notes, f"{export.folder}: {_megabytes(sizes['after'])} of weights, {use}"])
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
        lines.append(f"\nspeed and metrics are not compared: {record['not_compared']}")
    lines += [*notes, f"{export.folder}: load it with accel_train.export.load_exported; from_pretrained refuses it"]
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
