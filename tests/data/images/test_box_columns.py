"""Boxes in the columns of tables: csv files of many tools, and lists in jsonl and parquet."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from accel_train.data.images.annotations import columns
from accel_train.data.sources import Source
from accel_train.data.tables import Row, read_rows
from accel_train.recipe.data import Data
from tests.support.box_tables import BY_VALUES, FORMATS, csv_lines, write_table
from tests.support.boxes import EXPECTED, SIZES, boxes_by_image, classes, corners, places, write_images
from tests.support.boxes import read_boxes as read
from tests.support.runs import refused, write_file
from tests.support.wording import assert_golden


@pytest.fixture(autouse=True)
def images(folder: Path) -> None:
    write_images("set/images")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_folder", [False, True])
def test_every_table_holds_the_same_boxes(name: str, is_folder: bool) -> None:
    path = write_table(name)
    sets = read("set" if is_folder else str(path))
    found = boxes_by_image(sets.train, sets.label_names)
    assert sets.label_names == ("cat", "dog")
    assert (sets.box_format is not None) == (name in BY_VALUES)
    assert {key: {(kind, tuple(map(round, box))) for kind, box in each} for key, each in found.items()} == EXPECTED
    assert all(abs(value - round(value)) < 1e-5 for each in found.values() for _, box in each for value in box)


def broken(name: str, old: str, new: str) -> str:
    """Write a table in which a text is replaced."""
    path = write_table(name)
    assert old in path.read_text()
    return write_file(path, path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("tensorflow.csv", "20,10,36,30", "20,10,46,30"), "set/tensorflow.csv:3 (set/images/a.png)|outside"),
        (("tensorflow.csv", "20,10,36,30", "20,10,20,30"), "set/tensorflow.csv:3|no area"),
        (("tensorflow.csv", "20,10,36,30", "20,,36,30"), "set/tensorflow.csv:3|['20', '', '36', '30']"),
        (("tensorflow.csv", "20,10,36,30", "20,nan,36,30"), "set/tensorflow.csv:3|not finite"),
        (("tensorflow.csv", "dog,20,10,36,30", "dog,,,,"), "set/tensorflow.csv:3|'dog', but no box"),
        (("tensorflow.csv", "dog,20", ",20"), "set/tensorflow.csv:3|no class"),
        (("tensorflow.csv", "a.png,40,30,dog", "a.png,41,30,dog"), "set/tensorflow.csv:2|(40, 30) and (41, 30)"),
        (("tensorflow.csv", "b.png,20,50", "b.png,20,51"), "set/tensorflow.csv:4|20 x 50|20 x 51"),
        (("tensorflow.csv", "b.png,20,50", "c.png,20,50"), "set/tensorflow.csv:4|set/c.png: the file does not"),
        (("wheat.csv", "[4, 6, 10, 8]", "[4, 6, 10]"), "set/wheat.csv:2|[4, 6, 10]"),
        (("wheat.csv", "[4, 6, 10, 8]", "4 6 10 x"), "set/wheat.csv:2|'x'"),
        (("wheat.csv", "[4, 6, 10, 8]", "7"), "set/wheat.csv:2|7 is not a box"),
        (("retinanet.csv", "images/b.png,0,0,20,50,dog", "images/b.png,0,0,20,x,dog"), "set/retinanet.csv:3|'x'"),
        (("via.csv", '""rect""', '""polygon""'), "set/via.csv:2|polygon|not a box"),
        (("via.csv", '{""kind"": ""cat""}', "{}"), "set/via.csv:2|no class"),
        (("rows.jsonl", '"x2": 36', '"x2": 46'), "set/rows.jsonl:2|outside"),
    ],
)
def test_a_fault_names_file_and_line(change: tuple[str, str, str], named: str) -> None:
    lines = str(refused(read, broken(*change), named=named)).splitlines()
    assert "1 fault " in lines[0]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("header", "row", "empty"),
    [
        ("image,bbox,class", '{image},"[{l}, {t}, {w}, {h}]",{class}', ""),
        ("image,bbox,class", '{image},"[{fl}, {ft}, {fr}, {fb}]",{class}', ""),
        ("image,bbox,area,class", '{image},"[{l}, {t}, {w}, {h}]",{area},{class}', ""),
        ("image,bbox,area,class", '{image},"[{l}, {t}, {r}, {b}]",{area},{class}', ""),
    ],
)
def test_values_tell_the_order_of_four_numbers(header: str, row: str, empty: str) -> None:
    TABLE.write_text(csv_lines(header, row, empty))
    sets = read("set/boxes.csv")
    assert sets.box_format == ("xyxy" if "{r}" in row or "{fr}" in row else "xywh")
    assert sets.train.boxes_of(0).corners.round(3).tolist() == [[4, 6, 14, 14], [20, 10, 36, 30]]
    assert len(sets.train) == 2
    assert "left out 1 image that" in str(sets.notes)


TABLE = Path("set/boxes.csv")
AMBIGUOUS = 'image,bbox,class\na.png,"[4, 6, 10, 8]",cat\nb.png,"[5, 10, 10, 20]",dog\n'


def test_an_order_that_values_do_not_tell_is_asked_for() -> None:
    TABLE.write_text(AMBIGUOUS)
    refused(read, "set/boxes.csv", named="set/boxes.csv|of 2 boxes, 0 as|data.box_format: xywh or xyxy")
    found = {form: corners(read("set/boxes.csv", box_format=form).train, 1) for form in ("xyxy", "xywh", "cxcywh")}
    assert found == {"xyxy": [[5, 10, 10, 20]], "xywh": [[5, 10, 15, 30]], "cxcywh": [[0, 0, 10, 20]]}
    # Stated areas tell it: 6 x 2 and 5 x 10.
    TABLE.write_text(AMBIGUOUS.replace("class", "class,area").replace("cat", "cat,12").replace("dog", "dog,50"))
    assert read("set/boxes.csv").box_format == "xyxy"
    # Files without header are RetinaNet's.
    TABLE.write_text("a.png,4,6,10,8,cat\nb.png,5,10,10,20,dog\n")
    assert corners(read("set/boxes.csv").train) == [[4, 6, 10, 8]]


def test_an_order_against_the_names_of_columns_is_refused() -> None:
    refused(
        read, str(write_table("tensorflow.csv")), box_format="xywh", named="data.box_format=xywh|xmin, ymin, xmax, ymax"
    )


def test_a_class_is_a_column_by_its_name_or_is_asked_for() -> None:
    named = csv_lines("image,kind,xmin,ymin,xmax,ymax", "{image},{class},{l},{t},{r},{b}")
    TABLE.write_text(named)
    refused(read, "set/boxes.csv", named="set/boxes.csv|data.class_column: kind|data.label_names: [object]")
    assert read("set/boxes.csv", class_column="kind").label_names == ("cat", "dog")
    assert classes(read("set/boxes.csv", label_names=("thing",)).train) == [0, 0]
    refused(read, "set/boxes.csv", label_names=("a", "b"), named="data.class_column: kind")
    refused(read, "set/boxes.csv", class_column="kin", named="'kin'|'kind'")
    # A column that is the same in all boxes of an image describes the image.
    TABLE.write_text(named.replace(",dog,0,0", ",cat,0,0").replace("dog", "cat"))
    assert read("set/boxes.csv").label_names == ("object",)
    TABLE.write_text(csv_lines("image,class,category,bbox", '{image},{class},{id}{l},"{l} {t} {w} {h}"'))
    refused(read, "set/boxes.csv", named="set/boxes.csv: class and category|data.class_column: class")


def test_classes_are_whole_numbers_up_to_a_limit() -> None:
    path, header = TABLE, "image,class_id,xmin,ymin,xmax,ymax"
    path.write_text(csv_lines(header, "{image},{id},{l},{t},{r},{b}"))
    assert read(str(path)).label_names == ("0", "1")
    path.write_text(csv_lines(header, "{image},{id}.0,{l},{t},{r},{b}"))
    assert read(str(path)).label_names == ("0", "1")
    assert classes(read(str(path), label_names=("cat", "dog")).train) == [0, 1]
    for number in ("4000000000", "-1", "9" * 5000):
        path.write_text(csv_lines(header, number.join(("{image},", ",{l},{t},{r},{b}"))))
        refused(read, str(path), named=f"3 faults|set/boxes.csv:2|{number[:19]}")


@pytest.mark.parametrize(
    "header",
    [
        "text,x,y,width,height",
        "image,text,label",
        "image,x1,y1,x2,y2,x3,y3,x4,y4,label",
        "image,class,xmin,ymin",
    ],
)
def test_other_tables_have_no_boxes(header: str) -> None:
    row = ",".join(
        "a.png" if name == "image" else "word" if name in ("text", "label") else "3" for name in header.split(",")
    )
    write_file("set/table.csv", f"{header}\n{row}\n{row}\n")
    refused(read, "set/table.csv", named="set/table.csv has no boxes")


def test_words_with_a_box_each_are_no_objects() -> None:
    row = {"image": "images/a.png", "words": ["a", "b"], "bboxes": [[1, 1, 3, 3], [4, 4, 9, 9]], "ner_tags": [0, 1]}
    write_file("set/words.jsonl", json.dumps(row) + "\n")
    refused(read, "set/words.jsonl", named="set/words.jsonl has no boxes")


def test_parts_are_told_by_the_names_of_tables() -> None:
    for part in ("train", "val", "test"):
        write_table("tensorflow.csv").rename(f"set/{part}_labels.csv")
    sets = read("set")
    assert (len(sets.train), len(sets.eval)) == (3, 3)
    assert_golden("\n".join(sets.notes))
    sets = read(
        "set/images", annotations="set/train_labels.csv", eval="set/images", eval_annotations="set/val_labels.csv"
    )
    assert len(sets.train) == 3


def test_images_of_another_folder_need_its_name() -> None:
    Path("set/images").rename("elsewhere")
    path = write_table("tensorflow.csv")
    refused(read, str(path), named="set/tensorflow.csv|'filename'|a.png|data.annotations")
    sets = read("elsewhere", annotations=str(path))
    assert boxes_by_image(sets.train, sets.label_names) == EXPECTED


def test_images_to_predict_are_each_read_once() -> None:
    sets = read(str(write_table("tensorflow.csv")), annotations=None, label_names=("cat", "dog"))
    assert [Path(place).name for place in places(sets.train)] == list(SIZES)
    assert sets.train.boxes is None


def test_a_broken_row_is_named_and_a_box_is_looked_for_in_many_rows() -> None:
    path = write_table("retinanet.csv")
    text = path.read_text()
    path.write_text("".join(f"images/{number}.png,,,,,\n" for number in range(30)) + text)
    write_images("set/images", {f"{number}.png": (8, 8) for number in range(30)})
    assert len(read(str(path)).train) == 33
    path.write_text(text + "images/a.png,1,2\n")
    refused(read, str(path), named="set/retinanet.csv:5: the row has 3 fields")


def test_images_in_the_table_are_not_read_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    path, wanted = str(write_table("bytes.parquet")), list[str]()

    def watched(source: Source, names: Sequence[str], data: Data) -> Iterator[Row]:
        wanted.extend(names)
        return read_rows(source, names, data)

    monkeypatch.setattr(columns, "read_rows", watched)
    assert len(read(path).train) == 3
    assert {*wanted} == {"bboxes", "labels"}
