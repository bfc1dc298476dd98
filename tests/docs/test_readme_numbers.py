"""The README's numbers are those that were measured: in the results of benchmarks and at the head of recipes."""

import re
from collections import Counter
from typing import Any

import pytest
import yaml

from accel_train.core.json_io import read_json
from accel_train.recipe.tasks import TASKS
from tests.support.runs import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line.startswith("| ")]
TASK_ROWS = [row for row in ROWS if len(row) == 6 and row[0] != "task"]


def results(name: str) -> Any:
    return read_json(REPOSITORY / "benchmarks" / "results" / f"{name}.json")


def row_of(name: str) -> list[str]:
    (row,) = (row for row in ROWS if row[0] == name)
    return row


@pytest.mark.parametrize(
    ("name", "variant"),
    [("accel_train", "accel_train"), ("nanoGPT's loop", "nanogpt"), ("`transformers.Trainer`", "hf_trainer")],
)
def test_step_times_and_memory_are_those_of_the_gpu_benchmark(name: str, variant: str) -> None:
    cells = row_of(name)[1:]
    for cell, compiled in zip(cells, (False, True), strict=True):
        (found,) = (
            each
            for each in results("gpu")["rows"]
            if (each["model"], each["setting"], each["variant"], each["compile"]) == ("124M", "bf16", variant, compiled)
        )
        assert cell == f"{found['step_ms']:.1f} ms, {found['peak_gib']:.1f} GiB"
    versions = results("gpu")["versions"]
    assert f"torch {versions['torch'].removesuffix('.0')}, commit {versions['commit']}" in README


def test_counts_of_layouts_are_those_of_the_equality_benchmark() -> None:
    rows = results("equality")
    words = Counter(
        cell.split()[0].rstrip(":") for row in rows.values() for cell in row.values() if isinstance(cell, str)
    )
    assert "different" not in words
    told = re.search(r"(\d+) models under (\d+) layouts.*?([\d,]+) of ([\d,]+) results.*?other (\d+)", README, re.S)
    assert told is not None
    models, layouts, equal, computed, refused = (int(number.replace(",", "")) for number in told.groups())
    page = (REPOSITORY / "docs" / "models.md").read_text()
    assert f"\n{models} rows, " in page
    assert f"under {layouts} layouts" in (REPOSITORY / "benchmarks" / "README.md").read_text()
    assert (equal, computed, refused) == (words["equal"], words["equal"], words["refused"])


def test_step_over_the_raw_loop_is_that_of_the_overhead_benchmark() -> None:
    runs = results("overhead-tiny")["runs"]
    ratios = sorted(ours["cpu_us"] / raw["cpu_us"] for ours, raw in zip(runs["accel_train"], runs["raw"], strict=True))
    assert f"{ratios[len(ratios) // 2]:.3f} of the time " in README


def test_the_table_of_tasks_has_each_task_once() -> None:
    assert sorted(row[0].strip("`") for row in TASK_ROWS) == sorted(TASKS)


@pytest.mark.parametrize("row", TASK_ROWS, ids=lambda row: str(row[0]).strip("`"))
def test_scores_of_a_task_are_those_at_the_head_of_its_recipe(row: list[str]) -> None:
    task, _, recipe, score, baseline, _ = row
    text = (REPOSITORY / "recipes" / f"{recipe.strip('`')}.yaml").read_text()
    assert yaml.safe_load(text)["task"] == task.strip("`")
    head = " ".join(text.partition("task:")[0].replace("#", " ").split())
    for number in re.findall(r"\d[\d.]*", f"{score} {baseline}"):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", head), number
