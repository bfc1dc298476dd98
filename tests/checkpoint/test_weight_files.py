"""A written model is what the run wrote, or its user has said otherwise."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_train.checkpoint import weight_files
from accel_train.checkpoint.weight_files import accept_weights, changes_in, check_digests, damaged_weights, has_digests
from accel_train.core.ownership import MARKER, check_folder, replacing
from tests.support.runs import Capture
from tests.support.wording import assert_golden, raises_golden

WEIGHTS = "model.safetensors"
Flip = Callable[[Path], None]


def flip(path: Path) -> None:
    """Change one bit in the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with weights above the size whose digests tell ownership."""
    with replacing(tmp_path / "model") as staging:
        save_file({"weight": torch.zeros(2**18 + 1)}, staging / WEIGHTS)
        (staging / "config.json").write_text("{}")
        (staging / "README.md").write_text("# A card")
        (staging / "1_Pooling").mkdir()
        (staging / "1_Pooling" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: None, None),
        (lambda model: flip(model / WEIGHTS), WEIGHTS),
        (lambda model: (model / WEIGHTS).unlink(), WEIGHTS),
        (lambda model: (model / "model-2.safetensors").write_bytes(b""), "model-2.safetensors"),
        (lambda model: flip(model / "1_Pooling" / "config.json"), "1_Pooling/config.json"),
        (lambda model: flip(model / "README.md"), None),
        (lambda model: (model / MARKER).unlink(), None),
        (lambda model: (model / MARKER).write_text("[" * 9), None),
    ],
    ids=["none", "weights", "no weights", "more weights", "config", "card", "no marker", "damaged marker"],
)
def test_each_file_of_a_model_is_compared_except_its_card(model: Path, change: Flip, name: str | None) -> None:
    assert changes_in(model) == {}
    change(model)
    found = changes_in(model)
    assert list(found) == [name] * bool(name)
    if name:
        assert_golden(found[name], "problem")
    is_fatal = bool(name and name.endswith(".safetensors"))
    assert (damaged_weights(model, found) is not None) == is_fatal
    if is_fatal:
        with raises_golden(case="refused"):
            check_digests(model, is_ours=False)


def test_a_command_reads_a_model_once_and_notes_other_changes_once(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    read, digests_of = list[str](), weight_files.digests_of

    def counted(folder: Path, names: Sequence[str]) -> dict[str, str | OSError]:
        read.extend(names)
        return digests_of(folder, names)

    monkeypatch.setattr(weight_files, "digests_of", counted)
    flip(model / "config.json")
    for _ in range(3):
        check_digests(model)
    assert sorted(read) == ["1_Pooling/config.json", "config.json", WEIGHTS]
    assert capsys.readouterr().err.count("note: ") == 1
    flip(model / WEIGHTS)
    with raises_golden():
        check_digests(model)


@pytest.mark.parametrize("change", ["digests", "marker"])
def test_a_model_without_digests_gives_one_note(model: Path, change: str, capsys: Capture) -> None:
    record = json.loads((model / MARKER).read_text())
    # An older version, or a copy without hidden files.
    record.pop("digests")
    (model / MARKER).write_text(json.dumps(record)) if change == "digests" else (model / MARKER).unlink()
    flip(model / WEIGHTS)
    assert not has_digests(model)
    for _ in range(2):
        check_digests(model)
    assert_golden(capsys.readouterr().err, "note")
    check_digests(model, is_ours=False)
    accept_weights(model)
    check_digests(model)
    flip(model / WEIGHTS)
    with raises_golden(case="refused"):
        check_digests(model)


def test_accepted_weights_stay_the_users_own_and_later_changes_are_found(model: Path) -> None:
    flip(model / WEIGHTS)
    (model / "model-2.safetensors").write_bytes(b"added")
    (model / "1_Pooling" / "config.json").unlink()
    accept_weights(model)
    assert changes_in(model) == {}
    (model / "model-2.safetensors").unlink()
    with raises_golden():
        check_folder(model, "out")
    (model / WEIGHTS).write_bytes(b"another")
    assert set(changes_in(model)) == {WEIGHTS, "model-2.safetensors"}
