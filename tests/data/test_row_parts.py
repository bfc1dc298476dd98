"""A column that names the part of each row: every task refuses to train on all parts at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.support.runs import refused, write_rows

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
        return read_annotated(found, "train", data)
    return resolve_both(data)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_every_task_refuses_to_train_on_a_column_of_parts(kind: type[Data], suffix: str) -> None:
    if suffix == "json" and kind is ObjectDetectionData:
        pytest.skip("a .json file of boxes is COCO's")
    Image.new("RGB", (16, 16)).save("1.png")
    rows = [TASKS[kind](n) for n in range(12)]
    for name, parts in (("split", ("train", "test")), ("Set", ("training", "dev", "testing"))):
        train = write_rows(f"{name}.{suffix}", [{**row, name: parts[n % len(parts)]} for n, row in enumerate(rows)])
        named = f"{train}: column '{name}' divides|(train {12 // len(parts)}, "
        refused(load, kind(train=train), named=named)
        # A trained model may be shown all parts.
        load(kind(train=train).shown_as("evaluate's data"))
    for cells in (["train"], ["train", "bus", "car"], ["test", "dev"], ["a", "b"]):
        load(
            kind(train=write_rows(f"one.{suffix}", [{**row, "x": cells[n % len(cells)]} for n, row in enumerate(rows)]))
        )


def test_a_column_of_parts_is_found_in_later_rows_and_not_in_columns_that_are_read() -> None:
    rows = [{"text": f"film {n}", "label": "ab"[n % 2], "split": "train" if n < 100 else "test"} for n in range(120)]
    train = write_rows("t.jsonl", rows)
    refused(resolve_both, TextClassificationData(train=train), named="train 100, test 20")
    resolve_both(TextClassificationData(train=train, label_column="split"))
    rows[7]["split"] = "extra"
    refused(resolve_both, TextClassificationData(train=write_rows("t.csv", rows)), named="'extra' is not train")
