"""Checkpoint folders: what is damaged is named and skipped, what is published is whole."""

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accel_train.checkpoint.store import (
    CheckpointStatus,
    GivenUp,
    accept_changes,
    changed_descriptions,
    check,
    checkpoint_folders,
    files_below,
    newest_valid,
    publish,
    remove_leftovers,
    rotate,
    step_of,
)
from accel_train.checkpoint.verify import verify
from accel_train.core.errors import CheckpointError
from tests.support.wording import assert_golden, raises_golden

CONTENT = {
    "model.safetensors": b"weights" * 1000,
    "optimizer.safetensors": b"moments" * 500,
    "average.safetensors": b"averages" * 500,
    "trainer.json": b"{}",
}


def save(root: Path, step: int) -> Path:
    return publish(root, step, {name: partial(Path.write_bytes, data=content) for name, content in CONTENT.items()})


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_published_checkpoint_is_valid_alone_and_follows_the_umask(
    tmp_path: Path, mask: int, umask: Callable[[int], int]
) -> None:
    umask(mask)
    root = tmp_path / "checkpoints"
    folder = save(root, 7)
    assert folder.name == "step-00000007"
    assert check(folder) == CheckpointStatus(folder, 7, None)
    assert names(root) == [folder.name]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~mask
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o666 & ~mask}


def test_newest_is_by_step_number_not_by_text_or_time(tmp_path: Path) -> None:
    for step in (999_999_999, 1_000_000_000, 5):
        folder = save(tmp_path, step)
        os.utime(folder, (step % 7, step % 7))
    assert list(map(step_of, checkpoint_folders(tmp_path))) == [5, 999_999_999, 1_000_000_000]
    newest, broken = newest_valid(tmp_path)
    assert newest is not None
    assert (newest.name, broken) == ("step-1000000000", [])


def test_every_kind_of_damage_is_named_and_the_older_checkpoint_used(tmp_path: Path) -> None:
    generator = random.Random(0)
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    pristine = tmp_path / "pristine"
    shutil.copytree(bad, pristine)
    for trial in range(200):
        shutil.rmtree(bad)
        shutil.copytree(pristine, bad)
        path = generator.choice(sorted(bad.iterdir()))
        damage = generator.choice(["flip", "cut", "delete", "extra", "swap"])
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            path.write_bytes(content)
        elif damage == "cut":
            path.write_bytes(content[: generator.randrange(len(content))])
        elif damage == "delete":
            path.unlink()
        elif damage == "extra":
            (bad / "more.safetensors").write_bytes(b"x")
        else:
            shutil.copytree(good, bad, dirs_exist_ok=True)
        newest, broken = newest_valid(tmp_path)
        assert newest == good, f"trial {trial}: {damage} of {path.name} went unnoticed"
        assert broken[0].path == bad
        assert broken[0].problem


def test_no_valid_checkpoint_is_an_error_and_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none") == (None, [])
    (save(tmp_path, 3) / "trainer.json").write_bytes(b"[]")
    with raises_golden(CheckpointError):
        newest_valid(tmp_path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "link/file", "a//b", "..", ".", ""])
def test_manifest_cannot_point_outside_the_folder(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    (folder / "link").symlink_to(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert_golden(str(check(folder).problem))


@pytest.mark.parametrize("name", ["trainer.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_link_or_pipe_in_place_of_a_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = save(tmp_path, 1) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path)
    assert name in str(check(path.parent).problem)


def test_failed_write_leaves_older_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with raises_golden(CheckpointError):
        publish(tmp_path, 2, {"model.safetensors": fail})
    assert names(tmp_path) == ["step-00000001"]
    assert check(tmp_path / "step-00000001").problem is None


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        save(tmp_path, step)
    removed = rotate(tmp_path, keep=2, spared_steps={20})
    assert [folder.name for folder in removed] == ["step-00000010", "step-00000030"]
    assert list(map(step_of, checkpoint_folders(tmp_path))) == [20, 40, 50]
    assert rotate(tmp_path, keep=5, spared_steps={None}) == []


def test_broken_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    (folder / "trainer.json").unlink()
    save(tmp_path, 4)
    assert check(folder).problem is None


def test_leftovers_of_a_killed_save_are_never_read_and_can_be_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for folder in (".tmp-step-00000002-99", ".trash-step-00000000-99", "step-12"):
        (tmp_path / folder).mkdir()
    for file in (".healthy.json.abc123.tmp", "notes.tmp"):
        (tmp_path / file).touch()
    assert list(map(step_of, checkpoint_folders(tmp_path))) == [1]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["notes.tmp", "step-00000001", "step-12"]


def test_files_are_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        calls.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        calls.append(f"rename to {Path(target).name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path, 1)
    published = calls.index("rename to step-00000001")
    aside = f"sync .tmp-step-00000001-{os.getpid()}"
    assert set(calls[: published - 1]) == {*(f"sync {name}" for name in CONTENT), "sync manifest.json"}
    assert calls[published - 1 :] == [aside, "rename to step-00000001", f"sync {tmp_path.name}"]


def test_verify_lists_every_checkpoint_and_refuses_a_folder_without_a_run(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1)
    (save(tmp_path / "checkpoints", 2) / "trainer.json").unlink()
    good, bad = verify(tmp_path).statuses
    assert (good.step, good.problem, bad.step) == (1, None, 2)
    assert_golden(str(bad.problem), "of a file")
    with raises_golden(case="of a folder"):
        verify(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"format": 1, "step": 1, "files": {"trainer.json": {"bytes": 1e999, "sha256": ""}}}',
        b'{"format": 1, "step": 1, "files": {"trainer.json": {"bytes": ' + b"9" * 9999 + b', "sha256": ""}}}',
        b'{"format": 1, "step": 1, "files": {"trainer.json": {"bytes": NaN, "sha256": ""}}}',
        b'{"format": 1, "step": -1e400, "files": {}}',
        b'{"format": 1, "step": 1, "files": []}',
        b"[" * 1_000_000,
        b'{"files":' * 1_000_000,
        b'"\xff\xfe"',
        b"",
    ],
    ids=["infinite size", "huge size", "NaN", "infinite step", "list", "deep list", "deep object", "no text", "empty"],
)
def test_absurd_manifest_is_a_problem_and_no_crash(tmp_path: Path, manifest: bytes) -> None:
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_bytes(manifest)
    assert str(check(folder).problem).startswith("manifest.json ")


def test_huge_manifest_is_not_even_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    os.truncate(folder / "manifest.json", 2**40)  # a terabyte of nothing, which takes no room
    assert str(check(folder).problem).startswith("manifest.json ")


def test_checkpoint_that_is_a_link_is_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    good = save(root, 1)
    (root / "step-00000002").symlink_to(save(tmp_path / "elsewhere", 2))
    newest, [broken] = newest_valid(root)
    assert newest == good
    assert_golden(str(broken.problem))


def test_file_that_cannot_be_read_is_a_problem_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    real_open = Path.open

    def failing(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == bad / "model.safetensors":
            raise OSError(5, "Input/output error", str(self))
        return real_open(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    newest, broken = newest_valid(tmp_path)
    assert newest == good
    assert str(broken[0].problem).startswith("model.safetensors ")
    assert "(Input/output error)" in str(broken[0].problem)


def test_valid_checkpoint_of_the_same_step_is_there_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    real_rename, newest = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        result = real_rename(self, target)
        newest.append(newest_valid(tmp_path)[0])
        return result

    monkeypatch.setattr(Path, "rename", rename)
    publish(tmp_path, 2, {"trainer.json": lambda path: path.write_bytes(b'{"new": 1}')})
    assert [folder and step_of(folder) for folder in newest] == [2, 2, 2]
    assert json.loads((tmp_path / "step-00000002" / "trainer.json").read_text()) == {"new": 1}
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_checkpoint_that_a_killed_replacement_left_under_its_long_name_is_used_and_later_replaced(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    longer = save(tmp_path, 2).rename(tmp_path / "step-00000000000000000002")
    assert newest_valid(tmp_path) == (longer, [])
    save(tmp_path, 2)
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-00000001", "step-00000002"]


def test_rotation_that_fails_at_one_removes_the_others_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    real_rename = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "step-00000001":
            raise PermissionError(1, "Operation not permitted", str(self))
        return real_rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(PermissionError):
        rotate(tmp_path, keep=1)
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-00000001", "step-00000004"]


def test_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    answers = iter([False, False, True])
    with pytest.raises(GivenUp):
        publish(tmp_path, 1, dict.fromkeys("ab", Path.touch), given_up=lambda: next(answers))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_part_that_is_not_whole_in_the_folder_ends_the_save_and_the_older_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    monkeypatch.setattr("accel_train.core.files.SEEN_WITHIN_SECONDS", 0.2)
    old = save(tmp_path, 1)

    def written_elsewhere(folder: Path) -> dict[str, dict[str, Any]]:
        if is_cut:
            (folder / "shard-00002.safetensors").write_bytes(b"half")
        return {"shard-00002.safetensors": {"bytes": 8, "sha256": "0" * 64}}

    with raises_golden(CheckpointError):
        publish(tmp_path, 2, {}, others=written_elsewhere)
    assert list(tmp_path.iterdir()) == [old]
    assert check(old).problem is None


def test_a_leftover_that_cannot_be_removed_stops_nothing_and_what_is_not_one_stays(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000003").write_text("no folder")
    (tmp_path / ".trash-step-00000002").mkdir()
    (tmp_path / "step-00000001").mkdir()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-step-00000003", "step-00000001"}


def test_a_manifest_has_format_1_and_another_format_is_named(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1) / "manifest.json"
    found = json.loads(manifest.read_text())
    assert found["format"] == 1
    manifest.write_text(json.dumps({**found, "format": 2}))
    problem = check(manifest.parent).problem
    assert problem is not None
    assert "format 2" in problem


def test_files_below_a_folder_are_told_by_path_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = files_below(tmp_path)
    assert found.keys() == {"a/b/file", "link"}
    assert found["a/b/file"][0] == 5


@pytest.mark.parametrize("content", [b"{}", b"{ }", b"{   }"])
def test_a_file_that_a_callback_rewrites_is_accepted_whatever_its_size(content: bytes, tmp_path: Path) -> None:
    files = {**CONTENT, "config.json": b"{  }"}
    folder = publish(tmp_path, 1, {name: partial(Path.write_bytes, data=data) for name, data in files.items()})
    before = files_below(folder)
    (folder / "config.json").write_bytes(content)
    assert changed_descriptions(folder) == ["config.json"]
    assert accept_changes(folder, before) == []
    assert changed_descriptions(folder) == []
