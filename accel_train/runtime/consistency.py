"""Whether all processes were started with the same recipe, data and code, and share a run folder: said before a model is built."""

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

from accel_train import __version__
from accel_train.files import is_seen
from accel_train.recipe import Recipe
from accel_train.task import TaskData

OF_ONE_MACHINE = (
    "output_dir",
    "data.train",
    "data.eval",
    "data.cache_dir",
    "data.num_workers",
    "data.pin_memory",
    "log",
)
"""Settings that may differ from machine to machine, or that the main process alone goes by; what is read is compared."""
PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "numpy")


def check_agreement(recipe: Recipe, data: TaskData, num_processes: int) -> None:
    """Compare what each process is about to train with what the first one is.

    Raises:
        ValueError: on all processes, naming each process that differs, and in what.
    """
    if num_processes == 1:
        return
    everywhere: list[Any] = [None] * num_processes
    dist.all_gather_object(everywhere, facts_of(recipe, data))
    if problems := disagreements(everywhere):
        raise ValueError(
            "the processes of this run do not agree: "
            + "; ".join(problems)
            + ". Give all of them the same command, files and installation"
        )


def check_shared(output_dir: Path, num_processes: int) -> None:
    """Let process 0 write a file into the run folder, and every other one look for it in the folder that it has by that name.

    Raises:
        ValueError: on all processes: some of them see another folder, or process 0 cannot write.
    """
    if num_processes == 1:
        return
    # `checkpoints` may be a link to another disk. A name that `resume.remove_leftovers` knows, in case of a kill.
    below = "checkpoints" if (output_dir / "checkpoints").is_dir() else "."
    sent: list[Any] = [f"{below}/.shared-{secrets.token_hex(8)}.tmp", output_dir, None]
    nonce = output_dir / sent[0] if dist.get_rank() == 0 else None
    try:
        if nonce is not None:
            try:
                nonce.touch(mode=0o600)
            except OSError as error:
                sent[2] = f"output_dir={output_dir} cannot be written: {error.strerror}"
        dist.broadcast_object_list(sent, src=0)
        if sent[2] is not None:
            raise ValueError(sent[2])
        apart = who_lacks(output_dir / sent[0])
    finally:
        if nonce is not None:
            nonce.unlink(missing_ok=True)
    if apart:
        raise ValueError(
            f"output_dir={sent[1]} is not shared: {apart} does not see what rank 0 writes there. All processes write or read the "
            "checkpoints of a run; give an output_dir on storage that all machines share"
        )


def who_lacks(path: Path) -> str:
    """Return which process does not see a file, by its own path for it, and how many more do not; all processes call it."""
    lacks = f"rank {dist.get_rank()} (process {os.getpid()} on {socket.gethostname()}, {path.parent.absolute()})"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, None if is_seen(path) else lacks)
    found = [each for each in everywhere if each is not None]
    return f"{found[0]}{f', and {len(found) - 1} more,' if len(found) > 1 else ''}" if found else ""


def facts_of(recipe: Recipe, data: TaskData) -> dict[str, Any]:
    """What has to be the same on all processes, by name; plain JSON values."""
    facts: dict[str, Any] = {
        **flat(recipe.model_dump(mode="json")),
        "the data": {
            "fingerprint": data.fingerprint,
            "samples": len(data.train),  # type: ignore[arg-type]
            "held out": 0 if data.eval is None else len(data.eval),  # type: ignore[arg-type]
        },
        "the vocabulary": data.facts.get("vocab_size"),
        "accel_train": f"{__version__}, source {digest_of(Path(__file__).parent)}",
        "the task": task_digest(recipe.task),
        "python": platform.python_version(),
        **{f"package {name}": installed(name) for name in PACKAGES},
    }
    normal: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return normal


def disagreements(everywhere: Sequence[Mapping[str, Any]]) -> list[str]:
    """A phrase for each process and fact that differs from the first process's."""
    first = everywhere[0]
    return [
        f"{name} is {here.get(name)!r} on rank {rank}, and {first.get(name)!r} on rank 0"
        for rank, here in enumerate(everywhere[1:], start=1)
        for name in sorted(first.keys() | here.keys())
        if here.get(name) != first.get(name)
    ]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, without those that are of one machine."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in OF_ONE_MACHINE:
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def digest_of(folder: Path) -> str:
    """Of the Python files in a folder, by name and content."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def task_digest(task: str) -> str:
    """Of the file that a task of the user's own is in; a task of this package is part of its source."""
    module = sys.modules.get(task.partition(":")[0])
    source = getattr(module, "__file__", None)
    return f"{task}, source {hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]}" if source else task


def installed(name: str) -> str:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
