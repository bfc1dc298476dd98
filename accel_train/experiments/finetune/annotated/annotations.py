"""Texts with annotations, as annotation tools write them: read in place, or refused by name. Imports no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.state import Choice
from accel_train.data.encoding import read_lines
from accel_train.data.sources import file_kind
from accel_train.data.tables import json_objects
from accel_train.data.text.spans import ANNOTATIONS, ANSWERS, START_KEYS, fields_of, spans_in
from accel_train.experiments.finetune.columns import Table, files_at, with_settings
from accel_train.experiments.finetune.recipe import Asked, Choices, listed

_ROWS_LOOKED_AT = 200
_LINES_LOOKED_AT = 5
_READABLE = "Write text and label ([[start, end, name], ...], in characters) of each document into a .jsonl file"

Rows = Sequence[Mapping[str, Any]]


class Marked(NamedTuple):
    """Settings to read texts with spans."""

    form: str
    """Value of `data.tag_format`."""
    text: str
    spans: str
    why: str
    read: tuple[str, ...] = ()
    """Further columns that are read."""

    @property
    def settings(self) -> Choices:
        """Return the settings of `data`."""
        return {
            "data.tag_format": Choice(self.form, self.why),
            "data.tokens_column": Choice(self.text, "the text"),
            "data.tags_column": Choice(self.spans, "the spans"),
        }


def find_spans(asked: Asked, table: Table) -> Marked | None:
    """Return how to read a table of texts with spans, or None for another table.

    Raises:
        ValueError: the table has annotations that are not read, or several columns may be the text or the spans.
    """
    if not asked.allows("token-classification", "text-classification"):
        return None
    rows = list(islice(_rows(asked, table), _ROWS_LOOKED_AT))
    form = next((form for form in _FORMS if any(map(form.is_it, rows))), None)
    found = None if form is None else form.read(asked, table, rows)
    if form is not None and isinstance(found, str):
        raise ValueError(f"{table.path}: {form.name} are not read. {found}")
    return None if found is None or isinstance(found, str) or asked.task == "text-classification" else found


def refuse_files_of_tools(files: Sequence[Path], asked: Asked) -> None:
    """Raise ValueError if an annotation tool's files would be read as text, or not at all."""
    # One file of each kind.
    for path in {path.suffix.lower(): path for path in files}.values() if asked.task != "causal-lm" else ():
        suffix = path.suffix.lower()
        for name, suffixes, begin, remedy in _FILES:
            if suffix in suffixes and (not begin or any(begin in line for line in _first_lines(path, asked))):
                raise ValueError(f"{path}: {name} are not read. {remedy}")


def _first_lines(path: Path, asked: Asked) -> list[str]:
    try:
        return [line for line, _ in islice(read_lines(path, asked.data), _LINES_LOOKED_AT)]
    # Not text, or in another encoding.
    except ValueError:
        return []


_AS_CONLL = "Export the documents as CoNLL 2002, and name the .conll files"
_FILES = (
    ("brat's annotations", (".ann",), "", _READABLE),
    (
        "spaCy's binary documents (DocBin)",
        (".spacy",),
        "",
        "Write doc.to_json() of each document as a line of a .jsonl file: its text and ents are read",
    ),
    ("annotations of WebAnno and INCEpTION (TSV)", (".tsv", ".txt"), "#FORMAT=WebAnno TSV", _AS_CONLL),
    ("annotations of UIMA and INCEpTION (XMI)", (".xmi", ".xml"), "<xmi:XMI", _AS_CONLL),
    ("GATE's documents", (".xml",), "<GateDocument", _READABLE),
)
"""Files of annotation tools: name, suffixes, a part of their first lines, and remedy."""


def _rows(asked: Asked, table: Table) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table. Rows of JSON also have the keys that other rows lack."""
    if file_kind(table.path) in ("json", "jsonl"):
        data = with_settings(asked.data, table.settings)
        yield from (row for path in files_at(table.path) for row, _, _ in json_objects(path, data, "text"))
        return
    for cells in zip(*(column.cells for column in table.columns.values())):
        yield dict(zip(table.columns, cells))


def objects(cell: object) -> list[Mapping[str, Any]]:
    """Return the objects in a list."""
    return [each for each in cell if isinstance(each, Mapping)] if isinstance(cell, list) else []


def mapping(cell: object) -> Mapping[str, Any]:
    """Return a cell that is an object, or an empty one."""
    return cell if isinstance(cell, Mapping) else {}


def results_of(row: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and values of all results of a task of Label Studio."""
    made = [each for key in ANNOTATIONS for each in objects(row.get(key))]
    results = [result for annotation in made for result in objects(annotation.get("result"))]
    return [(str(result.get("from_name")), mapping(result.get("value"))) for result in results]


def is_label_studio(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a task of Label Studio's export JSON."""
    return isinstance(row.get("data"), Mapping) and any(
        "result" in each for key in ANNOTATIONS for each in objects(row.get(key))
    )


def _label_studio(asked: Asked, table: Table, rows: Rows) -> Marked | str:
    regions = [region for row in rows for _, region in results_of(row)]
    if not any("labels" in region and "start" in region for region in regions):
        return "Choices and labels are. For others, export JSON_MIN, and name columns: --text text --label COLUMN"
    texts = [key for key in mapping(rows[0].get("data")) if all(_holds_regions(row, key) for row in rows)]
    text = _one_of(asked, table, "tokens_column", texts, asked.text)
    return Marked("label_studio", text, "annotations", "Label Studio's export JSON", ("data", *ANNOTATIONS))


def _holds_regions(row: Mapping[str, Any], key: str) -> bool:
    text = mapping(row.get("data")).get(key)
    return isinstance(text, str) and all(str(region.get("text", "")).strip() in text for _, region in results_of(row))


def _prodigy(asked: Asked, table: Table, rows: Rows) -> Marked | str | None:
    columns = columns_of_spans(rows)
    if columns:
        spans = _one_of(asked, table, "tags_column", columns, asked.label)
        return Marked("prodigy", _text_of(asked, table, rows), spans, "Prodigy's spans with answers", ("answer",))
    bad = sum(row.get("answer") in ANSWERS[1:] for row in rows)
    return "Keep the rows with accept: the label of the others would be learned as right" if bad else None


def _columns(asked: Asked, table: Table, rows: Rows) -> Marked | None:
    columns = columns_of_spans(rows)
    if asked.label and not {*asked.label} <= {*columns}:
        return None
    spans = _one_of(asked, table, "tags_column", columns, asked.label)
    return Marked("spans", _text_of(asked, table, rows), spans, f"column {spans!r} holds spans of a text")


def columns_of_spans(rows: Rows) -> list[str]:
    """Return the columns that hold lists of spans with labels. The reader names a row with another value."""
    return list(dict.fromkeys(name for row in rows for name, cell in row.items() if _are_spans(cell)))


def _are_spans(cell: object) -> bool:
    spans = [fields_of(each) for each in spans_in(cell) or ()]
    return bool(spans) and all(each is not None and _is_span(*each) for each in spans)


def _is_span(start: object, end: object, label: object) -> bool:
    return type(start) is int and type(end) is int and isinstance(label, str | list)


def _marks_places(row: Mapping[str, Any]) -> bool:
    return any(
        key in each
        for name, cell in row.items()
        if name not in ("tokens", "sents")
        for each in objects(cell)
        for key in START_KEYS
    )


def _text_of(asked: Asked, table: Table, rows: Rows) -> str:
    strings = [name for name in rows[0] if all(isinstance(row.get(name), str) for row in rows)]
    usual = [name for name in ("text",) if name in strings]
    texts = usual or [name for name in strings if name in table and table[name].is_text]
    return _one_of(asked, table, "tokens_column", texts, asked.text)


def _one_of(asked: Asked, table: Table, setting: str, names: Sequence[str], flag: tuple[str, ...]) -> str:
    """Return the column that a flag names, or the only one."""
    given = (getattr(asked.data, setting),) if f"data.{setting}" in asked.given else flag
    if len(given or names) == 1:
        return (given or names)[0]
    what = "the text of its spans" if setting == "tokens_column" else "the spans"
    there = f"columns {listed(names)} may be {what}" if names else f"no column is clearly {what}"
    raise ValueError(f"{table.path}: {there}. Choose one: --data.{setting} {names[0] if names else 'COLUMN'}")


class _Form(NamedTuple):
    name: str
    is_it: Callable[[Mapping[str, Any]], bool]
    """Evidence in one row."""
    read: Callable[[Asked, Table, Rows], Marked | str | None]
    """Returns how to read the rows, or why they are not read, with the remedy."""


_FORMS = (
    _Form("results of Label Studio that are not labels of a text", is_label_studio, _label_studio),
    _Form("Prodigy's answers", lambda row: row.get("answer") in ANSWERS and "text" in row, _prodigy),
    _Form("texts with spans", lambda row: bool(columns_of_spans([row])), _columns),
    _Form(
        "Dataturks' annotations",
        lambda row: any("points" in each for each in objects(row.get("annotation"))),
        lambda *_: f"{_READABLE}; the ends of Dataturks are one character too early",
    ),
    _Form(
        "GATE's annotations",
        lambda row: any("indices" in each for cell in mapping(row.get("entities")).values() for each in objects(cell)),
        lambda *_: _READABLE,
    ),
    _Form(
        "spaCy's categories (cats)",
        lambda row: bool(mapping(row.get("cats"))),
        lambda *_: "Write the text and the category with the value 1 into a table of text and label",
    ),
    _Form(
        "places in a text without a label (entity linking, for example)",
        _marks_places,
        lambda *_: f"To tag words: {_READABLE[0].lower()}{_READABLE[1:]}",
    ),
)
"""Annotations in the rows of a table. The first whose evidence is in a row counts."""
