"""Out of memory on a process that holds a part of the model only: all go on with smaller micro-batches, and no step is lost."""

from pathlib import Path
from typing import Any

import pytest

from forked import run_forked
from runs import TINY_MODEL, events, losses, write_corpus, write_recipe_file

ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
SECTIONS: dict[str, Any] = {
    "batch": {"global_batch_size": 16, "per_device_batch_size": 4},
    "schedule": {"max_steps": 6},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5},
    "checkpoint": {"every_steps": 4},
    "evaluate": {"every_steps": 4},
}


def train(
    folder: Path,
    processes: int,
    parallel: dict[str, Any],
    no_room: dict[str, Any] | None,
    codes: list[int] | None = None,
    **sections: Any,
) -> Path:
    """The run folder; the processes end with these codes (0)."""
    folder.mkdir()
    write_corpus(folder)
    options = {"ragged": True} | ({} if no_room is None else {"no_room": no_room})
    recipe = write_recipe_file(
        folder, **{**SECTIONS, **sections}, parallel={"strategy": "fsdp2", **parallel}, options=options
    )
    preload = ["deepspeed"] if parallel.get("strategy") == "deepspeed" else [ULYSSES] if "sp_size" in parallel else []
    forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes", preload=preload)
    assert forked.wait() == (codes or [0] * processes), "".join(forked.stderr(rank) for rank in range(processes))
    return folder / "run"


@pytest.mark.parametrize(
    ("rank", "where", "block", "from_micro_batch"),
    [
        (1, "backward", 0, 6),  # the second micro-batch of step 3, when the last block is reduced
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (0, "forward", 1, 1),
                (1, "forward", 0, 7),  # the first micro-batch of step 4, after which more is due
                (0, "backward", 1, 8),
            )
        ),
    ],
)
def test_memory_that_runs_out_within_a_block_of_one_process_costs_no_step(
    tmp_path: Path, rank: int, where: str, block: int, from_micro_batch: int
) -> None:
    no_room = {"rank": rank, "rows": 2, "where": where, "block": block, "from_step": from_micro_batch}
    clean, tight = (train(tmp_path / name, 2, {}, each) for name, each in (("clean", None), ("tight", no_room)))
    assert_no_step_lost(clean, tight, (from_micro_batch + 1) // 2, rank)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"dp_shard_size": 2}, {"reshard_after_forward": False}], ids=["hsdp", "kept"])
def test_the_same_with_several_copies_of_the_model_and_with_weights_that_stay_gathered(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    processes = 4 if "dp_shard_size" in parallel else 2
    batch = {"global_batch_size": 8 * processes, "per_device_batch_size": 4}
    no_room = {"rank": 1, "rows": 2, "where": "backward", "block": 0, "from_step": 6}
    clean, tight = (
        train(tmp_path / name, processes, parallel, each, batch=batch)
        for name, each in (("clean", None), ("tight", no_room))
    )
    assert_no_step_lost(clean, tight, 3, 1)


WIDE = {
    "config": {**TINY_MODEL, "n_embd": 192}
}  # so that stage 3 gathers weights: it keeps those of fewer than 100,000 elements


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process, which has room for everything."""
    return train(tmp_path_factory.mktemp("one") / "one", 1, {}, None, model=WIDE)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("stage", "rank", "where", "block", "from_micro_batch"),
    [
        (1, 0, "backward", 1, 2),  # in the first step
        (2, 1, "backward", 0, 6),
        (3, 1, "backward", 0, 8),  # in step 4, after which more is due
        (3, 0, "forward", 1, 5),
        (3, 1, "forward", 1, 1),
        (3, 1, "backward", 0, 2),
    ],
)
def test_under_deepspeed_the_same(
    tmp_path: Path, wide: Path, stage: int, rank: int, where: str, block: int, from_micro_batch: int
) -> None:
    no_room = {"rank": rank, "rows": 2, "where": where, "block": block, "from_step": from_micro_batch}
    tight = train(tmp_path / "tight", 2, {"strategy": "deepspeed", "zero_stage": stage}, no_room, model=WIDE)
    assert_no_step_lost(wide, tight, (from_micro_batch + 1) // 2, rank)


def assert_no_step_lost(clean: Path, tight: Path, step: int, rank: int) -> None:
    assert losses(tight) == pytest.approx(losses(clean), rel=1e-6)
    [told] = events(tight, "out_of_memory")
    assert (told["step"], told["ranks"]) == (step, [rank])
    assert "2 per device" in told["message"]
    assert not events(tight, "skip")
