"""Samples for object detection: boxes follow their images through every augmentation, and batches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from PIL import Image

from accel_train.core.errors import DataError
from accel_train.data.images.boxes import Boxes
from accel_train.data.images.images import ArrayImages
from accel_train.data.images.labelled import ImageRows
from accel_train.data.images.preprocessing import Preprocessing
from accel_train.inference.boxes import coco_results
from accel_train.recipe.data import Augment
from accel_train.tasks.object_detection.config import ObjectDetectionData
from accel_train.tasks.object_detection.data import (
    AugmentedBoxedImages,
    BoxedImages,
    DetectionSample,
    DetectionSettings,
    augment_boxes,
    collate_boxes,
    read_boxed_images,
)
from tests.support.boxes import coco_content, write_coco
from tests.support.wording import raises_golden

STILL = Augment(horizontal_flip=0.0, scale_range=None)
BLACK = (0.0, 0.0, 0.0)


def settings(
    augment: Augment = STILL,
    size: int | tuple[int, int] = 64,
    min_visible: float = 0.0,
    mean: tuple[float, ...] = BLACK,
) -> DetectionSettings:
    return DetectionSettings(Preprocessing(size, mean=mean, resample=Image.Resampling.NEAREST), augment, min_visible)


def boxes_of(*corners: tuple[float, ...], size: tuple[int, int] = (64, 64), crowds: tuple[int, ...] = ()) -> Boxes:
    array = np.array(corners, np.float32).reshape(-1, 4)
    is_crowd = np.isin(np.arange(len(array)), crowds)
    areas = np.ones(len(array), np.float32)
    return Boxes(array, np.arange(len(array)), is_crowd, areas, width=size[0], height=size[1])


def red(box: tuple[int, int, int, int], size: tuple[int, int] = (64, 64)) -> Image.Image:
    """Return a black image (width, height) with a red rectangle."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2], 0] = 255
    return Image.fromarray(pixels)


def found_in(sample: DetectionSample) -> list[float]:
    """Return center x, center y, width and height of the red pixels, as fractions of the image."""
    places = np.argwhere(sample.image[..., 0] > 60)
    (top, left), (bottom, right) = places.min(axis=0), places.max(axis=0) + 1
    height, width = sample.image.shape[:2]
    return [(left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height]


@pytest.mark.parametrize(
    "augment",
    [
        STILL,
        STILL.model_copy(update={"horizontal_flip": 1.0}),
        STILL.model_copy(update={"vertical_flip": 1.0}),
        STILL.model_copy(update={"horizontal_flip": 1.0, "vertical_flip": 1.0}),
        STILL.model_copy(update={"scale_range": (2.0, 2.0)}),
        STILL.model_copy(update={"scale_range": (0.5, 0.5)}),
        Augment(horizontal_flip=0.5, vertical_flip=0.5, color_jitter=0.3, scale_range=(0.4, 2.5)),
    ],
)
def test_a_box_stays_on_its_pixels(augment: Augment) -> None:
    num_seen = num_gone = 0
    for seed in range(60):
        generator = default_rng(seed)
        left, top = generator.integers(0, 50, 2).tolist()
        width, height = generator.integers(6, 40, 2).tolist()
        box = (left, top, min(left + width, 80), min(top + height, 60))
        image, boxes = red(box, (80, 60)), boxes_of(box, size=(80, 60))
        sample = augment_boxes(image, boxes, settings(augment, (48, 96)), generator)
        assert sample.image.shape == (48, 96, 3)
        if not len(sample.boxes):
            # At most a sliver of a pixel is left.
            assert np.count_nonzero(sample.image[..., 0] > 60) <= 96
            num_gone += 1
            continue
        # Nearest neighbors round each edge to a whole pixel.
        pixel = np.array([1 / 96, 1 / 48, 1 / 96, 1 / 48])
        if sample.boxes[0][2] > 2 / 96 and sample.boxes[0][3] > 2 / 48:
            assert (np.abs(sample.boxes[0] - found_in(sample)) <= 1.01 * pixel).all()
            num_seen += 1
        assert ((sample.boxes >= 0) & (sample.boxes <= 1)).all()
    assert num_seen >= 30
    assert num_gone < 30


def test_a_still_sample_has_the_boxes_of_the_file() -> None:
    sample = augment_boxes(red((16, 8, 32, 24)), boxes_of((16, 8, 32, 24)), settings(), default_rng(0))
    assert sample.boxes.tolist() == [[24 / 64, 16 / 64, 16 / 64, 16 / 64]]


def test_a_box_is_left_out_if_too_little_of_it_stays_in_the_crop() -> None:
    augment = STILL.model_copy(update={"scale_range": (2.0, 2.0)})
    shares = []
    for seed in range(200):
        whole = boxes_of((0, 0, 32, 32))
        every = augment_boxes(red((0, 0, 32, 32)), whole, settings(augment), default_rng(seed))
        some = augment_boxes(red((0, 0, 32, 32)), whole, settings(augment, min_visible=0.3), default_rng(seed))
        share = float(every.boxes[0, 2] * every.boxes[0, 3]) if len(every.boxes) else 0.0
        shares.append(share)
        assert len(some.boxes) == (share >= 0.3)
        assert len(every.boxes) == (share > 0)
    assert min(shares) < 0.3 < max(shares)


def test_crowds_are_no_targets_in_training_and_evaluation() -> None:
    array = np.zeros((1, 64, 64, 3), np.uint8)
    boxes = (boxes_of((0, 0, 8, 8), (8, 8, 16, 16), (20, 20, 30, 30), crowds=(1,)),)
    rows = ImageRows(ArrayImages(array, "images"), np.arange(1), None, np.zeros(1, np.int64), boxes=boxes)
    for sample in (
        BoxedImages(rows, settings())[0],
        AugmentedBoxedImages(rows, settings()).draw(0, default_rng(0)),
    ):
        assert sample.class_ids.tolist() == [0, 2]


def some_images() -> ImageRows:
    array = default_rng(0).integers(0, 256, (6, 40, 60, 3), dtype=np.uint8)
    boxes = tuple(boxes_of(*[(5, 5, 30, 30)] * number, size=(60, 40)) for number in range(6))
    return ImageRows(ArrayImages(array, "images"), np.array([5, 0, 3]), None, np.zeros(3, np.int64), boxes=boxes)


def test_a_draw_depends_on_index_and_generator_alone() -> None:
    chosen = settings(Augment(color_jitter=0.4, vertical_flip=0.5), 32)
    one, other = (AugmentedBoxedImages(some_images(), chosen) for _ in range(2))
    other.draw(1, default_rng(4))
    drawn = [each.draw(2, default_rng((7, 2))) for each in (one, other)]
    assert np.array_equal(drawn[0].image, drawn[1].image)
    assert np.array_equal(drawn[0].boxes, drawn[1].boxes)
    assert not np.array_equal(one.draw(2, default_rng((8, 2))).image, drawn[0].image)


def test_rows_have_their_own_boxes() -> None:
    images = BoxedImages(some_images(), settings(size=(20, 30)))
    assert [len(images[index].boxes) for index in range(3)] == [5, 0, 3]
    sample = images[2]
    assert sample.image.shape == (20, 30, 3)
    assert sample.boxes[0] == pytest.approx([17.5 / 60, 17.5 / 40, 25 / 60, 25 / 40])


def test_an_image_of_another_size_than_its_boxes_is_refused() -> None:
    rows = some_images()
    assert rows.boxes is not None
    wrong = tuple(boxes_of((1, 1, 2, 2), size=(40, 60)) for _ in rows.boxes)
    images = BoxedImages(ImageRows(rows.images, rows.rows, None, rows.labels, boxes=wrong), settings())
    with raises_golden(DataError):
        images[0]


def test_images_to_predict_have_samples_without_boxes() -> None:
    rows = some_images()
    images = BoxedImages(ImageRows(rows.images, rows.rows, None, rows.labels), settings(size=32))
    assert images[0].boxes.shape == (0, 4)
    assert images.decoded(0)[1].width == 60


def test_a_batch_pads_boxes_and_counts_its_images() -> None:
    chosen = settings(size=(20, 30))
    images = BoxedImages(some_images(), chosen)
    batch = collate_boxes([images[index] for index in range(3)], preprocessing=chosen.preprocessing)
    assert batch["pixel_values"].shape == (3, 3, 20, 30)
    assert batch["boxes"].shape == (3, 5, 4)
    assert batch["boxes"].dtype == torch.float32
    assert (batch["class_ids"] == -100).sum(dim=1).tolist() == [0, 5, 2]
    assert batch["class_ids"][2].tolist() == [0, 1, 2, -100, -100]
    assert torch.equal(batch["boxes"][2, :3], torch.from_numpy(images[2].boxes))
    assert batch["num_targets"] == 3
    alone = collate_boxes([images[1]], preprocessing=chosen.preprocessing)
    assert alone["boxes"].shape == (1, 1, 4)
    assert alone["class_ids"].tolist() == [[-100]]
    assert alone["num_targets"] == 1


def test_outside_its_image_a_crop_has_the_mean_color() -> None:
    augment = STILL.model_copy(update={"scale_range": (0.5, 0.5)})
    chosen = settings(augment, mean=(0.2, 0.4, 0.6))
    sample = augment_boxes(Image.new("RGB", (64, 64), (255, 0, 0)), boxes_of(), chosen, default_rng(1))
    colors = {tuple(color) for color in sample.image.reshape(-1, 3).tolist()}
    assert colors == {(255, 0, 0), (51, 102, 153)}


def test_coco_results_have_the_ids_of_the_evaluation_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = coco_content()
    for each in (*content["images"], *content["annotations"]):
        # The evaluation images have the file names of training images, and other ids.
        each["id" if "file_name" in each else "image_id"] += 50
    write_coco(Path("set/instances_train.json"), Path("set/train"))
    write_coco(Path("set/instances_val.json"), Path("set/val"), content)
    sets = read_boxed_images(ObjectDetectionData(train="set"))
    columns = {
        "id": ["a", "b", "c"],
        "labels": [["cat"], [], ["dog", "cat"]],
        "boxes": [[[1, 2, 3, 4]], [], [[5, 6, 7, 8], [1, 1, 1, 1]]],
        "scores": [[0.5], [], [0.4, 0.3]],
    }
    results, _ = coco_results(columns, sets)
    assert [(each["image_id"], each["category_id"]) for each in results] == [(150, 90), (164, 80), (164, 90)]
    assert (results[1]["bbox"], results[1]["score"]) == ([5, 6, 7, 8], 0.4)
    known = replace(sets, category_ids=None)
    assert [(each["image_id"], each["category_id"]) for each in coco_results(columns, known)[0]] == [
        (1, 2),
        (3, 1),
        (3, 2),
    ]


def test_coco_results_of_images_to_predict_have_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = coco_content()
    del content["annotations"]
    write_coco(Path("test.json"), Path("images"), content)
    data = ObjectDetectionData(train="test.json", eval="test.json", annotations=None, label_names=("cat", "dog"))
    sets = read_boxed_images(data)
    assert sets.eval is not None
    columns = {
        "id": [sets.eval.row_id(index) for index in range(3)],
        "labels": [["cat"], [], ["dog"]],
        "boxes": [[[1, 2, 3, 4]], [], [[5, 6, 7, 8]]],
        "scores": [[0.5], [], [0.4]],
    }
    results, _ = coco_results(columns, sets)
    assert [(each["image_id"], each["category_id"]) for each in results] == [(100, 90), (114, 80)]
