"""What a recipe names is found, read as it is, or refused with file, row and byte."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from accel_train.data.builtin.stdlib import python_stdlib_files
from accel_train.data.delimited import read_delimited
from accel_train.data.sources import resolve_sources
from accel_train.data.text.documents import Document, read_documents
from accel_train.recipe.data import WindowData


def documents(names: Any, **settings: Any) -> list[Document]:
    data = WindowData(train=names, **settings)
    return [
        document
        for source in resolve_sources(data.train, data, key="data.train")
        for document in read_documents(source, data)
    ]


def texts(names: Any, **settings: Any) -> list[str]:
    return [document.text for document in documents(names, **settings)]


def refusal(names: Any, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what each test looks at)
        documents(names, **settings)
    return str(caught.value)


def test_folders_of_classes_lie_directly_in_the_folder_that_is_named(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "1.txt").write_text("a text")
    assert str(tmp_path / "test/neg/1.txt") in refusal(str(tmp_path), lines="folder_names")
    data = WindowData(train=str(tmp_path / "train"), lines="folder_names")
    assert len(resolve_sources(data.train, data, key="data.train")[0].files) == 2


def test_the_standard_library_is_sorted_python_without_tests_and_packages() -> None:
    names = [path.as_posix() for path in python_stdlib_files()]
    assert len(names) > 300
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    unwanted = ("/site-packages/", "/test/", "/tests/", "/__pycache__/", "/idlelib/")
    root = Path(json.__file__).parents[1].as_posix()
    assert not [name for name in names if any(part in name.removeprefix(root) for part in unwanted)]


def test_a_text_file_is_one_document_and_keeps_its_line_ends_but_not_its_bom(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (document,) = documents(str(tmp_path / "a.txt"))
    assert document.text == "one\r\ntwo\n"


def test_a_folder_is_read_recursively_in_order_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/z.md", "a.txt", "c.py", ".git/x.txt", "b/picture.png"):
        (tmp_path / name).write_text(name)
    data = WindowData(train=str(tmp_path))
    (source,) = resolve_sources(data.train, data, key="data.train")
    assert [document.text for document in read_documents(source, data)] == ["a.txt", "b/z.md", "c.py"]
    assert "left out 1 files of other kinds (1 .png)" in source.notes[0]


def test_globs_tuples_and_the_home_folder_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("2.txt", "1.txt", "3.md"):
        (tmp_path / name).write_text(name)
    assert texts(("~/*.txt", str(tmp_path / "3.md"))) == ["1.txt", "2.txt", "3.md"]


def test_rows_of_jsonl_csv_tsv_and_parquet_are_documents(tmp_path: Path) -> None:
    wanted = ["plain", "", 'two\nlines, "quoted"', "世界 😀", "x" * 200_000]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in wanted) + "\n")
    quoted = [text.replace('"', '""') for text in wanted]
    (tmp_path / "a.csv").write_text("id,body\n" + "".join(f'1,"{text}"\n' for text in quoted))
    (tmp_path / "a.tsv").write_text("\ufeffid\tbody\r\n" + "".join(f'1\t"{text}"\r\n' for text in quoted), newline="")
    table = pyarrow.table({"id": [1] * 5, "body": wanted})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    encoded = table.set_column(1, "body", table["body"].dictionary_encode())
    pyarrow.parquet.write_table(encoded, tmp_path / "b.parquet", row_group_size=2)
    for name in ("a.jsonl", "a.csv", "a.tsv", "a.parquet", "b.parquet"):
        assert texts(str(tmp_path / name), text_column="body") == wanted, name


def test_a_saved_data_set_is_read_by_its_split(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    other = datasets.Dataset.from_dict({"text": ["c"]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "validation": other}).save_to_disk(str(tmp_path / "both"))
    assert texts(str(tmp_path / "one")) == ["a", "b"]
    assert texts(str(tmp_path / "both")) == ["a", "b"]
    data = WindowData(train="unused", eval=str(tmp_path / "both"))
    (source,) = resolve_sources(data.eval or "", data, key="data.eval")
    assert [document.text for document in read_documents(source, data)] == ["c"]
    assert "has no split test; it has train, validation" in refusal(str(tmp_path / "both"), split="test")


def test_a_data_set_column_must_hold_strings(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": [1, 2], "body": ["a", None]}).save_to_disk(str(tmp_path / "set"))
    assert "row 1: column 'text' holds 1, not a string" in refusal(str(tmp_path / "set"))
    assert "There are text, body" in refusal(str(tmp_path / "set"), text_column="txt")
    assert "row 2: column 'body' holds null, not a string" in refusal(str(tmp_path / "set"), text_column="body")


def test_what_does_not_exist_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    message = refusal(str(tmp_path / "corpsu.txt"))
    assert "no file or folder" in message
    assert f"did you mean {tmp_path / 'corpus.txt'}?" in message
    assert "no file matches" in refusal(str(tmp_path / "*.md"))
    message = refusal("python-stdlb")
    assert "neither an existing file or folder" in message
    assert "nor a data set" in message
    assert "embedded corpora: python-stdlib" in message


def test_unknown_extensions_and_folders_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_text("x")
    assert "unknown extension '.png'; known are .txt, .md, .py, .jsonl" in refusal(str(tmp_path / "picture.png"))
    assert "holds no file of a known kind" in refusal(str(tmp_path))


def test_token_shards_do_not_mix_with_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.bin").write_bytes(b"\0\0")
    assert "mixes .bin token shards with text" in refusal((str(tmp_path / "a.txt"), str(tmp_path / "b.bin")))


@pytest.mark.parametrize("names", [("train.bin", "val.bin"), ("fineweb_train_1.jsonl", "fineweb_val_0.jsonl")])
def test_a_folder_with_training_and_held_out_tables_is_not_read_as_one(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b'{"text": "evaluation of a valve"}\n')
    assert f"holds {names[1]} next to training files" in refusal(str(tmp_path))


def test_bytes_that_are_not_utf8_are_named_by_file_position_and_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\ncaf\xe9\n")
    message = refusal(str(path))
    assert f"{path}: byte 0xe9 at position 12 (line 2) is not UTF-8" in message
    assert "data.encoding_errors: replace" in message
    assert texts(str(path), encoding_errors="replace") == ["first\ncaf\ufffd\n"]
    path.write_bytes("first\ncaf\u00e9\n".encode("latin-1"))
    assert texts(str(path), encoding="latin-1") == ["first\ncaf\u00e9\n"]
    path.write_bytes("caf\u00e9\n".encode("utf-16"))  # with its byte order mark
    assert texts(str(path)) == ["caf\u00e9\n"]


def test_bytes_that_are_not_utf8_are_found_in_rows_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    assert "a.jsonl: byte 0xe9 at position 28 (line 2)" in refusal(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.csv").write_bytes(b"text\nok\ncaf\xe9\n")
    assert "a.csv: byte 0xe9 at position 11 (line 3)" in refusal(str(tmp_path / "a.csv"))
    array = pyarrow.StringArray.from_buffers(
        2, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\6\0\0\0"), pyarrow.py_buffer(b"okcaf\xe9")
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": array}), tmp_path / "a.parquet")
    assert "a.parquet, row 2: byte 0xe9 at position 3" in refusal(str(tmp_path / "a.parquet"))
    assert texts(str(tmp_path / "a.parquet"), encoding_errors="replace") == ["ok", "caf\ufffd"]


def test_a_lone_surrogate_is_refused_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab\\ud800"}\n')
    assert "a.jsonl:1: column 'text': character 2 is the lone surrogate" in refusal(str(tmp_path / "a.jsonl"))
    assert texts(str(tmp_path / "a.jsonl"), encoding_errors="replace") == ["ab\ufffd"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "cut', "a.jsonl:2: not JSON"),
        ('["text"]', 'a.jsonl:2: ["text"] is not an object'),
        ('{"body": "b", "id": 1}', "a.jsonl:2: no column 'text'; name another. There are body, id"),
        ('{"text": null}', "a.jsonl:2: column 'text' holds null, not a string"),
        ('{"text": 5}', "a.jsonl:2: column 'text' holds 5, not a string"),
    ],
)
def test_a_broken_json_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    assert complaint in refusal(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("id,body\n1,a\n", "a.csv:1: no column 'text'; name another. There are id, body"),
        ("text,text\n1,a\n", "a.csv:1: the column 'text' is there 2 times"),
        ('text,id\n"two\nlines",1\nloose, comma,2\n', "a.csv:4: the row has 3 fields, the header 2 (text, id)"),
        ('text,id\n"never closed,1\n', "a.csv:2: not csv"),
    ],
)
def test_a_broken_csv_row_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert complaint in refusal(str(tmp_path / "a.csv"))


def test_broken_parquet_and_wrong_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": [1], "maybe": pyarrow.array([None], pyarrow.string())}), path)
    assert "no column 'text'; name another. There are n, maybe" in refusal(str(path))
    assert "row 1: column 'n' holds 1, not a string" in refusal(str(path), text_column="n")
    assert "row 1: column 'maybe' holds null" in refusal(str(path), text_column="maybe")
    path.write_bytes(path.read_bytes()[:-20])
    assert "not a parquet file" in refusal(str(path))


def test_reading_csv_leaves_the_field_size_limit_of_the_module_alone(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit(1000)
    try:
        (tmp_path / "a.csv").write_text("text\n" + "x" * 2000)
        assert texts(str(tmp_path / "a.csv")) == ["x" * 2000]
        assert csv.field_size_limit() == 1000
        records = read_delimited(tmp_path / "a.csv", WindowData(train="a.csv"))
        next(records)
        assert csv.field_size_limit() == 1000, "of a reader that goes no further"
    finally:
        csv.field_size_limit(before)


def test_rows_are_counted_over_batches(tmp_path: Path) -> None:
    import datasets

    values = ["x"] * 2999 + [None]
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    assert "a.parquet, row 3000: column 'text' holds null" in refusal(str(tmp_path / "a.parquet"))
    datasets.Dataset.from_dict({"text": values}).save_to_disk(str(tmp_path / "set"))
    assert "set, row 3000: column 'text' holds null" in refusal(str(tmp_path / "set"))
