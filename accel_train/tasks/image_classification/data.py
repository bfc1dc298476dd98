"""Samples of image classification: labeled images, augmented and mixed for training, and their batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from accel_train.data.images.augment import Pixels, augment_image, cutmix, draw_mix, mixup
from accel_train.data.images.images import FileImages, ImagePool, Target
from accel_train.data.images.labelled import ImageRows, ImageSets, divide_pools, eval_beside_train
from accel_train.data.images.pools import read_pools
from accel_train.data.images.preprocessing import Preprocessing
from accel_train.data.labels import LabelScheme, label_scheme
from accel_train.recipe.data import Augment
from accel_train.task import Collated
from accel_train.tasks.image_classification.config import ImageClassificationData


class ImageSample(NamedTuple):
    """One image and its class."""

    image: Pixels
    """Pixels (H, W, 3), or (H, W) for a grayscale model."""
    label: int
    partner_label: int = 0
    """Class of the other image, for mixup and CutMix."""
    share: float = 1.0
    """Weight of `label`. Default: 1, for an image without mixing."""


class ClassificationImages(Dataset[ImageSample]):
    """Images for evaluation: resized and center-cropped."""

    def __init__(self, labelled: ImageRows, preprocessing: Preprocessing) -> None:
        self.labelled, self.preprocessing = labelled, preprocessing

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, index: int) -> ImageSample:
        pixels = np.asarray(self.preprocessing.resized(self.decoded(index)))
        return ImageSample(pixels, int(self.labelled.labels[index]))

    def decoded(self, index: int) -> Image.Image:
        """Return the whole image in the model's color mode."""
        return self.preprocessing.decoded(self.labelled.image(index), self.labelled.where(index))


def draw_sample(
    images: ClassificationImages, settings: Augment, index: int, generator: np.random.Generator
) -> ImageSample:
    """Return an augmented training image. The same generator augments the image and its mixing partner."""
    label = int(images.labelled.labels[index])

    def augmented(which: int) -> Pixels:
        return np.asarray(augment_image(images.decoded(which), settings, images.preprocessing, generator))

    image = augmented(index)
    mix = draw_mix(settings, len(images), generator)
    if mix is None:
        return ImageSample(image, label)
    partner = augmented(mix.partner)
    partner_label = int(images.labelled.labels[mix.partner])
    if mix.kind == "mixup":
        return ImageSample(mixup(image, partner, mix.share), label, partner_label, mix.share)
    mixed, share = cutmix(image, partner, mix.share, generator)
    return ImageSample(mixed, label, partner_label, share)


def collate_images(samples: Sequence[ImageSample], *, preprocessing: Preprocessing, num_classes: int) -> Collated:
    """Return pixel_values (N, C, H, W) fp32 and labels (N,) int64.

    If any sample is mixed, soft_labels (N, classes) fp32 replace the labels.
    """
    batch: Collated = {
        "pixel_values": preprocessing.normalise([sample.image for sample in samples]),
        "num_targets": len(samples),
    }
    if all(sample.share == 1 for sample in samples):
        batch["labels"] = torch.tensor([sample.label for sample in samples])
        return batch
    soft = torch.zeros(len(samples), num_classes)
    for row, sample in zip(soft, samples):
        row[sample.label] += sample.share
        row[sample.partner_label] += 1 - sample.share
    batch["soft_labels"] = soft
    return batch


def read_labelled_images(data: ImageClassificationData, known_names: tuple[str, ...] | None = None) -> ImageSets:
    """Return the labeled images that a recipe names, split into training and evaluation.

    `known_names` are the classes of a pretrained classifier. If the data has exactly these classes, their order is
    kept, so the head can be kept too.

    Raises:
        ValueError: data is missing or broken; the message names file, row or column.
    """
    train_names, eval_names, notes = eval_beside_train(data)
    target = Target(data.label_column, is_mask=False)
    pool = read_pools(train_names, data, data.train_key, target)
    if data.label_names is None and isinstance(pool.images, FileImages) and len(set(pool.labels)) == 1:
        folder = pool.images.root / pool.labels[0]
        raise ValueError(
            f"{data.train_key}: the one class folder is {folder}, and a classifier needs two; is it one too high?"
        )
    scheme = label_scheme(
        pool.labels,
        pool.images.where,
        column=data.label_column,
        problem_type="single_label",
        label_names=data.label_names,
        feature_names=pool.names,
        known_names=known_names,
        first_id=data.label_ids_from,
    )
    pool = _numbered(pool, scheme)
    other = None if eval_names is None else pool
    # Equal names mean that a trained model is evaluated on other data and no split is needed.
    if eval_names not in (None, train_names):
        other = _numbered(read_pools(eval_names, data, "data.eval", target), scheme)
    sets = divide_pools(pool, other, data)
    return sets.named(scheme.names, (*notes, *scheme.notes, *_untrained_classes(sets, scheme.names, data)))


def _numbered(pool: ImagePool, scheme: LabelScheme) -> ImagePool:
    return replace(pool, class_ids=scheme.encode(pool.labels, pool.images.where)) if scheme.column else pool


def _untrained_classes(sets: ImageSets, names: tuple[str, ...], data: ImageClassificationData) -> tuple[str, ...]:
    """Return a note on classes without a training image.

    Raises:
        ValueError: the evaluation has images of a class without training images, and the recipe lists no classes.
    """
    if data.label_column is None or not data.is_for_training:
        return ()
    trained, evaluated = (set() if side is None else set(side.labels.tolist()) for side in (sets.train, sets.eval))
    missing = [name for number, name in enumerate(names) if number not in trained]
    if not missing:
        return ()
    asked = [name for number, name in enumerate(names) if number in evaluated - trained]
    if asked and data.label_names is None:
        raise ValueError(
            f"no training image is of the class {asked[0]!r}, and the evaluation has some; add training images"
            + (", or lower data.eval_fraction" if data.eval is None else ", or list all classes in data.label_names")
        )
    return (f"no training image is of {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}",)
