"""What the tests of finished runs share: commands that are called in this process."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from accel_train.cli.main import main
from accel_train.core.model_card import FILE, USE, Card


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

    def refusal(self, words: str) -> str:
        """Return the one line that a command ends with as a mistake of its user."""
        *busy, error = self(words, code=2).splitlines()
        assert [line for line in busy if not line.endswith(" ...")] == []
        return error

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


def code_of(card: str) -> str:
    """The Python lines in a card's use of its model."""
    _, code = dict(Card.parse(card).sections)[USE].split("```python")
    return code.split("```")[0]


def run_card(folder: Path, **names: Any) -> dict[str, Any]:
    """Run the code of the card in its folder, and return the names with those that it sets."""
    with chdir(folder):
        exec(code_of(Path(FILE).read_text()), names)
    return names
