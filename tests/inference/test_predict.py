"""`accel-train predict`: a row for each sample in its order, on any number of processes, with labels or without."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml
from PIL import Image

from accel_train.cli.main import main
from accel_train.core.json_io import load_object
from accel_train.data.encoding import in_its_encoding
from accel_train.inference import predict as predicting
from accel_train.inference.boxes import boxes_above
from accel_train.inference.finished_run import check_own_encoding, open_run
from accel_train.inference.predict import label_columns, predict_rows, write_table
from accel_train.recipe.data import Data
from tests.inference.conftest import Cli
from tests.support import runs as runs
from tests.support.programs import one_visible_gpu
from tests.support.runs import QUIET, SCENES
from tests.support.wording import assert_golden, raises_golden

TOPICS = {"loop": "step batch epoch update", "number": "loss norm mean sum", "machine": "rank device memory host"}
TEXTS: dict[str, Any] = {
    **QUIET,
    "task": "text-classification",
    "output_dir": "texts",
    "model": {
        "config": {
            "model_type": "bert",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 1024,
        }
    },
    "data": {"train": "texts.csv", "eval_fraction": 0.4, "id_column": "id"},
    "batch": {"global_batch_size": 16, "per_device_eval_batch_size": 4},
    "optimizer": {"learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run on texts about three topics."""
    folder = tmp_path_factory.mktemp("finished")
    with (folder / "texts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "label"])
        for number in range(90):
            name = list(TOPICS)[number % 3]
            words = TOPICS[name].split()
            text = " ".join(words[(number + i * i) % 4] for i in range(1 + number * 7 % 18))
            writer.writerow([f"row-{number}", f"{text} {number}", name])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rows = Path("texts.csv").read_text().splitlines(keepends=True)[1:]
        Path("plain.csv").write_text("".join(rows))
        columns = {"header": "none", "id_column": "1", "text_columns": ["2"], "label_column": "3"}
        plain = {**TEXTS, "output_dir": "plain", "data": {"train": "plain.csv", "eval_fraction": 0.4, **columns}}
        for name, recipe in (("texts", TEXTS), ("plain", plain)):
            Path(f"{name}.yaml").write_text(yaml.safe_dump(recipe))
            assert main(["run", f"{name}.yaml"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that folder."""
    monkeypatch.chdir(finished)


def read_csv(path: str | Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_without_data_a_row_is_written_for_each_sample_that_was_held_out(cli: Cli) -> None:
    assert cli("predict texts") == "texts/predictions.csv\n"
    rows = read_csv("texts/predictions.csv")
    truth = {row["id"]: row["label"] for row in read_csv("texts.csv")}
    assert len(rows) == load_object(Path("texts/summary.json"))["eval"]["num_targets"] > 10
    ids = [int(row["id"].removeprefix("row-")) for row in rows]
    assert ids == sorted(set(ids))
    assert all(row["true_label"] == truth[row["id"]] for row in rows)
    hits = sum(row["label"] == row["true_label"] for row in rows)
    accuracy = load_object(Path("texts/evaluation.json"))["metrics"]["accuracy"]
    assert hits / len(rows) == pytest.approx(accuracy, abs=1e-12)
    assert {row["label"] for row in rows} <= set(TOPICS)
    assert all(1 / 3 <= float(row["score"]) <= 1 for row in rows)


def test_a_table_repeats_the_texts_and_rows_in_memory_do_not(cli: Cli) -> None:
    cli("predict texts texts.csv --out read.csv")
    assert [row["text"] for row in read_csv("read.csv")] == [row["text"] for row in read_csv("texts.csv")]
    cli("predict plain plain.csv --out plain-read.csv")
    assert [row["2"] for row in read_csv("plain-read.csv")] == [row["text"] for row in read_csv("texts.csv")]
    assert "text" in predict_rows(Path("texts"), "texts.csv")[0]
    (row,) = predict_rows(Path("texts"), ["step batch"])
    assert list(row)[:2] == ["label", "score"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--min-score 0", "--min-score is for object-detection, and texts is a text-classification run"),
        ("--row-per-box", "--row-per-box is for object-detection"),
        ("--draw pictures", "--draw is for semantic-segmentation and object-detection"),
        ("--min-score 1.1", "1.1 is not a number of at least 0 and at most 1"),
    ],
)
def test_an_option_for_other_predictions_is_refused_before_torch(words: str, said: str, cli: Cli) -> None:
    refused = cli(f"predict texts {words}", code=2)
    assert said in refused
    assert "importing torch" not in refused


def test_a_box_with_the_least_score_itself_is_kept() -> None:
    """As a float32, 0.1 is larger than its shortest decimal."""
    columns = {"labels": [["a", "b"], []], "scores": [[0.1, 0.09], []], "boxes": [[[1], [2]], []], "id": ["x", "y"]}
    found = boxes_above(columns, float(np.float32(0.1)))
    assert found == {"labels": [["a"], []], "scores": [[0.1], []], "boxes": [[[1]], []], "id": ["x", "y"]}


@pytest.mark.slow
def test_two_processes_write_the_table_of_one(cli: Cli) -> None:
    cli("predict texts texts.csv --out one.csv")
    done = runs.run_forked_command(["predict", "texts", "texts.csv", "--out", "two.csv"], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "two.csv\n"
    assert [row["id"] for row in read_csv("one.csv")] == [f"row-{number}" for number in range(90)]
    assert Path("two.csv").read_text() == Path("one.csv").read_text()


def test_a_run_ends_and_predicts_where_each_process_sees_one_gpu_alone() -> None:
    run = ["run", "texts.yaml", "--output_dir", "alone"]
    for words, printed in ((run, "report:"), (run, "finished at step"), (["predict", "alone"], "predictions.csv")):
        done = runs.run_forked_command(words, 2, program=Path(one_visible_gpu.__file__))
        assert done.returncode == 0, done.stderr[-3000:]
        assert printed in done.stdout
    assert len(read_csv("alone/predictions.csv")) > 0


def test_what_has_no_labels_is_predicted_as_if_it_had(cli: Cli) -> None:
    Path("bare.csv").write_text(
        "".join(f"{row['id']},{row['text']}\n" for row in [{"id": "id", "text": "text"}, *read_csv("texts.csv")])
    )
    cli("predict texts texts.csv --out with.csv")
    cli("predict texts bare.csv --out without.csv")
    said = cli.err
    assert "label" not in said
    with_labels, without = read_csv("with.csv"), read_csv("without.csv")
    assert "true_label" not in without[0]
    for row in with_labels:
        del row["true_label"]
    assert without == with_labels


def test_what_is_said_of_other_data_is_what_keeps_it_from_being_read(cli: Cli) -> None:
    """Here the labels are missing, which is no fault, and a text is none."""
    Path("bare.jsonl").write_text('{"id": "a", "text": "step batch"}\n{"id": "b", "text": null}\n')
    assert_golden(cli.refusal("predict texts bare.jsonl --out null.csv"))


def test_other_data_in_utf_8_is_read_as_such_whatever_the_encoding_of_the_runs_own(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    data = Data(train=str(path), encoding="cp1252")
    path.write_text("text\ncafé\n", encoding="cp1252")
    assert in_its_encoding(data) == (data, [])
    path.write_text("text\ncafé\n", encoding="utf-8")
    found, (note,) = in_its_encoding(data)
    assert found.encoding == "auto"
    assert_golden(note)


def test_a_header_is_no_sample_for_a_run_on_a_table_without_one(tmp_path: Path, cli: Cli) -> None:
    out, numbers = tmp_path / "found.csv", []
    for data in ("plain.csv", "texts.csv"):
        cli(f"predict plain {data} --out {out}")
        numbers.append((read_csv(out), cli.result(f"evaluate plain {data}")["metrics"]))
    assert numbers[0] == numbers[1]
    assert len(numbers[0][0]) == 90
    assert "true_label" in numbers[0][0][0]
    assert_golden(next(line for line in cli.err.splitlines() if "texts.csv" in line))
    cli(f"predict plain texts.csv --data.header none --out {out}")
    assert len(read_csv(out)) == 91


def test_files_with_and_without_a_header_are_refused_together(tmp_path: Path, cli: Cli) -> None:
    for name in ("plain", "texts"):
        (tmp_path / f"{name}.csv").write_text(Path(f"{name}.csv").read_text())
    for command in ("predict", "evaluate"):
        assert_golden(cli.refusal(f"{command} plain {tmp_path}"))


def test_a_table_without_a_header_is_refused_by_a_run_on_one_with_it(cli: Cli) -> None:
    for command in ("predict", "evaluate"):
        assert "no column 'text'" in cli(f"{command} texts plain.csv", code=2)


def test_a_model_of_utf8_that_was_read_as_latin_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("text\ncafé\n", encoding="utf-8")
    with raises_golden():
        check_own_encoding(tmp_path / "run", Data(train=str(path), encoding="cp1252"))
    check_own_encoding(tmp_path / "run", Data(train=str(path)))


def test_ids_in_other_data_are_said_to_be_taken_for_the_classes_in_their_order(
    cli: Cli,
) -> None:
    rows = [(row["id"], row["text"], sorted(TOPICS).index(row["label"])) for row in read_csv("texts.csv")]
    Path("ids.csv").write_text("id,text,label\n" + "".join(f"{name},{text},{label}\n" for name, text, label in rows))
    cli("predict texts ids.csv --out ids-predicted.csv")
    assert_golden(next(line for line in cli.err.splitlines() if "'label'" in line))
    truth = {row["id"]: row["label"] for row in read_csv("texts.csv")}
    assert all(row["true_label"] == truth[row["id"]] for row in read_csv("ids-predicted.csv"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_end_of_the_name_says_how_the_table_is_written(suffix: str, cli: Cli) -> None:
    out = f"table.{suffix}"
    cli("predict texts --out", out)
    rows = (
        pyarrow.parquet.read_table(out).to_pylist()
        if suffix == "parquet"
        else [json.loads(line) for line in Path(out).read_text().splitlines()]
    )
    cli("predict texts --out table.csv")
    assert [{name: str(value) for name, value in row.items()} for row in rows] == read_csv("table.csv")


@pytest.mark.parametrize(
    "arguments",
    [
        "texts --out table.xls",
        "texts --out nowhere/table.csv",
        "texts 0123456789.csv",
        "nowhere",
        "texts texts.csv --data.text_columns [words]",
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(arguments: str, cli: Cli) -> None:
    assert_golden(cli.refusal(f"predict {arguments}"))


@pytest.mark.parametrize("command, name", [("predict", "DATA"), ("evaluate", "--data")])
def test_other_data_has_the_commands_name_and_its_file_the_own(command: str, name: str, cli: Cli) -> None:
    folder, table = Path("my data.train"), Path("my data.train.csv")
    folder.mkdir(exist_ok=True)
    table.write_text("id,words\nfirst,step batch\n")
    error = cli(command, "texts", folder, code=2).splitlines()[-1]
    assert error.startswith(f"error: {name}: ")
    assert str(folder) in error
    assert str(table) in cli(command, "texts", table, code=2).splitlines()[-1]


def test_notes_on_training_are_not_made_for_other_data_and_those_on_its_files_keep_their_names() -> None:
    folder = Path("no training set")
    folder.mkdir(exist_ok=True)
    (folder / "rows.csv").write_text("id,text,label\nfirst,,loop\nlast,%s,loop\n" % ("step " * 2000))
    (folder / "notes.xyz").write_text("left out")
    run = open_run(folder.parent / "texts", data=str(folder))
    assert run.recipe.data.train_key == "--data"
    assert not run.recipe.data.is_for_training
    files, cut = run.notes
    assert files.startswith(f"{folder}: ")
    assert_golden(cut)


def test_masks_are_written_with_a_class_in_each_pixel(cli: Cli) -> None:
    Path("scenes.yaml").write_text(yaml.safe_dump(SCENES))
    cli("run scenes.yaml")
    for _ in range(2):  # the second takes the place of the first
        cli("predict scenes --draw scenes-drawn")
    rows = read_csv("scenes/predictions.csv")
    drawn = {path.stem for path in Path("scenes-drawn").glob("*.jpg")}
    assert drawn == {Path(row["mask"]).stem for row in rows}
    assert_golden(cli.refusal("predict scenes --draw scenes/predictions-masks"), "folder of the masks")
    Path("scenes-drawn/mine.txt").touch()
    assert_golden(cli.refusal("predict scenes --draw scenes-drawn"), "another file")
    labels = load_object(Path("scenes/model/config.json"))["id2label"]
    evaluation = load_object(Path("scenes/evaluation.json"))
    confusion = np.array(evaluation["details"]["segmentation"]["confusion_matrix"])
    assert len({row["mask"] for row in rows}) == len(rows) == len(list(Path("scenes/predictions-masks").glob("*.png")))
    counts = np.zeros(256, dtype=np.int64)
    for row in rows:
        with Image.open(Path("scenes", row["mask"])) as image:
            counts += np.bincount(np.asarray(image).ravel(), minlength=256)
    assert counts[: len(labels)].sum() == counts.sum()
    if confusion.sum() == counts.sum():  # no pixel of the truth is ignored
        assert counts[: len(labels)].tolist() == confusion.sum(axis=0).tolist()


def test_score_of_each_class_has_a_column_of_its_own(cli: Cli) -> None:
    cli("predict texts --out scores.csv")
    for row in read_csv("scores.csv"):
        scores = {name: float(row[f"score_{name}"]) for name in TOPICS}
        assert sum(scores.values()) == pytest.approx(1, abs=1e-5)
        assert max(scores, key=lambda name: scores[name]) == row["label"]
        assert float(row["score"]) == max(scores.values())


def test_scores_of_many_classes_are_not_even_kept(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr("accel_train.inference.predict.MAX_SCORE_COLUMNS", 2)
    kept: list[set[str]] = []
    in_order = predicting.rows_in_order
    monkeypatch.setattr(
        "accel_train.inference.predict.rows_in_order",
        lambda where, rows: (kept.append(set(rows)), in_order(where, rows))[1],
    )
    cli("predict texts --out few.csv")
    assert kept == [{"index", "label", "score", "truth"}]
    assert list(read_csv("few.csv")[0]) == ["id", "text", "label", "score", "true_label"]


def test_other_data_without_the_id_column_has_its_rows_named_by_number(cli: Cli) -> None:
    Path("no-ids.csv").write_text(
        "".join(
            f"{row['text']},{row['label']}\n" for row in [{"text": "text", "label": "label"}, *read_csv("texts.csv")]
        )
    )
    cli("predict texts texts.csv --out with-ids.csv")
    cli("predict texts no-ids.csv --out numbered.csv")
    assert_golden(next(line for line in cli.err.splitlines() if "'id'" in line), "no ids")
    named, numbered = read_csv("with-ids.csv"), read_csv("numbered.csv")
    assert [row.pop("id") for row in numbered] == [f"no-ids.csv:{number}" for number in range(2, 92)]
    assert [{name: value for name, value in row.items() if name != "id"} for row in named] == numbered
    cli("evaluate texts --data no-ids.csv")
    assert "no column 'id'" in cli.err
    Path("bare-texts.csv").write_text("".join(f"{text}\n" for text in ("text", "step batch", "loss norm")))
    cli("predict texts bare-texts.csv --out bare-numbered.csv")
    assert [row["id"] for row in read_csv("bare-numbered.csv")] == ["bare-texts.csv:2", "bare-texts.csv:3"]
    assert_golden(cli.refusal("evaluate texts --data bare-texts.csv"), "no labels")
    Path("labels.csv").write_text("id,label\nfirst,loop\n")
    assert_golden(cli.refusal("evaluate texts --data labels.csv"), "no texts")


def test_labels_by_name_and_none_where_the_truth_is_not_known() -> None:
    rows = {
        "label": np.array([1, 0, 2]),
        "score": np.array([0.9, 0.7, 0.1], dtype=np.float32),
        "truth": np.array([1, -100, 0]),
        "scores": np.eye(3, dtype=np.float32),
    }
    columns = label_columns(rows, ("a", "b"), labelled=True)
    assert columns["label"] == ["b", "a", "2"]
    assert columns["score"] == [0.9, 0.7, 0.1]  # and not 0.8999999761581421
    assert columns["true_label"] == ["b", None, "a"]
    assert columns["score_a"] == [1.0, 0.0, 0.0]
    assert "true_label" not in label_columns(rows, ("a", "b"), labelled=False)


def test_several_labels_are_joined_and_numbers_are_numbers() -> None:
    several = {
        "labels": np.array([[True, False, True], [False, False, False]]),
        "truth": np.array([[0.0, 1.0, 1.0], [0.0, -100.0, 0.0]]),
    }
    columns = label_columns(several, ("a", "b", "c"), labelled=True)
    assert columns == {"labels": ["a|c", ""], "true_labels": ["b|c", None]}
    numbers = {"value": torch.tensor([0.1, 2.5]).numpy(), "truth": np.array([0.25, np.nan], dtype=np.float32)}
    assert label_columns(numbers, ("rating",), labelled=True) == {"value": [0.1, 2.5], "true_value": [0.25, None]}


def test_a_predicted_number_that_is_not_one_is_shown_and_a_missing_truth_is_none() -> None:
    nan = np.array([0.5, float("nan")], np.float32)
    shown = label_columns({"value": nan, "truth": nan}, [], labelled=True)
    assert str(shown) == "{'value': [0.5, nan], 'true_value': [0.5, None]}"


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    write_table({"id": ["a,b", 'c"d'], "label": ["x\ny", None]}, out, tmp_path / "run")
    assert read_csv(out) == [{"id": "a,b", "label": "x\ny"}, {"id": 'c"d', "label": ""}]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        write_table({"id": ["a", "b"], "label": ["x"]}, out, tmp_path / "run")
    assert len(read_csv(out)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_texts_that_a_spreadsheet_may_run_are_counted_and_kept_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {
        "id": ['=HYPERLINK("http://x")', "@sum", "-1.5", "+ 1", "a=b"],
        "score": [-0.5, 1.0, None, 2.0, 3.0],
        "score_-x": [0.0] * 5,
    }
    out = write_table(columns, tmp_path / "p.csv", tmp_path / "run")
    with out.open(newline="") as file:
        names, *rows = csv.reader(file)
    assert names == list(columns)
    assert [row[0] for row in rows] == columns["id"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "4 cells" not in said
    assert "3 cells" in said
    assert ".jsonl" in said
    out = write_table(columns, tmp_path / "p.jsonl", tmp_path / "run")
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == columns["id"]
    write_table({"id": ["a.csv:1"], "value": [-1.0]}, tmp_path / "q.csv", tmp_path / "run")
    assert capsys.readouterr().err == ""
