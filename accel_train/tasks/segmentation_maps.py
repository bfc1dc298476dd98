"""From a segmentation model's coarse logits to the size of the labels: for the loss, for predictions, and averaged over views."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, grid_sample, interpolate

from accel_train.recipe import TestTimeAugmentation
from accel_train.tasks.test_time import image_views


def at_label_size(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits (N, C, h, w) of whole images to those of their labels' pixels: (N, C, H, W) fp32, bilinear.

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


def pixel_loss_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Cross-entropy summed over pixels: (N, C, H, W) fp32 logits, (N, H, W) int64 labels; those of `ignore_index` count nothing.

    With class weights, sum w[label] ce, as in `classification_loss_sum`.
    """
    if torch.are_deterministic_algorithms_enabled():
        # CUDA's loss over images adds up in no fixed order; the one over rows does not, at the price of a copy.
        logits, labels = logits.permute(0, 2, 3, 1).flatten(0, 2), labels.flatten()
    losses_of = partial(cross_entropy, logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if class_weights is None:
        return losses_of(reduction="sum")
    losses = losses_of(reduction="none")
    return (losses * class_weights[labels.clamp(max=len(class_weights) - 1)]).sum()  # an ignored pixel has a loss of 0


def one_at_a_time(batch: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Each image of a batch, as a slice, with its labels: logits at the labels' size are many times the model's own memory."""
    for index in range(len(batch["labels"])):
        own = slice(index, index + 1)
        yield own, {name: batch[name][own] for name in ("labels", "label_sizes") if name in batch}


def view_logits(
    logits_of: Callable[[Tensor], Tensor], logits: Tensor, pixel_values: Tensor, settings: TestTimeAugmentation
) -> list[Tensor]:
    """The coarse logits (N, C, h, w) of mirror images and scales, turned back; `logits` are those of the images as they are."""
    found = []
    for view in image_views(pixel_values, settings, takes_any_size=True):
        answer = logits if view.is_original else logits_of(view.pixel_values)
        found.append(answer.flip(-1) if view.is_flipped else answer)
    return found


def mean_pixel_probabilities(views: Sequence[Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """The mean of the class probabilities over the views of `view_logits`: (N, C, H, W) fp32, at the labels' size."""
    total = at_label_size(views[0], batch).softmax(1)
    for logits in views[1:]:
        total += at_label_size(logits, batch).softmax(1)
    return total / len(views)
