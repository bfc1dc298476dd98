"""Image preprocessing: size, color channels and normalization, in memory and as preprocessor_config.json."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from accel_train.data.images.decoding import Mode
from accel_train.data.images.images import Images, evenly_spaced
from accel_train.recipe.data import ImageData
from accel_train.recipe.schema import Recipe

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training images, as fractions of 255. Most vision models use them."""


Size = int | tuple[int, int]
"""Edge of a square, or height and width, in pixels."""
_NUM_LOOKED_AT = 8
_GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "F")


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of every image, in training and evaluation."""

    image_size: Size
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean per channel, as a fraction of 255."""
    std: tuple[float, ...] = IMAGENET_STD
    crop_fraction: float = 1.0
    """Center crop: evaluation resizes the short edge to image_size / crop_fraction, then crops the center."""
    resample: int = Image.Resampling.BILINEAR
    """Interpolation as Pillow's number: 2 bilinear, 3 bicubic."""

    @property
    def edge(self) -> int:
        """Return the edge in pixels, for a task that only takes squares."""
        assert isinstance(self.image_size, int), "refused when the data were read"
        return self.image_size

    @property
    def mode(self) -> Mode:
        """Pillow's name of the model's color mode."""
        return "L" if len(self.mean) == 1 else "RGB"

    def normalise(self, images: Sequence[NDArray[np.uint8]]) -> torch.Tensor:
        """Return (pixels / 255 - mean) / std of uint8 images (H, W) or (H, W, C), as float32 (N, C, H, W)."""
        stacked = torch.from_numpy(np.stack(images))
        channels_last = stacked[..., None] if stacked.ndim == 3 else stacked
        pixels = channels_last.permute(0, 3, 1, 2).contiguous().float()
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return pixels.div_(255).sub_(mean).div_(std)

    def save(self, folder: Path, *, crops: bool) -> None:
        """Write preprocessor_config.json, so that transformers' AutoImageProcessor matches our evaluation.

        With `crops`, it describes `resize_and_crop` and `normalise`, as for classification. Without, the whole image is
        resized to a square.
        """
        square = dict(zip(("height", "width"), height_width(self.image_size)))
        cropping = {
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": self.mode == "RGB",
            "size": {"shortest_edge": round(height_width(self.image_size)[0] / self.crop_fraction)},
            "do_center_crop": True,
            "crop_size": square,
        }
        whole = {"image_processor_type": "SegformerImageProcessor", "size": square, "do_reduce_labels": False}
        settings = {
            **(cropping if crops else whole),
            "do_resize": True,
            "resample": int(self.resample),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def save_for_boxes(self, folder: Path, processor: str) -> None:
        """Write preprocessor_config.json for a detector. `processor` is a class of transformers with boxes."""
        self.save(folder, crops=False)
        path = folder / "preprocessor_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        del settings["do_reduce_labels"]
        settings |= {"image_processor_type": processor, "do_pad": False, "format": "coco_detection"}
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def height_width(size: Size) -> tuple[int, int]:
    """Return (height, width) of a size."""
    return (size, size) if isinstance(size, int) else size


def resize_and_crop(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Return the center of an image as a square of `image_size`: the short edge is resized, the long edge cropped."""
    size = preprocessing.edge
    short = round(size / preprocessing.crop_fraction)
    width, height = image.size
    # The long edge is rounded down, as in transformers.
    resized = (short, max(short, short * height // width)) if width <= height else (short * width // height, short)
    if resized != image.size:
        image = image.resize(resized, preprocessing.resample)
    if resized == (size, size):
        return image
    left, top = (resized[0] - size) // 2, (resized[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def model_preprocessing(recipe: Recipe, config: Any) -> tuple[Preprocessing, tuple[str, ...]]:
    """Return the preprocessing of the recipe's pretrained model, or ImageNet's, and notes.

    `config` is the model's transformers configuration.

    Raises:
        ValueError: the model does not take 1 or 3 channels.
    """
    data = ImageData.of(recipe.data)
    name, size = recipe.model.pretrained, data.image_size
    channels = int(getattr(config, "num_channels", 3))
    if channels not in (1, 3):
        raise ValueError(f"the model takes {channels} channels; images have 1 (grey) or 3 (RGB): set num_channels")
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else (_grey(IMAGENET_MEAN), _grey(IMAGENET_STD))
    default = Preprocessing(size, mean, std)
    if name is None:
        return _normalised_as_asked(default, data), ()
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(name)
    except (OSError, ValueError):
        note = f"{name} has no preprocessor_config.json: images are normalised with ImageNet's figures"
        return _normalised_as_asked(default, data), (note,) if data.image_mean is None else ()
    return _normalised_as_asked(_from_settings(settings, default), data), ()


def _normalised_as_asked(preprocessing: Preprocessing, data: ImageData) -> Preprocessing:
    """Return the preprocessing with the recipe's `data.image_mean` and `data.image_std`, if set."""
    mean, std = data.image_mean or preprocessing.mean, data.image_std or preprocessing.std
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != len(preprocessing.mean):
            raise ValueError(
                f"data.image_{name}={list(values)} has {len(values)} numbers, and the model takes "
                f"{len(preprocessing.mean)} colours; give one for each"
            )
    return replace(preprocessing, mean=mean, std=std)


def pretrained_image_size(name: str, config: Any) -> int | None:
    """Return the square edge that a pretrained model was trained with, or None if not documented."""
    own = getattr(config, "image_size", None)
    if isinstance(own, int):
        return own
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(name)
    except (OSError, ValueError):
        return None
    for key in ("crop_size", "size"):
        size = settings.get(key)
        edges = list(size.values()) if isinstance(size, dict) else [size]
        if edges and isinstance(edges[0], int) and settings.get("do_center_crop", True) | (key == "size"):
            return int(edges[0])
    return None


def note_of_lost_colours(images: Images, preprocessing: Preprocessing) -> tuple[str, ...]:
    """Return a note if the model takes only grayscale and one of eight inspected images has colors."""
    looked_at = evenly_spaced(len(images), 0 if preprocessing.mode == "RGB" else _NUM_LOOKED_AT)
    if all(images[index].mode in _GREY_MODES for index in looked_at):
        return ()
    return (
        "colours are lost: the model takes 1 channel (model.config.num_channels), so images are made grey; "
        "transformers' pipeline() shows a model colour images only, and cannot use it (model/README.md says what "
        "can): num_channels: 3 keeps the colours",
    )


def _from_settings(settings: dict[str, Any], default: Preprocessing) -> Preprocessing:
    """Return the preprocessing in a preprocessor_config.json, limited to the settings that this package supports."""
    mean, std = (tuple(settings.get(f"image_{which}") or ()) for which in ("mean", "std"))
    if not settings.get("do_normalize", True):
        mean, std = (0.0,) * len(default.mean), (1.0,) * len(default.mean)
    fits = len(mean) == len(std) == len(default.mean)
    fraction = settings.get("crop_pct") or 1.0
    size, crop = settings.get("size"), settings.get("crop_size")
    if settings.get("do_center_crop") and isinstance(size, dict) and isinstance(crop, dict) and "shortest_edge" in size:
        fraction = min(1.0, crop.get("height", size["shortest_edge"]) / size["shortest_edge"])
    return Preprocessing(
        image_size=default.image_size,
        mean=mean if fits else default.mean,
        std=std if fits else default.std,
        crop_fraction=float(fraction),
        resample=default.resample if settings.get("resample") is None else int(settings["resample"]),
    )


def _grey(values: tuple[float, ...]) -> tuple[float, ...]:
    return (sum(values) / len(values),)
