"""Known-good checkpoints: tags come after enough clean steps, survive kills, and fit one checkpoint only."""

import json
import os
from pathlib import Path

import pytest

from accel_train.checkpoint.health import TAGS, Health, add_tags, healthy_steps, protected_steps
from accel_train.checkpoint.store import folder_of, publish, remove
from tests.support.programs.disk_driver import files


def save(root: Path, *steps: int, mark: str = "") -> None:
    for step in steps:
        publish(root, step, files(step, mark))


def note(health: Health, steps: range, bad: tuple[int, ...] = ()) -> None:
    for step in steps:
        health.note(step, clean=step not in bad)


def counting(root: Path, *saved: int) -> Health:
    """Of checkpoints that are healthy after five clean steps."""
    health = Health(root, 5, None)
    save(root, *saved)
    for step in saved:
        health.begun(step)
    return health


def test_a_checkpoint_is_healthy_after_so_many_clean_steps_in_a_row(tmp_path: Path) -> None:
    health = counting(tmp_path, 10)
    note(health, range(11, 15))
    assert healthy_steps(tmp_path) == set()
    note(health, range(15, 16))
    assert healthy_steps(tmp_path) == {10}
    assert json.loads((tmp_path / TAGS).read_text())["steps"].keys() == {"10"}


def test_a_bad_step_makes_the_count_begin_anew_for_all_that_wait(tmp_path: Path) -> None:
    health = counting(tmp_path, 10, 12)
    note(health, range(11, 18), bad=(13,))
    assert healthy_steps(tmp_path) == set()
    note(health, range(18, 19))
    assert healthy_steps(tmp_path) == {10, 12}


def test_a_checkpoint_that_reaches_the_disk_late_is_healthy_as_soon_as_it_does(tmp_path: Path) -> None:
    health = Health(tmp_path, 5, None)
    health.begun(10)
    note(health, range(11, 19), bad=(17,))
    assert healthy_steps(tmp_path) == set()
    save(tmp_path, 10)
    health.tag()
    assert healthy_steps(tmp_path) == {10}, "11 to 15 were clean, and what came later takes nothing back"


def test_a_checkpoint_that_was_never_written_holds_up_no_other(tmp_path: Path) -> None:
    health = Health(tmp_path, 5, None)
    health.begun(10)
    health.begun(12)
    save(tmp_path, 12)
    note(health, range(13, 18))
    assert healthy_steps(tmp_path) == {12}
    save(tmp_path, 10)
    note(health, range(18, 19))
    assert healthy_steps(tmp_path) == {12}


@pytest.mark.parametrize("killed_after", range(10, 20))
def test_after_a_kill_tags_come_at_the_same_steps_as_without_one(tmp_path: Path, killed_after: int) -> None:
    save(tmp_path, 8, 10)
    bad = 11
    health = Health(tmp_path, 5, None)
    note(health, range(11, killed_after + 1), bad=(bad,))
    before = healthy_steps(tmp_path)
    assert before == (set() if killed_after < 16 else {8, 10})
    # Resumed from the checkpoint of step 10, whose counters do not know of the bad step: it is made again.
    health = Health(tmp_path, 5, None)
    note(health, range(11, 16), bad=(bad,))
    assert healthy_steps(tmp_path) == before
    note(health, range(16, 17))
    assert healthy_steps(tmp_path) == {8, 10}


def test_resumed_right_after_a_bad_step_the_row_of_clean_ones_goes_on_where_it_was(tmp_path: Path) -> None:
    save(tmp_path, 8, 12)
    health = Health(tmp_path, 5, last_bad_step=10)
    note(health, range(13, 15))
    assert healthy_steps(tmp_path) == set()
    note(health, range(15, 17))
    assert healthy_steps(tmp_path) == {8}, "11 to 15 are five steps, and 13 to 16 are four"
    note(health, range(17, 18))
    assert healthy_steps(tmp_path) == {8, 12}


def test_a_tag_goes_with_its_checkpoint_and_another_one_of_the_step_does_not_inherit_it(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    add_tags(tmp_path, [10, 20])
    assert healthy_steps(tmp_path) == {10, 20}
    remove(folder_of(tmp_path, 10))
    assert healthy_steps(tmp_path) == {20}
    save(tmp_path, 10, mark="of another branch")
    assert healthy_steps(tmp_path) == {20}
    add_tags(tmp_path, [30, 40])
    assert json.loads((tmp_path / TAGS).read_text())["steps"].keys() == {"20", "30"}


def test_after_going_back_what_came_later_counts_no_more(tmp_path: Path) -> None:
    health = counting(tmp_path, 10, 20)
    note(health, range(11, 25), bad=(24,))
    health.go_back(10)
    remove(folder_of(tmp_path, 20))
    note(health, range(11, 13))
    save(tmp_path, 12)
    health.begun(12)
    note(health, range(13, 17))
    assert healthy_steps(tmp_path) == {10}, "4 steps after 12"
    note(health, range(17, 18))
    assert healthy_steps(tmp_path) == {10, 12}


def test_damaged_tags_are_no_tags(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for damage in (b"", b"[]", b'{"steps": [10]}', b'{"steps": {"10": 5}}', b'{"steps": {"x": "y"}}', b"[" * 100_000):
        (tmp_path / TAGS).write_bytes(damage)
        assert healthy_steps(tmp_path) == set()
    assert add_tags(tmp_path, [10])
    assert healthy_steps(tmp_path) == {10}


def test_tags_that_cannot_be_written_are_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save(root, 10)
    health = Health(root, 5, None)
    (root / TAGS).mkdir()  # nothing can take its place
    note(health, range(11, 17))
    assert healthy_steps(root) == set()
    (root / TAGS).rmdir()
    note(health, range(17, 18))
    assert healthy_steps(root) == {10}
    assert not [name for name in os.listdir(root) if name.endswith(".tmp")]


def test_other_processes_do_nothing(tmp_path: Path) -> None:
    health = Health(None, 1, None)
    health.begun(1)
    note(health, range(2, 9))
    health.go_back(1)
    assert list(tmp_path.iterdir()) == []


def test_rotation_spares_the_newest_healthy_checkpoint_and_the_first_one_after_it(tmp_path: Path) -> None:
    assert protected_steps(tmp_path) == {-1}
    save(tmp_path, 10, 20, 30, 40)
    assert protected_steps(tmp_path) == {-1, 10}
    add_tags(tmp_path, [10, 20])
    assert protected_steps(tmp_path) == {20, 30}
    add_tags(tmp_path, [40])
    assert protected_steps(tmp_path) == {40}
