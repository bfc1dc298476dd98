"""Sharded models of the Trainer: `fsdp`, `deepspeed`, `parallelism_config`, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from accel_train.hf import Trainer
from accel_train.hf.arguments import parallel_leaves, train_batch_size
from tests.support.hf_models import Plain, arguments, flat, llama, plain_rows, refused
from tests.support.runs import TESTS, run_forked_command


def result(folder: Path, kind: str, processes: int) -> dict[str, Any]:
    folder.mkdir()
    done = run_forked_command(
        [str(folder), kind, str(folder.parent / "base")], processes, TESTS / "support/programs/hf_sharded.py"
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "full_shard", "deepspeed"])
def test_a_model_on_two_processes_trains_evaluates_predicts_and_is_saved_as_on_one(tmp_path: Path, kind: str) -> None:
    """Each sample is evaluated and predicted once, in order, for 101, 40, 7 and 1 of them."""
    llama().save_pretrained(tmp_path / "base")
    one, two = result(tmp_path / "one", "none", 1), result(tmp_path / "two", kind, 2)
    assert [sorted(line) for line in two["log"]] == [sorted(line) for line in one["log"]]
    for name in one if kind != "deepspeed" else one.keys() - {"streamed", "rows_by_flos"}:
        assert flat(two[name]) == pytest.approx(flat(one[name]), abs=2e-4, rel=1e-4), name
    assert one["rows_by_flos"] == 22 + 8


def test_arguments_become_the_strategy_of_the_recipe(tmp_path: Path) -> None:
    assert parallel_leaves(arguments(tmp_path)) == {}
    fsdp = parallel_leaves(arguments(tmp_path, fsdp="full_shard"))
    assert fsdp == {"parallel.strategy": "fsdp2", "parallel.reshard_after_forward": True, "parallel.cpu_offload": False}
    sizes = arguments(tmp_path)
    sizes.parallelism_config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    assert parallel_leaves(sizes) == {"parallel.strategy": "fsdp2", "parallel.dp_shard_size": 2}


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("fsdp_config", {"version": 1}, "FSDP1"),
        ("fsdp_config", {"xla": True}, "XLA"),
        ("parallelism_config", ParallelismConfig(tp_size=2), "tp_size=2"),
    ],
)
def test_what_cannot_be_sharded_that_way_is_refused_by_name(tmp_path: Path, name: str, value: Any, fact: str) -> None:
    args = arguments(tmp_path)
    args.fsdp = name == "fsdp_config"
    setattr(args, name, value)
    assert fact in refused(Trainer(Plain(), args, train_dataset=plain_rows(8)).train, name).problem


def test_split_batches_makes_a_batch_size_that_of_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=6, accelerator_config={"split_batches": True})
    assert train_batch_size(args) == 6
    monkeypatch.setattr(type(args), "world_size", 4)
    assert "4 processes" in refused(lambda: train_batch_size(args), "per_device_train_batch_size").problem
    args.per_device_train_batch_size = 8
    assert train_batch_size(args) == 2
