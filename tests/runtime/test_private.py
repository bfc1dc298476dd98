"""Each private name of torch, Accelerate, DeepSpeed and datasets does what it is used for; what fails says what to do
instead.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from accel_train.runtime import private


@contextmanager
def otherwise(remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        pytest.fail(f"{remedy} ({type(error).__name__}: {error})", pytrace=False)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_norms_are_those_of_each_tensor():
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor([[math.nan]]), torch.tensor([-2.0])]
    with otherwise("torch._foreach_norm is gone: call torch.linalg.vector_norm for each tensor"):
        norms = private.norms_of(tensors)
        assert [norms[0], norms[2]] == [5, 2]
        assert norms[1].isnan()
        assert private.norms_of(tensors, math.inf)[0] == 4


def test_a_marked_function_is_called_while_code_is_traced_and_is_a_constant_in_it() -> None:
    calls: list[str] = []

    @private.constant_in_graphs
    def factor(name: str) -> int:
        calls.append(name)
        print(end="")  # cannot be traced
        return 3

    torch.compiler.reset()
    compute = torch.compile(lambda x: x * factor("it"), backend="eager", fullgraph=True)
    with otherwise("_dynamo_marked_constant is gone: use torch.compiler.assume_constant_result"):
        assert [compute(torch.tensor(number)).item() for number in (2, 5)] == [6, 15]
        assert calls == ["it"]
    torch.compiler.reset()


@pytest.mark.parametrize("shape", [(2**16 + 1,), (3000, 3000)])
def test_norms_of_large_tensors_are_those_of_their_parts(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    [norm] = private.norms_of([whole])
    assert float(norm) == pytest.approx(float(whole.double().norm()), rel=3e-7)
    halves = private.norms_of(list(whole.flatten().chunk(2)))
    assert float(torch.stack(halves).norm()) == pytest.approx(float(norm), rel=3e-7)


def test_each_source_is_copied_into_its_target():
    targets = [torch.zeros(2), torch.zeros(1)]
    with otherwise("torch._foreach_copy_ is gone: call Tensor.copy_ for each tensor"):
        private.copy_all(targets, [torch.ones(2), torch.full((1,), 2.0)])
        assert [each.tolist() for each in targets] == [[1, 1], [2]]


def test_tensors_move_by_a_share_of_their_distance():
    tensors = [torch.tensor([0.0, 4.0])]
    with otherwise("torch._foreach_add_, _mul or _sub is gone: move each tensor by itself"):
        private.move_towards(tensors, [torch.tensor([2.0, 2.0])], torch.tensor(0.5))
        assert tensors[0].tolist() == [1, 3]


def test_compiling_is_seen_from_its_begin_to_its_end():
    seen = []
    with otherwise("torch._dynamo.callback has changed: without it compiling counts as the first step's time"):
        with private.watch_compiling(lambda: seen.append("begin"), lambda: seen.append("end")):
            torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
        torch.compile(lambda x: x.cos() - 1, backend="eager")(torch.ones(3))
    assert seen == ["begin", "end"]


def test_gradients_of_a_group_are_seen_and_completed_before_fsdp2_reduces_them(alone):
    layer = nn.Linear(2, 2)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    expected, seen = [id(each) for each in layer.parameters()], []

    def look(weights):
        seen.extend((id(sharded), gathered.grad is None) for sharded, gathered in weights)
        weights[0][1].grad = torch.ones(2, 2)

    with otherwise("FSDPParamGroup.post_backward has changed: look where torch collects the gradients that it reduces"):
        private.before_reduction(layer, look)
        layer(torch.ones(1, 2)).sum().mul(0).backward()
        assert seen == [(each, False) for each in expected]
        assert layer.weight.grad.to_local().eq(1).all()
    with otherwise("FSDPParamGroup._partial_reduce_output is gone: see where HSDP keeps sums that it has not reduced"):
        [group] = private._fsdp_groups(layer)
        assert group._partial_reduce_output is None
        private.drop_partial_sums(layer)


def test_fake_tensors_have_a_shape_and_no_storage():
    with (
        otherwise("FakeTensorMode has moved: import it from where torch.compile does now"),
        private.fake_tensors() as fake,
    ):
        tensor = fake.from_tensor(torch.ones(2, 3))
        assert (tensor @ tensor.T).shape == (2, 2)
        assert type(tensor) is not torch.Tensor


def test_operators_of_forward_and_backward_are_seen():
    shapes = []
    weight = nn.Parameter(torch.ones(2, 3))
    with otherwise("TorchDispatchMode has moved: import it from where torch.utils.flop_counter does now"):
        with private.watch_operators(lambda arguments, result: shapes.append(getattr(result, "shape", None))):
            loss = (weight * 2).sum()
            forward = len(shapes)
            loss.backward()
        assert torch.Size([2, 3]) in shapes[:forward]
        assert torch.Size([2, 3]) in shapes[forward:]


def test_operators_are_answered_and_writes_into_their_first_argument_known():
    seen = []

    def answer(operator, arguments, named):
        seen.append((str(operator), private.changes_first_argument(operator), named))
        return operator(*arguments, **named)

    with otherwise("TorchDispatchMode or OpOverload._schema is gone: make all initial weights on the main process"):
        with private.answer_operators(answer):
            weight = torch.empty(2, 3)
            weight.select(0, 1).normal_(1.0)
            torch.ones(2, 3, out=weight)
            weight.add(weight)
        found = [(name.split(".")[1], changes) for name, changes, _ in seen]
        assert found[:3] == [("empty", False), ("select", False), ("normal_", True)]
        assert found[-1] == ("add", False)
        assert seen[0][2]["device"] == torch.device("cpu")


def test_chosen_tensors_look_like_cpu_tensors():
    chosen, other = torch.empty(2, device="meta"), torch.empty(3, device="meta")
    with otherwise("Tensor.device.__get__ is gone: make all initial weights on the main process"):
        with private.looks_like_cpu(lambda tensor: tensor is chosen):
            assert (chosen.device, chosen.is_meta) == (torch.device("cpu"), False)
            assert (other.device, other.is_meta) == (torch.device("meta"), True)
        assert chosen.is_meta


def test_ddp_begins_another_step_after_a_backward_that_did_not_end(alone):
    module = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError

    handle = module.module[0].weight.register_hook(fail)
    with pytest.raises(MemoryError):
        module(torch.ones(1, 2)).sum().backward()
    handle.remove()
    with otherwise("Reducer._reset_state is gone: end a run that is out of memory in backward, as other strategies do"):
        private.end_failed_backward(module)
        module(torch.ones(1, 2)).sum().backward()


def test_a_mesh_of_two_dimensions_is_made_one(alone):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()])
    with otherwise("DeviceMesh._flatten is gone: leave it out, the gradient norm is then two collectives"):
        private.flatten_mesh(tensor)


def test_groups_of_a_mesh_are_among_the_process_groups(alone):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    with otherwise("_world.pg_map is gone: give each mesh and new_group the timeout of guard.hang_timeout_seconds"):
        assert {mesh.get_group("a"), mesh.get_group("b"), dist.group.WORLD} <= set(private.process_groups())


def test_a_budget_is_where_the_compiler_reads_it():
    from inspect import getsource

    from torch._functorch import config, partitioners

    with otherwise("activation_memory_budget is gone: refuse precision.gradient_checkpointing={memory_budget: ...}"):
        private.set_activation_memory_budget(0.5)
        assert config.activation_memory_budget == 0.5
        private.set_activation_memory_budget(1.0)
        assert "config.activation_memory_budget" in getsource(partitioners)


def test_the_next_accelerator_may_have_another_precision():
    with otherwise("AcceleratorState._reset_state is gone: start each run in a process of its own"):
        private.forget_accelerator()  # of the test before
        Accelerator(cpu=True, mixed_precision="bf16")
        private.forget_accelerator()
        assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
        private.forget_accelerator()


def test_deepspeed_asks_for_the_norm_where_it_is_set():
    from inspect import getsource

    from deepspeed.runtime.zero import stage3, stage_1_and_2

    with otherwise("DeepSpeed computes its gradient norm elsewhere: set it there, see ZeRO's step()"):
        assert "self.scaled_global_norm()" in getsource(stage_1_and_2)
        assert "self._get_norm_groups()" in getsource(stage3)


def test_headers_of_kernels_are_precompiled_where_they_are_told(tmp_path, monkeypatch):
    with otherwise(
        "codecache._HEADER_DIR is gone: look where torch keeps precompiled headers, and whether others may write there"
    ):
        from torch._inductor import codecache

        for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
            monkeypatch.setattr(codecache, name, getattr(codecache, name))
        assert private.header_folder().name == "precompiled_headers"
        assert private.header_folder(tmp_path) == tmp_path
        assert str(tmp_path / "locks") == codecache._HEADER_LOCK_DIR


def test_a_process_that_was_set_to_the_cpu_is_known():
    with otherwise(
        "PartialState._shared_state is gone: ask how TrainingArguments(use_cpu=True) can be told from a CPU by default"
    ):
        PartialState._reset_state()
        assert not private.is_set_to_cpu()
        PartialState(cpu=True)
        assert private.is_set_to_cpu()
        PartialState._reset_state()


def test_facts_of_a_stream_are_those_of_all_its_parts():
    from datasets import IterableDataset, interleave_datasets
    from datasets.distributed import split_dataset_by_node

    def numbers(parts):
        yield from ({"number": each} for each in parts)

    one, two = (IterableDataset.from_generator(numbers, gen_kwargs={"parts": parts}) for parts in ([1, 2], [3]))
    with otherwise("IterableDataset._ex_iterable or its parts have changed: find shuffle buffers and files there"):
        both = interleave_datasets([one.shuffle(seed=1, buffer_size=9).map(dict), two])
        files, is_buffered, part, start = private.stream_facts(both.take(2))
        assert sorted(each["parts"] for each in files) == [[1, 2], [3]]
        assert (is_buffered, part, start) == (True, None, None)
        assert not private.stream_facts(one.shuffle(seed=1, buffer_size=1))[1]
        assert private.stream_facts(split_dataset_by_node(one, 1, 2))[2] is not None
    with otherwise("IterableDataset._starting_state_dict is gone: read the state that a program loads there"):
        two.load_state_dict(two.state_dict())
        assert private.stream_facts(two)[3] == two.state_dict()
