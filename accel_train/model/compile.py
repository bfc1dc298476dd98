"""torch.compile, block by block where a model repeats blocks: the same code is compiled once and used for all of them.

What is compiled is kept in a folder of the user, so that the next start loads it instead of compiling.
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

from accel_train.core.format import format_count
from accel_train.core.state import Choice
from accel_train.data.cache import user_cache
from accel_train.recipe.schema import MemoryBudget, Precision
from accel_train.runtime.private import header_folder, set_activation_memory_budget, set_constant_floats

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Read by torch (and by Triton's part of it) whenever it compiles or loads."""
BUILD_MARK = "_CxxBuild"
"""Ending of the folder that torch makes before it starts a C++ compiler, and removes when the compiler is done."""


class GraphCount:
    """The number of graphs that torch.compile has made in this process for the modules that were compiled with it."""

    num_graphs = 0

    def keep_all(self, guards: Sequence[Any]) -> list[bool]:
        """Count a graph: torch asks once for each which of its guards to keep (`guard_filter_fn`), and all are kept."""
        self.num_graphs += 1
        return [True] * len(guards)


def compile_module(
    module: nn.Module, precision: Precision, graphs: GraphCount | None = None, *, lengths_vary: bool = False
) -> dict[str, Choice[Any]]:
    """Compile in place, before the module is wrapped; parameter names stay as they were. Returns what was chosen.

    With `lengths_vary` the first graph is for any shape: else torch makes one for the first shape, and at the second shape
    another one for all. (Two dimensions of the first batch that happen to be equal are taken for one, which costs a second graph.)
    """
    requested, checkpointing = precision.compile, precision.gradient_checkpointing
    if requested is False:
        return {"precision.compile": Choice("no", "as set")}
    set_activation_memory_budget(checkpointing.memory_budget if isinstance(checkpointing, MemoryBudget) else 1.0)
    # With `dynamic=True` floats are unknown, too; torch finds at the end that it needs their values, and traces all again.
    set_constant_floats(lengths_vary)
    # Dynamo looks for it where a graph continues after a loss that is computed outside of graphs (`chunked_loss.py`).
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
    mode = precision.compile_mode  # torch takes a mode or options, not both
    by: dict[str, Any] = {"options": {"guard_filter_fn": count.keep_all}} if mode == "default" else {"mode": mode}
    if precision.compile_backend != "inductor":  # else torch's default, which a program may have set
        by["backend"] = precision.compile_backend
    for each in compiled:
        each.compile(
            dynamic=True if lengths_vary else None,
            **by,
        )
    if lengths_vary:
        choice = Choice(choice.value, f"{choice.reason}; for any length from the start: those of this data vary")
    return {"precision.compile": choice, "compile_cache": choose_cache()}


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members of the longest nn.ModuleList of two or more modules of one class; empty where there is none."""
    lists = [
        list(child)
        for child in module.modules()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1
    ]
    return max(lists, key=len, default=[])


def choose_cache() -> Choice[str]:
    """Choose and set the folder that compiled code is kept in: by TORCHINDUCTOR_CACHE_DIR, else in the user's cache folder.

    Its files are executed, so a folder that another user owns, or may write to, is not used: what is compiled then lies in a
    temporary folder, for this start alone. Files that a killed process left unfinished are removed.
    """
    choice = _choose_folder()
    folder, headers = Path(choice.value), header_folder()
    try:
        problem = _make_private(headers.parent)
    except OSError as error:
        problem = str(error)
    if problem:  # torch's folder has a name that other users can guess, and lies in /tmp
        headers = header_folder(folder / headers.name)
    num_dropped = drop_unfinished(folder, "??/*") + drop_unfinished(headers, "*")
    if not num_dropped:
        return choice
    dropped = f"removed {format_count(num_dropped, 'file')} that a killed compiler left unfinished"
    return Choice(choice.value, f"{choice.reason}; {dropped}")


def drop_unfinished(folder: Path, pattern: str) -> int:
    """Remove files in `folder` that a compiler was killed in, before torch loads them; returns their number.

    torch renames its own files into place, and takes a file that exists for complete. C++ compilers write in place.
    torch makes a folder `KEY..._CxxBuild` next to their output before they start, and removes it when they are done.
    It holds the key's lock meanwhile, so the files of another process that compiles now are left alone.
    """
    num_dropped = 0
    unfinished = filter(_is_unfinished, folder.glob(pattern))
    for parent, key in sorted({(each.parent, each.name.split(".")[0].removesuffix(BUILD_MARK)) for each in unfinished}):
        lock = folder / "locks" / f"{key}.lock"
        try:
            lock.parent.mkdir(exist_ok=True)
            with FileLock(lock, timeout=0):
                files = sorted(parent.glob(f"{key}*"))
                if not any(map(_is_unfinished, files)):  # another process has removed it by now
                    continue
                outputs = [each for each in files if each.suffix in (".so", ".o", ".gch", ".pch")]
                for each in outputs:
                    each.unlink()
                for each in files:  # last: what a kill leaves here is still marked
                    if each.name.endswith(BUILD_MARK):
                        shutil.rmtree(each)
                num_dropped += len(outputs)
        except OSError:  # a lock that is held is a TimeoutError; or the user may not write to the folder
            continue
    return num_dropped


def _is_unfinished(path: Path) -> bool:
    """Return whether this is the mark of an unfinished compiler, or a library shorter than its header says."""
    if path.name.endswith(BUILD_MARK):
        # TORCHINDUCTOR_CPP_WRAPPER=1: another key's lock guards the second part of a kernel, so it may be in use.
        return not path.name.endswith(f".optimized{BUILD_MARK}")
    if path.suffix != ".so":
        return False
    try:
        with path.open("rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:  # another process has removed it
        return False
    if size >= 64 and header.startswith(b"\x7fELF\x02\x01"):  # 64 bits, little-endian
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
    except (OSError, RuntimeError) as error:  # no room, no permission, or no home folder
        problem = str(error)
    if problem:
        folder = Path(tempfile.mkdtemp(prefix="accel-train-compiled-"))
    os.environ[CACHE_VARIABLE] = str(folder)
    if problem:
        return Choice(str(folder), f"for this start alone: {problem}; or set {CACHE_VARIABLE}")
    return Choice(str(folder), "compiled code is kept there, for the next start on a machine of this kind")


def machine_kind() -> str:
    """Return a name for torch's version and this CPU: its kernels use the CPU's own instructions, which torch's keys do not name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.lower().startswith(("flags", "features"))})
    digest = hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()
    return f"torch-{torch.__version__}-{digest[:8]}"


def _is_torchs_own(folder: Path) -> bool:
    """Return whether this is the folder that torch chooses, and then sets in this process as if the user had."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


def _make_private(folder: Path) -> str:
    """Make a folder that this user alone can enter; return why it is not one, or nothing."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not S_ISDIR(found.st_mode):
        return f"{folder} is a link, and compiled code is executed; make it a folder"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid}, and compiled code is executed; remove it, or make it yours (chown)"
    if found.st_mode & 0o022:
        return f"other users may write to {folder}, and compiled code is executed; remove it"
    folder.chmod(0o700)
    return ""
