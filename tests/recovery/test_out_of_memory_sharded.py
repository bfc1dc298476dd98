"""Out of memory where a forward waits for others: exit code 75, then smaller micro-batches."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_train.core.json_io import read_json
from tests.support.marks import slow
from tests.support.processes import Forked, run_forked
from tests.support.runs import LLAMA, event_steps, events, losses, ran, write_corpus, write_recipe_file

PRELOAD = ["deepspeed", "deepspeed.runtime.sequence_parallel.ulysses_sp"]
SECTIONS: dict[str, Any] = {
    "model": {"config": {**LLAMA, "vocab_size": 259}},
    "batch": {"global_batch_size": 8, "per_device_batch_size": 4},
    "schedule": {"max_steps": 6},
    "optimizer": {"learning_rate": 3e-3, "max_grad_norm": 0.5},
    "checkpoint": {"every_steps": 4, "in_background": False},
    "evaluate": {"every_steps": 4},
}


def write_recipe(folder: Path, no_room: dict[str, Any] | None = None, **sections: Any) -> Path:
    folder.mkdir()
    write_corpus(folder)
    options = {"ragged": True} | ({} if no_room is None else {"no_room": no_room})
    return write_recipe_file(folder, **{**SECTIONS, **sections}, options=options)


def start(recipe: Path, processes: int, codes: list[int], **more: Any) -> Forked:
    forked = run_forked(["run", str(recipe)], processes, folder=recipe.parent / "processes", **more)
    assert forked.wait() == codes, "".join(forked.stderr(rank) for rank in range(processes))
    return forked


def error_lines(started: Forked) -> list[str]:
    """The line that each of two processes prints, with its rank."""
    lines = [line for rank in (0, 1) for line in started.stderr(rank).splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in lines] == ["rank 0", "rank 1"]
    return lines


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same run on one process, which has enough memory."""
    recipe = write_recipe(tmp_path_factory.mktemp("one") / "one")
    start(recipe, 1, [0])
    return losses(recipe.parent / "run")


@pytest.mark.parametrize(
    ("parallel", "where", "from_micro_batch"),
    [
        pytest.param({"strategy": "fsdp2"}, "backward", 6, id="fsdp2"),
        *(
            slow(*each, id=name)
            for name, each in {
                "zero-1": ({"strategy": "deepspeed", "zero_stage": 1}, "backward", 6),
                "zero-3": ({"strategy": "deepspeed", "zero_stage": 3}, "forward", 6),
                "tensor": ({"strategy": "fsdp2", "tp_size": 2}, "backward", 12),
                "sequence": ({"sp_size": 2}, "forward", 12),
            }.items()
        ),
    ],
)
def test_all_processes_end_with_75_and_the_next_start_trains_with_what_fits(
    tmp_path: Path, clean: dict[int, float], parallel: dict[str, Any], where: str, from_micro_batch: int
) -> None:
    """Each process has a cache of its own, as on two machines; the recipe fixes the micro-batch."""
    no_room = {"rank": 1, "rows": 2, "where": where, "block": 0, "from_step": from_micro_batch}
    recipe = write_recipe(tmp_path / "tight", no_room, parallel=parallel, data={"cache_dir": "cache"})
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    started = start(recipe, 2, [75, 75], preload=PRELOAD, cwd=str(tmp_path / "{rank}"))
    lines = error_lines(started)
    [event] = events(tmp_path / "tight/run", "out_of_memory")
    for line in (*lines, event["message"]):
        for fact in ("step 6 ", "of 4 samples", "uses 2 samples", "Steps 5 to 6", "checkpoint 4: run the same"):
            assert fact in line
    [record] = tmp_path.glob("*/cache/micro_batches/*.json")
    assert record.is_relative_to(tmp_path / "1")
    assert read_json(record)["per_device_batch_size"] == 2

    started = start(recipe, 2, [0, 0], preload=PRELOAD, cwd=str(tmp_path / "{rank}"))
    announced = (started.folder / "rank-0.out").read_text()
    assert "2  (process 1 holds no more; here 4: as set)" in announced
    assert losses(tmp_path / "tight/run") == pytest.approx(clean, rel=1e-6)
    assert event_steps(tmp_path / "tight/run", "resume") == [4]
    assert not events(tmp_path / "tight/run", "skip")


@pytest.mark.slow
def test_torchrun_restarts_such_a_run_by_itself_and_reports_75_when_no_restart_is_left(
    tmp_path: Path, clean: dict[int, float]
) -> None:
    no_room = {"rank": 0, "rows": 1, "where": "forward", "block": 1, "from_step": 3}
    recipe = write_recipe(tmp_path / "tight", no_room, parallel={"strategy": "fsdp2"})
    torchrun = ["-m", "accel_train.torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    done = ran([sys.executable, *torchrun, "-m", "accel_train", "run", str(recipe)])
    assert done.returncode == 75, done.stderr[-3000:]
    messages = [event["message"] for event in events(tmp_path / "tight/run", "out_of_memory")]
    for message, facts in zip(messages, (("3", "4", "2 samples"), ("2", "2", "1 sample")), strict=True):
        assert re.findall(r"at step (\d+).* of (\d+) samples.* uses (\d+ samples?)\.", message) == [facts]
    start(recipe, 2, [0, 0])
    assert losses(tmp_path / "tight/run") == pytest.approx(clean, rel=1e-6)


def test_one_sample_that_does_not_fit_ends_all_processes_with_exit_code_6_and_advice(tmp_path: Path) -> None:
    no_room = {"rank": 1, "rows": 0, "where": "forward", "block": 1, "from_step": 3}
    batch = {"global_batch_size": 2, "per_device_batch_size": 1}
    recipe = write_recipe(tmp_path / "full", no_room, parallel={"strategy": "fsdp2"}, batch=batch)
    started = start(recipe, 2, [6, 6])
    for line in error_lines(started):
        assert re.search(r"process 1 .* step 3 with 1 sample .*\(CUDA out of memory", line)
        assert line.count("precision.gradient_checkpointing") == 1
