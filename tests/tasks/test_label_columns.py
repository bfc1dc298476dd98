"""Columns of 0 and 1 (`data.label_columns`) train the same as lists of their names, and a wrong cell is named."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.cli.main import main
from accel_train.core.errors import RecipeProblems
from accel_train.core.json_io import load_json
from accel_train.data.tables import binary_value
from accel_train.recipe.loader import load_recipe, make_recipe
from tests.support.runs import answers, losses, refused, write_recipe_file
from tests.support.text_tasks import BERT, TOPICS, load, recipe_for, several_topics, write_csv, write_jsonl, write_texts
from tests.support.wording import assert_golden

COLUMNS = ["number", "machine", "loop"]
"""Neither sorted nor in the order of `TOPICS`."""


def write_columns(path: Path, num_rows: int = 60, **cells: Any) -> Path:
    """The texts of `write_texts` with `several_topics`, and a column of 0 and 1 for each label.

    `cells` replaces the cell of row 5 in the column of that name.
    """
    with write_texts(path.with_name("plain.csv"), num_rows).open(newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    rows = []
    for number, text in enumerate(texts):
        ones = {name: int(name in several_topics(number)) for name in TOPICS} | (cells if number == 5 else {})
        rows.append({"text": text, **ones})
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    return write_csv(path, list(rows[0]), *(list(row.values()) for row in rows))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_columns_are_encoded_as_lists_of_their_names_and_held_out_alike(tmp_path: Path, suffix: str) -> None:
    columns = {"data": {"label_columns": COLUMNS}}
    lists = {"data": {"label_names": COLUMNS}}
    _, found, model = load(recipe_for("text-classification", write_columns(tmp_path / f"c.{suffix}"), **columns))
    path = write_texts(tmp_path / "lists.jsonl", label=several_topics)
    _, expected, other = load(recipe_for("text-classification", path, **lists))
    texts, same = found.source.rows, expected.source.rows
    assert texts.scheme.names == tuple(COLUMNS) == same.scheme.names
    for side in ("train_labels", "eval_labels"):
        labels = getattr(texts, side)
        assert labels.dtype == getattr(same, side).dtype
        assert labels.tolist() == getattr(same, side).tolist()
    first = texts.train[0]
    assert texts.train_labels[0].tolist() == [
        float(name in several_topics(int(first.texts[0].split()[-1]))) for name in COLUMNS
    ]
    assert found.fingerprint == expected.fingerprint, "a run may change from lists to columns"
    assert model.config.id2label == other.config.id2label == dict(enumerate(COLUMNS))
    _, turned, _ = load(
        recipe_for("text-classification", tmp_path / f"c.{suffix}", data={"label_columns": COLUMNS[::-1]})
    )
    assert turned.fingerprint != found.fingerprint, "the order is the order of the model's outputs"


def test_a_run_on_columns_has_the_losses_of_lists_resumes_predicts_and_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_columns(Path("columns.csv"))
    write_texts(Path("lists.jsonl"), label=several_topics)
    model = {"model": {"config": BERT}, "task": "text-classification", "schedule": {"max_steps": 3}}
    for name, data in (
        ("columns", {"train": "columns.csv", "label_columns": COLUMNS}),
        ("lists", {"train": "lists.jsonl", "label_names": COLUMNS}),
    ):
        path = write_recipe_file(tmp_path, **model, data={**data, "eval_fraction": 0.3}, output_dir=name)
        assert main(["run", str(path)]) == 0
    assert losses(Path("columns")) == losses(Path("lists"))
    capsys.readouterr()
    assert main(["plan", "columns/recipe.resolved.yaml"]) == 0
    assert load_recipe(Path("columns/recipe.resolved.yaml")).data.model_dump()["label_column"] is None
    again = ["run", "columns/recipe.resolved.yaml", "--schedule.max_steps", "3"]
    assert main(again) == 0

    def rows(*words: str) -> list[dict[str, str]]:
        out = Path(f"out-{len(list(Path().glob('out-*')))}.csv")
        assert main(["predict", *words, "--out", str(out)]) == 0
        with out.open(newline="") as file:
            return list(csv.DictReader(file))

    own = rows("columns")
    assert [row["true_labels"] for row in own] == [row["true_labels"] for row in rows("lists")]
    assert [row["score_loop"] for row in own] == [row["score_loop"] for row in rows("lists")]
    known = rows("columns", "columns.csv")
    for number, row in enumerate(known):
        assert row["true_labels"] == "|".join(name for name in COLUMNS if name in several_topics(number))
    # Columns in another order in the flag keep the order of the model.
    assert rows("columns", "columns.csv", "--data.label_columns", "[loop, machine, number]") == known
    bare = rows("columns", "plain.csv")
    assert "true_labels" not in bare[0]
    assert [row["score_loop"] for row in bare] == [row["score_loop"] for row in known]
    scores = {}
    for run, table in (("columns", "columns.csv"), ("lists", "lists.jsonl")):
        assert main(["evaluate", run, table]) == 0
        scores[run] = load_json(Path(run, f"evaluation-{run}.json"))["metrics"]
    assert scores["columns"] == scores["lists"]
    assert main(["evaluate", "columns", "columns.csv", "--data.label_columns", "[loop, machine]"]) == 2
    assert_golden(answers(capsys.readouterr().err)[-1])


@pytest.mark.parametrize(
    "cells, said",
    [
        ({"machine": 2}, "c.csv:7|'machine'|\"2\" is not 0 or 1"),
        ({"loop": "yes"}, "c.csv:7|'loop'|\"yes\" is not 0 or 1"),
        ({"loop": ""}, "c.csv:7|'loop'|no label|1 of 60 lack one; data.missing_labels: drop"),
    ],
)
def test_a_cell_that_is_not_0_or_1_is_named(tmp_path: Path, cells: dict[str, Any], said: str) -> None:
    path = write_columns(tmp_path / "c.csv", **cells)
    refused(load, recipe_for("text-classification", path, data={"label_columns": COLUMNS}), named=said)


def test_a_wrong_cell_of_the_evaluation_data_is_named(tmp_path: Path) -> None:
    data = {"label_columns": COLUMNS, "eval": str(write_columns(tmp_path / "e.csv", machine=""))}
    path = write_columns(tmp_path / "c.csv")
    refused(load, recipe_for("text-classification", path, data=data), named="e.csv:7|'machine'|no label")


def test_rows_that_lack_any_of_the_labels_are_dropped_on_request(tmp_path: Path) -> None:
    path = write_columns(tmp_path / "c.jsonl", machine=None)
    data = {"label_columns": COLUMNS, "missing_labels": "drop"}
    _, found, _ = load(recipe_for("text-classification", path, data=data))
    texts = found.source.rows
    assert len(texts.train) + len(texts.eval) == 59
    assert not any(row.where.endswith(":6") for row in (*texts.train, *texts.eval))
    assert_golden("\n".join(texts.notes))


def test_0_and_1_are_read_as_files_and_pandas_write_them_and_nothing_else_is() -> None:
    assert [binary_value(cell) for cell in (0, "0", False, 0.0, "0.0", "False")] == [False] * 6
    assert [binary_value(cell) for cell in (1, "1", True, 1.0, "1.0", "true")] == [True] * 6
    wrong = [None, "", 2, "yes", 0.5, "01", [1], -1, float("nan")]
    assert [binary_value(cell) for cell in wrong] == [None] * len(wrong)


@pytest.mark.parametrize(
    "data, model, said",
    yaml.safe_load("""
    - [{label_column: c}, {}, data.label_column=c also]
    - [{label_names: [a, b]}, {}, data.label_names]
    - [{label_ids_from: 1}, {}, data.label_ids_from=1]
    - [{label_columns: [a]}, {}, at least two columns]
    - [{label_columns: [a, b, a]}, {}, "'a' occurs twice"]
    - [{text_columns: [b]}, {}, "also reads 'b'"]
    - [{}, {problem_type: regression}, model.problem_type=regression]
    """),
)
def test_label_columns_that_contradict_another_setting_are_refused_without_reading(
    data: dict[str, Any], model: dict[str, Any], said: str
) -> None:
    tree = {
        "task": "text-classification",
        "output_dir": "run",
        "model": {"config": {"model_type": "bert"}, **model},
        "data": {"train": "nowhere.csv", "label_columns": ["a", "b"], **data},
        "schedule": {"max_steps": 1},
    }
    with pytest.raises(RecipeProblems) as problem:
        make_recipe(tree, "recipe")
    assert said in str(problem.value)
    assert "data.label_columns" in str(problem.value)
