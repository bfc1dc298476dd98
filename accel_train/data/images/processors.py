"""The image processor of a pretrained model: evaluation has its pixels, or the run is refused.

Its file is not interpreted. The processor of the model's family is loaded, with its own defaults, and asked for the
pixels of a few images. `Preprocessing` computes them itself if the result is equal, and calls the processor otherwise.
"""

from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.core.errors import SettingError
from accel_train.core.format import format_count
from accel_train.core.state import JsonRecord
from accel_train.data.images.images import text_digest
from accel_train.data.images.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocessing,
    height_width,
)
from accel_train.recipe.data import ImageData
from accel_train.recipe.schema import Model, Recipe

_FILES = ("preprocessor_config.json", "processor_config.json")
_SIZES = ("size", "crop_size", "pad_size", "resize_short")
"""Settings of processors that are numbers of pixels, or mappings to them."""
_WITHOUT_PIXELS = ("image_processor_type", "format", "do_convert_annotations", "data_format", "return_tensors")
_TOLERANCE = 1e-5
"""Largest difference of equal pixels, as a share of the largest pixel: the rounding of fp32."""
_VIEWS = (0.8, 1.25)
"""Range of the part of an image that is seen at another size, relative to the part at the processor's own size."""
_COLOURS = ((0, 0, 0), (255, 255, 255), (255, 0, 0), (13, 77, 200))


def model_preprocessing(
    recipe: Recipe, config: Any, *, is_whole: bool = False
) -> tuple[Preprocessing, tuple[str, ...]]:
    """Return the preprocessing of the recipe's pretrained model, or ImageNet's, and notes.

    `config` is the model's transformers configuration. `is_whole`: the task resizes whole images, because masks or
    boxes belong to them.

    Raises:
        ValueError: the model does not take 1 or 3 channels.
        SettingError: the pixels of the model's image processor cannot be reproduced; the message has its settings.
    """
    data = ImageData.of(recipe.data)
    name, size = recipe.model.pretrained, data.image_size
    channels = int(getattr(config, "num_channels", 3))
    if channels not in (1, 3):
        raise ValueError(f"the model takes {channels} channels; images have 1 (grey) or 3 (RGB): set num_channels")
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else (_grey(IMAGENET_MEAN), _grey(IMAGENET_STD))
    # Tasks on whole images do not read the fraction, and fingerprints of their runs have 1.
    cuts = data.image_resize != "whole" or is_whole
    default = Preprocessing(size, mean, std, crop_fraction=1.0 if cuts else None)
    for setting, values in (("mean", data.image_mean), ("std", data.image_std)):
        if values is not None and len(values) != channels:
            raise ValueError(
                f"data.image_{setting}={list(values)} has {format_count(len(values), 'number')}, and the model takes "
                f"{channels} colours; give one for each"
            )
    default = replace(default, mean=data.image_mean or default.mean, std=data.image_std or default.std)
    if name is None:
        return default, ()
    processor = load_processor(recipe.model, config)
    if processor is None:
        note = f"{name} has no preprocessor_config.json: images are normalised with ImageNet's figures"
        return default, (note,) if data.image_mean is None else ()
    notes: tuple[str, ...] = ()
    if getattr(processor, "do_reduce_labels", False) and getattr(data, "reduce_labels", None) is False:
        notes = (f"{name} was trained on masks less 1 (do_reduce_labels); data.reduce_labels: false keeps yours",)
    return own_preprocessing(processor, name, default, data, is_whole=is_whole), notes


def load_processor(model: Model, config: Any) -> Any:
    """Return the image processor of a pretrained model, with the defaults of its family, or None without a file.

    Raises:
        SettingError: its file is damaged, or its class is not available.
    """
    from transformers import AutoImageProcessor
    from transformers.image_processing_base import ImageProcessingMixin

    name = str(model.pretrained)
    try:
        try:
            ImageProcessingMixin.get_image_processor_dict(name)
        except (OSError, ValueError):
            has_other = getattr(config, "model_type", None) == "timm_wrapper"
            if not has_other and not any((Path(name) / file).exists() for file in _FILES):
                return None
            raise
        # Pillow's pixels do not depend on whether torchvision is installed.
        return AutoImageProcessor.from_pretrained(
            name, config=config, backend="pil", trust_remote_code=model.trust_remote_code
        )
    # Any type: the code belongs to the model's family.
    except Exception as error:
        raise _refused(name, f"its image processor cannot be loaded ({_first_line(error)})") from error


def own_preprocessing(
    processor: Any, name: str, default: Preprocessing, data: ImageData, *, is_whole: bool
) -> Preprocessing:
    """Return the preprocessing of `default.image_size` that has the pixels of a processor of transformers.

    `default` has the channels, and `data` the recipe's mean and deviation, if it sets them.

    Raises:
        SettingError: its pixels depend on more than one value each, or do not have `image_size`.
    """
    own = _Own(processor, name, default.mode)
    if data.image_mean is not None or data.image_std is not None:
        own = own.normalised(data.image_mean or own.values()[0], data.image_std or own.values()[1])
    mean, std, is_reversed = own.values()
    plain = replace(
        default,
        mean=mean,
        std=std,
        resample=own.resample,
        on_white=own.is_on_white(),
        reverses_channels=is_reversed,
    )
    if data.image_resize == "whole":
        # Only the processor's own class can write reversed channels.
        return plain if not is_reversed else own.whole(default.image_size).around(plain)
    own = own.sized(default.image_size, is_whole=is_whole)
    for fraction in (1.0,) if is_whole else (own.crop_fraction(), None):
        form = replace(plain, crop_fraction=fraction)
        if own.differs(form, is_whole=is_whole) is None:
            return own.around(form) if is_reversed else form
    if is_whole:
        raise own.refused("resizes images otherwise than as a whole to data.image_size", *_WHOLE)
    whole = own.around(plain)
    if (reason := own.differs(whole, is_whole=False)) is not None:
        raise own.refused(f"makes pixels that do not come from one value each ({reason})")
    return whole


def pretrained_image_size(model: Model, config: Any) -> int | None:
    """Return the edge of the images that a pretrained model makes of squares, or None if not documented."""
    edge = getattr(config, "image_size", None)
    if isinstance(edge, int):
        return edge
    processor = load_processor(model, config)
    if processor is None:
        return None
    mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
    height, width = _Own(processor, str(model.pretrained), mode).pixels(Image.new(mode, (48, 48))).shape[1:]
    return height if height == width else None


_WHOLE = (
    "Set data.image_resize: whole, to resize whole images to data.image_size instead",
    ("model.pretrained", "data.image_resize"),
)


class _Own:
    """An image processor, asked for its pixels."""

    def __init__(self, processor: Any, name: str, mode: str) -> None:
        self.processor, self.name, self.mode = processor, name, mode

    def refused(
        self, problem: str, remedy: str = "", settings: tuple[str, ...] = ("model.pretrained",)
    ) -> SettingError:
        """Return the error about this processor, with all settings that it has."""
        shown = [
            f"{key}={value}"
            for key, value in self.processor.to_dict().items()
            if value is not None and key not in _WITHOUT_PIXELS and not isinstance(value, np.ndarray)
        ]
        kind = type(self.processor).__name__.removesuffix("Pil")
        return _refused(self.name, f"its {kind} {problem}; it has {', '.join(shown)}", remedy, settings)

    @property
    def resample(self) -> int:
        """Interpolation as Pillow's number, if the processor has one."""
        named = getattr(self.processor, "resample", None)
        return int(named) if isinstance(named, int) else Image.Resampling.BILINEAR

    def pixels(self, image: Image.Image) -> NDArray[np.float32]:
        """Return the pixels (C, H, W) of an image as the model has been trained on them."""
        try:
            pixels = np.asarray(self.processor(image)["pixel_values"][0], np.float32)
        # Any type: the code belongs to the model's family.
        except Exception as error:
            raise self.refused(f"makes no pixels of an image ({_first_line(error)})") from error
        if pixels.ndim != 3 or len(pixels) != len(self._colour((0, 0, 0))):
            raise self.refused(f"makes arrays of shape {pixels.shape} instead of {self.mode} pixels")
        return pixels

    def _colour(self, colour: tuple[int, int, int]) -> tuple[int, ...]:
        return colour if self.mode == "RGB" else colour[:1]

    def _of_colour(self, colour: tuple[int, int, int]) -> NDArray[np.float32]:
        """Return the value of each channel in the middle of an image of one color, float64."""
        own = self._colour(colour)
        pixels = self.pixels(Image.new(self.mode, (48, 48), own if len(own) > 1 else own[0]))
        return pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].astype(np.float64)

    def values(self) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
        """Return mean and deviation of each color as fractions of 255, and whether the channels are reversed."""
        black, white, red, other = (self._of_colour(colour) for colour in _COLOURS)
        is_reversed = self.mode == "RGB" and bool(red[0] == black[0] and red[2] != black[2])
        if (white == black).any():
            raise self.refused("makes the same pixels of black and of white images")
        if is_reversed:
            black, white = black[::-1], white[::-1]
        deviation = 1 / (white - black)
        mean, std = (
            tuple(float(f"{value:.9g}") for value in values) for values in (0.0 - black * deviation, deviation)
        )
        named = [getattr(self.processor, f"image_{which}", None) for which in ("mean", "std")]
        # The figures of the file have no rounding of a pixel.
        if all(isinstance(each, tuple | list) and len(each) == len(mean) for each in named):
            figures = np.asarray(named, np.float64)
            if np.allclose(figures, [mean, std], 1e-5, 1e-6):
                mean, std = (tuple(each.tolist()) for each in figures)
        found = Preprocessing(1, mean, std, reverses_channels=is_reversed)
        for colour, pixel in zip(_COLOURS[2:], (red, other)):
            own = np.array(self._colour(colour), np.uint8).reshape(1, 1, -1)
            if _distance(found.normalise([own])[0, :, 0, 0].numpy(), pixel) > _TOLERANCE:
                raise self.refused("makes values that are not a multiple of a pixel's value plus a constant")
        return found.mean, found.std, is_reversed

    def is_on_white(self) -> bool:
        """Return whether transparent images are laid on white."""
        if self.mode != "RGB":
            return False
        try:
            pixels = np.asarray(self.processor(Image.new("RGBA", (48, 48), (0, 0, 0, 0)))["pixel_values"][0])
        # The family does not say what becomes of transparency.
        except Exception:
            return False
        middle = pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2]
        return middle.shape == (3,) and bool(np.allclose(middle, self._of_colour((255, 255, 255))))

    def normalised(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "_Own":
        """Return the processor with another mean and deviation, as fractions of 255."""
        scale = {"do_rescale": True, "rescale_factor": 1 / 255}
        other = self._with(**scale, do_normalize=True, image_mean=list(mean), image_std=list(std))
        found = other.values()
        if not (np.allclose(found[0], mean, atol=1e-5) and np.allclose(found[1], std, 1e-5)):
            asked = ("model.pretrained", "data.image_mean", "data.image_std")
            raise other.refused("normalizes in its own way", "Leave out data.image_mean and data.image_std", asked)
        return other

    def size(self) -> tuple[int, int] | None:
        """Return height and width of the pixels of all images, or None if they differ."""
        sizes = {self.pixels(Image.new(self.mode, size)).shape[1:] for size in ((48, 48), (80, 40), (40, 90))}
        return sizes.pop() if len(sizes) == 1 else None

    def sized(self, size: int | tuple[int, int], *, is_whole: bool) -> "_Own":
        """Return the processor for another image size, with all its sizes in proportion."""
        asked, own = height_width(size), self.size()
        if own == asked:
            return self
        if own is None:
            raise self.refused("makes images of different sizes", *_WHOLE)
        if not is_whole and own[0] != own[1]:
            raise self.refused(f"makes images of {own[0]} x {own[1]}, and not squares", *_WHOLE)
        factors = {"height": asked[0] / own[0], "width": asked[1] / own[1]}
        changed: JsonRecord = {}
        for key in _SIZES:
            value = getattr(self.processor, key, None)
            if isinstance(value, int):
                changed[key] = round(value * factors["height"])
            elif value is not None:
                changed[key] = {
                    edge: round(pixels * factors.get(edge, factors["height"])) for edge, pixels in dict(value).items()
                }
        other = self._with(**changed)
        if other.size() != asked:
            raise self.refused(f"makes images of {own[0]} x {own[1]}, and not of data.image_size={size}", *_WHOLE)
        seen = other._view() / (self._view() or 1.0)
        if not _VIEWS[0] < seen < _VIEWS[1]:
            raise self.refused(f"would see {seen:.0%} of its part of an image at data.image_size={size}", *_WHOLE)
        return other

    def _view(self) -> float:
        """Return the part of the width of a large square image that is seen, from the slope of a ramp in the middle."""
        width = 1024
        ramp = np.linspace(0, 255, width).astype(np.uint8)[None].repeat(width, 0)
        pixels = self.pixels(Image.fromarray(ramp).convert(self.mode)).astype(np.float64)
        middle, columns = pixels[0, pixels.shape[1] // 2], pixels.shape[2]
        black, white = (self._of_colour(colour)[0] for colour in _COLOURS[:2])
        # Padding may be at the rim.
        first, last = columns // 4, columns - 1 - columns // 4
        return float((middle[last] - middle[first]) / (white - black) * columns / max(1, last - first))

    def whole(self, size: int | tuple[int, int]) -> "_Own":
        """Return the processor for whole images of another size."""
        edges = dict(zip(("height", "width"), height_width(size)))
        other = self._with(size=edges, do_resize=True, do_center_crop=False, do_pad=False)
        mean, std, is_reversed = other.values()
        form = Preprocessing(size, mean, std, None, self.resample, reverses_channels=is_reversed)
        if (reason := other.differs(form, is_whole=False)) is not None:
            raise other.refused(f"cannot resize whole images to data.image_size ({reason})")
        return other

    def crop_fraction(self) -> float:
        """Return the part of the short edge that a center crop shows, as the settings suggest."""
        size, crop = (dict(getattr(self.processor, key, None) or {}) for key in ("size", "crop_size"))
        if getattr(self.processor, "do_center_crop", False) and "shortest_edge" in size:
            return min(1.0, crop.get("height", size["shortest_edge"]) / size["shortest_edge"])
        return float(getattr(self.processor, "crop_pct", None) or 1.0)

    def differs(self, form: Preprocessing, *, is_whole: bool) -> str | None:
        """Return in which image the pixels of a preprocessing differ from these, or None."""
        for image in _images(form):
            theirs = self.pixels(image)
            ours = np.asarray(form.whole(image) if is_whole else form.resized(image))
            pixels = form.normalise([ours])[0].numpy()
            if theirs.shape != pixels.shape or _distance(pixels, theirs) > _TOLERANCE:
                return f"of an image of {image.width} x {image.height}"
        return None

    def around(self, form: Preprocessing) -> Preprocessing:
        """Return a preprocessing that calls this processor, and writes it."""
        drawn = text_digest([self.pixels(image).tobytes().hex() for image in _images(form)])
        return replace(form, own=self.processor, own_pixels=drawn)

    def _with(self, **changed: Any) -> "_Own":
        try:
            processor = type(self.processor).from_dict({**self.processor.to_dict(), **changed})
        # Any type: the code belongs to the model's family.
        except Exception as error:
            raise self.refused(f"cannot be changed ({_first_line(error)}): {changed}") from error
        return _Own(processor, self.name, self.mode)


def _images(form: Preprocessing) -> list[Image.Image]:
    """Return images of random pixels: smaller and larger than the image size, wide, high, and of odd sizes."""
    generator, (height, width) = np.random.default_rng(0), height_width(form.image_size)
    channels = (3,) if form.mode == "RGB" else ()
    sizes = ((48, 48), (61, 40), (33, 57), (9, 6), (width * 3 // 2 + 1, height * 5 // 4))
    return [
        Image.fromarray(generator.integers(0, 256, (high, wide, *channels), dtype=np.uint8)) for wide, high in sizes
    ]


def _distance(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    return float(np.abs(ours - theirs).max() / max(1.0, float(np.abs(theirs).max())))


def _refused(name: str, problem: str, remedy: str = "", settings: tuple[str, ...] = ()) -> SettingError:
    remedy = remedy or "Correct its preprocessor_config.json in a folder, or use another model"
    return SettingError(problem, remedy, f"model.pretrained={name}", settings or ("model.pretrained",))


def _first_line(error: Exception) -> str:
    return shorten((str(error) or repr(error)).strip().partition("\n")[0], 200, placeholder=" ...")


def _grey(values: tuple[float, ...]) -> tuple[float, ...]:
    return (sum(values) / len(values),)
