"""Pretend that a CPU build of torch has H100 GPUs: "cuda" tensors have no values, and collectives have no peers.

CPU tensors stay real, so data, schedules, and files are what they are in any run. A `TorchDispatchMode` sees every
operator. It gives those with cuda tensors to torch's fake tensors. It counts collectives, live bytes, and each time
the host would wait for the device. A cuda value that the host reads is 0. `guard.cpp` must be loaded (LD_PRELOAD).
"""

import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import distributed as ddp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from accel_train.parallel.tensor_parallel import tie, tied_names

aten = torch.ops.aten
GPUS_PER_NODE, DEVICE_BYTES, BLOCK_BYTES = 8, 80 * 2**30, 512
READS_SHAPE = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive)
WITHOUT_FAKE = (aten._amp_foreach_non_finite_check_and_unscale_, aten._fused_sgd_)
KINDS = {
    "allreduce_": "all-reduce", "all_reduce": "all-reduce", "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all", "dim_zero_all_to_all": "all-to-all", "broadcast_": "broadcast",
}  # fmt: skip


def place() -> str:
    """File and line of the innermost frames of the product, of this folder's tests, and of torch."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    frames = [each for each in reversed(stack) if each.filename != __file__]
    parts = {"/accel_train/": "", "/cuda_pretended/": "", "/site-packages/": " via "}
    found = [f"{f.filename.split(part)[-1]}:{f.lineno}" for part in parts for f in frames if part in f.filename][-1:]
    own = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in frames if "/site-packages/" not in f.filename]
    return " < ".join([*own[:-4:-1], *found])


class Call(NamedTuple):
    """A collective that a process has called."""

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    place: str


class Pretend(TorchDispatchMode):
    """Facts of a run on pretended GPUs. Waits and collectives are counted while `counts` is true.

    `heard` has the objects that rank 0 broadcasts, in order, for a process of another rank.
    """

    def __init__(self, heard: Sequence[Any] = ()) -> None:
        super().__init__()
        self.calls: list[Call] = []
        """All collectives from the start on, in order."""
        self.sent: list[Any] = []
        self._heard = iter(heard)
        self.fake, self.counts = FakeTensorMode(allow_non_fake_inputs=True), False
        self.waits: Counter[str] = Counter()
        self.collectives: list[tuple[str, int]] = []
        """Kind and bytes of the whole tensor."""
        self.on_host: Counter[str] = Counter()
        """Places that gave a CPU tensor to a collective of the GPUs."""
        self.between_hosts: Counter[str] = Counter()
        """Kinds of the collectives of gloo's groups, which take CPU tensors and wait for no device."""
        self.groups_of_hosts: set[str] = set()
        self.live_bytes = self.peak_bytes = 0
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def wait(self, what: str) -> None:
        if self.counts:
            self.waits[f"{what}: {place()}"] += 1

    def change(self, cell: list[int], num_bytes: int) -> None:
        """Set the size of a storage, rounded up as torch's allocator does."""
        rounded = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.live_bytes += rounded - cell[0]
        cell[0], self.peak_bytes = rounded, max(self.peak_bytes, self.live_bytes)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if (cell := self._sizes.get(storage)) is not None:
            self.change(cell, num_bytes)

    def hold(self, result: Any) -> Any:
        """Count the new storages of a result."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                tensor.constant = None
                storage = tensor.untyped_storage()
                if storage not in self._sizes:
                    cell = self._sizes[storage] = [0]
                    weakref.finalize(storage, self.change, cell, 0)
                    self.change(cell, storage.nbytes())
        return result

    def new(self, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with self.fake:
            made = torch.empty(shape, dtype=dtype or like.dtype, device="cuda")
        return self.hold(made)  # type: ignore[no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(type(each) not in (Tensor, nn.Parameter, FakeTensor) for each in tensors):
            return NotImplemented
        if func.namespace == "c10d":
            return self.communicate(func, args, tensors)
        on_gpu, target = any(isinstance(each, FakeTensor) for each in tensors), kwargs.get("device")
        target = None if target is None else torch.device(target).type
        name, waits = func._overloadpacket, not kwargs.get("non_blocking")
        if not on_gpu and target != "cuda":
            # A model without values has none to send.
            if name is aten.copy_ and args[1].is_meta:
                return args[0]
            if name is aten._to_copy and args[0].is_meta and target == "cpu":
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            return func(*args, **kwargs)
        if name is aten.copy_:
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if name is aten._local_scalar_dense:
            self.wait("item")
            return False if args[0].dtype is torch.bool else 0.0 if args[0].is_floating_point() else 0
        if name is aten.equal:
            self.wait("equal")
            return True
        if target == "cpu":
            if name is aten._to_copy and waits:
                self.wait("copy to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        on_host = [not isinstance(each, FakeTensor) for each in args[:2]] if name is aten.copy_ else [False]
        if any(on_host) and (args[1].dim() or on_host[0]):
            if waits:
                self.wait("copy between host and device")
            # Integers stay, because DDP reads back the order of buckets that it has sent.
            return args[0].zero_() if on_host[0] and args[0].is_floating_point() else args[0]
        if name is aten._to_copy and not on_gpu:
            if waits and not args[0].is_meta:
                self.wait("copy from the host")
            return self.new(*args[0].shape, like=args[0], dtype=kwargs.get("dtype"))
        by_mask = name in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if name in READS_SHAPE or (by_mask and (name is aten.index or args[2].numel() > 1)):
            self.wait(f"{name}, whose shape depends on values")
            if name is aten.nonzero:
                return self.new(0, args[0].dim(), like=args[0], dtype=torch.int64)
            return self.new(0, *args[0].shape[1:], like=args[0]) if name is not aten.index_put_ else args[0]
        # DeepSpeed's exchange is an operator: torch's fake one sends nothing.
        if func.namespace in ("_c10d_functional", "deepspeed") and (kind := KINDS.get(name.__name__)) is not None:
            size = args[1] if kind == "all-gather" else 1
            self.call(kind, size * args[0].nbytes, dist.distributed_c10d._resolve_process_group(args[-1]))
            self.count(kind, size * args[0].nbytes, tensors)
        if name in WITHOUT_FAKE:
            return None
        with self.fake:
            # The mode's own conversion would refer to the tensor, and `Module.to` could not swap it.
            swapped = tree_map_only(Tensor, _as_fake, (args, kwargs))
            return self.hold(func(*swapped[0], **swapped[1]))

    def communicate(self, func: Any, args: Any, tensors: list[Tensor]) -> Any:
        """Return the result of a collective that never ran: its own tensors, and work that is done."""
        name = func._overloadpacket.__name__
        given = zip(args, func._schema.arguments)
        groups = [dist.ProcessGroup.unbox(each) for each, kind in given if "ProcessGroup" in str(kind.type)]
        for group in groups:
            self.call(KINDS.get(name, name), sum(each.nbytes for each in tensors), group)
        if any(each.group_name in self.groups_of_hosts for each in groups):
            self.between_hosts[KINDS.get(name, name)] += self.counts
        elif name in KINDS:
            # Of an all-to-all, a process's own parts: process 0 gets the largest of the whole matrices.
            choose = min if KINDS[name] == "all-to-all" else max
            self.count(KINDS[name], choose(each.nbytes for each in tensors), tensors)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([each for each in tree_leaves(args[0]) if isinstance(each, Tensor)])
        work = _create_work_from_future(done).boxed()
        returns = [work if "Work" in str(each.type) else args[0] for each in func._schema.returns]
        return returns[0] if len(returns) == 1 else tuple(returns)

    def call(self, kind: str, num_bytes: int, group: dist.ProcessGroup | None) -> None:
        self.calls.append(Call(kind, num_bytes, tuple(dist.get_process_group_ranks(group)), place()))

    def count(self, kind: str, num_bytes: int, tensors: list[Tensor]) -> None:
        if not all(isinstance(each, FakeTensor) for each in tensors):
            self.on_host[f"{kind}: {place()}"] += 1
        if self.counts:
            self.collectives.append((kind, num_bytes))


def _as_fake(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    device = "cuda" if tensor.is_meta else tensor.device
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


class Event:
    """An event or a stream of a device that is always done."""

    device, device_index, stream_id, cuda_stream, device_type = torch.device("cuda", 0), 0, 0, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Event":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> "Event":
        return Event()

    def nothing(self, *_: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = nothing

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
           is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Choose the kernel as CUDA does: flash for 16 bits without a mask, otherwise memory-efficient attention."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (each.to(torch.get_autocast_dtype("cuda")) for each in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa and (repeats := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is not None:
        mask = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = mask.expand(*query.shape[:3], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    found: Tensor = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return found


def _patches(pretend: Pretend, num_gpus: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield objects and the attributes that a machine with GPUs would have instead."""

    def give(value: Any) -> Any:
        return lambda *_, **__: value

    def reset_peak(*_: Any) -> None:
        pretend.peak_bytes = pretend.live_bytes

    live, peak = (lambda *_: pretend.live_bytes), (lambda *_: pretend.peak_bytes)
    facts = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=DEVICE_BYTES, major=9, minor=0, multi_processor_count=132, uuid="0"
    )
    yield torch.cuda, {
        **dict.fromkeys(("is_available", "is_bf16_supported", "is_initialized"), give(True)),
        **dict.fromkeys(
            ("set_device", "empty_cache", "manual_seed", "manual_seed_all", "init", "_lazy_init", "set_rng_state"),
            give(None),
        ),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), live),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), peak),
        **dict.fromkeys(("Event", "Stream"), Event),
        **dict.fromkeys(("current_stream", "default_stream"), give(Event())),
        **dict.fromkeys(("stream", "device"), give(nullcontext())),
        "device_count": give(num_gpus), "current_device": give(0), "is_current_stream_capturing": give(False),
        "get_device_properties": give(facts), "get_device_name": give(facts.name),
        "get_device_capability": give((9, 0)), "get_arch_list": give(["sm_90"]),
        "reset_peak_memory_stats": reset_peak, "memory_stats": give({}),
        "mem_get_info": lambda *_: (DEVICE_BYTES - pretend.live_bytes, DEVICE_BYTES),
        "synchronize": lambda *_: pretend.wait("torch.cuda.synchronize"),
        "get_rng_state": give(torch.zeros(16, dtype=torch.uint8)),
        "default_generators": tuple(torch.Generator() for _ in range(num_gpus)),
    }  # fmt: skip
    yield torch.accelerator, {"is_available": give(True)}
    yield torch.version, {"cuda": "13.0"}
    sdpa, resize, move = nn.functional.scaled_dot_product_attention, torch.UntypedStorage.resize_, nn.Module.to

    def choose_kernel(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (attend if isinstance(query, FakeTensor) else sdpa)(query, *args, **kwargs)

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        pretend.resized(storage, int(num_bytes))
        return resize(storage, num_bytes)

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        held = [*module.parameters(), *module.buffers()]
        if held and all(each.is_meta for each in held):
            tied = tied_names(module)
            tie(module.to_empty(device=args[0]), tied)
            return module
        # `Module.to` would swap fake tensors even if they stay where they are.
        if held and all(isinstance(getattr(each, "_local_tensor", each), FakeTensor) for each in held):
            return module
        return move(module, *args, **kwargs)

    yield nn.functional, {"scaled_dot_product_attention": choose_kernel}
    yield torch.UntypedStorage, {"resize_": resize_}
    yield nn.Module, {"to": to}
    new_group, init = dist.new_group, ddp.DistributedDataParallel._ddp_init_helper

    def gather(found: list[Any], each: Any, group: Any = None) -> None:
        pretend.call("all-gather of objects", 0, group)
        found[:] = [each] * len(found)

    def gather_on_main(each: Any, found: list[Any] | None = None, dst: int = 0, group: Any = None) -> None:
        pretend.call("gather of objects", 0, group)
        if found is not None:
            found[:] = [each] * len(found)

    def broadcast(values: list[Any], src: int = 0, group: Any = None, device: Any = None) -> None:
        pretend.call("broadcast of objects", 0, group)
        if dist.get_rank() == 0:
            pretend.sent.append(deepcopy(values))
        else:
            values[:] = next(pretend._heard)

    def init_helper(module: Any, *args: Any, **kwargs: Any) -> None:
        init(module, *args, **kwargs)
        module.logger = mock.Mock()  # it reads CUDA's timers

    def make_group(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        made = new_group(*args, **{**kwargs, "backend": "fake"})
        if kwargs.get("backend") == "gloo":
            pretend.groups_of_hosts.add(made.group_name)
        return made

    for owner in (dist, dist.distributed_c10d):
        yield owner, {
            "new_group": make_group,
            "all_gather_object": gather, "gather_object": gather_on_main, "broadcast_object_list": broadcast,
        }  # fmt: skip
    yield dist.ProcessGroup, {"set_timeout": give(None)}
    yield ddp, {"_verify_param_shape_across_processes": give(None), "_sync_module_states": give(None)}
    yield ddp.DistributedDataParallel, {"_ddp_init_helper": init_helper}


@contextmanager
def pretended_gpus(world_size: int, rank: int = 0, heard: Sequence[Any] = ()) -> Iterator[Pretend]:
    """Make this process one of `world_size` processes with one H100 each, inside the context."""
    num_gpus = min(world_size, GPUS_PER_NODE)
    names = {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": num_gpus,
        "MASTER_PORT": 29500,
    }
    pretend, launch = Pretend(heard), {"MASTER_ADDR": "127.0.0.1", **{name: str(each) for name, each in names.items()}}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, launch if world_size > 1 else {}))
        if world_size > 1:
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
            stack.callback(dist.destroy_process_group)
        for owner, attributes in _patches(pretend, num_gpus):
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        # torch.tensor(..., device="cuda") is then made on the host and copied.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        yield stack.enter_context(pretend)


if "torch" in sys.modules and "guard" not in os.environ.get("LD_PRELOAD", ""):
    raise RuntimeError("LD_PRELOAD does not name the library of guard.cpp")
