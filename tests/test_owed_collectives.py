"""What a process that broke off owes the others is found without them, to the size, and handed in once."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_train.owed_collectives import Buffer, DryRun, collectives_of, hand_in_nan, num_held

COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce, to be waited for": lambda x: dist.all_reduce(x, async_op=True).get_future().wait()[0] + 1,
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x)], x),
    "all_gather_into_tensor": lambda x: dist.distributed_c10d._get_default_group()._allgather_base(torch.empty_like(x), x).wait(),
    "reduce_scatter": lambda x: dist.distributed_c10d._get_default_group()._reduce_scatter_base(torch.empty_like(x), x).wait(),
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "functional all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
    "functional all_gather": lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD) + 1,
    "functional reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 1,
    "functional all_to_all": lambda x: functional.all_to_all_single(x, None, None, dist.group.WORLD) + 1,
}  # fmt: skip


@torch.library.custom_op("accel_train_tests::summed", mutates_args=())
def summed(values: Tensor) -> Tensor:
    found = values.clone()
    dist.all_reduce(found)
    return found


COLLECTIVES["all_reduce within an operation of one's own"] = summed


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_dry_run_notes_each_kind_of_collective_and_holds_none_and_each_counts_once(name: str) -> None:
    before = num_held()
    with DryRun() as dry_run:
        COLLECTIVES[name](torch.ones(4, 3))
    assert num_held() == before
    [one] = dry_run.collectives
    one.hand_in_nan()
    assert (num_held() - before).total() == 1


def test_what_is_handed_in_is_nan_and_where_there_is_none_it_is_0() -> None:
    seen: list[Tensor] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.c10d.allreduce_.default:
                seen.extend(args[0])
            return func(*args, **(kwargs or {}))

    with DryRun() as dry_run:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            dist.all_reduce(torch.ones(2, dtype=dtype))
    with Watched():
        hand_in_nan(dry_run.collectives, num_held() - num_held())
    assert [each.dtype for each in seen] == [torch.float32, torch.bfloat16, torch.int64]
    assert all(math.isnan(value) for each in seen[:2] for value in each.tolist())
    assert seen[2].tolist() == [0, 0]


def forward_and_backward(num_rows: int) -> None:
    """One collective over activations and one over weights each way, the last two in the backward pass."""
    weight = torch.ones(5, 6, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    dist.broadcast(weight.detach(), 0)
    hidden = torch.ones(num_rows, 5) @ functional.all_reduce(weight, "sum", dist.group.WORLD)
    hidden.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
    hidden.exp().sum().backward()


def test_activations_grow_with_the_rows_and_weights_and_gradients_do_not() -> None:
    found = collectives_of(forward_and_backward, 7)
    assert [one.operation._schema.name for one in found] == [
        "c10d::broadcast_",
        "_c10d_functional::all_reduce",
        "c10d::allreduce_",  # of the gradient of activations, in the backward pass
        "_c10d_functional::all_reduce",
        "c10d::allreduce_",
    ]
    buffers = [next(each for each in tree_leaves(one.arguments) if isinstance(each, Buffer)) for one in found]
    assert [each.shape for each in buffers] == [(5, 6), (5, 6), (7, 6), (5, 6), (5, 6)]


def test_only_what_is_left_is_held_and_more_than_there_is_is_an_error() -> None:
    found = collectives_of(forward_and_backward, 3)
    before = num_held()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    hand_in_nan(found, num_held() - before)
    assert (num_held() - before).total() == len(found)
    with pytest.raises(RuntimeError, match="has held"):
        hand_in_nan(found[:-1], num_held() - before)


def test_a_step_whose_collectives_depend_on_the_rows_is_refused() -> None:
    with pytest.raises(RuntimeError, match="other collectives with 2 rows"):
        collectives_of(lambda rows: [dist.all_reduce(torch.ones(1)) for _ in range(rows)], 4)


def test_a_dry_run_keeps_no_activations() -> None:
    """A step that ran out of memory has no room for them."""
    kept = []

    def compute(num_rows: int) -> None:
        first = torch.ones(num_rows, 8, requires_grad=True)
        hidden = first.exp()  # which its own backward pass needs
        memory, loss = StorageWeakRef(hidden.untyped_storage()), hidden.exp().sum()
        del hidden
        kept.append(not memory.expired())
        loss.backward()
        assert first.grad is not None

    collectives_of(compute, 2)
    assert kept == [False, False]
