"""Archives, spreadsheets, polygons, and color masks: written next to the run, once, and never over other files."""

import csv
import gzip
import io
import json
import sys
import tarfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_train.experiments.finetune.recipe import asked_of, minimal_recipe
from accel_train.experiments.finetune.start import write_recipe
from accel_train.experiments.finetune.unpack import unpacked
from accel_train.tasks.semantic_segmentation.data import masked_pool
from benchmarks import shapes
from tests.support.runs import refused

ROWS = ["text,label", *(f"the film number {n} was long,{'ab'[n % 2]}" for n in range(40))]


def unpack(path: str, output_dir: str | None = None) -> tuple[str, str, str | None]:
    return unpacked(asked_of(path, minimal_recipe(path, [])), output_dir)


def write_zip(name: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_a_recipe_names_the_files_of_an_archive_and_says_where_they_are() -> None:
    write_zip("reviews.zip", {"reviews/data.csv": "\n".join(ROWS), "reviews/README.md": "about", "__MACOSX/x": "?"})
    written = write_recipe("reviews.zip", [])
    assert written.recipe.data.train == "runs/reviews-data/reviews/data.csv"
    assert written.recipe.output_dir == "runs/reviews"
    assert written.found.notes[0] == "reviews.zip: unpacked to runs/reviews-data (2 files)"
    assert not write_recipe("reviews.zip", []).is_new  # a second start reads the same files


@pytest.mark.parametrize("name", ["reviews.csv.gz", "reviews.tar.gz", "reviews.tar"])
def test_a_packed_table_has_the_rows_of_the_table(name: str) -> None:
    content = "\n".join(ROWS).encode()
    if name == "reviews.csv.gz":
        Path(name).write_bytes(gzip.compress(content))
    else:
        with tarfile.open(name, "w:gz" if name.endswith("gz") else "w") as archive:
            member = tarfile.TarInfo("reviews.csv")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert Path(unpack(name)[0]).read_bytes() == content


def packed_bomb(name: str, num_bytes: int) -> None:
    """Write an archive of a table with `num_bytes` blank lines after its rows."""
    content = "\n".join(ROWS).encode() + b"\n" * num_bytes
    if name.endswith(".csv.gz"):
        Path(name).write_bytes(gzip.compress(content, 1))
    elif name.endswith(".tar.gz"):
        with tarfile.open(name, "w:gz", compresslevel=1) as archive:
            member = tarfile.TarInfo("reviews.csv")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    else:
        with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("xl/a.xml" if name.endswith("xlsx") else "reviews.csv", content)


@pytest.mark.parametrize("name", ["b.csv.gz", "b.tar.gz", "b.zip", "b.xlsx"])
@pytest.mark.parametrize("limit", ["the disk", "the ratio"])
def test_an_archive_that_would_fill_the_disk_is_refused_before_it_is_written(
    name: str, limit: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fills_the_disk, module = limit == "the disk", "accel_train.experiments.finetune.unpack"
    monkeypatch.setattr(f"{module}._MOST_RATIO", 50)
    monkeypatch.setattr(f"{module}._SMALL_BYTES", 2**30 if fills_the_disk else 2**21)
    free = 2**21 if fills_the_disk else 2**40
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=free))
    written: list[int] = []
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: written.append(1))
    packed_bomb(name, 2**22)
    with pytest.raises(ValueError, match="GB free" if fills_the_disk else "more than 50 times") as refused:
        unpack(name)
    assert "Unpack it yourself" not in str(refused.value)
    assert not written
    assert not Path("runs/b-data").exists()


def test_a_folder_with_other_data_is_not_written_to() -> None:
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS)})
    Path("runs/reviews-data").mkdir(parents=True)
    Path("runs/reviews-data/mine.csv").write_text("mine")
    refused(unpack, "reviews.zip", named="runs/reviews-data exists and was not made from reviews.zip")
    assert [path.name for path in Path("runs/reviews-data").iterdir()] == ["mine.csv"]
    place, run, _ = unpack("reviews.zip", "other")
    assert (place, run) == ("other-data/data.csv", "other")
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS[:-1])})
    refused(unpack, "reviews.zip", "other", named="other-data exists and was not made from reviews.zip")


def test_a_damaged_archive_leaves_no_folder() -> None:
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS)})
    whole = Path("reviews.zip").read_bytes()
    Path("reviews.zip").write_bytes(whole[: len(whole) // 2])
    refused(unpack, "reviews.zip", named="reviews.zip cannot be unpacked")
    assert list(Path("runs").iterdir()) == []


def test_an_archive_writes_nothing_outside_its_folder() -> None:
    with tarfile.open("bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../../outside.csv"))
    error = refused(unpack, "bad.tar", named="bad.tar cannot be unpacked|outside.csv")
    assert "yourself" not in str(error)
    write_zip("bad.zip", {"../../outside.csv": "x", "data.csv": "\n".join(ROWS)})
    unpack("bad.zip")
    assert not list(Path().rglob("../outside.csv"))
    assert not Path("outside.csv").exists()
    assert not Path("runs/outside.csv").exists()


def test_cells_of_a_spreadsheet_are_written_as_they_are_shown() -> None:
    place, _, _ = unpack(shapes.spreadsheet())
    with Path(place).open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", "review", "label"]
    assert [row[0] for row in rows] == [str(number) for number in range(60)]
    assert len({row[1] for row in rows}) == 60
    assert {row[2] for row in rows} == {"positive", "negative", "neutral"}


def test_a_spreadsheet_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    refused(unpack, shapes.spreadsheet(), named="pip install 'accel-train[excel]'")


def test_another_process_reads_what_the_first_unpacks_and_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write_zip("reviews.zip", {"data.csv": "\n".join(ROWS)})
    monkeypatch.setattr("accel_train.experiments.finetune.unpack.WAIT_SECONDS", 0.2)
    asked = asked_of("reviews.zip", minimal_recipe("reviews.zip", []))
    refused(unpacked, asked, None, is_first=False, named="the first process did not make runs/reviews-data")
    assert not Path("runs").exists()
    assert unpacked(asked, None) == unpacked(asked, None, is_first=False)


def test_splits_in_one_document_are_files_and_the_test_split_is_evaluated_on_only_without_validation() -> None:
    rows = [{"text": row.split(",")[0], "label": row.split(",")[1]} for row in ROWS[1:]]
    Path("whole.json").write_text(json.dumps({"train": rows, "dev": rows[:7], "test": rows[:9]}))
    written = write_recipe("whole.json", [])
    assert (written.recipe.data.train, written.recipe.data.eval) == (
        "runs/whole-data/train.jsonl",
        "runs/whole-data/validation.jsonl",
    )
    assert (written.found.num_samples, written.found.test) == (40, "runs/whole-data/test.jsonl")
    assert [json.loads(line) for line in Path("runs/whole-data/train.jsonl").read_text().splitlines()] == rows
    Path("two.json").write_text(json.dumps({"train": rows, "test": [["a b", "c"]]}))
    assert unpack("two.json")[0] == "runs/two-data"
    Path("latin.json").write_bytes('[{"text": "caf\u00e9"}]'.encode("latin-1"))
    assert unpack("latin.json")[0] == "latin.json"
    assert Path("runs/two-data/eval_from_test.jsonl").read_text() == '{"1": "a b", "2": "c"}\n'


def test_rows_are_written_in_the_encoding_of_the_command_line() -> None:
    rows = [dict(zip(("text", "label"), row.split(","))) for row in ROWS[1:]]
    Path("whole.json").write_text(json.dumps({"train": rows, "dev": rows[:7]}), encoding="utf-16")
    assert write_recipe("whole.json", ["--data.encoding", "utf-16"]).found.num_samples == 40


@pytest.mark.parametrize("other", [{"oos_train": []}, {"val": [], "dev": []}, {"version": "1.0"}, {"test": {}}])
def test_an_object_with_another_key_or_with_two_keys_for_a_split_is_refused(other: dict[str, Any]) -> None:
    Path("whole.json").write_text(json.dumps({"train": [["a", "b"]], **other}))
    refused(write_recipe, "whole.json", [], named="whole.json")
    assert not Path("runs").exists()


def test_conll_files_are_named_by_the_part_in_their_extension() -> None:
    for part, size in (("train", 12), ("testa", 5), ("testb", 3)):
        Path("conll").mkdir(exist_ok=True)
        Path(f"conll/esp.{part}").write_bytes("Espa\u00f1a B-LOC\nes O\n\n".encode("latin-1") * size)
    Path("conll/README").write_text("about")
    written = write_recipe("conll", [])
    folder = "runs/conll-data/esp"
    assert (written.recipe.data.train, written.recipe.data.eval) == (
        f"{folder}.train.conll",
        f"{folder}.validation.conll",
    )
    assert (written.found.num_samples, written.found.test) == (12, f"{folder}.test.conll")
    assert Path(f"{folder}.train.conll").read_bytes() == Path("conll/esp.train").read_bytes()
    assert write_recipe("conll/esp.testb", []).recipe.data.train == "runs/esp-data/esp.test.conll"
    Path("conll/esp.dev").write_bytes(Path("conll/esp.testa").read_bytes())
    refused(write_recipe, "conll", ["--output_dir", "runs/other"], named="conll: finetune cannot read these files")


def test_sentences_and_their_tags_in_two_files_are_one_file_of_words_with_tags() -> None:
    for part in ("train", "valid"):
        Path("atis", part).mkdir(parents=True)
        Path("atis", part, "seq.in").write_text("to boston please\n\nfrom denver\n" * 10)
        Path("atis", part, "seq.out").write_text("O B-city O\n\nO B-city\n" * 10)
    Path("atis/train/label").write_text("flight\nflight\nflight\n" * 10)
    written = write_recipe("atis", [])
    assert (written.recipe.task, written.recipe.data.train) == ("token-classification", "runs/atis-data/train.conll")
    assert written.recipe.data.eval == "runs/atis-data/validation.conll"
    assert any("the files named label are not read" in note for note in written.found.notes)
    whole = "to O\nboston B-city\nplease O\n\nfrom O\ndenver B-city\n"
    assert Path("runs/atis-data/train.conll").read_text() == "\n".join([whole] * 10)
    Path("atis/valid/seq.out").write_text("O B-city O\n\nO\n" * 10)
    refused(
        write_recipe,
        "atis",
        ["--output_dir", "runs/other"],
        named="valid/seq.out:3 has 1 tag for the 2 words of seq.in",
    )


def write_labelme(name: str, *shapes: tuple[str, list[list[float]]], kind: str = "polygon", **facts: object) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10)).save(path.with_suffix(".png"))
    rows = [{"label": label, "points": points, "shape_type": kind} for label, points in shapes]
    path.write_text(json.dumps({"shapes": rows, "imagePath": f"{path.stem}.png", **facts}))


def write_coco(name: str, annotations: list[dict[str, object]], num_images: int = 2, **sizes: int) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"id": n, "file_name": f"{path.stem}{n}.png", **sizes} for n in range(num_images)]
    for image in images:
        Image.new("RGB", (12, 10)).save(path.with_name(str(image["file_name"])))
    rows = [{"id": n, "image_id": 0, "category_id": 9, **each} for n, each in enumerate(annotations)]
    categories = [{"id": 9, "name": "cat"}, {"id": 4, "name": "roof"}]
    path.write_text(json.dumps({"images": images, "annotations": rows, "categories": categories}))


def mask_at(path: str) -> list[list[int]]:
    return np.asarray(Image.open(path)).tolist()


SQUARE = [[2, 1], [8, 1], [8, 7], [2, 7]]
FLAT = [2, 1, 8, 1, 8, 7, 2, 7]


def test_polygons_of_labelme_become_masks_with_names_in_order() -> None:
    write_labelme(
        "set/train/a.json", ("roof", SQUARE), ("cat", [[4, 3], [6, 3], [6, 5], [4, 5]]), ("__ignore__", SQUARE[:3])
    )
    write_labelme("set/train/b.json", ("_background_", SQUARE), imageWidth=12, imageHeight=10)
    write_labelme("set/val/a.json", ("cat", SQUARE))
    write_labelme("set/test/a.json")
    written = write_recipe("set", [])
    assert written.recipe.task == "semantic-segmentation"
    assert written.recipe.data.label_names == ("background", "cat", "roof")
    assert (written.recipe.data.train, written.recipe.data.eval) == (
        "runs/set-data/images/train",
        "runs/set-data/images/val",
    )
    assert written.found.num_samples == 2
    expected = np.zeros((10, 12), int)
    expected[1:8, 2:9], expected[3:6, 4:7] = 2, 1
    drawn = np.array(mask_at("runs/set-data/masks/train/a.png"))
    ignored = drawn == 255
    assert ignored[1, 2:9].all()
    assert not ignored[7, :8].any()
    assert (drawn == expected)[~ignored].all()
    assert mask_at("runs/set-data/masks/train/b.png") == np.zeros((10, 12), int).tolist()
    assert "5 polygons on 4 images" in written.found.notes[0]
    assert written.found.unused == ("test/",)
    assert not write_recipe("set", []).is_new
    write_labelme("set/val/a.json", ("roof", SQUARE))
    refused(write_recipe, "set", [], named="runs/set-data exists and was not made from set")


def test_polygons_of_coco_become_masks_with_names_by_number_and_crowds_are_not_counted() -> None:
    crowd = {"iscrowd": 1, "segmentation": {"counts": [1]}, "bbox": [0, 0, 4, 9]}
    write_coco("set/train.json", [{"segmentation": [FLAT, FLAT]}, {**crowd, "category_id": 4}], width=12, height=10)
    for place in ("set", "set/train.json"):
        written = write_recipe(place, ["--data.num_workers", "0"], output_dir=f"runs/{len(place)}")
        assert written.recipe.data.label_names == ("background", "roof", "cat")
        assert written.found.num_samples == 2
        expected = np.zeros((10, 12), int)
        expected[0:10, 0:5], expected[1:8, 2:9] = 255, 2
        assert mask_at(f"runs/{len(place)}-data/masks/train0.png") == expected.tolist()
        assert mask_at(f"runs/{len(place)}-data/masks/train1.png") == np.zeros((10, 12), int).tolist()
        assert "3 polygons on 2 images are drawn" in written.found.notes[0]
        assert "1 of them (crowds, __ignore__) are not counted" in written.found.notes[0]
    other: Any = written.recipe.data.model_copy(update={"label_names": ("background", "cat", "roof")})
    with pytest.raises(ValueError, match=r"data.eval: the masks of .*roof.*data.label_names"):
        masked_pool("runs/3-data", other, "data.eval")


def test_an_archive_of_coco_is_unpacked_and_drawn() -> None:
    write_coco("set/_annotations.coco.json", [{"segmentation": [FLAT]}])
    with zipfile.ZipFile("set.zip", "w") as archive:
        for path in sorted(Path("set").iterdir()):
            archive.write(path)
    written = write_recipe("set.zip", [])
    assert written.recipe.data.train == "runs/set-masks"
    assert write_recipe("set.zip", []).path == written.path


WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "a rectangle of labelme": (
        lambda: write_labelme("set/a.json", ("cat", SQUARE[:2]), kind="rectangle"),
        "set/a.json: 'cat' is a rectangle.*--task object-detection",
    ),
    "boxes among polygons of COCO": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT]}, {"bbox": [1, 1, 2, 2]}]),
        "set/a.json: annotation 1 is a box without a polygon.*--task object-detection",
    ),
    "an encoded mask": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT]}, {"segmentation": {"counts": "x"}}]),
        r"set/a.json: annotation 1 is run-length encoded \(RLE\)",
    ),
    "a missing image": (
        lambda: (write_coco("set/a.json", [{"segmentation": [FLAT]}]), Path("set/a1.png").unlink())[0],
        "set/a.json: no images a1.png found",
    ),
    "a corner outside": (
        lambda: write_labelme("set/a.json", ("cat", [[2, 1], [13.5, 1], [8, 7]])),
        r"set/a.json: a polygon of 'cat' has a corner at \(13.5, 1\), and set/a.png has 12 x 10",
    ),
    "an image of another size": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT]}], width=24, height=20),
        r"set/a.json \(a0.png\): states 24 x 20 pixels, and set/a0.png has 12 x 10",
    ),
    "no shapes": (lambda: write_labelme("set/a.json"), "set/a.json has no polygons"),
    "a field that is missing": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT], "category_id": 5}]),
        r"set/a.json: not as .*KeyError\(5\)",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_annotations_that_give_no_masks_are_refused(what: str) -> None:
    write, message = WRONG[what]
    write()
    with pytest.raises(ValueError, match=message):
        unpack("set")
    assert not list(Path().glob("runs/*"))


COLORS = {"Tree": (128, 128, 0), "Void": (0, 0, 0), "Road": (128, 64, 128), "Car 2": (64, 0, 128)}
CLASS_DICT = "name, r, g, b\n" + "".join(f"{name}, {r}, {g}, {b}\n" for name, (r, g, b) in COLORS.items())


def write_colors(part: str, count: int = 2, side: str = "_labels", mode: str = "RGB", size: int = 40) -> None:
    """Write images and masks of blocks of 4 x 4 pixels, one of which has the place of each color in `COLORS`."""
    for path in (Path(part), Path(part + side)):
        path.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (size, 32)).save(Path(part, f"{number}.jpg"))
        pixels = np.array([*COLORS.values()], np.uint8)[blocks(number)]
        Image.fromarray(pixels).convert(mode).save(Path(part + side, f"{number}_L.png"))


def blocks(number: int) -> Any:
    ids = np.random.default_rng(number).permutation(80).reshape(8, 10) % 4
    return ids.repeat(4, 0).repeat(4, 1)


def test_colors_of_masks_are_classes_by_the_list_next_to_them_and_void_is_not_counted() -> None:
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        write_colors(f"set/{part}", count)
    Path("set/class_dict.csv").write_text(CLASS_DICT)
    Path("set/colors.json").write_text("{}")
    written = write_recipe("set", [])
    data = written.recipe.data
    assert (written.recipe.task, data.label_names) == ("semantic-segmentation", ("Tree", "Road", "Car 2"))
    assert (data.train, data.eval) == ("runs/set-data/images/train", "runs/set-data/images/val")
    assert written.found.num_samples == 3
    assert written.found.notes[0] == (
        "set: colors of the masks are classes by set/class_dict.csv; not counted: Void; not used: colors.json; "
        "written to runs/set-data"
    )
    numbers = np.array([0, 255, 1, 2])
    for name in ("train/0", "train/2", "val/1", "test/0"):
        expected = numbers[blocks(int(name[-1]))].tolist()
        assert mask_at(f"runs/set-data/masks/{name}.png") == expected
    assert Path("runs/set-data/images/val/1.jpg").resolve() == Path("set/val/1.jpg").resolve()
    assert not write_recipe("set", []).is_new
    whole = write_recipe("set/train", ["--data.ignore_index", "9"], output_dir="runs/whole")
    assert (whole.recipe.data.train, whole.recipe.data.eval) == ("runs/whole-data", None)
    assert mask_at("runs/whole-data/masks/2.png") == np.array([0, 9, 1, 2])[blocks(2)].tolist()
    Path("set/val_labels/0_L.png").write_bytes(Path("set/val_labels/1_L.png").read_bytes())
    refused(write_recipe, "set", [], named="runs/set-data exists and was not made from set")


def test_colors_are_named_by_the_lists_of_tools_or_by_their_parts() -> None:
    write_colors("voc/JPEGImages", side="/../SegmentationClass")
    rows = [f"{name}:{r},{g},{b}::" for name, (r, g, b) in COLORS.items()]
    Path("voc/labelmap.txt").write_text("\n".join(["# label:color_rgb:parts:actions", *rows]))
    Path("voc/ImageSets/Segmentation").mkdir(parents=True)
    for name, part in enumerate(("train", "val")):
        Path(f"voc/ImageSets/Segmentation/{part}.txt").write_text(f"{name}\n")
    data = write_recipe("voc", []).recipe.data
    assert data.label_names == ("Tree", "Road", "Car 2")
    assert (data.train, data.eval) == ("runs/voc-data/images/train", "runs/voc-data/images/val")
    assert mask_at("runs/voc-data/masks/val/1.png") == np.array([0, 255, 1, 2])[blocks(1)].tolist()
    write_colors("set/images", side="/../masks")
    data = write_recipe("set", []).recipe.data
    assert data.label_names == ("color_0_0_0", "color_64_0_128", "color_128_64_128", "color_128_128_0")
    assert mask_at("runs/set-data/masks/1.png") == np.array([3, 0, 2, 1])[blocks(1)].tolist()
    Path("set/label_colors.txt").write_text("\n".join(f"{r} {g} {b}\t{name}" for name, (r, g, b) in COLORS.items()))
    assert write_recipe("set", [], output_dir="runs/new").recipe.data.label_names == ("Tree", "Road", "Car 2")


@pytest.mark.parametrize("mode", ["P", "L"])
def test_masks_of_numbers_stay_where_they_are(mode: str) -> None:
    write_colors("set/train", mode=mode)
    Path("set/class_dict.csv").write_text(CLASS_DICT)
    assert unpack("set/train") == ("set/train", "runs/train", None)


def spoil(file: str, change: Callable[[Any], Any], source: str = "set/train_labels/1_L.png") -> None:
    pixels = change(np.asarray(Image.open(source)).copy())
    Path(source).unlink()
    Image.fromarray(pixels).save(file)


def draw(*places: tuple[int, int, tuple[int, int, int]]) -> Callable[[Any], Any]:
    def change(pixels: Any) -> Any:
        for x, y, color in places:
            pixels[y, x] = color
        return pixels

    return change


MASK = "set/train_labels/1_L.png"
UNCLEAR: dict[str, tuple[Callable[[], object], str]] = {
    "a color that the list does not name": (
        lambda: spoil(MASK, draw((5, 7, (1, 2, 3)), (6, 7, (1, 2, 4)))),
        r"1_L.png: 2 of its colors \(1,2,3\) are not among the 4 of set/class_dict.csv",
    ),
    "borders that are smoothed": (
        lambda: (
            Path("set/class_dict.csv").unlink(),
            spoil(MASK, draw(*((x, 7, (1, x // 8, 3)) for x in range(16)))),
        ),
        r"^set: masks have 6 colors \(limit: 64\), of which 2 never fill 2 x 2 pixels.* the classes in set/class_dict",
    ),
    "many colors": (
        lambda: (
            Path("set/class_dict.csv").unlink(),
            spoil(MASK, draw(*((x % 32, x // 32, (x, 1, 3)) for x in range(70)))),
        ),
        r"^set: masks have 7[0-4] colors \(limit: 64\)",
    ),
    "a photo": (
        lambda: spoil(MASK, draw(*((x % 32, x // 32, (x, 1, 3)) for x in range(256)))),
        r"1_L.png \(PNG, mode RGB, 2[56][0-9] colors\): .* at most 255",
    ),
    "a JPEG": (
        lambda: spoil("set/train_labels/1_L.jpg", lambda pixels: pixels * 0),
        r"1_L.jpg \(JPEG, mode RGB, 1 colors\)",
    ),
    "a mask of numbers among colors": (lambda: spoil(MASK, lambda pixels: pixels[..., 0]), r"1_L.png \(PNG, mode L, "),
    "transparency": (
        lambda: spoil(MASK, lambda pixels: np.dstack([pixels, pixels[..., 0]])),
        r"1_L.png \(PNG, mode RGBA, 4 colors\): color masks have exact, opaque RGB",
    ),
    "another size": (
        lambda: spoil(MASK, lambda pixels: pixels[:, :-2]),
        "1_L.png has 38 x 32 pixels, and set/train/1.jpg has 40 x 32",
    ),
    "no class": (
        lambda: Path("set/class_dict.csv").write_text("name,r,g,b\nvoid,128,128,0\n"),
        "set/class_dict.csv: 0 classes. Name 1 to 255",
    ),
    "two lists": (
        lambda: Path("set/labels.txt").write_text(CLASS_DICT.replace("Tree", "Bush")),
        "set/class_dict.csv and set/labels.txt list different classes",
    ),
    "blue before red": (
        lambda: Path("set/class_dict.csv").write_text(CLASS_DICT.replace("r, g, b", "b, g, r")),
        "set/class_dict.csv: 'name, b, g, r' is not `name,r,g,b`",
    ),
    "a color with two names": (
        lambda: Path("set/class_dict.csv").write_text(CLASS_DICT + "Car, 128, 64, 128"),
        "set/class_dict.csv: 'Car, 128, 64, 128' is not .* or its color has two names",
    ),
    "a number before the color": (
        lambda: Path("set/class_dict.csv").write_text("1 64 0 128 Car"),
        "set/class_dict.csv: '1 64 0 128 Car' is not",
    ),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_color_masks_that_leave_a_choice_are_refused(what: str) -> None:
    write_colors("set/train")
    Path("set/class_dict.csv").write_text(CLASS_DICT)
    change, message = UNCLEAR[what]
    change()
    with pytest.raises(ValueError, match=message):
        unpack("set")
    assert not list(Path().glob("runs/*"))
