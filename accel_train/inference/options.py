"""The options of `accel-train predict`, checked without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_train.checkpoint.run_recipe import check_run_folder, read_recipe_only
from accel_train.core.files import is_written_into, output_path
from accel_train.core.ownership import check_file
from accel_train.recipe.tasks import TASKS, Gives

COCO_SUFFIX = ".json"
"""Suffix of a file with boxes as COCO results."""
_OF: Mapping[str, tuple[Gives, ...]] = {"min_score": ("boxes",), "row_per_box": ("boxes",), "draw": ("boxes", "mask")}
"""Predictions that an option is for."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `accel-train predict`, beyond the name of the table."""

    min_score: float | None = None
    """Least score of a box. None: the score with the best F1 in the run's evaluation; COCO results have all boxes."""
    row_per_box: bool = False
    """Whether the table has a row for each box instead of each image."""
    draw: Path | None = None
    """Folder for a picture of each image, with its boxes or its mask."""

    def check(self, folder: Path, task: str, gives: Gives | None) -> None:
        """Check that a task's predictions have these options.

        Raises:
            ValueError: they do not; the message names the option and the tasks that have it.
        """
        for name, kinds in _OF.items():
            value = getattr(self, name)
            if value is not None and value is not False and gives not in kinds:
                tasks = " and ".join(task for task, spec in TASKS.items() if spec.gives in kinds)
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is for {tasks}, and {folder} is a {task} run. Leave it out")

    def check_early(self, folder: Path, out: str | None) -> None:
        """Check what needs no torch. The options of a custom task are checked when it is loaded.

        Raises:
            ValueError: the folder does not hold a run, or an option does not fit its task or the table; or the table
                has an unknown format, or would replace a file of the user.
        """
        check_run_folder(folder)
        task = read_recipe_only(folder).task
        if task in TASKS:
            self.check(folder, task, TASKS[task].gives)
            table_path(folder, out, TASKS[task].gives)
        if self.row_per_box and out is not None and Path(out).suffix.lower() == COCO_SUFFIX:
            raise ValueError(f"--out {out}: COCO results have an entry per box anyway. Leave out --row-per-box")


NO_OPTIONS = Options()


def table_path(folder: Path, out: str | None, gives: Gives | None) -> Path:
    """Return the path of the table of predictions.

    Raises:
        ValueError: its name has an unknown ending, or a file of the user would be replaced.
    """
    table = folder / "predictions.csv" if out is None else output_path(out)
    suffixes = (".csv", ".jsonl", ".parquet", *((COCO_SUFFIX,) if gives == "boxes" else ()))
    if table.suffix.lower() not in suffixes and not is_written_into(table):
        raise ValueError(
            f"--out {table}: its name must end in {', '.join(suffixes)}, because the suffix sets the format"
        )
    check_file(table, folder, f"--out {table}")
    return table
