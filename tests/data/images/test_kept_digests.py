"""Digests of images are made once: later starts read them, notice each change of a file, and split alike."""

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_train.data import cache
from accel_train.data.cache import evict
from accel_train.data.images import images as images_module
from accel_train.data.images.images import BROKEN, FileImages, inspect_images
from accel_train.data.images.labelled import ImageSets
from accel_train.data.text import kept
from accel_train.recipe.data import Data
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.image_classification.data import read_labelled_images
from accel_train.tasks.semantic_segmentation.config import SemanticSegmentationData
from accel_train.tasks.semantic_segmentation.data import read_masked_images
from tests.support.readers import read_while_removed
from tests.support.runs import refused

NUM_IMAGES = 40


@pytest.fixture(autouse=True)
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were inspected. Digests of any number of images are kept, however young the files are."""
    found: list[str] = []
    inspect = FileImages.inspect

    def noted(images: FileImages, index: int) -> int:
        found.append(images.names[index])
        return inspect(images, index)

    monkeypatch.setattr(FileImages, "inspect", noted)
    monkeypatch.setattr(images_module, "LEAST_KEPT", 1)
    monkeypatch.setattr(images_module, "SETTLED_SECONDS", 0)
    return found


def write(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Files of one size, whatever their pixels are.
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(NUM_IMAGES):
        write(tmp_path / "pets" / ("cat", "dog")[number % 2] / f"{number:02d}.bmp", number)
    return tmp_path / "pets"


def data_of(folder: Path, **settings: Any) -> ImageClassificationData:
    given = {"train": str(folder), "eval_fraction": 0.25, "cache_dir": str(folder.parent / "cache"), **settings}
    return ImageClassificationData(**given)


def read(folder: Path, **settings: Any) -> ImageSets:
    return read_labelled_images(data_of(folder, **settings))


def split_of(sets: ImageSets) -> list[list[str]]:
    return [[side.where(number) for number in range(len(side))] for side in (sets.train, sets.eval) if side is not None]


def entries(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "kept").glob("*/"))


def test_a_later_start_inspects_nothing_and_has_the_same_split_and_fingerprint(
    folder: Path, inspected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(images_module, "LEAST_KEPT", NUM_IMAGES + 1)
        plain = read(folder)
    assert not entries(folder)
    first = read(folder)
    assert len(inspected) == 2 * NUM_IMAGES
    second = read(folder)
    assert len(inspected) == 2 * NUM_IMAGES
    assert len(entries(folder)) == 1
    assert split_of(first) == split_of(second) == split_of(plain)
    assert first.identity == second.identity == plain.identity
    assert min(map(len, split_of(plain))) > 0


def swapped(folder: Path) -> None:
    """Another content with the same size and modification time."""
    path = folder / "cat" / "00.bmp"
    before = path.stat()
    write(path, 1000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


CHANGES: dict[str, Callable[[Path], object]] = {
    "added": lambda folder: write(folder / "dog" / "new.bmp", 1000),
    "removed": lambda folder: (folder / "cat" / "00.bmp").unlink(),
    "renamed": lambda folder: (folder / "cat" / "00.bmp").rename(folder / "cat" / "a.bmp"),
    "changed": lambda folder: write(folder / "cat" / "00.bmp", 1000),
    "swapped": swapped,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_file_is_noticed(folder: Path, inspected: list[str], change: str) -> None:
    before = read(folder)
    CHANGES[change](folder)
    inspected.clear()
    after = read(folder)
    assert len(inspected) == NUM_IMAGES + {"added": 1, "removed": -1}.get(change, 0)
    assert after.identity != before.identity
    shutil.rmtree(folder.parent / "cache")
    assert read(folder).identity == after.identity


def test_files_that_were_just_written_are_inspected_again(
    folder: Path, inspected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_module, "SETTLED_SECONDS", 3600)
    for _ in range(2):
        read(folder)
    assert len(inspected) == 2 * NUM_IMAGES
    assert not entries(folder)


def test_a_change_while_images_are_inspected_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect = FileImages.inspect

    def late(images: FileImages, index: int) -> int:
        found = inspect(images, index)
        write(folder / "cat" / "00.bmp", 1000)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(FileImages, "inspect", late)
        read(folder)
    assert "not kept (a source changed while it was read)" in capsys.readouterr().err
    assert not entries(folder)


def test_a_broken_image_is_counted_at_each_start(folder: Path, inspected: list[str]) -> None:
    path = folder / "dog" / "01.bmp"
    path.write_bytes(b"nonsense")
    assert "01.bmp" in str(refused(read, folder, named="dog/01.bmp"))
    inspected.clear()
    sets = [split_of(read(folder, max_broken=1)) for _ in range(2)]
    assert sets[0] == sets[1]
    assert str(path) in sets[0][0], "a broken image is not held out"
    refused(read, folder, named="dog/01.bmp")
    assert inspected == ["dog/01.bmp"] * 3
    write(path, 1)
    assert BROKEN not in inspect_images(FileImages(folder, ("dog/01.bmp",)), data_of(folder))


def test_an_image_that_can_be_read_again_has_its_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, data = FileImages(folder, ("cat/00.bmp", "dog/01.bmp")), data_of(folder)
    expected = inspect_images(images, data_of(folder, cache_dir=str(folder.parent / "other"))).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(images_module, "inspect_image", lambda *_: (_ for _ in ()).throw(ValueError("gone")))
        assert inspect_images(images, data, 2).tolist() == [BROKEN, BROKEN]
    assert inspect_images(images, data).tolist() == expected


def test_digests_of_masks_are_kept_by_their_classes(tmp_path: Path, inspected: list[str]) -> None:
    for number in range(6):
        write(tmp_path / "s" / "images" / f"{number}.png", number)
        mask = tmp_path / "s" / "masks" / f"{number}.png"
        mask.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), number % 2, np.uint8)).save(mask)

    def identity(*values: int) -> str:
        given: dict[str, Any] = {"train": str(tmp_path / "s"), "eval_fraction": 0.25}
        data = SemanticSegmentationData(**given, cache_dir=str(tmp_path / "cache"), mask_values=values)
        return read_masked_images(data).identity

    first = identity(0, 1)
    assert len(inspected) == 12
    assert identity(0, 1) == first
    assert len(inspected) == 12
    assert identity(1, 0) != first
    assert len(inspected) == 18, "the masks alone"


def test_data_to_predict_are_not_kept(folder: Path) -> None:
    read_labelled_images(data_of(folder).shown_as("FILE"))
    assert not entries(folder)


def test_a_cache_of_another_user_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inspected: list[str]
) -> None:
    read(folder)
    inspected.clear()

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", denied)
    read(folder)
    assert inspected == []
    assert capsys.readouterr().err == ""


def evicting(root: Path, removed: Any) -> None:
    while True:
        removed.value += len([*root.glob("kept/*/")])
        evict(root, 0)
        time.sleep(0.002)


def values_of(data: Data, number: int) -> kept.Values:
    def build() -> kept.Values:
        return {"numbers": np.arange(number, number + 999), "rows": [(number, "a"), (number + 1, "b")], "name": "n"}

    return kept.keep_values(data, f"{number:032d}", build, Pair, lambda: True, progress=True)


class Pair(tuple[Any, ...]):
    """A row."""

    def __new__(cls, *cells: Any) -> "Pair":
        return super().__new__(cls, cells)


def reading(data: Data, seed: int) -> None:
    generator = np.random.default_rng(seed)
    opened: list[tuple[int, kept.Values]] = []
    for _ in range(150):
        number = int(generator.integers(20))
        opened = [*opened[-20:], (number, values_of(data, number))]
        for start, values in opened:
            assert values["numbers"].tolist() == list(range(start, start + 999))
            assert [tuple(row) for row in values["rows"]] == [(start, "a"), (start + 1, "b")]
            assert values["name"] == "n"


def test_two_processes_read_kept_values_while_a_third_one_removes_them(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context, data = multiprocessing.get_context("fork"), data_of(folder)
    removed = context.Value("q", 0)
    readers = [context.Process(target=reading, args=(data, seed)) for seed in range(2)]
    remover = context.Process(target=evicting, args=(folder.parent / "cache", removed))
    (folder.parent / "cache").mkdir()
    read_while_removed(readers, remover)
    assert removed.value > 20
    assert "data.cache_dir" not in capfd.readouterr().err, "nothing was damaged, or could not be kept"


def test_values_that_are_removed_while_they_are_opened_are_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, root, valid = data_of(folder), folder.parent / "cache", cache.read_valid_meta
    values_of(data, 0)

    def removed_at_once(path: Path) -> Any:
        meta = valid(path)
        monkeypatch.setattr(cache, "read_valid_meta", valid)
        values_of(data, 1)
        evict(root, 0)
        return meta

    monkeypatch.setattr(cache, "read_valid_meta", removed_at_once)
    assert values_of(data, 0)["numbers"].tolist() == list(range(999))
    assert len(entries(folder)) == 2
    assert capsys.readouterr().err == ""
    # Only without its lock.
    with cache.lock(entries(folder)[1].with_suffix(".lock")):
        os.utime(entries(folder)[1], (1, 1))
        evict(root, 0)
    assert len(entries(folder)) == 2


def test_what_was_used_longest_ago_makes_room(folder: Path) -> None:
    data = data_of(folder, cache_limit="30kB")
    for number in range(3):
        values_of(data, number)
        os.utime(entries(folder)[number], (number + 1, number + 1))
    values_of(data, 0)
    values_of(data, 3)
    assert [int(path.name) for path in entries(folder)] == [0, 2, 3]
    assert len([*values_of(data_of(folder, cache_limit="1kB"), 4)["rows"]]) == 2
    assert [int(path.name) for path in entries(folder)] == [4], "other processes wait for the newest"
