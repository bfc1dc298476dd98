"""Going on with a run: which checkpoint, whether it is of this very run, and the same answer on every process."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from accel_train.batching import BatchSizes
from accel_train.checkpoint import CheckpointStatus, check, newest_valid, remove_leftovers
from accel_train.recipe import Recipe
from accel_train.rollback_record import ROLLBACKS, read_rollbacks, remove_abandoned
from accel_train.schedule import StepPlan
from accel_train.snapshot import identity_changes, read_trainer
from accel_train.state import CheckpointError, Rollback
from accel_train.task import TaskData


def run_identity(recipe: Recipe, data: TaskData, sizes: BatchSizes, steps: StepPlan) -> dict[str, Any]:
    """What makes two sittings the same run: a checkpoint goes on only where these are equal. Plain JSON values."""
    identity = {
        "task": recipe.task,
        "seed": recipe.seed,
        "model": recipe.model.model_dump(exclude={"attn_implementation", "trust_remote_code"}),
        "data.fingerprint": data.fingerprint,
        "data.sequence_length": recipe.data.sequence_length,
        "data.mask_documents": recipe.data.mask_documents,
        "data.shuffle": recipe.data.shuffle,
        "data.last_batch": recipe.data.last_batch,
        "data.group_by_length": recipe.data.group_by_length,
        "data.augment": recipe.data.augment.model_dump(),
        "loss": recipe.loss.model_dump(),
        "batch.global_batch_size": sizes.global_batch_size,
        "optimizer.name": recipe.optimizer.name,
        "optimizer.ema_decay": recipe.optimizer.ema_decay,
        "optimizer.layer_decay": recipe.optimizer.layer_decay,
        "optimizer.groups": recipe.optimizer.model_dump()["groups"],
        "schedule": recipe.schedule.model_dump(exclude={"max_steps", "num_epochs", "warmup_steps", "warmup_ratio"}),
        "schedule.max_steps": steps.max_steps,
        "schedule.warmup_steps": steps.warmup_steps,
    }
    normal: dict[str, Any] = json.loads(json.dumps(identity))
    return normal


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from (none: it starts), and newer ones that did not prove themselves."""

    path: Path | None
    broken: tuple[CheckpointStatus, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    """What earlier sittings have gone back on."""


def agree_on_checkpoint(recipe: Recipe, accelerator: Accelerator, identity: Mapping[str, Any]) -> Found:
    """The checkpoint to go on from, found and proved by the main process and told to the others.

    Raises:
        ValueError: the checkpoint is of another run.
        CheckpointError: no checkpoint is valid.
    """
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            found[0] = find_checkpoint(recipe, identity)
        except (ValueError, CheckpointError) as error:
            found[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    result: Found = found[0]
    return result


def find_checkpoint(recipe: Recipe, identity: Mapping[str, Any]) -> Found:
    """The newest valid checkpoint of this very run, or the one the recipe names; `never` sets an old run's aside."""
    root = Path(recipe.output_dir) / "checkpoints"
    remove_leftovers(root)
    if recipe.checkpoint.resume == "never":
        set_aside(Path(recipe.output_dir))
        return Found(None)
    broken: list[CheckpointStatus] = []
    rollbacks = read_rollbacks(Path(recipe.output_dir))
    if recipe.checkpoint.resume == "auto":
        remove_abandoned(root, rollbacks)
        newest, broken = newest_valid(root)
        if newest is None:
            return Found(None)
        path = newest
    else:
        path = Path(recipe.checkpoint.resume)
        status = check(path)
        if status.problem is not None:
            raise CheckpointError(
                f"checkpoint.resume={path}: {status.problem}; `accel-train verify RUN` lists what is valid"
            )
    changes = identity_changes(read_trainer(path)["identity"], identity)
    if changes and not recipe.checkpoint.accept_changes:
        raise ValueError(
            f"{path} is of another run: {'; '.join(changes)}. Give another output_dir, or --checkpoint.resume never to "
            "start anew, or --checkpoint.accept_changes true to go on all the same"
        )
    return Found(path, tuple(broken), tuple(rollbacks))


def set_aside(run_folder: Path) -> None:
    """Move what an earlier run left into `previous-N/`, so that starting anew loses nothing."""
    if not (run_folder / "checkpoints").exists():
        return
    names = (
        *("checkpoints", "metrics.jsonl", "events.jsonl", "summary.json", "evaluation.json", "model", "adapter"),
        *("report.html", "recipe.yaml", ROLLBACKS, "incidents"),
    )
    left = [run_folder / name for name in names if (run_folder / name).exists()] + list(run_folder.glob("report-*.png"))
    number = 1 + sum(1 for entry in run_folder.iterdir() if entry.name.startswith("previous-"))
    target = run_folder / f"previous-{number}"
    target.mkdir(mode=0o700)
    for path in left:
        path.rename(target / path.name)
