"""Rollbacks: once, to the right checkpoint, past the bad steps, and the same after a kill at any point."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train import Recipe, train
from accel_train.checkpoint.rollback_log import (
    ROLLBACKS,
    abandoned,
    apply_rollbacks,
    read_rollbacks,
    remove_abandoned,
    rollbacks_of,
    write_rollbacks,
)
from accel_train.checkpoint.store import checkpoint_folders, folder_of, publish, step_of
from accel_train.core.errors import CheckpointError, TrainingStopped
from accel_train.core.json_io import read_json
from accel_train.core.state import Rollback, TrainState
from tests.support.programs.disk_driver import files
from tests.support.runs import (
    checkpoint,
    event_steps,
    events,
    losses,
    metrics,
    recipe_dict,
    run,
    write_corpus,
    write_recipe_file,
)
from tests.support.wording import assert_golden, raises_golden

POISONED = [14, 15, 16]
RUN: dict[str, Any] = {
    "task": "tests.support.tasks.disk_faults:DiskTask",
    "data": {"shuffle": False},
    "schedule": {"type": "constant", "max_steps": 30, "warmup_steps": 2},
    "checkpoint": {"every_steps": 4, "keep": 2},
    "guard": {"healthy_after_steps": 3, "max_consecutive_skips": 2, "rollback_skip_steps": 4, "lowered_steps": 2},
    "options": {"poisoned": POISONED},
}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in the processes that are compared with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that goes back once, and is not killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder)
    train(Recipe.model_validate(recipe_dict(folder, **RUN)))
    return folder / "run"


def went_back_once(folder: Path) -> None:
    (event,) = events(folder, "rollback")
    assert (event["step"], event["to_step"]) == (16, 8)
    first, last = event["skip_first"], event["skip_last"]
    assert 8 < first <= 14 < 16 <= last < 20
    assert re.findall(r"\d+", event["message"]) == ["1", "3", "8", str(first), str(last)]
    (record,) = read_json(folder / ROLLBACKS)
    assert record == {name: event[name] for name in record}
    assert list(losses(folder)) == [*range(1, first), *range(last + 1, 31)]
    assert not any(record["skipped"] for record in metrics(folder))
    assert read_json(folder / "summary.json")["steps"] == 30


def test_bad_steps_in_a_row_lead_back_once_to_the_newest_healthy_checkpoint_and_past_them(undisturbed: Path) -> None:
    went_back_once(undisturbed)
    assert event_steps(undisturbed, "skip") == [14, 15, 16]
    saved = event_steps(undisturbed, "checkpoint")
    assert [step for step in saved if step != 12] == [4, 8, 20, 24, 28, 30], "step 16 is not made on the new branch"
    assert read_json(undisturbed / "summary.json")["skipped_steps"] == 3
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint(undisturbed, 30).values())
    assert rollbacks_of(folder_of(undisturbed / "checkpoints", 30)) == read_rollbacks(undisturbed)


def test_with_selective_checkpointing_the_run_goes_back_and_trains_to_the_same_bits(
    corpus: Path, undisturbed: Path
) -> None:
    train(Recipe.model_validate(recipe_dict(corpus, **RUN, precision={"gradient_checkpointing": "selective"})))
    went_back_once(corpus / "run")
    assert same_bits(checkpoint(corpus / "run", 30), checkpoint(undisturbed, 30))


@pytest.mark.faults
def test_two_processes_go_back_together_and_train_the_same(corpus: Path, undisturbed: Path) -> None:
    run(write_recipe_file(corpus, **RUN), processes=2)
    went_back_once(corpus / "run")
    assert losses(corpus / "run") == pytest.approx(losses(undisturbed), rel=1e-5)


def killed_and_resumed(folder: Path, processes: int, **options: Any) -> Path:
    write_corpus(folder)
    faulty = {**RUN, "options": {**RUN["options"], **options}}
    died = run(write_recipe_file(folder, **faulty), processes=processes, expect=None)
    assert died.returncode != 0
    assert not (folder / "run" / "summary.json").exists()
    run(write_recipe_file(folder, **RUN), processes=processes)
    return folder / "run"


@pytest.mark.slow
def test_killed_right_after_the_record_the_run_goes_on_on_the_new_branch_to_the_bit(
    tmp_path: Path, undisturbed: Path
) -> None:
    folder = killed_and_resumed(tmp_path, 1, kill_in_rollback="removal")
    assert events(folder, "resume")[0]["step"] == 8
    went_back_once(folder)
    assert event_steps(folder, "skip") == [14, 15, 16], "the bad steps were not made again"
    assert same_bits(checkpoint(folder, 30), checkpoint(undisturbed, 30))
    summaries = [read_json(place / "summary.json") for place in (folder, undisturbed)]
    assert summaries[0]["skipped_steps"] == summaries[1]["skipped_steps"]


@pytest.mark.faults
@pytest.mark.parametrize(
    "options",
    [
        {"kill_in_rollback": "record"},
        {"kill_in_rollback": "after"},
        {"kill_after_rollback": 2},  # there is no checkpoint of the new branch yet
        {"kill_after_rollback": 9},  # there is one
    ],
    ids=str,
)
def test_killed_at_any_point_of_a_rollback_the_run_ends_with_the_same_weights(
    tmp_path: Path, undisturbed: Path, options: dict[str, Any]
) -> None:
    folder = killed_and_resumed(tmp_path, 1, **options)
    assert same_bits(checkpoint(folder, 30), checkpoint(undisturbed, 30))
    assert read_rollbacks(folder) == read_rollbacks(undisturbed)
    assert [event["to_step"] for event in events(folder, "rollback")] == [8]


@pytest.mark.faults
def test_two_processes_killed_after_a_rollback_end_with_the_same_weights(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    write_corpus(tmp_path / "whole")
    run(write_recipe_file(tmp_path / "whole", **RUN), processes=2)
    folder = killed_and_resumed(tmp_path / "killed", 2, kill_after_rollback=9)
    went_back_once(folder)
    assert same_bits(checkpoint(folder, 30), checkpoint(tmp_path / "whole" / "run", 30))


@pytest.mark.faults
def test_killed_after_the_second_rollback_in_one_region_the_lowered_learning_rate_stays(tmp_path: Path) -> None:
    poisoned = [*POISONED, 20, 21, 22]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name)
    lowered = {**RUN, "options": {"poisoned": poisoned}}
    run(write_recipe_file(tmp_path / "whole", **lowered))
    whole = tmp_path / "whole" / "run"
    second = events(whole, "rollback")[1]
    assert (second["to_step"], second["learning_rate_factor"]) == (8, 0.5)
    faulty = {**lowered, "options": {"poisoned": poisoned, "kill_in_rollback": "removal", "number": 2}}
    assert run(write_recipe_file(tmp_path / "killed", **faulty), expect=None).returncode != 0
    run(write_recipe_file(tmp_path / "killed", **lowered))
    killed = tmp_path / "killed" / "run"
    rates = {record["step"]: record["learning_rate"] for record in metrics(whole)}
    assert rates == {record["step"]: record["learning_rate"] for record in metrics(killed)}
    until = second["lowered_until"]
    assert rates[until] == rates[until + 1] / 2, "the rate is lowered up to there"
    assert [event["number"] for event in events(killed, "rollback")] == [1, 2]
    assert same_bits(checkpoint(whole, 30), checkpoint(killed, 30))


def test_without_a_healthy_checkpoint_the_run_stops_and_says_why(corpus: Path) -> None:
    recipe = {**RUN, "guard": {**RUN["guard"], "healthy_after_steps": 20}}
    with raises_golden(TrainingStopped):
        train(Recipe.model_validate(recipe_dict(corpus, **recipe)))
    assert not (corpus / "run" / ROLLBACKS).exists()
    assert [step_of(folder) for folder in checkpoint_folders(corpus / "run" / "checkpoints")] == [4, 8, 12]


FIRST = Rollback(number=1, at_step=16, to_step=8, skip_first=11, skip_last=16, num_skipped_steps=3)
SECOND = Rollback(number=2, at_step=30, to_step=12, skip_first=20, skip_last=30, num_skipped_steps=5)


def save_after(root: Path, step: int, rollbacks: list[Rollback]) -> Path:
    content = files(step)
    state = {"step": step, "rollbacks": [vars(each) for each in rollbacks]}
    text = json.dumps({"state": state, "identity": {}, "settings": {}, "origins": {}})
    return publish(root, step, {**content, "trainer.json": lambda path: path.write_text(text)})


def test_only_checkpoints_of_branches_that_were_given_up_are_abandoned(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_after(root, 8, [])
    old = save_after(root, 20, [])
    of_the_first_branch = save_after(root, 16, [FIRST])
    kept = [save_after(root, 12, [FIRST]), save_after(root, 24, [FIRST, SECOND])]
    assert abandoned(root, []) == []
    assert abandoned(root, [FIRST]) == [old]
    assert abandoned(root, [FIRST, SECOND]) == [of_the_first_branch, old]
    remove_abandoned(root, [FIRST, SECOND])
    assert [step_of(folder) for folder in checkpoint_folders(root)] == [8, 12, 24]
    assert all(folder.is_dir() for folder in kept)


def test_a_broken_checkpoint_is_not_removed_as_abandoned_so_that_a_resume_can_name_it(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    broken = save_after(root, 20, [FIRST])
    (broken / "trainer.json").write_bytes(b"{")
    assert abandoned(root, [FIRST]) == []


def test_record_is_read_as_it_was_written_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    assert read_rollbacks(tmp_path) == []
    write_rollbacks(tmp_path, [FIRST, SECOND])
    assert read_rollbacks(tmp_path) == [FIRST, SECOND]
    for damage in (b"[{", b"{}\0", b'[{"number": 1}]', b'{"a": 1}', b"[" * 100_000):
        (tmp_path / ROLLBACKS).write_bytes(damage)
        with pytest.raises(CheckpointError) as refused:
            read_rollbacks(tmp_path)
        assert_golden(re.sub(r"\(.*\)", "(#)", str(refused.value)))


def test_restored_counters_are_told_of_a_rollback_after_them_and_only_of_that() -> None:
    state = TrainState(step=8, num_skipped_steps=1)
    apply_rollbacks(state, [FIRST])
    assert (state.rollbacks, state.last_incident, state.num_skipped_steps) == ([FIRST], 16, 3)
    later = TrainState(step=24, num_skipped_steps=4, last_incident=22, rollbacks=[FIRST])
    apply_rollbacks(later, [FIRST])
    assert (later.last_incident, later.num_skipped_steps) == (22, 4)
