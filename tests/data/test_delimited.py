"""Tables are read as people have them: any delimiter, no header, UTF-16 and Latin-1, lines of a label and a text."""

from collections import deque
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from accel_train.data.delimited import delimiter_of, read_delimited, record_edges, why_header
from accel_train.data.encoding import guess_encoding, read_lines
from accel_train.data.tables import read_rows
from accel_train.recipe.data import Data
from accel_train.tasks.text_classification.config import TextClassificationData
from tests.support.runs import refused, sources_of
from tests.support.wording import assert_golden


def rows_of(path: Path, *columns: str, **settings: Any) -> list[tuple[Any, ...]]:
    data = Data(train=str(path), **settings)
    (source,) = sources_of(data)
    return [row.cells for row in read_rows(source, columns, data)]


def write(content: str | bytes, name: str = "a.csv") -> Path:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(name)


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ("text,label\na b,x\n", ","),
        ("text;label\na, b;x\nc;y\n", ";"),
        ("text\tlabel\na, b;c\tx\n", "\t"),
        ("text|label\na|x\n", "|"),
        ('text,label\n"a;b;c",x\n', ","),
        ("price;label\n1,5;x\n2,5;y\n", ";"),
        ("x;first, long\ny;second, long\n", ";"),
        ("text, label\na, x\n", ","),
        ("text\nno; delimiter here\nnone\n", ","),
    ],
)
def test_the_delimiter_is_what_divides_the_first_lines_alike(content: str, delimiter: str) -> None:
    path = write(content)
    assert delimiter_of(path, Data(train=str(path))) == delimiter


def test_a_delimiter_that_is_named_wins_and_one_that_was_found_is_said() -> None:
    path = write("text;label\na, b;x\n")
    assert rows_of(path, "text", "label") == [("a, b", "x")]
    (source,) = sources_of(Data(train=str(path)))
    assert_golden(source.notes[0])
    path.write_text("text#label\na, b#x\n")
    assert rows_of(path, "label", delimiter="#") == [("x",)]
    path.write_text("text\tlabel\na\tx\n")
    assert rows_of(path, "label", delimiter="tab") == [("x",)]


def test_columns_without_a_header_are_called_by_their_numbers_from_1() -> None:
    path = write('\n3,"title, long",body\n4,t,b\n')
    assert rows_of(path, "3", "1", header="none") == [("body", "3"), ("b", "4")]
    refused(rows_of, path, "text", header="none", named="a.csv:2|'text'|1, 2, 3")
    assert rows_of(path, "3", "1", header="left_out") == [("b", "4")]


LONG = "".join(f"a film of {number} words,x\n" for number in range(12))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("review,sentiment\na fine film,x\na bad film,y\n", "'sentiment' is not a class"),
        ("review,sentiment\na fine film,x\na bad film,\n", "'sentiment' is not a class"),
        ("body,stars\nfine,3\nbad,1.5\n", "the rows below 'stars' have numbers"),
        ("Text\na fine film\n", "'Text' is a usual name"),
        ("Text\n", "'Text' is a usual name"),
        (f"msg,kind\n{LONG}".replace(",x", ",z"), "'msg' is one word"),
        # Rows of the data:
        ("fine,x\na bad film,y\n", None),
        ("text,x\na bad film,y\n", None),
        (f"fine,x\n{LONG}", None),
        ("a fine film,z\na bad film,q\n", None),
        ("A fine film.,z\nA bad film.,y\n", None),
        ("fine\na bad film\nso so\n", None),
        ("3,x\n4,y\n", None),
        ("good,good\nbad,x\n", None),
        ("", None),
        ('text,"label\n', None),
    ],
)
def test_a_header_that_the_run_does_not_expect_is_told_from_a_row(content: str, why: str | None) -> None:
    path = write(content)
    data = TextClassificationData(train=str(path), header="none")
    found = why_header(path, data, ["1", "2"], {"2": ("x", "y")})
    assert found == why if why is None else (found or "").startswith(why)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8-sig"])
def test_an_encoding_that_is_named_is_read(encoding: str) -> None:
    path = write("text,label\r\ncaf\u00e9 \u00fc,x\r\n".encode(encoding))
    assert rows_of(path, "text", encoding=encoding) == [("caf\u00e9 \u00fc",)]


def test_utf16_is_read_by_its_mark_with_the_bytes_of_each_line() -> None:
    path = write("text,label\n\u4e16\u754c,x\n".encode("utf-16"))
    data = Data(train=str(path))
    assert list(read_lines(path, data)) == [("text,label\n", 24), ("\u4e16\u754c,x\n", 10)]
    (source,) = sources_of(data)
    assert source.notes[0].startswith(f"{path}: read as UTF-16")


RECORDS = [
    '{},"a\nb","say ""x"""',
    '{},,"c,\n\n,""\n"',
    '{},5" tube,"\n"',
    '{},d,"\u0a0a\u010a\r\n,"',
    '"{}",""",\n",""',
]
"""Records of a table. Line ends and delimiters in quotes, doubled quotes, and a quote that is a sign of the text."""


def quoted(rows: int, delimiter: str = ",", end: str = "\n") -> str:
    records = (record.format(number) for number, record in enumerate(RECORDS * (rows // len(RECORDS))))
    return "".join(each.replace(",", delimiter) + end for each in ("id,first,second", *records))


@pytest.mark.parametrize("distance", [8, 24, 100, 10**6])
@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (quoted(50), {}),
        ("\ufeff" + quoted(50), {}),
        (quoted(50, "\t", "\r\n"), {"delimiter": "tab"}),
        ("sep=|\n" + quoted(50, "|")[:-1], {}),
        ("\n" + quoted(50, ";", "\n\n"), {"delimiter": ";", "header": "none"}),
        (quoted(50), {"encoding": "utf-16-be"}),
        ("\ufeff" + quoted(50), {"encoding": "utf-16"}),
        (quoted(50).replace("\u0a0a\u010a", "é"), {"encoding": "cp1252"}),
        ("text\n" + "sep=;\n" * 60, {}),
        ('id,"first,second\n' + '1,"a,b"\n' * 40, {"quoting": "none", "header": "none"}),
    ],
)
def test_parts_of_a_table_have_each_row_once_and_in_order(
    content: str, settings: dict[str, Any], distance: int
) -> None:
    marked = settings.get("encoding") == "utf-16"
    path = write(content.encode("utf-16-le" if marked else settings.get("encoding", "utf-8")))
    data = Data(train=str(path), **settings)
    edges = record_edges(path, data, distance)
    rows = [record.fields for span in pairwise(edges) for record in islice(read_delimited(path, data, span), 1, None)]
    assert rows == [record.fields for record in islice(read_delimited(path, data), 1, None)]
    assert (edges[0], edges[-1]) == (0, path.stat().st_size)
    assert len(edges) == 2 if distance > len(content) else len(edges) > len(content) / (distance + 80)


def test_a_quote_that_does_not_close_is_in_the_last_part() -> None:
    path = write(quoted(50) + '60,"a,b\n61,a,b\n')
    data = Data(train=str(path))
    *spans, last = pairwise(record_edges(path, data, 64))
    assert len(spans) == 10
    for span in spans:
        deque(read_delimited(path, data, span), 0)
    refused(deque, read_delimited(path, data, last), 0, named=f"a.csv from byte {last[0]:,}|not csv")


def test_an_encoding_is_guessed_where_utf8_fails() -> None:
    path = write("caf\u00e9".encode(), "a.txt")
    assert guess_encoding(path) is None
    path.write_bytes("caf\u00e9 \u20ac".encode("cp1252"))
    encoding, reason = guess_encoding(path)
    assert (encoding, "0xe9 at position 3" in reason) == ("cp1252", True)
    path.write_bytes(b"caf\xe9 \x81")  # 0x81 is not a character of cp1252
    encoding, reason = guess_encoding(path)
    assert (encoding, "0xe9 at position 3" in reason) == ("latin-1", True)


def test_a_cut_letter_does_not_make_utf8_another_encoding() -> None:
    path = write("text\nпоез".encode()[:-1] + b"\n" + "дом\n".encode() * 5)
    refused(guess_encoding, path, named="a.csv:2: byte 0xd0|position 11|18 other|encoding_errors: replace")
    assert guess_encoding(path, "replace") is None
    data = Data(train=str(path), encoding="latin-1")
    refused(sources_of, data, named="data.encoding=latin-1|18 of")
    path.write_bytes("text\nschön für \u00c3\u00a9\n".encode("latin-1"))  # valid UTF-8 by accident
    assert guess_encoding(path) is not None
    sources_of(data)


@pytest.mark.parametrize(
    ("lines", "content", "rows"),
    [
        ("label_text", "1 great movie\t\n", [("1", "great movie")]),
        (
            "label_text",
            "DESC:def What is it ?\n\nHUM Who\twas it\n",
            [("DESC:def", "What is it ?"), ("HUM Who", "was it")],
        ),
        ("fasttext", "__label__good very good\nbad film __label__bad\n", [("good", "very good"), ("bad", "bad film")]),
        ("fasttext_multi", "__label__a __label__b text\n__label__a more\n", [(["a", "b"], "text"), (["a"], "more")]),
    ],
)
def test_lines_of_a_label_and_a_text_are_rows(lines: Any, content: str, rows: list[Any]) -> None:
    path = write(content, "a.txt")
    assert rows_of(path, "label", "text", lines=lines) == rows


def test_a_line_with_two_labels_names_the_setting_that_reads_it() -> None:
    path = write("__label__a __label__b text\n", "a.txt")
    refused(rows_of, path, "label", lines="fasttext", named="a.txt:1|2 labels|data.lines: fasttext_multi")
