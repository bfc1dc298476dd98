"""The losses of transformers' detectors over the global batch, by the costs of their matchers and their criteria.

    loss = ce / W + boxes / max(B, 1) + (m x a / P + u x b / U) / (a + b),   a = sqrt(P / N), b = sqrt(U / N)

ce: weighted cross-entropy (softmax models). W: sum of its weights. boxes: all terms that are divided by B, the number
of boxes. m, u: distillation of D-FINE over edges of matched and other queries. P and U: their numbers. N: number of
images. All divisors are counts, known without a forward. So the sums (ce, boxes, m, u) of micro-batches add up, and
losses and gradients do not depend on the number of processes or on accumulation.

In transformers, the host waits for the device in each matching of a layer, and in each check and mask of a loss. Here
it waits once, for the costs of all layers. The checks are left out, and nothing has a mask.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.image_transforms import center_to_corners_format
from transformers.loss.loss_d_fine import DFineLoss, _set_aux_loss2, weighting_function
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss, _set_aux_loss
from transformers.loss.loss_rt_detr import RTDetrLoss
from transformers.loss.loss_rt_detr import _set_aux_loss as all_layers

from accel_train.data.labels import IGNORED_LABEL
from accel_train.model.kernels.global_loss import SummedParts, sums_dtype
from accel_train.task import Batch

SOFTMAX = ("detr", "table-transformer", "yolos")
"""Model types with a class for "no object"."""
FOCAL = ("conditional_detr", "deformable_detr")
REAL_TIME = ("d_fine", "rt_detr", "rt_detr_v2")
_EDGES = 4
_TEMPERATURE = 5
"""Temperature of D-FINE's distillation."""

Layer = dict[str, Tensor]
"""Outputs of a decoder layer, named as the criteria of transformers read them."""


def model_refusal(config: PreTrainedConfig) -> str | None:
    """Return why the loss of a model type or configuration is refused, with the fix; None if it is proved."""
    kind = config.model_type
    if kind not in (*SOFTMAX, *FOCAL, *REAL_TIME):
        return (
            f"the loss of model type {kind!r} is not proved over several processes; "
            f"use one of {', '.join(sorted((*SOFTMAX, *FOCAL, *REAL_TIME)))}"
        )
    if getattr(config, "two_stage", False):
        return "two_stage leaves the scores of the first stage without a loss in transformers; set it to false"
    if kind in REAL_TIME and not config.auxiliary_loss:
        return "auxiliary_loss: false leaves the encoder's head without a loss; set it to true"
    if kind == "yolos" and config.auxiliary_loss:
        return "auxiliary_loss of yolos does not work in transformers; set it to false"
    return None


def num_queries(config: PreTrainedConfig) -> int:
    """Return the number of boxes that a model predicts for each image."""
    return int(config.num_detection_tokens if config.model_type == "yolos" else config.num_queries)


def count(class_ids: Tensor, queries: int) -> Tensor:
    """Return the counts (4,) of a micro-batch: images, boxes, boxes with a query, and other queries.

    fp64 (fp32 on MPS). An image with more boxes than queries has boxes without one. class_ids: (N, M).
    """
    per_image = (class_ids != IGNORED_LABEL).sum(1)
    matched = per_image.clamp(max=queries).sum()
    images = torch.full_like(matched, len(class_ids))
    dtype = sums_dtype(class_ids.device)
    return torch.stack([images, per_image.sum(), matched, images * queries - matched]).to(dtype)


def weights_of_terms(counts: Tensor, config: PreTrainedConfig) -> Tensor:
    """Return the weights (4,) of the terms in the mean loss of the counted images."""
    images, boxes, matched, unmatched = counts.unbind()
    no_object = getattr(config, "eos_coefficient", None) or 0.0
    has = [(each * _EDGES).clamp(min=1) for each in (matched, unmatched)]
    roots = [(each * _EDGES / images.clamp(min=1)).sqrt() for each in (matched, unmatched)]
    tiny = torch.finfo(counts.dtype).tiny
    total = (roots[0] + roots[1]).clamp(min=tiny)
    cross_entropy = 1 / (matched + no_object * unmatched).clamp(min=tiny)
    return torch.stack([cross_entropy, 1 / boxes.clamp(min=1), roots[0] / total / has[0], roots[1] / total / has[1]])


class GlobalCounts(SummedParts):
    """Sums the counts of all micro-batches of all processes. No forward is needed for them."""

    num_terms = 4


def watch(model: PreTrainedModel) -> None:
    """Let a detector return the terms (4,) of the loss, not divided, as its `loss`."""
    model.loss_function = Terms(model.config)


def detection_terms(model: Any, batch: Batch) -> tuple[Any, Tensor]:
    """Return the outputs of a watched model, and the terms (4,) of its loss, fp32."""
    outputs = model(pixel_values=batch["pixel_values"], labels=batch)
    return outputs, outputs.loss


def overlaps(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and generalized IoU of boxes (..., 4), given as center x, center y, width, and height."""
    starts, ends = zip(*(center_to_corners_format(each).split(2, -1) for each in (first, second)))

    def area(start: Tensor, end: Tensor) -> Tensor:
        width, height = (end - start).clamp(min=0).unbind(-1)
        return width * height

    common, hull = area(torch.max(*starts), torch.min(*ends)), area(torch.min(*starts), torch.max(*ends))
    union = sum(map(area, starts, ends)) - common
    return common / union, common / union - (hull - union) / hull


class Terms:
    """Loss function of a detector of transformers, without its divisions. Matching waits for the device, once."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    @cached_property
    def criterion(self) -> Any:
        """Criterion of transformers, with its matcher. It has buffers, and models are also built without values, so it
        is made at the first call.
        """
        criterion, self.weights = _criterion(self.config)
        return criterion

    @torch.compiler.disable
    def __call__(
        self,
        logits: Tensor,
        labels: Batch,
        device: torch.device,
        pred_boxes: Tensor,
        config: PreTrainedConfig,
        outputs_class: Any = None,
        outputs_coord: Any = None,
        **further: Any,
    ) -> tuple[Tensor, None, None]:
        """Return the terms of the loss, in place of the loss, of its parts, and of the outputs of all layers."""
        self.criterion.to(device)
        with torch.autocast(device.type, enabled=False):
            layers = self._layers(logits, pred_boxes, outputs_class, outputs_coord, further)
            layers = [
                {name: value if value.dtype == torch.float64 else value.float() for name, value in layer.items()}
                for layer in layers
            ]
            # (L, N, Q, M). The host waits here, and nowhere else.
            costs = torch.stack([self._costs(layer, labels) for layer in layers]).cpu()
            sizes = costs[0, :, 0].isfinite().sum(1).tolist()
            pairs = [
                linear_sum_assignment(image[:, :size]) for layer in costs.numpy() for image, size in zip(layer, sizes)
            ]
            indices = torch.from_numpy(np.concatenate(pairs, 1))
            if device.type == "cuda":
                indices = indices.pin_memory()
            # All layers have the same number of pairs.
            matched = indices.to(device, non_blocking=True).tensor_split(len(layers), 1)
            sizes = [len(queries) for queries, _ in pairs[: len(sizes)]]
            terms = [self._terms(layer, own.split(sizes, 1), labels) for layer, own in zip(layers, matched)]
        return torch.stack(terms).sum(0), None, None

    @torch.no_grad()
    def _costs(self, layer: Layer, batch: Batch) -> Tensor:
        """Return the matcher's costs of each query and box, (N, Q, M), inf for missing boxes."""
        matcher, ids, boxes = self.criterion.matcher, batch["class_ids"][:, None], batch["boxes"]
        logits, found = layer["logits"], layer["pred_boxes"]
        is_focal = getattr(matcher, "use_focal_loss", self.config.model_type in FOCAL)
        of_class = logits.sigmoid() if is_focal else -logits.softmax(-1)
        of_class = of_class.take_along_dim(ids.clamp(min=0), -1)
        if is_focal:
            alpha, gamma, no = getattr(matcher, "alpha", 0.25), getattr(matcher, "gamma", 2.0), 1 - of_class
            of_others = (1 - alpha) * of_class**gamma * -(no + 1e-8).log()
            of_class = alpha * no**gamma * -(of_class + 1e-8).log() - of_others
        costs = matcher.bbox_cost * torch.cdist(found, boxes, p=1) + matcher.class_cost * of_class
        costs -= matcher.giou_cost * overlaps(found[:, :, None], boxes[:, None])[1]
        # Outputs that are not finite are matched last. Their loss is not finite either, and the guard decides.
        worst = torch.finfo(costs.dtype).max
        return costs.nan_to_num(worst, worst, worst).masked_fill(ids == IGNORED_LABEL, torch.inf)

    def _layers(
        self, logits: Tensor, boxes: Tensor, classes: Any, coords: Any, further: Mapping[str, Any]
    ) -> list[Layer]:
        """Return the outputs to compute the loss of, as transformers chooses them. Without denoising queries."""
        last = {"logits": logits, "pred_boxes": boxes}
        if self.config.model_type not in REAL_TIME:
            return [last, *(_set_aux_loss(classes, coords) if self.config.auxiliary_loss else [])]
        first = all_layers([further["enc_topk_logits"]], [further["enc_topk_bboxes"]])
        earlier = [each[:, :-1].transpose(0, 1) for each in (classes, coords)]
        if self.config.model_type != "d_fine":
            return [last, *all_layers(*earlier), *first]
        corners, points = further["predicted_corners"], further["initial_reference_points"]
        own = [each[:, :-1].transpose(0, 1) for each in (corners, points)]
        found = [last, *_set_aux_loss2(*earlier, *own, corners[:, -1], classes[:, -1]), *first]
        return [layer | {"pred_boxes": layer["pred_boxes"].clamp(min=0, max=1)} for layer in found]

    def _terms(self, layer: Layer, indices: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """Return the terms (4,) of a layer. indices: query and box of each pair, (2, K), for each image."""
        targets = [
            {"class_labels": ids, "boxes": boxes} for ids, boxes in zip(batch["class_ids"], batch["boxes"], strict=True)
        ]
        place = images, _ = self.criterion._get_source_permutation_idx(indices)
        found, boxes = layer["pred_boxes"][place], batch["boxes"][images, torch.cat(indices, 1)[1]]
        overlap, generalized = overlaps(found, boxes)
        ((part, value),) = self.criterion.get_loss(self.criterion.losses[0], layer, targets, indices, 1.0).items()
        value, nothing, is_softmax = value * self.weights[part], value.new_zeros(()), self.config.model_type in SOFTMAX
        if is_softmax:
            no_object = self.config.eos_coefficient * (layer["logits"].shape[:2].numel() - len(images))
            value = value * (len(images) + no_object)
        by_boxes = nothing if is_softmax else value
        by_boxes = by_boxes + functional.l1_loss(found, boxes, reduction="sum") * self.weights["loss_bbox"]
        by_boxes = by_boxes + (1 - generalized).sum() * self.weights["loss_giou"]
        fine, *distilled = [nothing] * 3
        if "pred_corners" in layer:
            fine, *distilled = self._local(layer, place, boxes, overlap.detach())
        return torch.stack([value if is_softmax else nothing, by_boxes + fine, *distilled])

    def _local(self, layer: Layer, place: Any, boxes: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms of D-FINE's edges: focal, and distillation summed over matched and over other queries.

        transformers divides the distillation by the numbers of one batch.
        """
        criterion, scale = self.criterion, self.criterion.reg_scale
        corners, teacher = (layer[name].unflatten(-1, (_EDGES, -1)) for name in ("pred_corners", "teacher_corners"))
        # Distances of the four edges from the point, in its size. `share` is the way from one bin to the next.
        center, size = layer["ref_points"][place].detach().split(2, -1)
        start, end = center_to_corners_format(boxes).split(2, -1)
        distances = torch.cat([center - start, end - center], -1) / (size / scale + 1e-16).repeat(1, 2) - scale / 2
        edges = weighting_function(criterion.max_num_bins, criterion.up, scale)
        distances = distances.flatten().clamp(edges[0], edges[-1])
        left = torch.bucketize(distances, edges[1:-1], right=True)
        share = (distances - edges[left]) / (edges[left + 1] - edges[left])
        fine = criterion.unimodal_distribution_focal_loss(
            corners[place].flatten(0, 1), left, share, 1 - share, overlap.repeat_interleave(_EDGES)
        )
        corners, teacher = corners / _TEMPERATURE, teacher.detach() / _TEMPERATURE
        far = functional.kl_div(corners.log_softmax(-1), teacher.softmax(-1), reduction="none").sum((-2, -1))
        weights = layer["teacher_logits"].sigmoid().amax(-1).detach().index_put(place, overlap)
        far = weights * far * (_TEMPERATURE**2 * self.weights["loss_ddf"])
        others = far.index_put(place, far.new_zeros(()))
        return fine * self.weights["loss_fgl"], far[place].sum(), others.sum()


def _criterion(config: PreTrainedConfig) -> tuple[Any, dict[str, float]]:
    """Return the criterion of a model type, and the weights of its parts."""
    if config.model_type in REAL_TIME:
        criterion = DFineLoss(config) if config.model_type == "d_fine" else RTDetrLoss(config)
        return criterion, criterion.weight_dict
    costs = {"class_cost": config.class_cost, "bbox_cost": config.bbox_cost, "giou_cost": config.giou_cost}
    weights = {
        "loss_ce": 1.0,
        "loss_bbox": config.bbox_loss_coefficient,
        "loss_giou": config.giou_loss_coefficient,
    }
    losses = ["labels", "boxes"]
    if config.model_type in SOFTMAX:
        return ImageLoss(HungarianMatcher(**costs), config.num_labels, config.eos_coefficient, losses), weights
    matcher = DeformableDetrHungarianMatcher(**costs)
    return DeformableDetrImageLoss(matcher, config.num_labels, config.focal_alpha, losses), weights
