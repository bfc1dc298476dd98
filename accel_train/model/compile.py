"""torch.compile, applied block by block: a model's repeated blocks share one compiled block.

Compiled code is kept in a folder of the user. The next start loads it instead of compiling.
"""

import hashlib
import os
import platform
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import torch
from filelock import FileLock
from torch import nn
from torch._dynamo import lookup_backend

from accel_train.core.errors import first_line
from accel_train.core.files import user_cache
from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.recipe.schema import MemoryBudget, Precision
from accel_train.runtime.private import (
    compile_backward_at_once,
    header_folder,
    set_activation_memory_budget,
    set_constant_floats,
)

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that torch and Triton read each time they compile or load code."""
BUILD_MARK = "_CxxBuild"
"""Suffix of the folder that torch makes before it starts a C++ compiler and removes when the compiler is done."""


class GraphCount:
    """Number of graphs that torch.compile has made in this process for the modules compiled with this counter."""

    num_graphs = 0
    failure = ""
    """Why the compiler failed, if it did."""

    def keep_all(self, guards: Sequence[Any]) -> list[bool]:
        """Count one graph and keep all of its guards. torch calls this once per graph (`guard_filter_fn`)."""
        self.num_graphs += 1
        return [True] * len(guards)

    def or_eager(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph with torch's default backend, or return it as it is if the compiler fails."""
        try:
            return lookup_backend("inductor")(graph, inputs)
        # Compilers fail in many ways: no C compiler, no ptxas, an operator without a lowering, a full disk.
        except Exception as error:
            self.failure = self.failure or first_line(error)
            return graph.forward


def compile_module(
    module: nn.Module,
    precision: Precision,
    graphs: GraphCount | None = None,
    *,
    lengths_vary: bool = False,
    auto: Choice[Any] | None = None,
) -> Choices:
    """Compile a module in place, before it is wrapped; return the choices. Parameter names do not change.

    `auto` is what `precision.compile: auto` came to. The blocks then run as they are if the compiler fails.

    With `lengths_vary`, the first graph accepts any shape. Without it, torch compiles one graph for the first shape and
    another for any shape at the second one. If two dimensions of the first batch are equal, torch treats them as one,
    at the cost of a second graph.
    """
    requested, checkpointing = precision.compile, precision.gradient_checkpointing
    if not precision.compiles:
        return {"precision.compile": Choice("no", "as set" if auto is None else auto.reason)}
    set_activation_memory_budget(checkpointing.memory_budget if isinstance(checkpointing, MemoryBudget) else 1.0)
    # With `dynamic=True`, torch also treats floats as unknown. It finds at the end that it needs their values, and then
    # traces everything again.
    set_constant_floats(lengths_vary)
    # Dynamo reads `.grad` where a graph continues after a loss that is computed outside of graphs (`chunked_loss.py`).
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    blocks, count = repeated_blocks(module), graphs or GraphCount()
    if requested == "model" or not blocks:
        choice = Choice("model", "as set" if requested == "model" else "the model repeats no block")
        compiled = [module]
    else:
        choice = Choice("blocks", f"{len(blocks)} x {type(blocks[0]).__name__} share one compiled block")
        compiled = blocks
    if auto is not None:
        choice = Choice(choice.value, f"{choice.reason}; {auto.reason}")
    # torch accepts a mode or options, not both.
    mode = precision.compile_mode
    by: dict[str, Any] = {"options": {"guard_filter_fn": count.keep_all}} if mode == "default" else {"mode": mode}
    # Without a backend, torch uses its default. A program may have changed it.
    if precision.compile_backend != "inductor":
        by["backend"] = precision.compile_backend
    elif auto is not None and mode == "default":
        compile_backward_at_once()
        by["backend"] = count.or_eager
    for each in compiled:
        each.compile(dynamic=True if lengths_vary else None, **by)
    if lengths_vary:
        choice = Choice(
            choice.value, f"{choice.reason}; for any length from the start, because lengths vary in this data"
        )
    return {"precision.compile": choice, "compile_cache": choose_cache()}


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the longest nn.ModuleList of at least two modules of one class, as a list; empty if the model has none.

    A list of modules that have children comes before a longer one without: the linear layers of a head are not blocks.
    """
    lists = [
        list(child)
        for child in module.modules()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1
    ]
    return max(lists, key=lambda blocks: (next(blocks[0].children(), None) is not None, len(blocks)), default=[])


def blocks_in_order(model: Any) -> list[nn.Module]:
    """Return the repeated blocks of a model: for an encoder and a decoder, the blocks of both, in this order."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return [*repeated_blocks(model.get_encoder()), *repeated_blocks(model.get_decoder())]
    return repeated_blocks(model)


def choose_cache() -> Choice[str]:
    """Choose the folder for compiled code, set it in the environment, and return the choice.

    TORCHINDUCTOR_CACHE_DIR names the folder; the default is in the user's cache folder. The folder's files are
    executed. A folder that another user owns or may write to is therefore not used: a temporary folder replaces it for
    this start. Files that a killed process left unfinished are removed.
    """
    choice = _choose_folder()
    folder, headers = Path(choice.value), header_folder()
    try:
        problem = _make_private(headers.parent)
    except OSError as error:
        problem = str(error)
    # The name of torch's folder is predictable for other users, and the folder is in /tmp.
    if problem:
        headers = header_folder(folder / headers.name)
    num_dropped = drop_unfinished(folder, "??/*") + drop_unfinished(headers, "*")
    if not num_dropped:
        return choice
    dropped = f"removed {format_count(num_dropped, 'file')} that a killed compiler left unfinished"
    return Choice(choice.value, f"{choice.reason}; {dropped}")


def drop_unfinished(folder: Path, pattern: str) -> int:
    """Remove the files in `folder` that a killed compiler left unfinished; return their number.

    This must run before torch loads the files, because torch takes an existing file for complete. torch renames its own
    files into place, but C++ compilers write in place.

    torch makes a folder `KEY..._CxxBuild` next to their output before they start, and removes it when they are done. It
    holds the key's lock meanwhile. Files that another process is compiling are therefore left alone.
    """
    num_dropped = 0
    unfinished = filter(_is_unfinished, folder.glob(pattern))
    for parent, key in sorted({(each.parent, each.name.split(".")[0].removesuffix(BUILD_MARK)) for each in unfinished}):
        lock = folder / "locks" / f"{key}.lock"
        try:
            lock.parent.mkdir(exist_ok=True)
            with FileLock(lock, timeout=0):
                files = sorted(parent.glob(f"{key}*"))
                # Another process has removed the unfinished file.
                if not any(map(_is_unfinished, files)):
                    continue
                outputs = [each for each in files if each.suffix in (".so", ".o", ".gch", ".pch")]
                for each in outputs:
                    each.unlink()
                # Remove the marks last: after a kill here, the remaining files are still marked.
                for each in files:
                    if each.name.endswith(BUILD_MARK):
                        shutil.rmtree(each)
                num_dropped += len(outputs)
        # A held lock raises TimeoutError, which is an OSError. The user may also lack write permission.
        except OSError:
            continue
    return num_dropped


def _is_unfinished(path: Path) -> bool:
    """Return whether a path marks an unfinished compilation, or is a library shorter than its header says."""
    if path.name.endswith(BUILD_MARK):
        # With TORCHINDUCTOR_CPP_WRAPPER=1, another key's lock guards the second part of a kernel, so the part may be in
        # use.
        return not path.name.endswith(f".optimized{BUILD_MARK}")
    if path.suffix != ".so":
        return False
    try:
        with path.open("rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    # Another process has removed the file.
    except OSError:
        return False
    # A 64-bit, little-endian ELF file.
    if size >= 64 and header.startswith(b"\x7fELF\x02\x01"):
        sections_begin, section_size, num_sections = struct.unpack("<40xQ10xHH2x", header)
        return bool(size < sections_begin + section_size * num_sections)
    return size < 64 or (sys.platform == "linux" and not header.startswith(b"\x7fELF"))


def _choose_folder() -> Choice[str]:
    try:
        folder = user_cache() / "compiled" / machine_kind()
        given = os.environ.get(CACHE_VARIABLE)
        if given and Path(given) != folder and not _is_torchs_own(Path(given)):
            return Choice(given, f"as {CACHE_VARIABLE} says; compiled code is kept there")
        problem = _make_private(folder.parent) or _make_private(folder)
        if any(map(str.isspace, str(folder))):
            problem = f"{folder} has a blank in its name, and torch's commands for compilers split at it"
    # The disk is full, the permission is missing, or the user has no home folder.
    except (OSError, RuntimeError) as error:
        problem = str(error)
    why = "compiled code is kept there, for the next start on a machine of this kind"
    if problem:
        folder = Path(tempfile.mkdtemp(prefix="accel-train-compiled-"))
        why = f"for this start alone: {problem}; or set {CACHE_VARIABLE}"
    os.environ[CACHE_VARIABLE] = str(folder)
    return Choice(str(folder), why)


def machine_kind() -> str:
    """Return a name for torch's version and this CPU's features.

    Compiled kernels use instructions of this CPU, and torch's cache keys do not name the CPU.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.lower().startswith(("flags", "features"))})
    digest = hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()
    return f"torch-{torch.__version__}-{digest[:8]}"


def _is_torchs_own(folder: Path) -> bool:
    """Return whether torch chose this folder. torch also writes its choice into the environment variable."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


def _make_private(folder: Path) -> str:
    """Make a folder that only this user can enter; return the problem, or an empty string."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not S_ISDIR(found.st_mode):
        return f"{folder} is a link, and compiled code is executed; make it a folder"
    if found.st_uid != os.getuid():
        return (
            f"{folder} belongs to user {found.st_uid}, and compiled code is executed; remove it, or make it yours "
            "(chown)"
        )
    if found.st_mode & 0o022:
        return f"other users may write to {folder}, and compiled code is executed; remove it"
    folder.chmod(0o700)
    return ""
