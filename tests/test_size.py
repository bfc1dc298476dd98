"""The code grows only by decision: each package has a budget of tokens, and a commit that needs more raises it here.

The body of that commit says why. `make size` prints the sizes.
"""

import subprocess

import pytest

from benchmarks.size import ROOT, sizes, tokens_of

BUDGETS: dict[str, int] = {
    "accel_train": 3_800,
    "accel_train/checkpoint": 18_300,
    "accel_train/cli": 15_250,
    "accel_train/core": 11_000,
    "accel_train/data": 70_500,
    "accel_train/engine": 13_300,
    "accel_train/experiments": 58_700,
    "accel_train/guard": 1_950,
    "accel_train/hf": 34_300,
    "accel_train/inference": 18_600,
    "accel_train/metrics": 7_350,
    "accel_train/model": 35_600,
    "accel_train/observe": 14_900,
    "accel_train/optim": 10_250,
    "accel_train/parallel": 17_850,
    "accel_train/plan": 11_650,
    "accel_train/recipe": 16_700,
    "accel_train/recovery": 12_950,
    "accel_train/report": 16_600,
    "accel_train/runtime": 18_450,
    "accel_train/tasks": 74_550,
    "accel_train/training": 19_200,
    "benchmarks": 65_700,
    "tests": 605_350,
}
"""Tokens by package."""


def test_explanations_and_line_breaks_are_free() -> None:
    plain = "def add(a, b):\n    return a + b\n"
    told = 'def add(\n    a,\n    b,\n):\n    """Return the sum."""\n\n    # Of two numbers.\n    return a + b\n'
    assert tokens_of(plain) == 12
    assert tokens_of(told) == 13  # the comma after the last argument


def test_each_package_is_within_its_budget() -> None:
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("needs a git checkout")
    found = sizes()
    assert found.keys() == BUDGETS.keys()
    assert {name: count for name, count in found.items() if count > BUDGETS[name]} == {}
