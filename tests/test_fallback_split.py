"""Out of memory on a process that computes layers or sequences together with others: all go on with smaller micro-batches, and no
step is lost."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_fallback_sharded import assert_no_step_lost
from test_fallback_sharded import train as train_in_parts

from runs import LLAMA

FSDP2 = {"strategy": "fsdp2"}
TP = {**FSDP2, "tp_size": 2}
SP = {"strategy": "ddp", "sp_size": 2}
train = partial(
    train_in_parts,
    model={"config": {**LLAMA, "vocab_size": 259}},
    batch={"global_batch_size": 8, "per_device_batch_size": 4},
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process, which has room for everything."""
    return train(tmp_path_factory.mktemp("one") / "one", 1, {}, None)


@pytest.mark.parametrize(
    ("processes", "parallel", "rank", "where", "block", "from_micro_batch"),
    [
        (2, TP, 1, "backward", 0, 6),  # the second micro-batch of step 3
        (2, SP, 0, "backward", 0, 6),
        *(
            pytest.param(*each, marks=pytest.mark.faults)
            for each in (
                (2, TP, 0, "forward", 1, 1),  # the first step
                (4, TP, 3, "backward", 1, 4),  # with FSDP2 over two groups, in step 4, after which more is due
                (2, SP, 1, "forward", 0, 2),  # before DDP has reduced anything
                (2, {**SP, **FSDP2}, 1, "backward", 0, 1),
                (4, {**SP, **FSDP2, "dp_shard_size": 2}, 2, "forward", 1, 4),
            )
        ),
    ],
)
def test_memory_that_runs_out_within_a_layer_of_one_process_costs_no_step(
    tmp_path: Path,
    clean: Path,
    processes: int,
    parallel: dict[str, Any],
    rank: int,
    where: str,
    block: int,
    from_micro_batch: int,
) -> None:
    no_room = {"rank": rank, "rows": 2, "where": where, "block": block, "from_step": from_micro_batch}
    tight = train(tmp_path / "tight", processes, parallel, no_room)
    groups = processes // 2
    assert_no_step_lost(clean, tight, (from_micro_batch * groups + 1) // 2, rank)


@pytest.mark.faults
@pytest.mark.parametrize("parallel", [TP, SP], ids=["layers", "sequences"])
def test_one_sample_that_does_not_fit_ends_all_processes_with_exit_code_6_and_advice(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    no_room = {"rank": 1, "rows": 0, "where": "forward", "block": 1, "from_step": 5, "times": 1}
    batch = {"global_batch_size": 2, "per_device_batch_size": 1}
    run = train(tmp_path / "run", 2, parallel, no_room, codes=[6, 6], batch=batch)
    said = (run.parent / "processes" / "rank-0.err").read_text()
    assert "process 1 ran out of memory in step 3 with 1 sample per micro-batch" in said
    assert "precision.gradient_checkpointing" in said
