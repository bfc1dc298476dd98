"""Images find their masks in the layouts of CamVid, VOC, ADE20K and COCO, and in lists; and masks their classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_train.data.images.labelled import ImageSets
from accel_train.data.images.preprocessing import Preprocessing
from accel_train.tasks.semantic_segmentation.config import SemanticSegmentationData
from accel_train.tasks.semantic_segmentation.data import masked_pool, read_masked_images, read_pair
from tests.support.runs import refused, write_file


def write(*paths: str, values: Any = ((0, 1), (2, 255)), mode: str = "L") -> None:
    """An image at each path: a mask, for all that the reader knows."""
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.array(values, np.uint8)).convert(mode).save(path)


def pairs(train: str, **data: Any) -> list[tuple[str, str]]:
    pool = masked_pool(train, SemanticSegmentationData(train=train, **data), "data.train")
    return [(pool.images.where(index), pool.masks.where(index)) for index in range(len(pool.images))]


def read(**settings: Any) -> ImageSets:
    return read_masked_images(SemanticSegmentationData(train="s", eval_fraction=0, **settings))


@pytest.mark.parametrize(
    ("train", "image", "mask"),
    [
        ("s", "s/images/a.png", "s/masks/a.png"),
        ("s", "s/images/a.png", "s/masks/a_mask.png"),
        ("s", "s/images/deep/a.png", "s/annotations/deep/a.png"),
        ("ade/images/training", "ade/images/training/a.png", "ade/annotations/training/a.png"),
        ("camvid/train", "camvid/train/a.png", "camvid/trainannot/a.png"),
        ("camvid/train", "camvid/train/a.png", "camvid/train_labels/a_L.png"),
        ("voc", "voc/JPEGImages/a.png", "voc/SegmentationClass/a.png"),
        ("s", "s/image/a.png", "s/label/a.png"),
        ("s", "s/image/a.png", "s/mask/a.png"),
        ("s", "s/Images/a.png", "s/Masks/a.png"),
        ("s", "s/imgs/a.png", "s/masks/a_mask.png"),
        ("s", "s/img/a.png", "s/mask/a.png"),
        ("s", "s/input/a.png", "s/target/a.png"),
        ("s", "s/images/a.png", "s/gt/a_gt.png"),
        ("s", "s/original/a.png", "s/segmented/a.png"),
        ("s", "s/JPEGImages/a.jpg", "s/SegmentationClassPNG/a.png"),
        ("s", "s/images_prepped_train/a.png", "s/annotations_prepped_train/a.png"),
        ("s", "s/train_images/a.png", "s/train_masks/a.png"),
        ("s", "s/raw/a.png", "s/Ground Truth/a.png"),
    ],
)
def test_the_folders_that_people_have_are_pairs(train: str, image: str, mask: str) -> None:
    write(image, mask)
    assert pairs(train) == [(image, mask)]


def test_of_voc_the_images_with_a_mask_are_taken_or_those_of_a_list(folder: Path) -> None:
    write("voc/JPEGImages/a.png", "voc/JPEGImages/b.png", "voc/JPEGImages/c.png")
    write("voc/SegmentationClass/a.png", "voc/SegmentationClass/c.png")
    assert [image for image, _ in pairs("voc")] == ["voc/JPEGImages/a.png", "voc/JPEGImages/c.png"]
    listed = write_file("voc/ImageSets/Segmentation/train.txt", "c\n")
    assert pairs(listed) == [(f"{folder}/voc/JPEGImages/c.png", f"{folder}/voc/SegmentationClass/c.png")]
    refused(pairs, write_file(listed, "b\n"), named="b.png|no mask")


def test_a_list_of_pairs_is_read_from_where_its_files_are(folder: Path) -> None:
    write("camvid/train/a.png", "camvid/trainannot/a.png")
    write_file("camvid/train.txt", "/SegNet/CamVid/train/a.png /SegNet/CamVid/trainannot/a.png\n")
    assert pairs("camvid/train.txt") == [(f"{folder}/camvid/train/a.png", f"{folder}/camvid/trainannot/a.png")]
    refused(
        pairs,
        write_file("camvid/train.txt", "train/a.png\ttrainannot/b.png\n"),
        named="camvid/train.txt:1: no file|trainannot/b.png",
    )
    refused(
        pairs,
        write_file("camvid/train.txt", "train/a.png trainannot/a.png 3\n"),
        named="camvid/train.txt:1: |`IMAGE MASK`",
    )


@pytest.mark.parametrize(
    ("values", "settings", "classes"),
    [
        (((0, 1), (2, 255)), {"reduce_labels": True}, ((255, 0), (1, 255))),
        (((0, 255), (255, 0)), {"mask_values": (0, 255)}, ((0, 1), (1, 0))),
        (((0, 64), (128, 7)), {"mask_values": (64, 0, 128)}, ((1, 0), (2, 255))),
    ],
)
def test_numbers_in_masks_become_those_of_classes(values: Any, settings: dict[str, Any], classes: Any) -> None:
    write("s/images/a.png", "s/masks/a.png", "s/images/b.png", "s/masks/b.png", values=values)
    images = read(**settings).train
    _, mask = read_pair(images, 0, Preprocessing(64, mean=(0.5,), std=(0.5,)), 3, 255)
    assert mask.tolist() == [list(row) for row in classes]


def test_other_numbers_of_classes_are_other_data() -> None:
    write("s/images/a.png", "s/masks/a.png")
    assert read().contents != read(reduce_labels=True).contents


def test_palettes_and_grey_masks_saved_in_colour_are_read_and_colours_refused() -> None:
    write("s/images/a.png", "s/masks/a.png", mode="RGB")
    assert read().label_names == ("0", "1", "2")
    write("s/masks/a.png", values=(((9, 0, 0), (0, 9, 0)), ((0, 0, 0), (0, 0, 0))), mode="RGB")
    refused(read, named="mode RGB")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mask_values": (0, 1), "reduce_labels": True}, "set one of them"),
        ({"mask_values": (0, 1), "ignore_index": 1}, "is the number of a class"),
    ],
)
def test_settings_of_numbers_that_contradict_are_refused(settings: dict[str, Any], said: str) -> None:
    write("s/images/a.png", "s/masks/a.png")
    refused(read, **settings, named=said)
