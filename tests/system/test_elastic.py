"""A run that goes on with other numbers of processes, and another layout, each time it is stopped or killed: the same
run.
"""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_forked
from tests.support.runs import event_steps, losses, metrics, samples_by_step, write_corpus, write_recipe_file
from tests.support.wording import assert_golden

DDP: dict[str, Any] = {}
FSDP2 = {"strategy": "fsdp2"}
CHAINS = {
    "sharded first": ((2, FSDP2), (1, DDP), (4, FSDP2), (3, DDP), (2, FSDP2)),
    "sharded last": ((2, DDP), (1, FSDP2), (4, DDP), (3, FSDP2), (2, DDP)),
}
STOPS = (12, 25, 38, 50, None)
GLOBAL_BATCH = 12
RUN = {
    "data": {"sequence_length": 64},
    "batch": {"global_batch_size": GLOBAL_BATCH},
    "schedule": {"max_steps": None, "num_epochs": 3},
    "evaluate": {"every_steps": 20},
    "optimizer": {"learning_rate": 3e-3, "lr_scaling": {"rule": "linear", "base_batch_size": 12}},
}


@dataclass
class Leg:
    """One sitting of a run."""

    codes: list[int]
    steps: list[list[int]]
    """The samples of each step that it made, over all processes, in order."""


def sit(folder: Path, name: str, processes: int, parallel: dict[str, Any], **options: Any) -> Leg:
    reads = folder / "reads" / name
    reads.mkdir(parents=True)
    options["record"] = str(reads)
    every_steps = 5 if "kill_at" in options or options.pop("saves", False) else 0
    sections = {**RUN, "parallel": parallel, "options": options, "checkpoint": {"every_steps": every_steps}}
    recipe = write_recipe_file(folder, **sections)
    forked = run_forked(["run", str(recipe)], processes, folder=folder / f"processes {name}")
    codes = forked.wait()
    return Leg(codes, samples_by_step(reads, processes, GLOBAL_BATCH))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_corpus(folder)
    assert sit(folder, "all", 1, DDP).codes == [0]
    return folder / "run"


def assert_same_run(run: Path, uninterrupted: Path) -> None:
    ours, whole = metrics(run), metrics(uninterrupted)
    assert [record["step"] for record in ours] == [record["step"] for record in whole]
    assert [record["loss"] for record in ours] == pytest.approx([record["loss"] for record in whole], rel=1e-5)
    assert [record["learning_rate"] for record in ours] == [record["learning_rate"] for record in whole]
    assert losses(run)[1] - min(losses(run).values()) > 0.5, "the losses do not move, so nothing is compared"
    assert [record["loss"] for record in metrics(run, "eval")] == pytest.approx(
        [record["loss"] for record in metrics(uninterrupted, "eval")], rel=1e-5
    )


@pytest.mark.faults
@pytest.mark.parametrize("chain", CHAINS)
def test_stopped_and_gone_on_with_2_1_4_3_2_processes_no_sample_of_3_epochs_is_repeated_or_lost(
    corpus: Path, uninterrupted: Path, chain: str
) -> None:
    steps: list[list[int]] = []
    for number, ((processes, parallel), stop) in enumerate(zip(CHAINS[chain], STOPS, strict=True)):
        options = {} if stop is None else {"term_at": {"step": stop, "rank": processes - 1}, "first_step": len(steps)}
        leg = sit(corpus, str(number), processes, parallel, **options)
        assert leg.codes == [0 if stop is None else 75] * processes
        steps += leg.steps
        assert stop is None or event_steps(corpus / "run", "preempted")[-1] == len(steps)
    assert len(event_steps(corpus / "run", "resume")) == 4
    read = [index for step in steps for index in step]
    num_samples = max(read) + 1
    assert len(steps) == len(losses(uninterrupted))
    assert len(read) >= 3 * num_samples
    for epoch in range(3):
        assert sorted(read[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    assert_same_run(corpus / "run", uninterrupted)


@pytest.mark.faults
@pytest.mark.parametrize("chain", CHAINS)
def test_killed_and_gone_on_with_2_1_4_3_2_processes_it_is_the_uninterrupted_run(
    corpus: Path, uninterrupted: Path, chain: str
) -> None:
    begun_at = 0
    for number, ((processes, parallel), stop) in enumerate(zip(CHAINS[chain], STOPS, strict=True)):
        kill = {} if stop is None else {"kill_at": {"step": stop + 2, "rank": processes - 1}, "first_step": begun_at}
        leg = sit(corpus, str(number), processes, parallel, saves=True, **kill)
        ended = [0] * processes if stop is None else [*[5] * (processes - 1), -signal.SIGKILL]
        assert leg.codes == ended
        checkpoints = sorted((corpus / "run" / "checkpoints").glob("step-*"))
        begun_at = int(checkpoints[-1].name.removeprefix("step-"))
    resumed = event_steps(corpus / "run", "resume")
    assert len(resumed) == 4
    assert all(step % 5 == 0 for step in resumed)
    assert_same_run(corpus / "run", uninterrupted)


def test_a_world_size_that_cannot_carry_the_global_batch_is_refused_with_those_that_can(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, **{**RUN, "batch": {"global_batch_size": 9}})
    forked = run_forked(["run", str(recipe)], 2, folder=corpus / "processes")
    forked.expect(2)
    (line,) = (line for line in forked.stderr(0).splitlines() if "error: " in line)
    assert_golden(line)
