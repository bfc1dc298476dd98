"""Marks of single cases of a parametrized test."""

from typing import Any

import pytest


def slow(*values: Any, **more: Any) -> Any:
    """A case that takes minutes: `make test-slow` runs it."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


def faults(*values: Any, **more: Any) -> Any:
    """A case with an injected fault: `make test-faults` runs it."""
    return pytest.param(*values, marks=pytest.mark.faults, **more)
