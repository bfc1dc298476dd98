"""Checkpoints are read whole before a resume: by all processes, each a part, and by several threads in each."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from accel_train.checkpoint import store as checkpoint
from accel_train.checkpoint.resume import shares_of
from accel_train.checkpoint.store import check, newest_valid, publish
from accel_train.core import files
from tests.support.marks import slow
from tests.support.processes import run_forked
from tests.support.runs import Capture, events, steps_of, write_recipe_file
from tests.support.wording import assert_golden


@pytest.mark.parametrize("damaged", [slow(None), "model.safetensors"])
def test_every_process_hashes_a_part_of_a_checkpoint_and_all_find_what_one_would(
    corpus: Path, damaged: str | None
) -> None:
    sections: dict[str, Any] = {
        "task": "tests.support.tasks.process_faults:FaultTask",
        "schedule": {"max_steps": 6},
        "checkpoint": {"every_steps": 3, "keep": 5},
    }
    recipe = write_recipe_file(corpus, **sections)
    assert run_forked(["run", str(recipe)], 1, folder=corpus / "processes").wait() == [0]
    newest = corpus / "run" / "checkpoints" / "step-00000006"
    if damaged is not None:
        content = bytearray((newest / damaged).read_bytes())
        content[-5] ^= 1
        (newest / damaged).write_bytes(content)
    write_recipe_file(corpus, **sections, options={"opened": str(corpus)})
    forked = run_forked(["run", str(recipe)], 2, folder=corpus / "processes")
    forked.expect(0)
    opened = [set((corpus / f"rank-{rank}.txt").read_text().split()) for rank in (0, 1)]
    assert opened[1] == {"model.safetensors"}
    assert damaged is not None or opened[0] == {"optimizer.safetensors"}  # else it saves again, and reads what it wrote
    assert steps_of(corpus / "run", "resume") == [6 if damaged is None else 3]
    said = [event["message"] for event in events(corpus / "run", "checkpoint_invalid")]
    assert len(said) == (damaged is not None)
    assert all(f"{damaged} differs" in each for each in said)


def test_shares_are_balanced_by_size_the_largest_first() -> None:
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 1, "f": 0}
    assert shares_of(sizes, 2) == [["a", "d", "f"], ["b", "c", "e"]]
    assert shares_of({"a": 1}, 3) == [["a"], [], []]
    many = {f"{n:04d}": n * n % 97 for n in range(500)}
    shares = shares_of(many, 64)
    loads = [sum(many[name] for name in share) for share in shares]
    assert sorted(name for share in shares for name in share) == sorted(many)
    assert max(loads) - min(loads) <= max(many.values())


def sparse(root: Path, step: int, num_files: int, num_bytes: int) -> Path:
    """A checkpoint of holes, which costs no disk; its digests are not those of its files."""
    folder = publish(root, step, {f"{number}.safetensors": Path.touch for number in range(num_files)})
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace('"bytes": 0', f'"bytes": {num_bytes}'))
    for path in folder.glob("*.safetensors"):
        os.truncate(path, num_bytes)
    return folder


def test_hashing_that_takes_seconds_is_said_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(files, "REPORT_AFTER_SECONDS", 0.02)
    folder = sparse(tmp_path, 7, 2, 2**27)
    assert check(folder).problem.startswith("0.safetensors differs")
    [line] = capsys.readouterr().err.splitlines()
    assert_golden(line)


def test_a_signal_ends_the_hashing_of_a_large_file_at_once(tmp_path: Path) -> None:
    folder = sparse(tmp_path, 7, 2, 2**36)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            check(folder)
        while any(thread.name.startswith("hashing") for thread in threading.enumerate()):
            assert time.monotonic() - began < 5
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_file_that_cannot_be_read_is_named_and_the_older_checkpoint_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = publish(tmp_path, 1, {"a.safetensors": Path.touch})
    publish(tmp_path, 2, {"a.safetensors": Path.touch})

    def broken(folder: Path, names: Any) -> dict[str, Any]:
        error = OSError(5, "Input/output error", str(folder / "a.safetensors"))
        return dict.fromkeys(names, error) if folder.name == "step-00000002" else files.digests_of(folder, names)

    path, [status] = newest_valid(tmp_path, broken)
    assert path == older
    assert status.problem is not None
    assert status.problem.startswith("a.safetensors cannot")
    assert "Input/output error" in status.problem
    assert checkpoint.check(older).problem is None
