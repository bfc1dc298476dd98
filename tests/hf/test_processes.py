"""The Trainer on two processes, also sharded: the run of one process, and each sample evaluated once, in order."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from accel_train.core.json_io import load_object
from accel_train.hf import Trainer
from accel_train.hf.arguments import parallel_leaves, train_batch_size
from tests.support.hf_models import Plain, arguments, flat, llama, plain_rows, refused
from tests.support.runs import TESTS, run_forked_command


def result(folder: Path, program: str, processes: int, *words: str) -> Any:
    folder.mkdir()
    done = run_forked_command([str(folder), *words], processes, TESTS / "support/programs" / program)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    return load_object(folder / "result.json")


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    one, two = result(tmp_path / "one", "hf.py", 1), result(tmp_path / "two", "hf.py", 2)
    assert [sorted(line) for line in two["log"]] == [sorted(line) for line in one["log"]]
    for name in one:
        assert flat(two[name]) == pytest.approx(flat(one[name]), abs=2e-5, rel=1e-4), name
    assert one["own"]["eval_count"] == 13
    assert one["prepared"][0] == 6
    assert one["stopped_at"] == 2
    assert one["batches"] == [3, 3, 3, 3, 1]
    assert (one["rows_by_flos"], one["rows_by_tokens"]) == (33, 33)
    assert one["loaders"] == [9, 1]
    assert one["syncs"] == [False, True] * 2
    assert two["same_bits"] == two["without_targets"] == [True, True]
    assert one["grown"][:2] == [4, 4]


@pytest.mark.slow
def test_two_processes_generate_every_sample_once_in_order(tmp_path: Path) -> None:
    one, two = (result(tmp_path / str(number), "hf_seq2seq.py", number) for number in (1, 2))
    for count in ("7", "40"):
        assert two[count]["seen"] == [int(count)] * 2
        assert two[count]["loss"] == pytest.approx(one[count]["loss"], rel=1e-5)
        for name in ("predictions", "labels", "first"):
            assert two[count][name] == one[count][name], name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "full_shard", "deepspeed"])
def test_a_model_on_two_processes_trains_evaluates_predicts_and_is_saved_as_on_one(tmp_path: Path, kind: str) -> None:
    """Each sample is evaluated and predicted once, in order, for 101, 40, 7 and 1 of them."""
    base = str(tmp_path / "base")
    llama().save_pretrained(base)
    one = result(tmp_path / "one", "hf_sharded.py", 1, "none", base)
    two = result(tmp_path / "two", "hf_sharded.py", 2, kind, base)
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


def test_split_batches_makes_a_batch_size_that_of_all_processes(tmp_path: Path, monkeypatch: Any) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=6, accelerator_config={"split_batches": True})
    assert train_batch_size(args) == 6
    monkeypatch.setattr(type(args), "world_size", 4)
    assert "4 processes" in refused(lambda: train_batch_size(args), "per_device_train_batch_size").problem
    args.per_device_train_batch_size = 8
    assert train_batch_size(args) == 2
