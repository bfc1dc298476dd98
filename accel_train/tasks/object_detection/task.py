"""Object detection: find the objects of an image with a detector of transformers that matches them to queries."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_OBJECT_DETECTION_MAPPING,
    AutoModelForObjectDetection,
    PreTrainedConfig,
    PreTrainedModel,
)

from accel_train.core.errors import DataError, SettingError
from accel_train.core.format import format_count
from accel_train.core.state import Choice, Choices
from accel_train.data.images.first_format import first_repr
from accel_train.data.images.images import text_digest
from accel_train.data.images.labelled import ImageRows, try_samples
from accel_train.model.tensors import numel
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Columns, Scores, TaskData, Tensors, Totals
from accel_train.tasks.common.vision import ImageSource, VisionTask
from accel_train.tasks.object_detection import data as detection
from accel_train.tasks.object_detection import losses
from accel_train.tasks.object_detection import metrics as scores_of
from accel_train.tasks.object_detection.config import SPEC, ObjectDetectionData
from accel_train.tasks.rows import decimals

_PROCESSORS = {"conditional_detr": "ConditionalDetr", "deformable_detr": "DeformableDetr", "yolos": "Yolos"}


class ObjectDetection(VisionTask):
    """Train DETR, Deformable DETR, RT-DETR, D-FINE, and YOLOS from random or pretrained weights."""

    spec = SPEC

    factory, models = AutoModelForObjectDetection, MODEL_FOR_OBJECT_DETECTION_MAPPING
    purpose, predicts_pixels = "object detection", False
    resizes_whole_images = True
    metric_names = SPEC.metrics
    example = """\
sizes = [(image.height, image.width)]
found = processor.post_process_object_detection(model(**inputs), threshold=0.5, target_sizes=sizes)[0]
print(found["labels"], found["scores"], found["boxes"])"""
    global_loss: losses.GlobalCounts

    def model_config(self, recipe: Recipe) -> tuple[PreTrainedConfig, list[str]]:
        """Return the configuration of the recipe's model, without denoising queries, and notes about it.

        Raises:
            ValueError: the loss of the model is not the same on any number of processes, or its layers have no single
                order for `optimizer.layer_decay`.
        """
        config, notes = super().model_config(recipe)
        if (refusal := losses.model_refusal(config)) is not None:
            raise ValueError(f"model: {refusal}")
        _check_layer_decay(recipe.optimizer.layer_decay, config)
        if config.model_type == "yolos" and isinstance(config.image_size, int):
            config.image_size = [config.image_size, config.image_size]
        if getattr(config, "num_denoising", 0):
            config.num_denoising = 0
            notes.append("denoising queries are left out: their number would depend on the micro-batch")
        return config, notes

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read images with boxes. Images are decoded when they are drawn.

        Raises:
            ValueError: data is missing or broken, or a setting is for another task.
        """
        data = ObjectDetectionData.of(recipe.data)
        source, notes = self.read_images(recipe, detection.read_boxed_images)
        sets = source.sets
        held = sets.eval
        boxes = [] if held is None or held.boxes is None else [held.boxes_of(index) for index in range(len(held))]
        if boxes and all(each.is_crowd.all() for each in boxes):
            raise DataError(
                f"no box in {format_count(len(boxes), 'evaluation image')}, so mAP is not defined. "
                "Name images with boxes in data.eval"
            )
        settings = detection.DetectionSettings(source.preprocessing, data.augment, data.min_visible)
        train = detection.AugmentedBoxedImages(sets.train, settings)
        evaluation = None if held is None else detection.BoxedImages(held, settings)
        try_samples(train, data.max_broken)
        try_samples(evaluation or [], 0)
        self.global_loss = losses.GlobalCounts()
        return TaskData(
            train=train,
            eval=evaluation,
            collate=partial(detection.collate_boxes, preprocessing=source.preprocessing),
            fingerprint=sets.identity,
            settings={"data.preprocessing": source.preprocessing.changed_fields()},
            first_fingerprint=text_digest([sets.identity, first_repr(settings)]),
            facts=source.facts(notes),
            source=source,
            max_broken=data.max_broken,
            draw=train.draw,
            where=sets.train.where,
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's model in fp32 for the data's classes. From scratch, the whole backbone is trained."""
        model = super().build_model(recipe, data)
        assert isinstance(model, PreTrainedModel)
        frozen = [each for each in model.parameters() if not each.requires_grad]
        if recipe.model.pretrained is None:
            # Constructors of DETR and Deformable DETR freeze early layers, or all layers, as if they were pretrained.
            for parameter in frozen:
                parameter.requires_grad_(True)
        elif frozen:
            number = numel(frozen)
            data.add_notes([f"transformers freezes {number:,} parameters of the pretrained backbone"])
        losses.watch(model)
        self.config, self.num_queries = model.config, losses.num_queries(model.config)
        return model

    def choices(self, recipe: Recipe, model: nn.Module) -> Choices:
        """Return how the loss is divided."""
        return {"loss": Choice("set loss", "divided once by the boxes and queries of the global batch")}

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 loss of a micro-batch, times the images of the global batch."""
        terms = losses.detection_terms(model, batch)[1]
        counts = (self.global_loss if model.training else losses.GlobalCounts()).whole(self.global_part(model, batch))
        return _loss(terms, counts, self.config)

    def loss_without_values(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return a loss without matching, whose memory is small: a number for each query and box of the batch."""
        outputs = model(pixel_values=batch["pixel_values"])
        return outputs.logits.float().sum() + outputs.pred_boxes.float().sum()

    def global_part(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the counts of a micro-batch, for `GlobalLoss.over`."""
        return losses.count(batch["class_ids"], self.num_queries)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the terms and counts of the loss, which add up over batches, and the best boxes of each image."""
        outputs, terms = losses.detection_terms(model, batch)
        return {
            "loss_sum": terms.new_zeros(()),
            "terms": terms,
            "counts": self.global_part(model, batch),
            "rows_boxes": self._best(outputs),
        }

    def loss_of_rows(self, totals: Totals) -> float:
        """Return the loss of all evaluation images, times their number."""
        terms, counts = (torch.from_numpy(np.asarray(totals[name], np.float64)) for name in ("terms", "counts"))
        return float(_loss(terms, counts, self.config))

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return mAP over IoU thresholds of 0.5 to 0.95, mAP at 0.5 and 0.75, and AP by class."""
        rows: ImageRows = data.source.sets.eval
        truth = [rows.boxes_of(index) for index in totals["rows_index"]]
        found = [
            _detection(row, each.width, each.height) for row, each in zip(totals["rows_boxes"], truth, strict=True)
        ]
        return scores_of.average_precision(truth, found, data.source.label_names)

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of the mean training box of each class as the answer for every image."""
        source: ImageSource = data.source
        if source.sets.eval is None or source.sets.eval.boxes is None:
            return {}
        train, evaluation = (
            [side.boxes_of(index) for index in range(len(side))] for side in (source.sets.train, source.sets.eval)
        )
        found = scores_of.mean_boxes(train, evaluation, len(source.label_names))
        metrics = scores_of.average_precision(evaluation, found, source.label_names).metrics
        return {f"mean_box_{name}": value for name, value in metrics.items()}

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return `found` (N, K, 6): score, class, and corners in [0, 1] of the best boxes."""
        return {"found": self._best(model(pixel_values=batch["pixel_values"]))}

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return lists for each image, by falling score: `labels`, `scores`, and `boxes`.

        A box is [left, top, width, height] in pixels, as in COCO.
        """
        images, names = data.source.sets.eval, data.source.label_names
        columns: Columns = {"labels": [], "scores": [], "boxes": []}
        for index, row in zip(rows["index"].tolist(), rows["found"], strict=True):
            found = _detection(row, *_size(images, index))
            columns["labels"].append([names[each] for each in found.class_ids.tolist()])
            columns["scores"].append(decimals(found.scores))
            columns["boxes"].append([[round(each, 2) for each in scores_of.coco_box(box)] for box in found.corners])
        return columns

    def _best(self, outputs: Any) -> Tensor:
        """Return score, class, and corners in [0, 1] of the best boxes by score, (N, K, 6) fp32."""
        logits, boxes = outputs.logits.float(), outputs.pred_boxes.float()
        if self.config.model_type in losses.SOFTMAX:
            by_query, classes = logits.softmax(-1)[..., :-1].max(-1)
            scores, queries = by_query.topk(min(scores_of.MAX_BOXES, by_query.shape[1]))
            classes = classes.gather(1, queries)
        else:
            flat = logits.sigmoid().flatten(1)
            scores, places = flat.topk(min(scores_of.MAX_BOXES, flat.shape[1]))
            queries, classes = places // logits.shape[-1], places % logits.shape[-1]
        center, size = boxes.gather(1, queries[..., None].expand(-1, -1, 4)).split(2, -1)
        corners = torch.cat([center - size / 2, center + size / 2], -1)
        return torch.cat([scores[..., None], classes[..., None].float(), corners], -1)

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration, the detector's image processor, and a short model card."""
        super().save_description(model, data, folder)
        kind = self.config.model_type
        processor = _PROCESSORS.get(kind, "RTDetr" if kind in losses.REAL_TIME else "Detr")
        data.source.preprocessing.save(folder, crops=False, detector=f"{processor}ImageProcessor")


def _loss(terms: Tensor, counts: Tensor, config: PreTrainedConfig) -> Tensor:
    """Return the loss of summed terms (4,), times the images of the counts (4,)."""
    weights = losses.weights_of_terms(counts, config)
    return (terms * (counts[0] * weights).to(terms.dtype)).sum()


def _detection(row: NDArray[np.float32], width: int, height: int) -> scores_of.Detection:
    """Return the boxes (K, 6) of an image in its pixels, clipped to it."""
    edges = np.array([width, height] * 2, np.float32)
    return scores_of.Detection(row[:, 0], row[:, 1].astype(np.int64), np.clip(row[:, 2:] * edges, 0, edges))


def _size(images: ImageRows, index: int) -> tuple[int, int]:
    """Return the width and height of an image."""
    if images.boxes is None:
        return images.image(index).size
    boxes = images.boxes_of(index)
    return boxes.width, boxes.height


def _check_layer_decay(decay: float, config: PreTrainedConfig) -> None:
    """Refuse different rates by layer for a model whose layers are not one stack.

    Raises:
        SettingError: the model has a backbone, an encoder, and a decoder, or weights that several layers add.
    """
    if decay == 1.0:
        return
    if config.model_type != "yolos":
        reason = f"{config.model_type} has a backbone, an encoder, and a decoder, and only one would get falling rates"
    elif config.use_mid_position_embeddings:
        reason = "all layers of this yolos share mid_position_embeddings, which have no depth"
    else:
        return
    remedy = "Leave it out, and set lower rates by optimizer.groups"
    raise SettingError(reason, remedy, f"optimizer.layer_decay={decay:g}", ("optimizer.layer_decay", "model.config"))
