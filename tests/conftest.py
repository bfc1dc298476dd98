"""What several test files share."""

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

# Read when huggingface_hub is first imported: a test that asks the network fails at once instead of retrying.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes that tests start have one thread, and sums depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and answers are wrapped at it

import torch
from accelerate import PartialState

from accel_train.recipe.schema import Recipe
from tests.support.leftovers import nothing_left
from tests.support.processes import Forked
from tests.support.runs import write_corpus

STARTED = time.monotonic()

# `nohup` and a shell's `&` ignore them, and so would the programs that tests start. A handler that does nothing goes on
# ignoring them here alone: an exec restores the default.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--minutes` runs files in an order that each commit draws anew, and skips tests that would begin later."""
    parser.addoption("--minutes", type=float, help="skip tests that would begin later; order files by the commit")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files by a digest of commit and name, in which all workers agree: each commit begins with others."""
    if config.getoption("minutes") is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=config.rootpath, capture_output=True).stdout
        items.sort(key=lambda item: hashlib.sha256(commit + item.path.name.encode()).digest())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu need one; `make test` leaves them out, and `make test-gpu` runs them."""
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() > STARTED + 60 * minutes:
        pytest.skip(f"{minutes:g} minutes are over")
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device on this machine")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Restore the process after each test and its fixtures, also those of its module."""
    with nothing_left():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Let the first test of a module find what the later ones do: each process begins with another one."""
    with nullcontext() if fixturedef.scope == "function" else nothing_left():
        return (yield)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without CUDA, also where there is some: for this process, and for those that it starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    PartialState._reset_state()
    yield
    PartialState._reset_state()


@pytest.fixture
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no launcher had started this process."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_launched: None) -> Path:
    """Change to an empty folder, outside of a launch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_TRAIN_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def text_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe for a text, with its token shards below the test's own folder."""

    def make(train: Any, *, tokenizer: Any = "bytes", **data: Any) -> Recipe:
        settings = {"sequence_length": 8, "cache_dir": str(tmp_path / "cache"), **data, "train": train}
        return Recipe.model_validate(
            {
                "output_dir": str(tmp_path / "run"),
                "model": {"config": {"model_type": "gpt2"}},
                "tokenizer": tokenizer,
                "data": settings,
                "schedule": {"max_steps": 1},
            }
        )

    return make


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a small corpus."""
    write_corpus(tmp_path)
    return tmp_path


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Sets the umask for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def started() -> Iterator[list[Forked]]:
    """What a test has started: killed after it, whatever became of it."""
    runs: list[Forked] = []
    yield runs
    for run in runs:
        run.end()
