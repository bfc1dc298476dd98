"""Write a finished run's model as an ONNX graph, and check in onnxruntime that it computes the same."""

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch
from onnxscript import INT64, script
from onnxscript import opset18 as op
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import AutoTokenizer

from accel_train.core.errors import first_line
from accel_train.core.state import JsonRecord
from accel_train.core.terminal import busy
from accel_train.inference.finished_run import TrainedRun, with_model
from accel_train.inference.int8 import quiet
from accel_train.inference.int8_cost import Contender, compare
from accel_train.inference.onnx_int8 import bytes_of, quantize_graph
from accel_train.tasks.sentence_embedding.config import EMBEDDING

Numbers = dict[str, float]

Tensors = Mapping[str, Tensor]
"""Inputs or outputs by name."""

ONNX_FILE = "model.onnx"
TOLERANCE = 1e-3
"""Largest difference of an output, relative to its largest value. For logits and boxes, only if that is above 1."""
_METRIC_TOLERANCE = 1e-4
_OUTPUTS = ("logits", "start_logits", "end_logits", "pred_boxes", EMBEDDING)
_SHORTEST = 8
"""Tokens of the traced example. Below the largest n of an n-gram model, its graph would leave n-grams out."""


class OnnxModel(nn.Module):
    """A model's graph in onnxruntime on the CPU, called like the model. Records the differences from `reference`.

    Inputs that a task leaves out get the tokenizer's defaults. Queries that a detector chooses by score are paired with
    the nearest ones of `reference`, because ties are chosen in any order. With `leaves_out_ties`, images are not
    compared if other queries are chosen and the scores differ by no more than a rounding.
    """

    def __init__(self, session: Any, reference: Any = None, *, leaves_out_ties: bool = False) -> None:
        super().__init__()
        self.session, self.reference, self.leaves_out_ties = session, reference, leaves_out_ties
        self.num_images = self.num_ties = 0
        """Images of a detector that chooses queries, and images among them that are not compared."""
        self.differences: Numbers = {}
        """Largest difference from `reference` by output."""
        self.largest: Numbers = {}
        """Largest value of `reference` by output."""

    def forward(self, **given: Tensor) -> SimpleNamespace:
        """Return the outputs by name."""
        some, feed = next(iter(given.values())), {}
        for name in (node.name for node in self.session.get_inputs()):
            missing = torch.ones_like if name == "attention_mask" else torch.zeros_like
            value = given[name] if name in given else missing(given["input_ids"])
            feed[name] = (value.float() if value.is_floating_point() else value.long()).cpu().numpy()
        names = [node.name for node in self.session.get_outputs()]
        try:
            arrays = self.session.run(names, feed)
        # The errors of onnxruntime have no base class of their own.
        except Exception as error:
            raise ValueError(f"--onnx: onnxruntime cannot compute this model: {_reason(error)}") from error
        found = {name: torch.from_numpy(array).to(some.device) for name, array in zip(names, arrays, strict=True)}
        labels = given.pop("labels", None)
        expected = {} if self.reference is None else self.reference(**given)
        if "enc_outputs_class" in expected:
            self._record_chosen(found, expected)
        elif expected:
            self._record(found, expected)
        # The loss of a detector reads outputs of its inner layers, which the graph does not have.
        return SimpleNamespace(**found, **({} if labels is None else {"loss": some.new_tensor(math.nan)}))

    def _record(self, found: Tensors, expected: Tensors) -> None:
        for name, values in found.items():
            for record, value in ((self.differences, values - expected[name]), (self.largest, expected[name])):
                # Unlike max, np.maximum keeps NaN.
                record[name] = float(np.maximum(value.abs().max().item(), record.get(name, 0.0)))

    def _record_chosen(self, found: Tensors, expected: Any) -> None:
        """Record the differences of the logits and boxes of queries that a detector chooses by score."""
        is_tie = _has_tie(expected["enc_outputs_class"], self.reference.config).tolist()
        for image, ties in enumerate(is_tie):
            theirs = {name: expected[name][image] for name in found}
            ours = _paired({name: values[image] for name, values in found.items()}, theirs)
            differs = any(
                (ours[name] - value).abs().max() > TOLERANCE * value.abs().max().clamp(min=1)
                for name, value in theirs.items()
            )
            self.num_images += 1
            if self.leaves_out_ties and ties and differs:
                self.num_ties += 1
            else:
                self._record(ours, theirs)


class _Outputs(nn.Module):
    """The model with positional inputs, which returns only the outputs of its graph."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(found[name] for name in self.outputs)


def _has_tie(scores: Tensor, config: Any) -> Tensor:
    """Return whether a rounding decides which queries a detector chooses, by image (N,), from scores (N, P, classes).

    Queries with learned contents also depend on their order.
    """
    scores, count = scores.max(-1).values, config.num_queries
    best = scores.topk(min(count + 1, scores.shape[1])).values
    gaps = best[:, :-1] - best[:, 1:]
    if not config.learn_initial_query:
        gaps = gaps[:, count - 1 :]
    # NaN does not count as a tie.
    return (gaps <= TOLERANCE * best.abs().amax(1, keepdim=True).clamp(min=1)).any(1)


def _paired(ours: Tensors, theirs: Tensors) -> Tensors:
    """Return our rows of logits and boxes in the order of the nearest rows of theirs."""
    first, second = (torch.cat([each[name] for name in theirs], -1) for each in (theirs, ours))
    distances = torch.cdist(first, second, p=math.inf).nan_to_num(nan=0.0, posinf=0.0)
    order = torch.from_numpy(linear_sum_assignment(distances.cpu().numpy())[1]).to(first.device)
    return {name: values[order] for name, values in ours.items()}


def clamp(values: Any, low: Any = None, high: Any = None) -> Any:
    """Return torch.clamp without Clip. The optimizer of onnxscript 0.7 gives equal names to bounds of equal tensors."""
    if low is not None:
        values = op.Where(op.Less(values, op.CastLike(low, values)), op.CastLike(low, values), values)
    if high is not None:
        values = op.Where(op.Greater(values, op.CastLike(high, values)), op.CastLike(high, values), values)
    return values


@script()
def searchsorted(known: INT64[...], keys: INT64[...]) -> INT64[...]:
    """Return torch.searchsorted of rows of less than 2^20 integers by binary search. ONNX has no operator for it."""
    size = op.Slice(op.Shape(known), [1], [2])
    low = keys - keys
    high = low + size
    for _ in range(21):
        middle = (low + high) / 2
        is_smaller = op.GatherElements(known, op.Min(middle, size - 1), axis=1) < keys
        is_open = low < high
        low = op.Where(op.And(is_open, is_smaller), middle + 1, low)
        high = op.Where(op.And(is_open, op.Not(is_smaller)), middle, high)
    return low


def write_onnx(run: TrainedRun, folder: Path, quantize: str | None = None) -> JsonRecord:
    """Write the graph into a folder. Return its description, and the size, metrics and speed of all models.

    With `quantize="int8"`, the graph in the folder is the quantized one. The fp32 graph is checked before it.

    Raises:
        ValueError: the model has no ONNX graph, the graph computes other outputs or metrics, or nothing can be int8.
    """
    example, file, detects = _example(run), folder / ONNX_FILE, run.task.spec.gives == "boxes"
    model = run.inner.model
    # The output of sentence-embedding is computed from the model's.
    model = run.task.exportable(model)
    with busy(f"{run.folder}: writing the ONNX graph"), quiet():
        opset = _write(model, type(run.inner.model).__name__, example, file, is_any_size=not detects)
    model.to(run.accelerator.device)
    checked, session = _opened(file, model, leaves_out_ties=True)
    _probe(checked, example, run)
    size = bytes_of(file)
    text = "evaluating it in onnxruntime"
    contenders = {"onnx": Contender(with_model(run, checked), text, with_model(run, OnnxModel(session)))}
    sizes, int8 = {"after": size}, None
    if quantize is not None:
        with busy(f"{run.folder}: quantizing the ONNX graph"), quiet():
            int8 = quantize_graph(file)
        rounded, session = _opened(file, model)
        _probe(rounded, example, run)
        of_int8 = Contender(with_model(run, rounded), f"{text}, in int8", with_model(run, OnnxModel(session)))
        contenders["after"], sizes = of_int8, {"onnx": size, "after": bytes_of(file)}
    else:
        contenders = {"after": contenders["onnx"]}
    # The loss of a detector matches boxes, which is not the model's part, and the graph cannot compute it.
    cost = compare(run, contenders, timed="predictions" if detects else "counts")
    for metrics in cost["metrics"].values() if detects else ():
        del metrics["loss"]
    of_graph = cost["metrics"]["after" if int8 is None else "onnx"]
    _check(checked, cost["metrics"]["before"], of_graph)
    cost["measured_on"] += "" if run.accelerator.device.type == "cpu" else "; onnx: on its CPU"
    facts = {
        "file": ONNX_FILE,
        "library": f"torch {version('torch')}, onnxruntime {version('onnxruntime')}",
        "opset": opset,
        "inputs": {node.name: node.shape for node in session.get_inputs()},
        "outputs": {node.name: node.shape for node in session.get_outputs()},
        "largest_difference": checked.differences,
        "largest_value": checked.largest,
        "allowed_difference": _allowed(checked),
        "num_images": checked.num_images,
        "num_ties": checked.num_ties,
    }
    found: JsonRecord = {"onnx": facts, "weights_bytes": sizes, **cost}
    if int8 is not None:
        for name, difference in rounded.differences.items():
            if not math.isfinite(difference):
                raise ValueError(f"--quantize int8: the int8 graph computes {name} that are not finite. Leave it out")
        found["int8"] = {
            "how": "one scale for each output",
            **int8._asdict(),
            "share_of_parameters": int8.num_weights / sum(each.numel() for each in model.parameters()),
            "largest_difference": rounded.differences,
        }
    return found


def _opened(file: Path, model: nn.Module, *, leaves_out_ties: bool = False) -> tuple[OnnxModel, Any]:
    """Return a graph that records its differences from a model, and its session in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    try:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"--onnx: onnxruntime cannot load this model: {_reason(error)}") from error
    return OnnxModel(session, model, leaves_out_ties=leaves_out_ties), session


def _example(run: TrainedRun) -> Tensors:
    """Return two evaluation samples as the processor encodes them. Sizes of 1 would become constants of the graph."""
    assert run.data.eval is not None
    last = len(run.data.eval) - 1  # type: ignore[arg-type]
    batch = run.data.collate([run.data.eval[0], run.data.eval[last]])
    if "pixel_values" in batch:
        return {"pixel_values": batch["pixel_values"]}
    batch = {**run.task.export_batch(batch)}
    ids = batch["input_ids"].long()
    names = AutoTokenizer.from_pretrained(run.folder / "model").model_input_names
    known = inspect.signature(run.inner.model.forward).parameters
    defaults = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    found = {name: (batch if name in batch else defaults)[name].long() for name in names if name in known}
    return _resized(found, 2, max(_SHORTEST, ids.shape[-1]))


def _resized(example: Tensors, rows: int, length: int) -> Tensors:
    """Return the example repeated and cut to other numbers of rows and tokens."""
    found = {}
    for name, value in example.items():
        tiled = torch.cat([value] * (1 + length // value.shape[-1]), dim=-1)[..., :length]
        found[name] = torch.cat([tiled] * (1 + rows // len(tiled)))[:rows].contiguous()
    return found


def _write(model: nn.Module, kind: str, example: Tensors, file: Path, *, is_any_size: bool) -> int:
    """Write the graph of a model and return its opset. `kind` names the model in errors.

    With `is_any_size`, it takes images of any size if torch can export the model so.
    """
    model, names, takes_images = model.cpu(), list(example), "pixel_values" in example
    with torch.no_grad():
        found = model(**example)
    outputs = [name for name in _OUTPUTS if name in found]
    for tries_any_size in (True, False) if takes_images and is_any_size else (False,):
        axes = {0: "batch", 2: "height", 3: "width"} if tries_any_size else {0: "batch"}
        if not takes_images:
            num_axes = example["input_ids"].ndim
            axes = {0: "batch", num_axes - 1: "length"} | ({1: "choices"} if num_axes == 3 else {})
        try:
            # ONNX has no operator for the checks of transformers.
            with patch.dict(os.environ, {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}):
                program = torch.onnx.export(
                    _Outputs(model, names, outputs).eval(),
                    tuple(example.values()),
                    input_names=names,
                    output_names=outputs,
                    dynamic_shapes=((axes,) * len(names),),
                    dynamo=True,
                    verbose=False,
                    custom_translation_table={
                        torch.ops.aten.searchsorted.Tensor: searchsorted,
                        torch.ops.aten.clamp.default: clamp,
                        torch.ops.aten.clamp.Tensor: clamp,
                    },
                )
            break
        except torch.onnx.OnnxExporterError as error:
            if tries_any_size:
                continue
            raise ValueError(f"--onnx: torch cannot export {kind}: {_reason(error)}. Leave --onnx out") from error
    assert program is not None
    program.save(file)
    return int(program.model.opset_imports[""])


def _probe(checked: OnnxModel, example: Tensors, run: TrainedRun) -> None:
    """Compare outputs at other sizes than the example's, which the graph may hold as constants."""
    length = next(iter(example.values())).shape[-1]
    longest = length
    if isinstance(checked.session.get_inputs()[0].shape[-1], str):
        longest = min(2 * length, run.data.facts.max_length or 2 * length)
    with torch.no_grad():
        for size in ((1, length - ("input_ids" in example)), (3, longest)):
            resized = _resized(example, *size)
            checked(**{name: tensor.to(run.accelerator.device) for name, tensor in resized.items()})


def _allowed(checked: OnnxModel) -> Numbers:
    """Return the largest difference that passes, by output. Numbers of a normalized vector are far below 1."""
    return {
        name: TOLERANCE * (largest if name == EMBEDDING else max(largest, 1.0))
        for name, largest in checked.largest.items()
    }


def _check(checked: OnnxModel, before: Numbers, after: Numbers) -> None:
    if 2 * checked.num_ties > checked.num_images:
        raise ValueError(
            f"--onnx: the detector chooses its queries by score, and a rounding decides in {checked.num_ties:,} of "
            f"{checked.num_images:,} images, so the graph cannot be compared. Train longer, or leave --onnx out"
        )
    for name, difference in checked.differences.items():
        most = _allowed(checked)[name]
        if not difference <= most < math.inf:
            raise ValueError(
                f"--onnx: the {name} of the graph differ from the model's by {difference:.2g}; the tolerance is "
                f"{most:.2g}. Leave --onnx out"
            )
    for name, value in before.items():
        other = after[name]
        is_equal = math.isclose(value, other, rel_tol=_METRIC_TOLERANCE, abs_tol=_METRIC_TOLERANCE)
        if not is_equal and not (math.isnan(value) and math.isnan(other)):
            raise ValueError(
                f"--onnx: {name} is {value:.6g} for the model and {other:.6g} for the graph; the tolerance is "
                f"{_METRIC_TOLERANCE:g}. Leave --onnx out"
            )


def _reason(error: BaseException) -> str:
    """Return the first line of the error that caused this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error).rstrip(".")
