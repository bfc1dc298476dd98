"""Images with masks (a class id per pixel): find, split, read, augment and batch them.

Augmentation is stateless: the same pair and generator give the same bits in every process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from accel_train.core.errors import DataError
from accel_train.data.builtin.digit_scenes import DIGIT_SCENES, LABEL_NAMES
from accel_train.data.images.augment import Pixels, color_jitter, draw_start, place_crop
from accel_train.data.images.images import ImagePool, Images, Target, evenly_spaced, in_threads
from accel_train.data.images.labelled import ImageRows, ImageSets, divide_pools
from accel_train.data.images.masks import Mask, RenumberedMasks, mask_values
from accel_train.data.images.pools import read_pools, scenes_pool
from accel_train.data.images.preprocessing import Preprocessing, Size, height_width
from accel_train.recipe.data import Augment
from accel_train.task import Collated
from accel_train.tasks.semantic_segmentation.config import SemanticSegmentationData


def read_pair(
    images: ImageRows, index: int, preprocessing: Preprocessing, num_classes: int, ignore_index: int
) -> tuple[Image.Image, Mask]:
    """Return an image in the model's color mode and its mask (H, W) of the same size.

    Without masks, every pixel has `ignore_index`.

    Raises:
        DataError: a file cannot be read, sizes differ, or a pixel has no class; the message names both files.
    """
    where = images.where(index)
    mask_where = "not there" if images.masks is None else images.masks.where(int(images.rows[index]))
    try:
        image = preprocessing.decoded(images.image(index), where)
    except DataError as error:
        raise DataError(f"{error} (its mask is {mask_where})") from error
    if images.masks is None:
        return image, np.full((image.height, image.width), ignore_index, np.uint8)
    mask = read_mask(images, index)
    if mask.shape != image.size[::-1]:
        raise DataError(
            f"{where} has {image.width} x {image.height} pixels and its mask {mask_where} has {mask.shape[1]} x "
            f"{mask.shape[0]}; a mask has one class number for each pixel of its image"
        )
    wrong = (mask >= num_classes) & (mask != ignore_index)
    if wrong.any():
        y, x = np.argwhere(wrong)[0].tolist()
        raise DataError(
            f"{mask_where}, the mask of {where}: the pixel at x={x}, y={y} is {mask[y, x]}, but there are "
            f"{num_classes} classes (0 to {num_classes - 1}), and data.ignore_index is {ignore_index}; repair the "
            f"mask, list all classes in data.label_names, or set data.ignore_index: {mask[y, x]} if such pixels are "
            "not to count"
        )
    return image, mask


def read_mask(images: ImageRows, index: int) -> Mask:
    """Return the mask of an image, (H, W). The image must have a mask."""
    assert images.masks is not None
    row = int(images.rows[index])
    try:
        return mask_values(images.masks[row], images.masks.where(row))
    except DataError as error:
        raise DataError(f"{error} (it is the mask of {images.where(index)})") from error


def count_pixels(images: ImageRows, limit: int | None = None, most_broken: int = 0) -> NDArray[np.int64]:
    """Return the pixel counts (256,) of the values 0 to 255, over `limit` evenly spaced masks or all masks.

    With `most_broken` (`data.max_broken`), broken masks are left out. Training counts them.
    """
    none, left_out = np.zeros(256, np.int64), (DataError,) if most_broken else ()

    def count(index: int) -> NDArray[np.int64]:
        try:
            return np.bincount(read_mask(images, index).reshape(-1), minlength=256)
        except left_out:
            return none

    chosen = [] if images.masks is None else evenly_spaced(len(images), limit or len(images))
    return np.sum([none, *in_threads(count, chosen)], axis=0, dtype=np.int64)


def read_masked_images(data: SemanticSegmentationData, known_names: tuple[str, ...] | None = None) -> ImageSets:
    """Return the images and masks that a recipe names, split into training and evaluation.

    `known_names` are the classes of a pretrained model. They are used if the recipe names no classes and the masks have
    the same number.

    Raises:
        ValueError: data is missing or broken; the message names both files.
    """
    pool = masked_pool(data.train_names, data, data.train_key)
    other = None if data.eval is None else masked_pool(data.eval, data, "data.eval")
    if _are_scenes(data) and data.eval is None and data.eval_fraction > 0:
        other = scenes_pool(held_out=True)
    sets = divide_pools(pool, other, data)
    return sets.named(*_label_names(sets.train, data, known_names))


def masked_pool(names: str | Iterable[str], data: SemanticSegmentationData, key: str) -> ImagePool:
    """Return the images that `key` (`data.train` or `data.eval`) names, with class ids in their masks.

    Raises:
        ValueError: a source is missing or broken, or settings about the numbers in masks conflict.
    """
    pool = read_pools(names, data, key, Target(data.mask_column, is_mask=True))
    if None not in (pool.names, data.label_names) and pool.names != data.label_names:
        raise ValueError(
            f"{key}: the masks of {pool.masks and pool.masks.where(0)} have the classes {pool.names}, and "
            f"data.label_names has {data.label_names}. Name the same classes in the same order"
        )
    return replace(pool, masks=_renumbered(pool.masks, data))


def _renumbered(masks: Images | None, data: SemanticSegmentationData) -> Images | None:
    """Return masks with class ids, mapped by `data.mask_values` or `data.reduce_labels`. Unchanged if neither is set.

    Raises:
        ValueError: both are set, or `data.ignore_index` is a class id.
    """
    if masks is None or not (data.reduce_labels or data.mask_values):
        return masks
    if data.reduce_labels and data.mask_values:
        raise ValueError("data.mask_values and data.reduce_labels both say which numbers are classes; set one of them")
    table = np.full(256, data.ignore_index, np.uint8)
    if data.mask_values:
        if data.ignore_index < len(data.mask_values):
            raise ValueError(
                f"data.ignore_index={data.ignore_index} is the number of a class, as data.mask_values are numbered "
                "from 0; leave it out"
            )
        table[list(data.mask_values)] = np.arange(len(data.mask_values))
    else:
        table[1:255] = np.arange(254)
    return RenumberedMasks(masks, table.tobytes())


def _are_scenes(data: SemanticSegmentationData) -> bool:
    return data.train_names == (DIGIT_SCENES,)


def _label_names(
    train: ImageRows, data: SemanticSegmentationData, known_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the class names in the order of their ids, and notes. Without names, this reads all training masks."""
    if data.label_names is not None:
        return data.label_names, ()
    if _are_scenes(data):
        return LABEL_NAMES, ()
    if train.masks is None:
        raise ValueError("data.mask_column: none is for images to predict; then data.label_names says the classes")
    counts = count_pixels(train, most_broken=data.max_broken)
    if np.count_nonzero(counts) == 2 and counts[0] and counts[data.ignore_index]:
        raise ValueError(
            f"{data.train_key}: the masks hold 0 and {data.ignore_index} alone, and "
            f"data.ignore_index={data.ignore_index} leaves one class. For black and white masks set "
            f"data.mask_values: [0, {data.ignore_index}]"
        )
    counts[data.ignore_index] = 0
    if not counts.any():
        raise ValueError(f"{data.train_key}: every pixel of the masks is data.ignore_index={data.ignore_index}")
    num_classes = int(np.flatnonzero(counts)[-1]) + 1
    note = f"the masks have the numbers 0 to {num_classes - 1}"
    if known_names is not None and len(known_names) == num_classes:
        return known_names, (f"{note}, taken as the pretrained model's classes",)
    return tuple(map(str, range(num_classes))), (f"{note}; data.label_names gives them names",)


@dataclass(frozen=True)
class SegmentSettings:
    """Settings of samples. `ignore_index` is a value in mask files and in a batch's labels."""

    preprocessing: Preprocessing
    crop_size: Size
    """Size of a training sample."""
    num_classes: int
    ignore_index: int
    augment: Augment


class SegmentSample(NamedTuple):
    """One image and its mask."""

    image: Pixels
    """Pixels (S, T, 3), or (S, T) for a grayscale model."""
    mask: Mask
    """Mask (H, W): S x T in training, the mask's own size in evaluation."""


@dataclass(eq=False)
class SegmentationImages(Dataset[SegmentSample]):
    """Pairs for evaluation: the whole image resized to `image_size`, and the unchanged mask."""

    pairs: ImageRows
    settings: SegmentSettings

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> SegmentSample:
        image, mask = self.decoded(index)
        return SegmentSample(np.asarray(self.settings.preprocessing.whole(image)), mask)

    def decoded(self, index: int) -> tuple[Image.Image, Mask]:
        """Return the whole image in the model's color mode, and its mask."""
        settings = self.settings
        return read_pair(self.pairs, index, settings.preprocessing, settings.num_classes, settings.ignore_index)


class SegmentationCrops(SegmentationImages):
    """Pairs for training: a center crop by index, or an augmented crop by `draw`."""

    def __getitem__(self, index: int) -> SegmentSample:
        size = height_width(self.settings.preprocessing.image_size)
        top, left = ((edge - cut) // 2 for edge, cut in zip(size, height_width(self.settings.crop_size)))
        image, mask = _crop_pair(*self.decoded(index), self.settings, size, (left, top))
        return SegmentSample(np.asarray(image), mask)

    def draw(self, index: int, generator: np.random.Generator) -> SegmentSample:
        """Return a training sample that depends only on the index and the generator."""
        return augment_pair(*self.decoded(index), self.settings, generator)


def augment_pair(
    image: Image.Image, mask: Mask, settings: SegmentSettings, generator: np.random.Generator
) -> SegmentSample:
    """Return an augmented crop of `crop_size` at a random place: randomly scaled, flipped and colored.

    The scale factor is uniform in `scale_range`, relative to `image_size`. Outside the image, a crop has the mean
    color, and its mask has `ignore_index`.
    """
    augment = settings.augment
    factor = 1.0 if augment.scale_range is None else generator.uniform(*augment.scale_range)
    height, width = (max(1, round(edge * factor)) for edge in height_width(settings.preprocessing.image_size))
    crop_height, crop_width = height_width(settings.crop_size)
    corner = (draw_start(width - crop_width, generator), draw_start(height - crop_height, generator))
    image, cut = _crop_pair(image, mask, settings, (height, width), corner)
    if generator.random() < augment.horizontal_flip:
        image, cut = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), cut[:, ::-1]
    if generator.random() < augment.vertical_flip:
        image, cut = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM), cut[::-1]
    pixels = np.asarray(color_jitter(image, augment.color_jitter, generator))
    return SegmentSample(pixels, np.ascontiguousarray(cut))


def _crop_pair(
    image: Image.Image, mask: Mask, settings: SegmentSettings, size: tuple[int, int], corner: tuple[int, int]
) -> tuple[Image.Image, Mask]:
    """Return the crop of `crop_size` at `corner` of the pair, after resizing it to `size`.

    `corner` is (left, top). Negative values place the image inside the crop. `size` is (height, width).
    """
    crop_size = height_width(settings.crop_size)
    canvas = place_crop(image, settings.preprocessing, size, corner, crop_size)
    ignored = Image.new("L", crop_size[::-1], settings.ignore_index)
    ignored.paste(Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST), (-corner[0], -corner[1]))
    return canvas, np.asarray(ignored)


def collate_segments(samples: Sequence[SegmentSample], *, preprocessing: Preprocessing, ignore_index: int) -> Collated:
    """Return pixel_values (N, C, S, T) fp32 and labels (N, H, W) uint8, padded with `ignore_index` to the largest mask.

    `num_targets` counts the pixels that are not ignored. If mask sizes differ, `label_sizes` (N, 2) fp32 has each
    height and width.
    """
    sizes = np.array([sample.mask.shape for sample in samples])
    labels = np.full((len(samples), *sizes.max(axis=0)), ignore_index, np.uint8)
    for label, sample in zip(labels, samples):
        label[: sample.mask.shape[0], : sample.mask.shape[1]] = sample.mask
    batch: Collated = {
        "pixel_values": preprocessing.normalise([sample.image for sample in samples]),
        "labels": torch.from_numpy(labels),
        "num_targets": int(np.count_nonzero(labels != ignore_index)),
    }
    if (sizes != sizes[0]).any():
        batch["label_sizes"] = torch.from_numpy(sizes.astype(np.float32))
    return batch
