"""Quantize an ONNX graph to int8: products with matrices in integers, and convolutions by their weights alone.

Matrices have one scale per output and 7 bits, so that sums of two products fit 16 bits on CPUs without VNNI. Their
inputs are quantized at run time, with one scale per tensor (onnxruntime's dynamic quantization). A convolution W
(outputs first) becomes Q = round(W / s) in int8, with s = max |W_output| / 127. onnxruntime computes Q s when it loads
the graph, so convolutions take less of the file, and run in fp32.
"""

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

LARGEST_FILE = 2_000_000_000
"""Bytes from which weights are in a file next to the graph. Protocol buffers end at 2 GiB."""


class Int8Graph(NamedTuple):
    """The weights of a quantized graph."""

    num_matrices: int
    num_convolutions: int
    num_weights: int
    """Numbers in int8."""
    left_alone: dict[str, int]
    """Numbers in fp32, by the operator that reads them."""


def quantize_graph(file: Path) -> Int8Graph:
    """Quantize a graph in place, and return what became int8.

    Raises:
        ValueError: the graph has no matrix and no convolution with constant weights.
    """
    staged = file.with_name("staged.onnx")
    is_large = bytes_of(file) > LARGEST_FILE
    quantize_dynamic(
        file,
        staged,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=is_large,
    )
    model = onnx.load(staged)
    for each in (*_files_of(file), *_files_of(staged)):
        each.unlink()
    convolutions = _quantize_convolutions(model)
    matrices = _numbers(model, "MatMulInteger")
    if not matrices and not convolutions:
        raise ValueError(
            "--quantize int8: the graph of this model has no matrix and no convolution with constant weights. Leave "
            "--quantize out"
        )
    onnx.save_model(model, file, save_as_external_data=is_large, location=f"{file.name}.data")
    return Int8Graph(len(matrices), len(convolutions), sum(matrices) + sum(convolutions), _left_alone(model))


def _files_of(file: Path) -> list[Path]:
    """Return a graph's file, and the file of its weights if there is one."""
    return list(file.parent.glob(f"{file.name}*"))


def bytes_of(file: Path) -> int:
    """Return the size of a graph with its weights."""
    return sum(each.stat().st_size for each in _files_of(file))


def _numbers(model: ModelProto, operator: str) -> list[int]:
    """Return the number of int8 weights of each constant matrix that the operator reads."""
    read = {name for node in model.graph.node if node.op_type == operator for name in node.input[:2]}
    return [math.prod(each.dims) for each in model.graph.initializer if each.name in read]


def _quantize_convolutions(model: ModelProto) -> list[int]:
    """Replace the fp32 weights of convolutions with int8 weights. Return the number of weights of each."""
    graph = model.graph
    readers: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in graph.node:
        for place, name in enumerate(node.input):
            readers[name].add((node.op_type, place))
    found = []
    for weight in list(graph.initializer):
        if weight.data_type != TensorProto.FLOAT or readers[weight.name] != {("Conv", 1)}:
            continue
        numbers, scales = _in_int8(numpy_helper.to_array(weight))
        name = weight.name
        graph.initializer.remove(weight)
        quantized, scale, wide = (f"{name}_{part}" for part in ("quantized", "scale", "wide"))
        graph.initializer.extend([numpy_helper.from_array(numbers, quantized), numpy_helper.from_array(scales, scale)])
        # onnxruntime computes these nodes when it loads the graph. It would compute a DequantizeLinear in each call.
        graph.node.insert(0, helper.make_node("Cast", [quantized], [wide], wide, to=TensorProto.FLOAT))
        graph.node.insert(1, helper.make_node("Mul", [wide, scale], [name], f"{name}_dequantized"))
        found.append(numbers.size)
    return found


def _in_int8(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the weights in int8, and a scale per output that spreads over its weights. It is 1 if all are 0."""
    largest = np.abs(weight).max(axis=tuple(range(1, weight.ndim)), keepdims=True)
    scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.rint(weight / scales).astype(np.int8), scales


def _left_alone(model: ModelProto) -> dict[str, int]:
    readers = {name: node.op_type for node in reversed(model.graph.node) for name in node.input}
    found: Counter[str] = Counter()
    for each in model.graph.initializer:
        if each.data_type == TensorProto.FLOAT and each.name in readers and not each.name.endswith("_scale"):
            found[readers[each.name]] += math.prod(each.dims)
    return dict(found.most_common())
