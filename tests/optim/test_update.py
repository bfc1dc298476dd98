"""The norm of gradients that are spread over processes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_train.optim.update import norm_of_all
from tests.support.wording import raises_golden


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The mesh of one process, whose parts are whole."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_norm_of_sharded_gradients_is_that_of_whole_ones(mesh: DeviceMesh) -> None:
    whole = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    kinds = (Shard(0), Replicate(), Shard(1))
    spread = [distribute_tensor(each, mesh, [kind]) for each, kind in zip(whole, kinds)]
    expected = torch.cat([each.flatten() for each in whole]).norm()
    torch.testing.assert_close(norm_of_all(spread), expected)
    torch.testing.assert_close(norm_of_all(whole), expected)


def test_gradients_are_all_sharded_or_none_is(mesh: DeviceMesh) -> None:
    whole = torch.ones(2)
    with raises_golden(AssertionError):
        norm_of_all([distribute_tensor(whole, mesh, [Shard(0)]), whole])
