"""Two machines: one of them is lost in mid-run, is started again, joins the other one, and the run goes on as if
nothing had been.

A machine here is a launcher with its process: on one address, or in a network namespace with an address and a host name
of
its own, where that is permitted.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import free_port, run_forked
from tests.support.runs import (
    REPOSITORY,
    TESTS,
    assert_saved_at_the_stop,
    command,
    environment,
    event_steps,
    events,
    losses,
    ran,
    wait_for_step,
    write_corpus,
    write_recipe_file,
)

pytestmark = pytest.mark.faults
STEPS = 40
RUN: dict[str, Any] = {
    "task": "tests.support.tasks.process_faults:FaultTask",
    "schedule": {"max_steps": STEPS},
    "checkpoint": {"every_steps": 5},
}


@dataclass
class Machines:
    """Machines by number, each with what comes before its commands, its address, and the name of
    its network interface.
    """

    prefixes: Sequence[Sequence[str]]
    addresses: Sequence[str]
    interface: str
    port: int = field(default_factory=free_port)
    launchers: list[psutil.Popen] = field(default_factory=list)

    def start(self, number: int, recipe: Path, log: Path) -> psutil.Popen:
        """The same command on each machine, as a user or a scheduler gives it."""
        torchrun = "-m accel_train.torchrun --nnodes=2 --nproc_per_node=1 --max_restarts=3 --rdzv_backend=c10d"
        place = f"--rdzv_id=run --rdzv_endpoint={self.addresses[0]}:{self.port} --local_addr={self.addresses[number]}"
        words = [sys.executable, *torchrun.split(), *place.split(), "-m", "accel_train", "run", str(recipe)]
        path = os.pathsep.join((str(TESTS), str(REPOSITORY)))
        variables = environment(ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME=self.interface, PYTHONPATH=path)
        with log.open("ab") as out:
            launcher = psutil.Popen(
                [*self.prefixes[number], *words], env=variables, stdout=out, stderr=subprocess.STDOUT
            )
        self.launchers.append(launcher)
        return launcher

    def wait_for_the_first(self, logs: Sequence[Path]) -> None:
        """Where both machines have one address, either may take the port that they meet at; it is to be the one that
        lives.
        """
        deadline = time.monotonic() + 300
        while self.addresses[0] == self.addresses[1]:
            with suppress(OSError), socket.create_connection((self.addresses[0], self.port), timeout=1):
                return
            assert time.monotonic() < deadline, said(logs)
            time.sleep(0.1)

    def lose(self, launcher: psutil.Popen) -> None:
        """A machine without power: nothing of it says a word."""
        for process in [launcher, *launcher.children(recursive=True)]:
            process.kill()
        launcher.wait()

    def cut(self, is_cut: bool) -> None:
        """The cable between them."""
        ip("-n", self.prefixes[1][3], "link", "set", self.interface, "down" if is_cut else "up")

    def end(self) -> None:
        for launcher in self.launchers:
            with suppress(psutil.NoSuchProcess):
                self.lose(launcher)


@pytest.fixture
def one_address() -> Iterator[Machines]:
    machines = Machines([[], []], ["127.0.0.1"] * 2, "lo")
    yield machines
    machines.end()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_addresses(tmp_path: Path) -> Iterator[Machines]:
    """Two network namespaces, joined by a cable (veth)."""
    names = [f"at-{os.getpid()}-{number}" for number in range(2)]
    addresses = [f"10.217.{os.getpid() % 250}.{number + 1}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(names)
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, addresses, names)))
    become = f'hostname "$0" && mount --bind {hosts} /etc/hosts && exec "$@"'
    inside = ["unshare", "--uts", "--mount", "sh", "-c", become]
    machines = Machines([["ip", "netns", "exec", name, *inside, name] for name in names], addresses, "cable")
    yield machines
    machines.end()
    remove(names)


def remove(names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "delete", name)


def lose_one_and_start_it_again(folder: Path, machines: Machines, *, silently: bool = False) -> None:
    """`silently`: as by a power cut, which sends nothing, not even that a connection is over."""
    write_corpus(folder)
    whole = write_recipe_file(folder, **RUN, output_dir=str(folder / "whole")).rename(folder / "whole.yaml")
    undisturbed = run_forked(["run", str(whole)], 2, folder=folder / "processes")
    undisturbed.expect(0)

    options = {"options": {"seconds": {"step": 0.2}}, "guard": {"hang_timeout_seconds": 6 if silently else 600}}
    recipe, run = write_recipe_file(folder, **RUN, **options), folder / "run"
    logs = [folder / f"machine-{number}.log" for number in range(2)]
    first = machines.start(0, recipe, logs[0])
    machines.wait_for_the_first(logs)
    second = machines.start(1, recipe, logs[1])
    wait_for_step(run, 12, lambda: first.poll() is None, lambda: said(logs))
    if silently:
        machines.cut(True)
    machines.lose(second)
    if silently:
        wait_until(lambda: bool(events(run, "hang")), logs)
        machines.cut(False)
    time.sleep(1)
    second = machines.start(1, recipe, logs[1])
    assert first.wait(120) == 0, said(logs)
    assert second.wait(30) == 0, said(logs)

    # The newest checkpoint: training may come past step 12 before the machine is lost.
    assert event_steps(run, "resume") in ([10], [15])
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert losses(run) == losses(folder / "whole")


def wait_until(is_so: Callable[[], bool], logs: Sequence[Path]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline, said(logs)
        time.sleep(0.05)


def said(logs: Sequence[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())


def test_machine_that_is_lost_and_started_again_rejoins_and_the_run_ends_as_if_undisturbed(
    tmp_path: Path, one_address: Machines
) -> None:
    lose_one_and_start_it_again(tmp_path, one_address)


@pytest.mark.parametrize("asked", [0, 1])
def test_machine_that_is_asked_to_stop_ends_both_with_75_in_seconds_and_the_run_is_saved(
    corpus: Path, one_address: Machines, asked: int
) -> None:
    recipe, run = write_recipe_file(corpus, **RUN, options={"seconds": {"step": 0.2}}), corpus / "run"
    logs = [corpus / f"machine-{number}.log" for number in range(2)]
    first = one_address.start(0, recipe, logs[0])
    one_address.wait_for_the_first(logs)
    both = [first, one_address.start(1, recipe, logs[1])]
    wait_for_step(run, 7, lambda: first.poll() is None, lambda: said(logs))
    both[asked].terminate()
    assert [launcher.wait(30) for launcher in both] == [75, 75], said(logs)
    [step] = event_steps(run, "preempted")
    assert step >= 7
    assert_saved_at_the_stop(run)


def test_machine_with_an_address_and_a_name_of_its_own_is_lost_and_rejoins(
    tmp_path: Path, two_addresses: Machines
) -> None:
    lose_one_and_start_it_again(tmp_path, two_addresses)


def test_machine_that_falls_silent_is_given_up_after_the_hang_timeout_and_rejoins(
    tmp_path: Path, two_addresses: Machines
) -> None:
    lose_one_and_start_it_again(tmp_path, two_addresses, silently=True)


def test_torchrun_itself_starts_killed_processes_again_and_the_run_goes_on(corpus: Path) -> None:
    recipe = write_recipe_file(
        corpus, **{**RUN, "schedule": {"max_steps": 20}}, options={"kill_at": {"step": 12, "rank": 1}}
    )
    words = command(recipe, processes=2)
    words.insert(words.index("--standalone"), "--max_restarts=1")
    done = ran(words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert event_steps(corpus / "run", "resume") == [10]
    assert list(losses(corpus / "run")) == list(range(1, 21))
