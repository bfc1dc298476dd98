"""Image preprocessing: size, color channels and normalization, in memory and as preprocessor_config.json."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.core.json_io import parse_json
from accel_train.core.state import JsonRecord
from accel_train.data.images.decoding import Mode, to_mode
from accel_train.data.images.images import Images, evenly_spaced
from accel_train.data.samples import fetch_readable

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training images, as fractions of 255. Most vision models use them."""


Size = int | tuple[int, int]
"""Edge of a square, or height and width, in pixels."""
_NUM_LOOKED_AT = 8
_OF_VALUES = ("do_rescale", "do_normalize", "include_top")
"""Settings of processors that change values, and not where they are."""
_GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "F")


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of every image, in training and evaluation. `mean` and `std` are in the order of the image."""

    image_size: Size
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean per channel, as a fraction of 255."""
    std: tuple[float, ...] = IMAGENET_STD
    crop_fraction: float | None = 1.0
    """Center crop: evaluation resizes the short edge to image_size / crop_fraction, then crops the center. None: it
    resizes the whole image.
    """
    resample: int = Image.Resampling.BILINEAR
    """Interpolation as Pillow's number: 2 bilinear, 3 bicubic."""
    on_white: bool = False
    """Whether transparent images are laid on white. False: their transparency is dropped."""
    reverses_channels: bool = False
    """Whether the model reads BGR."""
    own: Any = field(default=None, compare=False)
    """Image processor of transformers that resizes evaluation images and is written, if no other field says how."""
    own_pixels: str = ""
    """Digest of the pixels of `own`."""

    def changed_fields(self) -> JsonRecord:
        """Return the fields that differ from their defaults. A run's fingerprint holds them.

        The default of a new field must therefore not change the program.
        """
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self) if each.compare}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def edge(self) -> int:
        """Return the edge in pixels, for a task that only takes squares."""
        assert isinstance(self.image_size, int), "refused when the data were read"
        return self.image_size

    @property
    def mode(self) -> Mode:
        """Pillow's name of the model's color mode."""
        return "L" if len(self.mean) == 1 else "RGB"

    @property
    def fill(self) -> int | tuple[int, ...]:
        """Mean color, for pixels outside an image."""
        mean = tuple(min(255, max(0, round(255 * channel))) for channel in self.mean)
        return mean if len(mean) > 1 else mean[0]

    def decoded(self, image: Image.Image, where: str) -> Image.Image:
        """Return an image in the model's color mode. `where` names it in errors.

        Raises:
            DataError: its pixels have 32 bits.
        """
        if self.on_white and image.has_transparency_data:
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return to_mode(image, self.mode, where)

    def whole(self, image: Image.Image, size: tuple[int, int] | None = None) -> Image.Image:
        """Return a whole image, resized to `size`, (height, width). Default: `image_size`."""
        height, width = size or height_width(self.image_size)
        return image if image.size == (width, height) else image.resize((width, height), self.resample)

    def resized(self, image: Image.Image) -> Image.Image:
        """Return an image as a classifier sees it in evaluation: resized to `image_size`, and cropped."""
        if self.own is not None:
            return self._resized_by_own(image)
        if self.crop_fraction is None:
            return self.whole(image)
        size = self.edge
        short = round(size / self.crop_fraction)
        width, height = image.size
        # The long edge is rounded down, as in transformers.
        resized = (short, max(short, short * height // width)) if width <= height else (short * width // height, short)
        image = self.whole(image, resized[::-1])
        if resized == (size, size):
            return image
        left, top = (resized[0] - size) // 2, (resized[1] - size) // 2
        return image.crop((left, top, left + size, top + size))

    def _resized_by_own(self, image: Image.Image) -> Image.Image:
        known = getattr(type(self.own), "valid_kwargs", type(self.own)).__annotations__
        without_values = {name: False for name in _OF_VALUES if name in known}
        # Its channels stay reversed, because one family has no setting for the order.
        pixels = np.asarray(self.own(image, **without_values)["pixel_values"][0])
        pixels = pixels[:: -1 if self.reverses_channels else 1].transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(pixels if self.mode == "RGB" else pixels[..., 0]).astype(np.uint8))

    def normalise(self, images: Sequence[NDArray[np.uint8]]) -> "Tensor":
        """Return (pixels / 255 - mean) / std of uint8 images (H, W) or (H, W, C), as float32 (N, C, H, W)."""
        import torch

        stacked = torch.from_numpy(np.stack(images))
        channels_last = stacked[..., None] if stacked.ndim == 3 else stacked
        pixels = channels_last.permute(0, 3, 1, 2).contiguous().float()
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        pixels = pixels.div_(255).sub_(mean).div_(std)
        return pixels.flip(1) if self.reverses_channels else pixels

    def save(self, folder: Path, *, crops: bool, detector: str | None = None) -> None:
        """Write preprocessor_config.json, so that transformers' AutoImageProcessor matches our evaluation.

        With `crops`, it describes `resized` and `normalise`, as for classification. Without, the whole image is
        resized to `image_size`. `detector` is a class of transformers that also processes boxes.
        """
        square = dict(zip(("height", "width"), height_width(self.image_size)))
        if self.own is not None:
            settings = parse_json(self.own.to_json_string())
            settings |= {} if crops else {"size": square, "do_reduce_labels": False}
        else:
            settings = {
                "image_processor_type": "ViTImageProcessor",
                "size": square,
                "do_convert_rgb": self.on_white,
                "do_resize": True,
                "resample": int(self.resample),
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": list(self.mean),
                "image_std": list(self.std),
            }
            if not crops:
                settings |= {"image_processor_type": "SegformerImageProcessor", "do_reduce_labels": False}
            elif self.crop_fraction is not None:
                short = {"shortest_edge": round(self.edge / self.crop_fraction)}
                settings |= {"image_processor_type": "BitImageProcessor", "size": short}
                settings |= {"do_center_crop": True, "crop_size": square}
        if detector is not None:
            del settings["do_reduce_labels"]
            settings |= {"image_processor_type": detector, "do_pad": False, "format": "coco_detection"}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def height_width(size: Size) -> tuple[int, int]:
    """Return (height, width) of a size."""
    return (size, size) if isinstance(size, int) else size


def note_of_lost_colours(images: Images, preprocessing: Preprocessing) -> tuple[str, ...]:
    """Return a note if the model takes only grayscale and one of eight inspected images has colors."""
    looked_at = evenly_spaced(len(images), 0 if preprocessing.mode == "RGB" else _NUM_LOOKED_AT)
    if all(image.mode in _GREY_MODES for image in fetch_readable(images, looked_at)[0]):
        return ()
    return (
        "colours are lost: the model takes 1 channel (model.config.num_channels), so images are made grey; "
        "transformers' pipeline() shows a model colour images only, and cannot use it (model/README.md says what "
        "can): num_channels: 3 keeps the colours",
    )
