"""Parameters that take no part in the loss: named in the first step, and trained alike on any number of processes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.comparisons import tensors
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.runs import Settings, events, losses, write_recipe_file
from tests.support.wording import assert_golden

Train = Callable[..., Path]
BATCH = {"global_batch_size": 16, "per_device_batch_size": 4}
LR = {"learning_rate": 1e-2, "weight_decay": 0.5, "max_grad_norm": 0.5}


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def to_the_end(name: str, processes: int, options: Settings, code: int = 0, **sections: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        common = {
            "batch": BATCH,
            "optimizer": LR,
            "schedule": {"max_steps": 5},
            "precision": {"mixed_precision": "no"},
            "task": "tests.support.tasks.unused:Unused",
            "windows": False,
            "options": {"num_samples": 64, **options},
        }
        recipe = write_recipe_file(folder, **{**common, **sections})
        forked = run_forked(["run", str(recipe)], processes, folder=folder / "processes")
        assert forked.wait()[0] == code, forked.stderr(0)
        (folder / "stderr").write_text("".join(forked.stderr(rank) for rank in range(processes)))
        return folder / "run"

    return to_the_end


def refusal(train: Train, processes: int, options: Settings, **sections: Any) -> str:
    """What all processes say of a run that is refused."""
    said = (train("refused", processes, options, 2, **sections).parent / "stderr").read_text()
    assert "Traceback" not in said
    return said


def errors_in(said: str) -> list[str]:
    """What each process that speaks says. Which one failed first, and therefore speaks, differs from run to run."""
    return re.findall(r"^error: (?:rank \d[^:]*: )*(.*)", said, re.MULTILINE)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return tensors(run, 5, "model")


def assert_same(run: Path, other: Path) -> None:
    assert losses(run) == pytest.approx(losses(other), rel=1e-6)
    ours, theirs = weights(run), weights(other)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (2, {}),
        (2, {"strategy": "fsdp2"}),
        *(slow(*each) for each in ((2, {"find_unused_parameters": True}), (3, {}))),
    ],
)
@pytest.mark.parametrize("branch", [False, True], ids=["never", "in some micro-batches"])
def test_a_model_with_unused_parameters_trains_on_several_processes_as_on_one(
    train: Train, processes: int, parallel: Settings, branch: bool
) -> None:
    options = {"never": True, "branch": branch}
    batch = {"global_batch_size": 24, "per_device_batch_size": 4}
    one = train("one", 1, options, batch=batch)
    several = train("several", processes, options, batch=batch, parallel=parallel)
    assert_same(several, one)
    assert weights(several)["spare"].eq(1).all(), "not decayed"
    for run in (one, several):
        [told] = events(run, "unused_parameters")
        assert told["parameters"][0] == "spare"
        looks = "fsdp2 looks" if parallel.get("strategy") else "DDP looks"
        assert run is one or looks in told["message"]
        assert run is one or ("between the hosts" in told["message"]) == (looks == "fsdp2 looks")
        assert "model.freeze: ['spare'" in told["message"]


def test_fsdp2_refuses_a_module_that_only_some_processes_compute(train: Train) -> None:
    said = refusal(train, 2, {"layers": 3, "drops": True}, parallel={"strategy": "fsdp2"})
    assert "some processes only" in said
    assert "layers.0.weight" in said


def test_blocks_that_share_a_weight_train_under_fsdp2_as_on_one_process(train: Train) -> None:
    options = {"layers": 3, "shared": True}
    assert_same(train("two", 2, options, parallel={"strategy": "fsdp2"}), train("one", 1, options))


@pytest.mark.slow
def test_copies_are_summed_when_a_layer_takes_no_part_in_the_last_micro_batch(train: Train) -> None:
    options, batch = {"layers": 2, "skips": True}, {"global_batch_size": 32, "per_device_batch_size": 4}
    copies = {"strategy": "fsdp2", "dp_shard_size": 2}
    assert_same(train("several", 4, options, batch=batch, parallel=copies), train("one", 1, options, batch=batch))


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])
def test_a_weight_without_dimensions_is_refused_where_it_would_be_sharded(train: Train, strategy: str) -> None:
    said = refusal(train, 2, {"scalar": True}, parallel={"strategy": strategy})
    assert f"parallel.strategy {strategy} cannot shard scale" in said


@pytest.mark.parametrize("stage", [1, slow(2), slow(3)])
def test_zero_refuses_a_parameter_that_takes_no_part_in_a_later_step(train: Train, stage: int) -> None:
    parallel = {"strategy": "deepspeed", "zero_stage": stage}
    said = refusal(train, 2, {"leaves": {"call": 6, "rank": -1}}, parallel=parallel)
    [error] = set(errors_in(said))
    assert_golden(error)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_refuses_unused_parameters_that_it_would_decay(train: Train, stage: int) -> None:
    parallel = {"strategy": "deepspeed", "zero_stage": stage}
    said = refusal(train, 2, {"never": True}, parallel=parallel)
    [error] = set(errors_in(said))
    assert_golden(error)
    one, two = (
        train(str(count), count, {"never": True}, model={"freeze": ["spare"]}, parallel=parallel if count > 1 else {})
        for count in (1, 2)
    )
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)


def test_nothing_is_said_and_nothing_looked_for_where_all_take_part(train: Train) -> None:
    assert events(train("all", 2, {}), "unused_parameters") == []


@pytest.mark.slow
def test_frozen_parameters_need_no_look(train: Train) -> None:
    model = {"freeze": ["spare"]}
    one, two = (train(str(count), count, {"never": True}, model=model) for count in (1, 2))
    assert_same(two, one)
    assert events(one, "unused_parameters") == events(two, "unused_parameters") == []


@pytest.mark.parametrize("processes", [1, 2])
def test_unused_parameters_are_an_error_where_the_recipe_says_so(train: Train, processes: int) -> None:
    said = refusal(train, processes, {"never": True}, parallel={"find_unused_parameters": False})
    [error] = errors_in(said)
    assert_golden(error)


@pytest.mark.parametrize("rank", [0, -1], ids=["on one process", "on all"])
def test_a_parameter_that_takes_no_part_in_a_later_step_is_one_line(train: Train, tmp_path: Path, rank: int) -> None:
    # 2 micro-batches a step; DDP forwards the last one of the first two steps again, and of the first step twice
    leaves = {"call": 10, "rank": rank}
    said = refusal(train, 2, {"leaves": leaves})
    [error] = set(errors_in(said))
    assert_golden(error)
    assert max(losses(tmp_path / "refused" / "run"), default=0) < 5
    assert train("found", 2, {"leaves": leaves}, parallel={"find_unused_parameters": True}).exists()
