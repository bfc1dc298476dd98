"""Line-aligned files: pairs, empty lines, and files that differ in lines."""

from pathlib import Path

import pytest

from accel_train.tasks.seq2seq.config import Seq2SeqData
from accel_train.tasks.seq2seq.data import read_pairs
from tests.support.runs import refused, sources_of, write_file, write_rows


def read(path: Path | str, **settings: str | None) -> tuple[list[tuple[str, str | None, str]], list[str]]:
    data, notes = Seq2SeqData(train=str(path), **settings), list[str]()  # type: ignore[arg-type]
    rows = read_pairs(sources_of(data), data, key="data.train", notes=notes)
    return [(row.texts[0], row.label, row.where.rpartition("/")[2]) for row in rows], notes


def write(source: bytes, target: bytes, names: tuple[str, str] = ("a.de", "a.en")) -> Path:
    for name, content in zip(names, (source, target)):
        write_file(name, content)
    return Path(names[0])


@pytest.mark.parametrize(
    ("source", "target", "pairs", "notes"),
    [
        (b"eins\nzwei\n", b"one\ntwo\n", [("eins", "one", 1), ("zwei", "two", 2)], 0),
        (b"eins\r\nzwei", b"one\ntwo\n", [("eins", "one", 1), ("zwei", "two", 2)], 0),
        (b"eins\n\ndrei\n \n", b"one\ntwo\n\n\n", [("eins", "one", 1)], 1),
        ("a\u2028b\x0c c\n".encode(), b"one\n", [("a\u2028b\x0c c", "one", 1)], 0),
        (b"\xef\xbb\xbfeins\n", b"one\n", [("eins", "one", 1)], 0),
    ],
)
def test_lines_with_the_same_number_are_a_pair_and_pairs_with_an_empty_line_are_left_out(
    source: bytes, target: bytes, pairs: list[tuple[str, str, int]], notes: int
) -> None:
    found, said = read(write(source, target), target_suffix="en")
    assert found == [(one, other, f"a.de:{line}") for one, other, line in pairs]
    assert len(said) == notes


@pytest.mark.parametrize("names", [("b.pl", "b.en"), ("train.tok.src", "train.tok.tgt"), ("plain", "plain.en")])
def test_the_suffix_alone_differs(names: tuple[str, str]) -> None:
    path = write(b"x\n", b"y\n", names)
    assert read(path, target_suffix=names[1].rpartition(".")[2])[0] == [("x", "y", f"{names[0]}:1")]


def test_each_line_is_a_source_without_targets_and_a_table_keeps_its_columns() -> None:
    write_file("new.txt", "eins\n\nzwei\n")
    rows, _ = read("new.txt", target_suffix="en", target_column=None)
    assert rows == [("eins", None, "new.txt:1"), ("", None, "new.txt:2"), ("zwei", None, "new.txt:3")]
    assert read(write_rows("new.jsonl", [{"source": "eins"}]), target_suffix="en", target_column=None)[0] == [
        ("eins", None, "new.jsonl:1")
    ]


def test_files_that_do_not_fit_are_refused() -> None:
    path = write(b"1\n2\n3\n", b"1\n2\n")
    refused(read, path, target_suffix="en", named="a.de has 3 lines|a.en has 2")
    refused(read, "a.en", target_suffix="de", named="a.en has 2 lines|a.de has 3")
    refused(read, path, target_suffix="fr", named="a.fr|does not exist")
    refused(read, path, target_suffix="de", named="the same file")
    refused(read, write(b"\n", b"x\n"), target_suffix="en", named="holds no pairs of lines")
    refused(read, write("é\n".encode(), "é\n".encode()), target_suffix="en", encoding="latin-1", named="UTF-8")
    unread = Seq2SeqData(train="a.de", target_suffix="en").unread()
    assert {*unread} == {"id_column", "group_column", "translation_column"}


def test_a_column_of_languages_is_read_in_the_direction_of_the_recipe() -> None:
    rows = [{"id": str(n), "translation": {"en": f"one {n}", "de": f"eins {n}"}} for n in range(2)]
    path = write_rows("a.jsonl", rows)
    columns = {"translation_column": "translation", "source_column": "de", "target_column": "en"}
    pairs = [("eins 0", "one 0"), ("eins 1", "one 1")]
    assert [each[:2] for each in read(path, **columns)[0]] == pairs
    assert [each[:2] for each in read(write_rows("a.parquet", rows), **columns)[0]] == pairs
    assert [each[:2] for each in read(path, **columns | {"target_column": None})[0]] == [
        ("eins 0", None),
        ("eins 1", None),
    ]
    refused(read, path, **columns | {"target_column": "fr"}, named="a.jsonl:1|no 'fr'; it has en, de")
    refused(read, path, **columns | {"translation_column": "id"}, named='a.jsonl:1|"0", not texts by language')
