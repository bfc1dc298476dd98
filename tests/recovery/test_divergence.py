"""Weights that differ between processes are found at the next check, named, and gone back on."""

from pathlib import Path

import pytest
import torch

from accel_train.recovery.divergence import checksums
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.runs import checkpoint, events, losses, write_recipe_file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_one_flipped_bit_changes_the_checksum_of_its_tensor_and_no_other(dtype: torch.dtype) -> None:
    tensors = [torch.arange(24).reshape(4, 6).to(dtype) for _ in range(3)]
    before = checksums(tensors)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensors[1].element_size()]
    tensors[1].view(-1).view(bits)[7] ^= 1
    after = checksums(tensors)
    assert (before == after).tolist() == [True, False, True]
    assert int(before.min()) >= 0


def test_checksums_are_of_negative_zero_and_nan_as_of_other_bits() -> None:
    zero, negative, nan = torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([float("nan")])
    assert len(set(checksums([zero, negative, nan]).tolist())) == 3


@pytest.mark.parametrize(("processes", "rank"), [slow(2, 1), (3, 1)])
def test_a_weight_that_changes_on_one_process_is_found_within_the_check_interval_and_gone_back_on(
    corpus: Path, processes: int, rank: int
) -> None:
    recipe = write_recipe_file(
        corpus,
        task="tests.support.tasks.process_faults:FaultTask",
        batch={"global_batch_size": 6},
        schedule={"max_steps": 30},
        checkpoint={"every_steps": 6, "keep": 4},
        guard={"drift_check_steps": 5, "healthy_after_steps": 3},
        options={"flip_at": {"step": 17, "rank": rank}},
    )
    forked = run_forked(["run", str(recipe)], processes, folder=corpus / "processes")
    forked.expect(0)
    [drift] = events(corpus / "run", "drift")
    assert drift["step"] == 18  # a checkpoint was due there, and is not made of what differs
    assert drift["parameters"] == ["transformer.wte.weight", "transformer.ln_f.bias"]  # the first and the last
    assert (f"rank {rank}" in drift["message"]) == (processes == 3)  # no majority of two
    [rollback] = events(corpus / "run", "rollback")
    assert (rollback["at_step"], rollback["to_step"]) == (18, 12)
    assert max(losses(corpus / "run")) == 30
    assert checkpoint(corpus / "run", 30)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_a_part_that_differs_from_its_copy_is_found_with_several_copies_of_a_model(corpus: Path, rank: int) -> None:
    recipe = write_recipe_file(
        corpus,
        task="tests.support.tasks.process_faults:FaultTask",
        parallel={"strategy": "fsdp2", "dp_shard_size": 2},
        schedule={"max_steps": 12},
        checkpoint={"every_steps": 4, "keep": 4},
        guard={"drift_check_steps": 3, "healthy_after_steps": 2},
        options={"flip_part_at": {"step": 8, "rank": rank}},
    )
    forked = run_forked(["run", str(recipe)], 4, folder=corpus / "processes")
    forked.expect(0)
    [drift] = events(corpus / "run", "drift")
    assert (drift["step"], drift["parameters"]) == (8, ["transformer.h.1.ln_2.weight"])
    [rollback] = events(corpus / "run", "rollback")
    assert (rollback["at_step"], rollback["to_step"]) == (8, 4)
    assert max(losses(corpus / "run")) == 12


def test_a_run_that_may_not_go_back_stops_where_its_weights_differ(corpus: Path) -> None:
    recipe = write_recipe_file(
        corpus,
        task="tests.support.tasks.process_faults:FaultTask",
        guard={"drift_check_steps": 5, "max_rollbacks": 0},
        options={"flip_at": {"step": 3, "rank": 1}},
    )
    forked = run_forked(["run", str(recipe)], 2, folder=corpus / "processes")
    assert forked.wait() == [3, 3]
    for fact in ("step 5: ", ": transformer.", "guard.max_rollbacks is 0"):
        assert fact in forked.stderr(0)
