"""`digit-scenes`: an offline data set of handwritten digits on a noisy background, with masks and boxes."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.data.images.boxes import Boxes
from accel_train.data.images.images import ArrayImages

DIGIT_SCENES = "digit-scenes"
EMBEDDED_IMAGES = ("digits", DIGIT_SCENES)
LABEL_NAMES = ("background", *map(str, range(10)))

NUM_TRAIN, NUM_EVAL = 600, 150
# Edge of a scene, in pixels.
EDGE = 64
# Edge of an enlarged digit, in pixels. The source has 8 x 8; enlarging makes strokes several pixels wide.
DIGIT_EDGE = 24

_SEED = 20
# Every fifth digit is held out for evaluation scenes and appears in no training scene.
_EVAL_DIGITS = 5
# Pixels of a digit above this value (of 255) belong to the digit.
_INK = 96
# Random places drawn for each digit. The place that covers the fewest pixels of other digits wins.
_TRIES = 8


def digits() -> tuple[ArrayImages, NDArray[np.int64]]:
    """Return 1,797 handwritten digits of 8 x 8 pixels (UCI, in scikit-learn): images and labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return ArrayImages(pixels, "digits"), bunch.target.astype(np.int64)


def digit_scenes(*, held_out: bool) -> tuple[ArrayImages, ArrayImages, tuple[Boxes, ...]]:
    """Return images (n, 64, 64, 3), masks (n, 64, 64), and the boxes of the digits. A class id of a box is the digit.

    n is 600 for training and 150 for evaluation, and the two sets share no digits. Takes 0.5 s. A box covers the
    visible pixels of a digit, and their number is the area. Covered digits have no box.
    """
    shapes, labels = digits()
    is_held_out = np.arange(len(labels)) % _EVAL_DIGITS == 0
    chosen = np.flatnonzero(is_held_out == held_out)
    scenes = [
        _scene(shapes.array[chosen], labels[chosen], np.random.default_rng((_SEED, held_out, index)))
        for index in range(NUM_EVAL if held_out else NUM_TRAIN)
    ]
    name = f"{DIGIT_SCENES} for {'evaluation' if held_out else 'training'}"
    images, masks, boxes = zip(*scenes)
    return ArrayImages(np.stack(images), name), ArrayImages(np.stack(masks), f"{name}, mask"), boxes


def _scene(
    shapes: NDArray[np.uint8], labels: NDArray[np.int64], generator: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Boxes]:
    """Return a scene (64, 64, 3) of 2 to 4 of the digits (n, 8, 8), its mask (64, 64), and the digits' boxes.

    Only the generator determines the scene. The background and each digit have their own colors. Later digits cover
    earlier ones.
    """
    ground = generator.uniform(20, 90, 3) + generator.normal(0, 12, (EDGE, EDGE, 1))
    image = np.clip(ground + generator.normal(0, 6, (EDGE, EDGE, 3)), 0, 255)
    mask, owners = np.zeros((EDGE, EDGE), np.uint8), np.full((EDGE, EDGE), -1)
    digit_ids = []
    for number in range(generator.integers(2, 5)):
        which = int(generator.integers(len(shapes)))
        ink = np.asarray(Image.fromarray(shapes[which]).resize((DIGIT_EDGE, DIGIT_EDGE), Image.Resampling.BICUBIC))
        corners = generator.integers(0, EDGE - DIGIT_EDGE + 1, (_TRIES, 2)).tolist()
        places = [(slice(top, top + DIGIT_EDGE), slice(left, left + DIGIT_EDGE)) for top, left in corners]
        place = min(places, key=lambda region: np.count_nonzero(mask[region]))
        share = ink[..., None] / 255
        image[place] = (1 - share) * image[place] + share * generator.uniform(140, 255, 3)
        mask[place][ink > _INK] = labels[which] + 1
        owners[place][ink > _INK] = number
        digit_ids.append(int(labels[which]))
    return np.rint(image).astype(np.uint8), mask, _boxes(owners, digit_ids)


def _boxes(owners: NDArray[np.int64], digit_ids: list[int]) -> Boxes:
    """Return the boxes of the digits in a scene. `owners` (H, W) has the number of the digit at each pixel, or -1."""
    places = [np.argwhere(owners == number) for number in range(len(digit_ids))]
    seen = [number for number, place in enumerate(places) if len(place)]
    ends = [(*places[number].min(axis=0)[::-1], *(places[number].max(axis=0)[::-1] + 1)) for number in seen]
    return Boxes(
        np.array(ends, np.float32).reshape(-1, 4),
        np.array([digit_ids[number] for number in seen], np.int64),
        np.zeros(len(seen), np.bool_),
        np.array([len(places[number]) for number in seen], np.float32),
        width=owners.shape[1],
        height=owners.shape[0],
    )
