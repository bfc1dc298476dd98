"""Rows and their labels are read as they are, or refused with file, row and column; no text is on both sides."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from accel_train.data.builtin.stdlib import MAX_PER_PACKAGE, NUM_PACKAGES, stdlib_functions
from accel_train.data.labels import LabelScheme, class_notes, label_scheme
from accel_train.data.tables import Row, class_names, read_rows
from accel_train.data.text.documents import read_documents
from accel_train.recipe.data import WindowData
from accel_train.tasks.common.texts import TextRow, hold_out, repeated_texts
from accel_train.tasks.text_classification.config import TextClassificationData
from accel_train.tasks.text_classification.data import read_text_rows
from tests.support.runs import refused, sources_of, write_file, write_rows
from tests.support.wording import assert_golden


def rows_of(path: Path | str, *columns: str, **settings: Any) -> list[Row]:
    data = TextClassificationData(train=str(path), **settings)
    return [row for source in sources_of(data) for row in read_rows(source, columns, data)]


def read_texts(path: Path | str, **settings: Any) -> list[TextRow]:
    data = TextClassificationData(train=str(path), **settings)
    return read_text_rows(sources_of(data), data, key="data.train")


def scheme_of(*values: Any, **settings: Any) -> LabelScheme:
    defaults = {"column": "label", "problem_type": "auto", "label_names": None, "feature_names": None}
    return label_scheme(values, lambda index: f"rows.csv:{index + 2}", **{**defaults, **settings})


def test_every_kind_of_table_gives_the_same_rows_and_says_where_each_stands() -> None:
    texts = ["plain", 'two\nlines, "quoted"', "世界\u2028", "x" * 200_000]
    table = pyarrow.table({"label": ["a", "b", "a", "b"], "more": [1, 2, 3, 4], "text": texts})
    pyarrow.parquet.write_table(table, "rows.parquet")
    encoded = table.set_column(2, "text", table["text"].dictionary_encode())
    Path("parts").mkdir()
    pyarrow.parquet.write_table(encoded, Path("parts/rows.parquet"), row_group_size=2)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in table.to_pylist())
    write_file("rows.jsonl", lines)
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
        body = [separator.join((label, "0", text)) for label, text in zip("abab", quoted)]
        content = "\ufeff" + separator.join(("label", "more", "text")) + "\n" + "\n".join(body)
        write_file(f"rows.{suffix}", content)
    wanted = list(zip(texts, "abab"))
    wheres = {}
    for suffix in ("csv", "tsv", "jsonl", "parquet"):
        rows = rows_of(f"rows.{suffix}", "text", "label")
        assert [row.cells for row in rows] == wanted, suffix
        wheres[suffix] = [row.where for row in rows]
    assert [row.cells for row in rows_of("parts/rows.parquet", "text", "label")] == wanted
    assert wheres["csv"] == ["rows.csv:2", "rows.csv:3", "rows.csv:5", "rows.csv:6"]
    assert wheres["jsonl"] == [f"rows.jsonl:{line}" for line in (1, 3, 5, 7)]
    assert wheres["parquet"] == [f"rows.parquet, row {row}" for row in (1, 2, 3, 4)]


def test_a_saved_data_set_gives_rows_and_the_names_of_its_classes() -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features).save_to_disk("set")
    assert [row.cells for row in rows_of("set", "label", "text", "label")] == [(1, "a", 1), (0, "b", 0)]
    (source,) = sources_of(TextClassificationData(train="set"))
    assert class_names(source, "label") == ("neg", "pos")
    assert class_names(source, "text") is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "txt,label\nx,y\n", "a.csv:1|no column 'text'|did you mean 'txt'?"),
        ("a.csv", "text,label,text\nx,y,z\n", "'text'|2 times"),
        ("a.csv", 'text,label\n"two\nlines",y\nx,y,z\n', "a.csv:4|3 fields|2 (text, label)"),
        ("a.csv", 'text,label\n"x,y\n', "a.csv:2: not csv"),
        ("a.csv", b"text,label\nx,y\n\xe9,z\n", "byte 0xe9|position 15 (line 3)"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "x"}\n', "a.jsonl:2|no column 'label'|columns are text"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: [1]|object"),
        ("a.jsonl", b"\xff\xfe{", "utf-16|data.encoding"),
        ("a.parquet", "PAR", "a.parquet: not a parquet"),
        ("a.txt", "text", "a.txt|(text, label)"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_its_row(name: str, content: str | bytes, said: str) -> None:
    write_file(name, content)
    refused(rows_of, Path(name), "text", "label", named=said)


def test_numbers_are_ids_of_named_classes_counted_from_where_the_recipe_says() -> None:
    scheme = scheme_of("1", "3", "2", label_names=("World", "Sports", "Business"), first_id=1)
    assert scheme.encode(("1", "3"), str).tolist() == [0, 2]
    refused(scheme.encode, ("0",), str, named='"0"|3 classes|1 to 3')


def test_a_text_cell_without_text_is_refused_and_an_empty_string_is_a_text() -> None:
    path = Path("a.jsonl")
    path.write_text('{"text": "", "label": "x"}\n')
    assert [row.texts for row in read_texts(path)] == [("",)]
    for content, named in (
        ('{"text": "", "label": "x"}\n{"text": null, "label": "x"}', "a.jsonl:2|'text' holds null|data.text_column"),
        ('{"text": 3, "label": "x"}', "a.jsonl:1|'text' holds 3"),
        ("", "data.train"),
    ):
        path.write_text(content + "\n")
        refused(read_texts, path, named=named)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_template_joins_the_cells_of_its_columns(suffix: str) -> None:
    path = f"a.{suffix}"
    cells = [("A {body}", "long", 2001, "x"), ("" if suffix == "csv" else None, "short", 2002, "y")]
    rows = [dict(zip(("my title", "body", "year", "label"), row)) for row in cells]
    write_rows(path, rows)
    columns = ("body", "{my title}: {body} ({year}) {body}")
    found = [(row.texts, row.label, row.id) for row in read_texts(path, text_columns=columns, id_column="year")]
    assert found == [
        (("long", "A {body}: long (2001) long"), "x", "2001"),
        (("short", ": short (2002) short"), "y", "2002"),
    ]
    windows = WindowData(train=path, text_column="{body} {year}")
    (source,) = sources_of(windows)
    assert [document.text for document in read_documents(source, windows)] == ["long 2001", "short 2002"]
    refused(
        read_texts,
        path,
        text_columns=("{my titel}: {body}",),
        named="a.|no column 'my titel'|'my title'|data.text_columns",
    )


def test_three_text_columns_are_refused() -> None:
    write_file("a.csv", "a,b,c,label\n")
    refused(read_texts, "a.csv", text_columns=("a", "b", "c"), named="3 columns")


@pytest.mark.parametrize(
    ("values", "problem_type", "names"),
    [
        (("b", "a", "b"), "single_label", ("a", "b")),
        (("10", "9"), "single_label", ("9", "10")),
        ((3, 1, 2), "single_label", ("1", "2", "3")),
        ((True, False), "single_label", ("false", "true")),
        ((["b"], ["a", "b"], []), "multi_label", ("a", "b")),
        ((1.5, 2.0), "regression", ("label",)),
        ((1.0, 2.0), "single_label", ("1", "2")),
        (("1.0", "2.0"), "single_label", ("1.0", "2.0")),
        (("1.5", "2"), "regression", ("label",)),
    ],
)
def test_what_labels_mean_follows_from_what_they_are(
    values: tuple[Any, ...], problem_type: str, names: tuple[str, ...]
) -> None:
    scheme = scheme_of(*values)
    assert (scheme.problem_type, scheme.names) == (problem_type, names)


def test_labels_become_ids_sets_or_numbers() -> None:
    encoded = scheme_of("a", "b", "c").encode(["b", "c", "a"], str)
    assert encoded.dtype == np.int64
    assert encoded.tolist() == [1, 2, 0]
    many = scheme_of(["a"], ["c", "a"]).encode([["c", "c"], []], str)
    assert many.dtype == np.float32
    assert many.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    numbers = scheme_of("1.5", "-2").encode(["1e1", "-2"], str)
    assert numbers.tolist() == [10.0, -2.0]


def test_with_given_names_a_column_holds_either_names_or_ids() -> None:
    names = ("two", "one", "none")
    by_name = scheme_of("one", "two", label_names=names)
    assert by_name.encode(["none"], str).tolist() == [2]
    by_id = scheme_of(0, 2, 1, label_names=names)
    assert by_id.encode([2, "1"], str).tolist() == [2, 1]
    # Numbers that are themselves the names, in an order of the user's own.
    digits = scheme_of("1", "2", label_names=("2", "1"))
    assert digits.encode(["2"], str).tolist() == [0]
    brought = scheme_of(1, 0, feature_names=("neg", "pos"))
    assert (brought.names, brought.encode([1], str).tolist()) == (("neg", "pos"), [1])


def test_numbers_are_no_ids_where_classes_are_called_by_other_numbers() -> None:
    scheme = scheme_of("0", "1", "2", label_names=("0", "2", "5"))
    refused(scheme.encode, ["1"], str, named='"1"|(0, 2, 5)')


def test_ids_without_names_of_their_own_are_taken_in_the_order_of_the_names_and_this_is_said() -> None:
    names = ("cat", "dog")
    assert scheme_of("dog", "cat", label_names=names).notes == ()
    (note,) = scheme_of(0, 1, label_names=names).notes
    assert_golden(note)


def test_ids_of_a_data_set_mean_what_it_calls_them_whatever_the_order_of_a_trained_model() -> None:
    scheme = scheme_of(0, 1, label_names=("cat", "dog"), feature_names=("dog", "cat"))
    assert scheme.encode([0, 1], str).tolist() == [1, 0]
    assert scheme.notes == ()


@pytest.mark.parametrize(
    ("values", "settings", "said"),
    [
        (("a", None), {}, "rows.csv:3|'label'"),
        (("a", ""), {}, "rows.csv:3|'label'"),
        (("a", "a"), {}, "same label"),
        (([], []), {}, "same label"),
        (("god", "bad"), {"label_names": ("good", "bad")}, '"god"|(good, bad)|did you mean'),
        ((0, 2), {"label_names": ("good", "bad")}, "rows.csv:9|'label': 2|2 classes, 0 to 1"),
        ((0, -1), {"feature_names": ("good", "bad")}, "-1|2 classes"),
        ((0, 1), {"label_names": ("a", "a")}, "twice"),
        ((1.5, 2), {"problem_type": "single_label"}, "1.5|a name or an integer"),
        (("a", "b"), {"problem_type": "regression"}, '"a"|a number'),
        ((1.0, float("nan")), {}, "rows.csv:3|'label'"),
        (("a", " "), {}, "rows.csv:3|'label'"),
        (("1.5", "nan"), {}, 'rows.csv:9|"nan"|a number|data.missing_labels: ["nan"]'),
        (("a", "b"), {"problem_type": "multi_label"}, '"a"|a list'),
        ((["a"], "b"), {}, '["a"]|a label'),
        ((1.5, 2.5), {"problem_type": "regression", "label_names": ("a", "b")}, "label_names|regression"),
    ],
)
def test_labels_that_do_not_fit_are_refused(values: tuple[Any, ...], settings: dict[str, Any], said: str) -> None:
    refused(lambda: scheme_of(*values, **settings).encode(values, lambda _: "rows.csv:9"), named=said)


def text_rows(texts: list[str]) -> list[TextRow]:
    return [TextRow((text,), "x", "", str(number)) for number, text in enumerate(texts)]


def split_of(fraction: float) -> TextClassificationData:
    return TextClassificationData(train="texts.csv", eval_fraction=fraction)


def test_the_same_text_is_never_on_both_sides() -> None:
    rows = text_rows([f"text {number % 70}" for number in range(500)])
    train, evaluation, notes = hold_out(rows, split_of(0.3), ())
    assert len(train) + len(evaluation) == 500
    assert not {row.texts for row in train} & {row.texts for row in evaluation}
    assert 50 < len(evaluation) < 250
    assert not notes
    assert train[:5] == [rows[int(row.id)] for row in train[:5]]


def test_few_texts_still_leave_one_for_evaluation_and_one_text_is_refused() -> None:
    train, evaluation, notes = hold_out(text_rows([f"text {number}" for number in range(6)]), split_of(0.0001), ())
    assert (len(train), len(evaluation)) == (5, 1)
    assert notes
    assert hold_out(text_rows(["a", "b"]), split_of(0.0), ())[1] is None
    refused(hold_out, text_rows(["a", "a"]), split_of(0.5), (), named="one text")
    refused(hold_out, text_rows(["a", "b"]), split_of(0.999999), (), named="training documents|0.999999")


def test_evaluation_texts_that_are_trained_on_are_counted() -> None:
    data = TextClassificationData(train="texts.csv")
    assert repeated_texts(text_rows(["a", "b"]), text_rows(["c"]), data) == []
    (note,) = repeated_texts(text_rows(["a", "b"]), text_rows(["c", "a"]), data)
    assert note.startswith("1 of 2 evaluation texts ")
    shown = text_rows(["a"])
    assert repeated_texts(shown, shown, data.shown_as("DATA")) == []


def test_functions_of_the_library_are_labelled_by_their_package_and_none_is_there_twice() -> None:
    dataset = stdlib_functions()
    names = dataset.features["label"].names
    counts = Counter(dataset["label"])
    assert len(names) == NUM_PACKAGES == len(counts)
    assert max(counts.values()) <= MAX_PER_PACKAGE
    assert min(counts.values()) > 100
    assert len(set(dataset["text"])) == len(dataset)
    assert len(set(dataset["id"])) == len(dataset)
    for row in list(dataset)[::50]:
        assert row["id"].startswith(names[row["label"]])
        assert row["text"].startswith(("def ", "async def "))
    # Neither a docstring nor a function inside another one is a sample's own text.
    texts = dict(zip(dataset["id"], dataset["text"]))
    assert not [name for name, text in texts.items() if '"""' in text.split("\n")[1]]


def test_classes_are_counted_and_names_that_differ_by_case_or_blanks_alone_are_named() -> None:
    assert_golden("\n".join(class_notes({"pos": 3, "pos ": 2, "POS": 1, "neg": 4})))
    assert class_notes({"a": 3, "b": 4}) == ["2 classes: b 4, a 3"]
    assert len(class_notes({str(number): number for number in range(100)})[0].split(", ")) == 12


def test_a_decimal_comma_in_most_class_names_is_named() -> None:
    assert_golden(class_notes({"1,5": 3, "2,5": 2, "3": 1})[1])


@pytest.mark.parametrize(
    ("values", "kinds"), [([True, "true", "x"], 2), ([1, "1", 2.5], 2), (["a", "b"], 0), ([1, 2], 0)]
)
def test_a_column_that_mixes_texts_numbers_and_booleans_is_named(values: list[Any], kinds: int) -> None:
    scheme = label_scheme(values, str, column="label", problem_type="auto", label_names=None, feature_names=None)
    assert len(scheme.notes) == bool(kinds)
