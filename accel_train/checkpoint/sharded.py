"""A checkpoint that all processes write together, each its part (torch.distributed.checkpoint in safetensors files).

Its parts lie in `shard-*.safetensors`, what no process has a part of alone (step counters, buffers) in `whole.safetensors`,
under the names `model/NAME`, `optimizer/ENTRY.NAME` and `average/NAME`. It is read for any other number of processes, and a
checkpoint of one file is read into parts: every process reads the bytes that it will hold, and no others.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from accel_train.checkpoint import FileFacts, GivenUp, Writer, facts_of, publish
from accel_train.state import CheckpointError

WHOLE = "whole.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
"""By safetensors' names."""


def is_in_parts(folder: Path) -> bool:
    """Whether the checkpoint in this folder was written by several processes together."""
    return (folder / WHOLE).exists()


class Parts:
    """Copies, in host memory, of what this process holds of some tensors; all processes make one at once, and write it at once."""

    def __init__(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        spread = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        whole = {name: tensor for name, tensor in tensors.items() if name not in spread}
        self._spread: dict[str, Any] = BlockingAsyncStager().stage(spread)
        self.whole = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in whole.items()}
        """What every process holds alike."""
        self._told_where = False

    def publish(self, root: Path, step: int, writers: Mapping[str, Writer], given_up: Callable[[], bool]) -> None:
        """As `checkpoint.publish`, by all processes; the main one writes the files of `writers` as well.

        Raises:
            CheckpointError: some process could not write its part; raised on all, and nothing is published.
            GivenUp: the main process gave it up.
        """
        if dist.get_rank() != 0:
            self._help(root)
            return
        error: Exception | None = None
        whole: Writer = lambda path: save_file(self.whole, path)  # noqa: E731
        try:
            publish(root, step, {WHOLE: whole, **writers}, given_up=given_up, others=self._write_together)
        except (CheckpointError, GivenUp) as problem:
            error = problem
        if not self._told_where:
            self._tell(None)
        self._tell(error)
        if error is not None:
            raise error

    def _help(self, root: Path) -> None:
        """On the others: write where the main process says, and hear what came of it."""
        name = self._tell(None)
        if name is not None:
            with suppress(CheckpointError):  # the main process knows of it, and says so
                self._write_part(root / name)
        error = self._tell(None)
        if error is not None:
            raise error

    def _tell(self, value: Any) -> Any:
        """The main process's value, on all."""
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]

    def _write_together(self, folder: Path) -> dict[str, FileFacts]:
        """On the main process: everybody's part; returns the files, their sizes and digests."""
        self._told_where = True
        self._tell(folder.name)  # the root may have another path on another machine
        return self._write_part(folder)

    def _write_part(self, folder: Path) -> dict[str, FileFacts]:
        error: str | None = None
        try:
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save(self._spread, storage_writer=writer, process_group=self._group)
        except CheckpointException as problem:
            error = "; ".join(f"process {rank}: {failure[0]}" for rank, failure in problem.failures.items())
        facts: dict[str, FileFacts] = {}
        if error is None:
            try:
                facts = {path.name: facts_of(path) for path in folder.glob(f"shard-{dist.get_rank() + 1:05d}-*")}
            except OSError as problem:
                error = f"process {dist.get_rank()}: {problem}"
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (facts, error), group=self._group)
        errors = [said for _, said in gathered if said is not None]
        if errors:
            raise CheckpointError(errors[0])
        return {name: each for found, _ in gathered for name, each in found.items()}


class Stored:
    """The tensors of one kind (`model`, `optimizer`, `average`) in a checkpoint, whichever way it was written.

    Raises:
        CheckpointError: a file in it is no safetensors file.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind, self._in_parts = folder, kind, is_in_parts(folder)
        self.shapes: dict[str, torch.Size] = {}
        """By name; empty where there are none of this kind."""
        self.dtypes: dict[str, torch.dtype] = {}
        """By name, where the file says it."""
        whole = folder / f"{kind}.safetensors"
        with _readable(folder if self._in_parts else whole):
            if not self._in_parts:
                self.shapes, self.dtypes = _shapes(whole), _dtypes(whole)
                return
            found: dict[str, Any] = _shapes(folder / WHOLE)
            self._whole = set(found)
            self._dtypes: dict[str, torch.dtype] = {}
            for name, each in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
                found.setdefault(name, each.size)  # type: ignore[union-attr]
                self._dtypes[name] = each.properties.dtype  # type: ignore[union-attr]
        prefix = f"{kind}/"
        self.shapes = {name.removeprefix(prefix): shape for name, shape in found.items() if name.startswith(prefix)}
        self.dtypes = {name.removeprefix(prefix): dtype for name, dtype in self._dtypes.items()}

    def read(self, name: str) -> Tensor:
        """The whole of one tensor, in host memory."""
        if self._in_parts:
            target = torch.empty(self.shapes[name], dtype=self._dtypes[f"{self._kind}/{name}"])
            self.read_into({name: target})
            return target
        with _readable(self._folder), safe_open(self._folder / f"{self._kind}.safetensors", "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, spread or not: only what this process holds of them is read.

        Raises:
            ValueError: one of them is not there, or of another shape.
        """
        wrong = [name for name, target in targets.items() if self.shapes.get(name) != target.shape]
        if wrong:
            raise ValueError(f"{wrong[0]} (of {len(wrong)}) is not in the checkpoint, or is of another shape")
        with _readable(self._folder), torch.no_grad():
            if not self._in_parts:
                _read(self._folder / f"{self._kind}.safetensors", targets)
                return
            named = {f"{self._kind}/{name}": target.detach() for name, target in targets.items()}
            _read(self._folder / WHOLE, {name: target for name, target in named.items() if name in self._whole})
            rest = {name: target for name, target in named.items() if name not in self._whole}
            if rest:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
                    load(rest, storage_reader=HuggingFaceStorageReader(str(self._folder)), no_dist=True)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    except CheckpointException as error:  # no Exception: it would pass every handler there is
        raise CheckpointError(f"{path} cannot be read ({next(iter(error.failures.values()))[0]})") from None


def _shapes(file: Path) -> dict[str, torch.Size]:
    if not file.exists():
        return {}
    with safe_open(file, "pt") as opened:
        return {name: torch.Size(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _dtypes(file: Path) -> dict[str, torch.dtype]:
    if not file.exists():
        return {}
    with safe_open(file, "pt") as opened:
        named = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return {name: DTYPES[dtype] for name, dtype in named.items() if dtype in DTYPES}


def _read(file: Path, targets: Mapping[str, Tensor]) -> None:
    with safe_open(file, "pt") as opened:
        for name, target in targets.items():
            if not isinstance(target, DTensor):
                target.copy_(opened.get_tensor(name))
                continue
            shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
            here = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
            target.to_local().copy_(opened.get_slice(name)[here])
