"""All private names of torch, Accelerate, DeepSpeed, and datasets that this program uses, one function each.

Each docstring names the version in which the name was seen. `tests/runtime/test_private.py` explains what to do when a
name is gone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Look = Callable[[list[tuple[Any, Any]]], None]
"""Function of a group's trained weights, each as a pair: sharded, and gathered (None before the first forward)."""
Function = TypeVar("Function", bound=Callable[..., Any])
MOST_IN_ONE_SUM, ROW = 2**16, 4096
"""Elements up to which torch's norm on a CPU is exact to about 1e-6, and elements per row of a larger tensor."""


def norms_of(tensors: list[Tensor], order: float = 2) -> list[Tensor]:
    """Return the norm of each tensor, all in a few kernels; `torch._foreach_norm`, torch 2.13.

    `torch.nn.utils.get_total_norm` first groups by device and dtype: 40 us per step on a small model.
    """
    if order == 2 and tensors and tensors[0].is_cpu and max(map(Tensor.numel, tensors)) > MOST_IN_ONE_SUM:
        return [_norm_in_rows(each) for each in tensors]
    return list(torch._foreach_norm(tensors, order))


def _norm_in_rows(tensor: Tensor) -> Tensor:
    """Return the norm of a CPU tensor, first of rows. One sum of 50 million squares is wrong by 0.8 %."""
    flat = tensor.flatten()
    whole = flat.numel() - flat.numel() % ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    return torch.linalg.vector_norm(torch.cat([rows, torch.linalg.vector_norm(flat[whole:]).reshape(1)]))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, all in one kernel; `torch._foreach_copy_`, torch 2.13."""
    torch._foreach_copy_(targets, sources)


def move_towards(tensors: list[Tensor], others: list[Tensor], share: Tensor) -> None:
    """Move each tensor towards the other by a `share` (0-dim, on the device) of their distance.

    Uses `torch._foreach_add_`, torch 2.13.
    """
    torch._foreach_add_(tensors, torch._foreach_mul(torch._foreach_sub(others, tensors), share))


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """Enter a mode in which tensors have a shape but no storage, and yield it; `torch._subclasses`, torch 2.13.

    A boolean that is read is True: models read whether a check holds, a mask is full, or all numbers are finite.

    transformers keeps the position embeddings of detectors for later forwards, but not while torch.compile traces a
    model. So it is told that this is the case: the next forward would get a tensor without storage.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    class Fake(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except DataDependentOutputException:
                if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
                    return True
                raise

    utils: Any = sys.modules.get("transformers.pytorch_utils", SimpleNamespace(is_torchdynamo_compiling=None))
    is_compiling, utils.is_torchdynamo_compiling = utils.is_torchdynamo_compiling, lambda: True
    try:
        with Fake(allow_non_fake_inputs=True) as fake:
            yield fake
    finally:
        utils.is_torchdynamo_compiling = is_compiling


def answer_operators(answer: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """Let `answer(operator, arguments, named_arguments)` return the result of each operator inside the context.

    Uses `TorchDispatchMode`, torch 2.13.
    """

    class Answer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return answer(func, args, kwargs or {})

    return Answer()


def watch_operators(see: Callable[[Any, Any], None]) -> AbstractContextManager[Any]:
    """Call `see(arguments, result)` after each operator inside the context, in forward and backward."""

    def answer(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        see((args, kwargs), result)
        return result

    return answer_operators(answer)


def changes_first_argument(operator: Any) -> bool:
    """Return whether an operator writes into its first argument; `OpOverload._schema`, torch 2.13."""
    alias = operator._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def looks_like_cpu(is_chosen: Callable[[Tensor], bool]) -> AbstractContextManager[Any]:
    """Let tensors for which `is_chosen` look like CPU tensors inside the context. Torch 2.13.

    Models skip the initialization of weights on the meta device.
    """
    own: Any = Tensor
    answers = {own.device.__get__: torch.device("cpu"), own.is_meta.__get__: False}

    class Look(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in answers and is_chosen(args[0]):
                return answers[func]
            return func(*args, **(kwargs or {}))

    return Look()


@contextmanager
def watch_compiling(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around each compilation inside the context; `torch._dynamo.callback`, torch 2.13."""
    from torch._dynamo.callback import callback_handler

    starts, ends = callback_handler.start_callbacks, callback_handler.end_callbacks
    own = (lambda _: begin()), (lambda _: end())
    starts.append(own[0])
    ends.append(own[1])
    try:
        yield
    finally:
        starts.remove(own[0])
        ends.remove(own[1])


def set_activation_memory_budget(share: float) -> None:
    """Set the share of activations that later compiled graphs keep; `torch._functorch.config`, torch 2.13."""
    import torch._functorch.config as settings

    settings.activation_memory_budget = share


def compile_backward_at_once() -> None:
    """Let later graphs compile their backward with their forward; `torch._functorch.config`, torch 2.13.

    A failure of the compiler is then seen while the graph is made, when eager code can still replace it.
    """
    import torch._functorch.config as settings

    settings.force_non_lazy_backward_lowering = True


def set_constant_floats(is_on: bool) -> None:
    """Make later graphs treat a module's floats (eps, dropout) as constants; `torch._dynamo.config`, torch 2.13."""
    import torch._dynamo.config as settings

    settings.specialize_float = is_on  # type: ignore[assignment, unused-ignore]


def constant_in_graphs(function: Function) -> Function:
    """Mark a function that torch.compile calls while it traces, and takes its result for a constant; torch 2.13.

    `torch.compiler.assume_constant_result` also sets `_dynamo_marked_constant`, but imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def header_folder(folder: Path | None = None) -> Path:
    """Return the folder of torch's precompiled headers for CPU kernels; with `folder`, move it there first.

    The folder is in the temporary folder, regardless of TORCHINDUCTOR_CACHE_DIR. Uses `codecache._HEADER_DIR`, torch
    2.13.
    """
    from torch._inductor import codecache

    if folder is not None:
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(folder), str(folder / "locks")
    return Path(codecache._HEADER_DIR)


def with_plain_names(module: Any) -> Any:
    """Return a compiled module without torch.compile's wrappers, compiled in place, including its submodules.

    The wrapper would add `_orig_mod.` to the names of weights. Uses `OptimizedModule._orig_mod`, `dynamo_ctx`,
    `Module._compiled_call_impl`, torch 2.13.
    """

    def plain(wrapped: Any) -> Any:
        while "_orig_mod" in wrapped._modules:
            inner = wrapped._modules["_orig_mod"]
            inner._compiled_call_impl = wrapped.dynamo_ctx(inner._call_impl)
            wrapped = inner
        return wrapped

    module = plain(module)
    for parent in module.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parent._modules[name] = plain(child)
    return module


def end_failed_backward(module: DistributedDataParallel) -> None:
    """Let DDP start another forward after a backward pass that did not end; `Reducer._reset_state`, torch 2.13."""
    reducer: Any = module.reducer
    reducer._reset_state()


def before_reduction(module: Any, look: Look) -> None:
    """Call `look` before FSDP2 reduces the gradients of each group of a model.

    Uses `FSDPParamGroup.post_backward`, torch 2.13.
    """
    for group in _fsdp_groups(module):
        group.post_backward = partial(_look_and_reduce, group, group.post_backward, look)


def end_open_forward(module: Any) -> None:
    """End a forward of FSDP2 that called only a part of a group's modules outside of the root's forward.

    The next forward would not wait for the weights, and use those that are still gathered. Gradients stay, although
    torch 2.15 drops them. Uses `FSDPStateContext`, `FSDPModule.reset_iter_state`, torch 2.13.
    """
    reset = getattr(module, "reset_iter_state", None)
    if reset is not None and module._get_fsdp_state()._state_ctx.iter_forward_root is not None:
        # Gathered weights take the place of these in the module.
        shards = [each.sharded_param for group in _fsdp_groups(module) for each in group.fsdp_params]
        gradients = [shard.grad for shard in shards]
        reset()
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient


def drop_partial_sums(module: Any) -> None:
    """Drop gradients that HSDP has not yet summed over its copies; `_partial_reduce_output`, torch 2.13."""
    for group in _fsdp_groups(module):
        group._partial_reduce_output = None


def _fsdp_groups(module: Any) -> list[Any]:
    """Return the groups of a module and its submodules, each once, although several modules may share one."""
    found: dict[int, Any] = {}
    for state in (part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)):
        # Before torch 2.13, a module has one group.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        found |= {id(group): group for group in groups if group is not None}
    return list(found.values())


def _look_and_reduce(group: Any, reduce: Callable[..., None], look: Look, *unused: Any) -> None:
    trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    look([(each.sharded_param, getattr(each, "_unsharded_param", None)) for each in trained])
    reduce(*unused)


def flatten_mesh(tensor: Any) -> None:
    """Make a reduction over all dimensions of a DTensor's mesh one collective; `DeviceMesh._flatten`, torch 2.13."""
    tensor.device_mesh._flatten()


def process_groups() -> list[Any]:
    """Return the process groups of this process, also the groups of meshes; `_world.pg_map`, torch 2.13."""
    return list(torch.distributed.distributed_c10d._world.pg_map)


def forget_accelerator() -> None:
    """Let the next Accelerator of this process use another precision.

    Uses `AcceleratorState._reset_state`, Accelerate 1.15.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()


def is_set_to_cpu() -> bool:
    """Return whether `TrainingArguments(use_cpu=True)` chose the CPU; `PartialState._shared_state`, Accelerate 1.15."""
    from accelerate import PartialState

    return bool(PartialState._shared_state.get("_cpu", False))


@contextmanager
def separate_accelerate_state() -> Iterator[None]:
    """Let the block choose another device, then restore the state before it; `_shared_state`, Accelerate 1.15."""
    from accelerate.state import AcceleratorState, PartialState

    shared = [PartialState._shared_state, AcceleratorState._shared_state]
    before = [dict(each) for each in shared]
    for each in shared:
        each.clear()
    try:
        yield
    finally:
        for each, values in zip(shared, before, strict=True):
            each.clear()
            each.update(values)


def set_gradient_norm(zero: Any, norm: Tensor) -> None:
    """Make DeepSpeed's optimizer clip by this norm, and skip its step if the norm is not finite; DeepSpeed 0.19."""
    # For stages 1 and 2.
    zero.scaled_global_norm = lambda: norm
    # For stage 3.
    zero._get_norm_groups = lambda: [norm]


def end_workers(iterator: Any, *, at_once: bool = False) -> None:
    """End the processes of a DataLoader's iterator: by torch, within 5 s each, unless `at_once`, then by SIGKILL.

    A stopped process ignores torch's SIGTERM, and this process could not end before it.
    """
    from torch.utils.data._utils import signal_handling

    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None and not at_once:
        shut_down()
    if getattr(iterator, "_worker_pids_set", False):
        # torch raises an error at the signal of a worker's death.
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():
            worker.kill()


def stream_facts(stream: Any) -> tuple[list[Any], bool, Any, Any]:
    """Return facts of a `datasets.IterableDataset`; `_ex_iterable`, `_distributed`, `_starting_state_dict`, 5.2.

    Returns:
        The arguments of its readers (files, shards), whether it is shuffled in a buffer, whose contents its state does
        not hold, the part of the samples that `split_dataset_by_node` left it (None: all), and the state that was
        loaded.
    """
    parts = [stream._ex_iterable]
    # The list grows while it is read.
    for part in parts:
        parts += getattr(part, "ex_iterables", None) or filter(None, [getattr(part, "ex_iterable", None)])
    files = [part.kwargs for part in parts if hasattr(part, "kwargs")]
    is_buffered = any(getattr(part, "buffer_size", 1) > 1 for part in parts)
    return files, is_buffered, stream._distributed, stream._starting_state_dict
