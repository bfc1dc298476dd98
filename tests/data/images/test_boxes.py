"""Boxes of COCO, YOLO, Pascal VOC and tables: found, checked, and turned with their images."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from accel_train.data.builtin.digit_scenes import digit_scenes
from accel_train.tasks.object_detection.config import ObjectDetectionData
from accel_train.tasks.object_detection.data import read_boxed_images
from tests.support.boxes import (
    EXPECTED,
    SIZES,
    THINGS,
    Thing,
    boxes_by_image,
    classes,
    coco,
    coco_content,
    corners,
    places,
    voc_xml,
    write_coco,
    write_images,
    write_metadata,
    write_voc,
    write_yolo,
)
from tests.support.boxes import read_boxes as read
from tests.support.runs import refused, write_file
from tests.support.wording import assert_golden

CROWD = Thing("b.png", "cat", (2, 3, 4, 5), is_crowd=True)


def write_every_kind() -> None:
    write_coco("coco/annotations/instances_train2017.json", "coco/train2017")
    write_coco("coco/annotations/instances_val2017.json", "coco/val2017")
    captions = {"images": [], "annotations": [{"id": 1, "caption": "a cat"}]}
    write_file("coco/annotations/captions_train2017.json", json.dumps(captions))
    write_coco("coco/annotations/person_keypoints_train2017.json", "coco/train2017")
    for part in ("train", "valid", "test"):
        write_coco(Path("robo", part, "_annotations.coco.json"), Path("robo", part))
    write_coco("flat/annotations.json", "flat")
    write_coco("below/annotations.json", "below/images")
    write_yolo("yolo", ("train", "val"))
    write_yolo("yolo_mapping", names="{0: cat, 1: dog}")
    write_voc("voc")
    write_voc("voc_lists")
    write_file("voc_lists/ImageSets/Main/train.txt", "a\nempty\n")
    write_file("voc_lists/ImageSets/Main/val.txt", "b\n")
    write_images("voc_flat/train")
    for name, size in SIZES.items():
        own = [thing for thing in THINGS if thing.image == name]
        Path("voc_flat/train", name).with_suffix(".xml").write_text(voc_xml(name, own, size))
    write_metadata("table")
    write_metadata("table_parts/train", "categories")
    write_metadata("table_parts/validation", "label")


@pytest.mark.parametrize(
    ("train", "held"),
    [
        ("coco", "coco/val2017/a.png"),
        ("coco/annotations/instances_train2017.json", None),
        ("robo", "robo/valid/a.png"),
        ("robo/train", None),
        ("flat", None),
        ("below", None),
        ("below/annotations.json", None),
        ("yolo", "yolo/images/val/a.png"),
        ("yolo/data.yaml", "yolo/images/val/a.png"),
        ("yolo/images/train", None),
        ("yolo_mapping", None),
        ("voc", None),
        ("voc_flat", None),
        ("table", None),
        ("table/metadata.jsonl", None),
        ("table_parts", "table_parts/validation/metadata.jsonl:1"),
    ],
)
def test_every_layout_holds_the_same_boxes(train: str, held: str | None) -> None:
    write_every_kind()
    sets = read(train)
    assert boxes_by_image(sets.train, sets.label_names) == EXPECTED
    assert (None if sets.eval is None else sets.eval.where(0)) == held
    if sets.eval is not None:
        assert boxes_by_image(sets.eval, sets.label_names) == EXPECTED


def test_the_lists_of_pascal_voc_divide_its_images() -> None:
    write_every_kind()
    sets = read("voc_lists")
    assert places(sets.train) == ["voc_lists/JPEGImages/a.png", "voc_lists/JPEGImages/empty.png"]
    assert places(sets.eval) == ["voc_lists/JPEGImages/b.png"]
    assert classes(sets.eval) == [1]


def test_coco_is_read_as_pycocotools_reads_it() -> None:
    write_coco("c.json", "images", coco_content((*THINGS, CROWD)))
    sets = read("c.json")
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = COCO("c.json")
    order = {key: number for number, key in enumerate(sorted(theirs.getCatIds()))}
    assert sets.label_names == tuple(theirs.cats[key]["name"] for key in sorted(theirs.cats)) == ("dog", "cat")
    for index, key in enumerate(theirs.getImgIds()):
        annotations, boxes = theirs.imgToAnns[key], sets.train.boxes_of(index)
        assert sets.train.where(index) == f"images/{theirs.imgs[key]['file_name']}"
        sizes = boxes.corners[:, 2:] - boxes.corners[:, :2]
        assert np.hstack([boxes.corners[:, :2], sizes]).tolist() == [each["bbox"] for each in annotations]
        assert boxes.class_ids.tolist() == [order[each["category_id"]] for each in annotations]
        assert boxes.is_crowd.tolist() == [bool(each["iscrowd"]) for each in annotations]
        assert boxes.areas.tolist() == [each["area"] for each in annotations]
        assert boxes.image_id == key
    assert sets.category_ids == (80, 90)


def test_metadata_is_read_as_datasets_reads_it(folder: Path) -> None:
    write_metadata("table")
    theirs = datasets.load_dataset("imagefolder", data_dir="table", split="train", cache_dir=str(folder / "cache"))
    sets = read("table")
    assert len(sets.train) == len(theirs) == 3
    for index, row in enumerate(theirs):
        boxes = sets.train.boxes_of(index)
        assert np.asarray(sets.train.image(index)).tolist() == np.asarray(row["image"]).tolist()
        sizes = boxes.corners[:, 2:] - boxes.corners[:, :2]
        assert np.hstack([boxes.corners[:, :2], sizes]).tolist() == row["objects"]["bbox"]
        assert [sets.label_names[number] for number in boxes.class_ids] == row["objects"]["category"]


def test_a_parquet_file_of_datasets_keeps_its_class_names() -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "objects": {
                "bbox": datasets.List(datasets.List(datasets.Value("float32"))),
                "category": datasets.List(datasets.ClassLabel(names=["cat", "dog"])),
            },
        }
    )
    write_images("images")
    cells = [
        {
            "bbox": [thing.box for thing in THINGS if thing.image == name],
            "category": [thing.name for thing in THINGS if thing.image == name],
        }
        for name in SIZES
    ]
    rows = {"image": [f"images/{name}" for name in SIZES], "objects": cells}
    datasets.Dataset.from_dict(rows, features=features).to_parquet("boxes.parquet")
    sets = read("boxes.parquet")
    assert sets.label_names == ("cat", "dog")
    assert classes(sets.train) == [0, 1]
    assert corners(sets.train) == [[4, 6, 14, 14], [20, 10, 36, 30]]


def test_a_box_over_a_whole_voc_image_ends_at_its_edges() -> None:
    write_images("v/JPEGImages", {"a.png": (40, 30)})
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>40</xmax><ymax>30</ymax></bndbox>"
    crowd = f"<object><name>cat</name><difficult>1</difficult>{box}</object>"
    cat = f"<object><name>cat</name>{box}</object>"
    write_file("v/Annotations/a.xml", f"<annotation><filename>a.png</filename>{crowd}{cat}</annotation>")
    boxes = read("v").train.boxes_of(0)
    assert boxes.corners.tolist() == [[0, 0, 40, 30]] * 2
    assert boxes.areas.tolist() == [1200, 1200]
    assert boxes.is_crowd.tolist() == [True, False]


def broken_coco(change: dict[str, Any]) -> str:
    """Write COCO whose second annotation is changed."""
    content = coco_content()
    content["annotations"][1] |= change
    return coco(content)


def broken_yolo(line: str) -> str:
    write_yolo("y")
    with Path("y/labels/train/b.txt").open("a") as file:
        file.write(line)
    return "y"


def broken_voc(change: tuple[str, str]) -> str:
    write_voc("v")
    text = Path("v/Annotations/b.xml").read_text()
    assert change[0] in text
    write_file("v/Annotations/b.xml", text.replace(*change))
    return "v"


def broken_table(objects: Any) -> str:
    write_metadata("t")
    lines = Path("t/metadata.jsonl").read_text().splitlines()
    lines[1] = json.dumps({"file_name": "b.png", "objects": objects})
    write_file("t/metadata.jsonl", "\n".join(lines))
    return "t"


FAULTS: dict[Callable[[Any], str], list[tuple[Any, str]]] = {
    broken_coco: [
        ({"bbox": [20, 10, 22, 5]}, "c.json, annotation 1003 (images/a.png)|20, 10, 42, 15|outside"),
        ({"bbox": [-2, 10, 5, 5]}, "annotation 1003|outside"),
        ({"bbox": [20, 10, 0, 5]}, "annotation 1003|no area"),
        ({"bbox": [20, 10, -3, 5]}, "annotation 1003|no area"),
        ({"bbox": [20, float("nan"), 3, 5]}, "annotation 1003|not finite"),
        ({"bbox": [20, 10, 5]}, "annotation 1003|[20, 10, 5]"),
        ({"bbox": None}, "annotation 1003|None"),
        ({"area": -4}, "annotation 1003|area -4"),
        ({"area": "large"}, "annotation 1003|not finite"),
        ({"category_id": 7}, "annotation 1003|category_id 7"),
        ({"category_id": [7]}, "annotation 1003|category_id [7]"),
        ({"image_id": 1}, "annotation 1003|image_id 1"),
        ({"id": 1000}, "annotation 1000|twice"),
    ],
    broken_yolo: [
        ("2 0.5 0.5 0.1 0.1", "y/labels/train/b.txt, line 2|class 2|2 classes"),
        ("-1 0.5 0.5 0.1 0.1", "b.txt, line 2|class -1"),
        ("nan 0.5 0.5 0.1 0.1", "b.txt, line 2|class nan"),
        ("0.5 0.5 0.5 0.1 0.1", "b.txt, line 2|class 0.5"),
        ("0 0.5 0.5 0.1", "b.txt, line 2|class x y w h"),
        ("0 0.5 0.5 0.1 x", "b.txt, line 2|class x y w h"),
        ("0 0.1 0.1 0.2 0.2 0.3 0.1", "b.txt, line 2|7 numbers|polygon"),
        ("0 0.9 0.5 0.4 0.1", "b.txt, line 2 (y/images/train/b.png)|outside"),
        ("0 10 10 5 5", "b.txt, line 2|outside"),
        ("1 0.5 0.5 1.0 1.0", "b.txt, line 2|repeats line 1"),
    ],
    broken_voc: [
        (("<xmax>20", "<xmax>29"), "v/Annotations/b.xml, object 1 (v/JPEGImages/b.png)|outside"),
        (("<xmax>20", f"<xmax>{'9' * 400}"), "b.xml, object 1|not finite"),
        (("<xmax>20</xmax>", ""), "b.xml, object 1|bndbox"),
        (("<name>dog</name>", ""), "b.xml, object 1|no name"),
        (("</annotation>", ""), "b.xml|not XML"),
        (("<width>20", "<width>30"), "v/Annotations/b.xml|v/JPEGImages/b.png|20 x 50|30 x 50"),
    ],
    broken_table: [
        ({"bbox": [[1, 1, 30, 3]], "category": ["cat"]}, "t/metadata.jsonl:2, object 1|outside"),
        ({"bbox": [[1, 1, 3, 3]], "category": []}, "t/metadata.jsonl:2|boxes: 1, classes: 0"),
        ({"bbox": [[1, 1, 3, 3]]}, "t/metadata.jsonl:2|boxes: 1, classes: 0"),
        ({"bbox": [[1, 1]], "category": ["cat"]}, "t/metadata.jsonl:2, object 1|[1, 1]"),
        ([1], "t/metadata.jsonl:2|objects"),
        (None, "t/metadata.jsonl:2|objects"),
    ],
}


@pytest.mark.parametrize(
    ("write", "change", "named"), [(write, *row) for write, rows in FAULTS.items() for row in rows]
)
def test_a_fault_names_file_and_annotation(write: Callable[[Any], str], change: Any, named: str) -> None:
    lines = str(refused(read, write(change), named=named)).splitlines()
    assert "1 fault " in lines[0]
    assert len(lines) == 2


def test_the_image_of_an_xml_file_is_found_by_the_name_of_the_file() -> None:
    sets = read(broken_voc(("<filename>b.png", "<filename>c.png")))
    assert boxes_by_image(sets.train, sets.label_names) == EXPECTED


def test_all_faults_are_reported_at_once_up_to_twenty() -> None:
    content = coco_content()
    content["annotations"] = [
        {"id": number, "image_id": 100, "category_id": 90, "bbox": [0, 0, 41 + number, 10]} for number in range(1, 25)
    ]
    content["images"].append({"id": 5, "file_name": "gone.png", "width": 4, "height": 4})
    coco(content)
    write_file("images/b.png", "no image")
    lines = str(refused(read, "c.json", named="26 faults|data.invalid_boxes")).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert "images/b.png" in lines[1]
    assert [f"annotation {number} " in line for number, line in enumerate(lines[3:21], start=1)] == [True] * 18
    assert_golden(f"{lines[2]}\n{lines[21]}")


def test_invalid_boxes_are_dropped_if_asked_but_no_unknown_class() -> None:
    train = broken_coco({"bbox": [20, 10, 0, 5]})
    sets = read(train, invalid_boxes="drop")
    assert classes(sets.train) == [1]
    assert [note for note in sets.notes if "1 invalid" in note and "annotation 1003" in note]
    train = broken_coco({"category_id": 7})
    refused(read, train, invalid_boxes="drop", named="annotation 1003|category_id 7")


def test_a_box_that_leaves_its_image_by_a_pixel_is_clipped() -> None:
    train = broken_coco({"bbox": [-1, -0.5, 42, 31.5]})
    assert corners(read(train).train)[1] == [0, 0, 40, 30]
    refused(read, broken_coco({"bbox": [-1.01, 0, 4, 4]}), named="outside")


def test_images_and_ids_that_occur_twice_are_faults() -> None:
    content = coco_content()
    content["images"] += [{**content["images"][0], "file_name": "c.png"}, {**content["images"][0], "id": 1}]
    content["categories"].append({"id": 90, "name": "bird"})
    refused(read, coco(content), named="image 100 (c.png): the id occurs twice|a.png is listed 2 times|category 90")


STORED = [3, 5, 17, 11]
"""Left, top, right, and bottom of a rectangle."""


def red_image(orientation: int, size: tuple[int, int] = (40, 30)) -> None:
    """Write i/a.png: black, with the rectangle in red in its stored pixels."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    left, top, right, bottom = STORED
    pixels[top:bottom, left:right, 0] = 255
    exif = Image.Exif()
    exif[274] = orientation
    Path("i").mkdir(exist_ok=True)
    Image.fromarray(pixels).save("i/a.png", exif=exif)


def red_box(image: Image.Image) -> list[int]:
    """Return the corners of the red pixels."""
    places = np.argwhere(np.asarray(image)[..., 0] > 127)
    (top, left), (bottom, right) = places.min(axis=0), places.max(axis=0) + 1
    return [int(left), int(top), int(right), int(bottom)]


def coco_of(size: tuple[int, int] | None, box: list[int] = STORED) -> str:
    stated = {} if size is None else dict(zip(("width", "height"), size))
    left, top, right, bottom = box
    content = {
        "images": [{"id": 1, "file_name": "i/a.png", **stated}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [left, top, right - left, bottom - top]}],
        "categories": [{"id": 1, "name": "red"}],
    }
    write_file("c.json", json.dumps(content))
    return "c.json"


@pytest.mark.parametrize("orientation", [1, 5, 6, 7, 8])
def test_boxes_turn_with_their_image_if_the_size_before_its_rotation_is_stated(orientation: int) -> None:
    red_image(orientation)
    train = read(coco_of((40, 30))).train
    boxes = train.boxes_of(0)
    assert train.image(0).size == (boxes.width, boxes.height) == ((40, 30) if orientation == 1 else (30, 40))
    assert boxes.corners[0].tolist() == red_box(train.image(0))


def test_boxes_of_the_upright_size_stay() -> None:
    red_image(6)
    upright = red_box(Image.open("i/a.png").transpose(Image.Transpose.ROTATE_270))
    train = read(coco_of((30, 40), upright)).train
    assert corners(train)[0] == upright == red_box(train.image(0))


@pytest.mark.parametrize(
    ("orientation", "size", "stated"),
    [(3, (40, 30), (40, 30)), (2, (40, 30), (40, 30)), (6, (30, 30), (30, 30)), (6, (40, 30), None)],
)
def test_boxes_of_an_unknown_direction_are_refused(
    orientation: int, size: tuple[int, int], stated: tuple[int, int] | None
) -> None:
    red_image(orientation, size)
    refused(read, coco_of(stated), named=f"i/a.png|EXIF orientation {orientation}")


def test_boxes_of_another_size_than_the_image_are_refused() -> None:
    red_image(1)
    refused(read, coco_of((80, 60), [6, 10, 34, 22]), named="i/a.png|40 x 30|80 x 60")
    refused(read, coco_of((30, 40)), named="i/a.png|40 x 30|30 x 40")


def test_yolo_refers_to_the_upright_image() -> None:
    red_image(6)
    upright = red_box(Image.open("i/a.png").transpose(Image.Transpose.ROTATE_270))
    left, top, right, bottom = upright
    numbers = ((left + right) / 2 / 30, (top + bottom) / 2 / 40, (right - left) / 30, (bottom - top) / 40)
    write_file("i/a.txt", f"0 {' '.join(map(str, numbers))}")
    write_file("data.yaml", "train: i\nnames: [red]\n")
    assert read("data.yaml").train.boxes_of(0).corners[0] == pytest.approx(upright, abs=1e-4)


def test_the_annotations_may_lie_elsewhere() -> None:
    write_coco("here/c.json", "there")
    write_coco("here/v.json", "far/val")
    sets = read("there", annotations="here/c.json", eval="far/val", eval_annotations="here/v.json")
    assert boxes_by_image(sets.train, sets.label_names) == EXPECTED
    assert sets.eval.where(1) == "far/val/b.png"
    refused(read, "there", annotations="here/gone.json", named="data.annotations|here/gone.json")
    refused(read, "there", named="data.train|there has no boxes")


def test_names_decide_the_order_of_classes_and_other_classes_are_faults() -> None:
    coco()
    assert classes(read("c.json", label_names=("bird", "cat", "dog")).train) == [1, 2]
    refused(read, "c.json", label_names=("cat",), named="2 faults|annotation 1003|'dog'|data.label_names")
    data = ObjectDetectionData(train="c.json", eval_fraction=0.0)
    assert read_boxed_images(data, ("cat", "dog")).label_names == ("cat", "dog")
    assert read_boxed_images(data, ("cat", "dog", "bird")).label_names == ("dog", "cat")


def test_an_evaluation_class_without_training_is_a_fault() -> None:
    write_voc("v", THINGS[:1])
    write_voc("w")
    refused(read, "v", eval="w", named="w/Annotations/a.xml, object 2|'dog'|cat")


def test_images_to_predict_need_no_boxes() -> None:
    write_images("images")
    sets = read("images", annotations=None, label_names=("cat", "dog"))
    assert len(sets.train) == 3
    assert sets.train.boxes is None


def test_a_single_image_can_be_predicted() -> None:
    write_images("images")
    sets = read("images/b.png", annotations=None, label_names=("cat", "dog"))
    assert places(sets.train) == ["images/b.png"]
    refused(read, "images/b.png", named="data.train: images/b.png has no boxes")


def test_images_of_a_coco_file_without_annotations_are_predicted_by_their_ids() -> None:
    content = coco_content()
    coco(content)
    write_file("c.json", json.dumps({key: content[key] for key in ("images", "categories")}))
    sets = read("c.json", annotations=None, label_names=("cat", "dog"))
    assert [sets.train.row_id(index) for index in range(3)] == ["100", "107", "114"]
    assert places(sets.train) == [f"images/{name}" for name in SIZES]
    assert sets.category_ids == (90, 80)


def test_a_split_by_content_keeps_boxes_with_their_images() -> None:
    coco()
    sets = read("c.json", eval_fraction=0.4)
    assert len(sets.train) + len(sets.eval) == 3
    sides = [boxes_by_image(side, sets.label_names) for side in (sets.train, sets.eval)]
    assert sides[0] | sides[1] == EXPECTED


def test_the_identity_changes_with_a_box_a_class_and_a_crowd() -> None:
    found = set()
    for change in ({}, {"bbox": [20, 10, 16, 19]}, {"category_id": 90}, {"iscrowd": 1}, {"area": 3.0}):
        found.add(read(broken_coco(change)).identity)
    assert len(found) == 5


def test_the_digit_scenes_have_a_box_around_each_digit() -> None:
    for held_out in (False, True):
        _, masks, boxes = digit_scenes(held_out=held_out)
        num_checked = 0
        for index, each in enumerate(boxes):
            mask = np.asarray(masks[index])
            assert {number + 1 for number in each.class_ids.tolist()} == {*np.unique(mask).tolist()} - {0}
            for number, box, area in zip(each.class_ids.tolist(), each.corners.tolist(), each.areas.tolist()):
                if each.class_ids.tolist().count(number) == 1:
                    places = np.argwhere(mask == number + 1)
                    (top, left), (bottom, right) = places.min(axis=0), places.max(axis=0) + 1
                    assert box == [left, top, right, bottom]
                    assert area == len(places)
                    num_checked += 1
        assert num_checked > len(boxes)


def test_faults_are_reported_before_missing_boxes() -> None:
    train = broken_coco({"bbox": None})
    content = json.loads(Path(train).read_text())
    write_file(train, json.dumps({**content, "annotations": content["annotations"][1:2]}))
    refused(read, train, named="annotation 1003")
    write_file(train, json.dumps({**content, "annotations": []}))
    refused(read, train, named="no training image has a box")


@pytest.mark.parametrize("orientation", [3, 6])
def test_a_rotated_photo_of_metadata_is_read_as_datasets_shows_it(orientation: int, folder: Path) -> None:
    red_image(orientation)
    theirs = datasets.load_dataset("imagefolder", data_dir="i", split="train", cache_dir=str(folder / "cache"))
    left, top, right, bottom = red_box(theirs[0]["image"])
    objects = {"bbox": [[left, top, right - left, bottom - top]], "category": ["red"]}
    write_file("i/metadata.jsonl", json.dumps({"file_name": "a.png", "objects": objects}))
    train = read("i").train
    assert corners(train)[0] == [left, top, right, bottom] == red_box(train.image(0))
