"""Known bugs of training code are caught: `python -m benchmarks.planted` plants all of them, and this file some."""

import re
from pathlib import Path

import pytest

from benchmarks.planted import BUGS, Bug, is_caught, plant
from tests.support.runs import REPOSITORY

QUICK = ("gradients are unscaled twice", "all processes draw the same random numbers", "padding counts in the loss")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_can_still_be_planted_and_its_test_exists(bug: Bug, tmp_path: Path) -> None:
    plant(bug, tmp_path)
    file, _, names = bug.test.partition(" ")
    assert re.search(rf"def \w*{names}", (REPOSITORY / file).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in QUICK], ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug) -> None:
    caught, line = is_caught(bug)
    assert caught, line


@pytest.mark.slow
def test_a_copy_without_a_bug_passes() -> None:
    bug = next(bug for bug in BUGS if bug.name == QUICK[0])
    assert not is_caught(bug._replace(wrong=bug.right))[0]


def test_the_page_of_guarantees_names_each_bug() -> None:
    page = (REPOSITORY / "docs" / "guarantees.md").read_text()
    rows = {bug.name: f"| {bug.name} | {bug.thread} | `{bug.test.partition(' ')[0]}` |" for bug in BUGS}
    assert [name for name, row in rows.items() if row not in page] == []
