"""Export a finished run's model to a folder: for `from_pretrained`, with int8 matrices, or as an ONNX graph.

`load_exported(folder)` loads the first two kinds.
"""

import copy
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from accel_train.checkpoint.weight_files import check_digests
from accel_train.core.errors import asks_for_own_code, first_line
from accel_train.core.json_io import load_object, write_json
from accel_train.core.model_card import FILE, USE, Card
from accel_train.core.ownership import MARKER, check_folder, replacing
from accel_train.core.state import JsonRecord
from accel_train.inference.finished_run import (
    DataNotFound,
    TrainedRun,
    check_content,
    keeps_adapters,
    open_run,
    put_in_adapters,
    recipe_of_trained,
    with_model,
)
from accel_train.inference.int8 import int8_tensors, left_alone, put_int8_tensors, quantize_int8, require_torchao
from accel_train.inference.int8_cost import Contender, compare
from accel_train.inference.model_files import is_known
from accel_train.model.pretrained import new_weights, without_pooler
from accel_train.model.weights import in_bf16
from accel_train.recipe.schema import Recipe
from accel_train.task import TASKS
from accel_train.tasks.sentence_embedding.config import EMBEDDING, PROMPTS_FILE

EXPORT_FILE = "export.json"
INT8_FILE = "model-int8.safetensors"
"""Name of the int8 file. With `model.safetensors`, `from_pretrained` would leave unknown weights random."""
_HOW_TO_LOAD = """
The matrices are int8 (weight-only, by torchao), in `{file}`; `from_pretrained` does not know them, \
and refuses this folder.
Load the model so (a tokenizer or image processor loads with transformers as ever):

```python
from accel_train import load_exported

model = load_exported(".")  # this folder; or its path
```
"""
_HOW_TO_RUN = """
The model is an ONNX graph, in `{file}`. It takes the tensors that this folder's {processor} returns: {inputs}.

```python
{imports}from onnxruntime import InferenceSession
from transformers import {processor}

processor = {processor}.from_pretrained(".")  # this folder; or its path
session = InferenceSession("{file}")
outputs = session.run(None, dict(processor({given}, return_tensors="np")))
{reading}```
{notes}"""
_READING = {
    "pred_boxes": """\
logits, boxes = map(torch.from_numpy, outputs)
(found,) = processor.post_process_object_detection(
    SimpleNamespace(logits=logits, pred_boxes=boxes), threshold=0.5, target_sizes=[(image.height, image.width)]
)
print(found["labels"], found["scores"], found["boxes"])  # left, top, right, bottom in pixels
""",
    EMBEDDING: "vectors = outputs[0]\nsimilarities = vectors @ vectors.T  # cosines: the vectors are normalized\n",
}
"""Lines that read an output of a graph, by its name."""
_AS_EXPORTED = (
    "--precision.mixed_precision", "no", "--precision.tf32", "false",
    "--model.attn_implementation", "auto", "--model.fused_kernels", "false",
    # Scaled images may not fit the graph.
    "--evaluate.test_time_augmentation", "null",
)  # fmt: skip
"""Settings of the run that is compared with its ONNX graph, in fp32."""


class Export(NamedTuple):
    """An exported model."""

    folder: Path
    record: JsonRecord
    """Contents of export.json."""


def export_run(
    folder: Path,
    out: Path | None = None,
    quantize: str | None = None,
    settings: Sequence[str] = (),
    *,
    onnx: bool = False,
) -> Export:
    """Export a finished run's model to a folder, atomically, and return the export.

    With `quantize="int8"`, matrices become int8; with `onnx`, the model becomes an ONNX graph, with both in int8.
    Size, speed and metrics are then compared with the original. `settings` may be `--task MODULE:CLASS`, to allow the
    run's own code.

    Raises:
        ValueError: the run is not finished, code is not allowed, the folder has other files, a package is missing,
            nothing can be int8, or the ONNX graph computes something else.
    """
    recipe = recipe_of_trained(folder, settings=settings)
    check_content(folder, recipe)
    target = out or folder / "-".join(filter(None, ("export", "onnx" if onnx else None, quantize)))
    target = target.resolve() if target.is_symlink() else target
    check_folder(target, f"--out {target}")
    record: JsonRecord = {"run": str(folder), "quantize": quantize}
    is_unmerged = keeps_adapters(recipe.model)
    run = None
    if quantize is not None and not onnx:
        require_torchao()
        _transformers_class(folder / "model")
        run = _open_to_compare(folder, record, settings)
    elif onnx:
        run = _open_to_compare(folder, record, [*settings, *_AS_EXPORTED])
        if run is None:
            raise ValueError(
                f"--onnx evaluates the model and its graph on the run's held-out data: {record['not_compared']}. Put "
                "the data there, or hold some out"
            )
    model: Any = None if run is None else run.inner.model
    if model is None:
        model = _load_whole(folder, recipe, record, needed=quantize is not None or is_unmerged)
    if is_unmerged:
        from accel_train.model.lora import without_adapters

        model = without_adapters(model, merge=True)
    with replacing(target) as staging:
        record["left_out"] = copy_known(folder / "model", staging)
        if is_unmerged:
            _remove_weights(staging)
            logging.disable_progress_bar()
            model = in_bf16(model) if recipe.checkpoint.model_dtype == "bf16" else model
            model.save_pretrained(staging)
        before = _bytes_of_weights(staging)
        record["weights_bytes"] = {"before": before, "after": before}
        if quantize is not None and not onnx:
            record |= _make_int8(run and with_model(run, model), model, staging)
            record["weights_bytes"]["after"] = _bytes_of_weights(staging)
        elif run is not None:
            from accel_train.inference.onnx_export import write_onnx

            _remove_weights(staging)
            found = write_onnx(with_model(run, model), staging, quantize)
            record |= found | {"weights_bytes": {"before": before, **found["weights_bytes"]}}
            _rewrite_card(staging, type(model).__name__, _how_to_run(staging, **record["onnx"]))
        write_json(staging / EXPORT_FILE, record)
    return Export(target, record)


def load_exported(folder: str | Path) -> PreTrainedModel:
    """Return the model of an exported folder in evaluation mode, with int8 matrices if exported so.

    Raises:
        ValueError: the folder is not an export or is incomplete, or torchao is not installed.
    """
    folder = Path(folder)
    if not (folder / EXPORT_FILE).is_file():
        raise ValueError(f"{folder} is not an export (it has no {EXPORT_FILE}); `accel-train export RUN` writes one")
    record = load_object(folder / EXPORT_FILE)
    if "onnx" in record:
        raise ValueError(
            f"{folder} holds an ONNX graph; load {record['onnx']['file']} with onnxruntime.InferenceSession"
        )
    check_digests(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class = _class_of(config, folder)
    if record["quantize"] is None:
        return model_class.from_pretrained(folder, use_safetensors=True).eval()
    tensors = load_file(folder / INT8_FILE)
    model = model_class(config, **_pooler_of(model_class, tensors)).eval()
    put_int8_tensors(model, tuple(record["int8"]["matrices"]), tensors)
    return model


def _pooler_of(model_class: type, names: Iterable[str]) -> dict[str, bool]:
    """Return the argument that builds a model without a pooler, if its saved weights have none."""
    return {} if any(name.startswith("pooler.") for name in names) else without_pooler(model_class)


def _class_of(config: Any, folder: Path) -> Any:
    name = (config.architectures or ["none"])[0]
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(f"{folder}: architectures={name!r} in config.json is not a model of transformers")
    return found


def _open_to_compare(folder: Path, record: JsonRecord, settings: Sequence[str]) -> TrainedRun | None:
    """Return the run on its own data, to measure the cost of int8. None if it has none; `record` gets the reason."""
    try:
        run = open_run(folder, settings=[*settings, "--precision.compile", "false"])
    except DataNotFound as error:
        record["not_compared"] = error.problem
        return None
    if run.data.eval is None:
        record["not_compared"] = "the run held out no data"
        return None
    return run


def _load_whole(folder: Path, recipe: Recipe, record: JsonRecord, *, needed: bool) -> PreTrainedModel | None:
    """Return the model as `from_pretrained` loads it, with its adapters.

    A custom task may have saved a model that is not from transformers. This is an error if the model is `needed`.
    Otherwise, the result is None, and `record` gets the reason.
    """
    source = folder / "model"
    logging.disable_progress_bar()
    try:
        model_class = _transformers_class(source)
        names = chain.from_iterable(safe_open(file, "pt").keys() for file in source.glob("*.safetensors"))
        model, found = model_class.from_pretrained(
            source,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **_pooler_of(model_class, names),
        )
        lacking = new_weights(found)
        if lacking:
            raise ValueError(
                f"{source} does not hold {lacking[0]} of {model_class.__name__}, and from_pretrained would invent it"
            )
    # RuntimeError: a tensor with another shape.
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        if needed or recipe.task in TASKS:
            raise ValueError(f"{reason}; copy {source} as it is, if you want that") from error
        record["not_for_from_pretrained"] = reason
        return None
    put_in_adapters(model, recipe.model, folder / "adapter")
    return model.eval()


def _transformers_class(folder: Path) -> Any:
    """Return the transformers class that loads a model folder. Code in the folder is not run."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        if asks_for_own_code(error):
            reason = "it brings its own code, and export does not run it (from_pretrained asks for trust_remote_code)"
        raise ValueError(f"{folder} is not a model of transformers: {reason}") from error
    return _class_of(config, folder)


def copy_known(source: Path, target: Path) -> list[str]:
    """Copy the files of a model that run no code on loading. Return the other files (pickles, code, others)."""
    left_out: list[str] = []

    def unknown(folder: str, names: list[str]) -> list[str]:
        rest = [name for name in names if name != MARKER and not is_known(Path(folder, name))]
        left_out.extend(sorted(str(Path(folder, name).relative_to(source)) for name in rest))
        return [*rest, MARKER]

    shutil.copytree(source, target, ignore=unknown, dirs_exist_ok=True)
    return left_out


def _remove_weights(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        file.unlink()


def _bytes_of_weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _make_int8(run: TrainedRun | None, whole: nn.Module, folder: Path) -> JsonRecord:
    """Replace the weights in a folder with int8 weights. Return the details and the effect on speed and metrics."""
    model = copy.deepcopy(whole)
    names = quantize_int8(model)
    _remove_weights(folder)
    tensors = int8_tensors(model, names)
    save_file(tensors, folder / INT8_FILE)
    _rewrite_card(folder, type(model).__name__, _HOW_TO_LOAD.format(file=INT8_FILE))
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    num_int8 = sum(model.get_parameter(f"{name}.weight").numel() for name in names)
    int8 = {
        "how": "weight-only, symmetric, one scale for each output",
        "library": f"torchao {version('torchao')}",
        "file": INT8_FILE,
        "matrices": list(names),
        "share_of_parameters": num_int8 / num_parameters,
        "left_alone": left_alone(model, names),
    }
    if run is None:
        return {"int8": int8}
    return {"int8": int8, **compare(run, {"after": Contender(with_model(run, model), "evaluating it in int8")})}


def _rewrite_card(folder: Path, title: str, how_to: str) -> None:
    """Replace the use in the model card, whose code would load files that no longer exist."""
    path = folder / FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else f"# {title}\n"
    path.write_text(str(Card.parse(text).with_section(USE, how_to)), encoding="utf-8")


def _how_to_run(
    folder: Path, file: str, inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Any], **_: Any
) -> str:
    """Return the part of the model card about the graph in a folder."""
    shapes = ", ".join(f"`{name}` ({', '.join(map(str, shape))})" for name, shape in inputs.items())
    takes_images = "pixel_values" in inputs
    processor = "AutoImageProcessor" if takes_images else "AutoTokenizer"
    given = "image" if takes_images else "texts, padding=True, truncation=True"
    prompts = load_object(folder / PROMPTS_FILE)["prompts"] if EMBEDDING in outputs else {}
    notes = [f"\nPut `{prompt}` before each {name}.\n" for name, prompt in prompts.items() if prompt]
    return _HOW_TO_RUN.format(
        file=file,
        inputs=shapes,
        processor=processor,
        given=given,
        imports="from types import SimpleNamespace\n\nimport torch\n" if "pred_boxes" in outputs else "",
        reading="".join(_READING.get(name, "") for name in outputs),
        notes="".join(notes),
    )
