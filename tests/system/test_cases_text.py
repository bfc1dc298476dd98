"""Text data as people have them: each is read right, or refused with the reason; nothing is left out in silence."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.cli.main import main

_WORDS = ("the film was long and dull", "a bright and funny story", "few people laughed at the end", "we all cried")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in no launch."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCEL_TRAIN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _recipe(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text())


def test_data_01_a_cut_letter_does_not_turn_utf8_into_mojibake(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{word} {number},{name}" for name, word in (("ru", "поезд"), ("el", "τρένο")) for number in range(20)]
    whole = "\n".join(["text,language", *rows, ""]).encode()
    cut = whole.replace("поезд 7".encode(), "поезд".encode()[:-1])
    assert len(cut) < len(whole)
    Path("cut.csv").write_bytes(cut)
    assert main(["finetune", "cut.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "cut.csv:9:" in said
    assert "data.encoding_errors: replace" in said
    assert not Path("runs").exists()
    assert main(["finetune", "cut.csv", "--dry-run", "--data.encoding_errors", "replace"]) == 0
    assert "encoding" not in _recipe("runs/cut.yaml")["data"]
    Path("whole.csv").write_bytes(whole)
    assert main(["finetune", "whole.csv", "--dry-run", "--data.encoding", "latin-1"]) == 2
    assert "whole.csv is UTF-8" in capsys.readouterr().err
    legacy = whole.decode().replace("поезд", "schön").replace("τρένο", "für").encode("latin-1")
    Path("legacy.csv").write_bytes(legacy)
    assert main(["finetune", "legacy.csv", "--dry-run"]) == 0
    assert _recipe("runs/legacy.yaml")["data"]["encoding"] == "cp1252"
