"""Images with boxes: find, split, read, augment and batch them.

Augmentation is stateless: the same image and generator give the same bits in every process.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from accel_train.core.errors import DataError
from accel_train.core.format import format_count
from accel_train.data.builtin.digit_scenes import DIGIT_SCENES
from accel_train.data.images.annotations.checks import check_boxes, other_order, refuse_faults, repeated_images
from accel_train.data.images.annotations.coco import read_coco
from accel_train.data.images.annotations.columns import KIND as COLUMNS
from accel_train.data.images.annotations.folders import LAYOUTS, Located, locate, read_annotated
from accel_train.data.images.annotations.records import Annotated, with_names
from accel_train.data.images.augment import Pixels, color_jitter, draw_start, place_crop
from accel_train.data.images.boxes import Boxes, no_boxes
from accel_train.data.images.images import ImagePool, Target, join_images
from accel_train.data.images.labelled import ImageRows, ImageSets, divide_pools
from accel_train.data.images.pools import boxed_scenes_pool, read_pools
from accel_train.data.images.preprocessing import Preprocessing, height_width
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.sources import is_there
from accel_train.data.text.padding import padded
from accel_train.recipe.data import Augment, listed
from accel_train.task import Collated
from accel_train.tasks.object_detection.config import ObjectDetectionData


class _Part(NamedTuple):
    """The images of one name in a recipe: where its boxes are, and which part of them is meant."""

    key: str
    found: Located
    part: str
    images: Path | None


def read_boxed_images(data: ObjectDetectionData, known_names: tuple[str, ...] | None = None) -> ImageSets:
    """Return the images and boxes that a recipe names, split into training and evaluation.

    `known_names` are the classes of a pretrained model. Their order is used if the data have the same classes.

    Raises:
        ValueError: data is missing or broken; the message has a line for each fault.
    """
    if data.train_names == (DIGIT_SCENES,):
        return _scenes(data)
    if data.annotations is None:
        if data.label_names is None and known_names is None:
            raise ValueError("data.annotations=null is for images to predict; then data.label_names says the classes")
        return _to_predict(data, data.label_names or known_names or ())
    train, held, notes = _parts(data)
    by_name = [
        [read_annotated(found, part, data, images) for _, found, part, images in side] for side in (train, held or ())
    ]
    sources, others = ([each for named in side for each in named] for side in by_name)
    names, further_notes = _class_names(sources, data, known_names)
    key = "data.label_names" if data.label_names else f"{data.train_key} ({', '.join(names[:10])})"
    sides = [[with_names(each, names, key) for each in side] for side in (sources, others) if side]
    pools, dropped = checked_pools(sides, data)
    sets = divide_pools(pools[0], None if held is None else pools[-1], data)
    orders = sorted({each.order for each in (*sources, *others) if each.is_by_values})
    if len(orders) > 1:
        raise ValueError(f"{data.train_key}: its tables have boxes of several orders ({', '.join(orders)}); write one")
    sets = replace(
        sets,
        category_ids=_category_ids([*others, *sources], names),
        box_format=next(iter(orders), None),
        # Images of COCO lie anywhere, so their files do not tell their set.
        eval_counts=[sum(len(each.images) for named in of_set for each in named) for of_set in data.by_set(by_name[1])],
    )
    return sets.named(names, (*notes, *further_notes, *dropped, *_untrained_classes(sets, names, data)))


def _to_predict(data: ObjectDetectionData, names: tuple[str, ...]) -> ImageSets:
    """Return images without boxes: of a folder, a table or an array, or those that a file of boxes lists."""
    listed = [_listed(Path(name).expanduser(), data) for name in data.train_names]
    found = [each for one in listed for each in one] if all(listed) else []
    refuse_faults([fault for each in found for fault in each.faults.files], data.train_key, "repair them")
    pool = _joined(found) if found else read_pools(data.train_names, data, data.train_key, Target(None, is_mask=False))
    sets = divide_pools(pool, None if data.eval is None else pool, data)
    return replace(sets, category_ids=_category_ids(found, names)).named(names, ())


def _listed(file: Path, data: ObjectDetectionData) -> list[Annotated]:
    """Return the images that a COCO file or a table of boxes lists; empty for another source."""
    if file.suffix.lower() == ".json" and os.path.isfile(file):
        return [read_coco(file, needs_boxes=False)]
    located = locate(file, data) if os.path.isfile(file) else None
    is_table = located is not None and located.kind == COLUMNS
    return read_annotated(located, "train", data, needs_boxes=False) if located is not None and is_table else []


def _joined(sources: Sequence[Annotated], boxes: tuple[Boxes, ...] | None = None) -> ImagePool:
    ids = [name for each in sources for name in each.ids or map(each.images.where, range(len(each.images)))]
    return ImagePool(
        join_images([source.images for source in sources]),
        ", ".join(source.description for source in sources),
        ids=ids if any(source.ids for source in sources) else None,
        notes=tuple(note for source in sources for note in source.notes),
        boxes=boxes,
    )


def _category_ids(sources: Sequence[Annotated], names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the ids of classes in the first COCO file, or None without such a file, or if a class is missing."""
    ids = next((source.category_ids for source in sources if source.category_ids), {})
    return tuple(ids[name] for name in names) if names and {*names} <= ids.keys() else None


def _scenes(data: ObjectDetectionData) -> ImageSets:
    if {*listed(data.eval)} - {DIGIT_SCENES}:
        raise ValueError(f"data.eval={data.eval}: {DIGIT_SCENES} has scenes to evaluate on. Leave data.eval out")
    held = boxed_scenes_pool(held_out=True)
    pool = boxed_scenes_pool(held_out=False) if data.is_for_training else held
    assert pool.names is not None
    is_held = data.eval is not None or data.eval_fraction > 0
    return divide_pools(pool, held if is_held else None, data).named(pool.names, ())


def _parts(data: ObjectDetectionData) -> tuple[list[_Part], list[_Part] | None, tuple[str, ...]]:
    """Return the parts to train on, the parts to evaluate on, and notes.

    None: the evaluation images are split off. An empty list: a trained model is shown the same images.
    """
    annotations = data.annotations if data.is_for_training else None
    train = [_part(name, annotations or "auto", data.train_key, data) for name in listed(data.train)]
    if not data.is_for_training:
        return train, [], ()
    if data.eval is not None:
        held = [_part(name, data.eval_annotations or "auto", "data.eval", data) for name in listed(data.eval)]
        return train, held, ()
    (first, *more) = train
    tests = [part.found.test for part in train if part.found.test is not None]
    notes = [f"{test} is left alone; after training: accel-train evaluate RUN {test}" for test in tests]
    if more or first.found.eval is None:
        return train, None, tuple(notes)
    what = f"the val of {first.found.eval}" if first.found.eval == first.found.train else str(first.found.eval)
    return train, [first._replace(key="data.eval", part="eval")], (f"evaluation is on {what}", *notes)


def _part(name: str, annotations: str, key: str, data: ObjectDetectionData) -> _Part:
    place = Path(name if annotations == "auto" else annotations).expanduser()
    if not is_there(str(place)):
        setting = {"data.train": "data.annotations"}.get(key, "data.eval_annotations")
        setting = key if annotations == "auto" else setting
        raise ValueError(f"{setting}: {place} does not exist (seen from {Path.cwd()}); check the path")
    found = locate(place, data)
    if found is None:
        raise ValueError(f"{key}: {place} has no boxes; expected {LAYOUTS}. Images without boxes are for predict")
    is_trained_on = data.is_for_training and key == data.train_key
    part = "train" if is_trained_on or found.eval is None else "eval"
    return _Part(key, found, part, None if annotations == "auto" else Path(name).expanduser())


def _class_names(
    sources: Sequence[Annotated], data: ObjectDetectionData, known_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the class names in the order of their ids, and notes."""
    if data.label_names is not None:
        return data.label_names, ()
    named = {source.names for source in sources if source.is_named}
    if len(named) > 1 or (named and not all(source.is_named for source in sources)):
        raise ValueError(f"{data.train_key}: its sources have other class names. Set data.label_names")
    names = next(iter(named), max((source.names for source in sources), key=len))
    if known_names is not None and (names == known_names or (named and {*names} == {*known_names})):
        return known_names, ("classes in the order of the pretrained model",) if names != known_names else ()
    if named or not names:
        return names, ()
    if known_names is not None and len(known_names) == len(names):
        return known_names, (f"the classes are the numbers 0 to {len(names) - 1}, as in the pretrained model",)
    return names, (f"the classes are the numbers 0 to {len(names) - 1}; data.label_names gives them names",)


def checked_pools(
    sides: Sequence[Sequence[Annotated]], data: ObjectDetectionData
) -> tuple[list[ImagePool], tuple[str, ...]]:
    """Return the pool of each side's sources, and notes on boxes that are left out.

    Raises:
        ValueError: there are faults; the message has a line for each.
    """
    pools, file_faults, box_faults, num_crowds = list[ImagePool](), list[str](), list[str](), 0
    for sources in sides:
        checked = [check_boxes(source.images, source.records) for source in sources]
        unreadable = [fault for found in checked for fault in found.unreadable]
        # The first side is to train on.
        if len(unreadable) > (0 if pools else data.max_broken):
            file_faults += unreadable
        for source, found in zip(sources, checked):
            file_faults += [*source.faults.files, *found.file_faults]
            box_faults += [*source.faults.boxes, *found.box_faults]
            file_faults += filter(None, [other_order(source, found)])
        file_faults += repeated_images(checked)
        boxes = tuple(each for found in checked for each in found.boxes)
        num_crowds += sum(int(each.is_crowd.sum()) for each in boxes)
        pools.append(_joined(sources, boxes))
    is_dropping, remedy = data.invalid_boxes == "drop", "repair them"
    if box_faults and not is_dropping:
        remedy += ", or leave wrong boxes out: data.invalid_boxes: drop"
    refuse_faults([*file_faults, *([] if is_dropping else box_faults)], data.train_key, remedy)
    notes = (
        [f"left out {format_count(len(box_faults), 'invalid box', 'invalid boxes')}, first: {box_faults[0]}"]
        if box_faults
        else []
    )
    if num_crowds:
        notes.append(f"crowds and difficult objects, not trained on or scored: {num_crowds:,}")
    return pools, tuple(notes)


def _untrained_classes(sets: ImageSets, names: tuple[str, ...], data: ObjectDetectionData) -> tuple[str, ...]:
    """Return a note on classes without a training box.

    Raises:
        ValueError: no training image has a box.
    """
    if not data.is_for_training:
        return ()
    ids = [sets.train.boxes_of(index) for index in range(len(sets.train))]
    trained = {int(number) for each in ids for number in each.class_ids[~each.is_crowd]}
    if not trained:
        raise ValueError(f"{data.train_key}: no training image has a box ({sets.description}); add boxes")
    missing = [name for number, name in enumerate(names) if number not in trained]
    shown = f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
    return (f"no training image has a box of {shown}",) if missing else ()


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


@dataclass(eq=False)
class BoxedImages(Dataset[DetectionSample]):
    """Images for evaluation: the whole image resized to `image_size`."""

    images: ImageRows
    settings: DetectionSettings

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> DetectionSample:
        image, boxes = self.decoded(index)
        preprocessing = self.settings.preprocessing
        corners = boxes.corners * _scale(boxes, height_width(preprocessing.image_size))
        return _sample(preprocessing.whole(image), boxes, corners)

    def decoded(self, index: int) -> tuple[Image.Image, Boxes]:
        """Return the whole image in the model's color mode, and its boxes. Images to predict have no boxes.

        Raises:
            DataError: the image cannot be read, or its size has changed since the boxes were read.
        """
        where = self.images.where(index)
        image = self.settings.preprocessing.decoded(self.images.image(index), where)
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


def collate_boxes(samples: Sequence[DetectionSample], *, preprocessing: Preprocessing) -> Collated:
    """Return pixel_values (N, C, H, W) fp32, boxes (N, M, 4) fp32 and class_ids (N, M).

    M is the largest number of boxes, at least 1. Missing boxes have the class -100 and zeros. `num_targets` counts the
    images.
    """
    most = max(1, *(len(sample.boxes) for sample in samples))
    boxes = np.zeros((len(samples), most, 4), np.float32)
    for own, sample in zip(boxes, samples):
        own[: len(sample.boxes)] = sample.boxes
    return {
        "pixel_values": preprocessing.normalise([sample.image for sample in samples]),
        "boxes": torch.from_numpy(boxes),
        "class_ids": padded([sample.class_ids for sample in samples], most, IGNORED_LABEL),
        "num_targets": len(samples),
    }
