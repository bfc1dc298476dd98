"""Write a finished run's predictions: a table with a row per sample, masks, and pictures with boxes or masks."""

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from accel_train.core.errors import RecipeError
from accel_train.core.files import is_written_into
from accel_train.core.format import format_count
from accel_train.core.ownership import check_folder, replacing, staging_of, write_file
from accel_train.data.order import evaluation_batches
from accel_train.data.tables import columns_read
from accel_train.engine.evaluation import EvaluationReader, evaluation_mode, rows_in_order
from accel_train.inference.boxes import boxes_above, coco_results, least_score, note_boxes, rows_of_boxes
from accel_train.inference.finished_run import TrainedRun, counted, open_run, recipe_of_trained
from accel_train.inference.options import COCO_SUFFIX, NO_OPTIONS, Options, table_path
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import Gives
from accel_train.recipe.yaml_core import is_number
from accel_train.report.pictures import Box, color_of_class, draw_boxes, draw_mask, palette
from accel_train.runtime.process_group import wait_for_all
from accel_train.task import Columns, load_task

Arrays = Mapping[str, NDArray[Any]]
"""Predictions of a batch or of all samples, by name."""

MAX_SCORE_COLUMNS = 20
"""Most classes for which a table has a score column each. With more classes, scores are dropped."""
LEAST_EDGE = 640
"""Pixels of the longer side to which a smaller image is enlarged before it is drawn on."""


class Written(NamedTuple):
    """The table that was written, on the main process."""

    table: Path
    rows: int
    min_score: float | None
    """Least score of its boxes. None for other predictions."""


def open_for_prediction(
    folder: Path, data: str | None, out: str | None, settings: Sequence[str] = (), options: Options = NO_OPTIONS
) -> tuple[TrainedRun, Path]:
    """Return the run, opened with data to predict, and the path of the table.

    Raises:
        ValueError: the run is not finished, has no data, or its task has no predictions, or the table has an unknown
            format, or files of the user would be replaced.
    """
    recipe = recipe_of_trained(folder, data, settings)
    gives = _gives_of(recipe, folder, options)
    table = table_path(folder, out, gives)
    if gives == "mask":
        if is_written_into(table):
            raise ValueError(f"--out {table} is not a regular file, and masks need a folder next to it; give a file")
        check_folder(_masks_of(table), f"{_masks_of(table)} (for the masks of --out {table})")
    if options.draw is not None:
        if options.draw.absolute() == _masks_of(table).absolute():
            raise ValueError(f"--draw {options.draw} is the folder of the masks. Give another folder.")
        check_folder(options.draw, f"--draw {options.draw}")
    return _open(folder, gives, data, settings), table


def _gives_of(recipe: Recipe, folder: Path, options: Options) -> Gives | None:
    """Return the kind of a task's predictions.

    Raises:
        ValueError: the task continues texts, and predicts nothing for a sample, or does not have these options.
    """
    gives = load_task(recipe.task).spec.gives
    options.check(folder, recipe.task, gives)
    if gives == "continuation":
        raise ValueError(
            f"{folder} is a language model and predicts no labels; `accel-train generate {folder}` writes text"
        )
    return gives


def _open(folder: Path, gives: Gives | None, data: str | None, settings: Sequence[str] = ()) -> TrainedRun:
    if data is not None and gives == "tokens":
        # Other rows have masks to fill. The run's own texts have none.
        settings = (*settings, "--data.label_column", "null")
    run = open_run(folder, data=data, settings=settings, labels_optional=True)
    if run.data.eval is None:
        raise ValueError(f"{folder} held out no data to predict; name some: accel-train predict {folder} DATA")
    return run


def predict_rows(folder: Path, data: Any, min_score: float | None = None) -> list[dict[str, Any]]:
    """Predict new data with a finished run, and return a row per sample, on the main process.

    Args:
        folder: output folder of the run.
        data: a file or folder as for training; or rows: texts, mappings by column name, or a pandas DataFrame.
        min_score: least score of a box, as in `Options`.

    Raises:
        ValueError: the task has no predictions per row, or the data do not fit.
    """
    recipe = recipe_of_trained(folder)
    gives = _gives_of(recipe, folder, options := Options(min_score=min_score))
    # Rows in memory would lack the folder of images.
    if gives == "mask":
        raise ValueError(f"{folder} predicts masks, not rows; write them: accel-train predict {folder} FOLDER")
    with TemporaryDirectory() as name:
        if not isinstance(data, str | os.PathLike):
            path = Path(name) / "rows.jsonl"
            path.write_text("".join(f"{json.dumps(row)}\n" for row in _rows_of(data, recipe)), encoding="utf-8")
            data = path
        run = _open(folder, gives, os.fspath(data))
        columns = predict_columns(run, Path(name))
        least = least_score(run, options)
        if columns and least is not None:
            columns = boxes_above(columns, least.value)
        # The caller has the rows in memory.
        for column in ("id", *_input_columns(run)) if Path(data).parent == Path(name) else ():
            columns.pop(column, None)
    return [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]


def _input_columns(run: TrainedRun) -> tuple[str, ...]:
    """Return the columns of texts that the table repeats."""
    return run.recipe.data.input_columns if hasattr(run.data.source, "evaluated") else ()


def _rows_of(data: Any, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield the rows of a program as plain mappings. A text is the value of the only text column."""
    inputs = recipe.data.input_columns or (getattr(recipe.data, "text_column", None),)
    columns = [name for column in inputs for name in columns_read(column or "")]
    for row in data.to_dict("records") if hasattr(data, "to_dict") else data:
        if isinstance(row, Mapping):
            yield {str(key): _plain(value) for key, value in row.items()}
        elif isinstance(row, str) and len(columns) == 1 and columns[0] is not None:
            yield {columns[0]: row}
        else:
            named = ", ".join(repr(column) for column in columns if column) or "the columns of the training data"
            raise ValueError(f"{row!r:.80} is not a row of task={recipe.task}. Give mappings with {named}.")


def _plain(value: Any) -> Any:
    """Return a value of numpy or pandas as a plain one. NaN, their missing value, becomes None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value


@torch.no_grad()
def predict(run: TrainedRun, out: Path, options: Options = NO_OPTIONS) -> Written | None:
    """Predict every sample once, over all processes, and write the table. Return it on the main process.

    Raises:
        RecipeError: the task has no predictions per sample.
    """
    masks, draw, least = _masks_of(out), options.draw, least_score(run, options)
    main = run.accelerator.is_main_process

    def staged(target: Path, *, is_written: bool) -> AbstractContextManager[Path]:
        return replacing(target) if main and is_written else nullcontext(staging_of(target))

    with (
        staged(masks, is_written=not is_written_into(out)) as staging,
        nullcontext() if draw is None else staged(draw, is_written=True) as pictures,
    ):
        wait_for_all()
        drawing = None if pictures is None else Drawing(pictures, 0.0 if least is None else least.value)
        columns = predict_columns(run, staging, masks.name, drawing)
    if not main:
        return None
    is_coco = out.suffix.lower() == COCO_SUFFIX
    if least is not None:
        shown = boxes_above(columns, least.value)
        columns = columns if is_coco and options.min_score is None else shown
        note_boxes(shown, least)
    if is_coco:
        results, origin = coco_results(columns, run.data.source.sets)
        print(f"{out}: image_id and category_id are from {origin}", file=sys.stderr)
        return Written(write_file(out, (json.dumps(results) + "\n").encode(), run.folder), len(columns["id"]), 0.0)
    columns = rows_of_boxes(columns) if options.row_per_box else columns
    rows = len(next(iter(columns.values())))
    return Written(write_table(columns, out, run.folder), rows, None if least is None else least.value)


class Drawing(NamedTuple):
    """Folder for pictures of the images, and the least score of a box in them."""

    folder: Path
    least_score: float


@torch.no_grad()
def predict_columns(run: TrainedRun, masks: Path, name: str = "", drawing: Drawing | None = None) -> Columns:
    """Predict every sample once, over all processes, and return the table's columns; none on other processes.

    Masks are written to the folder `masks`, which the table calls `name`.

    Raises:
        RecipeError: the task has no predictions per sample.
    """
    gathered = _predict_all(run, masks, drawing)
    if not gathered:
        raise RecipeError(
            f"task={run.recipe.task} predicts nothing for a sample; `accel-train evaluate` gives its metrics"
        )
    if not run.accelerator.is_main_process:
        return {}
    indices = gathered["index"].tolist()
    columns: Columns = {"id": [run.data.source.row_ids(index) for index in indices]}
    if inputs := _input_columns(run):
        texts = zip(*(run.data.source.evaluated[index].texts for index in indices), strict=True)
        columns |= {name: list(each) for name, each in zip(inputs, texts)}
    own = run.task.prediction_columns(gathered, run.data)
    if own:
        columns |= own
    elif any(masks.glob("*.png")):
        columns["mask"] = [f"{name}/{_file_name(run, index)}.png" for index in indices]
    else:
        names = tuple(getattr(run.data.source, "label_names", ()))
        columns |= label_columns(gathered, names, labelled=run.recipe.data.is_labelled)
    return columns


def _masks_of(table: Path) -> Path:
    """Return the folder of masks next to a table."""
    return table.with_name(f"{table.stem}-masks")


def _predict_all(run: TrainedRun, masks: Path, drawing: Drawing | None) -> Arrays:
    """Return the predictions of all samples, in order, on the main process. Write masks and pictures to folders."""
    assert run.data.eval is not None
    rows: dict[str, list[Tensor]] = {}
    size, processes = run.sizes.per_device_eval_batch_size, run.accelerator.num_processes
    total = len(run.data.eval)  # type: ignore[arg-type]
    indices = evaluation_batches(total, size, run.accelerator.process_index, processes)
    shown = partial(counted, text="predicting")
    batches = EvaluationReader(run.accelerator, run.data, size, run.reading, counted=shown).batches()
    with evaluation_mode(run.inner):
        for index, (batch, _) in zip(indices, batches, strict=True):
            found = dict(run.inner(batch, "predictions"))
            arrays = {name: value.cpu().numpy() for name, value in found.items()}
            if "mask" in found:
                _write_masks(masks, run, index, arrays, drawing)
                found = {}
            elif not found:
                break
            elif "labels" in batch and found.keys() & {"label", "labels", "value"}:
                found["truth"] = batch["labels"]
            if "scores" in found and found["scores"].shape[1] > MAX_SCORE_COLUMNS:
                del found["scores"]
            if drawing is not None and found:
                _draw_boxes(drawing, run, index, arrays)
            for name, value in {"index": torch.tensor(index), **found}.items():
                rows.setdefault(name, []).append(value.cpu())
    return rows_in_order(run.accelerator, rows)


def label_columns(rows: Arrays, names: Sequence[str], *, labelled: bool) -> Columns:
    """Return a table's columns: the predicted label by name, its score, and the true label if known."""
    columns: Columns = {}

    # A row without a label has a negative one, or NaN.
    def name(index: int) -> str | None:
        return None if index < 0 else names[index] if index < len(names) else str(index)

    def joined(chosen: NDArray[Any]) -> str | None:
        return None if (chosen < 0).any() else "|".join(str(name(index)) for index in np.flatnonzero(chosen).tolist())

    shown: dict[str, Callable[[Any], Any]] = {"value": _number, "label": name, "labels": joined}
    for kind, show in shown.items():
        if kind not in rows:
            continue
        columns[kind] = list(map(show, rows[kind]))
        if kind == "label" and "score" in rows:
            columns["score"] = list(map(_number, rows["score"]))
        if labelled and "truth" in rows:
            columns[f"true_{kind}"] = [None if value != value else value for value in map(show, rows["truth"])]
    for index, column in enumerate(rows["scores"].T if "scores" in rows else ()):
        columns[f"score_{name(index)}"] = list(map(_number, column))
    return columns


def _number(value: Any) -> float:
    """Return a float32 value as the shortest exact decimal: 0.9, not 0.8999999761581421."""
    return float(str(value))


def write_table(columns: Columns, out: Path, home: Path) -> Path:
    """Write a csv, jsonl or parquet file by the suffix of its name, atomically, and return its path.

    `home` is the run folder that keeps its digest. Texts stay unchanged. Texts that a spreadsheet may run as formulas
    are counted on stderr.
    """
    kind = out.suffix.lower()
    if kind == ".parquet":
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
        return write_file(out, buffer.getvalue(), home)
    text = io.StringIO(newline="")
    # A device has no suffix and gets csv.
    if kind != ".jsonl":
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        cells = (map(_cell, values) for values in columns.values())
        writer.writerows(zip(*cells, strict=True))
        if num_formulas := sum(map(_may_be_formula, chain(columns, *columns.values()))):
            print(
                f"{out}: {format_count(num_formulas, 'cell')} may run as formulas in a spreadsheet: they begin with = "
                "+ - or @. For data of strangers use --out FILE.jsonl",
                file=sys.stderr,
            )
    else:
        for row in zip(*columns.values(), strict=True):
            text.write(json.dumps(dict(zip(columns, row)), ensure_ascii=False) + "\n")
    return write_file(out, text.getvalue().encode(errors="backslashreplace"), home)


def _may_be_formula(value: Any) -> bool:
    """Return whether a spreadsheet may run a text as a formula. csv cannot mark a cell as text."""
    return isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) and not is_number(value)


def _cell(value: Any) -> Any:
    """Return a value for a csv cell. A list becomes JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _file_name(run: TrainedRun, index: int) -> str:
    """Return a unique file name without suffix: the sample's number and the end of its id."""
    stem = Path(str(run.data.source.row_ids(index))).stem
    return f"{index:06d}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', stem)[:80]}"


def _write_masks(
    folder: Path,
    run: TrainedRun,
    indices: Sequence[int],
    found: Arrays,
    drawing: Drawing | None,
) -> None:
    """Write each mask as a PNG of classes with a palette, and draw it over its image.

    If images of several sizes share a batch, masks are cropped to `height` and `width`.
    """
    folder.mkdir(exist_ok=True)
    masks = found["mask"]
    heights, widths = (found.get(name, np.full(len(masks), 65535)) for name in ("height", "width"))
    for index, mask, height, width in zip(indices, masks, heights, widths, strict=True):
        mask = np.ascontiguousarray(mask[:height, :width])
        image = Image.fromarray(mask)
        image.putpalette(palette().tobytes())
        image.save(folder / f"{_file_name(run, index)}.png")
        if drawing is not None:
            source = run.data.source
            image = source.shown(index)["image"]
            _save_picture(drawing, run, index, draw_mask(image, mask, source.label_names, _scale_of(image)))


def _draw_boxes(drawing: Drawing, run: TrainedRun, indices: Sequence[int], found: Arrays) -> None:
    """Draw the boxes of each image of a batch, with class and score, in the colors of their classes."""
    source = run.data.source
    columns = run.task.prediction_columns({"index": np.array(indices), **found}, run.data)
    shown = boxes_above(columns, drawing.least_score)
    for index, *of_image in zip(indices, shown["labels"], shown["scores"], shown["boxes"], strict=True):
        image = source.shown(index)["image"]
        boxes = [
            Box(
                (left, top, left + width, top + height),
                f"{label} {score:.2f}",
                color_of_class(source.label_names.index(label)),
            )
            for label, score, (left, top, width, height) in zip(*of_image, strict=True)
        ]
        _save_picture(drawing, run, index, draw_boxes(image, boxes, _scale_of(image)))


def _scale_of(image: Image.Image) -> int:
    return max(1, -(-LEAST_EDGE // max(image.size)))


def _save_picture(drawing: Drawing, run: TrainedRun, index: int, picture: Image.Image) -> None:
    picture.save(drawing.folder / f"{_file_name(run, index)}.jpg", quality=90, subsampling=0)
