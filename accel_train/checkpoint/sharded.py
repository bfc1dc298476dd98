"""Sharded checkpoints: each process writes its part (torch.distributed.checkpoint with safetensors files).

Parts are in `shard-*.safetensors`. Tensors that all processes hold alike (step counters, buffers) are in
`whole.safetensors`. Names are `model/NAME`, `optimizer/ENTRY.NAME` and `average/NAME`. Any number of processes can read
the checkpoint. An unsharded checkpoint can be read into parts. Each process reads only the bytes that it holds.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from accel_train.checkpoint.shard_index import INDEX, Part, ShardIndex, Slices, index_in, parts_in
from accel_train.checkpoint.store import FileFacts, GivenUp, Writer, facts_of, publish
from accel_train.core.errors import CheckpointError
from accel_train.model.tensors import DTYPES, Tensors, local_part

T = TypeVar("T")
WHOLE = "whole.safetensors"


def shard_file(rank: int) -> str:
    """Return the name of the file that a process writes its parts to."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


@dataclass
class KnownPlan:
    """The tensors that this process writes, as agreed at an earlier save with the same layout."""

    layout: object = None
    plan: SavePlan | None = None
    copies: Tensors = field(default_factory=dict)
    """Host memory of the last save."""
    index: ShardIndex | None = None
    """Where all processes write, on the main process."""


@torch.no_grad()
def copy_to_host(tensors: Mapping[str, Tensor], kept: Tensors | None = None) -> Tensors:
    """Return copies in host memory, sharded like the tensors. The copies are complete on return.

    Each tensor is copied once, and the 0-dim tensors of one type (step counters) are copied together. `kept` holds the
    page-locked memory of the previous call, which is used again.
    """
    kept = {} if kept is None else kept
    numbers: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if not tensor.dim() and not isinstance(tensor, DTensor):
            numbers.setdefault(f"{tensor.dtype} {tensor.device}", []).append(name)
    sources = {key: torch.stack([tensors[name] for name in names]) for key, names in numbers.items()}
    sources |= {name: tensor for name, tensor in tensors.items() if tensor.dim() or isinstance(tensor, DTensor)}
    for key, source in sources.items():
        if key not in kept or (kept[key].shape, kept[key].dtype) != (source.shape, source.dtype):
            pin = source.is_cuda and local_part(source).numel() > 0
            kept[key] = torch.empty_like(source, device="cpu", pin_memory=pin, memory_format=torch.contiguous_format)
        local_part(kept[key]).copy_(local_part(source), non_blocking=source.is_cuda)
    if any(source.is_cuda for source in sources.values()):
        torch.cuda.current_stream().synchronize()
    copies = {name: kept[name] for name in tensors if name in sources}
    for key, names in numbers.items():
        copies.update(zip(names, kept[key].unbind(), strict=True))
    return copies


class _Planner(DefaultSavePlanner):
    """A planner that repeats a known plan, or makes a plan with the other processes."""

    def __init__(self, known: SavePlan | None) -> None:
        super().__init__()
        self.agreed = known
        self._is_known = known is not None
        self.index: ShardIndex | None = None

    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan() if self.agreed is None else self.agreed

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._is_known:
            return all_plans, Metadata({})
        plans, metadata = super().create_global_plan(all_plans)
        self.index = ShardIndex.of(_parts_of(plans))
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.agreed = super().finish_plan(new_plan)
        return self.agreed


def _parts_of(plans: list[SavePlan]) -> Iterator[Part]:
    """Yield the parts of a save by all processes."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None, "only tensors are saved"
            chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
            name = names.get(dtype, str(dtype))
            yield Part(shard_file(rank), item.index.fqn, name, tuple(chunk.offsets), tuple(chunk.sizes))


class _KnownPlanWriter(HuggingFaceStorageWriter):
    """A writer that keeps the file number of a known plan. A process on its own would number files from 1."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans


class ShardWriter:
    """Copies in host memory of this process's parts of tensors, until the next writer with the same `known`.

    All processes create and write it at the same time.
    """

    def __init__(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, known: KnownPlan) -> None:
        self._group, self._known = group, known
        copies = copy_to_host(tensors, known.copies)
        self._spread: dict[str, Any] = {name: each for name, each in copies.items() if isinstance(each, DTensor)}
        self.whole = {name: each for name, each in copies.items() if name not in self._spread}
        """Tensors that every process holds alike."""
        self._knows_where = False

    def publish(self, root: Path, step: int, writers: Mapping[str, Writer], given_up: Callable[[], bool]) -> None:
        """Publish a checkpoint that all processes write. The main process also writes the files of `writers`.

        Raises:
            CheckpointError: a process could not write its part. Raised on all processes; nothing is published.
            GivenUp: the main process gave up the save.
        """
        if dist.get_rank() != 0:
            self._help(root)
            return
        error: Exception | None = None
        all_writers: dict[str, Writer] = {WHOLE: partial(save_file, self.whole), **writers}
        try:
            publish(root, step, all_writers, given_up=given_up, others=self._write_together)
        except (CheckpointError, GivenUp) as problem:
            error = problem
        if not self._knows_where:
            self._broadcast(None)
        self._broadcast(error)
        if error is not None:
            raise error

    def _help(self, root: Path) -> None:
        """Write to the folder named by the main process, and raise its error. Runs on all other processes."""
        name = self._broadcast(None)
        if name is not None:
            # The main process receives and reports the error.
            with suppress(CheckpointError):
                self._write_part(root / name)
        error = self._broadcast(None)
        if error is not None:
            raise error

    def _broadcast(self, value: Any) -> Any:
        """Return the main process's value on all processes."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def _write_together(self, folder: Path) -> dict[str, FileFacts]:
        """Let all processes write. Return the files with sizes and digests. Runs on the main process."""
        self._knows_where = True
        # The root may have another path on another machine.
        self._broadcast(folder.name)
        facts = self._write_part(folder)
        assert self._known.index is not None, "the main process has planned this layout"
        (folder / INDEX).write_text(self._known.index.text())
        return {**facts, INDEX: facts_of(folder / INDEX)}

    def _write_part(self, folder: Path) -> dict[str, FileFacts]:
        error: str | None = None
        try:
            self._save_spread(folder)
        except CheckpointException as problem:
            error = "; ".join(f"process {rank}: {failure[0]}" for rank, failure in problem.failures.items())
        facts: dict[str, FileFacts] = {}
        if error is None:
            try:
                facts = {path.name: facts_of(path) for path in folder.glob(shard_file(dist.get_rank()))}
            except OSError as problem:
                error = f"process {dist.get_rank()}: {problem}"
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((facts, error), gathered, dst=0, group=self._group)
        # Only the main process needs the facts of all files. It broadcasts any failure.
        errors = [said for _, said in gathered or [(None, error)] if said is not None]
        if errors:
            raise CheckpointError(errors[0])
        return {name: each for found, _ in gathered or () for name, each in found.items()}

    def _save_spread(self, folder: Path) -> None:
        """Write this process's parts. Processes exchange plans only at the first save of a layout."""
        known = self._known
        layout = [(name, each.shape, each.dtype, each.placements) for name, each in self._spread.items()]
        is_known = torch.tensor(int(layout == known.layout))
        dist.all_reduce(is_known, dist.ReduceOp.MIN, group=self._group)
        planner = _Planner(known.plan if is_known else None)
        writer = (_KnownPlanWriter if is_known else HuggingFaceStorageWriter)(str(folder), save_distributed=True)
        with warnings.catch_warnings():
            # A known plan is written without communication.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                self._spread, storage_writer=writer, planner=planner, process_group=self._group, no_dist=bool(is_known)
            )
        known.layout, known.plan = layout, planner.agreed
        known.index = planner.index or known.index


class CheckpointReader:
    """Reader for the tensors of one kind (`model`, `optimizer`, `average`) in a sharded or unsharded checkpoint.

    Raises:
        CheckpointError: a file is not a safetensors file.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        in_parts = (folder / WHOLE).exists()
        self._folder, self._prefix = folder, f"{kind}/" if in_parts else ""
        file = folder / (WHOLE if in_parts else f"{kind}.safetensors")
        with _readable(folder if in_parts else file):
            whole = ShardIndex.of(parts_in(file) if file.exists() else ())
            spread = index_in(folder) if in_parts else ShardIndex({}, {})
        self._index = ShardIndex({**spread.dtypes, **whole.dtypes}, {**spread.divisions, **whole.divisions})
        names = {name.removeprefix(self._prefix): name for name in self._index.dtypes if name.startswith(self._prefix)}
        self.shapes = {name: torch.Size(self._index.shape(stored)) for name, stored in names.items()}
        """Shapes by name. Empty if the checkpoint has no tensors of this kind."""
        dtypes = {name: self._index.dtypes[stored] for name, stored in names.items()}
        self.dtypes = {name: DTYPES[dtype] for name, dtype in dtypes.items() if dtype in DTYPES}
        """Types by name, if known."""

    def read(self, name: str) -> Tensor:
        """Return one full tensor in host memory."""
        target = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self.read_into({name: target})
        return target

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, sharded or not. Reads only the parts that this process holds, each file once.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        wrong = [name for name, target in targets.items() if self.shapes.get(name) != target.shape]
        if wrong:
            raise ValueError(f"{wrong[0]} (of {len(wrong)}) is missing in the checkpoint or has another shape")
        wanted: dict[str, list[tuple[str, Slices, Tensor]]] = {}
        with _readable(self._folder), torch.no_grad():
            for name, target in targets.items():
                stored = self._prefix + name
                for there, part in parts_here(target.detach()):
                    for file, within, into in self._index.find(stored, there):
                        wanted.setdefault(file, []).append((stored, within, part[into]))
            for file, parts in wanted.items():
                with safe_open(self._folder / file, "pt") as opened:
                    for stored, within, part in parts:
                        source = opened.get_slice(stored)
                        # A whole tensor is not copied twice.
                        is_whole = [each.stop - each.start for each in within] == source.get_shape()
                        part.copy_(opened.get_tensor(stored) if is_whole else source[within])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def parts_here(tensor: Tensor) -> Iterator[tuple[Slices, Tensor]]:
    """Yield the parts of a tensor on this process: where they lie in the whole tensor, and views of their memory."""
    if not isinstance(tensor, DTensor):
        yield tuple(slice(0, size) for size in tensor.shape), tensor
        return
    whole = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    stored = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, [whole])
    for item in create_default_local_load_plan({"": tensor}, Metadata({"": stored})).items:
        there, here = (
            tuple(slice(start, start + length) for start, length in zip(offsets, item.lengths, strict=True))
            for offsets in (item.storage_offsets, item.dest_offsets)
        )
        yield there, tensor.to_local()[here]
