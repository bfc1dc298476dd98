"""Faults of the disk, made for real: kills at every call of a save, of rotation and of a rollback; damage; a full, slow
or
read-only disk. Whatever happens, the newest checkpoint that proves itself is the old one or the new one, and the next
save works.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_train import Recipe, train
from accel_train.checkpoint.health import healthy_steps
from accel_train.checkpoint.rollback_log import ROLLBACKS, read_rollbacks, remove_abandoned
from accel_train.checkpoint.store import (
    changed_descriptions,
    check,
    checkpoint_folders,
    describes,
    folder_of,
    newest_valid,
    publish,
    remove_leftovers,
    rotate,
    step_of,
)
from accel_train.core.errors import CheckpointError
from accel_train.core.json_io import read_json
from accel_train.training.setup import prepare_run
from accel_train.training.train import train_run
from tests.support.commands import call, error_line
from tests.support.comparisons import assert_same_bits
from tests.support.programs.disk_driver import CALLS, RECORD, SCENARIOS, files, prepare
from tests.support.runs import (
    TESTS,
    checkpoint,
    event_steps,
    events,
    losses,
    ran,
    run,
    tiny_recipe,
    write_corpus,
    write_recipe_file,
)
from tests.support.tasks.disk_faults import DiskTask
from tests.support.wording import assert_golden, raises_golden

DRIVER = [sys.executable, "-B", "-S", "-E", str(TESTS / "support/programs/disk_driver.py")]
STRACE = ["strace", "-f", "-qq", "-y"]


def can_trace() -> bool:
    """Whether strace is there, and may trace."""
    with suppress(OSError):
        return subprocess.run([*STRACE, "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0
    return False


def valid_steps(root: Path) -> list[int]:
    return [step_of(folder) or 0 for folder in checkpoint_folders(root) if check(folder).problem is None]


def assert_old_or_new(scenario: str, root: Path) -> bool:
    """What a kill may leave, and that the next start and save find it good; returns whether the new state was there."""
    broken = [step_of(folder) for folder in checkpoint_folders(root) if check(folder).problem is not None]
    assert broken == [] or (scenario == "replace a broken one" and broken == [2])
    steps = valid_steps(root)
    is_new = steps[-1] == 3
    if scenario.startswith("save"):
        assert steps in ([1, 2], [1, 2, 3], [2, 3])
    elif scenario == "replace":
        newest, _ = newest_valid(root)
        assert newest is not None
        assert sorted({*steps}) == [1, 2]
        is_new = read_json(newest / "trainer.json")["mark"] == "again"
    elif scenario == "replace a broken one":
        assert steps in ([1], [1, 2])
        is_new = steps == [1, 2]
    elif scenario == "roll back":
        is_new = (root.parent / ROLLBACKS).exists()
        assert steps in ([4, 8, 12], [4, 8], [4]) if is_new else steps == [4, 8, 12]
        assert read_rollbacks(root.parent) == ([RECORD] if is_new else [])
        remove_leftovers(root)
        remove_abandoned(root, read_rollbacks(root.parent))
        assert valid_steps(root) == ([4] if is_new else [4, 8, 12])
        assert healthy_steps(root) == {4}
    else:
        assert steps == [1, 2]
        is_new = healthy_steps(root) == {1, 2}
        assert is_new or healthy_steps(root) == {1}
    remove_leftovers(root.parent)
    remove_leftovers(root)
    publish(root, 20, files(20))
    rotate(root, 2)
    assert [folder.name for folder in checkpoint_folders(root)][-1] == "step-00000020"
    assert not [entry.name for entry in (*root.iterdir(), *root.parent.iterdir()) if entry.name.startswith(".")]
    return is_new


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_before_any_call_of_python_the_disk_holds_the_old_state_or_the_new_one(
    tmp_path: Path, scenario: str
) -> None:
    done = subprocess.run([*DRIVER, scenario, str(tmp_path), "points"], capture_output=True, text=True, check=True)
    num_points = int(done.stdout)
    assert num_points >= {"tag": 2}.get(scenario, 16), "so few calls cannot be all"
    outcomes = [assert_old_or_new(scenario, tmp_path / str(n) / "checkpoints") for n in range(1, num_points + 1)]
    assert sorted(outcomes) == outcomes, "once the new state is there, it stays"
    assert not outcomes[0]
    assert outcomes[-1]


@pytest.mark.faults
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_system_call_the_disk_holds_the_old_state_or_the_new_one(tmp_path: Path, scenario: str) -> None:
    if not can_trace():  # the test above kills at the same calls, one level higher
        test_killed_before_any_call_of_python_the_disk_holds_the_old_state_or_the_new_one(tmp_path, scenario)
        return
    num_kills = 0
    for syscall in CALLS:
        for number in range(1, 100):
            root = tmp_path / f"{syscall.strip('?')[:5]} {number}" / "checkpoints"
            prepare(scenario, root)
            kill = ["-o", "/dev/null", "-e", f"trace={syscall}", "-e", f"inject={syscall}:signal=KILL:when={number}"]
            done = subprocess.run([*STRACE, *kill, *DRIVER, scenario, str(root)], capture_output=True, check=False)
            survived = done.returncode == 0
            assert survived or done.returncode == -9, done.stderr.decode()
            is_new = assert_old_or_new(scenario, root)
            assert is_new or not survived
            if survived:
                break
            num_kills += 1
    assert num_kills >= {"tag": 2}.get(scenario, 16), "so few calls cannot be all"


def traced_calls(folder: Path, *, by_strace: bool) -> list[tuple[str, str]]:
    """Every call of a save with rotation: its name, and what it is about, below the folder of checkpoints."""
    root = folder / "checkpoints"
    prepare("save", root)
    if not by_strace:
        done = subprocess.run([*DRIVER, "save", str(root), "log"], capture_output=True, text=True, check=True)
        return [(name, path.removeprefix(f"{root}/")) for name, path in map(str.split, done.stdout.splitlines())]
    log = folder / "trace"
    trace = ["-o", str(log), "-e", f"trace={','.join(CALLS)}"]
    subprocess.run([*STRACE, *trace, *DRIVER, "save", str(root)], check=True, capture_output=True)
    calls = []
    for line in log.read_text().splitlines():
        found = re.match(r"\d+ +(\w+)\(([^)]*)", line)
        assert found, line
        about = re.search(rf"{re.escape(str(root))}[^\">,]*", found[2])
        if about:
            calls.append((found[1].removesuffix("at"), about[0].removeprefix(f"{root}/")))
    return calls


@pytest.mark.parametrize("by_strace", [True, False], ids=["system calls", "calls of Python"])
def test_files_are_on_the_disk_before_the_rename_and_the_rename_before_anything_is_removed(
    tmp_path: Path, by_strace: bool
) -> None:
    calls = traced_calls(tmp_path, by_strace=by_strace and can_trace())
    root = str(tmp_path / "checkpoints")
    (published,) = [i for i, (name, about) in enumerate(calls) if name == "rename" and about.startswith(".tmp-step-")]
    aside = calls[published][1]
    written = {about for name, about in calls if name in ("write", "open") and about.startswith(f"{aside}/")}
    assert {path.removeprefix(f"{aside}/") for path in written} == {*files(3), "manifest.json"}
    folder_synced = calls.index(("fsync", aside))
    for path in written:
        last_write = max(i for i, (name, about) in enumerate(calls) if about == path and name in ("write", "open"))
        assert last_write < calls.index(("fsync", path)) < folder_synced < published
    parent_synced = next(
        i for i, (name, about) in enumerate(calls) if i > published and (name, about) == ("fsync", root)
    )
    removed = [i for i, (name, about) in enumerate(calls) if name in ("rename", "unlink", "rmdir") and i != published]
    assert removed, "nothing was rotated"
    assert parent_synced < min(removed)
    assert calls[min(removed)] == ("rename", "step-00000001"), "first out of sight, then removed"


def damages(folder: Path, generator: random.Random, num_flips: int) -> Iterator[str]:
    """Damage a folder in one way after another; whoever asks for the next one has mended it."""
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        path, size = folder / name, (folder / name).stat().st_size
        for length in sorted({0, 1, size // 2, size - 1}):
            os.truncate(path, length)
            yield f"{name} cut to {length} bytes"
        for what in (b"", b"\0", b"more"):
            path.write_bytes(path.read_bytes() + what if what else path.read_bytes()[1:])
            yield f"{name} with {what!r} at its end" if what else f"{name} without its first byte"
        path.unlink()
        yield f"{name} deleted"
        path.rename(folder.parent / "outside")
        path.symlink_to(folder.parent / "outside")
        yield f"{name} a link"
        path.unlink()
        path.mkdir()
        yield f"{name} a folder"
        path.unlink()
        os.mkfifo(path)
        yield f"{name} a pipe"
        other = generator.choice([other for other in names if other != name])
        shutil.copy(folder / other, path)
        yield f"{name} overwritten with {other}"
    for extra in ("more.safetensors", ".hidden", "manifest.json.old", "pickled.pkl"):
        (folder / extra).write_bytes(b"x")
        yield f"extra file {extra}"
    (folder / "sub").mkdir()
    yield "extra folder sub"
    for _ in range(num_flips):
        path = folder / generator.choice(names)
        content = bytearray(path.read_bytes())
        position, bit = generator.randrange(len(content)), generator.randrange(8)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        yield f"{path.name} with bit {bit} of byte {position} flipped"


@pytest.mark.faults
def test_a_thousand_kinds_of_damage_are_all_found_named_and_passed_over(corpus: Path) -> None:
    """A file that only describes the weights (config.json) may have been edited: it is named, and the checkpoint is
    used.
    """
    train(tiny_recipe(corpus, checkpoint={"every_steps": 6}, model={"config": SMALLEST}))
    root = corpus / "run" / "checkpoints"
    good, bad = folder_of(root, 6), folder_of(root, 12)
    pristine = corpus / "pristine"
    bad.rename(pristine)
    shutil.copytree(pristine, bad)
    num_damages = 0
    for damage in damages(bad, random.Random(0), 950):
        newest, broken = newest_valid(root)
        name = damage.removeprefix("extra file ").removeprefix("extra folder ").split()[0]
        if newest == bad:
            assert describes(name), f"{damage} went unnoticed"
            named = changed_descriptions(bad)
            assert name in named or (name == "manifest.json" and named), f"{damage} went unnoticed"
        else:
            assert newest == good
            (status,) = broken
            assert status.path == bad
            assert name in str(status.problem) or name == "manifest.json", f"{damage}: {status.problem}"
        num_damages += 1
        shutil.rmtree(bad)
        (corpus / "run" / "checkpoints" / "outside").unlink(missing_ok=True)
        shutil.copytree(pristine, bad)
    assert num_damages > 1000
    assert newest_valid(root) == (bad, [])


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish(tmp_path, step, files(step))
    for left, right in ((1, 9), (2, 1), (3, 2), (9, 3)):
        folder_of(tmp_path, left).rename(folder_of(tmp_path, right))
    with raises_golden(CheckpointError):
        newest_valid(tmp_path)


SMALLEST = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4, "n_positions": 32}
RUN: dict[str, Any] = {
    "task": "tests.support.tasks.disk_faults:DiskTask",
    "checkpoint": {"every_steps": 4, "keep": 3},
    "schedule": {"max_steps": 16},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_when_all_checkpoints_are_broken_the_run_refuses_to_start_over_until_told_to(corpus: Path) -> None:
    recipe = str(write_recipe_file(corpus, checkpoint={"every_steps": 6}))
    call("run", recipe)
    root = corpus / "run" / "checkpoints"
    for folder in checkpoint_folders(root):
        os.truncate(folder / "optimizer.safetensors", 100)
    said = call("run", recipe, code=4).err.splitlines()[-1]
    assert_golden(re.sub(r"not \d+", "not #", said))
    assert [step_of(folder) for folder in checkpoint_folders(root)] == [6, 12], "nothing was touched"
    call("verify", corpus / "run", code=4)
    call("run", recipe, "--checkpoint.resume", "never")
    assert valid_steps(root) == [6, 12]
    assert len(checkpoint_folders(corpus / "run" / "previous-1" / "checkpoints")) == 2


def no_leftovers(root: Path) -> bool:
    return not list(root.glob(".*"))


@pytest.mark.parametrize("in_background", [True, False], ids=["background", "foreground"])
def test_one_save_on_a_full_disk_fails_alone_and_training_goes_on(corpus: Path, in_background: bool) -> None:
    checkpoint = {**RUN["checkpoint"], "in_background": in_background}
    train(tiny_recipe(corpus, **{**RUN, "checkpoint": checkpoint}, options={"full": [7, 10]}))
    folder = corpus / "run"
    (failed,) = events(folder, "checkpoint_failed")
    assert failed["step"] == 8
    assert "File too large" in failed["message"]
    assert "training continues" in failed["message"]
    assert valid_steps(folder / "checkpoints") == [4, 12, 16]
    assert no_leftovers(folder / "checkpoints")
    assert list(losses(folder)) == list(range(1, 17))


@pytest.mark.faults
@pytest.mark.parametrize("processes", [1, 2])
def test_two_saves_in_a_row_on_a_full_disk_end_the_run_with_exit_code_4_on_all_processes(
    corpus: Path, processes: int
) -> None:
    recipe = write_recipe_file(corpus, **RUN, options={"full": [7, 99]})
    done = run(recipe, processes=processes, expect=4)
    folder = corpus / "run"
    assert event_steps(folder, "checkpoint_failed") == [8, 12]
    assert "step 12 could not" in done.stderr
    assert valid_steps(folder / "checkpoints") == [4]
    assert no_leftovers(folder / "checkpoints")
    assert not (folder / "summary.json").exists()
    if processes == 1:
        run(write_recipe_file(corpus, **RUN))
        assert event_steps(folder, "resume")[0] == 4
        assert list(losses(folder)) == list(range(1, 17))


def test_the_last_save_that_fails_ends_the_run_with_exit_code_4(corpus: Path) -> None:
    prepared = prepare_run(tiny_recipe(corpus, **RUN, options={"full": [15, 99]}))
    with pytest.raises(CheckpointError) as refused:
        train_run(prepared)
    assert "step 16 " in str(refused.value)
    unlimit_files(prepared.plan.task)
    assert valid_steps(corpus / "run" / "checkpoints") == [4, 8, 12]


def unlimit_files(task: Any) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def mounts_tmpfs() -> bool:
    """Whether a file system of this test's own can be mounted, by root or in a user namespace."""
    with suppress(OSError):
        return (
            subprocess.run([*OWN_MOUNTS, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode == 0
        )
    return False


OWN_MOUNTS = ["unshare", "--mount", "--map-root-user", "sh", "-c"]


@pytest.mark.faults
def test_a_disk_too_small_for_one_checkpoint_more_keeps_the_ones_that_it_has(corpus: Path) -> None:
    recipe = write_recipe_file(corpus, **{**RUN, "checkpoint": {"every_steps": 4, "keep": 2}})
    if not mounts_tmpfs():  # then a limit on files stands for the disk, as in the tests above
        test_two_saves_in_a_row_on_a_full_disk_end_the_run_with_exit_code_4_on_all_processes(corpus, 1)
        return
    place, kept = corpus / "run", corpus / "kept"
    place.mkdir()
    script = (
        f"mount -t tmpfs -o size=1300k none {place} && {sys.executable} -m accel_train run {recipe}; "
        f"code=$?; cp -r {place} {kept}; exit $code"
    )
    done = ran([*OWN_MOUNTS, script])
    assert done.returncode == 4, done.stderr
    assert "No space left" in done.stderr
    assert valid_steps(kept / "checkpoints") == [4, 8]
    assert no_leftovers(kept / "checkpoints")
    assert max(losses(kept)) >= 15, "training went on after the first failure"


class NeverBuilt(DiskTask):
    def build_model(self, recipe: Recipe, data: Any) -> Any:
        raise AssertionError("a model was built")


@pytest.mark.parametrize(
    "place",
    ["file/run", "file", "/proc/run", "run"],
    ids=["below a file", "a file", "where nothing can be created", "checkpoints are a file"],
)
def test_a_folder_that_cannot_be_written_is_refused_before_a_model_is_built(corpus: Path, place: str) -> None:
    (corpus / "file").touch()
    (corpus / "run").mkdir()
    (corpus / "run" / "checkpoints").touch()
    output = corpus / place
    recipe = write_recipe_file(corpus, task="tests.faults.test_disk:NeverBuilt", output_dir=str(output))
    began = time.monotonic()
    error_line("run", recipe, named=str(output))
    assert time.monotonic() - began < 5


@pytest.mark.faults
def test_a_slow_disk_is_waited_for_and_named_and_at_most_one_save_is_in_flight(corpus: Path) -> None:
    real_fsync = os.fsync
    recipe = tiny_recipe(corpus, **{**RUN, "schedule": {"max_steps": 12}}, options={"slow_fsync": 0.4})
    prepared = prepare_run(recipe)
    try:
        train_run(prepared)
    finally:
        os.fsync = real_fsync
    assert isinstance(prepared.plan.task, DiskTask)
    assert prepared.plan.task.most_writers == 1
    assert prepared.plan.task.calls_beside_a_writer >= 6, "training went on while checkpoints were written"
    slow = events(corpus / "run", "checkpoint_slow")
    assert [event["step"] for event in slow] == [8, 12]
    assert all(event["seconds"] > 1 for event in slow)
    assert valid_steps(corpus / "run" / "checkpoints") == [4, 8, 12]


@pytest.mark.faults
@pytest.mark.parametrize("fsync", ["model.safetensors", "manifest.json", "checkpoints"])
def test_killed_within_a_background_save_the_run_goes_on_from_the_one_before_to_the_bit(
    tmp_path: Path, fsync: str
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name)
    train(tiny_recipe(tmp_path / "whole", **RUN))
    run(write_recipe_file(tmp_path / "killed", **RUN, options={"kill_in_save": fsync}), expect=-9)
    root = tmp_path / "killed" / "run" / "checkpoints"
    assert valid_steps(root) == ([4, 8] if fsync == "checkpoints" else [4]), "the rename publishes, and nothing else"
    assert len(valid_steps(root)) == len(checkpoint_folders(root))
    run(write_recipe_file(tmp_path / "killed", **RUN))
    assert_same_bits(*(checkpoint(tmp_path / name / "run", 16) for name in ("whole", "killed")))
    assert no_leftovers(root)
