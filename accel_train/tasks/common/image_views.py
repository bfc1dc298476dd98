"""Test-time augmentation, windows over large images, and segmentation logits at the size of the labels.

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
    """A batch of images, as one of the views that test-time augmentation averages."""

    pixel_values: Tensor
    """(N, C, H, W). H and W are `scale` times the original size, or the original size for a model with a fixed size."""
    scale: float
    is_flipped: bool

    @property
    def is_original(self) -> bool:
        """Return whether the images are unchanged."""
        return self.scale == 1 and not self.is_flipped


def image_views(pixel_values: Tensor, settings: TestTimeAugmentation, *, takes_any_size: bool) -> Iterator[View]:
    """Yield the images (N, C, H, W) at each scale, and mirrored if the settings ask for it.

    For a model with a fixed size, a larger scale yields the enlarged center of the images.
    """
    for scale in settings.scales:
        scaled = rescale(pixel_values, scale, takes_any_size=takes_any_size)
        yield View(scaled, scale, False)
        if settings.horizontal_flip:
            yield View(scaled.flip(-1), scale, True)


def rescale(pixel_values: Tensor, scale: float, *, takes_any_size: bool) -> Tensor:
    """Return bilinearly scaled images (N, C, H, W). For a model with a fixed size, enlarge their center to H x W."""
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
    """Windows over an image, as (height, width) in pixels."""

    size: tuple[int, int]
    stride: tuple[int, int]
    """Distance between the starts of neighboring windows. The last window ends with the image."""


def window_logits(forward: Callable[[Tensor], Tensor], pixel_values: Tensor, windows: Windows) -> Tensor:
    """Return fp32 logits (N, C, h, w) of images (N, 3, H, W), averaged where windows overlap.

    Windows are computed one after the other for the whole batch. Memory holds N windows and the logits of the
    whole images. Follows the sliding inference of mmsegmentation (`EncoderDecoder.slide_inference`), but averages at
    the size of the logits instead of the images. Strides are rounded to pixels of the logits. An image that fits in a
    window is computed in one pass.
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
    """Return the starts of windows along an edge: `stride` apart, but the last window ends at the edge."""
    return [*range(0, edge - window, stride), edge - window]


def mean_pixel_probabilities(views: Sequence[Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return mean class probabilities (N, C, H, W) over `VisionTask.views`, in fp32 at the size of the labels."""
    total = at_label_size(views[0], batch).softmax(1)
    for logits in views[1:]:
        total += at_label_size(logits, batch).softmax(1)
    return total / len(views)


def at_label_size(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return logits (N, C, h, w) of whole images, resized bilinearly to their labels: fp32 (N, C, H, W).

    Labels of different sizes lie in the top left corner of (H, W). `label_sizes` has their sizes, and stays on the
    device.
    """
    logits = logits.float()
    height, width = batch["labels"].shape[-2:]
    if "label_sizes" not in batch:
        return interpolate(logits, (height, width), mode="bilinear", align_corners=False)
    sizes = batch["label_sizes"]
    # The center of pixel i of H lies at (2 i + 1) / H - 1 in [-1, 1], as in interpolate. Each image has its own H.
    down = (2 * torch.arange(height, device=logits.device) + 1) / sizes[:, :1] - 1
    right = (2 * torch.arange(width, device=logits.device) + 1) / sizes[:, 1:] - 1
    grid = torch.stack((right[:, None, :].expand(-1, height, -1), down[:, :, None].expand(-1, -1, width)), dim=-1)
    return grid_sample(logits, grid, mode="bilinear", padding_mode="border", align_corners=False)


def one_at_a_time(batch: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Yield each image of a batch as a slice with its labels.

    Logits at the size of the labels take many times the model's own memory, so they are made one image at a time.
    """
    for index in range(len(batch["labels"])):
        own = slice(index, index + 1)
        yield own, {name: batch[name][own] for name in ("labels", "label_sizes") if name in batch}
