"""Ports at which the processes of a run meet: two programs on one machine never choose the same one."""

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from accel_train.runtime import launcher
from tests.support.runs import REPOSITORY

FIRST, NUM_PORTS = 31_000, 40
CHOOSER = f"""
import itertools, json, sys
from accel_train.runtime import launcher
launcher._ports = itertools.cycle(range({FIRST}, 32_000))
for line in sys.stdin:
    print(json.dumps([launcher.free_port() for _ in range(int(line))]), flush=True)
"""


@pytest.fixture
def same_first_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin at the port at which the other process begins; later tests get other ports."""
    monkeypatch.setattr(launcher, "_ports", itertools.cycle(range(FIRST, 32_000)))
    yield
    while launcher._reserved:
        os.close(launcher._reserved.popleft())


def test_two_processes_that_begin_at_one_port_choose_different_ones(same_first_port: None) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", CHOOSER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert other.stdin is not None
    assert other.stdout is not None
    ours, theirs = [], []
    # In turns: the one chooses while the processes of the other have not opened their port yet.
    for _ in range(NUM_PORTS // 8):
        ours += [launcher.free_port() for _ in range(8)]
        other.stdin.write("8\n")
        other.stdin.flush()
        theirs += json.loads(other.stdout.readline())
    other.communicate()
    assert len(set(ours) | set(theirs)) == 2 * NUM_PORTS


def test_store_of_torch_opens_a_port_that_is_reserved(same_first_port: None) -> None:
    port = launcher.free_port()
    for is_libuv in (True, False):
        store = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=60), use_libuv=is_libuv)
        store.set("key", "value")
        joined = TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=60), use_libuv=is_libuv)
        assert joined.get("key") == b"value"
        del store, joined


def test_reserved_ports_do_not_pile_up(same_first_port: None) -> None:
    chosen = [launcher.free_port() for _ in range(launcher.NUM_RESERVED_PORTS + 3)]
    kept = [socket.socket(fileno=os.dup(descriptor)) for descriptor in launcher._reserved]
    assert [server.getsockname()[1] for server in kept] == chosen[3:]
    for server in kept:
        server.close()


ENDS = """
from accel_train.runtime import launcher
for _ in range(launcher.NUM_RESERVED_PORTS + 3):
    launcher.free_port()
"""


def test_a_process_ends_without_a_warning_about_its_reserved_ports() -> None:
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", ENDS]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
