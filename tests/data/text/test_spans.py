"""Texts with spans, as annotation tools write them: words and tags of each form, worked out by hand, and refusals."""

import json
from typing import Any

import pytest

from accel_train.data.text.spans import spans_of, word_places
from accel_train.tasks.token_classification.config import TokenClassificationData
from accel_train.tasks.token_classification.data import Sentence, read_sentences
from tests.support.runs import refused, sources_of, write_rows

ROME = "Ada Lovelace walks to Rome."
PER, LOC = (0, 12, "PER"), (22, 26, "LOC")
TAGGED = (("Ada", "B-PER"), ("Lovelace", "I-PER"), ("walks", "O"), ("to", "O"), ("Rome", "B-LOC"), (".", "O"))


def task_of(text: str, *results: dict[str, Any], **annotation: Any) -> dict[str, Any]:
    """A task of Label Studio's export."""
    made = [{"type": "labels", "value": value} if "type" not in value else value for value in results]
    return {"data": {"text": text}, "annotations": [{"result": made, **annotation}]}


def region(start: int, end: int, label: str, text: str = ROME, **further: Any) -> dict[str, Any]:
    return {"start": start, "end": end, "labels": [label], "text": text[start:end], **further}


def read(name: str, rows: list[Any], form: str, tags: str | None = "label") -> tuple[list[Sentence], list[str]]:
    is_csv = name.endswith(".csv")
    write_rows(name, [{**row, "label": json.dumps(row["label"])} for row in rows] if is_csv else rows)
    settings: dict[str, Any] = {"tokens_column": "text", "tags_column": tags, "tag_format": form}
    data = TokenClassificationData(train=name, **settings)
    notes: list[str] = []
    return read_sentences(sources_of(data), data, key="data.train", notes=notes), notes


@pytest.mark.parametrize(
    ("name", "form", "row"),
    [
        ("doccano.jsonl", "spans", {"label": [[22, 26, "LOC"], [0, 12, "PER"]]}),
        ("doccano.csv", "spans", {"label": [PER, LOC]}),
        (
            "offsets.jsonl",
            "spans",
            {"label": [{"label": n, "start_offset": s, "end_offset": e} for s, e, n in (PER, LOC)]},
        ),
        ("min.json", "spans", {"label": [region(*PER), region(*LOC)]}),
        ("twice.jsonl", "spans", {"label": [PER, LOC, PER]}),
        ("blanks.jsonl", "spans", {"label": [(0, 13, "PER"), (21, 26, "LOC")]}),
        (
            "prodigy.jsonl",
            "prodigy",
            {"label": [{"start": s, "end": e, "label": n} for s, e, n in (PER, LOC)], "answer": "accept"},
        ),
        ("ls.json", "label_studio", task_of(ROME, region(*PER), region(*LOC))),
        (
            "old.json",
            "label_studio",
            {"data": {"text": ROME}, "completions": task_of(ROME, region(*PER), region(*LOC))["annotations"]},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_words_come_from_the_text_and_tags_from_the_spans(name: str, form: str, row: Any) -> None:
    ((sentence,), notes) = read(name, [{"text": ROME, **row}], form)
    assert tuple(zip(sentence.words, sentence.tags, strict=True)) == TAGGED
    assert (sentence.key, notes) == (ROME, [])
    assert [ROME[start:end] for start, end in sentence.places.tolist()] == [word for word, _ in TAGGED]


@pytest.mark.parametrize(
    ("form", "rows", "kept", "notes"),
    [
        ("spans", [{"text": ROME, "label": []}], ["O" * 6], ["texts without a span, all words tagged O: 1 ("]),
        ("spans", [{"text": ROME, "annotation_id": 4}], ["O" * 6], ["texts without a span, all words tagged O: 1 ("]),
        (
            "spans",
            [{"text": " ", "label": []}, {"text": "a", "label": []}],
            ["O"],
            ["without words", "span, all words tagged O: 2"],
        ),
        (
            "spans",
            [{"text": "Romans in Rome", "label": [(0, 4, "X"), (10, 14, "X")]}],
            ["BOB"],
            ["spans that begin or end inside a word, extended to the whole word: 1 ("],
        ),
        (
            "spans",
            [{"text": "a b", "label": [(0, 1, "X")]}, {"text": "a b", "label": [(2, 3, "X")]}],
            ["BO", "OB"],
            ["again"],
        ),
        (
            "prodigy",
            [{"text": "a", "answer": each} for each in ("accept", "reject", "ignore")],
            ["O"],
            ["without a span", "texts rejected or ignored in Prodigy, left out: 2"],
        ),
        (
            "label_studio",
            [task_of("a"), {"data": {"text": "b"}, "annotations": []}],
            ["O"],
            ["without a span", "an annotation in Label Studio, left out: 1"],
        ),
        (
            "label_studio",
            [task_of("a"), task_of("b", was_cancelled=True)],
            ["O"],
            ["without a span", "an annotation in Label Studio, left out: 1"],
        ),
        (
            "label_studio",
            [task_of("a", {"type": "choices", "value": {"choices": ["x"]}})],
            ["O"],
            ["results of", "without a span"],
        ),
        (
            "label_studio",
            [
                {
                    **task_of("a"),
                    "annotations": [
                        {"result": [], "ground_truth": True},
                        task_of("a", region(0, 1, "X", "a"))["annotations"][0],
                    ],
                }
            ],
            ["O"],
            ["without a span"],
        ),
    ],
)
def test_what_is_left_out_or_changed_is_counted_with_its_first_place(
    form: str, rows: list[Any], kept: list[str], notes: list[str]
) -> None:
    sentences, found = read("a.jsonl", rows, form)
    assert ["".join(tag[0] for tag in sentence.tags) for sentence in sentences] == kept
    assert len(found) == len(notes)
    assert all(part in note and "a.jsonl:" in note for part, note in zip(notes, found, strict=True))


WRONG_SPANS = (
    ([PER, (4, 12, "X")], "Ada Lovelace|share a word|a.jsonl:2"),
    ([(0, 2, "X"), (2, 3, "Y")], "share a word"),
    ([(22, 28, "LOC")], "[22, 28, 'LOC'] is not in its text of 27"),
    ([(-1, 3, "X")], "is not in its text"),
    ([(3, 3, "X")], "is not in its text"),
    ([(3, 4, "X")], "holds no word"),
    ([(0, 12.0, "X")], "whole numbers"),
    ([(0, True, "X")], "whole numbers"),
    ([(0, 12, None)], "no single label"),
    ([{"start": 0, "end": 12, "labels": ["A", "B"]}], "no single label"),
    ([[0, 12]], "is not a span"),
    (None, "column 'label' holds null"),
    ([(1, 11, "X")] * 2 + [(21, 25, "Y")], "2 of 3 spans begin or end inside a word"),
)


@pytest.mark.parametrize(
    ("form", "row", "named"),
    [
        *(("spans", {"label": label}, named) for label, named in WRONG_SPANS),
        ("spans", {}, "no column 'label'|[]"),
        ("prodigy", {"answer": "maybe"}, "accept, reject, ignore"),
        ("prodigy", {"answer": "accept", "_view_id": "ner"}, "ner.teach"),
        ("label_studio", task_of(ROME, region(0, 12, "PER", "Eve Lovelace")), '"Eve Lovelace" is not at its place'),
        ("label_studio", {**task_of(ROME), "annotations": [{"result": [region(*PER)]}, 1]}, "not a list of objects"),
        ("label_studio", task_of(ROME, {"type": "hypertextlabels", "value": {"start": "/p[1]"}}), "hypertextlabels"),
        (
            "label_studio",
            {
                "data": {"text": ROME},
                "annotations": [*task_of(ROME, region(*PER))["annotations"], *task_of(ROME)["annotations"]],
            },
            "2 annotations mark different spans",
        ),
        ("label_studio", {"data": {"other": ROME}, "annotations": []}, "no 'text'; it has other"),
    ],
)
def test_a_span_that_cannot_be_learned_is_refused_with_its_line(form: str, row: Any, named: str) -> None:
    good = task_of("a") if form == "label_studio" else {"text": "a", "label": []}
    row = row if form == "label_studio" else {"text": ROME, **row}
    refused(read, "a.jsonl", [good, row], form, named=f"{named}|a.jsonl:2")


def test_offsets_of_browsers_count_an_emoji_as_two() -> None:
    text = "💩This is an annotation."
    value = {"start": 13, "end": 23, "text": "annotation", "labels": ["N"]}
    ((sentence,), _) = read("a.json", [task_of(text, value)], "label_studio")
    assert dict(zip(sentence.words, sentence.tags))["annotation"] == "B-N"


def test_spans_are_not_read_without_a_column_and_every_text_is_kept() -> None:
    rows = [{"text": "a", "answer": "reject"}, {"text": "b", "label": "broken"}, {"text": "c d"}]
    sentences, notes = read("a.jsonl", rows, "prodigy", tags=None)
    assert ([sentence.words for sentence in sentences], notes) == ([("a",), ("b",), ("c", "d")], [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Dr. O'Neil's 5mg,\n naïve", ["Dr", ".", "O", "'", "Neil", "'", "s", "5mg", ",", "naïve"]),
        ("日本ABC語。", ["日", "本", "ABC", "語", "。"]),
        ("서울은 हिन्दी e\u0301a 😀", ["서", "울", "은", "हिन्दी", "e\u0301a", "😀"]),
        (" \n", []),
    ],
)
def test_a_word_is_letters_and_digits_or_one_other_character(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in word_places(text)] == words


@pytest.mark.parametrize(
    ("text", "tags", "spans"),
    [
        ("New York and Rome", ["B-LOC", "I-LOC", "O", "B-LOC"], [(0, 8, "LOC"), (13, 17, "LOC")]),
        ("New York Rome", ["B-LOC", "I-LOC", "B-LOC"], [(0, 8, "LOC"), (9, 13, "LOC")]),
        ("Ada Rome now", ["I-PER", "I-LOC", "O"], [(0, 3, "PER"), (4, 8, "LOC")]),
        ("in 北京 now", ["O", None, "I-LOC", "O"], [(3, 5, "LOC")]),
        ("x Rome now", [None, "B-LOC", None], [(2, 6, "LOC")]),
        ("a b", [None, None], []),
    ],
)
def test_spans_are_told_from_tags_and_a_word_in_the_next_words_token_belongs_to_it(
    text: str, tags: list[str | None], spans: list[tuple[int, int, str]]
) -> None:
    found = spans_of(text, word_places(text), tags)
    assert [(each["start"], each["end"], each["label"]) for each in found] == spans
    assert all(each["text"] == text[each["start"] : each["end"]] for each in found)
