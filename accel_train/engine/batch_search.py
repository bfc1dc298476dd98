"""Find the largest micro-batch that fits, before the first step, and remember it for the next start.

The search runs only if the recipe sets neither per_device_batch_size nor gradient_accumulation_steps. The global batch
stays the same, and the accumulation steps follow. Each process tries sizes from the largest down, as
`accelerate.utils.find_executable_batch_size` does, with a real forward and backward of each size. Processes communicate
before and after the search, never during it. So a process that runs out of memory does not block the others. All
processes then use the smallest result. A run that runs out of memory later remembers a smaller size, even if the recipe
sets the size.
"""

import json
import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn

from accel_train.core.files import make_folders
from accel_train.core.json_io import json_digest, parse_json, utc_now, write_plain_json
from accel_train.core.state import Choice, Choices
from accel_train.core.version import __version__
from accel_train.data.batch_sizes import BatchSizes, divisors, is_open, resolve_batch
from accel_train.data.cache import cache_root
from accel_train.engine.loader import to_device
from accel_train.model.isolation import isolated
from accel_train.model.memory_estimate import largest_samples, state_bytes
from accel_train.model.training_module import TrainingModule
from accel_train.recipe.schema import Recipe
from accel_train.runtime.doctor import device_name
from accel_train.runtime.memory import is_out_of_memory
from accel_train.runtime.process_group import gather_number
from accel_train.task import Collated, TaskData

SETTING = "batch.per_device_batch_size"


class BatchCache:
    """File that stores the micro-batch size for one model, input, and device: CACHE/micro_batches/DIGEST.json.

    The file also contains the key, and `read` compares it.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], share: int) -> None:
        self.key, self.share = parse_json(json.dumps(key)), share
        self.path = folder / f"{json_digest(self.key)[:32]}.json"

    def read(self) -> tuple[int, str] | None:
        """Return the remembered micro-batch size and a sentence about its origin, or None if the file is not usable."""
        try:
            kept = parse_json(self.path.read_text(encoding="utf-8"))
            size, reason, found = kept["per_device_batch_size"], str(kept["said"]), str(kept["found"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if kept.get("key") != self.key or type(size) is not int or size < 1 or self.share % size:
            return None
        return size, f"found {found[:10]}, {reason}; remembered in {self.path}"

    def write(self, size: int, reason: str) -> str:
        """Store `size` and its `reason`; return a sentence that says whether the file was written."""
        try:
            make_folders(self.path.parent)
            write_plain_json(
                self.path, {"per_device_batch_size": size, "said": reason, "found": utc_now(), "key": self.key}
            )
        except OSError as error:
            return f"not remembered: {self.path.parent} cannot be written to ({error.strerror})"
        return f"remembered in {self.path}"


def open_batch_cache(
    recipe: Recipe,
    inner: nn.Module,
    sizes: BatchSizes,
    inputs: Mapping[str, Any] | str,
    *,
    mixed_precision: str,
    device: torch.device,
    device_bytes: int,
) -> BatchCache:
    """Return the cache of this model on this device.

    Args:
        inputs: a micro-batch of the longest sample if a search reads it; otherwise the fingerprint of the data.
    """
    share = sizes.global_batch_size // sizes.world_size
    parameters = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in inner.named_parameters()]
    sections = dict.fromkeys(("task", "model", "loss", "options", "parallel", "batch"), True)
    fields = {
        "optimizer": {"name", "options", "momentum", "ema_decay"},
        "precision": {"gradient_checkpointing", "compile"},
    }
    settings = recipe.model_dump(mode="json", include={**sections, **fields})
    if not isinstance(inputs, str):
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        inputs = {name: [str(value.dtype), *value.shape[1:]] for name, value in tensors.items()}
    key = {
        "accel_train": __version__,
        "torch": torch.__version__,
        "device": device_name(device),
        "device_bytes": device_bytes,
        "model": json_digest([settings, parameters]),
        "inputs": inputs,
        "mixed_precision": mixed_precision,
        "samples_per_process": share,
        "world_size": sizes.world_size,
    }
    return BatchCache(cache_root(recipe.data) / "micro_batches", key, share)


@dataclass(frozen=True)
class Trials:
    """Trial steps on a new training module: on its device, in training mode, not wrapped, and not compiled."""

    recipe: Recipe
    data: TaskData
    inner: TrainingModule
    accelerator: Accelerator

    def collated(self, count: int) -> Collated:
        """Return the micro-batch of `count` samples that takes the most memory."""
        batch = self.data.collate(largest_samples(self.data, self.recipe.seed, count))
        batch.pop("num_targets")
        return batch

    def fits(self, count: int, *, accumulates: bool = False) -> bool:
        """Return whether a forward and backward of `count` samples fits in memory.

        If a step `accumulates` gradients, the gradients of earlier micro-batches are not in DDP's buckets. Both then
        take memory.
        """
        buckets: list[Tensor] = []
        try:
            if accumulates and self.recipe.parallel.strategy == "ddp" and self.accelerator.num_processes > 1:
                buckets = [torch.empty_like(each) for each in self.inner.parameters() if each.requires_grad]
            batch = to_device(self.collated(count), self.accelerator.device, pin=False)
            with self.accelerator.autocast():
                loss_sum = self.inner(batch)
            loss_sum.backward()
            return True
        except (RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) or should_reduce_batch_size(error)):
                raise
        finally:
            buckets.clear()
            clear_device_cache(garbage_collection=True)
        return False

    @contextmanager
    def as_in_a_step(self, headroom_bytes: int) -> Iterator[None]:
        """Hold the memory of a real step, except its activations, plus the headroom; then restore the module.

        A step holds gradients, the optimizer's moments, and averaged weights. Without accumulation, DDP's buckets are
        the gradients (gradient_as_bucket_view). Gradients, buffers, and random numbers are restored on exit.
        """
        trained, section = [p for p in self.inner.parameters() if p.requires_grad], self.recipe.optimizer
        gradients, weight_bytes = [p.grad for p in trained], sum(p.nbytes for p in trained)
        num_bytes = state_bytes(self.inner.model, section) + headroom_bytes
        num_bytes += weight_bytes if section.averages else 0
        with isolated(self.inner, self.accelerator.device):
            try:
                for parameter in trained:
                    parameter.grad = torch.zeros_like(parameter)
                block = torch.empty(num_bytes, dtype=torch.uint8, device=self.accelerator.device)
                yield
                del block
            finally:
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter.grad = gradient
                clear_device_cache(garbage_collection=True)


def fit_micro_batch(
    trials: Trials, sizes: BatchSizes, *, is_empty: bool
) -> tuple[BatchSizes, Choices, BatchCache | None]:
    """Return batch sizes whose micro-batch fits on every process, any choice made, and the cache if used.

    The micro-batch is remembered, set by the recipe, or the largest that a search finds. The search is skipped if every
    process knows its size, or if the module `is_empty` until it is sharded. All processes use the smallest size that
    any process found or remembers. So no process retries a size that failed on another process.
    """
    recipe, accelerator = trials.recipe, trials.accelerator
    share, is_chosen = sizes.global_batch_size // sizes.world_size, is_open(recipe.batch)
    if trials.data.step_batches is not None or share == 1:
        is_single = trials.data.step_batches is None and is_chosen
        return sizes, {SETTING: Choice(1, "a process has one sample a step")} if is_single else {}, None
    device_bytes = memory_limit(accelerator.device)
    can_search = is_chosen and device_bytes > 0 and not is_empty
    cache = open_batch_cache(
        recipe,
        trials.inner,
        sizes,
        trials.collated(1) if can_search else trials.data.fingerprint,
        mixed_precision=accelerator.mixed_precision,
        device=accelerator.device,
        device_bytes=device_bytes,
    )
    own = known_size(trials, sizes, cache, device_bytes, is_empty=is_empty)
    everywhere = gather_number(0 if own is None else own.value)
    if 0 in everywhere:  # if one process has to search, all do, even if they remember a size
        if can_search:
            own = search(trials, share, device_bytes)
        assert own is not None, "only a process that can search may know no size"
        everywhere = gather_number(own.value)
        if can_search:
            own = Choice(own.value, f"{own.reason}; {cache.write(min(everywhere), own.reason)}")
    assert own is not None, "known or searched"
    choice = agree(own, everywhere)
    if choice.value != sizes.per_device_batch_size:
        update = {"global_batch_size": sizes.global_batch_size, "per_device_batch_size": choice.value}
        batch = recipe.batch.model_copy(update={**update, "gradient_accumulation_steps": "auto"})
        section = recipe.parallel
        sizes = resolve_batch(batch, sizes.world_size * section.num_sharing, section.num_sharing, section.shared_by)
    elif not is_chosen:
        return sizes, {}, cache  # the recipe set the size
    accelerator.gradient_accumulation_steps = sizes.gradient_accumulation_steps
    return sizes, {SETTING: choice}, cache


def known_size(
    trials: Trials, sizes: BatchSizes, cache: BatchCache, device_bytes: int, *, is_empty: bool
) -> Choice[int] | None:
    """Return the size that needs no search, at most the remembered size; None if a search is needed."""
    kind, known, why = trials.accelerator.device.type, None, ""
    if not is_open(trials.recipe.batch):
        known = Choice(sizes.per_device_batch_size, "as set")
    elif not device_bytes:
        why = f"{kind} has no " + ("limit on its address space (ulimit -v)" if kind == "cpu" else "memory of its own")
    elif is_empty:
        why = "processes of a sharded model wait for each other in a forward; where memory runs out, half is taken"
    if why:
        known = Choice(cache.share, f"all of a process's samples at once; not searched, for {why}")
    kept = cache.read()
    return Choice(*kept) if kept is not None and (known is None or kept[0] < known.value) else known


def agree(own: Choice[int], everywhere: Sequence[int]) -> Choice[int]:
    """Return the smallest size of all processes, with the reason for it on this process."""
    size = min(everywhere)
    if size == own.value:
        return own
    return Choice(size, f"process {everywhere.index(size)} holds no more; here {own.value}: {own.reason}")


def memory_limit(device: torch.device) -> int:
    """Return the device's memory limit in bytes, beyond which an allocation fails; 0 without a limit.

    On a CPU this is the limit on the address space (RLIMIT_AS, `ulimit -v`). A container's limit does not count,
    because the kernel kills the process instead of failing the allocation.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limit, none = resource.getrlimit(resource.RLIMIT_AS)[0], resource.RLIM_INFINITY
    return limit if device.type == "cpu" and limit != none else 0


def search(trials: Trials, share: int, device_bytes: int) -> Choice[int]:
    """Return the largest divisor of a process's `share` of a step that fits together with the headroom.

    A single sample is not tried: batch norm rejects it, and a smaller size does not exist.
    """
    headroom, sizes, size = trials.recipe.batch.memory_headroom, divisors(share), 1
    try:
        with trials.as_in_a_step(math.ceil(headroom * device_bytes)):
            size = next((n for n in reversed(sizes[1:]) if trials.fits(n, accumulates=n < share)), 1)
    except (RuntimeError, MemoryError) as error:  # even gradients, optimizer, and headroom do not fit
        if not is_out_of_memory(error):
            raise
    rest = "they leave" if size == share else f"{sizes[sizes.index(size) + 1]} would leave less than"
    free = f"{headroom:.0%} of {device_bytes / 2**30:.1f} GiB free"
    eager = ", in eager code, which takes more than compiled code" if trials.recipe.precision.compiles else ""
    return Choice(size, f"measured on {device_name(trials.accelerator.device)}{eager}: {rest} {free}")
