"""The losses of transformers' detectors over the global batch, by their own matchers and criteria.

    loss = ce / W + boxes / max(B, 1) + (m x a / P + u x b / U) / (a + b),   a = sqrt(P / N), b = sqrt(U / N)

ce: weighted cross-entropy (softmax models). W: sum of its weights. boxes: all terms that are divided by B, the number
of boxes. m, u: distillation of D-FINE over edges of matched and other queries. P and U: their numbers. N: number of
images. All divisors are counts, known without a forward. So the sums (ce, boxes, m, u) of micro-batches add up, and
losses and gradients do not depend on the number of processes or on accumulation.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_d_fine import DFineLoss, _set_aux_loss2
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
_NUM_TERMS = 4

Layer = dict[str, Tensor]
"""Outputs of a decoder layer, named as the criteria of transformers read them."""
Targets = list[Layer]
Indices = list[tuple[Tensor, Tensor]]


class Counts(NamedTuple):
    """Numbers that divide the terms of the loss, each 0-dim."""

    images: Tensor
    boxes: Tensor
    matched: Tensor
    """Boxes that have a query. An image with more boxes than queries has some without."""
    unmatched: Tensor
    """Queries without a box."""


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
    """Return the counts (4,) of a micro-batch, in the order of `Counts`, fp64 (fp32 on MPS). class_ids: (N, M)."""
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
    total = (roots[0] + roots[1]).clamp(min=torch.finfo(counts.dtype).tiny)
    cross_entropy = 1 / (matched + no_object * unmatched).clamp(min=torch.finfo(counts.dtype).tiny)
    return torch.stack([cross_entropy, 1 / boxes.clamp(min=1), roots[0] / total / has[0], roots[1] / total / has[1]])


class GlobalCounts(SummedParts):
    """Sums the counts of all micro-batches of all processes. No forward is needed for them."""

    num_terms = _NUM_TERMS


def watch(model: PreTrainedModel) -> None:
    """Let a detector return the terms (4,) of the loss, not divided, as its `loss`."""
    model.loss_function = Terms(model.config)


def detection_terms(model: Any, batch: Batch) -> tuple[Any, Tensor]:
    """Return the outputs of a watched model, and the terms (4,) of its loss, fp32."""
    labels = [
        {"class_labels": ids[ids != IGNORED_LABEL], "boxes": boxes[ids != IGNORED_LABEL]}
        for ids, boxes in zip(batch["class_ids"], batch["boxes"], strict=True)
    ]
    outputs = model(pixel_values=batch["pixel_values"], labels=labels)
    return outputs, outputs.loss


class Terms:
    """Loss function of a detector of transformers, without its divisions. Matching waits for the device."""

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
        labels: Targets,
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
            total = torch.stack([layer["logits"].sum() + layer["pred_boxes"].sum() for layer in layers]).sum()
            # The matcher ends a run if a box is NaN. The guard decides instead: x - x is NaN if x is not finite.
            if not torch.isfinite(total):
                return (total - total).expand(_NUM_TERMS), None, None
            terms = torch.stack([self._terms(layer, labels) for layer in layers]).sum(0)
        return terms, None, None

    def _layers(
        self, logits: Tensor, boxes: Tensor, classes: Any, coords: Any, further: Mapping[str, Any]
    ) -> list[Layer]:
        """Return the outputs to compute the loss of, as transformers chooses them. Without denoising queries."""
        if self.config.model_type not in REAL_TIME:
            others = _set_aux_loss(classes, coords) if self.config.auxiliary_loss else []
            return [{"logits": logits, "pred_boxes": boxes}, *others]
        first = all_layers([further["enc_topk_logits"]], [further["enc_topk_bboxes"]])
        earlier = [each[:, :-1].transpose(0, 1) for each in (classes, coords)]
        if self.config.model_type != "d_fine":
            return [{"logits": logits, "pred_boxes": boxes}, *all_layers(*earlier), *first]
        corners, points = further["predicted_corners"], further["initial_reference_points"]
        own = [each[:, :-1].transpose(0, 1) for each in (corners, points)]
        found = [
            {"logits": logits, "pred_boxes": boxes},
            *_set_aux_loss2(*earlier, *own, corners[:, -1], classes[:, -1]),
            *first,
        ]
        return [layer | {"pred_boxes": layer["pred_boxes"].clamp(min=0, max=1)} for layer in found]

    def _terms(self, layer: Layer, targets: Targets) -> Tensor:
        device = layer["logits"].device
        indices = [(queries.to(device), boxes.to(device)) for queries, boxes in self.criterion.matcher(layer, targets)]
        cross_entropy = by_boxes = torch.zeros((), device=device)
        for name in self.criterion.losses:
            if name in ("local", "cardinality"):
                continue
            for part, value in self.criterion.get_loss(name, layer, targets, indices, 1.0).items():
                if part == "loss_ce" and self.config.model_type in SOFTMAX:
                    matched = sum(len(queries) for queries, _ in indices)
                    no_object = self.config.eos_coefficient * (layer["logits"].shape[:2].numel() - matched)
                    cross_entropy = cross_entropy + value * self.weights[part] * (matched + no_object)
                else:
                    by_boxes = by_boxes + value * self.weights[part]
        if "pred_corners" not in layer:
            return torch.stack([cross_entropy, by_boxes, *by_boxes.new_zeros(2)])
        fine, of_matched, of_others = self._local(layer, targets, indices)
        return torch.stack([cross_entropy, by_boxes + fine, of_matched, of_others])

    def _local(self, layer: Layer, targets: Targets, indices: Indices) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms of D-FINE's edges: focal, and distillation summed over matched and over other queries.

        transformers divides the distillation by the numbers of one batch. With queries of one kind, it is a mean.
        """
        is_matched = torch.zeros(layer["logits"].shape[:2], dtype=torch.bool, device=layer["logits"].device)
        place = self.criterion._get_source_permutation_idx(indices)
        is_matched[place] = True
        target = {
            name: torch.cat([each[name][boxes] for each, (_, boxes) in zip(targets, indices, strict=True)])
            for name in ("boxes", "class_labels")
        }
        order = torch.arange(len(target["boxes"]), device=is_matched.device)
        fine, mean = self._local_of(lambda each: each[place], layer, [target], [(order, order)])
        others = self._local_of(lambda each: each[~is_matched], layer, [target], [(order[:0], order[:0])])[1]
        num_matched = len(order)
        return fine, mean * (_EDGES * num_matched), others * (_EDGES * (is_matched.numel() - num_matched))

    def _local_of(
        self, chosen: Callable[[Tensor], Tensor], layer: Layer, targets: Targets, indices: Indices
    ) -> tuple[Tensor, Tensor]:
        part = {name: chosen(value)[None] for name, value in layer.items()}
        found = self.criterion.get_loss("local", part, targets, indices, 1.0)
        return found["loss_fgl"] * self.weights["loss_fgl"], found["loss_ddf"] * self.weights["loss_ddf"]


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
