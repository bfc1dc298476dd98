"""Readers of files from strangers, with values that no reader expects in each place of a valid file.

A reader may raise an error for its user, or leave the value out. Any other exception would be a traceback.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import pytest

from accel_train.checkpoint.resume import read_state
from accel_train.checkpoint.store import check
from accel_train.cli.main import main
from accel_train.core.errors import CheckpointError
from accel_train.core.json_io import read_json
from accel_train.data.images.pairs import pairs_pool
from accel_train.data.text.tokenizers import load_tokenizer
from accel_train.experiments.finetune.masks import find_polygons
from accel_train.experiments.finetune.recipe import asked_of, minimal_recipe
from accel_train.inference.finished_run import recipe_of_trained
from accel_train.model.pretrained import pretrained_config
from accel_train.observe.incident_record import Finding, HeavySample, main_facts, next_actions, read_incident
from accel_train.tasks.multiple_choice.config import MultipleChoiceData
from accel_train.tasks.multiple_choice.data import read_choices
from accel_train.tasks.question_answering.config import QuestionAnsweringData
from accel_train.tasks.question_answering.data import read_questions
from accel_train.tasks.sentence_embedding.folder import pooling_of
from accel_train.tasks.text_classification.data import load_labelled_texts
from accel_train.tasks.token_classification.config import TokenClassificationData
from accel_train.tasks.token_classification.data import read_sentences, tag_scheme
from tests.support.boxes import coco_content, read_boxes, write_images
from tests.support.commands import call
from tests.support.number_faults import incident_with
from tests.support.runs import refused, sources_of, tiny_recipe, write_jsonl

pytestmark = pytest.mark.usefixtures("empty_folder")

LONG = "x" * 5000
VALUES = {
    "a number of 400 digits": "1" + "0" * 400,
    "a negative number of 5,000 digits": "-" + "9" * 5000,
    "an infinite number": "1e999",
    "a number of 64 bits and more": str(2**70),
    "a name of 5,000 letters": json.dumps(LONG),
    "a name with a zero byte": '"a\\u0000b"',
    "half of a character": '"\\ud800"',
    "null": "null",
    "a list": "[[]]",
    "an object": '{"a": {}}',
}
DEEP = {"nested 200,000 deep": "[" * 200_000, "nested 600 deep": '{"a":' * 600 + "1" + "}" * 600}
MOST_PLACES = 25
"""Places of a file that are tried. Of more, as many are drawn."""


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value in lists and objects."""
    yield way
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*way, key))


def with_value(document: Any, way: tuple[Any, ...], text: str) -> str:
    """Return a document as JSON, with a text in place of one value."""
    if not way:
        return text
    copy = json.loads(json.dumps(document))
    at = copy
    for key in way[:-1]:
        at = at[key]
    at[way[-1]] = "PLACE"
    return json.dumps(copy).replace('"PLACE"', text)


def hostile(document: Any) -> Iterator[tuple[str, str]]:
    """Yield (description, text) for each hostile value in each place of a document."""
    found = list(places(document))
    found = found if len(found) <= MOST_PLACES else [(), *random.Random(0).sample(found, MOST_PLACES)]
    for number, way in enumerate(found):
        for name, text in VALUES.items():
            yield f"{name} at {way}", with_value(document, way, text)
        if number < 3:
            for name, text in DEEP.items():
                yield f"{name} at {way}", with_value(document, way, text)


def survives(read: Callable[[], object], file: Path, document: Any, *, lines: int = 0) -> int:
    """Check a reader with all hostile values of a file, and return how often it refused.

    `lines`: the document is the first of so many lines.
    """
    original = json.dumps(document)
    file.write_text(original + f"\n{original}" * lines)
    read()
    refused = 0
    for description, text in hostile(document):
        file.write_text(text + f"\n{original}" * lines)
        error = error_of(read)
        refused += error is not None
        assert error is None or is_for_users(error), f"{file.name}, {description}: {error!r:.300}"
    return refused


def error_of(read: Callable[[], object]) -> Exception | None:
    try:
        read()
    except Exception as error:
        return error
    return None


def is_for_users(error: Exception) -> bool:
    """Return whether an error was written by this package, not passed on from Python's parsers."""
    is_plain = isinstance(error, ValueError | CheckpointError) and not isinstance(error, UnicodeError | JSONDecodeError)
    words = ("Exceeds the limit", "invalid literal", "not enough values", "too many values")
    return is_plain and bool(str(error).strip()) and not str(error).startswith(words)


def test_coco_boxes(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    file = tmp_path / "annotations.json"
    assert survives(lambda: read_boxes(str(file)), file, coco_content()) > 100


def test_a_table_of_boxes(tmp_path: Path) -> None:
    write_images(tmp_path)
    row = {
        "file_name": "a.png",
        "objects": {"bbox": [[4, 6, 10, 8]], "category": [1], "area": [80.0], "iscrowd": [0]},
    }
    file = tmp_path / "metadata.jsonl"
    other = json.dumps({**row, "file_name": "b.png", "objects": {"bbox": [], "category": []}})

    def read() -> None:
        file.write_text(f"{file.read_text()}\n{other}\n")
        read_boxes(str(tmp_path))

    assert survives(read, file, row) > 50


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.yaml", "path: {tmp}\ntrain: images\nnc: 2\nnames: {0: cat, 1: dog}\n"),
        ("labels/a.txt", "0 0.5 0.5 0.3 0.3\n"),
        ("classes.txt", "cat\ndog\n"),
    ],
)
@pytest.mark.parametrize("value", ["1" + "0" * 400, "9" * 5000, LONG, "1e999", "\u00b2", "-1", "nan", "\0"])
def test_yolo_files(name: str, text: str, value: str, tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 0.3 0.3\n")
    text = text.replace("{tmp}", str(tmp_path))
    words = [word for word in text.replace("{", " ").replace("}", " ").split() if not word.endswith(":")]
    for word in words:
        (tmp_path / name).write_text(text.replace(word, value, 1))
        train = tmp_path / (name if name == "data.yaml" else "images")
        error = error_of(partial(read_boxes, str(train)))
        assert error is None or is_for_users(error)


@pytest.mark.parametrize("class_id", [10**4, 4 * 10**9, 10**300])
def test_a_class_number_far_above_the_number_of_classes_is_a_fault_of_its_line(class_id: int, tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    (tmp_path / "labels").mkdir()
    label = tmp_path / "labels" / "a.txt"
    label.write_text("1019 0.5 0.5 0.3 0.3\n0 0.2 0.2 0.1 0.1\n")
    assert len(read_boxes(str(tmp_path / "images")).label_names) == 1020
    label.write_text(f"0 0.5 0.5 0.3 0.3\n{class_id} 0.2 0.2 0.1 0.1\n")
    refused(read_boxes, str(tmp_path / "images"), named="labels/a.txt, line 2: the class id")
    shutil.rmtree(tmp_path / "labels")
    row = {"objects": {"bbox": [[4, 6, 10, 8]] * 2, "category": [1, class_id]}}
    rows = [{"file_name": name, **row} for name in ("a.png", "b.png")]
    write_jsonl(tmp_path / "images" / "metadata.jsonl", rows)
    refused(read_boxes, str(tmp_path / "images"), named="object 2: the class id")


def test_labels_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    recipe = tiny_recipe(tmp_path, task="text-classification", data={"train": str(file), "label_column": "label"})
    for label in (1, 0.5, "a", ["a", "b"]):
        rows = [{"text": f"text {number}", "label": label} for number in range(6)]
        second = ["c"] if isinstance(label, list) else "b" if label == "a" else 0
        others = "".join(json.dumps({**row, "label": second}) + "\n" for row in rows)

        def read(others: str = others) -> None:
            file.write_text(f"{file.read_text()}\n{others}")
            load_labelled_texts(recipe, None)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("accel_train.tasks.text_classification.data.shared_sides", lambda *_: [])
            survives(read, file, rows[0])


def test_answers_and_tags(tmp_path: Path) -> None:
    answer = {"text": "b", "answer_start": 2}
    squad = {"data": [{"paragraphs": [{"context": "a b", "qas": [{"id": "1", "question": "?", "answers": [answer]}]}]}]}
    row = {"question": "?", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}, "id": "1"}
    for file, document in ((tmp_path / "q.json", squad), (tmp_path / "q.jsonl", row)):
        data = QuestionAnsweringData(train=str(file))

        def questions(data: QuestionAnsweringData = data) -> None:
            read_questions(sources_of(data), data, key="data.train")

        assert survives(questions, file, document) > 20
    tags = tmp_path / "t.jsonl"
    tagged = TokenClassificationData(train=str(tags))

    def sentences() -> None:
        rows = read_sentences(sources_of(tagged), tagged, key="data.train", notes=[])
        tag_scheme(rows, sources_of(tagged), tagged)

    assert survives(sentences, tags, {"tokens": ["a", "b"], "tags": [0, 1]}) > 5


@pytest.mark.parametrize("label", ["9" * 5000, "\u0663", "\u00b2", "1e999", LONG, "nan"])
def test_labels_and_endings_of_a_table(label: str, tmp_path: Path) -> None:
    file = tmp_path / "d.csv"
    rows = "".join(f"text {number},a,b,{number % 2}\n" for number in range(8))
    file.write_text(f"sentence,ending0,ending1,label\ntext,a,b,{label}\n{rows}")
    data = MultipleChoiceData(train=str(file), text_columns=("sentence",), choices_columns=("ending0", "ending1"))
    error = error_of(lambda: read_choices(sources_of(data), data, key="data.train"))
    assert error is not None
    assert is_for_users(error)
    assert main(["finetune", str(file), "--dry-run", "--task", "text-classification"]) in (0, 2)


LABELME = {
    "shapes": [{"label": "cat", "points": [[1, 1], [9, 1], [9, 9]], "shape_type": "polygon"}],
    "imagePath": "a.png",
    "imageWidth": 40,
    "imageHeight": 30,
}
_THINGS = [
    {"id": 1, "image_id": 1, "category_id": 1, "segmentation": [[1, 1, 9, 1, 9, 9]], "iscrowd": 0},
    {"id": 2, "image_id": 1, "category_id": 2, "bbox": [1, 1, 8, 8], "iscrowd": 1},
]
COCO = {
    "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 30}],
    "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    "annotations": _THINGS,
}


@pytest.mark.parametrize("document", [LABELME, COCO], ids=["labelme", "COCO"])
def test_polygons(document: Any, tmp_path: Path) -> None:
    write_images(tmp_path / "drawn", {"a.png": (40, 30)})

    def read() -> None:
        shutil.rmtree(tmp_path / "masks", ignore_errors=True)
        (tmp_path / "masks").mkdir()
        found = find_polygons(asked_of("drawn", minimal_recipe("drawn", [])), "drawn")
        if found is not None:
            found.write(tmp_path / "masks")

    assert survives(read, tmp_path / "drawn" / "a.json", document) > 50


def test_class_names_of_masks(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        write_images(tmp_path / folder, {"a.png": (8, 8)})
    file = tmp_path / "masks" / ".classes.json"
    assert survives(lambda: pairs_pool(tmp_path / "images", tmp_path / "masks"), file, ["sky", "road"]) > 10


@pytest.mark.parametrize("name", ["summary.json", "evaluation.json", "metrics.jsonl", "events.jsonl", "launches.jsonl"])
def test_report_and_watch_of_a_run(name: str, run: Path) -> None:
    file, generator = run / name, random.Random(1)
    lines = file.read_text().splitlines() if name.endswith("l") else [file.read_text()]
    document = json.loads(lines[0])
    leaves = [
        way for way in places(document) if way and not any(each[: len(way)] == way != each for each in places(document))
    ]
    values = list(VALUES.items())
    for shift in range(len(values)):
        text, tried = lines[0], dict[tuple[Any, ...], tuple[int, str]]()
        for number, way in enumerate(leaves):
            if generator.random() < 0.3:
                text = with_value(json.loads(text), way, json.dumps(f"PLACE{number}"))
                tried[way] = number, values[(number + shift) % len(values)][1]
        for number, value in tried.values():
            text = text.replace(f'"PLACE{number}"', value)
        file.write_text("\n".join([text, *lines[1:]]) + "\n")
        call("report", run)
        assert "Traceback" not in call("watch", run, "--once").err, tried


def test_files_of_a_checkpoint(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000002"
    manifest = read_json(folder / "manifest.json")

    def read_manifest() -> None:
        status = check(folder)
        if status.problem:
            raise ValueError(status.problem)

    survives(read_manifest, folder / "manifest.json", manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    trainer = read_json(folder / "trainer.json")
    survives(lambda: read_state(folder), folder / "trainer.json", trainer)


def test_configurations_of_a_model_folder(run: Path) -> None:
    model = run / "model"
    recipe = tiny_recipe(run.parent, task="causal-lm", model={"pretrained": str(model), "config": None})
    for name, read in {
        "config.json": lambda: (pretrained_config(recipe), recipe_of_trained(run)),
        "tokenizer_config.json": lambda: load_tokenizer(str(model), trust_remote_code=False),
        "tokenizer.json": lambda: load_tokenizer(str(model), trust_remote_code=False),
    }.items():
        document = read_json(model / name)
        survives(read, model / name, document)
        (model / name).write_text(json.dumps(document))
    (model / "modules.json").write_text("[" * 5000)
    refused(pooling_of, recipe.model, named="modules.json")


def test_an_incident(tmp_path: Path) -> None:
    finding = Finding(0, "cpu", heaviest=[HeavySample(1, 0, 2.0, 3.0)])
    file, incident = tmp_path / "incident.json", incident_with(kind="spike", processes=[finding])

    def read() -> None:
        found = read_incident(tmp_path)
        assert main_facts(found)
        assert next_actions(found)

    assert survives(read, file, asdict(incident)) > 50
