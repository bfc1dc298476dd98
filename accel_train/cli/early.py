"""Checks of a recipe that need no torch: a mistake that is visible now should not cost the seconds of its import."""

import os
from pathlib import Path

from accel_train.checkpoint.run_recipe import check_run_folder, read_recipe_only
from accel_train.core.errors import check_packages
from accel_train.recipe.data import Data
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import TASKS, check_spec, check_task, refuse_unreported


def check_before_torch(recipe: Recipe, *, trains: bool = True) -> None:
    """Check data paths, and with `trains` also the launch, precision, the packages of trackers, and the run folder.

    A launch of several processes is checked later, when they can agree on the error. A finished run needs no data.

    Raises:
        ValueError: the message names the setting and the fix.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    from accel_train.data.sources import check_paths
    from accel_train.observe.run_folder import SUMMARY_FILE, RunFolder
    from accel_train.observe.trackers import check_packages
    from accel_train.runtime.driver import installed_torch
    from accel_train.runtime.launch_environment import with_launch_environment

    folder = Path(recipe.output_dir)
    if trains and os.path.exists(folder / SUMMARY_FILE):
        return
    if trains:
        recipe = with_launch_environment(recipe)
        RunFolder(folder).check()
        check_packages(recipe.log.trackers)
        build = installed_torch()
        if recipe.precision.mixed_precision == "fp16" and build is not None and build.is_for_cpu:
            problem = "this process runs on cpu, but fp16 needs a CUDA device"
            raise ValueError(f"precision.mixed_precision=fp16: {problem}. Use auto, bf16 or no")
    check_task(recipe.task)
    if recipe.task in TASKS:
        check_spec(recipe, TASKS[recipe.task])
        refuse_unreported(recipe, TASKS[recipe.task])
        check_paths(recipe.data)
        check_headers(recipe.data)


def check_onnx(run: Path) -> None:
    """Check that `export --onnx` has its packages, and a task whose model is one graph.

    Raises:
        ValueError: the message names the fix.
    """
    check_packages(("onnx", "onnxscript", "onnxruntime"), "onnx", "--onnx")
    check_run_folder(run)
    task = read_recipe_only(run).task
    if task in TASKS and TASKS[task].gives in ("continuation", "text"):
        raise ValueError(
            f"--onnx: {task} generates text token by token, and a single graph has no such loop. Export {run}/model "
            "with optimum: pip install 'optimum[onnx]', then optimum-cli export onnx"
        )
    if task not in TASKS:
        raise ValueError(f"--onnx supports built-in tasks, and {task} is custom. Call torch.onnx.export on its model")


def check_headers(data: Data) -> None:
    """Check that the columns that the recipe names are in the header of each table of comma- or tab-separated values.

    Raises:
        ValueError: a column is missing, or the header cannot be read.
    """
    from accel_train.data.delimited import columns_by_setting
    from accel_train.data.sources import Source, file_kind, is_path
    from accel_train.data.tables import check_columns, column_names, columns_read

    wanted = [columns for name, columns in columns_by_setting(data).items() if name in data.model_fields_set]
    for path in map(Path, filter(is_path, (name for _, name in data.named()))):
        if path.is_file() and file_kind(path) == "csv":
            names = column_names(Source(str(path), "", (path,)), data)
            every = (name for columns in wanted for name in columns)
            read = [each for name in every for each in ([name] if name in names else columns_read(name))]
            check_columns(str(path), names, read, data, is_csv=data.header == "first_line")
