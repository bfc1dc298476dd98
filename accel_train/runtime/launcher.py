"""The launcher of this process: end when it ends, check its variables, and ask it for a restart."""

import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from accel_train.runtime.driver import Environment

PR_SET_PDEATHSIG = 1
ALLOCATOR_VARIABLES, EXPANDABLE = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
MAY_RESTART = "accel_train_may_restart"
_is_for_one_run = False
_BORN = os.getpid(), os.getppid()
LAUNCH_REMEDY = (
    "start with torchrun or `accelerate launch`, because they set it. To train on one process, unset WORLD_SIZE and "
    "the RANKs"
)

_ports = itertools.cycle(range(20_000 + os.getpid() * 97 % 11_000, 32_000))
"""Each process begins at another one."""

NUM_RESERVED_PORTS = 64
_reserved: deque[int] = deque()
"""File descriptors of the reserved ports. A socket object would warn at the end of the interpreter."""


def free_port() -> int:
    """Return a free port below the range from which the system assigns ports to outgoing connections.

    The port is reserved for the processes that this one starts: no other process gets it from this function until
    this process ends or has taken 64 more.
    """
    while True:
        port = next(_ports)
        server = socket.socket()
        # Binding fails if another program uses the port, or has reserved it. Try the next one.
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            server.close()
            continue
        # A socket that is bound and does not listen keeps a second `bind` away, except one with this option: torch
        # sets it for the socket that listens.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.append(server.detach())
        if len(_reserved) > NUM_RESERVED_PORTS:
            os.close(_reserved.popleft())
        return port


def note_start() -> None:
    """Record that this process was started for one run, whose time begins with the process."""
    global _is_for_one_run
    _is_for_one_run = True


def take_age_seconds() -> float:
    """Return the seconds that this process has lived for its run; 0 for a later run, and in a program's own process."""
    global _is_for_one_run
    is_for_this_run, _is_for_one_run = _is_for_one_run, False
    if not is_for_this_run:
        return 0.0
    # This is accurate to 10 ms. psutil knows the machine's start only to the second.
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    # /proc exists only on Linux.
    except (OSError, ValueError, IndexError, AttributeError):
        import psutil

        age = time.time() - psutil.Process().create_time()
    return max(0.0, age)


def parent_command() -> list[str]:
    """Return the command line of the process that started this one, from its Python file or module on.

    It is empty if that process is not Python (a shell), or cannot be read.
    """
    import psutil

    try:
        parent = psutil.Process().parent()
        words = deque(parent.cmdline() if parent is not None else ())
    except (psutil.Error, OSError):
        return []
    if not words or not os.path.basename(words.popleft()).startswith(("python", "pypy")):
        return []
    while words and words[0].startswith("-"):
        option = words.popleft()
        if option == "-m":
            break
        if option in ("-W", "-X"):
            words.popleft()
    return [os.path.basename(words[0]), *list(words)[1:]] if words else [sys.executable]


def own_environment() -> Environment:
    """Return the variables with which this process (or the one it was forked from) was started; empty if unknown."""
    import psutil

    try:
        return psutil.Process().environ()
    except (psutil.Error, OSError):
        return {}


def stop_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent dies. SIGTERM lets a run save.

    The end of the parent's thread that started this process also counts. Linux only (prctl(2)).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def allow_restart(reason: str) -> None:
    """Allow the launcher a restart (`--max-restarts`) for this process's exit code 75. Otherwise 75 means a preemption.

    `python -m accel_train.torchrun` reads this from the file in which torch's processes report their error.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        facts = {"timestamp": str(int(time.time())), MAY_RESTART: True}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": reason, "extraInfo": facts}}, file)


def stop_with_launcher() -> None:
    """Call `stop_with_parent` under torchrun and `accelerate launch`.

    When these are killed, their processes would continue to train, hold their GPUs, and lock the run folder. Other
    launchers (slurmd, an MPI daemon) end their processes. They may also start them from a thread that ends, and the
    kernel counts its end as a death.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()
        if _is_launcher_gone():
            os.write(2, b"preempted: the launcher of this process has ended; run the same command again\n")
            signal.raise_signal(signal.SIGTERM)


def _is_launcher_gone() -> bool:
    """Return whether the parent ended before the kernel was asked to watch it. The process then has another parent."""
    pid, parent = _BORN
    # A forked process has the module of its parent, and another parent.
    if pid == os.getpid() and os.getppid() != parent:
        return True
    if os.getppid() != 1:
        return False
    # It ended even before this module was imported. In a container, a launcher may be process 1.
    try:
        return not os.path.basename(os.readlink("/proc/1/exe")).startswith("python")
    except OSError:  # another user's
        return True


def launch_mistake(environment: Environment) -> str | None:
    """Return the mistake in a launcher's variables that would make this process wait forever; None if valid."""
    numbers = {}
    for name, least in {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
        if (text := environment.get(name)) is not None:
            if not (text.isdecimal() and int(text) >= least):
                return f"{name}={text!r}: must be a whole number of at least {least}; {LAUNCH_REMEDY}"
            numbers[name] = int(text)
    world_size = numbers.get("WORLD_SIZE", 1)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and (rank == "RANK" or size in numbers) and numbers[rank] >= numbers.get(size, 1):
            return (
                f"{rank}={numbers[rank]} with {size}={numbers.get(size, 1)}: ranks count from 0 to {size} - 1; "
                f"{LAUNCH_REMEDY}"
            )
    if numbers.get("LOCAL_WORLD_SIZE", 1) > world_size:
        return f"LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']} is more than WORLD_SIZE={world_size}; {LAUNCH_REMEDY}"
    # Accelerate also reads ranks from MPI's variables.
    is_mpi = any(name.startswith(("PMI_", "OMPI_", "MV2_")) for name in environment)
    for name in ("RANK", "MASTER_ADDR") if world_size > 1 and not is_mpi else ():
        if not environment.get(name):
            return f"WORLD_SIZE={world_size}, but {name} is not set, so that the processes cannot meet; {LAUNCH_REMEDY}"
    return None


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments, unless the user has set it. Call before CUDA is used.

    Fixed segments fragment where sizes vary: lengths, FSDP2's gathered weights, a search for the micro-batch. torch 2.9
    to 2.13 read both variables.
    """
    if environment.keys().isdisjoint(ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


def loopback_problem(environment: Environment) -> str | None:
    """Return why gloo on this machine cannot be reached by other machines, with the fix; None if it can.

    gloo listens on the address of the machine's name, unless GLOO_SOCKET_IFNAME names an interface. NCCL finds the
    interface by itself.
    """
    import psutil

    name = socket.gethostname()
    address = _address_of(name) or "no address"
    is_reached = address != "no address" and not _is_loopback(address)
    if environment.get("GLOO_SOCKET_IFNAME") or is_reached:
        return None
    interfaces = [
        f"{interface} ({each.address})"
        for interface, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and not _is_loopback(each.address)
    ]
    return (
        f"GLOO_SOCKET_IFNAME is not set, and the name of this machine, {name}, resolves to {address}, "
        "which other machines cannot reach. Set GLOO_SOCKET_IFNAME on each machine to the interface that the others "
        f"reach; {name} has {', '.join(interfaces) or 'none with an IPv4 address'}"
    )


def spans_machines(environment: Environment) -> bool:
    """Return whether the launcher's variables describe processes on other machines than this one."""
    on_machine, master = environment.get("LOCAL_WORLD_SIZE", ""), environment.get("MASTER_ADDR", "")
    several = on_machine.isdigit() and environment.get("WORLD_SIZE", on_machine) != on_machine
    return several and not _is_loopback(_address_of(master) or master)


def _address_of(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def store_of_this_start(timeout: timedelta) -> dict[str, Any]:
    """Return arguments of `init_process_group` for processes that torchrun has restarted; empty for others.

    torchrun's store outlives the processes and keeps the entries of earlier ones. These are the addresses for gloo and
    NCCL, and the report of a failure. torch 2.13 uses the same names at each start.
    """
    environment = os.environ
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch.distributed import PrefixStore, TCPStore

    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    return {"store": PrefixStore(f"start-{restarts}", store), "rank": rank, "world_size": world_size}
