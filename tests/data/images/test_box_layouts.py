"""Boxes in the layouts of public tools: parts, lists of images, class files, and entries that would be read wrongly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from accel_train.data.images.annotations.coco import read_coco
from accel_train.tasks.object_detection.config import ObjectDetectionData
from accel_train.tasks.object_detection.data import read_boxed_images
from tests.support.boxes import (
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


def in_folder(folder: str) -> list[str]:
    return [f"{folder}/{name}.png" for name in ("a", "b", "empty")]


def lists(*named: tuple[str, str]) -> None:
    """Write lists of VOC: name and content."""
    for name, text in named:
        write_file(f"set/ImageSets/Main/{name}", text)


def yolo_without_yaml(*parts: str) -> None:
    write_yolo("set", parts).unlink()


def write_voc_parts(*parts: str) -> None:
    for part in parts:
        write_voc(Path("set", part))


@pytest.mark.parametrize(
    ("write", "train", "held", "test"),
    [
        (
            lambda: yolo_without_yaml("test2017", "train2017", "val2017"),
            in_folder("set/images/train2017"),
            in_folder("set/images/val2017"),
            "set/images/test2017",
        ),
        (
            lambda: yolo_without_yaml("Test", "Train", "Valid"),
            in_folder("set/images/Train"),
            in_folder("set/images/Valid"),
            "set/images/Test",
        ),
        (
            lambda: write_voc_parts("test", "train", "val"),
            in_folder("set/train/JPEGImages"),
            in_folder("set/val/JPEGImages"),
            "set/test",
        ),
        (
            lambda: (write_voc("set"), lists(("trainval.txt", "a\n"), ("val.txt", "a\n"), ("test.txt", "b\n"))),
            ["set/JPEGImages/a.png"],
            None,
            "set/ImageSets/Main/test.txt",
        ),
    ],
)
def test_images_to_test_are_not_trained_on(
    write: Callable[[], Any], train: list[str], held: list[str] | None, test: str
) -> None:
    write()
    sets = read("set")
    assert (places(sets.train), sets.eval and places(sets.eval)) == (train, held)
    assert f"evaluate RUN {test}" in str(sets.notes)


def test_the_evaluation_part_is_found_below_any_folder() -> None:
    write_yolo("train_data/set", ("train", "val")).unlink()
    assert places(read("train_data/set").eval) == in_folder("train_data/set/images/val")


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda: write_voc_parts("VOC2007", "VOC2012"), "set/VOC2007, set/VOC2012"),
        (lambda: (write_voc("set"), lists(("test.txt", "a\n"))), "test.txt|no train.txt"),
        (
            lambda: [write_coco(Path("set", part, "_annotations.coco.json"), Path("set", part)) for part in PARTS],
            "set/test/_annotations.coco.json, set/valid/_annotations.coco.json",
        ),
    ],
)
def test_a_folder_without_a_training_part_is_refused(write: Callable[[], Any], named: str) -> None:
    write()
    refused(read, "set", named=named)


PARTS = ("test", "valid")


def test_a_missing_folder_of_a_yaml_is_noted() -> None:
    file = write_yolo("set")
    file.write_text(file.read_text() + "val: images/val\n")
    assert_golden("\n".join(read("set").notes))
    file.write_text("names: [cat, dog]\ntrain: 5\n")
    refused(read, "set", named="set/data.yaml: train is 5")


@pytest.mark.parametrize("path", [".", "set", "../elsewhere", "/nowhere"])
def test_the_path_of_a_yaml_does_not_lead_to_images_of_another_folder(path: str) -> None:
    write_yolo("set")
    write_file("set/data.yaml", f"path: {path}\nnames: [cat, dog]\ntrain: images/train\n")
    Path("elsewhere").mkdir()
    if path == ".":
        write_yolo(Path(), names="[bird, cow]").unlink()
    assert places(read("set/data.yaml").train) == in_folder("set/images/train")


@pytest.mark.parametrize("name", ["classes.txt", "obj.names", "labels/classes.txt"])
def test_class_files_with_the_line_ends_of_windows_name_the_classes(name: str) -> None:
    write_yolo("set").unlink()
    write_file(Path("set", name), b"cat\r\ndog\r\n\r\n")
    assert read("set").label_names == ("cat", "dog")
    write_file(Path("set", name), b"cat\r\n\r\ndog\r\n")
    refused(read, "set", named=f"set/{name}")
    write_file(Path("set", name), b"cat\ncat\n")
    refused(read, "set", named=f"set/{name}")


def test_text_files_next_to_images_are_boxes_with_a_class_file() -> None:
    write_images("set")
    write_file("set/a.txt", "1 0.5 0.5 0.5 0.2\n")
    refused(read, "set", named="set has no boxes")
    write_file("set/classes.txt", "cat\ndog\n")
    sets = read("set")
    assert places(sets.train) == in_folder("set")
    assert corners(sets.train) == [[10, 12, 30, 18]]
    assert classes(sets.train) == [1]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("./images/train/a.png\n\nimages/train/b.png\n", ["a", "b"]),
        ("set/images/train/a.png\nset/images/train/b.png\n", ["a", "b"]),
        (".\\images\\train\\a.png\r\n", ["a"]),
    ],
)
def test_a_list_of_images_is_relative_to_itself_or_to_the_working_directory(lines: str, expected: list[str]) -> None:
    write_yolo("set")
    write_file("set/data.yaml", "names: [cat, dog]\ntrain: train.txt\n")
    write_file("set/train.txt", lines.encode())
    assert places(read("set").train) == [f"set/images/train/{name}.png" for name in expected]
    write_file("set/train.txt", "gone.png\n")
    refused(read, "set", named="train lists set/gone.png, which does not exist")


def test_text_files_without_an_image_are_counted() -> None:
    write_yolo("set")
    write_file("set/labels/train/gone.txt", "0 0.5 0.5 0.1 0.1\n")
    write_file("set/labels/train/classes.txt", "cat\ndog\n")
    assert [
        note for note in read("set").notes if "1 label file without" in note and "set/labels/train/gone.txt" in note
    ]


def yolo_that_names(train: str) -> str:
    write_yolo("set")
    write_file("set/data.yaml", f"names: [cat, dog]\ntrain: {train}\n")
    write_file("set/train.txt", "images/train/a.png\nimages/train/a.png\n")
    return "set"


def repeated_row() -> str:
    write_metadata("set")
    text = Path("set/metadata.jsonl").read_text()
    write_file("set/metadata.jsonl", text + text.splitlines()[0])
    return "set"


def repeated_line() -> str:
    write_voc("set")
    lists(("train.txt", "a\nb\na\n"))
    return "set"


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda: yolo_that_names("[images/train, images/train]"), "3 faults|set/images/train/empty.png is listed 2"),
        (lambda: yolo_that_names("train.txt"), "1 fault|set/images/train/a.png is listed 2 times"),
        (repeated_row, "1 fault|set/a.png is listed 2 times"),
        (repeated_line, "1 fault|set/JPEGImages/a.png is listed 2 times"),
    ],
)
def test_an_image_that_is_listed_twice_is_a_fault(write: Callable[[], str], named: str) -> None:
    refused(read, write(), named=named)


def test_two_files_may_not_annotate_the_same_images() -> None:
    for name in ("one", "two"):
        write_coco(f"{name}.json", "images")
    data = ObjectDetectionData(train=("one.json", "two.json"), eval_fraction=0)
    refused(read_boxed_images, data, named="3 faults|images/a.png is listed 2 times")
    assert len(read("one.json", eval="two.json").train) == 3


def test_images_of_one_name_in_two_folders_are_not_read_from_one() -> None:
    content = coco_content()
    content["images"][0]["file_name"], content["images"][1]["file_name"] = "x/a.png", "y/a.png"
    refused(read, coco(content), named="x/a.png: the file does not exist|y/a.png: the file does not exist")


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("set/coco/train_annotations.json", "set/train"),
        ("set/train/labels.json", "set/train/data"),
        ("set/annotations/instances_default.json", "set/images/default"),
    ],
)
def test_images_of_a_coco_file_are_found_by_its_name(file: str, images: str) -> None:
    write_coco(Path(file), Path(images))
    assert places(read(file).train) == in_folder(images)


def test_whole_numbers_with_a_point_are_ids() -> None:
    content = coco_content()
    for each in content["annotations"]:
        each |= {"image_id": float(each["image_id"]), "category_id": float(each["category_id"])}
    coco(content)
    write_coco("d.json", "images")
    sets, others = read("c.json"), read("d.json")
    for index in range(3):
        assert classes(sets.train, index) == classes(others.train, index)
    content["annotations"][0]["image_id"] = 100.5
    refused(read, coco(content), named="image_id 100.5")


def test_images_to_predict_have_the_category_that_annotations_use() -> None:
    content = coco_content()
    # Roboflow writes a category of the same name that no annotation uses.
    content["categories"].append({"id": 0, "name": "cat"})
    coco(content)
    expected = read_coco(Path("c.json")).category_ids
    assert expected == {"cat": 90, "dog": 80}
    found = read_coco(Path("c.json"), needs_boxes=False)
    assert found.category_ids == expected
    assert not any(record.rows for record in found.records)


@pytest.mark.parametrize(
    ("text", "is_difficult"),
    [("0", False), ("", False), ("False", False), ("Unspecified", False), ("1", True), ("True", True), ("1.0", True)],
)
def test_difficult_is_a_number_or_a_word(text: str, is_difficult: bool) -> None:
    write_voc("set")
    file = Path("set/Annotations/b.xml")
    assert "<difficult>0" in file.read_text()
    file.write_text(file.read_text().replace("<difficult>0", f"<difficult>{text}"))
    assert read("set").train.boxes_of(1).is_crowd.tolist() == [is_difficult]


def test_a_crowd_is_a_number_or_a_word() -> None:
    content = coco_content()
    for each, flag in zip(content["annotations"], ("false", True, None)):
        each["iscrowd"] = flag
    coco(content)
    train = read("c.json").train
    assert [train.boxes_of(index).is_crowd.tolist() for index in range(3)] == [[False, True], [False], []]


def test_an_xml_file_of_another_format_is_a_fault() -> None:
    write_voc("set")
    Path("set/Annotations/b.xml").write_text(
        voc_xml("b.png", (), (20, 50)).replace("<annotation>", "<annotation xmlns='http://example.org'>")
    )
    refused(read, "set", named="1 fault|set/Annotations/b.xml|{http://example.org}annotation")


@pytest.mark.parametrize("line", ["a b", "a b  1", "a b.png"])
def test_lists_of_voc_name_files_with_spaces_or_extensions(line: str) -> None:
    write_voc("set")
    for file in (Path("set/JPEGImages/a.png"), Path("set/Annotations/a.xml")):
        file.rename(file.with_stem("a b" if line != "a b  1" else "a"))
    lists(("train.txt", f"{line}\nb\n"))
    train = [f"set/JPEGImages/{'a' if line == 'a b  1' else 'a b'}.png", "set/JPEGImages/b.png"]
    assert places(read("set").train) == train


def changed(change: Callable[[dict[str, Any]], object]) -> None:
    write_metadata("set")
    rows = [json.loads(line) for line in Path("set/metadata.jsonl").read_text().splitlines()]
    for row in rows:
        change(row["objects"])
    write_file("set/metadata.jsonl", "\n".join(map(json.dumps, rows)))


def test_fractions_in_the_place_of_pixels_are_a_fault() -> None:
    changed(lambda cell: cell.update(bbox=[[each / 100 for each in box] for box in cell["bbox"]]))
    refused(read, "set", named="1 fault|set/metadata.jsonl:1, object 1|fractions", invalid_boxes="drop")


def test_corners_in_the_place_of_sizes_are_a_fault() -> None:
    content = coco_content()
    # Twice: four boxes.
    content["annotations"] += [
        {"id": number, "image_id": 100, "category_id": 90, "bbox": [20, 10, 16, 20]} for number in (1, 2)
    ]
    for each in content["annotations"]:
        left, top, width, height = each["bbox"]
        each["bbox"] = [left, top, left + width, top + height]
    coco(content)
    refused(
        read, "c.json", named="c.json: every box fits its image as [left, top, right, bottom]", invalid_boxes="drop"
    )
    # One right box proves the other order.
    content["annotations"][0]["bbox"] = [20, 10, 16, 5]
    coco(content)
    assert "3 invalid boxes" in str(read("c.json", invalid_boxes="drop").notes)


@pytest.mark.parametrize("name", [None, "", float("nan")])
def test_an_object_without_a_class_is_a_fault(name: Any) -> None:
    changed(lambda cell: cell.update(category=[*cell["category"][:-1], name] if cell["category"] else []))
    refused(read, "set", named="2 faults|set/metadata.jsonl:1, object 2: has no class|metadata.jsonl:2, object 1")


def test_numbers_and_names_are_not_mixed_as_classes() -> None:
    changed(lambda cell: cell.update(category=[*cell["category"][:-1], 0] if cell["category"] else []))
    refused(read, "set", named="1 fault|set/metadata.jsonl: some classes are numbers")


def test_whole_numbers_with_a_point_are_classes() -> None:
    changed(lambda cell: cell.update(category=[float(each == "dog") for each in cell["category"]]))
    sets = read("set", label_names=("cat", "dog"))
    assert classes(sets.train) == [0, 1]


def test_the_column_of_boxes_may_have_another_name() -> None:
    write_metadata("set")
    file = Path("set/metadata.jsonl")
    file.write_text(file.read_text().replace('"objects"', '"litter"'))
    for train in ("set", "set/metadata.jsonl"):
        refused(read, train, named=f"{train} has no boxes")
        assert read(train, objects_column="litter").label_names == ("cat", "dog")


def data_set(images: str) -> datasets.Dataset:
    """Return the rows of a folder with metadata.jsonl, with the bytes of its images."""
    rows = [json.loads(line) for line in Path(images, "metadata.jsonl").read_text().splitlines()]
    return datasets.Dataset.from_list(
        [{"image": Path(images, row["file_name"]).read_bytes(), "objects": row["objects"]} for row in rows],
        features=datasets.Features(
            image=datasets.Image(),
            objects={
                "bbox": datasets.List(datasets.List(datasets.Value("float32"), length=4)),
                "category": datasets.List(datasets.ClassLabel(names=["cat", "dog"])),
            },
        ),
    )


def test_all_shards_of_a_folder_are_read() -> None:
    write_metadata("set")
    rows, folder = data_set("set"), Path("hub/data")
    folder.mkdir(parents=True)
    rows.select([0, 1]).to_parquet(folder / "train-00000-of-00002.parquet")
    rows.select([2]).to_parquet(folder / "train-00001-of-00002.parquet")
    rows.select([1]).to_parquet(folder / "validation-00000-of-00001.parquet")
    for train in ("hub", "hub/data"):
        sets = read(train)
        assert [len(sets.train.boxes_of(index)) for index in range(len(sets.train))] == [2, 1, 0]
        assert [len(sets.eval.boxes_of(0)), len(sets.eval)] == [1, 1]
    sets = read("hub/data/train-*.parquet")
    assert (len(sets.train), sets.eval, sets.label_names) == (3, None, ("cat", "dog"))


def test_a_saved_data_set_has_its_parts() -> None:
    write_metadata("set")
    rows = data_set("set")
    rows.save_to_disk("one")
    datasets.DatasetDict(train=rows, validation=rows.select([1]), test=rows.select([0])).save_to_disk("parts")
    assert len(read("one").train) == 3
    sets = read("parts")
    assert (len(sets.train), len(sets.eval)) == (3, 1)
    assert corners(sets.eval) == [[0, 0, 20, 50]]


def test_a_missing_file_of_a_table_is_named() -> None:
    write_metadata("set")
    Path("set/b.png").unlink()
    refused(read, "set", named="set/metadata.jsonl:2: set/b.png: the file does not exist")


def with_areas(of: Callable[[float, float, float, float], float]) -> Path:
    """Write COCO whose boxes are [left, top, right, bottom] inside their images, with a stated area of each."""
    content = coco_content()
    for each in content["annotations"]:
        left, top, width, height = (value / 2 for value in each["bbox"])
        each |= {"bbox": [left, top, left + width, top + height], "area": of(left, top, width, height)}
    coco(content)
    return Path("c.json")


def test_areas_tell_that_boxes_are_corners() -> None:
    # No box leaves its image, so the areas alone tell it. Right and bottom are outside of a box, or its last pixels.
    for area in (lambda left, top, w, h: w * h, lambda left, top, w, h: (w + 1) * (h + 1)):
        path = with_areas(area)
        refused(read, str(path), named="1 fault|c.json: every box has its stated area as [left, top, right, bottom]")
    # The areas of masks are smaller than their boxes.
    assert len(read(str(with_areas(lambda left, top, w, h: w * h * 0.7))).train) == 3
    # Right boxes with their areas, and one area that fits both.
    assert len(read(str(with_areas(lambda left, top, w, h: (left + w) * (top + h)))).train) == 3


def test_areas_of_objects_tell_that_boxes_are_corners() -> None:
    def halve(cell: dict[str, Any]) -> None:
        cell["area"] = [w * h / 4 for _, _, w, h in cell["bbox"]]
        cell["bbox"] = [[x / 2, y / 2, (x + w) / 2, (y + h) / 2] for x, y, w, h in cell["bbox"]]

    changed(halve)
    refused(read, "set", named="1 fault|set/metadata.jsonl: every box has its stated area|data.box_format: xyxy")
    assert corners(read("set", box_format="xyxy").train) == [[2, 3, 7, 7], [10, 5, 18, 15]]


def yolo_lines(text: str) -> None:
    write_yolo("set")
    write_file("set/labels/train/a.txt", text)
    write_file("set/labels/train/b.txt", "")


def test_corners_in_the_place_of_yolos_centers_are_a_fault() -> None:
    yolo_lines("0 0.1 0.2 0.35 0.46\n0 0.5 0.33 0.9 1\n1 0.6 0.1 0.8 0.3\n1 0.1 0.1 0.4 0.5\n")
    named = "1 fault|every box fits its image as [left, top, right, bottom]; write [center x, center y, width, height]"
    refused(read, "set", named=named, invalid_boxes="drop")


@pytest.mark.parametrize("num_outside", [0, 1, 5])
def test_corners_in_yolos_files_are_told_by_one_box_that_leaves_its_image_as_a_center(num_outside: int) -> None:
    inside = [f"0 {0.3 + n / 100} 0.3 {0.4 + n / 100} 0.45" for n in range(20)]
    outside = [f"1 {0.6 + n / 100} 0.1 0.95 0.3" for n in range(num_outside)]
    yolo_lines("\n".join([*inside, *outside]))
    as_corners = read("set", box_format="xyxy").train.boxes_of(0)
    if num_outside:
        named = "every box fits its image as [left, top, right, bottom]|or set data.box_format: xyxy"
        refused(read, "set", named=named)
        refused(read, "set", named=named, invalid_boxes="drop")
    else:
        # YOLO's definition holds if both orders fit.
        assert corners(read("set").train) != as_corners.corners.tolist()
    size = np.array([as_corners.width, as_corners.height] * 2)
    assert (as_corners.corners[0] / size).tolist() == pytest.approx([0.3, 0.3, 0.4, 0.45])


def test_a_careless_edge_in_yolos_files_is_a_wrong_box_alone() -> None:
    yolo_lines("".join(f"0 0.{n} 0.5 0.1 0.2\n" for n in range(1, 10)) + "0 0.9 0.5 0.6 0.2\n")
    refused(read, "set", named="1 fault|lies outside")
    assert len(read("set", invalid_boxes="drop").train.boxes_of(0).corners) == 9


def test_pixels_in_the_place_of_yolos_fractions_are_named() -> None:
    yolo_lines("0 9 10 10 8\n")
    refused(read, "set", named="1 fault|set/labels/train/a.txt, line 1|outside|pixels or percent")
