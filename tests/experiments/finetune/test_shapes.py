"""`finetune` and the forms of data that people have: `benchmarks.shapes`."""

from pathlib import Path
from typing import Any

import pytest

from accel_train.data import tables
from accel_train.data.sources import resolve_sources
from accel_train.data.tables import read_rows
from accel_train.experiments.finetune.recipe import asked_of, minimal_recipe
from accel_train.experiments.finetune.start import write_recipe
from accel_train.experiments.finetune.texts import are_classes, classes_by_suffix
from accel_train.experiments.finetune.tree import Tree
from benchmarks import shapes
from benchmarks.shapes import SHAPES, Shape, read
from tests.support.runs import write_jsonl


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.write.__name__)
def test_a_form_of_data_is_read_right_or_refused_with_the_reason(shape: Shape) -> None:
    outcome = read(shape)
    assert outcome.verdict == ("right" if shape.task else "refused"), outcome.shown


@pytest.mark.parametrize("task", [None, "text-classification"])
def test_a_file_for_each_class_is_read_line_by_line(task: str | None) -> None:
    shapes.files_of_classes()
    written = write_recipe("names", ["--data.num_workers", "0"], task=task)
    assert ("Dutch, Greek, Polish" in written.found.why) is (task is None)
    assert (written.recipe.data.lines, written.recipe.data.train) == ("file_names", "names")
    (source,) = resolve_sources("names", written.recipe.data, key="data.train")
    rows = [(row.cells, row.where) for row in read_rows(source, ("label", "text"), written.recipe.data)]
    lines = {path.stem: path.read_text().split("\n")[:-1] for path in sorted(Path("names").glob("*.txt"))}
    assert rows == [
        ((name, text), f"names/{name}.txt:{number}")
        for name, texts in lines.items()
        for number, text in enumerate(texts, start=1)
    ]
    assert written.found.counts == {name: len(texts) for name, texts in lines.items()}


def test_each_line_of_a_large_table_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(Path("rows.jsonl"), ({"text": f"the {n} is good to me", "label": n % 3} for n in range(3000)))
    lines, parse = list[str](), tables.parse_json

    def noted(line: str, **options: Any) -> Any:
        lines.append(line)
        return parse(line, **options)

    monkeypatch.setattr(tables, "parse_json", noted)
    found = write_recipe("rows.jsonl", []).found
    assert found.counts == {"0": 1000, "1": 1000, "2": 1000}
    # The first few hundred lines are also looked at before.
    assert len({*lines}) == 3000
    assert len(lines) < 4000


def test_keys_that_some_rows_lack_are_left_out_and_named(folder: Path) -> None:
    rows = [{"text": f"the {n} is good to me", "label": n % 3, "": 1} for n in range(60)]
    rows[7] = {"label": 1, "text": "this one is new to me", "more": "x", "": 2}
    rows[9]["later"] = 3
    for row in rows[:5]:
        row["early"] = 1
    write_jsonl(folder / "rows.jsonl", rows)
    assert write_recipe("rows.jsonl", []).found.notes == (
        "column 'early' is left out: rows.jsonl:6 does not have it",
        "column 'more' is left out: rows.jsonl:1 does not have it",
        "column 'later' is left out: rows.jsonl:1 does not have it",
    )


def _file(word: str, form: str = "{word} number {n} was good.", count: int = 0) -> list[str]:
    return [form.format(word=word, n=n, mark="{" if n % 2 else ";") for n in range(count or 30 + len(word))]


NOT_CLASSES = {
    "chapters by name": {f"Chapter {word}": _file(word) for word in ("One", "Three")},
    "chapters of wrapped prose": {word: _file(word, "and {word} went {n} miles on") for word in ("Escape", "Storm")},
    "verse": {word: _file(word, "O {word}, thou {n} of hours,") for word in ("Winter", "Autumns")},
    "corpus in parts": {f"part-{word}": _file(word) for word in ("north", "east")},
    "splits": {word: _file(word) for word in ("train", "test")},
    "held-out split under another name": {word: _file("any", count=30 + len(word)) for word in ("most", "remainder")},
    "logs": {word: _file(word, "2024-05-01 10:00:{n} {word} started") for word in ("gateway", "worker")},
    "source code": {word: _file(word, "int {word}_{n}() {mark}") for word in ("parser", "lexer")},
    "paragraphs": {word: _file(word, "{word} {n} " + "is long and " * 20 + "ends.") for word in ("Dutch", "Greeks")},
    "translations, line by line": {word: _file(word, count=40) for word in ("English", "Greek")},
    "short lists": {word: _file(word, count=10 + len(word)) for word in ("red", "green")},
    "documents between blank lines": {word: [*_file(word), "", *_file(word)] for word in ("Dutch", "Greeks")},
}


@pytest.mark.parametrize("name", NOT_CLASSES)
def test_text_files_that_may_be_something_else_are_not_taken_for_classes(name: str) -> None:
    folder = Path("texts")
    folder.mkdir()
    for stem, lines in NOT_CLASSES[name].items():
        (folder / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    asked = asked_of("texts", minimal_recipe("texts", []))
    assert not are_classes({path.stem: path for path in folder.iterdir()}, asked)
    reading = read(Shape(name, lambda: "texts")).shown
    assert reading == "causal-lm" or "--task text-classification" in reading


def test_suffixes_are_classes_if_they_are_usual_labels_or_the_task_is_named() -> None:
    for place, suffixes in (("labels", ("pos", "neg")), ("words", ("subj", "obj")), ("shards", ("0", "1"))):
        Path(place).mkdir()
        for suffix in suffixes:
            Path(place, f"text.{suffix}").write_text("\n".join(_file(suffix)) + "\n")

    def found(place: str, task: str | None = None) -> list[str]:
        converted = classes_by_suffix(asked_of(place, minimal_recipe(place, []), task=task), Tree(Path(place)))
        return [] if converted is None else [Path(name).stem for name in converted.files]

    assert [found(place) for place in ("labels", "words", "shards")] == [["neg", "pos"], [], []]
    assert found("words", "text-classification") == ["obj", "subj"]
    assert (found("labels", "causal-lm"), found("shards", "text-classification")) == ([], ["0", "1"])
    Path("labels/text.pos").write_text("and the line goes on\n" * 30)
    assert found("labels") == []
    Path("labels/other.pos").write_text("\n".join(_file("other")))
    assert found("labels", "text-classification") == []
    written = write_recipe("words", [], task="text-classification")
    assert written.recipe.data.train == "runs/words-data"
    assert written.found.counts == {"subj": 34, "obj": 33}
