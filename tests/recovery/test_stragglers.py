"""A slow process is named with what is slow, and no collective waits forever."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accel_train import Recipe
from accel_train.core.state import Choice
from accel_train.parallel.ddp import Ddp
from accel_train.recipe.parallel import Parallel
from accel_train.recovery.stragglers import StragglerWatch, Work, slow_part, slowest
from accel_train.runtime.process_group import WATCHED_SECONDS
from tests.support.marks import slow
from tests.support.processes import Forked, run_forked
from tests.support.programs import collective
from tests.support.runs import LLAMA, events, recipe_dict, write_recipe_file

GUARD = {"straggler_window_steps": 4, "straggler_windows": 2, "hang_timeout_seconds": 50}


def start(folder: Path, started: list[Forked], processes: int, slow: dict[str, Any], **sections: Any) -> Forked:
    (folder / "timeouts").mkdir()
    recipe = write_recipe_file(
        folder,
        task="tests.support.tasks.process_faults:FaultTask",
        guard=GUARD,
        schedule={"max_steps": 24},
        options={"slow": slow, "timeouts": str(folder / "timeouts")},
        **sections,
    )
    forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes")
    started.append(forked)
    forked.expect(0, 60)
    return forked


@pytest.mark.parametrize(
    ("processes", "rank", "what", "slow"),
    [
        (2, 1, "read", "data"),
        slow(2, 1, "block", "compute", id="fsdp2"),
        slow(3, 2, "step", "compute"),
    ],
)
def test_slow_process_is_named_once_with_what_is_slow(
    corpus: Path, started: list[Forked], processes: int, rank: int, what: str, slow: str
) -> None:
    batch = {"global_batch_size": 6}
    parallel = {"strategy": "fsdp2" if what == "block" else "ddp"}
    forked = start(corpus, started, processes, {"rank": rank, what: 0.1}, batch=batch, parallel=parallel)
    [told] = events(corpus / "run", "straggler")
    # Two windows, and one for the figures to arrive.
    assert (told["rank"], told["slow"], told["step"]) == (rank, slow, 12)
    assert 0.1 <= told["seconds"] < 1  # a sleep is never shorter than asked, and on a busy machine longer
    assert told["usual_seconds"] < told["seconds"] / 2
    part = {"data": "reading data", "compute": "the forward"}[slow]
    who = f"rank {rank} (process {forked.pids[rank]} on {socket.gethostname()})"
    assert told["message"].startswith(f"{who} ")
    assert f"{part} takes {1000 * told['seconds']:.0f} ms" in told["message"]
    assert told["message"].endswith(" 8 steps up to 8")
    assert who in (corpus / "processes" / "rank-0.out").read_text()  # a line on the screen as well


@pytest.mark.parametrize(
    ("processes", "parallel", "num_groups"),
    [
        slow(2, {}, 1, id="ddp"),
        pytest.param(4, {"strategy": "fsdp2", "dp_shard_size": 2}, 5, id="hsdp"),
        slow(4, {"strategy": "fsdp2", "tp_size": 2}, 5, id="fsdp2-tp"),
        slow(2, {"strategy": "fsdp2", "tp_size": 2}, 2, id="tp"),
        slow(2, {"strategy": "deepspeed"}, 1, id="zero"),
    ],
)
def test_processes_that_are_all_slow_are_no_stragglers_and_the_watchdog_alone_limits_collectives_of_all_groups(
    corpus: Path, started: list[Forked], processes: int, parallel: dict[str, Any], num_groups: int
) -> None:
    slow = {"rank": -1, "read": 0.06, "step": 0.06}
    start(corpus, started, processes, slow, parallel=parallel, model={"config": LLAMA})
    assert events(corpus / "run", "straggler") == []
    for rank in range(processes):
        lines = (corpus / "timeouts" / f"rank-{rank}.jsonl").read_text().splitlines()
        at_steps: list[dict[str, float]] = [json.loads(line) for line in lines]
        assert len(at_steps[0]) >= num_groups
        assert {seconds for each in at_steps for seconds in each.values()} == {WATCHED_SECONDS}


def test_collective_that_a_peer_never_comes_to_ends_at_the_new_limit(tmp_path: Path, started: list[Forked]) -> None:
    arguments = ["{rank}", str(tmp_path / "store"), "1"]
    forked = run_forked(arguments, 2, folder=tmp_path / "processes", program=Path(collective.__file__))
    started.append(forked)
    deadline = time.monotonic() + 60
    while forked.exit_codes()[0] is None and time.monotonic() < deadline:
        time.sleep(0.01)
    seconds, is_of_a_peer, _ = (tmp_path / "processes" / "rank-0.out").read_text().split()
    assert 0.75 < float(seconds) < 10
    assert is_of_a_peer == "True"


def works(*own: tuple[float, float], whole: float = 1.0) -> list[Work]:
    return [Work(data, forward, whole) for data, forward in own]


@pytest.mark.parametrize(
    ("figures", "rank"),
    [
        (works((0.1, 0.2), (0.1, 0.2)), None),
        (works((0.1, 0.2), (0.1, 0.4)), 1),
        (works((0.3, 0.2), (0.1, 0.2)), 0),
        (works((0.1, 0.2), (0.1, 0.34)), None),  # 1.47 times
        (works((0.001, 0.002), (0.001, 0.02)), None),  # 7 times, and 2 % of a step
        (works((0.001, 0.002), (0.001, 0.02), whole=0.03), 1),
        (works((0.0, 0.2), (0.0, 0.2), (0.0, 0.5), (0.0, 0.2)), 2),
        (works((0.0, 0.5), (0.0, 0.5), (0.0, 0.5), (0.0, 0.2)), None),  # one that is fast keeps nobody waiting
        (works((0.0, 0.0), (0.0, 0.0)), None),
    ],
)
def test_straggler_is_far_above_the_median_by_a_part_of_the_step(figures: list[Work], rank: int | None) -> None:
    assert slowest(figures, 1.5) == rank


def test_what_is_slow_is_the_part_that_is_furthest_above_the_usual() -> None:
    assert slow_part(works((0.1, 0.2), (0.5, 0.3), (0.1, 0.2)), 1) == ("reading data", 0.5, 0.1)
    assert slow_part(works((0.1, 0.2), (0.2, 0.4), (0.1, 0.2)), 1) == ("the forward", 0.4, 0.2)


class Slow(nn.Module):
    def forward(self, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        return torch.zeros(())


def run_of(folder: Path, module: nn.Module, accelerator: Any = None) -> Any:
    strategy = Ddp(Parallel(), Choice(1, "one process"))
    strategy.attach(Accelerator(cpu=True))
    strategy.inner = module  # type: ignore[assignment]
    recipe = Recipe.model_validate(recipe_dict(folder))
    plan = SimpleNamespace(recipe=recipe, choices={"precision.compile": Choice("no", "")})
    return SimpleNamespace(plan=plan, accelerator=accelerator or strategy.accelerator, strategy=strategy)


def test_reading_and_forwards_of_training_are_counted_and_nothing_else(tmp_path: Path) -> None:
    module = Slow()
    watch = StragglerWatch(run_of(tmp_path, module))
    assert not watch.is_on  # one process is compared with nobody

    def batches() -> Iterator[float]:
        for _ in range(4):
            time.sleep(0.02)
            yield 0.01

    given = batches()
    assert watch.reading(given) is given
    watch.is_on = True
    for batch in watch.reading(given):
        module(batch)
        module(batch)
        module.eval()(0.03)
        module.train()
    work = watch.take()
    assert 0.02 <= work.data < 0.05
    assert 0.02 <= work.forward < 0.05  # two micro-batches a step, and not what is evaluated
    assert work.whole > 0.068
    module(0.01)
    assert watch.take().own == 0  # nothing is read any more, so nothing is timed


def test_on_a_device_forwards_are_timed_by_events_that_are_read_once_they_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []
    passed = 0

    class Event:
        """The n-th event that is recorded passes n seconds after the first."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(self)

        def query(self) -> bool:
            return recorded.index(self) < passed

        def elapsed_time(self, end: "Event") -> float:
            assert end.query(), "the host would wait"
            return 1000.0 * (recorded.index(end) - recorded.index(self))

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    module = nn.Identity()
    watch = StragglerWatch(run_of(tmp_path, module, SimpleNamespace(device=torch.device("cuda"), num_processes=2)))
    for _ in watch.reading(iter(range(4))):
        module(torch.ones(()))
        passed = max(0, len(recorded) - 2)  # the device is one forward behind
    assert len(recorded) == 8
    assert watch.take().forward == 3 / 4
    passed = 8
    assert watch.take().forward == 1
