"""Annotations of texts, as annotation tools write them: read, or refused by name. Imports no torch."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from accel_train.core.format import format_count
from accel_train.data.encoding import read_lines
from accel_train.data.parts import part_of
from accel_train.data.sources import file_kind
from accel_train.data.tables import SPLITS, json_objects
from accel_train.data.text.spans import ANNOTATIONS, ANSWERS, START_KEYS, fields_of, finished, spans_in
from accel_train.experiments.finetune.columns import Table, data_at, files_at, mapping, objects, with_settings
from accel_train.experiments.finetune.recipe import Asked, Converted, Names, listed
from accel_train.experiments.finetune.tree import MOST_TAGGED, Tree

_ROWS_LOOKED_AT = 200
_LINES_LOOKED_AT = 5
_READABLE = "Write text and label ([[start, end, name], ...], in characters) of each document into a .jsonl file"

Row = Mapping[str, Any]
Rows = Sequence[Row]


class Marked(NamedTuple):
    """Settings to read texts with spans."""

    form: str
    """Value of `data.tag_format`."""
    text: str
    spans: str
    why: str
    read: Names = ()
    """Further columns that are read."""


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


def refuse_files_of_tools(asked: Asked, tree: Tree) -> str:
    """Raise ValueError if an annotation tool's files would be read as text, or not at all."""
    # One file of each kind.
    for path in {path.suffix.lower(): path for path in tree.files}.values() if asked.task != "causal-lm" else ():
        suffix = path.suffix.lower()
        for name, suffixes, begin, remedy in _FILES:
            if suffix in suffixes and (not begin or any(begin in line for line in _first_lines(path, asked))):
                raise ValueError(f"{path}: {name} are not read. {remedy}")
    return "no .ann, .spacy, or .xmi"


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


def _rows(asked: Asked, table: Table) -> Iterator[Row]:
    """Yield the rows of a table. Rows of JSON also have the keys that other rows lack."""
    if file_kind(table.path) in ("json", "jsonl"):
        data = with_settings(asked.data, table.settings)
        yield from (row for path in files_at(table.path) for row, _, _ in json_objects(path, data, "text"))
        return
    for cells in zip(*(column.cells for column in table.each)):
        yield dict(zip(table.columns, cells))


def _annotations_of(row: Row) -> list[Row]:
    return [each for key in ANNOTATIONS for each in objects(row.get(key))]


def results_of(row: Row) -> list[tuple[str, Row]]:
    """Return the names and values of all results of a task of Label Studio."""
    results = [result for annotation in _annotations_of(row) for result in objects(annotation.get("result"))]
    return [(str(result.get("from_name")), mapping(result.get("value"))) for result in results]


def is_label_studio(row: Row) -> bool:
    """Return whether a row is a task of Label Studio's export JSON."""
    return isinstance(row.get("data"), Mapping) and any("result" in each for each in _annotations_of(row))


def _label_studio(asked: Asked, table: Table, rows: Rows) -> Marked | str:
    regions = [region for row in rows for _, region in results_of(row)]
    if not any("labels" in region and "start" in region for region in regions):
        return "Choices and labels are. For others, export JSON_MIN, and name columns: --text text --label COLUMN"
    texts = [key for key in mapping(rows[0].get("data")) if all(_holds_regions(row, key) for row in rows)]
    text = _one_of(asked, table, "tokens_column", texts, asked.text)
    return Marked("label_studio", text, "annotations", "Label Studio's export JSON", ("data", *ANNOTATIONS))


def _holds_regions(row: Row, key: str) -> bool:
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
    return bool(spans) and all(
        each is not None and type(each[0]) is type(each[1]) is int and isinstance(each[2], str | list) for each in spans
    )


def _marks_places(row: Row) -> bool:
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


def _one_of(asked: Asked, table: Table, setting: str, names: Sequence[str], flag: Names) -> str:
    """Return the column that a flag names, or the only one."""
    given = (getattr(asked.data, setting),) if f"data.{setting}" in asked.given else flag
    if len(given or names) == 1:
        return (given or names)[0]
    what = "the text of its spans" if setting == "tokens_column" else "the spans"
    there = f"columns {listed(names)} may be {what}" if names else f"no column is clearly {what}"
    raise ValueError(f"{table.path}: {there}. Choose one: --data.{setting} {names[0] if names else 'COLUMN'}")


class _Form(NamedTuple):
    name: str
    is_it: Callable[[Row], bool]
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


_MEDIA = re.compile(r"\S+\.\w{2,5}(?:\?\S*)?")
"""Name of an image or a sound."""

Columns = tuple[str, str]
"""Names of the text and of its class."""


class _Text(NamedTuple):
    text: str
    labels: Sequence[str] | None
    """None: rejected, ignored, or not annotated."""


def tables_of_classes(asked: Asked, tree: Tree) -> Converted | None:
    """Return a table for each part, and a note on texts that were left out, or None for files without these classes.

    Raises:
        ValueError: annotations of a text differ, or several columns may be the text or the classes.
    """
    files = tree.of_kind("jsonl", "json")
    if not asked.allows("text-classification") or not 0 < len(files) <= MOST_TAGGED or files != tree.files:
        return None
    names, by_split = ("text", "label"), dict[str, list[_Text]]()
    for file in files:
        if (found := _texts_of(asked, file)) is None:
            return None
        names, texts = found
        part = part_of(file.relative_to(tree.path).as_posix()) if tree.is_folder else None
        by_split.setdefault(SPLITS[part or "train"], []).extend(texts)
    every = [text for texts in by_split.values() for text in texts]
    is_one = all(len(text.labels or ()) < 2 for text in every)
    rows = {
        f"{split}.jsonl": [
            dict(zip(names, (text, labels[0] if is_one else labels)))
            for text, labels in texts
            if labels or (labels is not None and not is_one)
        ]
        for split, texts in by_split.items()
    }
    left_out = len(every) - sum(map(len, rows.values()))
    how = f", without {format_count(left_out, 'text')} rejected, ignored, or without a class" if left_out else ""
    return Converted({name: asked.jsonl(some) for name, some in rows.items()}, how)


def _texts_of(asked: Asked, file: Path) -> tuple[Columns, list[_Text]] | None:
    try:
        every = ((row, where) for row, where, _ in json_objects(file, data_at(file, asked), "text"))
        first = list(islice(every, _LINES_LOOKED_AT))
        if not any("answer" in row or "data" in row for row, _ in first):
            return None
        rows = [*first, *every]
    # The reader of the table will report the row.
    except ValueError:
        return None
    judged = [row for row, _ in rows if {"text", "answer"} <= row.keys()]
    if any("options" in row for row in judged):
        return ("text", "label"), [_Text(row["text"], _accepted(row)) for row in judged]
    tasks = [(row, where) for row, where in rows if is_label_studio(row)]
    kinds = {kind for row, _ in tasks for _, value in results_of(row) for kind in value}
    if "choices" in kinds and (asked.task is not None or "labels" not in kinds):
        text, label = names = _columns_of_choices(asked, file, [row for row, _ in tasks])
        return names, [_Text(row["data"][text], _chosen(row, label, where)) for row, where in tasks]
    is_asked_about = any(row["answer"] != "accept" for row in judged) and all("label" in row for row in judged)
    if is_asked_about and (asked.task is not None or not columns_of_spans(judged)):
        return ("text", "label"), _questions(judged)
    return None


def _accepted(row: Row) -> list[str] | None:
    """Return the options that were accepted in Prodigy. An id that is a number stands for its text."""
    texts = {option.get("id"): option.get("text") for option in objects(row["options"])}
    labels = [str(each if isinstance(each, str) else texts.get(each, each)) for each in row.get("accept") or ()]
    return labels if row["answer"] == "accept" else None


def _questions(rows: Rows) -> list[_Text]:
    """Return each text with the labels that were accepted in Prodigy, where each row asks about one label.

    Of a single label, the texts that were rejected are the other class.
    """
    is_only = len({str(row["label"]) for row in rows}) == 1
    found: dict[str, list[str]] = {}
    for row in rows:
        labels, name = found.setdefault(row["text"], []), str(row["label"])
        if row["answer"] == "reject" and is_only:
            name = f"not {name}"
        if (row["answer"] == "accept" or name != row["label"]) and name not in labels:
            labels.append(name)
    return [_Text(text, labels or None) for text, labels in found.items()]


def _columns_of_choices(asked: Asked, path: Path, rows: Rows) -> Columns:
    """Return the key of the texts in `data`, and the name of the choices."""
    held = [row["data"] for row in rows]
    texts = [key for key in held[0] if all(isinstance(data.get(key), str) for data in held)]
    texts = [key for key in texts if not all(_MEDIA.fullmatch(data[key]) for data in held)]
    texts = [key for key in asked.text or ({"text"} & {*texts} or texts) if key in texts]
    names = [*dict.fromkeys(name for row in rows for name, value in results_of(row) if "choices" in value)]
    names = [name for name in asked.label or names if name in names]
    for flag, found, what in (("--text", texts, "texts"), ("--label", names, "classes")):
        if len(found) != 1:
            raise ValueError(
                f"{path}: {listed(found) or 'nothing'} may be the {what} of Label Studio's export. Choose one: {flag} "
                f"{[*found, 'NAME'][0]}"
            )
    return texts[0], names[0]


def _chosen(row: Row, name: str, where: str) -> list[str] | None:
    """Return the classes that were chosen in Label Studio."""
    found = []
    for annotation in finished(_annotations_of(row)):
        values = [value for found_name, value in results_of({ANNOTATIONS[0]: [annotation]}) if found_name == name]
        found.append(sorted({str(label) for value in values for label in value.get("choices", ())}))
    if any(labels != found[0] for labels in found):
        raise ValueError(
            f"{where}: {len(found)} annotations choose different classes; choose one in Label Studio (ground truth), "
            "or drop the others"
        )
    return found[0] if found else None
