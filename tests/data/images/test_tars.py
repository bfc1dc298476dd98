"""Images in WebDataset tars: listed from headers, kept in the cache, read in place, and trained on like files."""

import json
import os
import shutil
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_train.core.errors import DataError
from accel_train.data.images import tars
from accel_train.data.images.annotations.folders import LAYOUTS
from accel_train.data.images.images import ImagePool, Target, held_out, inspect_images
from accel_train.data.images.misread import refuse_other_data
from accel_train.data.images.pools import read_pools
from accel_train.data.images.tars import list_samples
from accel_train.recipe.data import ImageData
from accel_train.recipe.tasks import TARS, TASKS
from accel_train.tasks.image_classification.config import ImageClassificationData
from accel_train.tasks.object_detection.config import ObjectDetectionData
from accel_train.tasks.object_detection.data import read_boxed_images
from accel_train.tasks.semantic_segmentation.config import SemanticSegmentationData
from accel_train.tasks.semantic_segmentation.data import read_masked_images
from tests.support.annotated_images import image_of, write_folder, write_tars
from tests.support.comparisons import assert_same_bits_of_runs
from tests.support.marks import slow
from tests.support.runs import forget, refused, run, write_yaml
from tests.support.tars import (
    NUM_IMAGES,
    PER_TAR,
    pictures,
    recipe_of_images,
    write_class_folders,
    write_shards,
    write_tar,
)
from tests.support.wording import raises_golden

STEPS = 6
COUNTERS = Path("/proc/self/io")


def read(train: Path | str, **data: Any) -> ImagePool:
    section = ImageClassificationData(train=str(train), **data)
    return read_pools(section.train, section, "data.train", Target(section.label_column, is_mask=False))


@pytest.mark.parametrize("name", [".", "*.tar", "2.tar"])
def test_a_folder_a_glob_and_a_file_hold_the_bytes_and_the_labels_of_the_images(tmp_path: Path, name: str) -> None:
    shards = write_shards(tmp_path / "shards")
    pool = read(shards / name)
    expected = pictures() if name != "2.tar" else pictures()[2 * PER_TAR : 3 * PER_TAR]
    assert [pool.images.content(number) for number in range(len(pool.images))] == [each for _, each in expected]
    assert pool.labels == [label for label, _ in expected]
    assert pool.images.where(len(expected) - 1).startswith(str(shards))


def test_the_tasks_that_say_that_they_take_tars_are_those_with_images() -> None:
    say = [name for name in TASKS if TARS in TASKS[name].takes]
    assert say == [name for name in TASKS if issubclass(TASKS[name].data, ImageData)]
    assert len(say) == 3
    assert TARS in LAYOUTS


@pytest.mark.parametrize("task", [None, "object-detection"])
def test_finetune_names_the_tasks_that_read_tars(tmp_path: Path, task: str | None) -> None:
    shards = write_shards(tmp_path / "shards")
    error = str(refused(refuse_other_data, str(shards), is_asked=task is not None, named="0.tar"))
    assert all(name in error for name in TASKS if TARS in TASKS[name].takes)


def test_images_are_named_by_tar_position_and_member(tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    assert read(shards).images.where(PER_TAR + 2) == f"{shards / '1.tar'}, sample 3 (008.png)"


def test_the_held_out_images_are_those_of_the_same_files_in_folders(tmp_path: Path) -> None:
    ours, theirs = (
        inspect_images(read(make(tmp_path / make.__name__)).images, ImageClassificationData(train="unread"))
        for make in (write_shards, write_class_folders)
    )
    assert ours.tolist() == theirs.tolist()
    assert 0 < held_out(ours, 0.2).sum() < NUM_IMAGES


def test_a_label_is_of_json_or_cls_or_txt_in_this_order(tmp_path: Path) -> None:
    image = pictures()[0][1]
    record = json.dumps({"label": "cat", "species": "lynx"}).encode()
    every = [("a.txt", b"text\n"), ("a.cls", b"7\n"), ("a.json", record), ("a.png", image)]
    for column, left_out, expected in (
        ("label", (), "cat"),
        ("species", (), "lynx"),
        ("other", (), 7),
        ("label", ("a.json",), 7),
        ("label", ("a.json", "a.cls"), "text"),
        ("label", ("a.json", "a.cls", "a.txt"), None),
    ):
        path = write_tar(tmp_path / "one.tar", [each for each in every if each[0] not in left_out])
        assert list_samples(path, column)["labels"] == [expected], (column, left_out)


def test_a_sample_is_the_files_with_one_name_up_to_the_first_dot_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    image = pictures()[0][1]
    members = [("a/1.seg.png", b""), ("a/1.PNG", image), ("a/1.cls", b"0"), ("b/1.jpg", image), ("b/1.cls", b"1")]
    found = list_samples(write_tar(tmp_path / "x.tar", [("a/._1.png", b""), *members]), "label")
    assert (found["names"], found["labels"]) == (["a/1.PNG", "b/1.jpg"], [0, 1])


def test_a_second_start_reads_no_header_until_a_tar_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, listed = write_shards(tmp_path / "shards"), list[str]()

    def counted(path: Path, *how: Any) -> Any:
        listed.append(path.name)
        return list_samples(path, *how)

    monkeypatch.setattr(tars, "list_samples", counted)
    first = read(shards, cache_dir=str(tmp_path))
    assert sorted(listed) == ["0.tar", "1.tar", "2.tar", "3.tar"]
    again = read(shards, cache_dir=str(tmp_path))
    assert len(listed) == 4
    assert (again.labels, again.images.stamp()) == (first.labels, first.images.stamp())
    path, (_, image) = shards / "1.tar", pictures()[-1]
    write_tar(path, [("new.cls", b"2"), ("new.png", image)])
    os.utime(path, ns=(1, 1))
    changed = read(shards, cache_dir=str(tmp_path))
    assert listed[4:] == ["1.tar"]
    assert len(changed.images) == NUM_IMAGES - PER_TAR + 1
    assert changed.images.content(PER_TAR) == image


def bytes_read() -> int:
    """The bytes that this process has read from files so far."""
    return int(COUNTERS.read_text().split()[1])


@pytest.mark.skipif(not COUNTERS.exists(), reason="Linux counts the bytes that a process reads")
def test_listing_reads_no_image(tmp_path: Path) -> None:
    """The images are holes of 2 GB in a sparse file."""
    path, size = tmp_path / "large.tar", 2**31
    with path.open("wb") as file:
        for name in ("a", "b"):
            for ending, length in ((".cls", 1), (".png", size)):
                member = tarfile.TarInfo(name + ending)
                member.size = length
                file.write(member.tobuf(tarfile.USTAR_FORMAT) + b"1".ljust(512, b"\0")[: 512 if length == 1 else 0])
            file.seek(size, os.SEEK_CUR)
        file.truncate(file.tell() + 1024)
    before = bytes_read()
    found = list_samples(path, "label")
    assert bytes_read() - before < 100_000
    assert (found["names"], found["labels"]) == (["a.png", "b.png"], [1, 1])
    assert [length for _, length in found["spans"]] == [size, size]


def test_a_tar_that_is_cut_damaged_or_compressed_is_refused_by_name_and_position(tmp_path: Path) -> None:
    path = write_shards(tmp_path) / "1.tar"
    whole, third = path.read_bytes(), list_samples(path, "label")["spans"][2]
    after_third = -(-sum(third) // 512) * 512
    for case, content in (
        ("between samples", whole[:after_third]),
        ("in a header", whole[: after_third + 100]),
        ("damaged header", whole[:after_third] + b"x" * 512 + whole[after_third + 512 :]),
        ("no tar", b"nonsense" * 200),
        ("empty", b""),
    ):
        path.write_bytes(content)
        with raises_golden(DataError, case=case):
            read(tmp_path)
    path.write_bytes(whole[: sum(third) - 1])
    pool = read(tmp_path)
    assert len(pool.images) == NUM_IMAGES - 3
    with raises_golden(DataError, case="within an image"):
        pool.images.content(PER_TAR + 2)
    path.rename(tmp_path / "1.tar.gz")
    for name in (tmp_path, tmp_path / "1.tar.gz", tmp_path / "*.tar.gz"):
        with pytest.raises(ValueError, match=r"\.tar\.gz: is compressed"):
            read(name)


def test_samples_without_one_image_and_training_next_to_held_out_tars_are_refused(tmp_path: Path) -> None:
    image = pictures()[0][1]
    for case, members in (
        ("none", [("a.cls", b"1")]),
        ("two", [("a.jpg", image), ("a.png", image)]),
        ("no mapping", [("a.json", b"[1]"), ("a.png", image)]),
    ):
        with raises_golden(DataError, case=case):
            read(write_tar(tmp_path / "one.tar", members))
    for name in ("train", "val"):
        shutil.copy(write_tar(tmp_path / "one.tar", [("a.cls", b"1"), ("a.png", image)]), tmp_path / f"{name}-00.tar")
    (tmp_path / "one.tar").unlink()
    with pytest.raises(ValueError, match=r"holds val-00\.tar next to training files"):
        read(tmp_path)


def test_a_tar_that_is_gone_or_no_file_is_named_with_the_position(tmp_path: Path) -> None:
    images = read(write_shards(tmp_path)).images
    (tmp_path / "1.tar").unlink()
    with raises_golden(DataError, case="gone"):
        images.content(PER_TAR)
    (tmp_path / "1.tar").mkdir()
    with raises_golden(DataError, case="a folder"):
        images.content(PER_TAR + 1)
    with raises_golden(DataError, case="at the start"):
        read(tmp_path / "*.tar")
    assert images.content(0) == pictures()[0][1]


@pytest.mark.parametrize("name", [".", "*.tar"])
@pytest.mark.parametrize("form", [0, 1])
def test_masks_and_boxes_of_tars_are_those_of_the_same_files_in_folders(tmp_path: Path, form: int, name: str) -> None:
    """The digest of sets covers pixels, masks, boxes, and classes."""
    masks = [
        read_masked_images(SemanticSegmentationData(train=str(path), label_names=("a", "b", "c")))
        for path in (
            write_folder("semantic-segmentation", tmp_path / "folder"),
            write_tars("semantic-segmentation", tmp_path / "tars", form=form) / name,
        )
    ]
    column = "annotations" if form else "objects"
    boxes = [
        read_boxed_images(ObjectDetectionData(train=str(path), objects_column=key, label_names=("a", "b")))
        for path, key in (
            (write_folder("object-detection", tmp_path / "boxes"), "objects"),
            (write_tars("object-detection", tmp_path / "boxed tars", form=form) / name, column),
        )
    ]
    for folder, tars_of in (masks, boxes):
        assert tars_of.identity == folder.identity
        assert folder.eval is not None
        assert tars_of.eval is not None
        assert tars_of.train.rows.tolist() == folder.train.rows.tolist()
        assert tars_of.eval.rows.tolist() == folder.eval.rows.tolist()
    assert masks[1].train.masks is not None
    ending = ".mask.png" if form else ".png"
    assert masks[1].train.masks.where(5) == f"{tmp_path / 'tars' / '1.tar'}, sample 2 (005{ending})"


def test_a_sample_without_a_mask_or_boxes_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "one.tar", [("a.jpg", image_of(0)), ("b.jpg", image_of(1))])
    with raises_golden(DataError, case="no mask"):
        read_masked_images(SemanticSegmentationData(train=str(path), label_names=("a",)))
    with raises_golden(ValueError, case="no boxes"):
        read_boxed_images(ObjectDetectionData(train=str(path), label_names=("a",)))


@pytest.mark.slow
def test_each_of_100_000_samples_in_100_tars_is_found_with_little_memory(tmp_path: Path) -> None:
    """Images are holes of 20 kB that begin with their number."""
    each, size, folder = 1_000, 20_000, tmp_path / "shards"
    folder.mkdir()
    for tar in range(100):
        with (folder / f"{tar:03d}.tar").open("wb") as file:
            for number in range(tar * each, (tar + 1) * each):
                for ending, content, length in ((".cls", b"%d" % (number % 10), 1), (".jpg", b"%d " % number, size)):
                    member = tarfile.TarInfo(f"{number:08d}{ending}")
                    member.size = length
                    start = file.tell() + 512
                    file.write(member.tobuf(tarfile.USTAR_FORMAT) + content)
                    file.seek(start + -(-length // 512) * 512)
            file.truncate(file.tell() + 1024)
    for which in ("first", "second"):
        began = time.perf_counter()
        tracemalloc.start()
        pool = read(folder, cache_dir=str(tmp_path))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"{which} start: {time.perf_counter() - began:.1f} s, {peak / 1e6:.1f} MB")
        assert peak < 20e6
        assert pool.labels == [number % 10 for number in range(100 * each)]
    for number in np.random.default_rng(0).permutation(100 * each)[:500].tolist():
        image = pool.images.content(number)
        assert isinstance(image, bytes)
        assert (int(image.split(b" ")[0]), len(image)) == (number, size)


def trained(folder: Path, name: str, data: Path, processes: int, workers: int, *, is_stopped: bool = False) -> Path:
    recipe = recipe_of_images(
        folder,
        name,
        data,
        data={"eval_fraction": 0.2, "num_workers": workers, "augment": {"mixup_alpha": 0.2}},
        batch={"global_batch_size": 8},
        schedule={"max_steps": STEPS},
        evaluate={"every_steps": 3},
        checkpoint={"every_steps": 3},
    )
    path = write_yaml(folder / f"{name}.yaml", recipe)
    run(path, processes=processes)
    if is_stopped:
        forget(Path(recipe["output_dir"]), STEPS)
        run(path, processes=processes)
    return Path(recipe["output_dir"])


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_run_on_tars_is_the_run_on_files_to_the_bit_with_readers_and_after_a_resume(
    tmp_path: Path, processes: int
) -> None:
    files = trained(tmp_path, "files", write_class_folders(tmp_path / "classes"), processes, 0)
    shards = write_shards(tmp_path / "shards")
    for workers in (0, 2):
        run_on_tars = trained(tmp_path, f"tars-{workers}", shards, processes, workers, is_stopped=workers == 2)
        assert_same_bits_of_runs(run_on_tars, files, STEPS)
