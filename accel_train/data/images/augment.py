"""Augment training images: crops, flips, colors, RandAugment, mixup and CutMix.

All functions are stateless: the same image and generator give the same bits in every process.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from accel_train.data.images.preprocessing import Preprocessing
from accel_train.recipe.data import Augment

Pixels = NDArray[np.uint8]

MAX_MAGNITUDE = 30.0
# Fill color for pixels that a shift or rotation uncovers, as in the RandAugment authors' code.
_GREY = 128
_ASPECTS = (3 / 4, 4 / 3)
_BILINEAR = Image.Resampling.BILINEAR


def augment_image(
    image: Image.Image, settings: Augment, preprocessing: Preprocessing, generator: np.random.Generator
) -> Image.Image:
    """Return an augmented square of `preprocessing.image_size` from an 8-bit RGB or L image: crop, flips, colors."""
    if settings.random_resized_crop is None:
        image = preprocessing.resized(image)
    else:
        box = random_crop_box(image.width, image.height, settings.random_resized_crop, generator)
        image = image.resize((preprocessing.edge,) * 2, preprocessing.resample, box=box)
    for chance, flip in (
        (settings.horizontal_flip, Image.Transpose.FLIP_LEFT_RIGHT),
        (settings.vertical_flip, Image.Transpose.FLIP_TOP_BOTTOM),
    ):
        if generator.random() < chance:
            image = image.transpose(flip)
    image = rand_augment(image, settings.rand_augment_ops, settings.rand_augment_magnitude, generator)
    return color_jitter(image, settings.color_jitter, generator)


def random_crop_box(
    width: float, height: float, area_range: tuple[float, float], generator: np.random.Generator
) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of a random crop in fractional pixels.

    Fractions matter because small images have few whole pixels. The share of the area is uniform in `area_range`. The
    aspect ratio is log-uniform in 3/4 to 4/3 (Szegedy et al. 2015, section 6; same values as torchvision's
    RandomResizedCrop). A crop that does not fit is drawn again, up to ten times. The fallback is the largest centered
    crop within the aspect range.
    """
    for _ in range(10):
        area = width * height * generator.uniform(*area_range)
        aspect = math.exp(generator.uniform(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
        wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and high <= height:
            left, top = generator.uniform(0, width - wide), generator.uniform(0, height - high)
            return left, top, min(left + wide, width), min(top + high, height)
    wide, high = min(width, height * _ASPECTS[1]), min(height, width / _ASPECTS[0])
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def draw_start(room: int, generator: np.random.Generator) -> int:
    """Return the start of a crop in an image that is `room` pixels longer. Negative if the crop is longer."""
    return int(generator.integers(min(room, 0), max(room, 0) + 1))


def place_crop(
    image: Image.Image,
    preprocessing: Preprocessing,
    size: tuple[int, int],
    corner: tuple[int, int],
    crop_size: tuple[int, int],
) -> Image.Image:
    """Return the crop of `crop_size` at `corner` of an image, after resizing it to `size`.

    Sizes are (height, width), and `corner` is (left, top). Negative values place the image inside the crop. Outside the
    image, the crop has the mean color.
    """
    canvas = Image.new(image.mode, crop_size[::-1], preprocessing.fill)
    canvas.paste(preprocessing.whole(image, size), (-corner[0], -corner[1]))
    return canvas


def color_jitter(image: Image.Image, strength: float, generator: np.random.Generator) -> Image.Image:
    """Return an image with brightness, contrast and saturation changed in random order.

    Each factor is uniform in [max(0, 1 - strength), 1 + strength].
    """
    if strength == 0:
        return image
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for number in generator.permutation(len(enhancers)):
        image = enhancers[number](image).enhance(generator.uniform(max(0.0, 1 - strength), 1 + strength))
    return image


def rand_augment(image: Image.Image, num_ops: int, magnitude: float, generator: np.random.Generator) -> Image.Image:
    """Apply RandAugment (Cubuk et al. 2020): `num_ops` of 14 operations with replacement, at one magnitude of 30."""
    for _ in range(num_ops):
        name = OPERATION_NAMES[generator.integers(len(OPERATION_NAMES))]
        sign = 1.0 if generator.random() < 0.5 else -1.0
        image = OPERATIONS[name](image, magnitude / MAX_MAGNITUDE, sign)
    return image


def _shift(image: Image.Image, share: float, *, x: float = 0, y: float = 0) -> Image.Image:
    return _affine(
        image, (1, 0, x * int(share * 150 / 331 * image.width), 0, 1, y * int(share * 150 / 331 * image.height))
    )


def _affine(image: Image.Image, coefficients: tuple[float, ...]) -> Image.Image:
    """Return an affine transform of an image.

    The pixel at (x, y) comes from (a x + b y + c, d x + e y + f).
    """
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, _BILINEAR, fillcolor=_grey(image))


def _enhanced(kind: Callable[[Image.Image], Any], image: Image.Image, share: float, sign: float) -> Image.Image:
    enhanced: Image.Image = kind(image).enhance(1 + sign * 0.9 * share)
    return enhanced


def _grey(image: Image.Image) -> int | tuple[int, ...]:
    return _GREY if image.mode == "L" else (_GREY,) * 3


Operation = Callable[[Image.Image, float, float], Image.Image]
"""(image, share of the largest magnitude, sign) -> image."""

OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, share, sign: image,
    "shear_x": lambda image, share, sign: _affine(image, (1, sign * 0.3 * share, 0, 0, 1, 0)),
    "shear_y": lambda image, share, sign: _affine(image, (1, 0, 0, sign * 0.3 * share, 1, 0)),
    "translate_x": lambda image, share, sign: _shift(image, share, x=sign),
    "translate_y": lambda image, share, sign: _shift(image, share, y=sign),
    "rotate": lambda image, share, sign: image.rotate(sign * 30 * share, _BILINEAR, fillcolor=_grey(image)),
    "brightness": partial(_enhanced, ImageEnhance.Brightness),
    "color": partial(_enhanced, ImageEnhance.Color),
    "contrast": partial(_enhanced, ImageEnhance.Contrast),
    "sharpness": partial(_enhanced, ImageEnhance.Sharpness),
    "posterize": lambda image, share, sign: ImageOps.posterize(image, 8 - round(4 * share)),
    "solarize": lambda image, share, sign: ImageOps.solarize(image, round(256 * (1 - share))),
    "auto_contrast": lambda image, share, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, share, sign: ImageOps.equalize(image),
}
"""RandAugment operations with the ranges of the paper's table, as in torchvision.

Translation is relative to the image.
"""
OPERATION_NAMES = tuple(OPERATIONS)


class Mix(NamedTuple):
    """A mix (`mixup` or `cutmix`) of a sample with the sample of index `partner`. `share` of the sample is kept."""

    kind: str
    partner: int
    share: float


def draw_mix(settings: Augment, num_samples: int, generator: np.random.Generator) -> Mix | None:
    """Draw the mix of a sample, or None for no mix. The partner is any sample, including the sample itself."""
    alphas = {"mixup": settings.mixup_alpha, "cutmix": settings.cutmix_alpha}
    kinds = [kind for kind, alpha in alphas.items() if alpha > 0]
    if not kinds:
        return None
    kind = kinds[generator.integers(len(kinds))]
    return Mix(kind, int(generator.integers(num_samples)), float(generator.beta(alphas[kind], alphas[kind])))


def mixup(image: Pixels, partner: Pixels, share: float) -> Pixels:
    """Return share x image + (1 - share) x partner, rounded (Zhang et al. 2018, equation 1). Shapes must be equal."""
    mixed = share * image.astype(np.float32) + (1 - share) * partner.astype(np.float32)
    return np.rint(mixed).astype(np.uint8)


def cutmix(image: Pixels, partner: Pixels, share: float, generator: np.random.Generator) -> tuple[Pixels, float]:
    """Return an image with a box pasted from its partner, and the share of pixels that the image keeps.

    The box has the image's aspect ratio, (1 - share) of its area, and a uniform center. The part outside the image is
    cut off, so the share is recomputed (Yun et al. 2019, section 3.1).
    """
    height, width = image.shape[:2]
    edge = math.sqrt(1 - share)
    wide, high = int(width * edge), int(height * edge)
    left, top = int(generator.integers(width)) - wide // 2, int(generator.integers(height)) - high // 2
    right, bottom = min(left + wide, width), min(top + high, height)
    left, top = max(left, 0), max(top, 0)
    mixed = image.copy()
    mixed[top:bottom, left:right] = partner[top:bottom, left:right]
    return mixed, 1 - max(right - left, 0) * max(bottom - top, 0) / (width * height)
