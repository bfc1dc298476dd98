"""`finetune --example`: the table that it writes, and when it writes none."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.support.commands import call

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_example_is_a_table_of_sentences_and_packages_and_its_recipe_reads_it() -> None:
    call("finetune", "--example", "--dry-run")
    with Path("example.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    counts = Counter(row["package"] for row in rows)
    assert (len(counts), max(counts.values())) == (6, 300)
    assert all(len(row["description"].split()) >= 3 for row in rows)
    data = yaml.safe_load(Path("runs/example.yaml").read_text())["data"]
    assert (data["train"], data["text_columns"], data["label_column"]) == ("example.csv", ["description"], "package")


def test_the_same_command_again_takes_the_table_as_it_is() -> None:
    call("finetune", "--example", "--dry-run")
    before = Path("example.csv").stat().st_mtime_ns
    call("finetune", "--example", "--dry-run")
    assert Path("example.csv").stat().st_mtime_ns == before


def test_a_file_of_the_users_own_is_kept() -> None:
    Path("example.csv").write_text("mine\n")
    call("finetune", "--example", "--dry-run", code=2)
    assert Path("example.csv").read_text() == "mine\n"


@pytest.mark.parametrize("words", [[], ["own.csv", "--example"]])
def test_either_a_path_or_the_example_is_given(words: list[str]) -> None:
    call("finetune", *words, code=2)
    assert list(Path().iterdir()) == []


def test_a_training_at_80_columns_prints_at_most_25_lines_besides_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = call("finetune", "--example", "--schedule.num_epochs", "2").out
    lines = [line for line in printed.splitlines() if not line.startswith("step ")]
    assert lines[0].startswith("example.csv: looking")
    assert "Use it:" in lines
    # So short a training does not beat the baseline: a sentence, and its causes.
    causes = sum(line.startswith("  - ") for line in lines)
    assert len(lines) - causes - bool(causes) <= 25
