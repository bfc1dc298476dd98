"""A gallery of small folders: the reading of each or its refusal, and the names of parts in every reader."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from accel_train.data.images.labelled import eval_beside_train
from accel_train.data.sources import _pick_split, resolve_sources
from accel_train.experiments.finetune.recipe import Found, asked_of, minimal_recipe
from accel_train.experiments.finetune.recognise import recognise
from accel_train.experiments.finetune.unpack import unpacked
from accel_train.recipe.data import Data
from accel_train.tasks.image_classification.config import ImageClassificationData
from tests.data.test_parts import PARTS
from tests.support.runs import refused

Files = dict[str, str | bytes]

WORDS = ("a long and quiet film", "few people laughed here", "the end came too soon", "we went home by train")


def lines(form: str, count: int = 24) -> str:
    """Lines of a form with {n} (a number), {text} (a text), and {ab} (a class)."""
    rows = (form.format(n=n, text=f"{WORDS[n % 4]} {n}", ab="ab"[n % 2]) for n in range(count))
    return "\n".join(rows) + "\n"


PROSE = "\n\n".join(f"It was day {n}. {WORDS[n % 4]}, and {WORDS[n // 4 % 4]}." for n in range(12))
CSV = "text,label\n" + lines("{text},{ab}")
UNLABELED = "id,text\n" + lines("{n},{text}")
SEMICOLONS, TABS = lines("{text};{ab}"), lines("{text}\t{ab}")
FASTTEXT, FIRST_WORD = lines("__label__{ab} {text}"), lines("{ab}: {text}")
CONLL = "Ann B-PER\nsleeps O\n\nin O\nBonn B-LOC\n\n" * 6
TAGGED = ("Ann sleeps\nin Bonn\n" * 12, "B-PER O\nO B-LOC\n" * 12)
SQUAD = json.dumps({"data": [{"title": "t", "paragraphs": [{"context": "Bonn is old", "qas": [
    {"id": "1", "question": "which?", "answers": [{"text": "Bonn", "answer_start": 0}]}]}]}]})  # fmt: skip
ROWS = json.dumps([{"text": f"{WORDS[n % 4]} {n}", "label": "ab"[n % 2]} for n in range(24)])
ANSWERS = "".join(
    f"{json.dumps({'text': WORDS[n % 4], 'options': [], 'accept': ['ab'[n % 2]], 'answer': 'accept'})}\n"
    for n in range(24)
)
YOLO, XML = "0 0.5 0.5 0.25 0.25\n", "<post class='a' user='b' time='c'><t pos='UH' word='hi'/></post>\n" * 20
VOC = "<annotation><object><name>cat</name><bndbox><xmin>1</xmin></bndbox></object></annotation>"
BOXES = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4]}]
COCO = json.dumps(
    {
        "images": [{"id": 1, "file_name": "1.png", "width": 16, "height": 16}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": BOXES,
    }
)
PANOPTIC = json.dumps({"images": [], "categories": [], "annotations": [{"file_name": "1.png", "segments_info": []}]})


def image(number: int = 0, values: int = 256) -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, values, (16, 16, 3) if values == 256 else (16, 16), np.uint8)
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def card(name: str, **places: str) -> str:
    """A README.md of the hub. Several in a row are one."""
    files = "".join(f"  - split: {split}\n    path: '{place}'\n" for split, place in places.items())
    return f"- config_name: {name}\n  data_files:\n{files}"


PHOTO, MASK = image(), image(values=3)


def each(names: str, content: str | bytes) -> Files:
    """The content at each path, with braces for several: `{a,b}/{1,2}.txt`."""
    paths = [""]
    for part in names.split("{"):
        inner, brace, rest = part.partition("}")
        paths = (
            [path + one + rest for path in paths for one in inner.split(",")] if brace else [p + part for p in paths]
        )
    return dict.fromkeys(paths, content)


class Read(NamedTuple):
    """The main facts of a recipe. Paths are relative to the folder, or to the folder of its data next to the run."""

    task: str
    train: str | list[str] = "."
    eval: str | None = None
    test: str | None = None
    classes: str = "a b"


def facts(found: Found) -> Read:
    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(one) for one in value]
        for root in ("set", "runs/set-data", "runs/set-masks"):
            if value is not None and Path(value).is_relative_to(root):
                return Path(value).relative_to(root).as_posix()
        return value

    settings = {name: choice.value for name, choice in found.settings.items()}
    places = (short(settings["data.train"]), short(settings.get("data.eval")), short(found.test))
    return Read(found.task, *places, " ".join(found.counts))


def found_in(files: Files, path: str = "set", **flags: Any) -> Found:
    for name, content in files.items():
        if isinstance(content, str) and content.startswith("- config_name"):
            content = f"---\nlicense: mit\nconfigs:\n{content}---\n# About\n"
        place = Path("set", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    read, _, _ = unpacked(asked_of(path, minimal_recipe(path, []), **flags), None)
    return recognise(asked_of(read, minimal_recipe(read, []), **flags))


LM, TEXT = "causal-lm", "text-classification"
IMAGES, TAGS = "image-classification", "token-classification"

GALLERY: dict[str, tuple[Files, Read | str]] = {
    # Tables.
    "one csv": ({"data.csv": CSV}, Read(TEXT, "data.csv")),
    "csv beside a README": ({"data.csv": CSV, "README.md": PROSE}, Read(TEXT, "data.csv")),
    "csv, train and test": (each("{train,test}.csv", CSV), Read(TEXT, "train.csv", test="test.csv")),
    "csv, train, dev, test": (each("{train,dev,test}.csv", CSV), Read(TEXT, "train.csv", "dev.csv", "test.csv")),
    "csv, training and evaluation": (
        each("{training,evaluation}.csv", CSV),
        Read(TEXT, "training.csv", "evaluation.csv"),
    ),
    "csv in folders of parts": (
        each("{train,validation}/data.csv", CSV),
        Read(TEXT, "train/data.csv", "validation/data.csv"),
    ),
    "csv, train_val and test": (each("{train_val,test}.csv", CSV), Read(TEXT, "train_val.csv", test="test.csv")),
    "csv and a submission": (each("{train,sample_submission}.csv", CSV), Read(TEXT, "train.csv")),
    "csv without names of parts": (each("{one,two}.csv", CSV), "several files of data"),
    "csv, two for validation": (each("{train,val,dev}.csv", CSV), "several files of data"),
    "csv beside texts": ({"data.csv": CSV, "notes.txt": PROSE}, Read(TEXT, "data.csv")),
    "csv one folder lower": ({"inner/data.csv": CSV}, Read(TEXT, "inner/data.csv")),
    "one csv with parts": (
        {"data.csv": "text,label,split\n" + lines("{text},{ab},train") + lines("{text},{ab},test"), "README.md": PROSE},
        Read(TEXT, "train.jsonl", test="test.jsonl"),
    ),
    "Prodigy's answers in parts": (
        each("{train,dev}.jsonl", ANSWERS),
        Read(TEXT, "train.jsonl", "validation.jsonl"),
    ),
    "json with an array": ({"data.json": ROWS}, Read(TEXT, "data.json")),
    "json arrays of parts": (each("{train,valid}.json", ROWS), Read(TEXT, "train.json", "valid.json")),
    "tables with tabs in .txt": (each("{train,test}.txt", TABS), Read(TEXT, "train.tsv", test="test.tsv")),
    "tables with semicolons in .txt": (
        each("{train,val,test}.txt", SEMICOLONS),
        Read(TEXT, "train.csv", "val.csv", "test.csv"),
    ),
    "one table with semicolons in .txt": ({"data.txt": SEMICOLONS}, Read(TEXT, "data.csv")),
    "code that ends in semicolons": ({"main.txt": lines("f({n});")}, "semicolons divide"),
    "texts and labels, line by line": (
        {**each("{train,val,test}_text.txt", lines("{text}")), **each("{train,val,test}_labels.txt", lines("{ab}"))},
        Read(TEXT, "train.jsonl", "validation.jsonl", "test.jsonl"),
    ),
    "texts and labels with a mapping": (
        {"train_text.txt": lines("{text}"), "train_labels.txt": lines("{ab}"), "mapping.txt": "a\tjoy\nb\tfear\n"},
        Read(TEXT, "train.jsonl", classes="fear joy"),
    ),
    "texts and labels of other lengths": (
        {"train_text.txt": lines("{text}"), "train_labels.txt": lines("{ab}", 20)},
        "train_labels.txt has 20 lines",
    ),
    "words and tags, line by line": (
        {
            **each("{train,dev}.words.txt", TAGGED[0]),
            **each("{train,dev}.tags.txt", TAGGED[1]),
            "vocab.txt": "O\nB-PER\n",
        },
        Read(TAGS, "train.conll", "validation.conll", None, "B-LOC B-PER O"),
    ),
    "words and tags by suffix": (
        {"a.words": TAGGED[0], "a.tags": TAGGED[1]},
        Read(TAGS, "train.conll", classes="B-LOC B-PER O"),
    ),
    "words and parts of speech in folders": (
        {**each("{train,test}/sentences.txt", TAGGED[0]), **each("{train,test}/labels.txt", "N V\nP N\n" * 12)},
        Read(TAGS, "train.conll", test="test.conll", classes="N P V"),
    ),
    "words and a tag too few": (
        {"train.words.txt": TAGGED[0] + "in Bonn\n", "train.tags.txt": TAGGED[1] + "O\n", "vocab.txt": "O\n"},
        r"train\.tags\.txt:25 has 1 tag for the 2 words of train\.words\.txt",
    ),
    "texts and long labels": (
        {"sentences.txt": lines("{text}"), "labels.txt": lines("{ab} c d e")},
        "labels.txt:1 has 4 tags for the",
    ),
    "words and tags, twice": (
        {**each("{a,b}.words.txt", TAGGED[0]), **each("{a,b}.tags.txt", TAGGED[1])},
        "2 pairs of files",
    ),
    # The card of a data set on the hub.
    "a card": (
        {"README.md": card("d", train="data/a.csv", validation="data/b.csv", test="data/c.csv")}
        | each("data/{a,b,c,d}.csv", CSV),
        Read(TEXT, "data/a.csv", "data/b.csv", "data/c.csv"),
    ),
    "a card with shards": (
        {"README.md": card("d", train="data/x-*.csv", test="data/y-*.csv")} | each("data/{x,y}-{0,1}.csv", CSV),
        Read(TEXT, "data/x-*.csv", None, "data/y-*.csv"),
    ),
    "a card with a pattern of folders": (
        {"README.md": card("d", train="**/x.csv", dev="*/y.csv")} | each("{a,b}/{x,y}.csv", CSV),
        Read(TEXT, "**/x.csv", "*/y.csv"),
    ),
    "a card with a mapping": (
        {"README.md": "---\nconfigs:\n- data_files: {train: a.csv, dev: [b.csv]}\n---\n"} | each("{a,b}.csv", CSV),
        Read(TEXT, "a.csv", "b.csv"),
    ),
    "a card with one pattern": (
        {"README.md": "---\nconfigs:\n- data_files: a.csv\n---\n"} | each("{a,b}.csv", CSV),
        Read(TEXT, "a.csv"),
    ),
    "a card of two data sets": (
        {
            "README.md": card("en", train="en/a.csv", test="en/b.csv")
            + card("de", train="de/a.csv", validation="de/b.csv")
        }
        | each("{en,de}/{a,b}.csv", CSV),
        "2 data sets.*en: accel-train finetune set/en/a.csv; de: .*/de/a.csv --data.eval set/de/b.csv",
    ),
    "a card without its files": ({"README.md": card("d", train="x-*.csv"), **each("{a,b}.csv", CSV)}, "x-.*not in the"),
    "a card that names other places": (
        {"README.md": card("d", train="../set/a.csv"), **each("{a,b}.csv", CSV)},
        "not in the folder",
    ),
    "a card with two patterns": (
        {"README.md": "---\nconfigs:\n- data_files: [a.csv, b.csv]\n---\n"} | each("{a,b}.csv", CSV),
        "several patterns",
    ),
    "a card with an empty list": (
        {"README.md": "---\nconfigs:\n- data_files: [{split: train, path: []}]\n---\n", "data.csv": CSV},
        Read(TEXT, "data.csv"),
    ),
    "a card with a number": (
        {"README.md": "---\nconfigs:\n- data_files: 5\n---\n", "data.csv": CSV},
        Read(TEXT, "data.csv"),
    ),
    "a card without files": ({"README.md": "---\nlicense: mit\n---\n", "data.csv": CSV}, Read(TEXT, "data.csv")),
    # Lines that begin with labels.
    "fastText": (each("{train,test}.txt", FASTTEXT), Read(TEXT, "train.txt", test="test.txt")),
    "fastText in shards": (each("{one,two}.txt", FASTTEXT), Read(TEXT)),
    "fastText, one file": ({"data.txt": FASTTEXT}, Read(TEXT)),
    "label and text on each line": (each("{train,test}.txt", FIRST_WORD), "each line begins with one of 2 words"),
    "dialogues": (each("{one,two}.txt", FIRST_WORD), "2 files with a text on each line"),
    # Tags, questions.
    "CoNLL": (
        each("{train,dev,test}.conll", CONLL),
        Read(TAGS, "train.conll", "dev.conll", "test.conll", "B-LOC B-PER O"),
    ),
    "CoNLL in .txt": (each("{train,valid}.txt", CONLL), Read(TAGS, "train.txt", "valid.txt", None, "B-LOC B-PER O")),
    "CoNLL with parts as suffixes": (
        each("eng.{train,testa,testb}", CONLL),
        Read(TAGS, "eng.train.conll", "eng.validation.conll", "eng.test.conll", "B-LOC B-PER O"),
    ),
    "SQuAD": (each("{train,dev}.json", SQUAD), Read("question-answering", "train.json", "dev.json", None, "")),
    "SQuAD with versions": (
        each("{train,dev}-v1.1.json", SQUAD),
        Read("question-answering", "train-v1.1.json", "dev-v1.1.json", None, ""),
    ),
    # Texts.
    "texts": (each("{one,two}.txt", PROSE), Read(LM, classes="")),
    "texts of parts": (each("{train,valid,test}.txt", PROSE), Read(LM, "train.txt", "valid.txt", "test.txt", "")),
    "texts in folders of parts": (each("{training,eval}/{1,2}.txt", PROSE), Read(LM, "training", "eval", None, "")),
    "texts, trainset and testset": (
        each("{trainset,testset}.txt", PROSE),
        Read(LM, "trainset.txt", None, "testset.txt", ""),
    ),
    "texts beside pictures": ({**each("{one,two}.md", PROSE), "three.txt": PROSE}, Read(LM, classes="")),
    "a program": (each("{train,test,model}.py", "x = 1\n"), Read(LM, classes="")),
    "one text of many without an extension": (
        {"cats.txt": "a b\n", **each("c{1,2,3}", PROSE)},
        "3 other files of text",
    ),
    "a README one folder higher": (
        {"inner/README.txt": "about\n", **each("inner/rt.{one,two}", PROSE)},
        "2 other files of text",
    ),
    "one README and texts in unknown forms": ({"more.txt": PROSE * 3, "x.mrg": PROSE}, Read(LM, classes="")),
    "brat": (each("{one,two}.txt", PROSE) | each("{one,two}.ann", "T1\tPER 0 2\tIt\n"), "brat"),
    "boxes without images": (each("labels/{1,2,3}.txt", YOLO) | {"data.yaml": "names: [a]\n"}, "images are missing"),
    "VOC without images": (each("Annotations/{1,2}.xml", VOC), "its image 1 is not in"),
    "mark-up": (each("{one,two}.xml", XML), "mark-up"),
    "no text": ({"a.dat": b"\0\1"}, "cannot read these files"),
    # Texts by class.
    "texts by folder": (each("{a,b}/{1,2,3}.txt", PROSE), Read(TEXT)),
    "texts by folder in parts": (each("{train,test}/{a,b}/{1,2,3}.txt", PROSE), Read(TEXT, "train", test="test")),
    "texts by folder, training and evaluation": (
        each("{training,evaluation}/{a,b}/{1,2,3}.txt", PROSE),
        Read(TEXT, "training", "evaluation"),
    ),
    "texts by folder, twice in their parts": (
        each("training_set/training_set/{a,b}/{1,2,3}.txt", PROSE) | each("test_set/test_set/{a,b}/{1,2}.txt", PROSE),
        Read(TEXT, "training_set/training_set", test="test_set"),
    ),
    "texts by folder, one folder lower": (each("inner/{a,b}/{1,2,3}.txt", PROSE), Read(TEXT, "inner")),
    "texts by folder beside unlabeled ones": (
        each("train/{a,b,unsup}/{1,2,3}.txt", PROSE),
        Read(TEXT, ["train/a", "train/b"]),
    ),
    "texts by folder without labels": (each("{unsup,unlabeled}/{1,2,3}.txt", PROSE), Read(LM, classes="")),
    "texts by file": (
        {"pos.txt": lines("{text} good."), "neg.txt": lines("{text} bad.", 30)},
        Read(TEXT, classes="neg pos"),
    ),
    "texts by suffix": (
        {"rt.pos": lines("{text} good."), "rt.neg": lines("{text} bad.", 30)},
        Read(TEXT, classes="neg pos"),
    ),
    # Images by class.
    "images by class": (each("{a,b}/{1,2}.png", PHOTO), Read(IMAGES)),
    "images in train, val, test": (each("{train,val,test}/{a,b}/1.png", PHOTO), Read(IMAGES)),
    "images in Training and Testing": (each("{Training,Testing}/{a,b}/1.png", PHOTO), Read(IMAGES)),
    "images in training and eval": (each("{training,eval}/{a,b}/1.png", PHOTO), Read(IMAGES)),
    "images in parts, twice": (
        each("training_set/training_set/{a,b}/1.png", PHOTO) | each("test_set/test_set/{a,b}/1.png", PHOTO),
        Read(IMAGES),
    ),
    "images one folder lower": (each("pets/{a,b}/1.png", PHOTO), Read(IMAGES, "pets")),
    "images two folders lower": (each("data/pets/{a,b}/1.png", PHOTO), Read(IMAGES, "data/pets")),
    "images, one class": (each("a/{1,2}.png", PHOTO), "only the class folder"),
    "images without classes": (each("{1,2}.png", PHOTO), "not in a class folder"),
    "images in parts without classes": (each("{train,test}/{1,2}.png", PHOTO), "parts of the data"),
    "images of vehicles": (each("{bus,train,car}/1.png", PHOTO), Read(IMAGES, classes="bus car train")),
    "images of trains": (each("{freight_train,bus}/old/1.png", PHOTO), Read(IMAGES, classes="bus freight_train")),
    "images in val and test": (each("{val,test}/{a,b}/1.png", PHOTO), "parts of the data"),
    "images named by a table": (
        each("images/{0,1,2,3}.png", PHOTO) | {"train.csv": "image,label\n" + lines("{n}.png,{ab}", 4)},
        Read(IMAGES, "train.csv"),
    ),
    "panoptic": (
        each("{input_images,panoptic_examples}/{1,2}.png", PHOTO) | {"panoptic_examples.json": PANOPTIC},
        "panoptic",
    ),
    "panoptic as COCO names it": (
        each("{train2017,annotations/panoptic_train2017}/{1,2}.png", PHOTO)
        | {"annotations/panoptic_train2017.json": PANOPTIC},
        "panoptic",
    ),
    "panoptic by its annotations": (
        each("{photos,maps}/{1,2}.png", PHOTO) | {"panoptic.json": PANOPTIC},
        "panoptic.json belongs to COCO's panoptic",
    ),
    "panoptic maps alone": (each("{train2017,panoptic_train2017}/{1,2}.png", PHOTO), "panoptic"),
    # Masks.
    "masks": (
        each("images/{1,2}.png", PHOTO) | each("masks/{1,2}.png", MASK),
        Read("semantic-segmentation", classes=""),
    ),
    "masks in parts": (
        each("{train,val}/images/{1,2}.png", PHOTO) | each("{train,val}/masks/{1,2}.png", MASK),
        Read("semantic-segmentation", "train", "val", None, ""),
    ),
    "masks in training and evaluation": (
        each("{training,evaluation}/images/{1,2}.png", PHOTO) | each("{training,evaluation}/masks/{1,2}.png", MASK),
        Read("semantic-segmentation", "training", "evaluation", None, ""),
    ),
    "masks one folder lower": (
        each("set2/images/{1,2}.png", PHOTO) | each("set2/masks/{1,2}.png", MASK),
        Read("semantic-segmentation", "set2", classes=""),
    ),
    "images and maps of boxes": (
        {f"images/{n}.png": image(n) for n in range(8)}
        | each("labels/{0,1,2,3,4,5,6,7}.txt", YOLO)
        | {"classes.txt": "cat\n"},
        Read("object-detection", "images", classes="cat"),
    ),
}


@pytest.mark.parametrize("name", GALLERY)
def test_a_folder_is_read_as_its_form_says_or_refused(name: str) -> None:
    files, expected = GALLERY[name]
    if isinstance(expected, Read):
        assert facts(found_in(files)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            found_in(files)


TSV, JSONL = CSV.replace(",", "\t"), "".join(f"{json.dumps(row)}\n" for row in json.loads(ROWS))
FORMS: Files = {
    "rows.csv": CSV, "rows.tsv": TSV, "rows.jsonl": JSONL, "rows.json": ROWS, "lines.json": JSONL, "squad.json": SQUAD,
    "splits.json": json.dumps({"train": json.loads(ROWS), "test": json.loads(ROWS)}), "prose.txt": PROSE,
    "prose.md": PROSE, "fast.txt": FASTTEXT, "semicolons.txt": SEMICOLONS, "tabs.txt": TABS, "words.txt": CONLL,
    "words.conll": CONLL, "word_first.txt": FIRST_WORD, "code.txt": lines("f({n});"), "object.json": "{}",
}  # fmt: skip


@pytest.mark.parametrize("task", [None, TEXT, LM])
@pytest.mark.parametrize("name", FORMS)
def test_a_folder_with_one_file_is_read_like_the_file(name: str, task: str | None, monkeypatch: Any) -> None:
    readings = []
    for place in ("file", "folder"):
        Path(place).mkdir()
        monkeypatch.chdir(Path(place).absolute())
        try:
            found = found_in({name: FORMS[name]}, f"set/{name}" if place == "file" else "set", task=task)
            readings.append((found.task, found.counts, found.num_samples, found.num_chars))
        except ValueError:
            readings.append(("refused", {}, 0, 0))
        monkeypatch.chdir("..")
    assert readings[0] == readings[1]


def test_an_archive_is_read_like_its_folder() -> None:
    for name in ("csv, train, dev, test", "fastText", "texts by folder in parts", "images in training and eval"):
        files, expected = GALLERY[name]
        with zipfile.ZipFile(f"{name}.zip", "w") as archive:
            for path, content in files.items():
                archive.writestr(path, content)
        found = found_in({}, f"{name}.zip")
        assert isinstance(expected, Read)
        assert (found.task, tuple(found.counts)) == (expected.task, tuple(expected.classes.split())), name
        assert Path(found.test or expected.test or "").name == (expected.test or ""), name


def test_test_data_without_labels_are_for_predictions() -> None:
    assert found_in({"train.csv": CSV, "test.csv": CSV}).test_has_labels
    assert not found_in({"train.csv": CSV, "test.csv": UNLABELED}).test_has_labels


@pytest.mark.parametrize("path", ["set/*.txt", "set/train*.txt", "set"])
def test_a_pattern_is_read_like_the_folder(path: str) -> None:
    found = found_in(each("{train,val,test}.txt", FASTTEXT), path)
    assert facts(found)[:2] == (TEXT, "train.txt" if path != "set/train*.txt" else "train*.txt")
    assert facts(found).eval == (None if path == "set/train*.txt" else "val.txt")


def test_files_of_a_pattern_are_not_converted() -> None:
    # A folder of converted files would be named by the pattern.
    refused(found_in, {"a.txt": TABS}, "set/*.txt", named="set/")
    assert not Path("runs").exists()


def _by_part(name: str, other: str, form: str, content: str | bytes) -> Files:
    return {**each(form.format(name), content), **each(form.format(other), content)}


READERS: dict[str, tuple[str, str | bytes, str]] = {
    "tables": ("{}.csv", CSV, "{}.csv"),
    "texts": ("{}.txt", PROSE, "{}.txt"),
    "words with tags": ("{}.conll", CONLL, "{}.conll"),
    "texts by folder": ("{}/{{a,b}}/{{1,2}}.txt", PROSE, "{}"),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_files_knows_the_names_of_parts(reader: str, folder: Path, monkeypatch: Any) -> None:
    form, content, place = READERS[reader]
    for number, (name, part) in enumerate(PARTS.items()):
        if "." in name and not form.startswith("{}."):
            # Folders have no suffix.
            continue
        (folder / str(number)).mkdir()
        monkeypatch.chdir(folder / str(number))
        other = "train" if part != "train" else "validation"
        found = facts(found_in(_by_part(name, other, form, content)))
        train, held = (name, other) if part == "train" else (other, name if part == "eval" else None)
        is_test = part == "test" and "submission" not in name
        expected: tuple[Any, ...] = (
            place.format(train),
            held and place.format(held),
            place.format(name) if is_test else None,
        )
        if part is None and reader == "texts":
            # Texts of no part are trained on.
            expected = (sorted(map(place.format, (train, name))), None, None)
        assert (found.train, found.eval, found.test) == expected, name


def test_every_reader_of_images_knows_the_names_of_parts(folder: Path, monkeypatch: Any) -> None:
    for number, (name, part) in enumerate((name, part) for name, part in PARTS.items() if "." not in name):
        (folder / str(number)).mkdir()
        monkeypatch.chdir(folder / str(number))
        other = "train" if part != "train" else "validation"
        train, held = (name, other) if part == "train" else (other, name if part == "eval" else None)
        found_in(_by_part(name, other, "{}/{{a,b}}/1.png", PHOTO))
        got = eval_beside_train(ImageClassificationData(train="set"))
        assert got[:2] == ((f"set/{train}",), (f"set/{held}",) if held else None), name
        assert (f"set/{name} is left alone" in str(got[2])) == (part == "test" and "submission" not in name), name
        if part in ("train", "eval"):
            Path("set").rename("classes")
            masks = _by_part(name, other, "{}/images/1.png", PHOTO) | _by_part(name, other, "{}/masks/1.png", MASK)
            assert facts(found_in(masks))[1:3] == (train, held), name
            Path("set").rename("masks")
            boxes = _by_part(name, other, "{}/1.png", PHOTO) | _by_part(name, other, "{}/_annotations.coco.json", COCO)
            files = [f"{place}/_annotations.coco.json" for place in (train, held)]
            assert list(facts(found_in(boxes))[1:3]) == files, name


@pytest.mark.parametrize("suffix", [".csv", ".txt", ".py"])
def test_a_run_knows_the_names_of_parts(suffix: str) -> None:
    for name, part in PARTS.items():
        if part in ("eval", "test") and "submission" not in name:
            assert _pick_split("set", ["train", name], Data(train="set"), "data.eval") == name
        folder = Path("files", name)
        folder.mkdir(parents=True)
        for stem in ("train", name):
            (folder / f"{stem}{suffix}").write_text(CSV)
        data = Data(train=str(folder))
        # A program has files such as test.py.
        if part in ("eval", "test") and suffix != ".py":
            refused(resolve_sources, data.train, data, key="data.train", named="next to training files")
        else:
            assert len(resolve_sources(data.train, data, key="data.train")[0].files) == len({"train", name})
