"""Archives, spreadsheets, and unusual forms: written next to the run, once, and never over other files."""

import csv
import gzip
import io
import json
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from accel_train.experiments.finetune.recipe import asked_of, minimal_recipe
from accel_train.experiments.finetune.start import write_recipe
from accel_train.experiments.finetune.unpack import unpacked
from benchmarks import shapes
from tests.support.runs import refused
from tests.support.wording import assert_golden, raises_golden

ROWS = ["text,label", *(f"the film number {n} was long,{'ab'[n % 2]}" for n in range(40))]


def unpack(path: str, output_dir: str | None = None) -> tuple[str, str, str | None]:
    return unpacked(asked_of(path, minimal_recipe(path, [])), output_dir)


def write_zip(name: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_a_recipe_names_the_files_of_an_archive_and_says_where_they_are() -> None:
    write_zip("reviews.zip", {"reviews/data.csv": "\n".join(ROWS), "reviews/README.md": "about", "__MACOSX/x": "?"})
    written = write_recipe("reviews.zip", [])
    assert written.recipe.data.train == "runs/reviews-data/reviews/data.csv"
    assert written.recipe.output_dir == "runs/reviews"
    assert_golden(written.found.notes[0])
    assert not write_recipe("reviews.zip", []).is_new  # a second start reads the same files


@pytest.mark.parametrize("name", ["reviews.csv.gz", "reviews.tar.gz", "reviews.tar"])
def test_a_packed_table_has_the_rows_of_the_table(name: str) -> None:
    content = "\n".join(ROWS).encode()
    if name == "reviews.csv.gz":
        Path(name).write_bytes(gzip.compress(content))
    else:
        with tarfile.open(name, "w:gz" if name.endswith("gz") else "w") as archive:
            member = tarfile.TarInfo("reviews.csv")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert Path(unpack(name)[0]).read_bytes() == content


def packed_bomb(name: str, num_bytes: int) -> None:
    """Write an archive of a table with `num_bytes` blank lines after its rows."""
    content = "\n".join(ROWS).encode() + b"\n" * num_bytes
    if name.endswith(".csv.gz"):
        Path(name).write_bytes(gzip.compress(content, 1))
    elif name.endswith(".tar.gz"):
        with tarfile.open(name, "w:gz", compresslevel=1) as archive:
            member = tarfile.TarInfo("reviews.csv")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    else:
        with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("xl/a.xml" if name.endswith("xlsx") else "reviews.csv", content)


@pytest.mark.parametrize("name", ["b.csv.gz", "b.tar.gz", "b.zip", "b.xlsx"])
@pytest.mark.parametrize("limit", ["the disk", "the ratio"])
def test_an_archive_that_would_fill_the_disk_is_refused_before_it_is_written(
    name: str, limit: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fills_the_disk, module = limit == "the disk", "accel_train.experiments.finetune.unpack"
    monkeypatch.setattr(f"{module}._MOST_RATIO", 50)
    monkeypatch.setattr(f"{module}._SMALL_BYTES", 2**30 if fills_the_disk else 2**21)
    free = 2**21 if fills_the_disk else 2**40
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=free))
    written: list[int] = []
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: written.append(1))
    packed_bomb(name, 2**22)
    with raises_golden():
        unpack(name)
    assert not written
    assert not Path("runs/b-data").exists()


def test_a_folder_with_other_data_is_not_written_to() -> None:
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS)})
    Path("runs/reviews-data").mkdir(parents=True)
    Path("runs/reviews-data/mine.csv").write_text("mine")
    refused(unpack, "reviews.zip", named="runs/reviews-data exists and was not made from reviews.zip")
    assert [path.name for path in Path("runs/reviews-data").iterdir()] == ["mine.csv"]
    place, run, _ = unpack("reviews.zip", "other")
    assert (place, run) == ("other-data/data.csv", "other")
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS[:-1])})
    refused(unpack, "reviews.zip", "other", named="other-data exists and was not made from reviews.zip")


def test_a_damaged_archive_leaves_no_folder() -> None:
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS)})
    whole = Path("reviews.zip").read_bytes()
    Path("reviews.zip").write_bytes(whole[: len(whole) // 2])
    refused(unpack, "reviews.zip", named="reviews.zip cannot be unpacked")
    assert list(Path("runs").iterdir()) == []


def test_an_archive_writes_nothing_outside_its_folder() -> None:
    with tarfile.open("bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../../outside.csv"))
    error = refused(unpack, "bad.tar", named="bad.tar cannot be unpacked|outside.csv")
    assert "yourself" not in str(error)
    write_zip("bad.zip", {"../../outside.csv": "x", "data.csv": "\n".join(ROWS)})
    unpack("bad.zip")
    assert not list(Path().rglob("../outside.csv"))
    assert not Path("outside.csv").exists()
    assert not Path("runs/outside.csv").exists()


def test_cells_of_a_spreadsheet_are_written_as_they_are_shown() -> None:
    place, _, _ = unpack(shapes.spreadsheet())
    with Path(place).open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", "review", "label"]
    assert [row[0] for row in rows] == [str(number) for number in range(60)]
    assert len({row[1] for row in rows}) == 60
    assert {row[2] for row in rows} == {"positive", "negative", "neutral"}


def test_a_spreadsheet_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    refused(unpack, shapes.spreadsheet(), named="pip install 'accel-train[excel]'")


def test_another_process_reads_what_the_first_unpacks_and_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS)})
    monkeypatch.setattr("accel_train.experiments.finetune.unpack.WAIT_SECONDS", 0.2)
    asked = asked_of("reviews.zip", minimal_recipe("reviews.zip", []))
    monkeypatch.setenv("RANK", "1")
    refused(unpacked, asked, None, named="the first process did not make runs/reviews-data")
    assert not Path("runs").exists()
    monkeypatch.delenv("RANK")
    first = unpacked(asked, None)
    monkeypatch.setenv("RANK", "1")
    assert unpacked(asked, None) == first


def test_splits_in_one_document_are_files_and_the_test_split_is_evaluated_on_only_without_validation() -> None:
    rows = [{"text": row.split(",")[0], "label": row.split(",")[1]} for row in ROWS[1:]]
    Path("whole.json").write_text(json.dumps({"train": rows, "dev": rows[:7], "test": rows[:9]}))
    written = write_recipe("whole.json", [])
    assert (written.recipe.data.train, written.recipe.data.eval) == (
        "runs/whole-data/train.jsonl",
        "runs/whole-data/validation.jsonl",
    )
    assert (written.found.num_samples, written.found.test) == (40, "runs/whole-data/test.jsonl")
    assert [json.loads(line) for line in Path("runs/whole-data/train.jsonl").read_text().splitlines()] == rows
    Path("two.json").write_text(json.dumps({"train": rows, "test": [["a b", "c"]]}))
    assert unpack("two.json")[0] == "runs/two-data"
    Path("latin.json").write_bytes('[{"text": "caf\u00e9"}]'.encode("latin-1"))
    assert unpack("latin.json")[0] == "latin.json"
    assert Path("runs/two-data/eval_from_test.jsonl").read_text() == '{"1": "a b", "2": "c"}\n'


def test_rows_are_written_in_the_encoding_of_the_command_line() -> None:
    rows = [dict(zip(("text", "label"), row.split(","))) for row in ROWS[1:]]
    Path("whole.json").write_text(json.dumps({"train": rows, "dev": rows[:7]}), encoding="utf-16")
    assert write_recipe("whole.json", ["--data.encoding", "utf-16"]).found.num_samples == 40


@pytest.mark.parametrize("other", [{"oos_train": []}, {"val": [], "dev": []}, {"version": "1.0"}, {"test": {}}])
def test_an_object_with_another_key_or_with_two_keys_for_a_split_is_refused(other: dict[str, Any]) -> None:
    Path("whole.json").write_text(json.dumps({"train": [["a", "b"]], **other}))
    refused(write_recipe, "whole.json", [], named="whole.json")
    assert not Path("runs").exists()


def test_conll_files_are_named_by_the_part_in_their_extension() -> None:
    for part, size in (("train", 12), ("testa", 5), ("testb", 3)):
        Path("conll").mkdir(exist_ok=True)
        Path(f"conll/esp.{part}").write_bytes("Espa\u00f1a B-LOC\nes O\n\n".encode("latin-1") * size)
    Path("conll/README").write_text("about")
    written = write_recipe("conll", [])
    folder = "runs/conll-data/esp"
    assert (written.recipe.data.train, written.recipe.data.eval) == (
        f"{folder}.train.conll",
        f"{folder}.validation.conll",
    )
    assert (written.found.num_samples, written.found.test) == (12, f"{folder}.test.conll")
    assert Path(f"{folder}.train.conll").read_bytes() == Path("conll/esp.train").read_bytes()
    assert write_recipe("conll/esp.testb", []).recipe.data.train == "runs/esp-data/esp.test.conll"
    Path("conll/esp.dev").write_bytes(Path("conll/esp.testa").read_bytes())
    refused(write_recipe, "conll", ["--output_dir", "runs/other"], named="conll: finetune cannot read these files")


def test_sentences_and_their_tags_in_two_files_are_one_file_of_words_with_tags() -> None:
    for part in ("train", "valid"):
        Path("atis", part).mkdir(parents=True)
        Path("atis", part, "seq.in").write_text("to boston please\n\nfrom denver\n" * 10)
        Path("atis", part, "seq.out").write_text("O B-city O\n\nO B-city\n" * 10)
    Path("atis/train/label").write_text("flight\nflight\nflight\n" * 10)
    written = write_recipe("atis", [])
    assert (written.recipe.task, written.recipe.data.train) == ("token-classification", "runs/atis-data/train.conll")
    assert written.recipe.data.eval == "runs/atis-data/validation.conll"
    assert_golden("\n".join(written.found.notes))
    whole = "to O\nboston B-city\nplease O\n\nfrom O\ndenver B-city\n"
    assert Path("runs/atis-data/train.conll").read_text() == "\n".join([whole] * 10)
    Path("atis/valid/seq.out").write_text("O B-city O\n\nO\n" * 10)
    refused(
        write_recipe,
        "atis",
        ["--output_dir", "runs/other"],
        named="valid/seq.out:3 has 1 tag for the 2 words of seq.in",
    )
