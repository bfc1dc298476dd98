"""The forms of data that people bring to `accel-train finetune`, and what it makes of each.

52 forms of files and folders that public data sets have, made anew with other contents. `python -m benchmarks.shapes`
writes each into an empty folder, asks `finetune` for its reading without a flag, and prints the table. A reading is
right if the task and every named setting are as expected. A refusal is right if its message names the reason.
"""

import argparse
import json
import os
import random
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from accel_train.experiments.finetune.recipe import asked_of, minimal_recipe
from accel_train.experiments.finetune.recognise import recognise
from accel_train.experiments.finetune.unpack import unpacked
from benchmarks.common import markdown_table

_ROWS = 60
_SYLLABLES = ["ba", "de", "fo", "ri", "lu", "ma", "ne", "so", "ti", "ga", "po", "ra"]
_WORDS = [one + two for one in _SYLLABLES for two in _SYLLABLES]
EMOTIONS = ["anger", "fear", "joy", "sadness", "trust"]
INSULTS = ["toxic", "obscene", "threat", "insult"]
_MOODS = {
    "positive": ["great", "lovely", "fine"],
    "negative": ["awful", "poor", "broken"],
    "neutral": ["plain", "usual", "so-so"],
}


class Shape(NamedTuple):
    """One form: how it is written, and the right reading or refusal."""

    name: str
    write: Callable[[], str]
    """Write the data into the current folder, and return the path to give to finetune."""
    task: str | None = None
    """Right task. None if the form is refused."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings that the reading must have."""
    refusal: str = ""
    """Expression that the message of the refusal must match."""


class Outcome(NamedTuple):
    """The reading of one form."""

    verdict: str
    """Right, refused, or wrong."""
    shown: str
    """Task and columns, or the message."""


def read(shape: Shape) -> Outcome:
    """Write a form into the current folder, and return what finetune makes of it without a flag."""
    path = shape.write()
    try:
        place, _, _ = unpacked(asked_of(path, minimal_recipe(path, [])), None)
        found = recognise(asked_of(place, minimal_recipe(place, [])))
    except ValueError as error:
        message = str(error)
        is_right = shape.task is None and re.search(shape.refusal, message) is not None
        return Outcome("refused" if is_right else "wrong", message)
    settings = {name: choice.value for name, choice in found.settings.items()}
    is_right = found.task == shape.task and all(settings.get(name) == value for name, value in shape.settings)
    shown = "; ".join(f"{name}: {value}" for name, value in settings.items() if name != "data.train")
    return Outcome("right" if is_right else "wrong", f"{found.task}; {shown}" if shown else found.task)


def _text(number: int, mood: str | None = None, words: int = 9) -> str:
    draw = random.Random(number)
    chosen = [draw.choice(_WORDS) for _ in range(words)]
    if mood is not None:
        chosen[draw.randrange(words)] = draw.choice(_MOODS[mood])
    return f"{' '.join(chosen)} {number}"


def _mood(number: int) -> str:
    return [*_MOODS][number % 3 if number % 5 else 0]


def _new(name: str) -> Path:
    """Make the folders above a file, and return its path."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _lines(name: str, lines: list[str], encoding: str = "utf-8") -> str:
    _new(name).write_bytes(("\n".join(lines) + "\n").encode(encoding))
    return name


def _table(name: str, header: str, row: Callable[[int], str], encoding: str = "utf-8") -> str:
    """Write a header and a line for each number."""
    return _lines(name, [header, *map(row, range(_ROWS))], encoding)


def _rows(name: str, rows: list[Any]) -> str:
    return _lines(name, [json.dumps(row) for row in rows])


def _array(name: str, rows: Any) -> str:
    return _lines(name, [json.dumps(rows)])


def _image(name: str, number: int) -> None:
    pixels = np.random.default_rng(number).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(_new(name))


def _mask(name: str, number: int, classes: tuple[int, ...] = (0, 1, 2), *, has_palette: bool = False) -> None:
    image = Image.fromarray(np.random.default_rng(number).choice(np.array(classes, np.uint8), (30, 40)))
    if has_palette:
        image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
    image.save(_new(name))


def sms() -> str:
    """A tsv without a header, with quotes that csv does not allow."""
    texts = [f'"{_text(n)}' if n % 7 == 0 else _text(n) for n in range(_ROWS)]
    return _lines("sms.tsv", [f"{'spam' if n % 4 == 0 else 'ham'}\t{text}" for n, text in enumerate(texts)])


def tweets() -> str:
    """Fifteen columns, two of which may be the label."""
    header = "tweet_id,airline_sentiment,confidence,airline,name,retweet_count,text,created,user_timezone"
    return _table(
        "Tweets.csv",
        header,
        lambda n: (
            f"{570000 + n},{_mood(n)},0.{n % 10}5,{('United', 'Delta', 'Virgin')[n % 7 % 3]},user{n},0,"
            f"{_text(n, _mood(n))},"
            f"2015-02-{n % 28 + 1:02} 11:35:{n:02},Zone {n}"
        ),
    )


def stars() -> str:
    """A tsv of ratings, dates, variations, and a column of feedback."""
    header = "rating\tdate\tvariation\tverified_reviews\tfeedback"
    return _table("alexa.tsv", header, lambda n: f"{n % 5 + 1}\t31-Jul-18\tCharcoal {n}\t{_text(n)}\t{int(n % 5 > 1)}")


def broken_row() -> str:
    """A tsv with a space in place of the tab in one row."""
    return _table("Restaurant_Reviews.tsv", "Review\tLiked", lambda n: f"{_text(n)}{' ' if n == 40 else chr(9)}{n % 2}")


def titanic() -> str:
    """Numbers and categories, with names as the only text."""
    return _table(
        "TitanicTrain.csv",
        "PassengerId,Survived,Pclass,Name,Sex,Age,SibSp,Ticket,Fare,Embarked",
        lambda n: (
            f'{n},{n % 2},{n % 3 + 1},"{_text(n, words=3)}, Mr. {n}",{("male", "female")[n % 2]},{20 + n},{n % 2},'
            f"A/5 {n},7.25,{'SCQ'[n % 3]}"
        ),
    )


def counts_beside_class() -> str:
    """An index without a name, counts of votes, a class, and the text."""
    header = ",count,hate_speech,offensive_language,neither,class,tweet"
    return _table("labeled_data.csv", header, lambda n: f"{n},3,{n % 3},0,{3 - n % 3},{n % 3},{_text(n)}")


def table_in_txt() -> str:
    """A table with tabs that is called .txt."""
    return _table(
        "SICK_train.txt",
        "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tjudgment",
        lambda n: f"{n}\t{_text(n)}\t{_text(n + 100)}\t{n % 40 / 10 + 1}\t{['NEUTRAL', 'ENTAILMENT'][n % 2]}",
    )


def answers() -> str:
    """Questions with candidate answers: two texts and a label."""
    return _table("train.csv", "qtext,atext,label", lambda n: f"{_text(n // 4)},{_text(n + 50)},{n % 2}")


def train_and_test() -> str:
    """Folder with train.csv, test.csv, and a list of the classes."""
    for name in ("train", "test"):
        _table(f"banking/{name}.csv", "text,category", lambda n: f"{_text(n)},intent {n % 6}")
    return _array("banking/categories.json", [f"intent {n}" for n in range(6)]) and "banking"


def spam() -> str:
    """A csv in Windows-1252 with unnamed columns at the end."""
    return _table("spam.csv", "v1,v2,,,", lambda n: f"{'spam' if n % 4 == 0 else 'ham'},{_text(n)} \xa35,,,", "cp1252")


def a_missing_label() -> str:
    """A csv whose one row has no label."""
    return _table(
        "Language Detection.csv",
        "Text,Language",
        lambda n: f"{_text(n)},{'' if n == 30 else ['English', 'Danish', 'Dutch'][n % 3]}",
    )


def liar() -> str:
    """Folder with train.tsv, valid.tsv, test.tsv without a header; raw quotes and many columns."""
    kinds = ("true", "false", "half-true")
    for part in ("train", "valid", "test"):
        rows = [
            f"{n}.json\t{kinds[n % 3]}\t{chr(34) if n % 9 == 0 else ''}{_text(n)}\tsubject {n}\tspeaker {n}\t{n % 4}"
            f"\t{n % 5}"
            for n in range(_ROWS)
        ]
        _lines(f"liar/{part}.tsv", rows)
    return "liar"


def names_of_numbers() -> str:
    """Folder with a table of numbered classes and another of their names."""
    numbered_classes("medical/medical_tc_train.csv")
    _lines(
        "medical/medical_tc_labels.csv", ["condition_label,condition_name", "1,neoplasms", "2,digestive", "3,nerves"]
    )
    return "medical"


def numbered_classes(name: str = "medical_tc_train.csv") -> str:
    """A table of numbered classes and texts."""
    return _table(name, "condition_label,medical_abstract", lambda n: f"{n % 3 + 1},{_text(n)}")


def _bits(number: int, count: int) -> list[str]:
    """Return zeros and ones."""
    return [str(int((number + k) % (k + 2) == 0)) for k in range(count)]


def emotions(name: str = "2018-E-c-train.txt") -> str:
    """A table with a column of zeros and ones for each label."""
    return _table(name, "\t".join(["ID", "Tweet", *EMOTIONS]), lambda n: "\t".join([f"{n}", _text(n), *_bits(n, 5)]))


def toxic() -> str:
    """The same as csv, as of toxic comments."""
    header = ",".join(["id", "comment_text", *INSULTS])
    return _table("toxic.csv", header, lambda n: ",".join([f"{n:x}f", _text(n), *_bits(n, 4)]))


def _sentences(name: str, seed: int = 0) -> str:
    lines = []
    for number in range(_ROWS):
        for place, word in enumerate(_text(number + seed).split()):
            lines.append(f"{word}\t{['O', 'B-person', 'O', 'B-place', 'I-place'][place % 5]}")
        lines.append("")
    return _lines(name, lines)


def entities_in_a_folder() -> str:
    """CoNLL files for training, validation, and test."""
    for part, seed in (("train", 0), ("dev", 100), ("test", 200)):
        _sentences(f"wnut/{part}.conll", seed)
    return "wnut"


def entities() -> str:
    """One CoNLL file."""
    return _sentences("wnut17train.conll")


def aligned_lines() -> str:
    """Line-aligned files for words, tags, and intents."""
    tags = ("B-good", *["O"] * 40)
    for part in ("train", "valid"):
        _lines(f"atis/{part}/seq.in", [_text(n) for n in range(_ROWS)])
        _lines(f"atis/{part}/seq.out", [" ".join(tags[: len(_text(n).split())]) for n in range(_ROWS)])
        _lines(f"atis/{part}/label", [f"intent{n % 3}" for n in range(_ROWS)])
    return "atis"


def files_of_classes() -> str:
    """One file per class, with a name on each line."""
    for seed, name in enumerate(("Dutch", "Greek", "Polish")):
        count = _ROWS - 7 * seed
        _lines(f"names/{name}.txt", [_text(_ROWS * seed + n, words=1).split()[0].title() for n in range(count)])
    return "names"


def _instructions(name: str, given: Callable[[int], str]) -> str:
    return _array(name, [{"instruction": _text(n), "input": given(n), "output": _text(n + 50)} for n in range(_ROWS)])


def alpaca() -> str:
    """An array of instruction, input, output."""
    return _instructions("alpaca_en_demo.json", lambda n: _text(n + 9) if n % 3 == 0 else "")


def sharegpt_with_tools() -> str:
    """An array of conversations with from and value, and descriptions of tools."""
    rows = [
        {
            "conversations": [
                {"from": "human", "value": _text(n)},
                {"from": "function_call", "value": json.dumps({"name": "look_up", "arguments": {"word": _WORDS[n]}})},
                {"from": "observation", "value": json.dumps({"found": n})},
                {"from": "gpt", "value": _text(n + 5)},
            ],
            "tools": json.dumps([{"name": "look_up", "parameters": {"type": "object"}}] if n % 3 else []),
        }
        for n in range(_ROWS)
    ]
    return _array("glaive_toolcall_en_demo.json", rows)


def preferences() -> str:
    """Chosen and rejected answers."""
    rows = [
        {
            "conversations": [{"from": "human", "value": _text(n)}],
            "chosen": {"from": "gpt", "value": _text(n + 1)},
            "rejected": {"from": "gpt", "value": _text(n + 2)},
        }
        for n in range(_ROWS)
    ]
    return _array("dpo_en_demo.json", rows)


def judged_answers() -> str:
    """Chats with a label that is false for bad answers."""
    rows = [
        {
            "messages": [{"role": "user", "content": _text(n)}, {"role": "assistant", "content": _text(n + 1)}],
            "label": n % 2 == 0,
        }
        for n in range(_ROWS)
    ]
    return _array("kto_en_demo.json", rows)


def identity() -> str:
    """An array of instruction, empty input, output."""
    return _instructions("identity.json", lambda n: "")


def content_parts() -> str:
    """Messages whose contents are lists of parts."""
    rows = [
        {
            "messages": [
                {"role": role, "content": [{"type": "text", "text": _text(n)}]} for role in ("user", "assistant")
            ]
        }
        for n in range(_ROWS)
    ]
    return _rows("v1_sft_demo.jsonl", rows)


def web_text() -> str:
    """Rows with one text."""
    return _rows("c4_demo.jsonl", [{"text": _text(n, words=60)} for n in range(_ROWS)])


def article() -> str:
    """Plain text."""
    return _lines("wiki_demo.txt", [_text(n, words=40) for n in range(_ROWS)])


def squad() -> str:
    """SQuAD's own format."""
    paragraphs = []
    for number in range(_ROWS):
        context = _text(number, words=20)
        answer = " ".join(context.split()[3:5])
        answers = [{"text": answer, "answer_start": context.index(answer)}]
        paragraphs.append(
            {"context": context, "qas": [{"id": str(number), "question": _text(number + 7), "answers": answers}]}
        )
    return _array("xquad.en.json", {"data": [{"title": "t", "paragraphs": paragraphs}], "version": "1.1"})


def splits_in_one_file() -> str:
    """An object with an array for each split."""
    rows = [[_text(n), f"intent{n % 3}"] for n in range(_ROWS)]
    return _array("data_small.json", {"train": rows, "val": rows[:9], "test": rows[:9]})


def sonar() -> str:
    """Numbers and a class, without a header."""
    return _lines(
        "sonar.csv",
        [",".join(f"0.{(n * 37 + k * 11) % 997:04}" for k in range(12)) + f",{'RM'[n % 2]}" for n in range(_ROWS)],
    )


def spreadsheet() -> str:
    """A workbook of Excel with one sheet."""
    rows = [("id", "review", "label"), *((n, _text(n, _mood(n)), _mood(n)) for n in range(_ROWS))]
    cells = "".join(
        f'<row r="{r}">'
        + "".join(
            f'<c r="{"ABC"[c]}{r}"><v>{cell}</v></c>'
            if isinstance(cell, int)
            else f'<c r="{"ABC"[c]}{r}" t="inlineStr"><is><t>{cell}</t></is></c>'
            for c, cell in enumerate(row)
        )
        + "</row>"
        for r, row in enumerate(rows, start=1)
    )
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
        f'ContentType="application/'
        f'vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{office}/officeDocument" '
        f'Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets>'
        '<sheet name="S" sheetId="1" r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{office}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>{cells}</sheetData></worksheet>',
    }
    with zipfile.ZipFile("Tweets.xlsx", "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return "Tweets.xlsx"


def _movies(folder: str = "movie_reviews") -> str:
    for number in range(_ROWS):
        mood = ("positive", "negative")[number % 2]
        _lines(f"{folder}/{mood[:3]}/cv{number:03}.txt", [_text(number, mood)])
    return folder


def text_folders() -> str:
    """A text per file, in a folder per class."""
    return _movies()


def zipped() -> str:
    """The same, zipped."""
    with zipfile.ZipFile("movie_reviews.zip", "w") as archive:
        for path in sorted(Path(_movies()).rglob("*.txt")):
            archive.write(path)
    return "movie_reviews.zip"


def tarred() -> str:
    """The same, as tar.gz in a folder with a README."""
    _movies("review_polarity/txt_sentoken")
    _lines("review_polarity/README.txt", ["Reviews of films."])
    with tarfile.open("review_polarity.tar.gz", "w:gz") as archive:
        archive.add("review_polarity")
    return "review_polarity.tar.gz"


def classes_by_suffix() -> str:
    """One file per class, with the class as the suffix, and a README."""
    for seed, suffix in enumerate(("pos", "neg")):
        _lines(f"polarity/rt-polarity.{suffix}", [f"{_text(_ROWS * seed + n)} ." for n in range(_ROWS)])
    _lines("polarity/README", [_text(1, words=80)])
    return "polarity"


def no_suffix() -> str:
    """Texts without extensions."""
    for name in ("Danish-Latin1", "English-Latin1", "German-Latin1"):
        _lines(f"udhr/{name}", [_text(1, words=80)])
    return "udhr"


def unusual_suffix() -> str:
    """CoNLL with the language and the part as the suffix."""
    for part in ("train", "testa"):
        _sentences(f"conll2002/esp.{part}")
    return "conll2002"


def one_other_encoding() -> str:
    """Texts in UTF-8, one of them in Latin-1."""
    for number in range(12):
        _lines(
            f"inaugural/{1800 + 4 * number}.txt",
            [_text(number, words=80) + " caf\xe9"],
            "latin-1" if number == 5 else "utf-8",
        )
    return "inaugural"


def ants_and_bees() -> str:
    """Images in folders of classes, divided into train and val."""
    for number in range(48):
        part, kind = ("val", number // 4 % 2) if number % 4 == 0 else ("train", number % 2)
        _image(f"hymenoptera/{part}/{('ants', 'bees')[kind]}/{number}.jpg", number)
    return "hymenoptera"


def membrane() -> str:
    """image/ and label/ with the same names; masks of 0 and 255."""
    for number in range(12):
        _image(f"membrane/image/{number}.png", number)
        _mask(f"membrane/label/{number}.png", number, (0, 255))
    return "membrane"


def camvid() -> str:
    """Folders of images and annotations, divided into train and test."""
    for number in range(16):
        part = "test" if number % 4 == 0 else "train"
        _image(f"dataset1/images_prepped_{part}/{number:04}.png", number)
        _mask(f"dataset1/annotations_prepped_{part}/{number:04}.png", number)
    return "dataset1"


def labelme() -> str:
    """Images next to polygons in JSON."""
    for number in range(8):
        _image(f"labelme/data_annotated/2011_{number}.jpg", number)
        shapes = [{"label": "person", "points": [[1, 1], [9, 1], [9, 9]], "shape_type": "polygon"}]
        _array(f"labelme/data_annotated/2011_{number}.json", {"shapes": shapes, "imagePath": f"2011_{number}.jpg"})
    return "labelme"


def coco() -> str:
    """COCO's annotations next to folders of images."""
    for number in range(8):
        _image(f"coco/JPEGImages/2011_{number}.jpg", number)
        _image(f"coco/Visualization/2011_{number}.jpg", number + 50)
    boxes = [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 5, 5], "segmentation": [[1, 1, 6, 1, 6, 6]]}]
    images = [{"id": n, "file_name": f"JPEGImages/2011_{n}.jpg"} for n in range(8)]
    _array(
        "coco/annotations.json", {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "person"}]}
    )
    return "coco"


def camvid_in_color() -> str:
    """CamVid's folders with masks in color, and the list of classes next to them."""
    colors = [(0, 0, 0), (128, 0, 0), (64, 0, 128), (128, 128, 0)]
    for number in range(12):
        part = ("train", "train", "val", "test")[number % 4]
        _image(f"CamVid/{part}/{number:04}.png", number)
        ids = np.random.default_rng(number).integers(0, 4, (6, 8)).repeat(5, 0).repeat(5, 1)
        Path(f"CamVid/{part}_labels").mkdir(exist_ok=True)
        Image.fromarray(np.array(colors, np.uint8)[ids]).save(f"CamVid/{part}_labels/{number:04}_L.png")
    names = ("Building", "Void", "Car", "Tree")
    rows = [
        f"{name},{red},{green},{blue}" for name, (red, green, blue) in zip(names, [colors[n] for n in (1, 0, 2, 3)])
    ]
    return _lines("CamVid/class_dict.csv", ["name,r,g,b", *rows]) and "CamVid"


def voc() -> str:
    """VOC's folders: masks with a palette, next to visualizations."""
    for number in range(8):
        _image(f"voc/JPEGImages/2011_{number}.jpg", number)
        _mask(f"voc/SegmentationClass/2011_{number}.png", number, has_palette=True)
        _image(f"voc/SegmentationClassVisualization/2011_{number}.jpg", number)
    _lines("voc/class_names.txt", ["_background_", "person", "car"])
    return "voc"


def book() -> str:
    """A book."""
    return _lines(
        "Frankenstein.txt", [line for n in range(_ROWS) for line in (f"Chapter {n}", "", _text(n, words=90), "")]
    )


def dialogue() -> str:
    """A book in dialogues, with names before the texts."""
    return _lines(
        "republic.txt", [f"SOCRATES: {_text(n, words=30)}" if n % 2 else _text(n, words=50) for n in range(2 * _ROWS)]
    )


def paraphrases() -> str:
    """Pairs with raw quotes: a label, two ids, two texts."""
    return _table(
        "msr-para-train.tsv",
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        lambda n: f"{n % 2}\t{n}\t{n + 900}\t{chr(34) if n % 8 == 0 else ''}{_text(n)}\t{_text(n + 3)}",
    )


def choices() -> str:
    """Stories with questions and choices, without a header; raw quotes."""
    rows = [
        f"mc.{n}\t{chr(34) if n % 8 == 0 else ''}{_text(n, words=40)}\t{_text(n + 1)}\t{_text(n + 2)}\t{_text(n + 3)}"
        for n in range(_ROWS)
    ]
    return _lines("mc500.train.tsv", rows)


def similar(name: str = "sts2015.tsv") -> str:
    """A score and two texts, without a header; raw quotes."""
    return _lines(
        name, [f"{n % 50 / 10}\t{chr(34) if n % 8 == 0 else ''}{_text(n)}\t{_text(n + 3)}" for n in range(_ROWS)]
    )


def headlines() -> str:
    """The same without quotes."""
    return _lines("headlines.tsv", [f"{n % 50 / 10}\t{_text(n)}\t{_text(n + 3)}" for n in range(_ROWS)])


def _right(write: Callable[[], str], name: str, task: str, **settings: Any) -> Shape:
    return Shape(name, write, task, tuple((key.replace("__", "."), value) for key, value in settings.items()))


_CLASSES, _LANGUAGE, _MASKS = "text-classification", "causal-lm", "semantic-segmentation"
SHAPES = (
    _right(sms, "tsv without a header, raw quotes", _CLASSES, data__label_column="1", data__text_columns=["2"]),
    Shape("csv, two columns may be the label", tweets, refusal="--label airline_sentiment or --label airline"),
    _right(stars, "tsv of ratings, dates, variations", _CLASSES, data__label_column="rating"),
    Shape("tsv with a broken row", broken_row, refusal=r"Restaurant_Reviews.tsv:42: the row has 1 field,"),
    Shape("numbers, categories, and names", titanic, refusal="--label Survived"),
    _right(counts_beside_class, "csv with an index and counts", _CLASSES, data__label_column="class"),
    _right(table_in_txt, "pairs with tabs in a .txt file", _CLASSES, data__text_columns=["sentence_A", "sentence_B"]),
    _right(answers, "questions with answers", _CLASSES, data__text_columns=["qtext", "atext"]),
    _right(train_and_test, "folder of train.csv and test.csv", _CLASSES, data__label_column="category"),
    _right(spam, "csv in Windows-1252, unnamed columns", _CLASSES, data__encoding="cp1252", data__label_column="v1"),
    Shape("csv, one row has no label", a_missing_label, refusal="data.missing_labels: drop"),
    Shape("folder of train, valid, test.tsv, 3 labels", liar, refusal="3 columns may be the label"),
    _right(names_of_numbers, "table of numbered classes, names apart", _CLASSES, data__label_column="condition_label"),
    _right(numbered_classes, "table of numbered classes", _CLASSES, data__label_column="condition_label"),
    _right(emotions, "a column of 0 and 1 per label, .txt", _CLASSES, data__label_columns=EMOTIONS),
    _right(toxic, "a column of 0 and 1 per label, csv", _CLASSES, data__label_columns=INSULTS),
    _right(entities_in_a_folder, "folder of CoNLL files", "token-classification", data__eval="wnut/dev.conll"),
    _right(entities, "CoNLL file", "token-classification"),
    _right(
        aligned_lines,
        "line-aligned files of words and tags",
        "token-classification",
        data__eval="runs/atis-data/validation.conll",
    ),
    _right(files_of_classes, "a file of names per class", _CLASSES, data__lines="file_names"),
    _right(alpaca, "array of instruction, input, output", _LANGUAGE, data__input_column="input"),
    _right(sharegpt_with_tools, "ShareGPT with tools", _LANGUAGE, data__format="chat", data__tools_column="tools"),
    Shape("DPO", preferences, refusal="preferences"),
    Shape("KTO", judged_answers, refusal="examples of bad answers"),
    _right(identity, "array of instruction and output", _LANGUAGE, data__completion_column="output"),
    _right(content_parts, "messages with content parts", _LANGUAGE, data__format="chat"),
    _right(web_text, "jsonl of texts", _LANGUAGE, data__text_column="text"),
    _right(article, "plain text", _LANGUAGE),
    _right(squad, "SQuAD", "question-answering"),
    _right(
        splits_in_one_file,
        "object with an array per split",
        _CLASSES,
        data__label_column="2",
        data__train="runs/data_small-data/train.jsonl",
        data__eval="runs/data_small-data/validation.jsonl",
    ),
    Shape("numbers and a class", sonar, refusal="Gradient-boosted trees"),
    _right(spreadsheet, "Excel", _CLASSES, data__text_columns=["review"], data__label_column="label"),
    _right(zipped, "zip of texts by class", _CLASSES, data__lines="folder_names"),
    _right(tarred, "tar.gz of texts by class", _CLASSES, data__lines="folder_names"),
    _right(text_folders, "texts by class", _CLASSES, data__lines="folder_names"),
    _right(classes_by_suffix, "a file per class, named by suffix", _CLASSES, data__lines="file_names"),
    Shape("texts without extensions", no_suffix, refusal="cannot read these files"),
    _right(
        unusual_suffix,
        "CoNLL with other extensions",
        "token-classification",
        data__train="runs/conll2002-data/esp.train.conll",
        data__eval="runs/conll2002-data/esp.validation.conll",
    ),
    Shape("texts in two encodings", one_other_encoding, refusal="1820.txt: byte 0xe9"),
    _right(ants_and_bees, "images by class, train and val", "image-classification"),
    _right(membrane, "image and label, masks of 0 and 255", _MASKS, data__mask_values=[0, 255]),
    _right(camvid, "images_prepped_train and annotations", _MASKS),
    _right(
        camvid_in_color,
        "masks in color, with a list of classes",
        _MASKS,
        data__label_names=["Building", "Car", "Tree"],
        data__eval="runs/CamVid-data/images/val",
    ),
    _right(labelme, "labelme", _MASKS, data__label_names=["background", "person"]),
    _right(coco, "COCO", _MASKS, data__label_names=["background", "person"]),
    _right(voc, "VOC with palettes", _MASKS),
    _right(book, "book", _LANGUAGE),
    _right(dialogue, "dialogues", _LANGUAGE),
    _right(paraphrases, "pairs with ids, raw quotes", _CLASSES, data__label_column="Quality"),
    Shape("stories with questions and choices", choices, refusal="columns 2, 3, 4, 5 are all text"),
    _right(similar, "score and pairs, raw quotes", _CLASSES, model__problem_type="regression"),
    _right(headlines, "score and pairs", _CLASSES, model__problem_type="regression"),
)


def main() -> int:
    """Print the table of all forms. Exit code 1 if a reading is wrong."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows, start = [], os.getcwd()
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            outcome = read(shape)
            os.chdir(start)
        rows.append((shape.name, outcome.verdict, outcome.shown[:100]))
    print(
        markdown_table(("data", "outcome", "reading or message"), rows, text=("data", "outcome", "reading or message"))
    )
    counts = {kind: sum(row[1] == kind for row in rows) for kind in ("right", "refused", "wrong")}
    print(f"\n{counts['right']} right, {counts['refused']} refused with the reason, {counts['wrong']} wrong")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
