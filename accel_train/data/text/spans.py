"""Read texts with marked spans (doccano, Prodigy, Label Studio), and give each word of a text the tag of its span."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from accel_train.core.json_io import nested
from accel_train.core.state import JsonRecord
from accel_train.data.sources import Source
from accel_train.data.tables import MissingColumn, json_objects, read_rows, show_cell, text_cell
from accel_train.recipe.data import Data

OUTSIDE = "O"
START_KEYS, END_KEYS = ("start", "start_offset"), ("end", "end_offset")
LABEL_KEYS = ("label", "labels", "type", "tag", "entity")
"""Keys of a span that is an object. The first of them that it has counts."""
ANSWERS = ("accept", "reject", "ignore")
"""Values of Prodigy's key `answer`."""
ANNOTATIONS = ("annotations", "completions")
"""Keys of Label Studio's annotations; the second up to version 0.9."""
_MOST_CUT = 0.5
"""Share of spans that cut a word above which their offsets do not count characters."""
# A letter of a script without spaces between words is a word. So is a syllable of Hangul, because particles
# are written together with the noun.
_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = rf"[{_SCRIPTS}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}_]&&[^{_SCRIPTS}]]+|\S"


class Span(NamedTuple):
    """A marked part of a text, in characters. `end` is exclusive."""

    start: int
    end: int
    label: str


class MarkedText(NamedTuple):
    """A text with its words."""

    text: str
    places: tuple[tuple[int, int], ...]
    """Start and end of each word in the text."""
    tags: tuple[str, ...]
    """Tag of each word: O, B-LABEL, I-LABEL. Empty if the spans are not read."""
    where: str
    """File and line or row."""
    id: str
    """Name of the text in predictions."""


@dataclass
class Remarks:
    """Places in the data that the user should know about, by a phrase in front of their number."""

    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, said: str, where: str) -> None:
        """Count one more place."""
        self.places.setdefault(said, []).append(where)

    @property
    def notes(self) -> list[str]:
        """Return each phrase with its count and its first place."""
        return [f"{said}: {len(places):,} (the first: {places[0]})" for said, places in self.places.items()]


def read_marked(
    source: Source, data: Data, form: str, *, text_column: str, spans_column: str | None, remarks: Remarks
) -> Iterator[MarkedText]:
    """Yield the texts of a source in a form of `SPAN_FORMS`, without texts that have no annotation.

    Without `spans_column`, the spans are not read, and each text is yielded.

    Raises:
        ValueError: a text or a span cannot be read, spans overlap, or most of them cut a word; the message names file
            and line or row.
    """
    num_spans = 0
    cut: list[str] = []
    # Tags of each text, to find texts that were annotated twice.
    seen: dict[str, tuple[str, ...]] = {}
    for row, where in _rows(source, data, form, text_column, spans_column):
        held = row["data"] if form == "label_studio" and isinstance(row.get("data"), Mapping) else row
        if text_column not in held:
            raise MissingColumn(
                text_column,
                f"{where}: no {text_column!r}; it has {', '.join(held)} (data.tokens_column names the text)",
            )
        text = text_cell(held[text_column], text_column, where, data)
        name = where if data.id_column is None else str(row.get(data.id_column, where))
        places = word_places(text)
        if not places:
            remarks.add("texts without words, left out", where)
        if spans_column is None:
            yield MarkedText(text, places, (), where, name)
            continue
        spans = _READERS[form](row, spans_column, text, where, remarks)
        if spans is None:
            continue
        if not spans:
            remarks.add("texts without a span, all words tagged O", where)
        tags, cuts = _tags(text, places, spans, where)
        num_spans += len(spans)
        cut += [where] * cuts
        if seen.setdefault(text, tags) != tags:
            remarks.add("texts that occur again with different spans", where)
        yield MarkedText(text, places, tags, where, name)
    if len(cut) > _MOST_CUT * num_spans:
        raise ValueError(
            f"{cut[0]}: {len(cut):,} of {num_spans:,} spans begin or end inside a word. Write start and end in "
            "characters: the first is 0, and the end is the place after the last"
        )
    for where in cut:
        remarks.add("spans that begin or end inside a word, extended to the whole word", where)


def _rows(
    source: Source, data: Data, form: str, text_column: str, spans_column: str | None
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each row with its place. Rows of JSON may lack keys; other kinds have the columns of texts and spans."""
    if source.kind in ("json", "jsonl"):
        for file in source.files:
            yield from ((row, where) for row, where, _ in json_objects(file, data, text_column))
        return
    if form != "spans":
        raise ValueError(f"{source.name}: data.tag_format={form} reads .json and .jsonl files")
    columns = [column for column in (text_column, spans_column, data.id_column) if column is not None]
    for row in read_rows(source, columns, data):
        yield dict(zip(columns, row.cells)), row.where


def _column_of_spans(row: Mapping[str, Any], column: str, text: str, where: str, remarks: Remarks) -> list[Span] | None:
    """Return the spans of a row. Rows of Label Studio's JSON_MIN without spans lack the column."""
    cell = row.get(column, [] if "annotation_id" in row else None)
    found = spans_in(cell)
    if found is None:
        if column not in row:
            there = f"The columns are {', '.join(row)}"
            raise MissingColumn(column, f"{where}: no column {column!r}; write [] for a text without spans. {there}")
        raise ValueError(
            f"{where}: column {column!r} holds {show_cell(cell)}, not a list of [start, end, label]; write [] for a "
            "text without spans, or drop the row"
        )
    return [_span(each, text, where) for each in found]


def _prodigy(row: Mapping[str, Any], column: str, text: str, where: str, remarks: Remarks) -> list[Span] | None:
    answer = row.get("answer", "accept")
    if answer not in ANSWERS:
        raise ValueError(f"{where}: answer is {show_cell(answer)}; Prodigy writes {', '.join(ANSWERS)}")
    if row.get("_view_id") == "ner":
        raise ValueError(
            f"{where}: Prodigy's ner.teach asks about one span of a text at a time, so the other words have no tags. "
            "Correct whole texts (ner.correct), and name that data set"
        )
    if answer != "accept":
        remarks.add("texts rejected or ignored in Prodigy, left out", where)
        return None
    return _column_of_spans({column: [], **row}, column, text, where, remarks)


def _label_studio(row: Mapping[str, Any], column: str, text: str, where: str, remarks: Remarks) -> list[Span] | None:
    key = next((key for key in ANNOTATIONS if key in row), None)
    if key is None:
        raise MissingColumn(ANNOTATIONS[0], f"{where}: no 'annotations', as Label Studio's export JSON has them")
    made = finished(_objects(row[key], where))
    if not made:
        remarks.add("texts without an annotation in Label Studio, left out", where)
        return None
    found = []
    for annotation in made:
        regions: list[Span] = []
        for each in _objects(annotation.get("result"), where):
            value = each.get("value")
            if isinstance(value, Mapping) and "labels" in value:
                regions.append(_span(value, text, where))
            elif isinstance(value, Mapping) and "start" in value:
                raise ValueError(f"{where}: {each.get('type')} are not read; accel_train reads Labels of a Text")
            else:
                remarks.add(f"results of Label Studio that are not spans ({each.get('type')})", where)
        found.append(sorted({*regions}))
    if any(spans != found[0] for spans in found):
        raise ValueError(
            f"{where}: {len(found)} annotations mark different spans; choose one in Label Studio (ground truth), or "
            "drop the others"
        )
    return found[0]


def finished(annotations: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the annotations of Label Studio that count: those called ground truth, or all that are not cancelled."""
    made = [each for each in annotations if not each.get("was_cancelled")]
    return [each for each in made if each.get("ground_truth")] or made


def _objects(cell: object, where: str) -> list[Mapping[str, Any]]:
    found: list[Any] = cell if isinstance(cell, list) else [] if cell is None else [cell]
    if not all(isinstance(each, Mapping) for each in found):
        raise ValueError(f"{where}: {show_cell(cell)} is not a list of objects, as Label Studio's export JSON has them")
    return found


_READERS = {"spans": _column_of_spans, "prodigy": _prodigy, "label_studio": _label_studio}
SPAN_FORMS = tuple(_READERS)
"""Values of `data.tag_format` that read spans."""


def spans_in(cell: object) -> list[Any] | None:
    """Return a cell as a list of spans that are not checked, or None. In csv it is a JSON list, or empty."""
    found = [] if isinstance(cell, str) and not cell.strip() else nested(cell)
    return list(found) if isinstance(found, list | tuple) else None


def fields_of(span: object) -> tuple[Any, Any, Any] | None:
    """Return start, end, and label of a span as they are written, or None for another value."""
    if isinstance(span, Mapping):
        keys = [next((key for key in keys if key in span), None) for keys in (START_KEYS, END_KEYS, LABEL_KEYS)]
        return None if None in keys else (span[keys[0]], span[keys[1]], span[keys[2]])
    return tuple(span) if isinstance(span, list | tuple) and len(span) == 3 else None


def _span(written: object, text: str, where: str) -> Span:
    """Return a span that lies in its text and has one label."""
    fields = fields_of(written)
    if fields is None:
        raise ValueError(f"{where}: {show_cell(written)} is not a span; write [start, end, label]")
    start, end, label = fields
    if isinstance(label, list | tuple) and len(label) == 1:
        label = label[0]
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"{where}: {show_cell(written)} has no single label; write one name")
    if type(start) is not int or type(end) is not int:
        raise ValueError(f"{where}: {show_cell(written)} has no whole numbers for its start and end (in characters)")
    said = written.get("text") if isinstance(written, Mapping) else None
    if isinstance(said, str) and not _is_same(said, text[max(0, start) : end]):
        # Browsers count an emoji as two.
        units = text.encode("utf-16-le", "surrogatepass")
        before, marked = units[: 2 * start], units[2 * start : 2 * end].decode("utf-16-le", "replace")
        if not _is_same(said, marked):
            raise ValueError(
                f"{where}: the span {show_cell(said)} is not at its place {start} to {end}, where the text has "
                f"{show_cell(text[max(0, start) : end])}; repair or drop the row"
            )
        start = len(before.decode("utf-16-le", "replace"))
        end = start + len(marked)
    if not 0 <= start < end <= len(text):
        raise ValueError(
            f"{where}: the span [{start}, {end}, {label!r}] is not in its text of {len(text)} characters; repair or "
            "drop the row"
        )
    return Span(start, end, str(label))


def _is_same(one: str, other: str) -> bool:
    return one.split() == other.split()


@cache
def _splitter() -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)


def word_places(text: str) -> tuple[tuple[int, int], ...]:
    """Return start and end of each word: letters and digits, or one other character that is not a space."""
    return tuple(place for _, place in _splitter().pre_tokenize_str(text))


def _tags(
    text: str, places: Sequence[tuple[int, int]], spans: Sequence[Span], where: str
) -> tuple[tuple[str, ...], int]:
    """Return the tag of each word, and the number of spans that begin or end inside a word."""
    starts, ends = [start for start, _ in places], [end for _, end in places]
    tags = [OUTSIDE] * len(places)
    num_cut = 0
    last: Span | None = None
    for span in sorted({*spans}):
        # The words that share a character with the span.
        first, after = bisect_right(ends, span.start), bisect_left(starts, span.end)
        if first >= after:
            raise ValueError(f"{where}: the span [{span.start}, {span.end}, {span.label!r}] holds no word; drop it")
        if last is not None and tags[first] != OUTSIDE:
            raise ValueError(
                f"{where}: the spans {show_cell(text[last.start : last.end])} ({last.label}) and "
                f"{show_cell(text[span.start : span.end])} ({span.label}) share a word, and a word has one tag; keep "
                "one of them"
            )
        num_cut += starts[first] < span.start or ends[after - 1] > span.end
        tags[first:after] = [f"B-{span.label}", *[f"I-{span.label}"] * (after - first - 1)]
        last = span
    return tuple(tags), num_cut


def complete_tags(tags: set[str]) -> set[str]:
    """Return O, and B- and I- of each label. Other texts may have a span of several words where these have one."""
    return {OUTSIDE} | {f"{begin}-{tag[2:]}" for tag in tags if tag != OUTSIDE for begin in "BI"}


def spans_of(text: str, places: Sequence[tuple[int, int]], tags: Sequence[str | None]) -> list[JsonRecord]:
    """Return the spans of tagged words as objects with start, end, label, and text.

    A word without a tag and the word after it share a token, unless a space separates them.
    """
    found: list[tuple[int, int, str]] = []
    # Start and end of the words without a tag just before.
    untagged: tuple[int, int] | None = None
    label = ""
    for (start, end), tag in zip(places, tags):
        begin = untagged[0] if untagged is not None and untagged[1] == start else start
        if tag is None:
            untagged = (begin, end)
            continue
        before, label, untagged = label, "" if tag == OUTSIDE else tag[2:], None
        if label and tag[0] == "I" and label == before:
            found[-1] = (found[-1][0], end, label)
        elif label:
            found.append((begin, end, label))
    return [{"start": start, "end": end, "label": label, "text": text[start:end]} for start, end, label in found]
