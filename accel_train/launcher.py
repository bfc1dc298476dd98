"""The launcher that started this process: it must not be outlived for long."""

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies, however it dies (prctl(2)): a run then saves, and ends.

    Linux only; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_with_launcher() -> None:
    """`stop_with_parent`, where that is torchrun or `accelerate launch`.

    Killed, they leave processes behind that train on, hold their GPUs and keep the run folder locked. Other launchers
    (slurmd, an MPI daemon) see to their processes, and may start them from a thread that ends, which counts as a death.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()
