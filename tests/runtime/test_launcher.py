"""A process ends with its launcher, also when the launcher ended first, and never for any other parent."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.marks import faults
from tests.support.runs import environment

LAUNCHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "child.py"], stderr=open("error", "w"))
open("pid", "w").write(str(child.pid))
time.sleep(600)
"""
CHILD = """
import os, time
{first}
parent = os.getppid()
open("ready", "w").close()
while os.getppid() == parent:
    time.sleep(0.01)
try:
    {call}
finally:
    open("went on", "w").close()
"""
CALLS = {
    "processes": ("from accel_train.runtime.launcher import stop_with_launcher", "stop_with_launcher()"),
    "Trainer": ("from accel_train import Trainer", "Trainer()"),
    "SFTTrainer": ("from accel_train import SFTTrainer", "SFTTrainer('no such model')"),
}


@pytest.mark.parametrize(
    ("kind", "is_launcher"),
    [
        ("processes", True),
        ("processes", False),
        faults("Trainer", True),
        faults("SFTTrainer", True),
    ],
)
def test_a_process_whose_launcher_ended_before_it_looked_ends_at_once_and_one_of_a_shell_goes_on(
    tmp_path: Path, kind: str, is_launcher: bool
) -> None:
    first, call = CALLS[kind]
    (tmp_path / "child.py").write_text(CHILD.format(first=first, call=call))
    variables = {**environment(), **({"TORCHELASTIC_RUN_ID": "none"} if is_launcher else {})}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=tmp_path, env=variables) as launcher:
        wait_until(lambda: (tmp_path / "ready").exists())
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        launcher.kill()
    child.wait(60)
    assert (tmp_path / "went on").exists() == (not is_launcher)
    assert ("\npreempted: the launcher" in f"\n{(tmp_path / 'error').read_text()}") == is_launcher


def wait_until(is_done: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
