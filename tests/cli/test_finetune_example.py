"""`finetune --example`: the table that it writes, and when it writes none."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import yaml

from accel_train.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_is_a_table_of_sentences_and_packages_and_its_recipe_reads_it() -> None:
    assert main(["finetune", "--example", "--dry-run"]) == 0
    with Path("example.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    counts = Counter(row["package"] for row in rows)
    assert (len(counts), max(counts.values())) == (6, 300)
    assert all(len(row["description"].split()) >= 3 for row in rows)
    data = yaml.safe_load(Path("runs/example.yaml").read_text())["data"]
    assert (data["train"], data["text_columns"], data["label_column"]) == ("example.csv", ["description"], "package")


def test_the_same_command_again_takes_the_table_as_it_is() -> None:
    main(["finetune", "--example", "--dry-run"])
    before = Path("example.csv").stat().st_mtime_ns
    assert main(["finetune", "--example", "--dry-run"]) == 0
    assert Path("example.csv").stat().st_mtime_ns == before


def test_a_file_of_the_users_own_is_kept() -> None:
    Path("example.csv").write_text("mine\n")
    assert main(["finetune", "--example", "--dry-run"]) == 2
    assert Path("example.csv").read_text() == "mine\n"


@pytest.mark.parametrize("words", [[], ["own.csv", "--example"]])
def test_either_a_path_or_the_example_is_given(words: list[str], folder: Path) -> None:
    assert main(["finetune", *words]) == 2
    assert list(folder.iterdir()) == []


def test_a_training_at_80_columns_prints_at_most_25_lines_besides_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["finetune", "--example", "--schedule.num_epochs", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("step ")]
    assert lines[0].startswith("example.csv: looking")
    assert "Use it:" in lines
    # So short a training does not beat the baseline: a sentence, and its causes.
    causes = sum(line.startswith("  - ") for line in lines)
    assert len(lines) - causes - bool(causes) <= 25
