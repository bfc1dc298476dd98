"""Test-time augmentation, and logits of segmentation models at the size of the labels.

Test-time augmentation averages a model's predictions over mirror images and scales.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from accel_train.recipe.evaluate import TestTimeAugmentation


@dataclass(frozen=True)
class View:
    """A batch of images as one of several that are averaged over."""

    pixel_values: Tensor
    """(N, C, H, W); H and W are `scale` times the original's, unless the model has one size only."""
    scale: float
    is_flipped: bool

    @property
    def is_original(self) -> bool:
        """Return whether nothing was done to the images."""
        return self.scale == 1 and not self.is_flipped


def image_views(pixel_values: Tensor, settings: TestTimeAugmentation, *, takes_any_size: bool) -> Iterator[View]:
    """Yield the images (N, C, H, W) at each scale, and mirrored where the settings say so.

    A model with one size sees, in place of an image at a larger scale, the part of it that is then in its window.
    """
    for scale in settings.scales:
        scaled = rescale(pixel_values, scale, takes_any_size=takes_any_size)
        yield View(scaled, scale, False)
        if settings.horizontal_flip:
            yield View(scaled.flip(-1), scale, True)


def rescale(pixel_values: Tensor, scale: float, *, takes_any_size: bool) -> Tensor:
    """Return images (N, C, H, W) at a scale, bilinear; or, for a model with one size, their centre enlarged to H x W."""
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


def mean_pixel_probabilities(views: Sequence[Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of the class probabilities over `VisionTask.views`: (N, C, H, W) fp32, at the labels' size."""
    total = at_label_size(views[0], batch).softmax(1)
    for logits in views[1:]:
        total += at_label_size(logits, batch).softmax(1)
    return total / len(views)


def at_label_size(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return logits (N, C, h, w) of whole images as those of their labels' pixels: (N, C, H, W) fp32, bilinear.

    Labels of different sizes lie in the corner of (H, W); `label_sizes` says how far each reaches, and is read on the device.
    """
    logits = logits.float()
    height, width = batch["labels"].shape[-2:]
    if "label_sizes" not in batch:
        return interpolate(logits, (height, width), mode="bilinear", align_corners=False)
    sizes = batch["label_sizes"]
    # The centre of pixel i of H lies at (2 i + 1) / H - 1 of the image's -1 to 1: what interpolate computes, image by image.
    down = (2 * torch.arange(height, device=logits.device) + 1) / sizes[:, :1] - 1
    right = (2 * torch.arange(width, device=logits.device) + 1) / sizes[:, 1:] - 1
    grid = torch.stack((right[:, None, :].expand(-1, height, -1), down[:, :, None].expand(-1, -1, width)), dim=-1)
    return grid_sample(logits, grid, mode="bilinear", padding_mode="border", align_corners=False)


def one_at_a_time(batch: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Yield each image of a batch, as a slice, with its labels: at their size, logits take many times the model's own memory."""
    for index in range(len(batch["labels"])):
        own = slice(index, index + 1)
        yield own, {name: batch[name][own] for name in ("labels", "label_sizes") if name in batch}
