"""Check the files of a model folder: weights are whole, and equal to the run's."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from accel_train.core.files import digests_of
from accel_train.core.json_io import parse_json
from accel_train.core.ownership import accept_files, noted_digests
from accel_train.core.terminal import is_main

WEIGHTS = (".safetensors", ".safetensors.index.json", ".onnx")
"""Ends of the names of files that change a model's results. A change of another file is only noted."""
CARD = "README.md"
NO_DIGESTS = "no digests of the weights (written by an older version, or copied without hidden files): not compared"
REMEDY = (
    "Copy it again from where the run was trained. If you changed it on purpose, accept it: "
    "accel-train verify {folder} --accept-weights"
)
_found: dict[Path, tuple[object, dict[str, str]]] = {}
"""What `changes_in` has found in this process, with the digests, sizes, and times of the files."""


def check_weight_files(folder: Path) -> None:
    """Check that a folder holds weight files that a copy or a full disk has not truncated. Only headers are read.

    Raises:
        ValueError: a file is missing or damaged. The message names it.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no weights (*.safetensors); was the run finished?")
    for path in (*folder.glob("*.safetensors.index.json"), *files):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    continue
            named = parse_json(path.read_text(encoding="utf-8"))["weight_map"].values()
            missing = sorted({name for name in named if not os.path.isfile(folder / name)})
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); copy it again from where the run was trained") from error
        if missing:
            raise ValueError(
                f"{folder} lacks {missing[0]}, which {path.name} names; copy it from where the run was trained"
            )


def changes_in(folder: Path) -> dict[str, str]:
    """Return the problem of each file of a model folder, by name; empty if all are as the run wrote them.

    Each file is read once, also by several calls in one process: at 0.5 to 2 GB/s per core, several files at a time.
    Files without a digest, of an older version or of another program, are not compared.
    """
    noted = noted_digests(folder)
    compared = [name for name, known in noted.items() if known and name != CARD]
    stamps = {name: (each.st_size, each.st_mtime_ns) for name in compared if (each := _stat(folder / name))}
    facts, key = (noted, stamps), folder.resolve()
    if key not in _found or _found[key][0] != facts:
        digests = digests_of(folder, list(stamps))
        problems = {name: "is missing" for name in compared if name not in stamps}
        for name, digest in digests.items():
            if isinstance(digest, OSError):
                problems[name] = f"cannot be read ({digest})"
            elif digest not in noted[name]:
                problems[name] = "differs from what the run wrote (SHA-256)"
        _found[key] = facts, problems
    weights = {path.name for path in folder.iterdir() if path.name.endswith(WEIGHTS)}
    added = weights - noted.keys() if has_digests(folder) else ()
    return dict(sorted(_found[key][1].items())) | dict.fromkeys(sorted(added), "was not written by the run")


def _stat(path: Path) -> os.stat_result | None:
    return path.stat() if path.is_file() else None


def has_digests(folder: Path) -> bool:
    """Return whether a run or an export noted digests of the weights in a folder, or the user accepted them."""
    noted = noted_digests(folder)
    return any(known for name, known in noted.items() if name.endswith(WEIGHTS))


def damaged_weights(folder: Path, changes: Mapping[str, str]) -> str | None:
    """Return the first weight file among the changes of a folder, with its problem and the fix, or None."""
    remedy = REMEDY.format(folder=quote(str(folder)))
    damaged = (f"{folder}/{name} {problem}. {remedy}" for name, problem in changes.items() if name.endswith(WEIGHTS))
    return next(damaged, None)


def check_digests(folder: Path, *, is_ours: bool = True) -> None:
    """Compare a model folder with the digests that the run noted there. Call it on one process before a model is built.

    Prints a line if another file than the weights has changed, or if the weights of a folder that `is_ours` have no
    digest: once per process.

    Raises:
        ValueError: a weight file is damaged, missing, changed, or added. The message names the flag that accepts it.
    """
    if is_ours:
        check_weight_files(folder)
    is_new = folder.resolve() not in _found
    changes = changes_in(folder)
    if (damaged := damaged_weights(folder, changes)) is not None:
        raise ValueError(damaged)
    notes = [f"{folder}/{name} {problem}" for name, problem in changes.items()]
    if is_ours and not has_digests(folder):
        notes.append(f"{folder}: {NO_DIGESTS}")
    for note in notes if is_new and is_main() else ():
        print(f"note: {note}", file=sys.stderr, flush=True)


def check_pretrained(pretrained: str) -> None:
    """Check the digests of `model.pretrained` if it is a folder that a run or an export wrote.

    Raises:
        ValueError: a weight file has changed.
    """
    if (folder := Path(pretrained)).is_dir():
        check_digests(folder, is_ours=False)


def accept_weights(folder: Path) -> None:
    """Note the digests of the changed, new, and removed files of a model folder, and of those that have none yet."""
    changes, noted = changes_in(folder), noted_digests(folder)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = [name for name in files if not Path(name).name.startswith(".") and (name in changes or not noted.get(name))]
    digests = digests_of(folder, sorted(names))
    gone = dict.fromkeys(changes.keys() - files)
    accept_files(folder, {**gone, **{name: each for name, each in digests.items() if isinstance(each, str)}})
