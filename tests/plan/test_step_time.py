"""Memory, traffic and time on many GPUs follow from counts by formulas that can be done by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_train.cli.main import main
from accel_train.core.hardware import GPUS, INTERCONNECTS, choose_interconnect, find_gpu
from accel_train.model import weights
from accel_train.model.weights import gathers_two_types, group_weights
from accel_train.plan.format import format_plan
from accel_train.plan.formulas import collectives
from accel_train.plan.place import Hardware, choose_layout
from accel_train.plan.plan import Plan, resolve_plan
from accel_train.plan.step_time import StepWork, model_step
from accel_train.plan.traffic import BASE_LATENCY_SECONDS, Collective, Ring, sent_bytes, traffic_of
from accel_train.recipe.loader import load_recipe
from accel_train.recipe.parallel import Parallel
from tests.support.plan_recipe import parts_of, rows_of
from tests.support.runs import Capture
from tests.support.wording import assert_golden, raises_golden

H100, NDR = GPUS["H100"], INTERCONNECTS["infiniband-ndr"]
FSDP2 = ("--parallel.strategy", "fsdp2")
OFFLOAD = ("--parallel.cpu_offload", "true")


def plan(*flags: str, world_size: int, gpu: str | None = "H100", **hardware: Any) -> Plan:
    flags = ("--batch.global_batch_size", str(2 * world_size), *flags)
    return resolve_plan(load_recipe("r.yaml", arguments=flags), world_size, gpu, Hardware(**hardware))


class Block(nn.Linear):
    """What a model repeats."""


class Net(nn.Module):
    """3 blocks of 100 weights, and 70 of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 10)  # 60
        self.blocks = nn.ModuleList(Block(9, 10) for _ in range(3))
        self.last = nn.Linear(10, 1, bias=False)  # 10, in one row


def test_weights_are_grouped_by_block_and_as_a_whole_where_blocks_share_some_which_count_once() -> None:
    model = Net()
    weights = group_weights(model)
    assert (weights.root.numel, [block.numel for block in weights.blocks]) == (70, [100, 100, 100])
    model.blocks[1].weight = model.blocks[0].weight
    weights = group_weights(model)
    assert (weights.root.numel, weights.blocks) == (280, ())
    assert weights.numel == sum(parameter.numel() for parameter in model.parameters())


def test_parts_are_whole_rows_so_that_more_processes_than_rows_save_nothing() -> None:
    weights = group_weights(Net())
    assert weights.part_numel(1) == 370
    assert weights.part_numel(2) == 3 * 50 + 30 + 10  # the one row of the last layer cannot be divided
    assert weights.part_numel(10) == weights.part_numel(1000) == 3 * 10 + 6 + 10
    assert weights.padding(2) == pytest.approx(1 - 370 / (2 * 190))


def test_parts_of_frozen_weights_have_no_gradients() -> None:
    model = Net()
    model.first.requires_grad_(False)
    weights = group_weights(model)
    assert weights.trainable_numel == 310
    assert weights.part_numel(5, trainable_only=True) == 3 * 20 + 10


@pytest.mark.parametrize(
    "flags, world_size, gpu, hardware",
    [
        ((*FSDP2, "--parallel.dp_shard_size", "3"), 8, "H100", {}),
        ((*FSDP2, *OFFLOAD), 2, None, {}),
        ((*FSDP2, *OFFLOAD, "--optimizer.name", "muon"), 2, "H100", {}),
        ((), 12, "H100", {"gpus_per_node": 8}),
        ((), 16, "H100", {"gpus_per_node": 0}),
        ((), 16, "H100", {"interconnect": "infiniband"}),
        ((), 16, "H100", {"mfu": 35.0}),
        ((), 16, "H100", {"mtbf_hours": 0.0}),
    ],
    ids=["shards", "offload on a CPU", "offload with muon", "nodes of 8", "nodes of 0", "network", "mfu", "mtbf"],
)
def test_what_cannot_be_is_refused_with_the_reason(
    without_cuda: None, flags: tuple[str, ...], world_size: int, gpu: str | None, hardware: Any
) -> None:
    with raises_golden():
        plan(*flags, world_size=world_size, gpu=gpu, **hardware)


def test_processes_fill_their_nodes_unless_it_is_said_otherwise() -> None:
    sizes = {n: choose_layout(Parallel(), n, "cuda").gpus_per_node for n in (1, 4, 7, 12, 1024)}
    assert sizes == {1: 1, 4: 4, 7: 7, 12: 6, 1024: 8}
    assert choose_layout(Parallel(), 64, "cuda", 4).num_nodes == 16


def test_muon_shares_its_matrices_among_the_processes_of_each_machine() -> None:
    found = []
    for size, *flags in ((8,), (16,), (8, "--optimizer.muon_dtype", "fp32"), (8, "--precision.mixed_precision", "no")):
        traffic = plan("--optimizer.name", "muon", *flags, world_size=size).scale.traffic
        found += [(each.purpose, each.payload_bytes) for each in traffic if each.kind == "all-gather"]
    narrow, wide = (f"updates of matrices, {dtype}" for dtype in ("bf16", "fp32"))
    assert [purpose for purpose, _ in found] == [narrow, narrow, wide, wide]
    # Two blocks of 64 x 192, 64 x 64, and two of 64 x 256: each of 8 processes has one matrix.
    assert [num_bytes for _, num_bytes in found] == [8 * 64 * 256 * size for size in (2, 2, 4, 4)]


def test_memory_of_a_shard_is_a_part_of_the_whole_and_what_is_gathered() -> None:
    whole, spread = (parts_of(plan(*flags, world_size=8)) for flags in ((), FSDP2))
    for name in ("parameters", "optimizer"):
        assert spread[name] == pytest.approx(whole[name] / 8, rel=0.01)
    # DDP's buckets are there at the worst moment, the end of the forward pass. Gradients of parts are not.
    assert (whole["gradients"], spread["gradients"]) == (whole["parameters"], 0)
    weights = group_weights(nn.Module())  # of nothing: nothing
    assert weights.numel == 0
    # Blocks of a 64-wide GPT-2; positions, tokens, the last norm.
    blocks, root = 2 * 49_984, 1024 * 64 + 320 * 64 + 2 * 64
    assert 2 * root <= spread["gathered weights"] <= 2 * (blocks + root)
    assert whole["DDP buckets"] == 0
    assert spread["NCCL buffers"] == whole["NCCL buffers"] > 0
    assert spread["activations"] < whole["activations"]  # autocast keeps no 16-bit copies of weights


def test_offloaded_parts_are_in_host_memory() -> None:
    resolved = plan(*FSDP2, *OFFLOAD, world_size=8)
    parts = {part.name: part for part in resolved.memory}
    assert [parts[name].num_bytes for name in ("parameters", "gradients", "optimizer")] == [0, 0, 0]
    assert_golden(parts["optimizer"].how, "optimizer")
    assert resolved.train_seconds is None
    assert_golden(rows_of(format_plan(resolved), "time"), "time")


def test_more_memory_than_the_named_gpu_has_is_said() -> None:
    config = "{model_type: gpt2, n_embd: 8192, n_head: 64, n_layer: 8}"
    replicated = plan("--model.config", config, world_size=8)
    flags = ("--precision.gradient_checkpointing", "true", "--batch.per_device_batch_size", "1")
    config = "{model_type: gpt2, n_embd: 16384, n_head: 64, n_layer: 16}"
    sharded = plan("--model.config", config, *flags, *FSDP2, world_size=2)
    for name, found in (("replicated", replicated), ("sharded", sharded)):
        assert_golden(rows_of(format_plan(found), "memory").partition(" (H100), ")[2], name)


def test_a_model_that_repeats_no_block_is_gathered_as_a_whole() -> None:
    flags = ("--model.config.n_layer", "1", "--precision.mixed_precision", "no", *FSDP2)
    whole = parts_of(plan(*flags, world_size=2))
    assert whole["gathered weights"] == pytest.approx(2 * whole["parameters"], rel=0.01)


@pytest.mark.parametrize("has_it", [False, True])
def test_bf16_memory_of_gathered_weights_counts_two_bytes_of_layers_and_four_of_what_stays_in_fp32(
    has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "gathers_two_types", lambda: has_it)
    width = 64
    flags = ("--model.config", f"{{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: {width}}}", *FSDP2)

    def gathered(precision: str) -> int:
        return parts_of(plan(*flags, "--precision.mixed_precision", precision, world_size=2))["gathered weights"]

    in_layers = 12 * width**2 + 9 * width
    whole = gathered("no")
    assert gathered("bf16") == (whole - 2 * in_layers if has_it else whole // 2)


def test_averaged_weights_are_in_memory_and_in_checkpoints() -> None:
    kept = ("--optimizer.ema_decay", "0.99")
    for flags in ((), FSDP2):
        plain, averaged = plan(*flags, world_size=8), plan(*flags, *kept, world_size=8)
        parts = parts_of(averaged)
        assert parts["averaged weights"] == parts["parameters"]
        assert (averaged.memory_bytes or 0) - (plain.memory_bytes or 0) == parts["parameters"]
        assert averaged.checkpoint_bytes - plain.checkpoint_bytes == 4 * plain.num_parameters


def traffic(world_size: int, micro_batches: int = 1, **parallel: Any) -> dict[str, tuple[int, int, float]]:
    section = Parallel(**parallel)
    layout = choose_layout(section, world_size, "cuda")
    found = traffic_of(collectives(layout, group_weights(Net()), 2), micro_batches)
    return {each.kind: (each.times, each.payload_bytes, each.sent_bytes) for each in found}


def test_ddp_reduces_all_gradients_once_a_step() -> None:
    assert traffic(4, micro_batches=5) == {"all-reduce": (1, 4 * 370, 2 * 4 * 370 * 3 / 4)}
    assert traffic(1) == {}


def test_ddp_reduces_whole_weights_in_buckets_as_torch_makes_them_and_waits_for_that_of_the_embedding() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.embedding = nn.Embedding(50_304, 768)
        model.blocks = nn.ModuleList(Block(768, rows) for rows in (3072, 3072, 16_384))
        model.norm = nn.LayerNorm(768)
    named = dict(model.named_parameters())
    blocks = [named[f"blocks.{n}.{kind}"] for n in (2, 1, 0) for kind in ("bias", "weight")]
    as_they_come = [named["norm.bias"], named["norm.weight"], *blocks, named["embedding.weight"]]
    buckets, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty(each.shape) for each in as_they_come], [2**20, 25 * 2**20]
    )
    sizes = [sum(4 * as_they_come[index].numel() for index in bucket) for bucket in buckets]
    found = collectives(choose_layout(Parallel(), 8, "cuda"), group_weights(model), 2)
    assert [each.num_bytes for each in found] == sizes
    assert len(sizes) == 2
    assert [each.is_hidden for each in found] == [True, False]


def test_fsdp2_gathers_weights_twice_and_scatters_gradients_with_each_micro_batch() -> None:
    padded = 10 * (3 * 10 + 6 + 10)
    rest, blocks = 10 * (6 + 10), 10 * 3 * 10
    assert traffic(10, strategy="fsdp2") == {
        "all-gather": (4 + 3, 2 * (padded + blocks), 2 * (padded + blocks) * 0.9),
        "reduce-scatter": (4, 4 * padded, 4 * padded * 0.9),
    }
    assert rest + blocks == padded
    kept = traffic(10, micro_batches=3, strategy="fsdp2", reshard_after_forward=False)
    assert kept["all-gather"][:2] == (3 * 4, 3 * 2 * padded)
    assert kept["reduce-scatter"][:2] == (3 * 4, 3 * 4 * padded)


@pytest.mark.skipif(gathers_two_types(), reason="torch before 2.15 alone")
def test_weights_beside_batch_norm_are_gathered_in_fp32_whatever_is_computed_in() -> None:
    model = Net()
    model.norm = nn.BatchNorm1d(10, affine=False)
    section, weights = Parallel(strategy="fsdp2"), group_weights(model)
    found = collectives(choose_layout(section, 10, "cuda"), weights, 2)
    plain = collectives(choose_layout(section, 10, "cuda"), group_weights(Net()), 4)
    assert found == plain


def test_hsdp_reduces_parts_over_the_copies() -> None:
    part = 3 * 50 + 30 + 10
    found = traffic(8, strategy="fsdp2", dp_shard_size=2)
    assert found["all-reduce"] == (4, 4 * part, 2 * 4 * part * 3 / 4)
    assert found["reduce-scatter"][1] == 2 * 4 * part


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    num_bytes = 10**12  # so many that latency is nothing

    def gb_per_second(ring: Ring, network: str = "infiniband-ndr") -> float:
        seconds = ring.seconds("all-gather", num_bytes, H100, INTERCONNECTS[network])
        return sent_bytes("all-gather", num_bytes, ring.size) / seconds / 1e9 / 0.8

    assert gb_per_second(Ring(8, 1, 8)) == pytest.approx(450, rel=0.01)  # NVLink
    assert gb_per_second(Ring(16, 1, 8)) == pytest.approx(400, rel=0.01)  # 8 adapters of 50 GB/s leave a node
    assert gb_per_second(Ring(2, 8, 8)) == pytest.approx(50, rel=0.01)  # each of 8 rings has one of them
    assert gb_per_second(Ring(16, 1, 8), "ethernet-100") == pytest.approx(12.5, rel=0.01)
    assert gb_per_second(Ring(2, 8, 8), "ethernet-100") == pytest.approx(12.5 / 8, rel=0.01)


def test_rings_that_do_not_end_where_nodes_do_share_networks_and_wait_for_the_smallest_part() -> None:
    # Processes 6, 7 | 8; and 0 ... 7 | 8 ... 11, beside 12 ... 15 | 16 ... 23.
    three, twelve = Ring(3, 1, 8), Ring(12, 1, 8)
    assert [(ring.num_nodes, ring.size_in_node) for ring in (three, twelve)] == [(2, 3), (2, 8)]
    assert [ring.leaves_node(NDR) / 50e9 for ring in (three, twelve)] == [1, 4]
    assert [ring.leaves_node(INTERCONNECTS["ethernet-100"]) / 12.5e9 for ring in (three, twelve)] == [1 / 2, 1 / 2]
    assert Ring(8, 3, 8).num_nodes == 3
    assert Ring(4, 1, 8).seconds("all-gather", 10**9, H100, NDR) < three.seconds("all-gather", 10**9, H100, NDR)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("H100", "infiniband-ndr"),
        ("H800", "infiniband-ndr"),
        ("MI300X", "infiniband-ndr"),
        ("A800", "infiniband-hdr"),
        ("L40S", "ethernet-100"),
        (None, "ethernet-100"),
    ],
)
def test_assumed_network_is_what_such_gpus_mostly_come_with(gpu: str | None, name: str) -> None:
    assert choose_interconnect(None, None if gpu is None else GPUS[gpu]).value.name == name


def test_a_small_collective_costs_its_latency() -> None:
    ring = Ring(16, 1, 8)
    assert ring.seconds("all-gather", 16, H100, NDR) == pytest.approx(
        BASE_LATENCY_SECONDS + 14 * 3.4e-6 + 14e-6, rel=1e-3
    )
    tree = 2 * (7 * 4e-6 + math.log2(128) * 14e-6)
    assert Ring(1024, 1, 8).seconds("all-reduce", 8, H100, NDR) == pytest.approx(BASE_LATENCY_SECONDS + tree, rel=1e-3)


def test_communication_hides_behind_computing_and_what_is_longer_is_waited_for() -> None:
    section = Parallel(strategy="fsdp2")
    layout = choose_layout(section, 16, "cuda")
    found = collectives(layout, group_weights(Net()), 2)

    def step(compute_seconds: float, found: Sequence[Collective] = found) -> Any:
        return model_step(found, StepWork(compute_seconds, 2, 0, 2), H100, NDR)

    whole, none = step(10.0), step(0.0)
    without_overlap = step(10.0, [replace(each, is_hidden=False) for each in found])
    assert none.exposed_seconds == pytest.approx(none.communication_seconds)  # nothing to hide behind
    assert without_overlap.exposed_seconds == pytest.approx(whole.communication_seconds)
    # Alone: both first gathers, the re-gather of the last block, and both last reductions, of each micro-batch.
    assert whole.exposed_seconds == pytest.approx(2 * (2 + 1 + 2) / 11 * whole.communication_seconds / 2, rel=0.05)
    assert whole.efficiency > 0.999


def test_the_optimizer_is_as_fast_as_the_memory() -> None:
    step = model_step((), StepWork(1.0, 1, 10**9, 2), H100, NDR)
    assert step.optimizer_seconds == pytest.approx(8 * 4e9 / (3350e9 * 0.8))
    assert step.seconds == 1.0 + step.optimizer_seconds


def test_a_plan_for_a_thousand_gpus_names_what_each_number_is() -> None:
    text = format_plan(plan(*FSDP2, world_size=1024, interconnect="roce-400", mfu=0.4))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert_golden(rows_of(text, "processes", "between nodes", "computing"))
    kinds = {"all-gather": "arithmetic", "parameters": "arithmetic", "activations": "estimate"}
    for name, kind in {**kinds, "computing": "model", "waiting": "model"}.items():
        assert any(line.startswith(name) and f" {kind}: " in line for line in lines), name
    assert any(line.startswith("padding") for line in lines)  # 64 rows do not fill 1,024 processes


def test_the_command_takes_the_machine_as_flags(capsys: Capture) -> None:
    flags = ["--all", "--world-size", "16", "--gpu", "A100", "--gpus-per-node", "4", "--interconnect", "ethernet-25"]
    assert main(["plan", "r.yaml", "--batch.global_batch_size", "32", *flags]) == 0
    out = capsys.readouterr().out
    assert_golden(rows_of(out, "processes", "between nodes"))
    assert main(["plan", "r.yaml", "--mfu", "2", "--gpu", "A100"]) == 2
    assert "--mfu" in capsys.readouterr().err


def test_slower_networks_make_slower_steps() -> None:
    def seconds(name: str) -> float:
        step = plan(*FSDP2, world_size=64, interconnect=name).scale.step
        assert step is not None
        return step.seconds

    fast, middle, slow = map(seconds, ("infiniband-ndr", "ethernet-100", "ethernet-10"))
    assert fast < middle < slow


def test_names_of_gpus_are_read_as_torch_says_them() -> None:
    assert find_gpu("NVIDIA H100 80GB HBM3") is GPUS["H100"]
    assert find_gpu("NVIDIA A100-SXM4-40GB") is GPUS["A100 40GB"]
    assert find_gpu("Acme 1") is None
