"""Samples of semantic segmentation, an image with its mask, and batches of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from accel_train.data.augment import Pixels
from accel_train.data.masked_images import Mask, MaskedImages
from accel_train.data.masks import MaskSets
from accel_train.data.segment_augment import augment_pair, crop_pair
from accel_train.data.vision import Preprocessing
from accel_train.recipe_data import Augment


@dataclass(frozen=True)
class SegmentSettings:
    """What samples are made with."""

    preprocessing: Preprocessing
    crop_size: int
    """Edge of a training sample."""
    num_classes: int
    ignore_index: int
    """In the mask files, and in the labels of a batch."""
    augment: Augment


class SegmentSample(NamedTuple):
    """One image and its mask."""

    image: Pixels
    """(S, S, 3), or (S, S) where the model takes grey ones."""
    mask: Mask
    """(H, W): S x S in training, the mask's own size in evaluation."""


class SegmentationImages(Dataset[SegmentSample]):
    """Pairs as an evaluation sees them: the whole image, resized to a square, and the mask as it is."""

    def __init__(self, pairs: MaskedImages, settings: SegmentSettings) -> None:
        self.pairs, self.settings = pairs, settings

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> SegmentSample:
        image, mask = self.decoded(index)
        preprocessing = self.settings.preprocessing
        square = (preprocessing.image_size, preprocessing.image_size)
        return SegmentSample(
            np.asarray(image if image.size == square else image.resize(square, preprocessing.resample)), mask
        )

    def decoded(self, index: int) -> tuple[Any, Mask]:
        """The whole image, in the colours that the model sees, and its mask."""
        settings = self.settings
        return self.pairs.pair(index, settings.preprocessing.mode, settings.num_classes, settings.ignore_index)


class SegmentationCrops(SegmentationImages):
    """Pairs for training: by index the crop in the middle, by `draw` one with its augmentation."""

    def __getitem__(self, index: int) -> SegmentSample:
        settings, edge = self.settings, self.settings.preprocessing.image_size
        corner = (edge - settings.crop_size) // 2
        image, mask = crop_pair(
            *self.decoded(index),
            settings.preprocessing,
            edge,
            (corner, corner),
            settings.crop_size,
            settings.ignore_index,
        )
        return SegmentSample(np.asarray(image), mask)

    def draw(self, index: int, generator: np.random.Generator) -> SegmentSample:
        """A training sample, drawn by the generator alone."""
        settings = self.settings
        return SegmentSample(
            *augment_pair(
                *self.decoded(index),
                settings.augment,
                settings.preprocessing,
                crop_size=settings.crop_size,
                ignore_index=settings.ignore_index,
                generator=generator,
            )
        )


def collate_segments(
    samples: Sequence[SegmentSample], *, preprocessing: Preprocessing, ignore_index: int
) -> dict[str, Any]:
    """pixel_values (N, C, S, S) fp32; labels (N, H, W) uint8, each in the corner of the largest, the rest ignored.

    `num_targets` counts the pixels that are not ignored. Where sizes differ, `label_sizes` (N, 2) fp32 has each one's height
    and width.
    """
    sizes = np.array([sample.mask.shape for sample in samples])
    labels = np.full((len(samples), *sizes.max(axis=0)), ignore_index, np.uint8)
    for label, sample in zip(labels, samples):
        label[: sample.mask.shape[0], : sample.mask.shape[1]] = sample.mask
    batch: dict[str, Any] = {
        "pixel_values": preprocessing.normalise([sample.image for sample in samples]),
        "labels": torch.from_numpy(labels),
        "num_targets": int(np.count_nonzero(labels != ignore_index)),
    }
    if (sizes != sizes[0]).any():
        batch["label_sizes"] = torch.from_numpy(sizes.astype(np.float32))
    return batch


@dataclass(frozen=True)
class SegmentSource:
    """What a trained segmenter needs to know of its data."""

    sets: MaskSets
    settings: SegmentSettings

    @property
    def label_names(self) -> tuple[str, ...]:
        """The classes, in the order of their numbers."""
        return self.sets.label_names

    def row_ids(self, index: int) -> str:
        """What names an evaluation image: its id column, else its file, or file and row."""
        pairs = self.sets.eval
        assert pairs is not None
        return pairs.images.where(int(pairs.rows[index])) if self.sets.eval_ids is None else self.sets.eval_ids[index]
