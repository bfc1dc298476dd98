"""Images from files, tables and arrays: what is decoded, which label it has, what is held out, and what is refused."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ResNetConfig

from accel_train.core.errors import DataError
from accel_train.data.images import labelled as labelled_images
from accel_train.data.images.decoding import image_header, inspect_image, open_image, to_mode
from accel_train.data.images.images import IMAGE_SUFFIXES, FileImages, held_out, inspect_images
from accel_train.data.images.labelled import ImageRows, ImageSets
from accel_train.data.images.preprocessing import Preprocessing
from accel_train.data.images.processors import model_preprocessing
from accel_train.recipe.schema import Recipe
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from tests.support.runs import refused, write_file, write_rows
from tests.support.wording import assert_golden, raises_golden

DATA = ImageClassificationData(train="unread")


def noise(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(number: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    return Image.fromarray(noise(*size[::-1], 3, seed=number))


def save(image: Image.Image, name: Path | str, **options: Any) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


def class_folders(name: Path | str, *, first: int = 0, each: int = 10, names: tuple[str, ...] = ("cat", "dog")) -> Path:
    root = Path(name)
    for offset, kind in enumerate(names):
        for number in range(each):
            save(picture(first + 100 * offset + number), root / kind / f"{number:02d}.png")
    return root


def read(train: Any, **settings: Any) -> ImageSets:
    return read_labelled_images(ImageClassificationData(**{"train": str(train), "eval_fraction": 0.25, **settings}))


def labels_by_place(images: ImageRows) -> dict[str, int]:
    return {images.where(index): int(images.labels[index]) for index in range(len(images))}


def decoded(path: Path, mode: Any = "RGB") -> Any:
    return np.asarray(to_mode(open_image(path, str(path)), mode, str(path)))


def _palette(image: Image.Image) -> Image.Image:
    return image.quantize(200)


def _transparent_palette(image: Image.Image) -> Image.Image:
    palette = image.quantize(200)
    palette.info["transparency"] = bytes([128] * 200)
    return palette


@pytest.mark.parametrize(
    "suffix, change, tolerance",
    [
        (".png", lambda image: image, 0),
        (".jpg", lambda image: image, 40),
        (".webp", lambda image: image, 60),
        (".bmp", lambda image: image, 0),
        (".png", lambda image: image.convert("RGBA"), 0),
        (".png", _palette, 60),
        (".png", _transparent_palette, 60),
        (".gif", _palette, 60),
        (".tif", lambda image: image.convert("CMYK"), 2),
        (".jpg", lambda image: image.convert("CMYK"), 40),
    ],
)
def test_every_colour_mode_becomes_the_same_rgb(
    suffix: str, change: Callable[[Image.Image], Image.Image], tolerance: int
) -> None:
    flat = Image.new("RGB", (16, 16), (200, 60, 30))  # without detail that JPEG would lose
    flat.paste((20, 90, 220), (0, 0, 8, 16))
    path = save(change(flat), f"image{suffix}")
    found = decoded(path).astype(int)
    assert found.shape == (16, 16, 3)
    assert abs(found - np.asarray(flat))[:, [0, 1, 2, -3, -2, -1]].max() <= tolerance


def test_sixteen_bits_are_scaled_to_eight_and_not_cut_off() -> None:
    wide = np.array([[0, 257, 25700], [32896, 65278, 65535]], dtype=np.uint16)
    for name in ("image.png", "image.tif"):
        path = save(Image.fromarray(wide), Path(name))
        assert decoded(path, "L").tolist() == [[0, 1, 100], [128, 254, 255]]
        assert decoded(path)[1, 0].tolist() == [128] * 3


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_an_agreed_range_are_refused_by_name(dtype: type) -> None:
    path = save(Image.fromarray(np.ones((4, 4), dtype=dtype)), "depth.tif")
    with raises_golden(DataError):
        decoded(path)


def test_grey_and_black_and_white_images_become_three_equal_channels() -> None:
    grey = picture(0).convert("L")
    for image in (grey, grey.convert("LA"), grey.convert("1")):
        path = save(image, f"{image.mode}.png")
        assert (decoded(path) == np.asarray(image.convert("L"))[..., None]).all()


def test_a_photo_is_turned_as_its_exif_orientation_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees clockwise
    image = Image.new("RGB", (16, 8), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 8, 8))
    path = save(image, "photo.png", exif=exif)
    upright = np.asarray(open_image(path, "photo"))
    assert upright.shape == (16, 8, 3)
    assert upright[:8].min() == 255
    assert upright[8:].max() == 0


def test_class_folders_give_labels_in_the_order_of_their_names() -> None:
    class_folders("pets", names=("dog", "cat"))
    save(picture(900), "pets/cat/deeper/still.JPG")
    write_file("pets/cat/readme.txt", "no image")
    Path("pets/.cache").mkdir()
    save(picture(901), "pets/cat/.hidden.png")
    sets = read("pets", eval_fraction=0)
    assert sets.label_names == ("cat", "dog")
    assert sets.eval is None
    found = {str(Path(place).relative_to("pets")): label for place, label in labels_by_place(sets.train).items()}
    assert len(found) == 21
    assert all(label == place.startswith("dog") for place, label in found.items())
    assert "cat/deeper/still.JPG" in found
    assert_golden(sets.notes[0])


def test_numbered_folders_are_ordered_as_numbers() -> None:
    sets = read(class_folders(Path(), names=("10", "9", "1")), eval_fraction=0)
    assert sets.label_names == ("1", "9", "10")


@pytest.mark.parametrize("given", ["splits", "splits/train"])
@pytest.mark.parametrize("held", ["val", "validation"])
def test_a_held_out_folder_beside_train_is_found(given: str, held: str) -> None:
    class_folders("splits/train")
    class_folders(f"splits/{held}", first=50, each=3)
    write_file("splits/vectorize.py", "import os")
    sets = read(given)
    assert (len(sets.train), len(sets.eval)) == (20, 6)
    assert f"splits/{held}, found next to" in sets.notes[0]
    assert sets.label_names == ("cat", "dog")
    for part, side in (("train", sets.train), (held, sets.eval)):
        for place, label in labels_by_place(side).items():
            assert place.startswith(f"splits/{part}/{sets.label_names[label]}/")


def test_a_test_folder_is_left_alone_and_named() -> None:
    class_folders("splits/train")
    class_folders("splits/test", first=50, each=3)
    sets = read("splits", eval_fraction=0.2)
    assert len(sets.train) + len(sets.eval) == 20
    assert "splits/test" in sets.notes[0]


@pytest.mark.parametrize("part", ["val", "test"])
def test_of_a_folder_with_splits_train_is_trained_on_whatever_is_evaluated(part: str) -> None:
    class_folders("root/train")
    class_folders(f"root/{part}", first=50, each=3)
    assert len(read("root", eval=str(class_folders("other", first=70, each=2))).train) == 20
    shown = read("root", eval="root", label_names=["cat", "dog"])
    assert len(shown.eval) == 6
    assert shown.notes == (f"of root, {part} is read",)


def test_copies_of_an_image_are_never_on_both_sides() -> None:
    class_folders(Path(), each=40)
    for number in range(40):  # the same files under other names, and in another class
        save(picture(number), f"cat/zz-copy-{number}.png")
        save(picture(number), f"dog/copy-{number}.png")
    sets = read(".")
    sides = [{side.image(index).tobytes() for index in range(len(side))} for side in (sets.train, sets.eval)]
    assert not sides[0] & sides[1]
    assert len(sets.train) + len(sets.eval) == 160
    assert 0.1 < len(sides[1]) / 80 < 0.4


def test_the_split_follows_the_contents_and_not_the_names() -> None:
    for number in range(60):
        save(picture(number), f"a/{'ab'[number % 2]}/{number:02d}.png")
        save(picture(number), f"b/{'ab'[number % 2]}/{99 - number:02d}.png")
    contents = []
    for folder in ("a", "b"):
        sets = read(folder)
        contents.append({sets.eval.image(index).tobytes() for index in range(len(sets.eval))})
    assert contents[0] == contents[1]


def test_a_split_holds_out_its_share_and_at_least_one() -> None:
    digests = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    assert held_out(digests, 0.2).mean() == pytest.approx(0.2, abs=0.012)
    assert (held_out(digests, 0.1) <= held_out(digests, 0.2)).all()
    assert held_out(digests, 0).sum() == 0
    few = np.array([2**63 + 5, 2**63, 2**63, 2**63 + 9], dtype=np.uint64)
    assert held_out(few, 0.01).tolist() == [False, True, True, False]


def test_images_that_are_in_both_sets_are_counted() -> None:
    class_folders("a")
    class_folders("b", first=7)  # 7 to 16: three of each class are in the first folder as well
    sets = read("a", eval="b")
    assert sets.notes[0].startswith("6 of 20 ")


def test_identity_knows_contents_and_labels_but_not_where_they_lie() -> None:
    first = read(class_folders("a")).identity
    assert read(class_folders("b")).identity == first
    save(picture(5555), "b/cat/00.png")
    assert read("b").identity != first
    Path("a/cat").rename("a/fox")
    assert read("a").identity != first


def test_above_the_limit_headers_wait_and_a_broken_file_is_named_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class_folders("train")
    class_folders("val", first=50)
    write_file("train/cat/03.png", b"nonsense")
    refused(read, ".", named="cat/03.png|(unknown format)")
    monkeypatch.setattr(labelled_images, "INSPECTED_LIMIT", 19)
    sets = read(".")
    assert isinstance(refused(sets.train.image, 3, named="train/cat/03.png"), DataError)
    write_file("train/cat/03.png", b"other nonsense")
    assert read(".").identity != sets.identity


def test_a_body_that_is_cut_off_is_named_when_it_is_decoded() -> None:
    path = save(picture(0, (200, 200)), "a/photo.jpg")
    path.write_bytes(path.read_bytes()[:5000])
    images = FileImages(Path(), ("a/photo.jpg",))
    assert len(inspect_images(images, DATA)) == 1  # the header is sound
    assert isinstance(refused(images.__getitem__, 0, named=f"{path}: |truncated"), DataError)


def test_broken_files_are_counted_and_an_empty_one_is_called_empty() -> None:
    class_folders(Path())
    for number in (4, 5, 6):
        write_file(f"dog/0{number}.png", b"")
    refused(read, ".", named="dog/04.png: is empty|2 more of 20 images")


def test_a_header_deep_in_a_file_is_found() -> None:
    large = Image.fromarray(noise(300, 300, 3))
    path = save(large, "large.tif")  # its directory is at the end
    assert path.stat().st_size > 1 << 17
    assert len(inspect_images(FileImages(Path(), ("large.tif",)), DATA)) == 1


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda root: save(picture(1), root / "stray.png"), "stray.png|/CLASS/"),
        (lambda root: (root / "bird").mkdir(), "/bird|no image"),
        (lambda root: [file.unlink() for file in root.rglob("*.png")], "no image"),
        (lambda root: shutil.rmtree(root / "dog"), "needs two"),
    ],
)
def test_a_folder_that_is_not_a_set_of_classes_is_refused(change: Callable[[Path], Any], named: str) -> None:
    class_folders("pets")
    change(Path("pets"))
    refused(read, Path("pets"), named=named)


def test_a_class_that_only_the_evaluation_has_is_named() -> None:
    class_folders("train")
    class_folders("val", first=50, names=("cat", "doge"))
    refused(read, ".", named="val/doge/00.png|\"doge\"|(cat, dog)|did you mean 'dog'")
    class_folders("val2", first=50, names=("cat", "bird"))
    sets = read("train", eval="val2", label_names=["cat", "dog", "bird"])
    assert "bird" in sets.notes[0]


def test_a_class_that_is_held_out_as_a_whole_is_refused() -> None:
    class_folders(Path(), each=30)
    probe = Path("../probe.png")
    for number in range(1000, 2000):
        save(picture(number), probe)
        if inspect_images(FileImages(probe.parent, (probe.name,)), DATA)[0] < 2**61:  # it will be held out
            break
    save(picture(number), "rare/one.png")
    refused(read, ".", named="'rare'|eval_fraction")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_table_of_paths_relative_to_itself_is_read(kind: str) -> None:
    class_folders("pets")
    rows = [
        {"name": f"n{number}", "file": f"pets/{animal}/{number:02d}.png", "animal": animal}
        for number in range(10)
        for animal in ("dog", "cat")
    ]
    path = write_rows(f"table.{kind}", rows)
    settings = {"image_column": "file", "label_column": "animal", "id_column": "name", "cache_dir": "c"}
    sets = read(path, **settings)
    assert sets.label_names == ("cat", "dog")
    for side in (sets.train, sets.eval):
        for index in range(len(side)):
            row = rows[int(side.rows[index])]
            assert side.labels[index] == (row["animal"] == "dog")
            assert side.image(index).tobytes() == Image.open(row["file"]).tobytes()
    assert sets.eval.row_id(0) == rows[int(sets.eval.rows[0])]["name"]
    line = {"jsonl": ":1", "csv": ":2", "parquet": ", row 1"}[kind]
    assert sets.train.images.where(0) == f"{path}{line}"


def test_bytes_and_the_images_of_datasets_are_read_from_parquet() -> None:
    rows = [{"image": png(number), "label": number % 2} for number in range(12)]
    plain = write_rows("table.parquet", rows)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    pictures = [{"image": picture(number), "label": number % 2} for number in range(12)]
    dataset = datasets.Dataset.from_list(pictures, features=features)
    dataset.to_parquet("features.parquet")
    dataset.save_to_disk("saved")
    settings = {"cache_dir": "cache", "eval_fraction": 0}
    expected = [picture(number).tobytes() for number in range(12)]
    for path, names in (
        (plain, ("0", "1")),
        ("features.parquet", ("no", "yes")),
        ("saved", ("no", "yes")),
    ):
        sets = read(path, **settings)
        assert sets.label_names == names
        assert sets.train.labels.tolist() == [number % 2 for number in range(12)]
        assert [sets.train.image(index).tobytes() for index in range(12)] == expected


@pytest.mark.parametrize(
    "kind, change, named",
    [
        ("csv", {"label": ""}, "table.csv:5|'label'"),
        ("jsonl", {"label": [1]}, "table.jsonl:4|'label'|[1]"),
        ("jsonl", {"image": None}, "table.jsonl:4|'image'|empty"),
        ("jsonl", {"image": 7}, "table.jsonl:4|'image'|a int"),
        ("csv", {"image": "pets/none.png"}, "table.csv:5|pets/none.png|does not exist"),
        ("parquet", {"image": b"nonsense"}, "table.parquet, row 4|(unknown format)"),
    ],
)
def test_a_broken_row_is_named(kind: str, change: dict[str, Any], named: str) -> None:
    class_folders("pets")
    rows: list[dict[str, Any]] = [
        {"image": png(n) if kind == "parquet" else f"pets/cat/{n:02d}.png", "label": "ab"[n % 2]} for n in range(8)
    ]
    rows[3] |= change
    refused(read, write_rows(f"table.{kind}", rows), cache_dir="cache", named=named)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", ["image", "label"])
def test_a_missing_column_is_named_with_those_there_are(kind: str, column: str) -> None:
    rows = [{"picture": "a.png", ("label" if column == "image" else "image"): "b.png"}]
    refused(read, write_rows(f"table.{kind}", rows), cache_dir="c", named=f"table.{kind}|'{column}'|picture")


def test_a_label_out_of_range_is_named() -> None:
    images = noise(6, 4, 4)
    np.savez("a.npz", images=images, labels=np.array([0, 1, 2, 0, 1, 3]))
    named = "a.npz:5|'label'|3|3 classes, 0 to 2"
    refused(read, Path("a.npz"), label_names=["red", "green", "blue"], named=named)


def test_arrays_are_read_and_npy_files_stay_on_disk() -> None:
    images = noise(20, 6, 5, 3)
    labels = np.arange(20) % 4
    np.savez("set.npz", images=images, label=labels.astype(np.uint8))
    np.save("train_images.npy", images)
    np.save("train_labels.npy", labels)
    for name in ("set.npz", "train_images.npy"):
        sets = read(name, eval_fraction=0)
        assert sets.decoded
        assert sets.label_names == ("0", "1", "2", "3")
        assert sets.train.labels.tolist() == labels.tolist()
        assert all((np.asarray(sets.train.image(index)) == images[index]).all() for index in range(20))
    assert isinstance(sets.train.images.array, np.memmap)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arrays, named",
    [
        ({"images": np.zeros((4, 8, 8, 3), np.float32)}, "float32|uint8"),
        ({"images": noise(4, 3, 8, 8)}, "(4, 3, 8, 8)|N x H x W|channels first"),
        ({"images": noise(4, 64)}, "(4, 64)|N x H x W"),
        ({"images": noise(3, 8, 8)}, "3 images|'label'|(4,)"),
        ({"pictures": noise(4, 8, 8)}, "'image' or 'images'|labels, pictures"),
        ({"images": noise(4, 8, 8), "labels": np.zeros((4, 2), int)}, "labels|int64|(4, 2)"),
        ({"images": noise(4, 8, 8), "labels": np.zeros(4)}, "labels|float64"),
        (None, "an array"),
    ],
)
def test_arrays_of_a_wrong_shape_and_damaged_archives_are_refused(arrays: dict[str, Any] | None, named: str) -> None:
    if arrays is None:
        write_file("a.npz", b"PK\x03\x04 not really")
    else:
        np.savez("a.npz", **{"labels": np.arange(4), **arrays})
    refused(read, Path("a.npz"), named=f"a.npz: |{named}")


def test_the_digits_are_embedded_and_their_held_out_fifth_is_fixed() -> None:
    sets = read("digits", eval_fraction=0.2)
    assert sets.label_names == tuple("0123456789")
    assert (len(sets.train), len(sets.eval)) == (1467, 330)
    assert sets.eval.where(0) == "digits:6"
    assert sets.train.image(0).size == (8, 8)
    assert read("digits", eval_fraction=0.2).identity == sets.identity


def test_images_without_labels_are_read_for_prediction() -> None:
    for number in range(3):
        save(picture(number), f"flat/{number}.png")
    rows = [{"image": f"flat/{number}.png"} for number in range(3)]
    names = {"label_names": ["cat", "dog"], "label_column": None}
    for path in ("flat", write_rows("table.csv", rows)):
        sets = read(path, eval=str(path), **names)
        assert sets.eval.labels.tolist() == [-100] * 3
        assert sets.eval.image(2).tobytes() == picture(2).tobytes()
        assert sets.notes == ()
    assert sets.eval.row_id(1) == f"{path}:3"
    refused(read, Path("flat"), label_column=None, named="data.label_names")


def test_what_is_missing_is_named() -> None:
    for name in ("nowhere/at/all.npz", "nowhere.parquet", "./nowhere"):
        refused(read, name, named="data.train: no file|nowhere")


def test_resizing_keeps_the_aspect_and_cuts_the_centre() -> None:
    image = Image.fromarray(np.arange(40, dtype=np.uint8)[None].repeat(10, 0))  # 40 wide, 10 high
    square = Preprocessing(10).resized(image)
    assert np.asarray(square)[0].tolist() == list(range(15, 25))
    square = Preprocessing(8, crop_fraction=0.8).resized(image)
    assert np.asarray(square)[0].tolist() == list(range(16, 24))
    assert Preprocessing(4).resized(image.transpose(Image.Transpose.ROTATE_90)).size == (4, 4)


def test_normalising_subtracts_the_mean_and_divides_by_the_deviation_of_each_channel() -> None:
    image = np.zeros((2, 3, 3), np.uint8)
    image[0, 1] = (255, 51, 0)
    batch = Preprocessing(2, mean=(0.5, 0.2, 0.0), std=(0.5, 0.1, 2.0)).normalise([image, image])
    assert batch.shape == (2, 3, 2, 3)
    assert batch.dtype == torch.float32
    assert batch[1, :, 0, 1].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert batch[0, :, 1, 2].tolist() == pytest.approx([-1.0, -2.0, 0.0])
    assert Preprocessing(2, mean=(0.5,), std=(0.5,)).normalise([image[..., 0]]).shape == (1, 1, 2, 3)


def test_images_are_normalised_by_the_recipes_own_figures_one_for_each_colour() -> None:
    def preprocessing(**data: Any) -> Preprocessing:
        fields = {"output_dir": "x", "model": {"config": {"model_type": "resnet"}}, "schedule": {"max_steps": 1}}
        fields |= {"task": "image-classification"}
        recipe = Recipe.model_validate({**fields, "data": {"train": "x", **data}})
        return model_preprocessing(recipe, ResNetConfig())[0]

    own = preprocessing(image_mean=(0.1, 0.2, 0.3))
    assert (own.mean, own.std) == ((0.1, 0.2, 0.3), preprocessing().std)
    refused(preprocessing, image_std=(0.5,), named="data.image_std=[0.5]|1 number,|3 colours")


def test_a_single_image_has_no_label_but_can_be_predicted() -> None:
    path = Path("cat/a.png")
    path.parent.mkdir()
    Image.new("RGB", (4, 4)).save(path)
    refused(read, path, named=f"data.train: {path} is one image, without a label")
    sets = read(path, label_column=None, eval_fraction=0.0, label_names=("cat", "dog"))
    assert [*labels_by_place(sets.train)] == [str(path)]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nshowpage\n%%EOF\n"
PROGRAMS = {
    "EPS": EPS,
    "a DOS file of EPS": b"\xc5\xd0\xd3\xc6" + np.array([30, len(EPS)], "<u4").tobytes() + bytes(18) + EPS,
    "PDF": b"%PDF-1.4\n1 0 obj << /Type /Catalog >>\nendobj\n%%EOF",
    "WMF": b"\xd7\xcd\xc6\x9a\0\0" + bytes(4) + b"\x40\0\x40\0\x48\0" + bytes(40),
    "FPX": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
}


@pytest.fixture
def no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ghostscript in the path that leaves a trace if it is started."""
    folder = Path("programs")
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\necho 10.0\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    yield
    assert not Path("started").exists()


@pytest.mark.usefixtures("no_program")
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif"])
def test_a_file_that_is_no_raster_is_not_opened_whatever_its_name(kind: str, suffix: str) -> None:
    class_folders("data")
    path = Path("data/cat/03.png").rename(f"data/cat/03{suffix}")
    path.write_bytes(PROGRAMS[kind])
    refused(read, Path("data"), named=f"cat/03{suffix}")
    for opens in (open_image, image_header, inspect_image):
        for source in (path, PROGRAMS[kind]):
            refused(opens, source, "here", named="03" if source is path else "here")
    if "EPS" in kind:
        refused(open_image, path, "here", named="EPS")


@pytest.mark.usefixtures("no_program")
@pytest.mark.parametrize("nested", [False, True])
def test_cells_that_datasets_would_decode_are_not_opened_by_it(nested: bool) -> None:
    cells = [{"bytes": png(number) if number != 3 else EPS, "path": None} for number in range(8)]
    feature: Any = datasets.List(datasets.Image()) if nested else datasets.Image()
    rows = {"image": [[cell] for cell in cells] if nested else cells, "label": ["a", "b"] * 4}
    features = datasets.Features({"image": feature, "label": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("saved")
    refused(read, Path("saved"), named="a list, no image" if nested else "row 4|EPS")


FORMATS = "JPG JPEG jfif jpe WEBP avif jp2 Bmp gif TIFF tif png ppm pgm pbm pnm"


@pytest.mark.parametrize("name", FORMATS.split())
def test_every_format_that_folders_list_is_opened(name: str) -> None:
    image = Image.fromarray(np.full((8, 8), 200, np.uint8))
    path = Path(f"a.{name}")
    formats = {"jfif": "JPEG", "jpe": "JPEG", "jp2": "JPEG2000", "pnm": "PPM", "pbm": "PPM", "pgm": "PPM"}
    image.convert("1" if name == "pbm" else "L").save(path, formats.get(name))
    assert open_image(path, "here").size == (8, 8)
    assert f".{name.lower()}" in IMAGE_SUFFIXES
