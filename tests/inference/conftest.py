"""What the tests of finished runs share: commands that are called in this process."""

import json
from typing import Any

import pytest

from accel_train.cli.main import main


class Cli:
    """Calls commands, and has what the last one printed."""

    out = err = ""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, words: str, *further: object, code: int = 0) -> str:
        """Return the output of a command, or its error if it has to end with another code than 0."""
        self.capsys.readouterr()
        assert main([*words.split(), *map(str, further)]) == code
        self.out, self.err = self.capsys.readouterr()
        return self.err if code else self.out

    def result(self, words: str) -> Any:
        """Return the result of a command with `--json`."""
        return json.loads(self(f"{words} --json"))["result"]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, not_launched: None) -> None:
    """In no launch, and without timing for long."""
    monkeypatch.setattr("accel_train.inference.int8_cost._TIMED_SECONDS", 0.01)
