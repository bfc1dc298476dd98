"""Images with boxes: find, split, read, augment and batch them.

Augmentation is stateless: the same image and generator give the same bits in every process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from accel_train.core.errors import DataError
from accel_train.data.builtin.digit_scenes import NAME as DIGIT_SCENES
from accel_train.data.images.augment import Pixels, color_jitter, draw_start, place_crop
from accel_train.data.images.boxes import Boxes, no_boxes
from accel_train.data.images.decoding import to_mode
from accel_train.data.images.labelled import ImageRows, ImageSets, divide_pools
from accel_train.data.images.pools import boxed_scenes_pool
from accel_train.data.images.preprocessing import Preprocessing, height_width
from accel_train.data.labels import IGNORED_LABEL
from accel_train.recipe.data import Augment
from accel_train.tasks.object_detection.config import ObjectDetectionData


def read_boxed_images(data: ObjectDetectionData, known_names: tuple[str, ...] | None = None) -> ImageSets:
    """Return the images and boxes that a recipe names, split into training and evaluation.

    `known_names` are the classes of a pretrained model. Their order is used if the data have the same classes.

    Raises:
        ValueError: data is missing or broken; the message has a line for each fault.
    """
    pool = boxed_scenes_pool(held_out=False)
    other = boxed_scenes_pool(held_out=True)
    assert data.train == DIGIT_SCENES
    assert pool.names is not None
    return divide_pools(pool, other, data).named(pool.names, ())


@dataclass(frozen=True)
class DetectionSettings:
    """Settings of samples."""

    preprocessing: Preprocessing
    augment: Augment
    min_visible: float
    """Least share of a box's area inside a training crop."""


class DetectionSample(NamedTuple):
    """One image and its boxes, without crowds."""

    image: Pixels
    """Pixels (H, W, 3), or (H, W) for a grayscale model."""
    boxes: NDArray[np.float32]
    """Center x, center y, width and height of each box, (K, 4), as fractions of the sample's image."""
    class_ids: NDArray[np.int64]
    """Class of each box, (K,)."""


class BoxedImages(Dataset[DetectionSample]):
    """Images for evaluation: the whole image resized to `image_size`."""

    def __init__(self, images: ImageRows, settings: DetectionSettings) -> None:
        self.images, self.settings = images, settings

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> DetectionSample:
        image, boxes = self.decoded(index)
        preprocessing = self.settings.preprocessing
        size = height_width(preprocessing.image_size)
        resized = image if image.size == size[::-1] else image.resize(size[::-1], preprocessing.resample)
        return _sample(resized, boxes, boxes.corners * _scale(boxes, size))

    def decoded(self, index: int) -> tuple[Image.Image, Boxes]:
        """Return the whole image in the model's color mode, and its boxes. Images to predict have no boxes.

        Raises:
            DataError: the image cannot be read, or its size has changed since the boxes were read.
        """
        where = self.images.where(index)
        image = to_mode(self.images.image(index), self.settings.preprocessing.mode, where)
        if self.images.boxes is None:
            return image, no_boxes(image.width, image.height)
        boxes = self.images.boxes_of(index)
        if image.size != (boxes.width, boxes.height):
            raise DataError(
                f"{where} has {image.width} x {image.height} pixels, and its boxes were read for {boxes.width} x "
                f"{boxes.height}; do not change the images of a run"
            )
        return image, boxes


class AugmentedBoxedImages(BoxedImages):
    """Images for training: the whole image by index, or an augmented crop by `draw`."""

    def draw(self, index: int, generator: np.random.Generator) -> DetectionSample:
        """Return a training sample that depends only on the index and the generator."""
        return augment_boxes(*self.decoded(index), self.settings, generator)


def augment_boxes(
    image: Image.Image, boxes: Boxes, settings: DetectionSettings, generator: np.random.Generator
) -> DetectionSample:
    """Return an augmented crop of `image_size` at a random place: randomly scaled, flipped and colored.

    The scale factor is uniform in `scale_range`, relative to `image_size`. Outside the image, a crop has the mean
    color. Boxes are clipped to the crop, and left out if less than `min_visible` of their area stays.
    """
    augment, preprocessing = settings.augment, settings.preprocessing
    factor = 1.0 if augment.scale_range is None else generator.uniform(*augment.scale_range)
    crop_height, crop_width = height_width(preprocessing.image_size)
    height, width = (max(1, round(edge * factor)) for edge in (crop_height, crop_width))
    left, top = draw_start(width - crop_width, generator), draw_start(height - crop_height, generator)
    image = place_crop(image, preprocessing, (height, width), (left, top), (crop_height, crop_width))
    corners = boxes.corners * _scale(boxes, (height, width)) - np.array([left, top, left, top])
    if generator.random() < augment.horizontal_flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        corners[:, [0, 2]] = crop_width - corners[:, [2, 0]]
    if generator.random() < augment.vertical_flip:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        corners[:, [1, 3]] = crop_height - corners[:, [3, 1]]
    return _sample(color_jitter(image, augment.color_jitter, generator), boxes, corners, settings.min_visible)


def _scale(boxes: Boxes, size: tuple[int, int]) -> NDArray[np.float64]:
    """Return the factors (4,) of corners for an image resized to `size`, (height, width)."""
    return np.array([size[1] / boxes.width, size[0] / boxes.height] * 2)


def _sample(
    image: Image.Image, boxes: Boxes, corners: NDArray[np.float64], min_visible: float = 0.0
) -> DetectionSample:
    """Return an image with the boxes of corners (K, 4) in its pixels: clipped, and without crowds."""
    edges = np.array([*image.size, *image.size])
    clipped = np.clip(corners, 0, edges)
    sides, whole = clipped[:, 2:] - clipped[:, :2], corners[:, 2:] - corners[:, :2]
    # Both sides: a box outside the crop has an area of 0, which is not less than 0.
    is_seen = (sides > 0).all(axis=1) & (sides.prod(axis=1) >= min_visible * whole.prod(axis=1))
    kept = is_seen & ~boxes.is_crowd
    centers = np.concatenate([(clipped[:, :2] + clipped[:, 2:]) / 2, sides], axis=1) / edges
    return DetectionSample(np.asarray(image), centers[kept].astype(np.float32), boxes.class_ids[kept])


def collate_boxes(samples: Sequence[DetectionSample], *, preprocessing: Preprocessing) -> dict[str, Any]:
    """Return pixel_values (N, C, H, W) fp32, boxes (N, M, 4) fp32 and class_ids (N, M).

    M is the largest number of boxes, at least 1. Missing boxes have the class -100 and zeros. `num_targets` counts the
    boxes.
    """
    most = max(1, *(len(sample.boxes) for sample in samples))
    boxes = np.zeros((len(samples), most, 4), np.float32)
    class_ids = np.full((len(samples), most), IGNORED_LABEL)
    for number, sample in enumerate(samples):
        boxes[number, : len(sample.boxes)] = sample.boxes
        class_ids[number, : len(sample.boxes)] = sample.class_ids
    return {
        "pixel_values": preprocessing.normalise([sample.image for sample in samples]),
        "boxes": torch.from_numpy(boxes),
        "class_ids": torch.from_numpy(class_ids),
        "num_targets": int(np.count_nonzero(class_ids != IGNORED_LABEL)),
    }
