"""Folders and tables of images are read right or refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from accel_train.cli.main import main
from accel_train.data.images.labelled import read_labelled_images
from accel_train.recipe.data import Data
from accel_train.recipe.loader import load_recipe

PAIRS_OF_NAMES = (
    ("image", "label"),
    ("image", "mask"),
    ("Images", "Masks"),
    ("imgs", "masks"),
    ("img", "mask"),
    ("input", "target"),
    ("images", "gt"),
    ("original", "segmented"),
    ("JPEGImages", "SegmentationClassPNG"),
    ("images_prepped_train", "annotations_prepped_train"),
)


def _save(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


def _photo(number: int, edge: int = 48) -> Any:
    return np.random.default_rng(number).integers(0, 256, (edge, edge, 3))


def _pairs_of_images(folder: Path, images: str, masks: str, count: int = 6) -> None:
    for number in range(count):
        _save(folder / images / f"{number}.png", _photo(number))
        _save(folder / masks / f"{number}.png", (_photo(number)[..., 0] > 127) * 255)


def _recipe(path: str) -> Any:
    return yaml.safe_load(Path(path).read_text())


def test_data_09_images_with_masks_are_pairs_and_never_two_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (images, masks) in enumerate(PAIRS_OF_NAMES):
        _pairs_of_images(Path(f"set{number}"), images, masks)
        assert main(["finetune", f"set{number}", "--dry-run"]) == 0
        recipe = _recipe(f"runs/set{number}.yaml")
        assert recipe["task"] == "semantic-segmentation"
        assert recipe["data"]["mask_values"] == [0, 255]
    assert "not used: nothing" in capsys.readouterr().out
    _pairs_of_images(Path("unknown"), "left", "right")
    for folder in ("set0", "set2", "unknown"):
        assert main(["plan", "image_classification", "--data.train", folder]) == 2
    assert main(["finetune", "unknown", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "left/" in said
    assert "right/" in said
    given = ("--task", "image-classification", "--data.label_names", "[left, right]")
    assert main(["finetune", "unknown", "--dry-run", *given]) == 0


BOXES = {
    "a/1.txt": "0 0.5 0.5 0.2 0.3\n",
    "a/1.xml": "<annotation><object><bndbox></bndbox></object></annotation>",
    "a/1.json": '{"shapes": [], "version": "5"}',
    "instances_train.json": '{"images": [], "annotations": [], "categories": []}',
}
NO_BOXES = {"a/1.txt": "7 12 30 8 4", "a/1.json": '{"caption": "x"}', "annotations.json": '{"1.png": "a"}'}


def test_boxes_between_images_are_refused_and_captions_and_lists_of_labels_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        _save(Path("set", "ab"[number % 2], f"{number}.png"), _photo(number))
    for name, text in NO_BOXES.items():
        Path("set", name).write_text(text)
    assert main(["finetune", "set", "--dry-run"]) == 0
    for name, text in BOXES.items():
        before = Path("set", name).read_text() if name in NO_BOXES else None
        Path("set", name).write_text(text)
        assert main(["finetune", "set", "--dry-run"]) == 2
        assert name in capsys.readouterr().err
        assert main(["plan", "image_classification", "--data.train", "set"]) == 2
        assert name in capsys.readouterr().err
        Path("set", name).unlink() if before is None else Path("set", name).write_text(before)


def test_data_11_the_size_of_images_comes_from_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = []
    for number in range(8):
        file = io.BytesIO()
        Image.new("RGB", (400, 400), (number * 9, 40 * (number % 2), 200)).save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": ["cat", "dog"][number % 2]})
    pq.write_table(pa.Table.from_pylist(rows), "pictures.parquet")
    assert main(["finetune", "pictures.parquet", "--dry-run"]) == 0
    assert _recipe("runs/pictures.yaml")["data"]["image_size"] == 128
    Path("labels.csv").write_text("file,label\n" + "".join(f"{n}.png,{'ab'[n % 2]}\n" for n in range(8)))
    assert main(["finetune", "labels.csv", "--dry-run"]) == 2
    assert not Path("runs/labels.yaml").exists()


def test_data_04_ids_are_the_images_of_a_folder_and_never_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = [f"{number:08x}a{number % 7}" for number in range(1, 13)]
    rows = "".join(f"{name},{('pug', 'beagle')[n % 2]}\n" for n, name in enumerate(ids))
    Path("labels.csv").write_text("id,label\n" + rows)
    assert main(["finetune", "labels.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "'id'" in said
    for number, name in enumerate(ids):
        _save(Path("train", name + (".jpg", ".png")[number % 2]), _photo(number, 100))
        _save(Path("test", f"other{number}.jpg"), _photo(number + 50, 100))
    for path in ("labels.csv", "."):
        assert main(["finetune", path, "--dry-run", "--output_dir", "runs/dogs"]) == 0
    recipe = _recipe("runs/dogs.yaml")
    assert (recipe["task"], recipe["data"]["image_column"]) == ("image-classification", "id")
    assert recipe["data"]["image_size"] == 128
    assert main(["plan", "runs/dogs.yaml"]) == 0
    assert "test/" in capsys.readouterr().out


def test_folders_that_a_table_has_other_classes_for_are_not_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(16):
        _save(Path("set", f"part_{number % 2}", f"scan{number}.png"), _photo(number))
    rows = [f"scan{n},{('mole', 'wart')[n // 2 % 2]},{n % 3}" for n in range(16)]
    Path("set/metadata.csv").write_text("\n".join(["image_id,dx,age", *rows, ""]))
    assert main(["finetune", "set", "--dry-run"]) == 2
    assert "'image_id'" in capsys.readouterr().err
    assert main(["finetune", "set", "--dry-run", "--task", "image-classification", "--output_dir", "runs/a"]) == 0
    agreeing = [f"scan{n},class {n % 2}" for n in range(16)]
    Path("set/metadata.csv").write_text("\n".join(["image_id,dx", *agreeing, ""]))
    Path("set/broken.csv").write_text('a,b\n"1')
    assert main(["finetune", "set", "--dry-run", "--output_dir", "runs/b"]) == 0
    assert "metadata.csv" in capsys.readouterr().out


def test_train_and_train_masks_are_images_and_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        _save(Path("set/train", f"{number}.png"), _photo(number))
        _save(Path("set/train_masks", f"{number}_mask.png"), (_photo(number)[..., 0] > 127) * 255)
    assert main(["finetune", "set", "--dry-run"]) == 0
    assert _recipe("runs/set.yaml")["task"] == "semantic-segmentation"


@pytest.mark.parametrize("held_out, num_eval", [("eval", 8), ("Test", None), (None, None)])
def test_only_the_folder_train_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: str | None, num_eval: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(24):
        part = "train" if number < 16 else held_out
        if part is not None:
            _save(Path("set", part, "ab"[number % 2], f"{number}.png"), _photo(number))
    assert main(["finetune", "set", "--dry-run"]) == 0
    sets = read_labelled_images(load_recipe(Path("runs/set.yaml")).data)
    assert sets.label_names == ("a", "b")
    assert sets.eval is not None
    assert len(sets.eval) == (num_eval or 16 - len(sets.train))
    shown = read_labelled_images(Data(train="set", eval="set"))
    assert shown.label_names == ("a", "b")
    assert len(shown.train) == (num_eval or 16)
