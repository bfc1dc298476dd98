"""A column that names the part of each row: every task refuses to train on all parts at once."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from accel_train.data.images.annotations.folders import locate, read_annotated
from accel_train.data.images.images import Target
from accel_train.data.images.pools import read_pools
from accel_train.data.tables import resolve_both
from accel_train.recipe.data import Data
from accel_train.tasks.causal_lm.config import CausalLMData
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.object_detection.config import ObjectDetectionData
from accel_train.tasks.text_classification.config import TextClassificationData
from accel_train.tasks.token_classification.config import TokenClassificationData

Row = dict[str, Any]
BOX = {"width": 16, "height": 16, "xmin": 1, "ymin": 1, "xmax": 5, "ymax": 5}
TASKS: dict[type[Data], Callable[[int], Row]] = {
    TextClassificationData: lambda n: {"text": f"a film {n}", "label": "ab"[n % 2]},
    TokenClassificationData: lambda n: {"tokens": ["Ann", f"{n}"], "tags": ["B-PER", "O"]},
    CausalLMData: lambda n: {"text": f"a film {n}"},
    ImageClassificationData: lambda n: {"image": "1.png", "label": "ab"[n % 2]},
    ObjectDetectionData: lambda n: {"filename": "1.png", "class": "ab"[n % 2], **BOX},
}


def load(data: Any) -> object:
    if isinstance(data, ImageClassificationData):
        return read_pools(data.train, data, data.train_key, Target("label", is_mask=False))
    if isinstance(data, ObjectDetectionData):
        found = locate(Path(data.train), data)
        assert found is not None
        return read_annotated(found, "train", data)
    return resolve_both(data)


def write(path: Path, rows: list[Row]) -> str:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_every_task_refuses_to_train_on_a_column_of_parts(kind: type[Data], suffix: str, tmp_path: Path) -> None:
    if suffix == "json" and kind is ObjectDetectionData:
        pytest.skip("a .json file of boxes is COCO's")
    Image.new("RGB", (16, 16)).save(tmp_path / "1.png")
    rows = [TASKS[kind](n) for n in range(12)]
    for name, parts in (("split", ("train", "test")), ("Set", ("training", "dev", "testing"))):
        train = write(
            tmp_path / f"{name}.{suffix}", [{**row, name: parts[n % len(parts)]} for n, row in enumerate(rows)]
        )
        with pytest.raises(
            ValueError, match=rf"{name}\.{suffix}: column '{name}' divides .*\(train {12 // len(parts)}, "
        ):
            load(kind(train=train))
        # A trained model may be shown all parts.
        load(kind(train=train).shown_as("evaluate's data"))
    for cells in (["train"], ["train", "bus", "car"], ["test", "dev"], ["a", "b"]):
        load(
            kind(
                train=write(
                    tmp_path / f"one.{suffix}", [{**row, "x": cells[n % len(cells)]} for n, row in enumerate(rows)]
                )
            )
        )


def test_a_column_of_parts_is_found_in_later_rows_and_not_in_columns_that_are_read(tmp_path: Path) -> None:
    rows = [{"text": f"film {n}", "label": "ab"[n % 2], "split": "train" if n < 100 else "test"} for n in range(120)]
    train = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(ValueError, match="train 100, test 20"):
        resolve_both(TextClassificationData(train=train))
    resolve_both(TextClassificationData(train=train, label_column="split"))
    rows[7]["split"] = "extra"
    with pytest.raises(ValueError, match="'extra' is not train"):
        resolve_both(TextClassificationData(train=write(tmp_path / "t.csv", rows)))
