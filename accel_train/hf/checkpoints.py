"""Checkpoints by transformers' names: `checkpoint-N` in the run folder leads to `checkpoints/step-N`."""

import re
from pathlib import Path

from transformers import TrainingArguments

from accel_train.checkpoint.store import checkpoint_folders, newest_valid, step_of


def get_last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest verified checkpoint of a run folder, or None; half-written and broken ones are skipped.

    Raises:
        CheckpointError: there are checkpoints, and none is valid.
    """
    path, _ = newest_valid(Path(output_dir) / "checkpoints")
    return None if path is None else str(path)


def link_checkpoints(output_dir: Path) -> list[Path]:
    """Make each `checkpoint-N` a link to `checkpoints/step-N`, and remove our links that lead nowhere.

    Returns:
        Names of checkpoints that something else has: they stay as they are.

    Raises:
        OSError: a link cannot be made.
    """
    targets = {f"checkpoint-{step_of(folder)}": folder for folder in checkpoint_folders(output_dir / "checkpoints")}
    for path in output_dir.glob("checkpoint-*"):
        if path.is_symlink() and path.readlink().parts[0] == "checkpoints" and path.name not in targets:
            path.unlink()
    in_the_way = []
    for name, folder in targets.items():
        path = output_dir / name
        if not path.is_symlink() and not path.exists():
            path.symlink_to(folder.relative_to(output_dir), target_is_directory=True)
        elif not path.is_symlink():
            in_the_way.append(path)
    return in_the_way


def resume_of(args: TrainingArguments, requested: str | bool | None) -> str:
    """Return `checkpoint.resume`: never, auto, or a folder; transformers' name checkpoint-N means our checkpoints/step-N.

    Raises:
        ValueError: there is no such checkpoint.
    """
    if requested is None or requested is False:
        return "never"
    root = Path(args.output_dir) / "checkpoints"
    if requested is True:
        if not checkpoint_folders(root):
            raise ValueError(
                f"resume_from_checkpoint=True: there is no checkpoint in {root}; leave it out to start anew"
            )
        return "auto"
    path = Path(requested)
    theirs = re.fullmatch(r"checkpoint-(\d+)", path.name)
    if not path.exists() and theirs:
        path = path.parent / "checkpoints" / f"step-{int(theirs.group(1)):08d}"
    if path.is_symlink():  # `checkpoint-N`, as callbacks.link_checkpoints names it
        path = path.parent / path.readlink()
    if not path.exists():
        raise ValueError(f"resume_from_checkpoint={requested}: there is no such folder; checkpoints are in {root}")
    return str(path)
