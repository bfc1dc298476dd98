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
from tests.support.wording import TESTS, assert_wording, read_wording


@pytest.mark.parametrize("command", [*COMMANDS, "commands"])
def test_a_command_prints_its_transcript(
    command: str,
    finished: Path,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without_cuda: None,
) -> None:
    monkeypatch.chdir(shutil.copytree(finished, "copy"))
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


@pytest.mark.parametrize("folder", [path.parent.relative_to(TESTS) for path in sorted(TESTS.glob("**/wording.txt"))])
def test_each_text_of_a_folder_belongs_to_a_test(folder: Path) -> None:
    for heading in read_wording(f"{folder}/wording"):
        file, _, test = heading.partition("::")
        name, *_ = re.split(r"[ \[]", test)
        assert f"def {name}(" in (TESTS / folder / file).read_text(), heading
