"""`finetune` of annotated texts and translations: the settings of each form, and forms that are refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_train.cli.main import main
from accel_train.experiments.finetune.start import write_recipe
from tests.support.runs import refused, write_jsonl

TEXTS = (
    ("Ada Lovelace walks to Rome.", [(0, 12, "PER"), (22, 26, "LOC")]),
    ("She saw Emmy Noether in Bonn, twice.", [(8, 20, "PER"), (24, 28, "LOC")]),
    ("Nothing here at all.", []),
)
COUNTS = {"B-LOC": 20, "B-PER": 20, "I-PER": 20, "O": 170}
Rows = list[dict[str, Any]]


def rows_of(form: Callable[[str, list[dict[str, Any]]], dict[str, Any]]) -> Rows:
    """30 rows of a form, made from a text and its spans."""
    rows = []
    for number in range(30):
        text, spans = TEXTS[number % 3]
        named = [{"start": s, "end": e, "label": label, "text": text[s:e]} for s, e, label in spans]
        rows.append({"id": number, **form(f"{text} no{number}", named)})
    return rows


def triples(spans: Rows) -> list[list[Any]]:
    return [[span["start"], span["end"], span["label"]] for span in spans]


def regions(spans: Rows) -> Rows:
    """Label Studio's values: a list of labels in each."""
    return [{**{key: span[key] for key in ("start", "end", "text")}, "labels": [span["label"]]} for span in spans]


def label_studio(text: str, spans: Rows) -> dict[str, Any]:
    results = [{"type": "labels", "to_name": "text", "value": value} for value in regions(spans)]
    return {"data": {"url": "a b c", "body": text}, "annotations": [{"result": results}], "predictions": []}


READ: dict[str, tuple[Callable[[str, Rows], dict[str, Any]], tuple[str, str, str]]] = {
    "doccano.jsonl": (lambda text, spans: {"text": text, "label": triples(spans)}, ("spans", "text", "label")),
    "doccano.json": (lambda text, spans: {"data": text, "labels": triples(spans)}, ("spans", "data", "labels")),
    "relations.jsonl": (
        lambda text, spans: {
            "text": text,
            "entities": [
                {"label": each["label"], "start_offset": each["start"], "end_offset": each["end"]} for each in spans
            ],
            "relations": [],
        },
        ("spans", "text", "entities"),
    ),
    "spacy.jsonl": (
        lambda text, spans: {"text": text, "ents": spans, "cats": {"A": 1.0}, "tokens": [{"start": 0, "end": 3}]},
        ("spans", "text", "ents"),
    ),
    "prodigy.jsonl": (
        lambda text, spans: {
            "text": text,
            **({"spans": spans} if spans else {}),
            "tokens": [{"text": "a", "start": 0, "end": 1, "id": 0}],
            "answer": "accept",
        },
        ("prodigy", "text", "spans"),
    ),
    "min.json": (
        lambda text, spans: {"text": text, **({"ner": regions(spans)} if spans else {}), "annotation_id": 1},
        ("spans", "text", "ner"),
    ),
    "export.json": (label_studio, ("label_studio", "body", "annotations")),
}


@pytest.mark.parametrize("name", READ)
def test_texts_with_spans_are_token_classification_and_read_in_place(name: str) -> None:
    form, settings = READ[name]
    rows = rows_of(form)
    Path(name).write_text(json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows)))
    written = write_recipe(name, [])
    data, found = written.recipe.data, written.found
    assert (written.recipe.task, data.train) == ("token-classification", name)
    assert (data.tag_format, data.tokens_column, data.tags_column) == settings
    assert (dict(found.counts), found.num_samples) == (COUNTS, 30)
    assert not any("is left out" in note for note in found.notes)
    assert not any(each in (found.unused or ("",))[0] for each in ("annotations", "'data'", "answer"))


def test_rows_of_a_table_that_are_left_out_do_not_count() -> None:
    rows = rows_of(lambda text, spans: {"text": text, "spans": spans, "answer": "accept"})
    rows[3]["answer"], rows[4]["answer"] = "reject", "ignore"
    write_jsonl(Path("a.jsonl"), rows)
    assert write_recipe("a.jsonl", []).found.num_samples == 28


def test_flags_choose_among_columns_of_spans_and_texts() -> None:
    rows = rows_of(lambda text, spans: {"text": text, "a": spans, "b": triples(spans[:1]), "kind": text[:3]})
    write_jsonl(Path("a.jsonl"), rows)
    refused(write_recipe, "a.jsonl", [], named="a, b may be the spans|--data.tags_column a")
    assert write_recipe("a.jsonl", [], label=("b",), file="b.yaml").recipe.data.tags_column == "b"
    assert write_recipe("a.jsonl", ["--data.tags_column", "a"], file="a.yaml").recipe.data.tags_column == "a"
    assert write_recipe("a.jsonl", [], label=("kind",), file="c.yaml").recipe.task == "text-classification"


OPTIONS = [{"id": "A", "text": "one"}, {"id": "B", "text": "two"}, {"id": 3, "text": "three"}]


def answered(n: int) -> str:
    return {0: "reject", 1: "ignore"}.get(n % 10, "accept")


def chosen(n: int, names: list[str]) -> dict[str, Any]:
    result = [{"from_name": "mood", "type": "choices", "value": {"choices": names}}]
    other = {"was_cancelled": True, "result": [{"from_name": "mood", "value": {"choices": ["no"]}}]}
    made = [{"result": result, "ground_truth": True}, {"result": []}] if n % 2 else [{"result": result}, other]
    return {"annotations": [other] if n % 10 < 2 else made, "predictions": [{"result": result}]}


CLASSES: dict[str, tuple[Callable[[int, str], dict[str, Any]], dict[str, int], bool, int]] = {
    "Prodigy's options": (
        lambda n, text: {"text": text, "options": OPTIONS, "accept": [["A", "B", 3][n % 3]], "answer": answered(n)},
        {"A": 8, "B": 8, "three": 8},
        True,
        24,
    ),
    "several of Prodigy's options": (
        lambda n, text: {"text": text, "options": OPTIONS, "accept": ["A", "B"][: n % 3], "answer": answered(n)},
        {"A": 16, "B": 8},
        False,
        24,
    ),
    "Prodigy's questions about one label": (
        lambda n, text: {"text": text, "label": "A", "answer": ("accept", "reject", "ignore")[n % 3]},
        {"A": 10, "not A": 10},
        True,
        20,
    ),
    "Prodigy's questions about two labels": (
        lambda n, text: {"text": text, "label": "AB"[n % 2], "answer": answered(n)},
        {"A": 12, "B": 12},
        True,
        24,
    ),
    "Label Studio's choices": (
        lambda n, text: {"data": {"text": text, "title": "a b"}, **chosen(n, ["ab"[n % 2]])},
        {"a": 12, "b": 12},
        True,
        24,
    ),
    "several of Label Studio's choices": (
        lambda n, text: {"data": {"body": text, "url": f"https://a.b/{n}.html"}, **chosen(n, ["a", "b"][: n % 3])},
        {"a": 16, "b": 8},
        False,
        24,
    ),
}


@pytest.mark.parametrize("what", CLASSES)
@pytest.mark.parametrize("name", ["export.jsonl", "export.json"])
def test_classes_of_texts_are_read_without_those_that_were_not_accepted(what: str, name: str) -> None:
    form, counts, is_one, num_samples = CLASSES[what]
    rows = [form(n, f"{TEXTS[n % 3][0]} {n}") for n in range(30)]
    Path("set").mkdir()
    Path("set", name).write_text(json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows)))
    for path in (f"set/{name}", "set"):
        found = write_recipe(path, [], output_dir=f"runs/{len(path)}").found
        assert (found.task, found.has_one_label) == ("text-classification", is_one)
        assert (dict(found.counts), found.num_samples) == (counts, num_samples)
        assert f"{30 - num_samples} texts rejected" in found.notes[0]


def test_a_text_with_several_accepted_labels_has_them_all() -> None:
    rows = [
        {"text": f"a text {n // 2}", "label": "AB"[n % 2], "answer": "accept" if n % 4 != 1 else "reject"}
        for n in range(40)
    ]
    write_jsonl(Path("a.jsonl"), rows)
    found = write_recipe("a.jsonl", []).found
    assert (dict(found.counts), found.num_samples, found.has_one_label) == ({"A": 20, "B": 10}, 20, False)


REFUSED: dict[str, tuple[Callable[[str, Rows], dict[str, Any]], str]] = {
    "Label Studio's ratings": (
        lambda text, _: {"data": {"text": text}, "annotations": [{"result": [{"value": {"rating": 3}}]}]},
        "Label Studio|JSON_MIN",
    ),
    "Label Studio's classes of images": (
        lambda text, _: {"data": {"image": "/a/1.png"}, "annotations": [{"result": [{"value": {"choices": ["a"]}}]}]},
        "nothing may be the texts",
    ),
    "Label Studio's classes by two people": (
        lambda text, _: {
            "data": {"text": text},
            "annotations": [{"result": [{"value": {"choices": [name]}}]} for name in "ab"],
        },
        "1: 2 annotations|ground truth",
    ),
    "two questions of Label Studio": (
        lambda text, _: {
            "data": {"text": text},
            "annotations": [
                {"result": [{"from_name": name, "value": {"choices": ["a"]}} for name in ("mood", "kind")]}
            ],
        },
        "mood, kind may be the classes|--label mood",
    ),
    "Dataturks": (
        lambda text, _: {"content": text, "annotation": [{"label": ["A"], "points": [{"start": 0, "end": 2}]}]},
        "Dataturks",
    ),
    "GATE": (lambda text, _: {"text": text, "entities": {"Person": [{"indices": [0, 3]}]}}, "GATE"),
    "spaCy's cats": (lambda text, _: {"text": text, "cats": {"A": 1.0, "B": 0.0}}, "cats"),
    "entity linking": (
        lambda text, _: {"text": text, "mentions": [{"start": 0, "end": 3, "qid": "Q7259"}]},
        "without a label",
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_other_annotations_are_refused_by_their_name(form: str) -> None:
    make, named = REFUSED[form]
    write_jsonl(Path("a.jsonl"), rows_of(make))
    refused(write_recipe, "a.jsonl", [], named=f"a.jsonl|{named}")
    assert main(["finetune", "a.jsonl", "--dry-run"]) == 2


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.ann", "T1\tPER 0 3\tAda\n", "brat"),
        ("a.spacy", "", "DocBin"),
        ("a.tsv", "#FORMAT=WebAnno TSV 3.2\n\n#Text=Ada\n1-1\t0-3\tAda\tPER\n", "WebAnno"),
        ("a.xmi", '<?xml version="1.0"?><xmi:XMI>', "UIMA"),
        ("a.xml", '<?xml version="1.0"?>\n<GateDocument>', "GATE"),
    ],
)
def test_files_of_annotation_tools_are_refused_by_their_name(name: str, content: str, named: str) -> None:
    Path("texts").mkdir()
    Path(f"texts/{name}").write_text(content)
    Path("texts/b.txt").write_text("Ada walks.\n" * 30)
    refused(write_recipe, f"texts/{name}", [], named=f"texts/{name}|{named}")
    refused(write_recipe, "texts", [], named=f"texts/{name}|{named}")


def sentences(line: str, first: str = "") -> str:
    """40 sentences of CoNLL, with the words and tags in each `line`, after a `first` line."""
    words = [("Ada", "B-PER"), ("Lovelace", "I-PER"), ("walks", "O"), ("to", "O"), ("Rome", "B-LOC")]
    blocks = []
    for number in range(40):
        named = [line.format(n=n, word=word, tag=tag) for n, (word, tag) in enumerate(words[number % 3 :], start=1)]
        blocks.append("".join(f"{each}\n" for each in ([first] if first else []) + named))
    return "\n".join(blocks)


@pytest.mark.parametrize(
    ("name", "content", "settings"),
    [
        ("a.tsv", sentences("{word}\t{tag}"), {"tag_format": "conll"}),
        (
            "germeval.tsv",
            sentences("{n}\t{word}\t{tag}\tO", "#\thttp://a.de\t[2009-10-17]"),
            {"tag_format": "conll", "tokens_column": "2", "tags_column": "3"},
        ),
        ("comments.conll", sentences("{word} _ _ {tag}", "# id 1\tdomain=en"), {"tag_format": None}),
        (
            "ner_dataset.csv",
            "Sentence #,Word,POS,Tag\n" + sentences("{n},{word},NN,{tag}"),
            {"sentence_column": "Sentence #", "tokens_column": "Word", "tags_column": "Tag"},
        ),
    ],
)
def test_a_word_on_each_line_or_row_is_token_classification(name: str, content: str, settings: dict[str, Any]) -> None:
    Path(name).write_text(content)
    if name.endswith(".csv"):
        starts = iter(range(40))
        numbered = re.sub("(?m)^1,", lambda _: f"Sentence: {next(starts)},", re.sub("(?m)^[2-9],", ",", content))
        Path(name).write_text(numbered.replace("\n\n", "\n"))
    written = write_recipe(name, [])
    # 14 sentences begin with Ada, 13 with Lovelace, and 13 with walks.
    assert dict(written.found.counts) == {"B-LOC": 40, "B-PER": 14, "I-PER": 27, "O": 80}
    assert written.found.num_samples == 40
    data = yaml.safe_load(written.path.read_text())["data"]
    assert {key: data.get(key) for key in settings} == settings


def test_a_tsv_without_blank_lines_is_a_table() -> None:
    Path("a.tsv").write_text("".join(f"text number {n} is long\t{'OX'[n % 2]}\n" for n in range(40)))
    assert write_recipe("a.tsv", []).recipe.task == "text-classification"


def write_aligned(folder: str, *names: str, lines: int = 40) -> None:
    Path(folder).mkdir(exist_ok=True)
    for name in names:
        Path(folder, name).write_text("".join(f"a text of {name.rpartition('.')[2]} {n}\n" for n in range(lines)))


@pytest.mark.parametrize(
    ("names", "path", "flags", "train", "target", "held_out"),
    [
        ("train.de train.en val.de val.en test.de test.en", "a", {"text": "de"}, "a/train.de", "en", "a/val.de"),
        ("train.de train.en val.de val.en", "a", {"label": "de"}, "a/train.en", "de", "a/val.en"),
        ("train.de train.en", "a/train.en", {}, "a/train.en", "de", None),
        ("corpus.en corpus.fr corpus.de", "a", {"text": "fr", "label": "de"}, "a/corpus.fr", "de", None),
        ("corpus.en corpus.fr corpus.de", "a/corpus.en", {"label": "de"}, "a/corpus.en", "de", None),
        ("train.src train.tgt dev.src dev.tgt", "a", {}, "a/train.src", "tgt", "a/dev.src"),
        ("train.source train.target", "a", {}, "a/train.source", "target", None),
        ("train.pl train.en", "a", {"text": "pl"}, "a/train.pl", "en", None),
        ("train.en_US train.pt-BR", "a", {"text": "pt-BR"}, "a/train.pt-BR", "en_US", None),
        ("a.left a.right", "a", {"text": "left", "label": "right", "task": "seq2seq"}, "a/a.left", "right", None),
    ],
)
def test_files_with_a_text_on_each_line_are_translations(
    names: str, path: str, flags: dict[str, str], train: str, target: str, held_out: str | None
) -> None:
    write_aligned("a", *names.split())
    given = {key: (value,) for key, value in flags.items() if key != "task"}
    written = write_recipe(path, [], **given, task=flags.get("task"))  # type: ignore[arg-type]
    data = written.recipe.data
    assert (written.recipe.task, data.train, data.target_suffix, data.eval) == ("seq2seq", train, target, held_out)
    assert written.found.num_samples == 40
    assert written.found.test == ("a/test.de" if "test.de" in names else None)
    assert not any(f".{target}" in each for each in written.found.unused or ())


@pytest.mark.parametrize(
    ("names", "path", "named"),
    [
        ("train.de train.en", "a", "--text de --label en|--text en --label de|--task text-classification"),
        ("a.de a.en b.de b.en", "a", "--text de --label en"),
        ("train.de.gz train.en.gz", "a", "gunzip a/*.gz"),
        ("x.aa y.bb", "a", "--task text-classification|--task seq2seq"),
    ],
)
def test_an_open_direction_and_packed_or_other_files_are_refused(names: str, path: str, named: str) -> None:
    write_aligned("a", *names.split())
    refused(write_recipe, path, [], named=named)


def test_classes_by_suffix_are_no_translations() -> None:
    write_aligned("rt", "rt.pos", "rt.neg")
    assert write_recipe("rt", []).recipe.task == "text-classification"
    write_aligned("lid", "corpus.de", "corpus.en", "corpus.fr")
    assert write_recipe("lid", [], task="text-classification").found.counts == {"de": 40, "en": 40, "fr": 40}


def test_tokens_of_a_text_with_a_class_are_no_annotations() -> None:
    rows = rows_of(
        lambda text, spans: {"text": text, "label": "AB"[len(spans) > 0], "tokens": [{"start": 0, "end": 3}]}
    )
    write_jsonl(Path("a.jsonl"), rows)
    assert write_recipe("a.jsonl", [], text=("text",), label=("label",)).recipe.task == "text-classification"


def test_programs_of_the_same_name_are_no_translations() -> None:
    write_aligned("src", "tool.pl", "tool.cs")
    assert write_recipe("src", []).recipe.task == "causal-lm"


def test_a_column_of_languages_needs_a_direction() -> None:
    rows = [{"id": n, "translation": {"en": f"one more text {n}", "de": f"ein Text mehr {n}"}} for n in range(40)]
    write_jsonl(Path("a.jsonl"), rows)
    refused(write_recipe, "a.jsonl", [], named="--text en --label de, or --text de --label en")
    for number, given in enumerate(({"text": ("de",)}, {"label": ("en",)}, {"text": ("de",), "label": ("en",)})):
        written = write_recipe("a.jsonl", [], file=f"{number}.yaml", **given)  # type: ignore[arg-type]
        data = written.recipe.data
        assert (written.recipe.task, data.translation_column) == ("seq2seq", "translation")
        assert (data.source_column, data.target_column) == ("de", "en")
        assert written.found.unused == ("column 'id'",)
