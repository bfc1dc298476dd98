"""Test-time augmentation, windows over large images, and logits of segmentation models at the size of the labels.

Test-time augmentation averages a model's predictions over mirror images and scales.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Windows(NamedTuple):
    """Windows over an image, each as (height, width) in pixels."""

    size: tuple[int, int]
    stride: tuple[int, int]
    """From one to the next; the last one ends with the image."""


def window_logits(forward: Callable[[Tensor], Tensor], pixel_values: Tensor, windows: Windows) -> Tensor:
    """Return logits (N, C, h, w) fp32 of images (N, 3, H, W), the mean over windows where they overlap.

    All images are seen in one window after the other, so memory is that of N windows, beside logits as large as those of the whole
    images. After the sliding inference of mmsegmentation (`EncoderDecoder.slide_inference`), which averages at the images' size;
    here it is the logits' own. Strides that are no multiple of the logits' pixels are rounded to them. An image no larger than a
    window is one window, and what `forward` says of it.
    """
    edges = pixel_values.shape[-2:]
    high, wide = (min(cut, edge) for cut, edge in zip(windows.size, edges))
    total = count = torch.empty(0)
    for top in _starts(edges[0], high, windows.stride[0]):
        for left in _starts(edges[1], wide, windows.stride[1]):
            logits = forward(pixel_values[..., top : top + high, left : left + wide]).float()
            h, w = logits.shape[-2:]
            if not count.numel():
                total = logits.new_zeros((*logits.shape[:2], round(edges[0] * h / high), round(edges[1] * w / wide)))
                count = total.new_zeros(total.shape[-2:])
            down, right = round(top * h / high), round(left * w / wide)
            total[..., down : down + h, right : right + w] += logits
            count[down : down + h, right : right + w] += 1
    return total / count


def _starts(edge: int, window: int, stride: int) -> list[int]:
    """Return where windows begin along an edge: `stride` apart, and the last one where the edge ends."""
    return [*range(0, edge - window, stride), edge - window]


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
