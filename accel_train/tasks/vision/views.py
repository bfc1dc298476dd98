"""Test-time augmentation: what a model answers on average over mirror images and scales, instead of on the image alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from accel_train.recipe import TestTimeAugmentation


@dataclass(frozen=True)
class View:
    """A batch of images as one of several that are averaged over."""

    pixel_values: Tensor
    """(N, C, H, W); H and W are `scale` times the original's, unless the model has one size only."""
    scale: float
    is_flipped: bool

    @property
    def is_original(self) -> bool:
        """Nothing was done to the images."""
        return self.scale == 1 and not self.is_flipped


def image_views(pixel_values: Tensor, settings: TestTimeAugmentation, *, takes_any_size: bool) -> Iterator[View]:
    """The images (N, C, H, W) at each scale, and mirrored where the settings say so.

    A model with one size sees, in place of an image at a larger scale, the part of it that is then in its window.
    """
    for scale in settings.scales:
        scaled = rescale(pixel_values, scale, takes_any_size=takes_any_size)
        yield View(scaled, scale, False)
        if settings.horizontal_flip:
            yield View(scaled.flip(-1), scale, True)


def rescale(pixel_values: Tensor, scale: float, *, takes_any_size: bool) -> Tensor:
    """Images (N, C, H, W) at a scale, bilinear; or, for a model with one size, their centre enlarged to H x W."""
    if scale == 1:
        return pixel_values
    height, width = pixel_values.shape[-2:]
    if takes_any_size:
        size = (round(height * scale), round(width * scale))
        return interpolate(pixel_values, size, mode="bilinear", align_corners=False, antialias=scale < 1)
    high, wide = round(height / scale), round(width / scale)
    top, left = (height - high) // 2, (width - wide) // 2
    centre = pixel_values[..., top : top + high, left : left + wide]
    return interpolate(centre, (height, width), mode="bilinear", align_corners=False)


def check_scales(settings: TestTimeAugmentation, *, takes_any_size: bool) -> None:
    """Refuse scales that a model of one size cannot be shown.

    Raises:
        ValueError: names the scale.
    """
    small = [scale for scale in settings.scales if scale < 1]
    if small and not takes_any_size:
        raise ValueError(
            f"evaluate.test_time_augmentation.scales: {small[0]} is below 1, and the model takes images of one size only, "
            "so there is nothing to fill the rim with; give scales of 1 and above"
        )
    if not settings.scales:
        raise ValueError("evaluate.test_time_augmentation.scales is empty; write [1.0] for the image as it is")


def mean_probabilities(
    logits_of: Callable[[Tensor], Tensor],
    pixel_values: Tensor,
    logits: Tensor,
    settings: TestTimeAugmentation,
    *,
    takes_any_size: bool,
) -> Tensor:
    """The mean of the class probabilities over all views: (N, C) fp32. `logits` are those of the images as they are."""
    views = image_views(pixel_values, settings, takes_any_size=takes_any_size)
    answers = (logits if view.is_original else logits_of(view.pixel_values) for view in views)
    return torch.stack([answer.float().softmax(-1) for answer in answers]).mean(0)
