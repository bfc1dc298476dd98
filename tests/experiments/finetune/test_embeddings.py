"""`finetune` of texts that belong together: what is recognized, what is ambiguous, and a run of it."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.cli.main import main
from accel_train.recipe.schema import Recipe
from accel_train.tasks.sentence_embedding.config import SentenceEmbeddingData
from accel_train.tasks.sentence_embedding.data import load_rows
from tests.support.wording import assert_golden

Cell = Callable[[int], Any]
TEXTS: dict[str, Cell] = {
    name: lambda row, name=name: f"a longer {name} with number {row}"  # type: ignore[misc]
    for name in ("anchor", "query", "positive", "document", "negative", "negative_2", "title", "sentence1", "sentence2")
}
OTHERS: dict[str, Cell] = {
    "id": lambda row: f"row-{row}",
    "score": lambda row: row % 11 / 10,
    "similarity": lambda row: row % 6,
    "relevance": lambda row: row % 2,
    "label": lambda row: row % 2,
}


def write_rows(*columns: str, number: int = 40) -> None:
    cells = {name: (TEXTS | OTHERS)[name] for name in columns}
    rows = [{name: cell(row) for name, cell in cells.items()} for row in range(number)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(*flags: str) -> dict[str, Any]:
    assert main(["finetune", "a.jsonl", "--dry-run", *flags]) == 0
    found: dict[str, Any] = yaml.safe_load(Path("runs/a.yaml").read_text())
    return found


@pytest.mark.parametrize(
    ("columns", "pair_columns", "score"),
    [
        (["anchor", "positive"], ["anchor", "positive"], None),
        (["id", "positive", "query"], ["query", "positive"], None),
        (["query", "document"], ["query", "document"], None),
        (["anchor", "positive", "negative"], ["anchor", "positive", "negative"], None),
        (["query", "negative", "negative_2", "document"], ["query", "document", "negative", "negative_2"], None),
        (["query", "document", "score"], ["query", "document"], "score"),
        (["anchor", "positive", "similarity"], ["anchor", "positive"], "similarity"),
    ],
)
def test_columns_of_anchors_are_recognized_by_their_names(
    columns: list[str], pair_columns: list[str], score: str | None
) -> None:
    write_rows(*columns)
    recipe = recipe_of()
    assert recipe["task"] == "sentence-embedding"
    assert recipe["data"]["pair_columns"] == pair_columns
    assert recipe["data"].get("score_column") == score
    assert recipe["evaluate"]["metric_for_best_model"] == ("mrr_at_10" if score is None else "spearman")


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        (["query", "document", "label"], "text-classification"),
        (["anchor", "positive", "label"], "text-classification"),
        (["sentence1", "sentence2", "score"], "text-classification"),
    ],
)
def test_pairs_with_a_label_are_classified_and_names_of_sentences_do_not_tell(columns: list[str], task: str) -> None:
    write_rows(*columns)
    recipe = recipe_of()
    assert (recipe["task"], recipe["data"]["text_columns"]) == (task, columns[:2])


def test_a_named_task_takes_columns_of_other_names() -> None:
    write_rows("sentence1", "sentence2", "score", "title")
    asked = ("--task", "sentence-embedding")
    data = recipe_of(*asked)["data"]
    assert (data["pair_columns"], data["score_column"]) == (["sentence1", "sentence2"], "score")
    Path("runs/a.yaml").unlink()
    data = recipe_of(*asked, "--text", "title,sentence2")["data"]
    assert (data["pair_columns"], data["score_column"]) == (["title", "sentence2"], "score")
    Path("runs/a.yaml").unlink()
    data = recipe_of(*asked, "--text", "title,sentence2,sentence1")["data"]
    assert data["pair_columns"] == ["title", "sentence2", "sentence1"]
    assert "score_column" not in data


@pytest.mark.parametrize("column", ["title", "relevance"])
def test_a_column_that_may_say_more_about_the_pairs_stops_and_the_command_of_the_message_runs(
    column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows("query", "document", column, number=20)
    assert main(["finetune", "a.jsonl", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert column in error
    words = shlex.split(error.partition("accel-train run ")[2])
    small = ["--schedule.num_epochs", "null", "--schedule.max_steps", "1", "--batch.global_batch_size", "4"]
    assert main(["run", *words, *small, "--evaluate.every_epochs", "null"]) == 0
    assert recipe_of("--task", "sentence-embedding")["data"]["pair_columns"] == ["query", "document"]


def test_a_row_without_a_text_and_a_task_without_columns_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("query", "document")
    with Path("a.jsonl").open("a") as file:
        file.write(json.dumps({"query": "a question", "document": ""}) + "\n")
    assert main(["finetune", "a.jsonl", "--dry-run"]) == 2
    assert_golden(capsys.readouterr().err, "row")
    write_rows("title", "id")
    assert main(["finetune", "a.jsonl", "--dry-run", "--task", "sentence-embedding"]) == 2
    assert_golden(capsys.readouterr().err, "task")


@pytest.mark.parametrize("columns", [("query", "document", "negative"), ("query", "document", "score")])
def test_a_small_table_of_anchors_trains(columns: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(*columns)
    quick = ("--schedule.max_steps", "2", "--log.progress", "false", "--data.cache_dir", "cache")
    assert main(["finetune", "a.jsonl", *quick]) == 0
    assert 'SentenceTransformer("runs/a/model")' in capsys.readouterr().out
    summary = json.loads(Path("runs/a/summary.json").read_text())
    assert ("spearman" if "score" in columns else "mrr_at_10") in summary["eval"]
    assert Path("runs/a/model/1_Pooling/config.json").is_file()
    assert main(["predict", "runs/a", "a.jsonl", "--out", "p.jsonl"]) == 0
    assert len(Path("p.jsonl").read_text().splitlines()) == 40


@pytest.mark.parametrize("cell", ["", "0,5", None])
@pytest.mark.parametrize("flags", [(), ("--task", "sentence-embedding")])
def test_a_score_that_is_not_a_number_does_not_turn_scored_pairs_into_positives(
    cell: str | None, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows("anchor", "positive", "score")
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    rows[3]["score"] = cell
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["finetune", "a.jsonl", "--dry-run", *flags]) == 2
    assert_golden(capsys.readouterr().err)
    found = recipe_of("--task", "sentence-embedding", "--data.score_column", "null")["data"]
    assert (found["pair_columns"], found.get("score_column")) == (["anchor", "positive"], None)


def test_the_column_of_scores_is_a_flag() -> None:
    write_rows("anchor", "positive", "relevance")
    found = recipe_of("--task", "sentence-embedding", "--data.score_column", "relevance")
    assert found["data"]["score_column"] == "relevance"
    assert found["evaluate"]["metric_for_best_model"] == "spearman"


def test_scores_that_are_all_equal_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("anchor", "positive", "score")
    text = Path("a.jsonl").read_text()
    Path("a.jsonl").write_text(re.sub('"score": [0-9.]+', '"score": 1.0', text))
    assert main(["finetune", "a.jsonl"]) == 2
    assert_golden(capsys.readouterr().err)


@pytest.mark.parametrize(("number", "is_noted"), [(10, True), (11, False)])
def test_a_recall_over_few_documents_is_noted(number: int, is_noted: bool) -> None:
    write_rows("anchor", "positive")
    lines = Path("a.jsonl").read_text().splitlines()
    # A repeated row adds no document.
    Path("eval.jsonl").write_text("\n".join([*lines[:number], lines[0]]))
    rows = load_rows(
        Recipe.model_validate(
            {
                "task": "sentence-embedding",
                "output_dir": "run",
                "model": {"config": {"model_type": "bert"}},
                "schedule": {"max_steps": 1},
                "data": SentenceEmbeddingData(train="a.jsonl", eval="eval.jsonl"),
            }
        )
    )
    assert any("recall_at_10" in note for note in rows.notes) == is_noted
