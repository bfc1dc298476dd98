"""Out of memory: every process continues with smaller micro-batches, and the run stays the same."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.data.batch_sizes import resolve_batch
from accel_train.data.order import DataOrder
from accel_train.recipe.schema import Batch
from accel_train.recovery.out_of_memory import CAREFUL_STEPS, NewSizes, block_table, smaller_micro_batches
from tests.support.marks import slow
from tests.support.number_faults import launch
from tests.support.processes import run_forked
from tests.support.runs import checkpoint, events, losses, metrics, recipe_dict, write_corpus, write_recipe_file
from tests.support.wording import assert_golden
from tests.system.test_models import MIXTURE


def run_in(folder: Path, *, processes: int, expect: int = 0, **sections: Any) -> str:
    """What the processes wrote to standard error; each ends with the exit code that is expected."""
    folder.mkdir(exist_ok=True)
    write_corpus(folder)
    recipe = write_recipe_file(folder, **{"schedule": {"max_steps": 5}, **sections})
    forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes")
    codes = forked.wait()
    said = "".join(forked.stderr(rank) for rank in range(processes))
    assert codes == [expect] * processes, said
    return said


@pytest.mark.parametrize(
    ("processes", "rank", "where"),
    [
        (1, 0, "forward"),
        (2, 1, "backward"),
        *(slow(*each) for each in ((1, 0, "backward"), (2, 1, "forward"), (2, 0, "forward"), (2, 0, "backward"))),
    ],
)
def test_all_processes_halve_the_micro_batch_until_it_fits_and_the_curve_is_the_same(
    tmp_path: Path, processes: int, rank: int, where: str
) -> None:
    rows = 8 // processes // 2 - (processes == 1)  # 3 of 8 rows, or 2 of 4
    run_in(tmp_path / "clean", processes=processes, options={"ragged": True})
    run_in(
        tmp_path / "tight",
        processes=processes,
        options={"ragged": True, "no_room": {"rank": rank, "rows": rows, "where": where}},
    )
    clean, tight = losses(tmp_path / "clean/run"), losses(tmp_path / "tight/run")
    assert tight == pytest.approx(clean, rel=1e-6)
    told = events(tmp_path / "tight/run", "out_of_memory")
    assert len(told) == (2 if processes == 1 else 1)
    assert told[0]["step"] == 1
    assert told[0]["ranks"] == [rank]
    for number, event in enumerate(told):
        assert_golden(event["message"], f"event {number}")


@pytest.mark.parametrize("from_step", [1, 3])
def test_the_router_loss_of_a_mixture_is_the_same_after_one_process_ran_out_of_memory(
    tmp_path: Path, from_step: int
) -> None:
    sections: dict[str, Any] = {"model": {"config": MIXTURE}, "schedule": {"max_steps": 4}}
    run_in(tmp_path / "whole", processes=1, **sections)
    limit = {"no_room": {"rank": 1, "rows": 2, "where": "forward", "from_step": from_step}}
    run_in(tmp_path / "cut", processes=2, options=limit, **sections)
    assert len(events(tmp_path / "cut/run", "out_of_memory")) == 1
    whole, cut = (
        [(each["step_loss"], each["router_aux_loss"], each["grad_norm"]) for each in metrics(tmp_path / name / "run")]
        for name in ("whole", "cut")
    )
    assert cut == [pytest.approx(each, rel=1e-6) for each in whole]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank"), [slow("forward", 0), ("backward", 1)])
@pytest.mark.parametrize(
    "sections",
    [{}, slow({"checkpoint": {"every_steps": 4}, "evaluate": {"every_steps": 4}})],
    ids=["plain", "due after that step"],
)
def test_memory_that_runs_out_late_on_one_of_several_processes_costs_no_step(
    tmp_path: Path, where: str, rank: int, sections: dict[str, Any]
) -> None:
    """In step 4, whose like there was before: the others are in the backward pass, and wait for
    this process's buckets.
    """
    sections = {"schedule": {"max_steps": 8}, **sections}
    run_in(tmp_path / "clean", processes=2, options={"ragged": True}, **sections)
    no_room = {"rank": rank, "rows": 2, "where": where, "from_step": 4}
    run_in(tmp_path / "tight", processes=2, options={"ragged": True, "no_room": no_room}, **sections)
    clean, tight = losses(tmp_path / "clean/run"), losses(tmp_path / "tight/run")
    assert tight == pytest.approx(clean, rel=1e-6)
    [told] = events(tmp_path / "tight/run", "out_of_memory")
    assert (told["step"], told["ranks"]) == (4, [rank])
    assert_golden(told["message"])
    assert not events(tmp_path / "tight/run", "skip")


@pytest.mark.slow
def test_a_step_that_memory_ran_out_of_leaves_no_trace_in_batch_norm(tmp_path: Path) -> None:
    """Nor does the one that was begun before the processes heard of it."""
    options = {"counts_forwards": True, "no_room": {"rank": 1, "rows": 2, "where": "backward", "from_step": 4}}
    run_in(tmp_path / "tight", processes=2, options=options, schedule={"max_steps": 8})
    found = checkpoint(tmp_path / "tight/run", 8)
    [count] = [int(value) for name, value in found.items() if name.endswith("num_batches_tracked")]
    assert count == 3 + 2 * 5


@pytest.mark.slow
def test_fp16_keeps_its_loss_scale_where_memory_ran_out(corpus: Path) -> None:
    seen = {}
    for name, options in (
        ("clean", {}),
        ("tight", {"no_room": {"rank": 1, "rows": 2, "where": "backward", "from_step": 4}}),
    ):
        recipe = recipe_dict(corpus, output_dir=str(corpus / name), options=options, schedule={"max_steps": 6})
        (corpus / f"seen {name}").mkdir()
        plan = {"recipe": recipe, "out": str(corpus / f"seen {name}"), "fp16_scale": 1024.0}
        seen[name] = launch(plan, processes=2)
    for clean, tight in zip(seen["clean"], seen["tight"], strict=True):
        assert clean["loss_scale"] == tight["loss_scale"] == 1024.0
        assert list(tight["losses"].values()) == pytest.approx(list(clean["losses"].values()), rel=1e-3)
        assert tight["skipped"] == []
    assert events(corpus / "tight", "out_of_memory")


def test_one_sample_that_does_not_fit_ends_the_run_with_exit_code_6_and_advice(tmp_path: Path) -> None:
    said = run_in(
        tmp_path / "full", processes=2, expect=6, options={"no_room": {"rank": 1, "rows": 0, "where": "forward"}}
    )
    assert [said.count(f"error: rank {rank}: ") for rank in (0, 1)] == [1, 1]
    for fact in ("process 1 ran", "1 sample per micro-batch", "precision.gradient_checkpointing"):
        assert fact in said


def test_evaluation_that_does_not_fit_is_done_in_smaller_pieces_with_the_same_result(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"evaluate": {"every_steps": 2}}
    run_in(tmp_path / "clean", processes=1, **sections)
    run_in(tmp_path / "tight", processes=1, options={"no_room_to_evaluate": 3}, **sections)
    clean, tight = (evaluation_losses(tmp_path / name / "run") for name in ("clean", "tight"))
    assert tight == pytest.approx(clean, rel=1e-6)


def evaluation_losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder, "eval")]


@pytest.mark.slow
def test_care_for_the_first_steps_changes_no_bit(tmp_path: Path) -> None:
    """Stopped at step 3 and resumed: steps 4 and 5 are then the first ones of a sitting. Four processes, whose sums are
    rounded by place.
    """
    sections: dict[str, Any] = {"schedule": {"max_steps": 8}, "checkpoint": {"every_steps": 3}}
    run_in(tmp_path / "whole", processes=4, **sections)
    run_in(tmp_path / "cut", processes=4, expect=75, **sections, options={"term_at": {"step": 3, "rank": 2}})
    run_in(tmp_path / "cut", processes=4, **sections)
    whole, cut = checkpoint(tmp_path / "whole/run", 8), checkpoint(tmp_path / "cut/run", 8)
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[name].numpy(), cut[name].numpy()) for name in whole)


def test_new_sizes_are_the_first_steps_and_longer_samples_than_ever() -> None:
    plain = NewSizes(DataOrder(64, 8, seed=0))
    assert [plain.is_new(step) for step in range(5)] == [True] * CAREFUL_STEPS + [False] * (5 - CAREFUL_STEPS)
    lengths = np.array([5] * 40 + [9] * 8 + [7] * 16)
    in_order = DataOrder(64, 8, seed=0, shuffle=False, lengths=lengths)
    longest = [int(lengths[in_order.step_samples(step)].max()) for step in range(8)]
    watch = NewSizes(in_order)
    assert [watch.is_new(step) for step in range(8)] == [
        step < CAREFUL_STEPS or longest[step] > max(longest[:step]) for step in range(8)
    ]


@pytest.mark.parametrize(
    ("total", "per_device", "smaller"),
    [(24, 12, [6, 3, 1]), (24, 8, [4, 2, 1]), (10, 5, [2, 1]), (7, 7, [1]), (4, 1, [])],
)
def test_smaller_micro_batches_divide_the_share_and_are_half_at_most(
    total: int, per_device: int, smaller: list[int]
) -> None:
    sizes = resolve_batch(Batch(global_batch_size=total, per_device_batch_size=per_device), 1)
    found = []
    while (next_sizes := smaller_micro_batches(sizes)) is not None:
        sizes = next_sizes
        found.append(sizes.per_device_batch_size)
        assert sizes.per_device_batch_size * sizes.gradient_accumulation_steps == total
    assert found == smaller


def test_a_micro_batch_that_the_recipe_fixes_is_remembered_for_the_next_start(tmp_path: Path) -> None:
    sections = {
        "batch": {"global_batch_size": 8, "per_device_batch_size": 8},
        "options": {"no_room": {"rank": 0, "rows": 3, "where": "forward"}},
        "schedule": {"max_steps": 2},
    }
    run_in(tmp_path, processes=1, **sections)
    run_in(tmp_path, processes=1, output_dir=str(tmp_path / "next"), **sections)
    assert len(events(tmp_path / "run", "out_of_memory")) == 2
    assert not events(tmp_path / "next", "out_of_memory")
    [line] = [line for line in (tmp_path / "processes/rank-0.out").read_text().splitlines() if "because" in line]
    assert_golden(re.sub(r"found [\d-]+|\b[0-9a-f]{32}\b", "#", line))
    assert losses(tmp_path / "next") == losses(tmp_path / "run")


MIB = 2**20


def block(size: int, state: str = "active_allocated") -> dict[str, object]:
    return {"size": size, "requested_size": size, "address": 0, "state": state}


def test_the_blocks_that_take_most_memory_together_come_first_and_free_ones_do_not_count() -> None:
    segments = [
        {"total_size": 20 * MIB, "blocks": [block(6 * MIB), block(4 * MIB, "inactive"), block(4 * MIB)]},
        {"total_size": 12 * MIB, "blocks": [block(4 * MIB), block(2 * MIB), block(6 * MIB, "active_pending_free")]},
    ]
    heading, _, _, *rows = block_table(segments).splitlines()
    assert re.findall(r"[\d.]+ MiB", heading) == ["16.0 MiB", "32.0 MiB"]
    assert [row.split() for row in rows] == [
        ["4.0", "MiB", "2", "8.0", "MiB", "50.0%"],
        ["6.0", "MiB", "1", "6.0", "MiB", "37.5%"],
        ["2.0", "MiB", "1", "2.0", "MiB", "12.5%"],
    ]


def test_no_block_at_all_is_a_table_without_rows() -> None:
    assert len(block_table([]).splitlines()) == 3
