"""A small recipe of each built-in task, and of the kinds of targets that are numbers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_train.recipe.tasks import TASKS
from tests.support.boxes import write_coco
from tests.support.detectors import YOLOS
from tests.support.runs import SCENES, TINY_MODEL, recipe_dict, write_corpus
from tests.support.text_tasks import BERT, write_csv, write_data
from tests.support.text_tasks import TASKS as TEXT_TASKS

VIT = {
    "model_type": "vit", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4, "num_channels": 1, "hidden_dropout_prob": 0.0,
}  # fmt: skip


def of_texts(task: str, **rows: Any) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        train = str(write_data(task, folder, **rows))
        return {"model": {"config": dict(TEXT_TASKS[task].config)}, "data": {"train": train, **TEXT_TASKS[task].data}}

    return write


def of_pairs(columns: list[str], score: str | None = None) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        rows = [[f"step {number} of {number % 7}", f"loss {number}", 0.1 + number % 9 / 10.0] for number in range(40)]
        train = str(write_csv(folder / "pairs.csv", ["anchor", "positive", "score"], *rows))
        data = {"train": train, "pair_columns": columns, "score_column": score}
        return {"model": {"config": BERT}, "data": data}

    return write


def of_boxes(folder: Path) -> dict[str, Any]:
    for part in ("train", "eval"):
        write_coco(folder / part / "boxes.json", folder / part)
    data = {"train": str(folder / "train" / "boxes.json"), "eval": str(folder / "eval" / "boxes.json")}
    return {"model": {"config": YOLOS}, "tokenizer": "auto", "data": {**data, "image_size": 64}}


def of_images(config: Mapping[str, Any], **data: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"model": {"config": config}, "tokenizer": "auto", "data": {**data}}


LARGE_LABELS = of_texts("text-classification", label=lambda number: round(1000.3 + 0.05 * (number % 32), 2))
"""Numbers that bf16 rounds to 1000."""
CASES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "causal-lm": lambda folder: {"data": {"train": str(write_corpus(folder))}, "model": {"config": TINY_MODEL}},
    **{task: of_texts(task) for task in TEXT_TASKS},
    "text-classification of numbers": LARGE_LABELS,
    "image-classification": of_images(VIT, train="digits", image_size=16),
    "semantic-segmentation": of_images(SCENES["model"]["config"], train="digit-scenes", image_size=32),
    "object-detection": of_boxes,
    "sentence-embedding": of_pairs(["anchor", "positive"]),
    "sentence-embedding of scores": of_pairs(["anchor", "positive"], "score"),
}
"""Writes data into a folder, and returns the sections of a recipe. The name begins with the task's."""


def task_of(case: str) -> str:
    return case.partition(" ")[0]


assert {task_of(case) for case in CASES} == set(TASKS), "each task needs a small recipe"


def recipe_of(case: str, folder: Path, **sections: Any) -> dict[str, Any]:
    """Return the complete recipe of a case, with its data in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    own = CASES[case](folder)
    own["data"] |= {"num_workers": 0, **sections.pop("data", {})}
    return recipe_dict(folder, task=task_of(case), **{**own, **sections})
