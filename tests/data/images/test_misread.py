"""Folders of boxes, polygons, masks, or parts of the data are not read as classes; folders of classes are."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_train.cli.main import main
from accel_train.data.images import images, misread
from accel_train.recipe.loader import load_recipe
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from tests.support.runs import refused

BOX = "<annotation><object><name>cat</name><bndbox><xmin>1</xmin></bndbox></object></annotation>"
COCO = {"images": [], "annotations": [{"bbox": [1, 1, 4, 4], "category_id": 1}], "categories": []}
SHAPES = {"version": "5.0", "shapes": [{"label": "cat", "points": [[1, 2], [3, 4]]}]}


pytestmark = pytest.mark.usefixtures("not_launched")


def write(*names: str, content: Any = None) -> None:
    """A picture at each path of an image, else this text."""
    for number, path in enumerate(map(Path, names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def read(train: str, **settings: Any) -> dict[str, set[str]]:
    """Read a folder as classes; return the files of each class, of both sides."""
    sets = read_labelled_images(ImageClassificationData(**{"train": train, "eval_fraction": 0, **settings}))
    found: dict[str, set[str]] = {}
    for side in (sets.train, *([sets.eval] if sets.eval is not None else [])):
        for index in range(len(side)):
            found.setdefault(sets.label_names[int(side.labels[index])], set()).add(side.where(index))
    return found


LAYOUTS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "YOLO": (
        ["set/images/train/1.jpg", "set/images/train/2.jpg", "set/other/3.jpg"],
        {"set/labels/train/1.txt": "", "set/labels/train/2.txt": "0 0.5 0.5 0.25 0.25\n1 .5 .5 1 1\n"},
        "set/labels/train/2.txt",
    ),
    "YOLO segments next to images": (
        ["set/a/1.jpg", "set/b/2.jpg"],
        {"set/a/1.txt": "3 0.1 0.1 0.2 0.1 0.2 0.2 1e-3 0.5\n"},
        "set/a/1.txt",
    ),
    "Pascal VOC": (
        ["set/JPEGImages/1.jpg", "set/more/2.jpg"],
        {"set/Annotations/1.xml": BOX, "set/Annotations/2.xml": "<annotation/>"},
        "set/Annotations/1.xml",
    ),
    "COCO": (
        ["set/train2017/1.jpg", "set/extra/2.jpg"],
        {"set/annotations/instances_train2017.json": COCO},
        "set/annotations/instances_train2017.json",
    ),
    "COCO of Roboflow": (
        ["set/a/1.jpg", "set/b/2.jpg"],
        {"set/a/_annotations.coco.json": COCO},
        "set/a/_annotations.coco.json",
    ),
    "labelme": (["set/a/1.jpg", "set/b/2.jpg"], {"set/b/2.json": SHAPES}, "set/b/2.json"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_and_polygons_are_refused_and_named(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    names, texts, said = LAYOUTS[layout]
    write(*names)
    for name, content in texts.items():
        write(name, content=content)
    refused(read, "set", named=f"{said}|({layout.split(' of ')[0].split(' seg')[0]})|data.label_names")
    # finetune reads them as boxes.
    is_read = layout == "YOLO"
    assert main(["finetune", "set", "--dry-run"]) == (0 if is_read else 2)
    assert is_read or said in capsys.readouterr().err
    assert Path("runs").exists() == is_read
    if all(Path(name).parent in {*map(Path, ("set/a", "set/b"))} for name in texts):
        assert read("set", label_names=["a", "b"]).keys() == {"a", "b"}


def test_boxes_next_to_a_folder_of_parts_are_found_by_finetune(capsys: pytest.CaptureFixture[str]) -> None:
    write("set/train/a/1.jpg", "set/train/b/2.jpg", "set/val/a/3.jpg", "set/val/b/4.jpg")
    assert main(["finetune", "set", "--dry-run"]) == 0
    write("set/annotations/instances_train.json", content=COCO)
    assert main(["finetune", "set", "--dry-run", "--output_dir", "runs/b"]) == 2
    assert "set/annotations/instances_train.json" in capsys.readouterr().err


def test_other_texts_with_the_names_of_images_are_no_annotations() -> None:
    write("set/cat/1.jpg", "set/cat/2.jpg", "set/dog/1.jpg", "set/dog/2.jpg")
    write("set/cat/1.txt", content="12 cats sit on 3 walls")
    write("set/cat/2.xml", content="<exif/>")
    write("set/dog/1.json", content={"license": "by"})
    write("set/dog/2.json", content="[1, 2")
    write("set/LICENSE.txt", "set/flowers.txt", content="0 0.5 0.5 0.25 0.25")
    os.mkfifo("set/dog/2.txt")
    assert {name: len(files) for name, files in read("set").items()} == {"cat": 2, "dog": 2}


def test_of_many_texts_a_sample_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    write(*(f"set/{'ab'[number % 2]}/{number}.jpg" for number in range(20)))
    write(*(f"set/{'ab'[number % 2]}/{number}.txt" for number in range(20)), content="a caption")
    opened: list[Path] = []
    monkeypatch.setattr(misread, "_TEXTS_LOOKED_AT", 5)
    monkeypatch.setattr(misread, "read_regular", lambda path: opened.append(path) or b"a caption")
    read("set")
    assert len(opened) == 5


def test_the_files_of_a_folder_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write("set/a/1.jpg", "set/b/2.jpg")
    write("set/a/1.txt", content="a caption")
    walked: list[str] = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top, *rest, **more: (walked.append(str(top)), walk(top, *rest, **more))[1])
    monkeypatch.setattr(images, "refuse_link_loops", lambda folder: None)
    read("set")
    assert walked == ["set"]


def test_a_license_next_to_class_folders_is_no_class() -> None:
    write("flowers/LICENSE.txt", content="CC-BY")
    write(*(f"flowers/{kind}/{number}.jpg" for kind in ("daisy", "roses", "tulips") for number in range(3)))
    assert {name: len(files) for name, files in read("flowers").items()} == {"daisy": 3, "roses": 3, "tulips": 3}


@pytest.mark.parametrize(
    ("parts", "train", "held", "test"),
    [
        ("Train Test", "Train", None, "Test"),
        ("Training Testing", "Training", None, "Testing"),
        ("train_set test_set val_set", "train_set", "val_set", "test_set"),
        ("training eval", "training", "eval", None),
        ("trainset testset extra", "trainset", None, "testset"),
    ],
)
def test_parts_of_the_data_are_not_classes(parts: str, train: str, held: str | None, test: str | None) -> None:
    for part in parts.split():
        write(*(f"set/{part}/{kind}/{part}{number}.jpg" for kind in ("cats", "dogs") for number in range(3)))
    assert main(["finetune", "set", "--dry-run"]) == 0
    for data in (load_recipe(Path("runs/set.yaml")).data, ImageClassificationData(train=f"set/{train}")):
        sets = read_labelled_images(data)
        sides = (sets.train, sets.eval)
        read_from = [{Path(side.where(n)).parts[1] for n in range(len(side))} for side in sides]
        assert read_from == [{train}, {held or train}]
        assert sets.label_names == ("cats", "dogs")
        assert (
            (f"evaluate RUN {Path('set', test)}" in str(sets.notes)) if test else "evaluate RUN" not in str(sets.notes)
        )


def test_parts_without_a_training_part_are_refused() -> None:
    write("set/val/a/1.jpg", "set/test/a/2.jpg")
    refused(read, "set", named="val|test|data.label_names")
    assert read("set", label_names=["test", "val"]).keys() == {"test", "val"}


def test_classes_with_one_name_of_a_part_stay_classes() -> None:
    write(*(f"rail/{kind}/{number}.jpg" for kind in ("trains", "test", "bus") for number in range(3)))
    assert read("rail").keys() == {"trains", "test", "bus"}


@pytest.mark.parametrize(("left", "right"), [("images", "masks"), ("image", "label"), ("a", "b")])
def test_images_and_their_masks_are_not_two_classes(left: str, right: str) -> None:
    for number in range(6):
        write(f"set/{left}/{number}.png")
        path = Path(f"set/{right}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.eye(16, dtype=np.uint8) * 255).save(path)
    refused(read, "set", named=f"{left}/ and {right}/|masks")
    assert read("set", label_names=[left, right]).keys() == {left, right}
