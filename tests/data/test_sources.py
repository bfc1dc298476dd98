"""What a recipe names is found, read as it is, or refused with file, row and byte."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from accel_train.data.builtin.stdlib import python_stdlib_files
from accel_train.data.delimited import read_delimited
from accel_train.data.sources import resolve_sources
from accel_train.data.text.documents import Document, read_documents
from accel_train.recipe.data import WindowData
from tests.support.runs import refused, sources_of, write_file
from tests.support.wording import assert_golden


def documents(names: Any, **settings: Any) -> list[Document]:
    data = WindowData(train=names, **settings)
    return [document for source in sources_of(data) for document in read_documents(source, data)]


def texts(names: Any, **settings: Any) -> list[str]:
    return [document.text for document in documents(names, **settings)]


def test_folders_of_classes_lie_directly_in_the_folder_that_is_named() -> None:
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            write_file(f"{part}/{name}/1.txt", "a text")
    refused(documents, ".", lines="folder_names", named="test/neg/1.txt")
    data = WindowData(train="train", lines="folder_names")
    assert len(sources_of(data)[0].files) == 2


def test_the_standard_library_is_sorted_python_without_tests_and_packages() -> None:
    names = [path.as_posix() for path in python_stdlib_files()]
    assert len(names) > 300
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    unwanted = ("/site-packages/", "/test/", "/tests/", "/__pycache__/", "/idlelib/")
    root = Path(json.__file__).parents[1].as_posix()
    assert not [name for name in names if any(part in name.removeprefix(root) for part in unwanted)]


def test_a_text_file_is_one_document_and_keeps_its_line_ends_but_not_its_bom() -> None:
    write_file("a.txt", b"\xef\xbb\xbfone\r\ntwo\n")
    (document,) = documents("a.txt")
    assert document.text == "one\r\ntwo\n"


def test_a_folder_is_read_recursively_in_order_and_says_what_it_leaves_out() -> None:
    for name in ("b/z.md", "a.txt", "c.py", ".git/x.txt", "b/picture.png"):
        write_file(name, name)
    data = WindowData(train=".")
    (source,) = sources_of(data)
    assert [document.text for document in read_documents(source, data)] == ["a.txt", "b/z.md", "c.py"]
    assert_golden(source.notes[0])


def test_globs_tuples_and_the_home_folder_are_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    for name in ("2.txt", "1.txt", "3.md"):
        write_file(name, name)
    assert texts(("~/*.txt", "3.md")) == ["1.txt", "2.txt", "3.md"]


def test_a_saved_data_set_is_read_by_its_split() -> None:
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    other = datasets.Dataset.from_dict({"text": ["c"]})
    one.save_to_disk("one")
    datasets.DatasetDict({"train": one, "validation": other}).save_to_disk("both")
    assert texts("one") == ["a", "b"]
    assert texts("both") == ["a", "b"]
    data = WindowData(train="unused", eval="both")
    (source,) = resolve_sources(data.eval or "", data, key="data.eval")
    assert [document.text for document in read_documents(source, data)] == ["c"]
    refused(documents, "both", split="test", named="split test|train, validation")


def test_a_data_set_column_must_hold_strings() -> None:
    datasets.Dataset.from_dict({"text": [1, 2], "body": ["a", None]}).save_to_disk("set")
    refused(documents, "set", named="row 1|'text' holds 1")
    refused(documents, "set", text_column="txt", named="'txt'|text, body")
    refused(documents, "set", text_column="body", named="row 2|'body' holds null")


def test_what_does_not_exist_is_refused_with_the_nearest_that_does() -> None:
    write_file("corpus.txt", "x")
    refused(documents, "corpsu.txt", named="corpsu.txt|did you mean corpus.txt?")
    refused(documents, "*.md", named="no file|*.md")
    refused(documents, "python-stdlb", named="file or folder|datasets|embedded corpora|python-stdlib")


def test_unknown_extensions_and_folders_without_text_are_refused() -> None:
    write_file("set/picture.png", "x")
    refused(documents, "set/picture.png", named="'.png'|.txt, .md, .py, .jsonl")
    refused(documents, "set", named="'set'|.txt")


def test_token_shards_do_not_mix_with_text() -> None:
    write_file("a.txt", "x")
    write_file("b.bin", b"\0\0")
    refused(documents, ("a.txt", "b.bin"), named=".bin|text")


@pytest.mark.parametrize("names", [("train.bin", "val.bin"), ("fineweb_train_1.jsonl", "fineweb_val_0.jsonl")])
def test_a_folder_with_training_and_held_out_tables_is_not_read_as_one(names: tuple[str, str]) -> None:
    for name in names:
        write_file(name, b'{"text": "evaluation of a valve"}\n')
    refused(documents, ".", named=f"{names[1]}|training files")


def test_bytes_that_are_not_utf8_are_named_by_file_position_and_line() -> None:
    path = Path("latin.txt")
    path.write_bytes(b"\xef\xbb\xbffirst\ncaf\xe9\n")
    refused(documents, str(path), named=f"{path}: byte 0xe9|position 12 (line 2)|data.encoding_errors: replace")
    assert texts(str(path), encoding_errors="replace") == ["first\ncaf\ufffd\n"]
    path.write_bytes("first\ncaf\u00e9\n".encode("latin-1"))
    assert texts(str(path), encoding="latin-1") == ["first\ncaf\u00e9\n"]
    path.write_bytes("caf\u00e9\n".encode("utf-16"))  # with its byte order mark
    assert texts(str(path)) == ["caf\u00e9\n"]


def test_bytes_that_are_not_utf8_are_found_in_rows_too() -> None:
    refused(
        documents,
        write_file("a.jsonl", b'{"text": "ok"}\n{"text": "caf\xe9"}\n'),
        named="a.jsonl: byte 0xe9|position 28 (line 2)",
    )
    array = pyarrow.StringArray.from_buffers(
        2, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\6\0\0\0"), pyarrow.py_buffer(b"okcaf\xe9")
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": array}), "a.parquet")
    refused(documents, "a.parquet", named="a.parquet, row 2: byte 0xe9|position 3")
    assert texts("a.parquet", encoding_errors="replace") == ["ok", "caf\ufffd"]


def test_a_lone_surrogate_is_refused_or_replaced() -> None:
    refused(
        documents, write_file("a.jsonl", '{"text": "ab\\ud800"}\n'), named="a.jsonl:1|'text'|character 2|lone surrogate"
    )
    assert texts("a.jsonl", encoding_errors="replace") == ["ab\ufffd"]


def test_reading_csv_leaves_the_field_size_limit_of_the_module_alone() -> None:
    import csv

    before = csv.field_size_limit(1000)
    try:
        write_file("a.csv", "text\n" + "x" * 2000)
        assert texts("a.csv") == ["x" * 2000]
        assert csv.field_size_limit() == 1000
        records = read_delimited(Path("a.csv"), WindowData(train="a.csv"))
        next(records)
        assert csv.field_size_limit() == 1000, "of a reader that goes no further"
    finally:
        csv.field_size_limit(before)


def test_rows_are_counted_over_batches() -> None:
    values = ["x"] * 2999 + [None]
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), "a.parquet")
    refused(documents, "a.parquet", named="a.parquet, row 3000|'text' holds null")
    refused(documents, "a.parquet", text_column="body", named="no column 'body'|columns are text")
    datasets.Dataset.from_dict({"text": values}).save_to_disk("set")
    refused(documents, "set", named="set, row 3000|'text' holds null")
