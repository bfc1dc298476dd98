"""Check that all processes have the same recipe, data, and code, and share a run folder, before a model is built."""

import hashlib
import json
import os
import platform
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_train.core.files import is_seen
from accel_train.core.json_io import dotted_items, parse_json
from accel_train.core.state import Choice, JsonRecord
from accel_train.core.version import __version__
from accel_train.recipe.schema import Recipe
from accel_train.runtime.process_group import concluded, on_main
from accel_train.task import TaskData

OF_ONE_MACHINE: Any = {
    "output_dir": True,
    "log": True,
    "data": {"train", "eval", "cache_dir", "cache_limit", "num_workers", "pin_memory"},
}
"""Settings that may differ between machines, or that only the main process uses. The data itself is compared."""
OF_COMPUTATION = ("precision.", "model.", "loss.", "optimizer", "batch", "document mask", "parallel")
"""Prefixes of the choices that determine a step's result. Other choices (threads, readers) may differ by machine."""
PACKAGE_ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "numpy")


def check_agreement(recipe: Recipe, data: TaskData, num_processes: int) -> None:
    """Compare the recipe, data, and code of each process with rank 0.

    Raises:
        ValueError: on all processes: some process differs. The message names each one and the difference.
    """
    if num_processes == 1:
        return
    if problems := concluded(facts_of(recipe, data), disagreements):
        raise ValueError(
            f"the processes of this run do not agree: {'; '.join(problems)}. Give all of them the same command, files "
            "and installation"
        )


def check_choices(choices: Mapping[str, Choice[Any]]) -> None:
    """Compare the choices of each process that determine the result of a step with rank 0.

    A process that builds an empty model makes fewer choices. Only choices that all processes have made are compared.

    Raises:
        ValueError: on all processes: some process differs. The message names each one and the difference.
    """
    own = {name: str(choice.value) for name, choice in choices.items() if name.startswith(OF_COMPUTATION)}

    def compare(everywhere: list[dict[str, str]]) -> list[str]:
        on_all = set.intersection(*map(set, everywhere))
        return disagreements([{name: here[name] for name in on_all} for here in everywhere])

    if problems := concluded(own, compare):
        raise ValueError(
            f"the processes of this run would not compute alike: {'; '.join(problems)}. Set these to what all machines "
            "have, or use machines of one kind"
        )


def check_shared(output_dir: Path, num_processes: int) -> None:
    """Write a file into the run folder on rank 0, and check that every other process sees it under its own path.

    Raises:
        ValueError: on all processes: some of them see another folder, or rank 0 cannot write.
    """
    if num_processes == 1:
        return
    # `checkpoints` may be a link to another disk. After a kill, `resume.remove_leftovers` removes the file by this
    # name.
    below = "checkpoints" if (output_dir / "checkpoints").is_dir() else "."
    name = f"{below}/.shared-{secrets.token_hex(8)}.tmp"

    def write() -> tuple[str, Path]:
        try:
            (output_dir / name).touch(mode=0o600)
        except OSError as error:
            raise ValueError(f"output_dir={output_dir} cannot be written: {error.strerror}") from error
        return name, output_dir

    try:
        written, folder = on_main(write)
        blind = who_lacks(output_dir / written)
    finally:
        if dist.get_rank() == 0:
            (output_dir / name).unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"output_dir={folder} is not shared: {blind} does not see what rank 0 writes there. All processes write "
            "or read the checkpoints of a run; give an output_dir on storage that all machines share"
        )


def who_lacks(path: Path) -> str:
    """Return one process that does not see a file and the number of others; empty if all see it.

    All processes call this function.
    """
    here = f"rank {dist.get_rank()} (process {os.getpid()} on {socket.gethostname()}, {path.parent.absolute()})"

    def count(everywhere: list[str | None]) -> str:
        blind = [each for each in everywhere if each is not None]
        return f"{blind[0]}{f', and {len(blind) - 1} more,' if len(blind) > 1 else ''}" if blind else ""

    return concluded(None if is_seen(path) else here, count)


def facts_of(recipe: Recipe, data: TaskData) -> JsonRecord:
    """Return the facts that must be equal on all processes, by name, as plain JSON values."""
    facts: JsonRecord = {
        **dict(dotted_items(recipe.model_dump(mode="json", exclude=OF_ONE_MACHINE))),
        "the data": {
            "fingerprint": data.fingerprint,
            **data.settings,
            "samples": len(data.train),  # type: ignore[arg-type]
            "held out": 0 if data.eval is None else len(data.eval),  # type: ignore[arg-type]
        },
        "the vocabulary": getattr(data.source, "vocab_size", None),
        "accel_train": f"{__version__}, source {_digest(sorted(PACKAGE_ROOT.rglob('*.py')))}",
        "the task": _task_source(recipe.task),
        "python": platform.python_version(),
        **{f"package {name}": _installed(name) for name in PACKAGES},
    }
    return parse_json(json.dumps(facts, default=str))


def disagreements(everywhere: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a phrase for each process and fact that differs from the first process."""
    first = everywhere[0]
    return [
        f"{name} is {here.get(name)!r} on rank {rank}, and {first.get(name)!r} on rank 0"
        for rank, here in enumerate(everywhere[1:], start=1)
        for name in sorted(first.keys() | here.keys())
        if here.get(name) != first.get(name)
    ]


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the names and contents of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _task_source(task: str) -> str:
    """Return a task's name; for a custom task, with a digest of its file.

    Other tasks are part of this package's source.
    """
    file = getattr(sys.modules.get(task.partition(":")[0]), "__file__", None)
    return f"{task}, source {_digest([Path(file)])}" if file else task


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
