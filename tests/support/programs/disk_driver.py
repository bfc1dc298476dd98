"""What a run does on the disk, alone in a light process that can be killed at each of its calls.

python disk_driver.py SCENARIO ROOT          prepares nothing, does it once (for strace)
python disk_driver.py SCENARIO ROOT points   kills a child before its 1st call, the next one before its 2nd, ...
python disk_driver.py SCENARIO ROOT log      does it once, and prints its calls in order
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":  # without the package's __init__, whose recipe takes pydantic: 10 times the rest
    package = ModuleType("accel_train")
    package.__path__ = [str(Path(__file__).parents[3] / "accel_train")]
    sys.modules["accel_train"] = package

from accel_train.checkpoint.health import add_tags
from accel_train.checkpoint.rollback_log import remove_abandoned, write_rollbacks
from accel_train.checkpoint.saver import Saver
from accel_train.checkpoint.store import folder_of, publish, rotate
from accel_train.core.state import Rollback

RECORD = Rollback(number=1, at_step=14, to_step=4, skip_first=9, skip_last=16)
CALLS = (
    "?mkdir,?mkdirat",
    "write",
    "?chmod,fchmodat",
    "fsync",
    "?rename,?renameat,?renameat2",
    "?unlink,unlinkat",
    "?rmdir,unlinkat",
)
"""System calls that change a disk or wait for it: what `strace` kills at."""
PYTHON_CALLS = ("mkdir", "write", "chmod", "fsync", "rename", "replace", "unlink", "rmdir")
"""The same in Python's os module; and opening a file for writing."""


def write(path: Path, *, content: bytes) -> None:
    """In two halves, so that a kill can come between."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    half = len(content) // 2
    for part in (content[:half], content[half:]):
        os.write(descriptor, part)
    os.close(descriptor)


def files(step: int, mark: str = "") -> dict[str, Callable[[Path], None]]:
    """Files like a run's, which differ from step to step."""
    trainer = {"state": {"step": step, "rollbacks": []}, "identity": {}, "settings": {}, "origins": {}, "mark": mark}
    content = {
        "model.safetensors": f"weights {step}{mark}".encode() * 5000,
        "optimizer.safetensors": f"moments {step}{mark}".encode() * 9000,
        "trainer.json": json.dumps(trainer).encode(),
    }
    return {name: partial(write, content=value) for name, value in content.items()}


def prepare(scenario: str, root: Path) -> None:
    """What is there before."""
    for step in (4, 8, 12) if scenario == "roll back" else (1, 2):
        publish(root, step, files(step))
    if scenario == "replace a broken one":
        (folder_of(root, 2) / "trainer.json").write_bytes(b"{}")
    if scenario in ("roll back", "tag"):
        add_tags(root, [4, 1])


def act(scenario: str, root: Path) -> None:
    """What is killed."""
    if scenario == "save":
        publish(root, 3, files(3))
        rotate(root, 2)
    elif scenario == "save beside":
        saver = Saver(root, in_background=True)
        saver.save(3, files(3), lambda: rotate(root, 2))
        saver.wait()
    elif scenario.startswith("replace"):
        publish(root, 2, files(2, "again"))
    elif scenario == "roll back":
        write_rollbacks(root.parent, [RECORD])
        remove_abandoned(root, [RECORD])
    else:
        add_tags(root, [2])


SCENARIOS = ("save", "save beside", "replace", "replace a broken one", "roll back", "tag")


def watch_calls(before: Callable[[str, Any], None]) -> None:
    """Have `before` called with name and first argument before each call that changes the disk or waits for it."""

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or any(letter in str(args[1:2]) for letter in "wax+"):
                before(name, args[0])
            return real(*args, **kwargs)

        return call

    for name in PYTHON_CALLS:
        setattr(os, name, watched(name, getattr(os, name)))
    io.open = watched("open", io.open)  # type: ignore[assignment]


def die_at(number: int) -> None:
    """Have this process killed before its so-manieth call."""
    calls = 0

    def count(name: str, argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_calls(count)


def path_of(argument: Any) -> str:
    """The path that a call is about."""
    return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else str(argument)


def main(scenario: str, root: Path, mode: str) -> None:
    """Do what the command line asks."""
    if mode == "log":
        watch_calls(lambda name, argument: print(name, path_of(argument), flush=True))
    if mode != "points":
        act(scenario, root)
        return
    number, status = 0, 1
    while status != 0:
        number += 1
        place = root / str(number) / "checkpoints"
        prepare(scenario, place)
        child = os.fork()
        if child == 0:
            die_at(number)
            act(scenario, place)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    print(number)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
