"""Sharded tensors (DTensors), tensors in files, and extra state."""

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.core.errors import SettingError
from accel_train.core.json_io import parse_json
from accel_train.runtime.private import norms_of

BLOCK_BYTES = 8 * 2**20
"""Bytes of a file that one thread reads at once."""
Replacements = dict[tuple[Any, str], Callable[..., Any]]
"""Functions that take the place of others, by the module that has them and their name in it."""
FINITE: Replacements = {
    (torch, "isnan"): lambda _: torch.tensor(False, device="cpu"),
    (torch, "isinf"): lambda _: torch.tensor(False, device="cpu"),
}
"""Answers for tensors without values, for models that clamp if a number is not finite."""
Tensors = dict[str, Tensor]
"""Tensors by name."""
ExtraState = dict[str, Any]
"""Extra state of modules, by its name in the state dict: tensors and plain Python values."""
Cut = Sequence[slice]
"""Part of a tensor: one slice per dimension, with start and stop."""
PACKED = "#packed"
"""Suffix of the name of packed extra state: (N,) uint8, a safetensors file of the value's tensors and its tree."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""torch types by their safetensors names."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that a model can be trained from."""
_TREE = "tree"
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}


@contextmanager
def without_values() -> Iterator[None]:
    """Create tensors on the meta device inside the context. The random numbers that they take are drawn again later."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        yield


@contextmanager
def replaced(functions: Replacements) -> Iterator[None]:
    """Replace functions inside the context."""
    originals = {place: getattr(*place) for place in functions}
    try:
        for place, function in functions.items():
            setattr(*place, function)
        yield
    finally:
        for place, function in originals.items():
            setattr(*place, function)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, sharing its memory; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor that is sharded like `whole`, with `part` as this process's shard."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def holders(tensor: DTensor) -> dist.ProcessGroup:
    """Return the process group that holds the shards of one copy of a tensor: the whole mesh, or one replica under
    HSDP.
    """
    mesh = tensor.device_mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    if tensor.placements[0].is_replicate():
        return mesh.get_group(1)
    everybody = dist.group.WORLD
    assert everybody is not None
    assert mesh.size() == everybody.size(), "layers that are split over neighboring processes have one copy"
    return everybody


def parts_in(whole: Tensor, other: DTensor) -> list[Tensor]:
    """Return views of a whole tensor: the shard that each of the `holders` of `other` would hold under its sharding."""
    parts = [whole]
    # FSDP2 is the first dimension of the mesh, and shards tensors that are already split.
    for size, placement in zip(reversed(other.device_mesh.shape), reversed(other.placements), strict=True):
        dim = getattr(placement, "dim", None)
        cut = [[part] * size if dim is None else _chunks(part, size, dim) for part in parts]
        parts = [each for row in zip(*cut, strict=True) for each in row]
    return parts[: holders(other).size()]


def _chunks(tensor: Tensor, size: int, dim: int) -> list[Tensor]:
    """Return `size` chunks of a tensor as views. The last ones may be shorter or empty, as FSDP2 makes them."""
    chunks = list(tensor.chunk(size, dim))
    return chunks + [tensor.narrow(dim, tensor.shape[dim], 0)] * (size - len(chunks))


@dataclass(frozen=True)
class FileTensor:
    """A floating-point tensor (not 0-dim) in a safetensors file. It is read as fp32, by blocks of rows."""

    path: Path
    version: tuple[int, int, int]
    """Size, time of the last change, and number of the file. Equal on all machines that see the same file."""
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """Position in the file, in bytes."""

    def blocks(self, rows: slice = slice(0, None)) -> Iterator[tuple[int, Tensor]]:
        """Yield fp32 blocks of these rows, each with the number of its first row. The next block uses the same memory.

        Raises:
            ValueError: the file has changed since its header was read, or it ends too early.
        """
        first, last, _ = rows.indices(self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, min(last - first, BLOCK_BYTES // row_bytes))
        memory = torch.empty(step * row_bytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            # Some file systems give a file another number each time.
            if version_of(self.path)[:2] != self.version[:2]:
                raise ValueError(f"{self.path} changed while it was read; start again")
            file.seek(self.start + first * row_bytes)
            for row in range(first, last, step):
                block = memory[: min(step, last - row) * row_bytes]
                content: Any = block.numpy()
                if file.readinto(content) < len(block):
                    raise ValueError(f"{self.path} is truncated; copy it again")
                yield row, block.view(self.dtype).view(-1, *self.shape[1:]).float()

    @torch.no_grad()
    def copy_to(self, target: Tensor, cut: Cut | None = None) -> None:
        """Copy the tensor, or a part of it, into a tensor of the same shape on any device."""
        rows, *others = cut or [slice(0, size) for size in self.shape]
        for row, block in self.blocks(rows):
            at = row - rows.start
            target[at : at + len(block)].copy_(block[(slice(None), *others)])


def version_of(path: Path) -> tuple[int, int, int]:
    """Return the size, the time of the last change, and the number of a file."""
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns, facts.st_ino


def replace_values(tensor: Tensor, values: Tensor) -> None:
    """Give a parameter or buffer other values, of any device, in place: it stays the same object."""
    is_parameter = isinstance(tensor, nn.Parameter)
    new = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)


class StandIns:
    """Tensors without values that transformers loads in place of the weights in safetensors files.

    `from_pretrained` itself finds the files and the weight of each name, makes new heads, and ties weights. A stand-in
    takes a few kilobytes, cannot be written to, and is all NaN. A value computed from it is therefore noticed.
    """

    _active: ClassVar["StandIns | None"] = None

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, FileTensor]] = {}
        self.integers: set[tuple[str, torch.Size]] = set()
        """Last part of the name, and shape, of the tensors in files that are not floating-point."""

    @classmethod
    @contextmanager
    def active(cls) -> Iterator["StandIns"]:
        """Let `transformers_model` load stand-ins inside the context."""
        cls._active = stand_ins = cls()
        try:
            yield stand_ins
        finally:
            cls._active = None

    @classmethod
    @contextmanager
    def loading(cls) -> Iterator[None]:
        """Let `from_pretrained` load stand-ins inside the context, if they are active.

        Uses `modeling_utils.safe_open`, transformers 5.17 to 5.23. Without it, the weights have values.
        """
        from transformers import modeling_utils

        stand_ins, opened = cls._active, getattr(modeling_utils, "safe_open", None)
        if stand_ins is None or opened is None:
            yield
            return
        with replaced({(modeling_utils, "safe_open"): partial(_StandInFile, stand_ins, opened)}):
            yield

    def make(self, source: FileTensor) -> Tensor:
        """Return a stand-in for a weight of more than one element."""
        # A stride of 0 makes writing an error. The others differ, so that a transposed stand-in is not recognized.
        strides = list(range(1, len(source.shape) + 1))
        strides[max(number for number, size in enumerate(source.shape) if size > 1)] = 0
        length = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, strides, strict=True))
        made = torch.full((length,), math.nan).as_strided(source.shape, strides)
        self._known[made.data_ptr()] = made, source
        return made

    def source_of(self, tensor: Tensor) -> FileTensor | None:
        """Return the tensor in a file that a stand-in stands for; None for any other tensor."""
        made, source = self._known.get(tensor.data_ptr(), (tensor, None))
        layouts = [(each.shape, each.stride(), each.dtype) for each in (made, tensor)]
        return source if layouts[0] == layouts[1] else None

    @classmethod
    def read(cls, tensors: Iterable[Tensor]) -> None:
        """Give the stand-ins among these tensors their values, in place."""
        if (stand_ins := cls._active) is None:
            return
        for each in tensors:
            if (source := stand_ins.source_of(each)) is not None:
                source.copy_to(values := torch.empty(source.shape))
                replace_values(each, values)

    def take_out(self, model: Any, ties: Mapping[str, str]) -> dict[str, FileTensor]:
        """Move the parameters that are stand-ins to the meta device; return their tensors in files, by name.

        `ties` are the names of weights that this kind of model ties.

        Raises:
            ValueError: another tensor of the model may have been computed from a stand-in.
        """
        # If a file holds tied weights twice, their values decide whether they are tied.
        if ties.keys() != model.all_tied_weights_keys.keys():
            raise ValueError("its files hold tied weights twice")
        found: dict[str, FileTensor] = {}
        others: dict[str, Any] = dict(model.named_buffers())
        for name, parameter in model.named_parameters():
            if (source := self.source_of(parameter)) is None:
                others[name] = parameter
            else:
                found[name] = source
                replace_values(parameter, torch.empty(parameter.shape, device="meta"))
        for path, module in model.named_modules():
            others |= {
                f"{path}.{name}".lstrip("."): each
                for name, each in vars(module).items()
                if isinstance(each, torch.Tensor)
            }
        stored = model.state_dict()
        for name, each in others.items():
            if each.is_floating_point() or each.is_complex():
                is_computed = bool(each.isnan().any())
            else:
                # NaN has become some integer, unless the integers come from a file.
                is_computed = name in stored and (name.rpartition(".")[2], each.shape) not in self.integers
            if is_computed:
                raise ValueError(f"{name} may depend on the values of other weights")
        if not found:
            raise ValueError("transformers did not read safetensors files")
        return found


class _StandInFile:
    """An open safetensors file that gives stand-ins for its floating-point matrices."""

    def __init__(self, stand_ins: StandIns, opener: Any, path: Any, *arguments: Any, **named: Any) -> None:
        self._stand_ins, self._path, self._opened = stand_ins, Path(path), opener(path, *arguments, **named)
        with self._path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header, self._begin = parse_json(file.read(length)), 8 + length

    def __enter__(self) -> Any:
        return self._opened.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_slice(self, name: str) -> Any:
        """Return a stand-in for a matrix, or a slice of the file for integers and for vectors: these are small."""
        dtype, shape = self._header[name]["dtype"], torch.Size(self._header[name]["shape"])
        if dtype not in FLOATS or len(shape) < 2 or shape.numel() < 2:
            if dtype not in FLOATS:
                self._stand_ins.integers.add((name.rpartition(".")[2], shape))
            return self._opened.get_slice(name)
        start = self._begin + self._header[name]["data_offsets"][0]
        source = FileTensor(self._path, version_of(self._path), DTYPES[dtype], shape, start)
        return self._stand_ins.make(source)


def unpacked_numel(parameter: Tensor) -> int:
    """Return the number of weights in a parameter. Bytes are 4-bit weights (a matrix), or their scales (a vector)."""
    if parameter.dtype != torch.uint8:
        return parameter.numel()
    return 2 * parameter.numel() if parameter.dim() == 2 else 0


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def numel(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of some tensors."""
    return sum(each.numel() for each in tensors)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors hold the same bytes. NaN then equals itself, but 0 differs from -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that modules hold as plain attributes, neither parameters nor buffers."""
    return [each for part in model.modules() for each in vars(part).values() if isinstance(each, Tensor)]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple | Mapping):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(each)


def is_writable(tensor: Tensor) -> bool:
    """Return whether every element has separate memory. Elements of an expanded tensor (an index) share memory."""
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def names_not_finite(tensors: Tensors, *, across_ranks: bool = False) -> list[str]:
    """Return the names of floating-point tensors that hold a NaN or Inf.

    With `across_ranks`, all ranks must call this function together, each with its shards under the same names. All get
    the same answer. The cost is one collective.
    """
    floats = {
        name: local_part(each.detach()) for name, each in tensors.items() if each.is_floating_point() and each.numel()
    }
    if not floats:
        return []
    # max() of an empty tensor is an error, and a rank may hold an empty shard.
    parts = [part if part.numel() else part.new_zeros(1) for part in floats.values()]
    largest = torch.stack([norm.float() for norm in norms_of(parts, math.inf)])
    # On some backends, MAX does not propagate NaN.
    is_broken = (~torch.isfinite(largest)).float()
    if across_ranks:
        dist.all_reduce(is_broken, op=dist.ReduceOp.MAX)
    return [name for name, broken in zip(floats, is_broken.tolist(), strict=True) if broken]


def split_state(model: nn.Module) -> tuple[Tensors, ExtraState]:
    """Return a model's parameters and persistent buffers by name, and its extra state by name. Nothing is copied.

    Extra state is every entry of `state_dict` that modules compute (`get_extra_state`, an own `_save_to_state_dict`).
    Only `load_state_dict` can restore it.
    """
    held = {id(each) for each in chain(model.parameters(), model.buffers())}
    state = model.state_dict(keep_vars=True)
    own = {name: value for name, value in state.items() if id(value) in held}
    return own, {name: value for name, value in state.items() if name not in own}


def packed(extra: Mapping[str, Any]) -> Tensors:
    """Return extra state as tensors by name. A value that is not a tensor becomes bytes, named with `PACKED`.

    Raises:
        SettingError: a value holds an object that a checkpoint cannot keep. The message names the module.
    """
    tensors = {name: value.detach() for name, value in extra.items() if isinstance(value, Tensor)}
    return tensors | {name + PACKED: _packed(name, extra[name]) for name in extra.keys() - tensors.keys()}


def unpacked(tensors: Tensors, device: torch.device) -> ExtraState:
    """Return the entries of `state_dict` that `packed` made tensors of. Tensors that were not on a CPU go to `device`.

    Raises:
        ValueError: packed bytes are damaged.
    """
    return {
        name.removesuffix(PACKED): _unpacked(name, value, device) if name.endswith(PACKED) else value
        for name, value in tensors.items()
    }


def load_extra_state(model: nn.Module, tensors: Tensors) -> None:
    """Restore stored extra state through `load_state_dict`, on the devices of the model's own."""
    if not tensors:
        return
    now, device = split_state(model)[1], next((each.device for each in model.parameters()), torch.device("cpu"))
    state = unpacked(tensors, device)
    for name, value in state.items():
        if name + PACKED not in tensors:
            state[name] = value.to(getattr(now.get(name), "device", device))
    model.load_state_dict(state, strict=False)


@contextmanager
def as_tensors(model: nn.Module) -> Iterator[None]:
    """Make `state_dict` and `load_state_dict` of a model use tensors only, inside the context, as files need them."""

    def pack(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in [name for name, value in state.items() if not isinstance(value, Tensor)]:
            state |= packed({name: state.pop(name)})

    def unpack(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state |= unpacked({name: state.pop(name) for name in list(state) if name.endswith(PACKED)}, torch.device("cpu"))

    handles = model.register_state_dict_post_hook(pack), model.register_load_state_dict_pre_hook(unpack)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _packed(name: str, value: Any) -> Tensor:
    tensors: Tensors = {}

    def tree(part: Any) -> Any:
        kind = type(part)
        if part is None or kind in (bool, int, float, str):
            return part
        if isinstance(part, Tensor):
            key = str(len(tensors))
            tensors[key] = part.detach().to("cpu", copy=True).contiguous()
            return {"tensor": key, "on_host": part.device.type == "cpu"}
        if kind in _SEQUENCES.values():
            return {kind.__name__: [tree(each) for each in part]}
        if kind in _MAPPINGS.values():
            return {kind.__name__: [[tree(key), tree(each)] for key, each in part.items()]}
        where = name.rpartition(".")[0]
        raise SettingError(
            f"the extra state of {f'module {where!r}' if where else 'the model'} holds a {kind.__qualname__}, which a "
            "checkpoint cannot keep",
            "Return tensors, numbers, texts, None, and lists, tuples, or dicts of them from get_extra_state",
        )

    text = json.dumps(tree(value)).encode()
    return _bytes(save({**tensors, _TREE: _bytes(text)}))


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpacked(name: str, tensor: Tensor, device: torch.device) -> Any:
    def value(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if "tensor" in part:
            return tensors[part["tensor"]].to("cpu" if part["on_host"] else device)
        [(kind, parts)] = part.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](value(each) for each in parts)
        return _MAPPINGS[kind]((value(key), value(each)) for key, each in parts)

    try:
        tensors = load(tensor.cpu().numpy().tobytes())
        return value(parse_json(tensors.pop(_TREE).numpy().tobytes()))
    # Any damage ends the same way.
    except Exception as error:
        raise ValueError(f"{name} cannot be read ({type(error).__name__})") from error
