"""The code grows only by decision: each package has a budget of tokens, and a commit that needs more raises it here.

The body of that commit says why. `make size` prints the sizes.
"""

import subprocess

import pytest

from benchmarks.size import ROOT, sizes, tokens_of

BUDGETS: dict[str, int] = {
    "accel_train": 4_250,
    "accel_train/buckets": 2_650,
    "accel_train/checkpoint": 18_500,
    "accel_train/cli": 15_200,
    "accel_train/core": 11_500,
    "accel_train/data": 87_250,
    "accel_train/engine": 19_200,
    "accel_train/experiments": 64_450,
    "accel_train/guard": 1_950,
    "accel_train/hf": 34_850,
    "accel_train/inference": 18_250,
    "accel_train/metrics": 7_300,
    "accel_train/model": 36_200,
    "accel_train/observe": 15_050,
    "accel_train/optim": 10_200,
    "accel_train/parallel": 17_600,
    "accel_train/plan": 11_700,
    "accel_train/recipe": 18_000,
    "accel_train/recovery": 12_900,
    "accel_train/report": 16_950,
    "accel_train/runtime": 18_400,
    "accel_train/tasks": 78_500,
    "accel_train/training": 20_500,
    "benchmarks": 67_250,
    "tests": 680_800,
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
