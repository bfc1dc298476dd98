"""What `accel-train verify RUN` says: each checkpoint held against its digests, and which one a resume would use."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_train.checkpoint import CheckpointStatus, verify_run
from accel_train.health import healthy_steps
from accel_train.rollback_record import abandoned, read_rollbacks


@dataclass(frozen=True)
class Verified:
    """What was found of a run's checkpoints."""

    statuses: Sequence[CheckpointStatus]
    """Oldest first."""
    healthy: frozenset[int]
    """Steps whose checkpoints a rollback would use."""
    abandoned: frozenset[Path]
    """Of a branch that a rollback gave up: the next start removes them."""

    @property
    def newest(self) -> Path | None:
        """What a resume would use."""
        usable = [each.path for each in self.statuses if each.problem is None and each.path not in self.abandoned]
        return usable[-1] if usable else None


def verify(run_folder: Path) -> Verified:
    """Read every file of every checkpoint.

    Raises:
        ValueError: the folder holds no run.
        CheckpointError: the record of rollbacks cannot be read.
    """
    statuses, root = verify_run(run_folder), run_folder / "checkpoints"
    given_up = abandoned(root, read_rollbacks(run_folder))
    return Verified(tuple(statuses), frozenset(healthy_steps(root)), frozenset(given_up))


def format_verified(verified: Verified) -> str:
    """The table that the command prints."""
    width = max((len(status.path.name) for status in verified.statuses), default=10)
    lines = [f"{'checkpoint'.ljust(width)}  {'step':>10}  state"]
    for status in verified.statuses:
        state = status.problem or ("ok, healthy" if status.step in verified.healthy else "ok")
        if status.path in verified.abandoned:
            state += ", abandoned: a rollback went back behind it"
        lines.append(f"{status.path.name.ljust(width)}  {status.step:>10}  {state}")
    if verified.newest is not None:
        lines.append(f"a resume would use {verified.newest.name}")
    return "\n".join(lines)
