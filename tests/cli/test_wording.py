"""Transcripts of the commands: each `$ accel-train ...` of wording/COMMAND.txt runs, and prints the text below it.

Below a `%` in place of `$`, each number is shown as #.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from accel_train.cli.commands import COMMANDS
from accel_train.cli.main import main
from tests.cli.test_main import GOOD
from tests.support.commands import call
from tests.support.runs import write_yaml
from tests.support.wording import assert_wording, read_wording

RECIPE = {**GOOD, "data": {**GOOD["data"], "eval_fraction": 0.2}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its text, and its finished run."""
    folder = tmp_path_factory.mktemp("wording")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_yaml("r.yaml", RECIPE)
        Path("text.txt").write_text("one two three " * 40)
        call("run", "r.yaml")
    return folder


@pytest.mark.parametrize("command", [*COMMANDS, "commands"])
def test_a_command_prints_its_transcript(
    command: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without_cuda: None,
) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCEL_TRAIN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    headings = list(read_wording(command))
    assert headings, f"wording/{command}.txt has no call"
    for heading in headings:
        sign, _, *words = shlex.split(heading)
        code = main(words)
        captured = capsys.readouterr()
        text = captured.out + captured.err
        if sign == "%":
            text = re.sub(r"(?<![A-Za-z\d])\d+(?:[,.:]\d+)*(?:e[-+]\d+)?", "#", re.sub("[▁-█]+", "~", text))
            text = re.sub(r"(?<=\S) +", " ", text)
        assert_wording(command, heading, f"{text}\nexit code {code}" if code else text)
