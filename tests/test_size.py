"""The code grows only by decision: each package has a budget of tokens, and a commit that needs more raises it here.

The body of that commit says why. `make size` prints the sizes.
"""

import subprocess

import pytest

from benchmarks.size import ROOT, sizes, tokens_of

BUDGETS: dict[str, int] = {
    "accel_train": 4_150,
    "accel_train/checkpoint": 18_450,
    "accel_train/cli": 15_650,
    "accel_train/core": 11_050,
    "accel_train/data": 77_200,
    "accel_train/engine": 16_850,
    "accel_train/experiments": 64_350,
    "accel_train/guard": 1_950,
    "accel_train/hf": 34_300,
    "accel_train/inference": 18_600,
    "accel_train/metrics": 7_350,
    "accel_train/model": 35_900,
    "accel_train/observe": 15_150,
    "accel_train/optim": 10_250,
    "accel_train/parallel": 17_850,
    "accel_train/plan": 11_750,
    "accel_train/recipe": 17_750,
    "accel_train/recovery": 12_950,
    "accel_train/report": 16_900,
    "accel_train/runtime": 18_450,
    "accel_train/tasks": 75_550,
    "accel_train/training": 19_200,
    "benchmarks": 66_500,
    "tests": 628_350,
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
