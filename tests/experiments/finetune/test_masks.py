"""Polygons and colors of masks: drawn once as masks of class numbers, or refused by the file."""

import json
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
from tests.support.runs import refused
from tests.support.wording import assert_golden, raises_golden


def unpack(path: str) -> tuple[str, str, str | None]:
    return unpacked(asked_of(path, minimal_recipe(path, [])), None)


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
    assert_golden(written.found.notes[0])
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
        assert_golden(written.found.notes[0], place)
    other: Any = written.recipe.data.model_copy(update={"label_names": ("background", "cat", "roof")})
    with raises_golden():
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
        "set/a.json|'cat'|rectangle|--task object-detection",
    ),
    "boxes among polygons of COCO": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT]}, {"bbox": [1, 1, 2, 2]}]),
        "set/a.json|annotation 1|--task object-detection",
    ),
    "an encoded mask": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT]}, {"segmentation": {"counts": "x"}}]),
        "set/a.json|annotation 1|RLE",
    ),
    "a missing image": (
        lambda: (write_coco("set/a.json", [{"segmentation": [FLAT]}]), Path("set/a1.png").unlink())[0],
        "set/a.json|a1.png",
    ),
    "a corner outside": (
        lambda: write_labelme("set/a.json", ("cat", [[2, 1], [13.5, 1], [8, 7]])),
        "set/a.json|'cat'|(13.5, 1)|set/a.png|12 x 10",
    ),
    "an image of another size": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT]}], width=24, height=20),
        "set/a.json|set/a0.png|24 x 20|12 x 10",
    ),
    "no shapes": (lambda: write_labelme("set/a.json"), "set/a.json|polygons"),
    "a field that is missing": (
        lambda: write_coco("set/a.json", [{"segmentation": [FLAT], "category_id": 5}]),
        "set/a.json|KeyError(5)",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_annotations_that_give_no_masks_are_refused(what: str) -> None:
    write, named = WRONG[what]
    write()
    refused(unpack, "set", named=named)
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
    assert_golden(written.found.notes[0])
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
        "1_L.png|2 of its colors|1,2,3|the 4 of set/class_dict.csv",
    ),
    "borders that are smoothed": (
        lambda: (
            Path("set/class_dict.csv").unlink(),
            spoil(MASK, draw(*((x, 7, (1, x // 8, 3)) for x in range(16)))),
        ),
        "6 colors|2 never fill|set/class_dict.csv",
    ),
    "many colors": (
        lambda: (
            Path("set/class_dict.csv").unlink(),
            spoil(MASK, draw(*((x % 32, x // 32, (x, 1, 3)) for x in range(70)))),
        ),
        "masks have 7|limit: 64",
    ),
    "a photo": (
        lambda: spoil(MASK, draw(*((x % 32, x // 32, (x, 1, 3)) for x in range(256)))),
        "1_L.png (PNG, mode RGB, 2|at most 255",
    ),
    "a JPEG": (
        lambda: spoil("set/train_labels/1_L.jpg", lambda pixels: pixels * 0),
        "1_L.jpg (JPEG, mode RGB, 1 colors)",
    ),
    "a mask of numbers among colors": (lambda: spoil(MASK, lambda pixels: pixels[..., 0]), "1_L.png (PNG, mode L, "),
    "transparency": (
        lambda: spoil(MASK, lambda pixels: np.dstack([pixels, pixels[..., 0]])),
        "1_L.png (PNG, mode RGBA, 4 colors)",
    ),
    "another size": (
        lambda: spoil(MASK, lambda pixels: pixels[:, :-2]),
        "1_L.png|38 x 32|set/train/1.jpg|40 x 32",
    ),
    "no class": (
        lambda: Path("set/class_dict.csv").write_text("name,r,g,b\nvoid,128,128,0\n"),
        "set/class_dict.csv|0 classes|255",
    ),
    "two lists": (
        lambda: Path("set/labels.txt").write_text(CLASS_DICT.replace("Tree", "Bush")),
        "set/class_dict.csv|set/labels.txt",
    ),
    "blue before red": (
        lambda: Path("set/class_dict.csv").write_text(CLASS_DICT.replace("r, g, b", "b, g, r")),
        "set/class_dict.csv|'name, b, g, r'",
    ),
    "a color with two names": (
        lambda: Path("set/class_dict.csv").write_text(CLASS_DICT + "Car, 128, 64, 128"),
        "set/class_dict.csv|'Car, 128, 64, 128'",
    ),
    "a number before the color": (
        lambda: Path("set/class_dict.csv").write_text("1 64 0 128 Car"),
        "set/class_dict.csv|'1 64 0 128 Car'",
    ),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_color_masks_that_leave_a_choice_are_refused(what: str) -> None:
    write_colors("set/train")
    Path("set/class_dict.csv").write_text(CLASS_DICT)
    change, named = UNCLEAR[what]
    change()
    refused(unpack, "set", named=named)
    assert not list(Path().glob("runs/*"))
