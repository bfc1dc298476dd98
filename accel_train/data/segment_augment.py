"""What a training image and its mask go through together: scale, crop, flips; and colours, which only the image has.

Nothing here keeps a state, so the same pair and generator give the same bits, in whichever process.
"""

import numpy as np
from PIL import Image

from accel_train.data.augment import Pixels, color_jitter
from accel_train.data.masked_images import Mask
from accel_train.data.vision import Preprocessing
from accel_train.recipe_data import Augment


def check_segment_augment(settings: Augment) -> None:
    """Refuse what is for whole images and their one label.

    Raises:
        ValueError: names the setting.
    """
    for name in ("rand_augment_ops", "mixup_alpha", "cutmix_alpha"):
        if getattr(settings, name):
            raise ValueError(
                f"data.augment.{name}={getattr(settings, name)} is for image-classification; a mask would not follow it: "
                "use scale_range, flips and color_jitter"
            )


def augment_pair(
    image: Image.Image,
    mask: Mask,
    settings: Augment,
    preprocessing: Preprocessing,
    *,
    crop_size: int,
    ignore_index: int,
    generator: np.random.Generator,
) -> tuple[Pixels, Mask]:
    """A crop (crop_size, crop_size) at a random place of the pair, scaled by a random factor, flipped and coloured.

    The factor is uniform in `scale_range` and relative to `image_size`. What a crop has beyond the image is mean colour, and
    `ignore_index` in the mask.
    """
    factor = 1.0 if settings.scale_range is None else generator.uniform(*settings.scale_range)
    edge = max(1, round(preprocessing.image_size * factor))
    room = edge - crop_size
    left, top = generator.integers(min(room, 0), max(room, 0) + 1, 2).tolist()
    image, cut = crop_pair(image, mask, preprocessing, edge, (left, top), crop_size, ignore_index)
    if generator.random() < settings.horizontal_flip:
        image, cut = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), cut[:, ::-1]
    if generator.random() < settings.vertical_flip:
        image, cut = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM), cut[::-1]
    return np.asarray(color_jitter(image, settings.color_jitter, generator)), np.ascontiguousarray(cut)


def crop_pair(
    image: Image.Image,
    mask: Mask,
    preprocessing: Preprocessing,
    edge: int,
    corner: tuple[int, int],
    crop_size: int,
    ignore_index: int,
) -> tuple[Image.Image, Mask]:
    """The pair, resized to a square of `edge`, and of it the square of `crop_size` whose corner (left, top) this is.

    A corner below 0 puts the image inside the crop.
    """
    left, top = corner
    resized = image if image.size == (edge, edge) else image.resize((edge, edge), preprocessing.resample)
    labels = Image.fromarray(mask)
    if labels.size != (edge, edge):
        labels = labels.resize((edge, edge), Image.Resampling.NEAREST)
    mean = tuple(round(255 * channel) for channel in preprocessing.mean)
    canvas = Image.new(image.mode, (crop_size, crop_size), mean if len(mean) > 1 else mean[0])
    canvas.paste(resized, (-left, -top))
    ignored = Image.new("L", (crop_size, crop_size), ignore_index)
    ignored.paste(labels, (-left, -top))
    return canvas, np.asarray(ignored)
