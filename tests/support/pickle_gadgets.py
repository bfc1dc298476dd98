"""Pickles that run code when they are read: each creates a canary file, whose absence proves that nothing read them."""

import builtins
import functools
import io
import operator
import os
import pathlib
import pickle
import posix
import pty
import runpy
import shutil
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Gadget:
    """Pickled, it becomes a call: `function(*arguments)` wherever it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def gadgets(canary: Path, script: Path) -> dict[str, Gadget]:
    """By name; `script` is a file that some of them run."""
    code = f"open({str(canary)!r}, 'w').close()"
    script.write_text(code)
    shell = f"touch {canary}"
    system = Gadget(os.system, shell)
    return {
        "os.system": system,
        "posix.system": Gadget(posix.system, shell),
        "os.spawnlp": Gadget(os.spawnlp, os.P_WAIT, "touch", "touch", str(canary)),
        "subprocess": Gadget(subprocess.check_call, ["touch", str(canary)]),
        "pty.spawn": Gadget(pty.spawn, [sys.executable, str(script)]),
        "eval": Gadget(builtins.eval, code),
        "exec": Gadget(builtins.exec, code),
        "os.mknod": Gadget(os.mknod, str(canary)),
        "timeit": Gadget(timeit.timeit, code, "pass", timeit.default_timer, 1),
        "runpy": Gadget(runpy.run_path, str(script)),
        "shutil.copy": Gadget(shutil.copy, str(script), str(canary)),
        "functools.partial": Gadget(functools.partial(os.system, shell)),
        "methodcaller": Gadget(operator.methodcaller("touch"), pathlib.Path(canary)),
        "pickle in a pickle": Gadget(pickle.loads, pickle.dumps(system)),
        "torch.load in a pickle": Gadget(functools.partial(torch.load, weights_only=False), io.BytesIO(saved(system))),
    }


def saved(value: Any) -> bytes:
    """As `torch.save` writes it: a zip with a pickle in it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


FORMS: dict[str, Callable[[Any], bytes]] = {"pickle": pickle.dumps, "torch.save": saved}
