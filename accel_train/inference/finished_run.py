"""Open a finished run with its model and data, to evaluate, predict or export."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm

from accel_train.checkpoint.run_recipe import (
    check_run_folder,
    check_settings,
    other_than_consent,
    read_recipe,
    read_recipe_only,
)
from accel_train.checkpoint.weight_files import check_digests, check_weight_files
from accel_train.core.errors import DataError, SettingError
from accel_train.core.json_io import load_object
from accel_train.core.terminal import is_main, is_terminal, width_of
from accel_train.data.batch_sizes import BatchSizes, resolve_batch
from accel_train.data.delimited import columns_by_setting, why_header
from accel_train.data.encoding import check_encoding, in_its_encoding
from accel_train.data.sources import file_kind, files_of, is_path, is_there, located, resolve_sources
from accel_train.data.tables import MissingColumn, Unlabelled, columns_read
from accel_train.engine.loader import Reading, choose_reading
from accel_train.model.compile import compile_module
from accel_train.model.training_module import TrainingModule
from accel_train.observe.run_folder import SUMMARY_FILE, read_record
from accel_train.parallel.precision import agree_on_mixed_precision, set_backends, start_accelerator
from accel_train.recipe.data import Data, NamedClassesData
from accel_train.recipe.schema import Loss, Model, Recipe
from accel_train.recipe.tasks import check_extra
from accel_train.runtime.doctor import check_launcher
from accel_train.runtime.process_group import on_main, start_processes
from accel_train.task import Facts, Task, TaskData, load_task, read_data, with_data_of

T = TypeVar("T")


class DataNotFound(SettingError):
    """Raised when a run's own data is not where its recipe says, and no other data is given."""


@dataclass(frozen=True)
class TrainedRun:
    """A finished run, opened on this machine with its model."""

    folder: Path
    recipe: Recipe
    """The run's recipe, with the trained weights as `model.pretrained`."""
    task: Task
    data: TaskData
    accelerator: Accelerator
    inner: TrainingModule
    """The model on its device, in the recipe's precision, without a wrapper that synchronizes it."""
    sizes: BatchSizes
    """The run's batch sizes. Equal evaluation batches give equal numbers, on any number of processes."""
    reading: Reading
    steps: int | None
    """Number of steps that the run was trained for."""
    notes: tuple[str, ...]
    """Notes on how other data was read differently, and why."""


def open_run(
    folder: Path, *, data: str | None = None, settings: Sequence[str] = (), labels_optional: bool = False
) -> TrainedRun:
    """Return a run, opened with its model and with its own evaluation data or other data.

    `settings` are `--section.field VALUE` flags that override the run's recipe. Other data without the `data.id_column`
    is read without it. With `labels_optional`, other data whose labels cannot be read is read without labels.

    Raises:
        ValueError: the folder has no finished run, or the data does not fit its model.
        DataNotFound: the run's own data is missing, and no other data is given.
    """
    recipe = recipe_of_trained(folder, data, settings)
    if not labels_optional:
        check_extra(recipe, load_task(recipe.task).spec)
    if data is None:
        _check_data_is_there(folder, recipe.data)
    processes = start_processes()
    check_launcher(processes.num_processes)
    on_main(lambda: check_content(folder, recipe))
    summary = read_record(folder / SUMMARY_FILE)
    world_size, sharing = summary.get("world_size", 1), recipe.parallel.num_sharing
    sizes = resolve_batch(recipe.batch, world_size, 1 if world_size % sharing else sharing)
    precision = agree_on_mixed_precision(recipe.precision, processes.device, processes.num_processes)
    set_backends(recipe.precision, precision.value, processes.device)
    accelerator = start_accelerator(precision.value, recipe.precision, recipe.guard, sizes, processes.device)
    on_main(lambda: load_task(recipe.task).prove(recipe))
    recipe, task, task_data, notes = _load(
        recipe, is_other=data is not None, labels_optional=labels_optional, progress=accelerator.is_main_process
    )
    if data is None and not other_than_consent(settings):
        notes = (*notes, *changes_of(Facts.model_construct(**summary.get("data") or {}), task_data.facts, folder))
    torch.manual_seed(recipe.seed)
    model = task.build_model(recipe, task_data)
    check_weights(model, folder / "model", recipe.task)
    put_in_adapters(model, recipe.model, folder / "adapter")
    inner = TrainingModule(model.eval(), task)
    compile_module(inner, recipe.precision)
    accelerator.prepare_model(inner.to(accelerator.device), evaluation_mode=True)
    return TrainedRun(
        folder=folder,
        recipe=recipe,
        task=task,
        data=task_data,
        accelerator=accelerator,
        inner=inner,
        sizes=sizes,
        reading=choose_reading(recipe.data, task_data, accelerator)[0],
        steps=summary.get("steps"),
        notes=notes,
    )


def recipe_of_trained(folder: Path, data: str | None = None, settings: Sequence[str] = ()) -> Recipe:
    """Return a finished run's recipe, changed so that its task builds the trained model. `data` replaces its data.

    Raises:
        ValueError: the folder has no finished run, or a setting would have no effect.
    """
    check_finished(folder)
    check_settings(settings)
    recipe = read_recipe(folder, settings)
    weights = folder / "model"
    config = load_object(weights / "config.json")
    problem_type = str(config.get("problem_type") or recipe.model.problem_type).removesuffix("_classification")
    model = recipe.model.model_copy(
        update={
            "pretrained": str(weights),
            "config": None,
            "freeze": (),
            "freeze_batch_norm": False,
            # The saved weights are loaded as fp32.
            "frozen_dtype": "auto",
            "problem_type": problem_type,
        }
    )
    section = located(recipe.data, _started_in(folder)).as_trained(read_recipe_only(folder).data)
    if recipe.origin("data.cache_dir").kind == "command line":
        section = section.model_copy(update={"cache_dir": recipe.data.cache_dir})
    if data is not None:
        check_own_encoding(folder, section)
        # Each row of other data needs a prediction.
        shown: dict[str, object] = {"train": data, "eval": data, "group_by_length": False}
        if (
            "missing_labels" in type(section).model_fields
            and recipe.origin("data.missing_labels").kind != "command line"
        ):
            shown["missing_labels"] = "error"
        names = _class_names(config, weights) if problem_type != "regression" else None
        if isinstance(section, NamedClassesData) and names is not None:
            shown["label_names"] = names
            # The model's outputs keep their order, whatever the order in flags.
            if sorted(getattr(section, "label_columns", None) or ()) == sorted(names):
                shown["label_columns"] = names
        section = section.model_copy(update=shown)
    # A trained or loaded tokenizer is saved with the weights. `bytes` is code, and is faster than the saved one.
    has_own = (weights / "tokenizer_config.json").is_file()
    tokenizer = str(weights) if has_own and recipe.tokenizer_in_use != "bytes" else recipe.tokenizer_in_use
    precision = recipe.precision
    # The weights are fp32, and the machine may lack a GPU with float8.
    if precision.mixed_precision == "fp8":
        precision = precision.model_copy(update={"mixed_precision": "auto"})
    # Class weights are only for training, and would require every class in this data.
    loss = Loss(chunked=recipe.loss.chunked, router_aux=False)
    return recipe.model_copy(
        update={"model": model, "data": section, "tokenizer": tokenizer, "loss": loss, "precision": precision}
    )


def _class_names(config: Mapping[str, Any], folder: Path) -> tuple[str, ...] | None:
    by_index = config.get("id2label")
    try:
        return tuple(str(by_index[index]) for index in sorted(by_index, key=int)) if by_index else None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'config.json'}: id2label is not a mapping of numbers to class names; copy the file again"
        ) from error


def _started_in(folder: Path) -> str | None:
    """Return the folder in which a run was started, or None. Relative paths of its recipe refer to it."""
    started_in = read_record(folder / SUMMARY_FILE).get("started_in")
    return started_in if isinstance(started_in, str) else None


def check_own_encoding(folder: Path, data: Data) -> None:
    """Check that a run's own files, if they still exist, were not UTF-8 read as Latin-1.

    Raises:
        ValueError: they were. Other data would then have characters that the model never saw.
    """
    for name in data.train_names:
        path = Path(name).expanduser()
        if path.is_file() and file_kind(path) not in ("parquet", "tokens", "json", None):
            try:
                check_encoding(path, data)
            except ValueError as error:
                raise ValueError(
                    f"{folder} was trained on letters that its data do not hold: {error}, and train again"
                ) from None


def _check_data_is_there(folder: Path, data: Data) -> None:
    gone = next((name for _, name in data.named() if is_path(name) and not is_there(name)), None)
    if gone is None:
        return
    started_in = _started_in(folder)
    also = f" and from {started_in}, where the run was started" if started_in not in (None, os.getcwd()) else ""
    raise DataNotFound(
        f"{gone}, the data of {folder}, is not there (seen from {os.getcwd()}{also})",
        f"name the data: accel-train evaluate {quote(str(folder))} DATA, accel-train predict {quote(str(folder))} DATA",
    )


def check_finished(folder: Path) -> None:
    """Check that a folder has a trained model.

    Raises:
        ValueError: a file is missing or damaged; the message names it and the fix.
    """
    recipe = check_run_folder(folder)
    if not (folder / "model" / "config.json").is_file():
        raise ValueError(
            f"{folder} has no trained model yet (no model/config.json); accel-train run {quote(str(recipe))} resumes it"
        )
    check_weight_files(folder / "model")


def check_content(folder: Path, recipe: Recipe) -> None:
    """Compare a run's model, and adapters that are not merged into it, with the digests that the run noted.

    Raises:
        ValueError: a weight file has changed.
    """
    check_digests(folder / "model")
    if keeps_adapters(recipe.model):
        check_digests(folder / "adapter")


def _load(
    recipe: Recipe, *, is_other: bool, labels_optional: bool, progress: bool
) -> tuple[Recipe, Task, TaskData, tuple[str, ...]]:
    """Return recipe, task, data and notes. If necessary, other data is read without ids or labels."""
    notes: list[str] = []
    if is_other:
        section = recipe.data.shown_as("DATA" if labels_optional else "--data")
        recipe = recipe.model_copy(update={"data": section})
    for name, in_its_own in (("encoding", in_its_encoding), ("header", in_its_header)):
        if is_other and recipe.origin(f"data.{name}").kind != "command line":
            section, found_notes = in_its_own(recipe.data)
            recipe, notes = recipe.model_copy(update={"data": section}), [*notes, *found_notes]
    while True:
        task = load_task(recipe.task)
        recipe = with_data_of(task, recipe)
        try:
            found = read_data(task, recipe, progress=progress)
            return recipe, task, found, (*notes, *(dict.fromkeys(found.facts.notes) if is_other else ()))
        except DataError:
            raise
        except ValueError as error:
            section = recipe.data
            if is_other and isinstance(error, MissingColumn) and error.column == section.id_column:
                left = section.model_copy(update={"id_column": None})
                notes.append(f"rows are named by file and number, because they have no ids: {error}")
            elif is_other and labels_optional and section.label_setting is not None and section.is_labelled:
                left = section.without_labels()
                # Without labels, there is nothing to say about them.
                if not isinstance(error, MissingColumn | Unlabelled):
                    notes.append(f"true labels are left out, because they cannot be read: {error}")
            else:
                raise error from None
            recipe = recipe.model_copy(update={"data": left})


def in_its_header(data: Data) -> tuple[Data, list[str]]:
    """Return data settings that leave out a header although the trained run's table had none, and a note.

    Raises:
        ValueError: some files have a header, and others have none.
    """
    if data.header != "none" or not is_there(str(data.train)):
        return data, []
    columns = columns_by_setting(data)
    classes = {column: getattr(data, "label_names", None) or () for column in columns.get(data.label_setting or "", ())}
    read = [each for names in columns.values() for name in names for each in columns_read(name)]
    sources = resolve_sources(data.train_names, data, key=data.train_key)
    files = [path for path in files_of(sources) if file_kind(path) == "csv"]
    whys = {path: why_header(path, data, read, classes) for path in files}
    headed = [path for path, why in whys.items() if why is not None]
    if not headed:
        return data, []
    rule = f"{headed[0]}: the first line has column names ({whys[headed[0]]}), and the run's own data have none"
    if len(headed) < len(files):
        other = next(path for path in files if path not in headed)
        raise ValueError(f"{rule}. {other} has none either; remove the line, or set --data.header none to read it")
    return data.model_copy(update={"header": "left_out"}), [f"{rule}; it is left out (--data.header none reads it)"]


def changes_of(before: Facts, facts: Facts, folder: Path) -> list[str]:
    """Return a note where a run's own data holds other numbers of samples than when it was trained.

    Raises:
        ValueError: it has other classes.
    """
    was, now = before.label_names, facts.label_names
    if was and now and was != now:
        raise ValueError(
            f"the data of {folder} has changed: its classes are {', '.join(now)}, and were {', '.join(was)}; "
            "name data as the run knows it"
        )
    sizes = [facts.num_train, facts.num_eval, before.num_train, before.num_eval]
    # Rows that are packed into windows are so by the attention of the machine, and their number says nothing.
    if None in sizes or sizes[:2] == sizes[2:] or facts.positions_per_target is not None:
        return []
    return [
        "the data of {} has changed: {:,} samples and {:,} held out, and it was trained with {:,} and {:,}".format(
            folder, *sizes
        )
    ]


def check_weights(model: nn.Module, folder: Path, task: str) -> None:
    """Check that a model's weights equal the weights in a folder. For example, a head for other labels would be random.

    Raises:
        ValueError: a weight differs, or the folder has no weights.
    """
    check_weight_files(folder)
    state = model.state_dict()
    saved = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    common = [name for name in saved if name in state]
    wrong = [
        name
        for name in common
        if saved[name].shape != state[name].shape or not torch.equal(saved[name].to(state[name].dtype), state[name])
    ]
    if wrong or not common:
        what = f"{wrong[0]} is another" if wrong else "no weight has the same name"
        raise ValueError(
            f"task={task}: the model that is built for this data is not the one in {folder} ({what}). Are these the "
            f"labels of its training? A custom task must load model.pretrained if it is given"
        )


def keeps_adapters(section: Model) -> bool:
    """Return whether a run's adapters are not merged into its weights."""
    return section.lora is not None and not section.lora.merge


def put_in_adapters(model: nn.Module, section: Model, folder: Path) -> None:
    """Load the adapters of a run that keeps them from `folder` into its model, in place.

    Raises:
        ValueError: the adapters are missing, damaged, or belong to another model.
    """
    if section.lora is None or section.lora.merge:
        return
    from accel_train.model.lora import ADAPTER, add_adapters

    check_weight_files(folder)
    add_adapters(model, section.lora)
    saved = load_file(folder / "adapter_model.safetensors")
    state = {
        name.removeprefix("base_model.model.").replace(".weight", f".{ADAPTER}.weight"): tensor
        for name, tensor in saved.items()
    }
    found = model.load_state_dict(state, strict=False)
    problems = [f"{name} is not one of its weights" for name in found.unexpected_keys]
    problems += [f"it lacks {name}" for name in found.missing_keys if "lora_" in name]
    if problems:
        raise ValueError(f"{folder} does not fit the model: {problems[0]}; is the folder complete?")


def with_model(run: TrainedRun, model: nn.Module) -> TrainedRun:
    """Return the same run with another model, in the same precision."""
    inner = TrainingModule(model.eval(), run.task).to(run.accelerator.device)
    run.accelerator.prepare_model(inner, evaluation_mode=True)
    return replace(run, inner=inner)


def counted(batches: Iterable[T], total: int, text: str) -> Iterator[T]:
    """Yield batches with a progress bar on stderr on rank 0. Without a terminal, only one line is printed."""
    stream = sys.stderr
    if stream is None or not is_main():
        yield from batches
    elif is_terminal(stream) and width_of(stream):
        yield from tqdm(batches, text, total, leave=False, file=stream, dynamic_ncols=True, unit=" batches")
    else:
        # The reader has closed the stream.
        with suppress(OSError, ValueError):
            print(f"{text} ...", file=stream, flush=True)
        yield from batches
