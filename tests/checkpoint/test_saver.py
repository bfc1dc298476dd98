"""Saves in the background: one at a time, failures counted, given up or finished, nothing kept in memory."""

import gc
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accel_train import Recipe
from accel_train.checkpoint.health import healthy_steps
from accel_train.checkpoint.saver import Saver
from accel_train.checkpoint.store import check, checkpoint_folders, publish, step_of
from accel_train.core.errors import CheckpointError, TrainingStopped
from accel_train.engine.run import RunContext
from accel_train.engine.save import save_run, saves_finished
from accel_train.training.loop import run_steps
from accel_train.training.setup import prepare_run
from accel_train.training.train import train_run
from tests.support.runs import command, environment, events, recipe_dict, steps_of, write_recipe_file
from tests.support.wording import raises_golden


class Gate:
    """A writer that waits until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, path: Path) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        path.write_bytes(b"written")


def write(path: Path) -> None:
    path.write_bytes(b"written")


def fail(path: Path) -> None:
    path.write_bytes(b"half")
    raise OSError(28, "No space left on device")


def nothing() -> list[Path]:
    return []


def is_saving() -> bool:
    return any(thread.name == "checkpoint" for thread in threading.enumerate())


def saved_steps(root: Path) -> list[int | None]:
    return [step_of(folder) for folder in checkpoint_folders(root) if check(folder).problem is None]


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path, in_background=True)


@pytest.fixture
def gate(saver: Saver) -> Gate:
    """Where the save of step 1 waits."""
    gate = Gate()
    saver.save(1, {"model": gate}, nothing)
    assert gate.reached.wait(60)
    return gate


def test_the_caller_goes_on_while_a_checkpoint_is_written(tmp_path: Path, saver: Saver, gate: Gate) -> None:
    assert is_saving()
    assert saver.take_ended() == []
    assert saved_steps(tmp_path) == []
    gate.opened.set()
    assert saver.wait() > 0
    assert not is_saving()
    assert [(saved.step, saved.error) for saved in saver.take_ended()] == [(1, None)]
    assert saver.take_ended() == []
    assert saved_steps(tmp_path) == [1]


def test_a_save_that_comes_due_while_one_is_written_waits_for_it(tmp_path: Path, saver: Saver, gate: Gate) -> None:
    threading.Timer(0.1, gate.opened.set).start()
    saver.save(2, {"model": write}, nothing)
    assert saved_steps(tmp_path)[0] == 1, "the second one began before the first was there"
    saver.wait()
    assert saved_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("in_background", [True, False])
def test_one_failure_is_told_and_two_in_a_row_are_too_many(tmp_path: Path, in_background: bool) -> None:
    saver = Saver(tmp_path, in_background=in_background)
    for step, writer, failed in ((1, fail, False), (2, write, False), (3, fail, False), (4, fail, True)):
        saver.save(step, {"model": writer}, nothing)
        saver.wait()
        assert saver.failed is failed
        (saved,) = saver.take_ended()
        assert (saved.step, saved.error is not None) == (step, writer is fail)
        assert (saver.last_error is not None) == (writer is fail)
    assert "step 4" in str(saver.last_error)
    assert "No space left" in str(saver.last_error)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]


def test_two_failures_end_it_though_the_next_save_is_due_before_the_second_is_known(
    tmp_path: Path, saver: Saver
) -> None:
    gate = Gate()

    def fail_late(path: Path) -> None:
        gate(path)
        fail(path)

    saver.save(1, {"model": fail}, nothing)
    saver.save(2, {"model": fail_late}, nothing)
    assert gate.reached.wait(60)
    assert not saver.failed
    gate.opened.set()
    saver.save(3, {"model": write}, nothing)
    saver.wait()
    assert saver.failed
    assert [saved.step for saved in saver.take_ended()] == [1, 2]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ValueError("shape"), RuntimeError(""), MemoryError(), KeyError("x")])
def test_whatever_is_raised_in_the_thread_is_a_failed_save(saver: Saver, error: Exception) -> None:
    def broken(path: Path) -> None:
        raise error

    saver.save(1, {"model": broken}, nothing)
    saver.wait()
    (saved,) = saver.take_ended()
    assert isinstance(saved.error, CheckpointError)
    assert str(saved.error)


def test_a_rotation_that_fails_leaves_a_good_save_and_is_told(tmp_path: Path, saver: Saver) -> None:
    def cannot() -> list[Path]:
        raise PermissionError(1, "Operation not permitted")

    saver.save(1, {"model": write}, cannot)
    saver.wait()
    (saved,) = saver.take_ended()
    assert saved.error is None
    assert "Operation not permitted" in str(saved.left_undone)
    assert not saver.failed
    assert saved_steps(tmp_path) == [1]


def test_a_save_that_is_given_up_is_not_published_and_leaves_nothing(tmp_path: Path, saver: Saver, gate: Gate) -> None:
    threading.Timer(0.1, gate.opened.set).start()
    saver.abandon()
    assert not is_saving()
    assert saver.take_ended() == []
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_hangs_does_not_hold_up_whoever_gives_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saver: Saver, gate: Gate
) -> None:
    monkeypatch.setattr("accel_train.checkpoint.saver.GIVE_UP_SECONDS", 0.1)
    saver.abandon()  # returns, though the gate is closed
    assert is_saving()
    gate.opened.set()
    saver.wait()
    assert saved_steps(tmp_path) == [], "given up, and published all the same"


@pytest.mark.parametrize("writer", [write, fail])
def test_what_was_written_is_let_go_of_however_it_ended(saver: Saver, writer: Callable[[Path], None]) -> None:
    class Copies:
        def __call__(self, path: Path) -> None:
            writer(path)

    copies = Copies()
    alive = weakref.ref(copies)
    saver.save(1, {"model": copies}, nothing)
    del copies
    saver.wait()
    gc.collect()
    assert alive() is None, "the copies of all weights stay in memory"


# In a run


def prepared(folder: Path, **sections: Any) -> RunContext:
    recipe = recipe_dict(folder, task="causal-lm", **sections)
    return prepare_run(Recipe.model_validate(recipe))


def slowed(run: RunContext) -> Gate:
    """From now on each checkpoint of this run waits at a gate before it is written."""
    gate = Gate()
    save = run.saver.save

    def gated(step: int, writers: Any, then: Any, parts: Any) -> None:
        save(step, {"gate": gate, **writers}, then, parts)

    run.saver.save = gated  # type: ignore[method-assign]
    return gate


def test_steps_are_made_while_a_checkpoint_is_written_and_what_is_saved_is_of_its_own_step(corpus: Path) -> None:
    run = prepared(corpus, checkpoint={"every_steps": 4}, schedule={"max_steps": 6})
    gate = slowed(run)
    on_step, weights = run.observer.on_step, {}

    def at_step(result: Any, learning_rate: float) -> None:
        on_step(result, learning_rate)
        if is_saving():
            weights[result.step] = run.strategy.inner.model.state_dict()["transformer.wte.weight"].clone()
        if result.step == 5:
            gate.opened.set()

    run.observer.on_step = at_step  # type: ignore[method-assign]
    train_run(run)
    assert 5 in weights, "the loop stood still"
    saved = load_file(run.plan.output_dir / "checkpoints" / "step-00000004" / "model.safetensors")
    assert not torch.equal(saved["transformer.wte.weight"], weights[5])
    assert check(run.plan.output_dir / "checkpoints" / "step-00000004").problem is None


@pytest.mark.parametrize(
    "error, published",
    [
        (TrainingStopped("spent"), True),
        (CheckpointError("full"), True),
        (RuntimeError("unforeseen"), True),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_that_ends_finishes_its_checkpoint_unless_it_is_interrupted(
    corpus: Path, error: BaseException, published: bool
) -> None:
    run = prepared(corpus)
    gate = slowed(run)
    with run.resources:
        with pytest.raises(type(error)), saves_finished(run):  # noqa: PT012
            save_run(run)
            assert gate.reached.wait(60)
            threading.Timer(0.1, gate.opened.set).start()
            raise error
        assert not is_saving()
        assert saved_steps(run.saver.root) == ([0] if published else [])
        assert len(events(run.plan.output_dir, "checkpoint")) == published


def test_a_run_that_fails_waits_only_so_long(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_train.engine.save.LAST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr("accel_train.checkpoint.saver.GIVE_UP_SECONDS", 0.1)
    run = prepared(corpus)
    gate = slowed(run)
    with run.resources, pytest.raises(RuntimeError), saves_finished(run):  # noqa: PT012
        save_run(run)
        raise RuntimeError
    assert is_saving()  # it was not waited for
    gate.opened.set()
    run.saver.wait()
    assert saved_steps(run.saver.root) == []


def test_weights_that_are_not_finite_are_never_saved(corpus: Path) -> None:
    run = prepared(corpus)
    with run.resources:
        save_run(run, wait=True)
        with torch.no_grad():
            next(run.strategy.inner.model.parameters()).view(-1)[0] = float("nan")
        run.state.step = 4
        save_run(run)
        with raises_golden(CheckpointError):
            save_run(run, wait=True)
    assert saved_steps(run.saver.root) == [0]
    assert steps_of(run.plan.output_dir, "checkpoint_refused") == [4, 4]
    assert not run.saver.failed


def test_rotation_keeps_the_newest_the_best_the_healthy_and_the_next_to_be_healthy(corpus: Path) -> None:
    checkpoint, guard = {"every_steps": 2, "keep": 1}, {"healthy_after_steps": 8}
    run = prepared(corpus, schedule={"max_steps": 26}, checkpoint=checkpoint, guard=guard)
    kept: dict[int, list[int | None]] = {}
    newest_healthy: dict[int, int] = {}
    on_event = run.observer.on_event

    def at_event(kind: str, step: int, message: str, **facts: Any) -> None:
        on_event(kind, step, message, **facts)
        if kind == "checkpoint":
            kept[step] = saved_steps(run.saver.root)
            newest_healthy[step] = max(healthy_steps(run.saver.root), default=0)

    run.observer.on_event = at_event  # type: ignore[method-assign]
    run.saver = Saver(run.saver.root, in_background=False)
    run.state.best_step = 6
    with run.resources:
        run_steps(run)
    assert kept[8] == [2, 6, 8], "2 is the next one to be healthy, 6 the best one, 8 the newest"
    assert kept[10] == [2, 6, 10], "2 is healthy, 6 is next, and the best"
    assert kept[14] == [6, 12, 14], "6 is healthy and the best, 12 is next"
    assert all(6 in steps and len(steps) <= 4 for step, steps in kept.items() if step > 6)
    assert all(step - healthy <= 2 * 8 + 2 for step, healthy in newest_healthy.items())


@pytest.mark.slow
def test_interrupted_twice_the_command_ends_at_once_and_leaves_nothing_half(corpus: Path) -> None:
    recipe = write_recipe_file(
        corpus,
        task="tests.support.tasks.disk_faults:DiskTask",
        checkpoint={"every_steps": 4},
        options={"slow_fsync": 0.5, "interrupt_at": 6},
    )
    done = subprocess.run(command(recipe), env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 130, done.stderr
    assert "the same command" in done.stderr
    root = corpus / "run" / "checkpoints"
    assert saved_steps(root) == [step_of(folder) for folder in checkpoint_folders(root)]
    publish(root, 99, {"model": write})


def test_save_whose_start_was_broken_off_by_a_signal_handler_is_waited_for(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises in the main thread, wherever that is, when a worker that reads data dies."""
    start, death = threading.Thread.start, RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    def break_off(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        threading.Timer(0.2, start, (thread,)).start()
        raise death

    monkeypatch.setattr(threading.Thread, "start", break_off)
    with pytest.raises(RuntimeError) as raised:
        saver.save(1, {"model": write}, nothing)
    assert raised.value is death
    saver.wait()
    assert [saved.error for saved in saver.take_ended()] == [None]
    assert not is_saving()
