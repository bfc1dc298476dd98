"""Semantic segmentation: predict a class per pixel with any segmentation model of transformers."""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING, AutoModelForSemanticSegmentation

from accel_train.data.images.first_format import first_repr
from accel_train.data.images.images import text_digest
from accel_train.data.images.labelled import try_samples
from accel_train.data.images.preprocessing import Size
from accel_train.metrics.scores import segmentation_scores
from accel_train.metrics.tally import confusion_counts
from accel_train.model.kernels.loss_by_source import count_losses
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Scores, TaskData, Tensors, Totals
from accel_train.tasks.common.classification import ClassLoss, resolve_class_weights
from accel_train.tasks.common.image_views import at_label_size, mean_pixel_probabilities, one_at_a_time
from accel_train.tasks.common.vision import ImageSource, VisionTask, image_logits
from accel_train.tasks.semantic_segmentation import data as segmentation
from accel_train.tasks.semantic_segmentation.config import SPEC, SemanticSegmentationData

_BASELINE_MASKS = 2_000


class SemanticSegmentation(VisionTask):
    """Train SegFormer, UPerNet, MobileNet, and similar models from random or pretrained weights."""

    spec = SPEC
    counts_sources = True

    factory, models = AutoModelForSemanticSegmentation, MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING
    purpose, predicts_pixels = "semantic segmentation", True
    resizes_whole_images = True
    example = """\
sizes = [(image.height, image.width)]
mask = processor.post_process_semantic_segmentation(model(**inputs), target_sizes=sizes)[0]
print(mask.shape, mask.unique())"""

    def train_size(self, recipe: Recipe) -> Size:
        """Return the size of the training crops."""
        return SemanticSegmentationData.of(recipe.data).crop_size or super().train_size(recipe)

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read folders of images and masks, tables, arrays, or the embedded scenes. Pairs are decoded when drawn."""
        data = SemanticSegmentationData.of(recipe.data)
        source, notes = self.read_images(recipe, segmentation.read_masked_images)
        sets, preprocessing = source.sets, source.preprocessing
        num_classes = len(sets.label_names)
        if num_classes > 255:
            raise ValueError(f"data.label_names has {num_classes} classes; a mask's pixels tell 255 apart")
        self.ignore_index = data.ignore_index
        settings = segmentation.SegmentSettings(
            preprocessing, self.train_size(recipe), num_classes, data.ignore_index, data.augment
        )
        train = segmentation.SegmentationCrops(sets.train, settings)
        evaluation = None if sets.eval is None else segmentation.SegmentationImages(sets.eval, settings)
        try_samples(train, data.max_broken)
        try_samples(evaluation or [], 0)
        # Only balanced weights depend on the data, and counting reads all masks.
        counts = np.zeros(256, np.int64)
        if recipe.loss.class_weights == "balanced":
            counts = segmentation.count_pixels(sets.train, None, data.max_broken)
        counts[data.ignore_index] = 0
        weights = resolve_class_weights(recipe.loss.class_weights, counts[:num_classes], sets.label_names)
        self.loss = ClassLoss(recipe.loss.label_smoothing, weights, data.ignore_index)
        return TaskData(
            train=train,
            eval=evaluation,
            collate=partial(segmentation.collate_segments, preprocessing=preprocessing, ignore_index=data.ignore_index),
            fingerprint=sets.identity,
            settings={"data.preprocessing": preprocessing.changed_fields()},
            first_fingerprint=text_digest([sets.identity, first_repr(settings)]),
            facts=source.facts(notes, crop_size=settings.crop_size),
            source=source,
            max_broken=data.max_broken,
            draw=train.draw,
            where=sets.train.where,
        )

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy summed over pixels that are not ignored.

        Training adds smoothing and class weights.
        """
        logits = at_label_size(image_logits(model, batch["pixel_values"]), batch)
        labels, loss_sum = batch["labels"].long(), partial(self.loss, training=model.training)
        count_losses(model, self.counted, loss_sum, logits, labels, ignored=self.loss.ignore_index)
        return loss_sum(logits, labels)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss and the confusion matrix of pixels, at the size of the masks.

        With test-time augmentation, also return the confusion matrix of the averaged predictions.
        """
        logits = self.whole_logits(model, batch["pixel_values"])
        views, num_classes = self.views(model, batch["pixel_values"], logits), logits.shape[1]
        counts: Tensors = {}
        for own, image in one_at_a_time(batch):
            full, labels = at_label_size(logits[own], image), image["labels"].long()
            # `ignore_index` may be the number of a class, so ignored pixels become -1.
            known = torch.where(labels == self.ignore_index, -1, labels)
            found = {
                "loss_sum": self.loss(full, labels, training=False),
                "confusion": confusion_counts(known, full.argmax(1), num_classes),
            }
            del full
            if self.test_time is not None:
                averaged = mean_pixel_probabilities([view[own] for view in views], image)
                found["confusion_averaged"] = confusion_counts(known, averaged.argmax(1), num_classes)
            counts = {name: counts[name] + value if name in counts else value for name, value in found.items()}
        return counts

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return the mean intersection over union of the classes that occur, and the pixel accuracy."""
        names = data.source.label_names
        scores = segmentation_scores(totals["confusion"], names)
        if "confusion_averaged" not in totals:
            return scores
        averaged = segmentation_scores(totals["confusion_averaged"], names).metrics
        compared = {"without": dict(scores.metrics), "with": dict(averaged)}
        return Scores(scores.metrics, {**scores.details, "test_time_augmentation": compared})

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the likeliest class of each pixel as `mask`, at the size of the masks, with `height` and `width`.

        In a batch with masks of several sizes, pixels beyond a mask's own height and width are 255.
        """
        logits = self.whole_logits(model, batch["pixel_values"])
        views = self.views(model, batch["pixel_values"], logits)
        masks = []
        for own, image in one_at_a_time(batch):
            if self.test_time is None:
                full = at_label_size(logits[own], image)
            else:
                full = mean_pixel_probabilities([view[own] for view in views], image)
            masks.append(full.argmax(1).to(torch.uint8))
            del full
        mask = torch.cat(masks)
        size = mask.new_tensor(mask.shape[-2:], dtype=torch.int64).expand(len(mask), 2)
        height, width = batch.get("label_sizes", size).long().unbind(1)
        down, right = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
        inside = (down[None, :, None] < height[:, None, None]) & (right[None, None, :] < width[:, None, None])
        return {"mask": mask.where(inside, 255), "height": height, "width": width}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of the commonest training class as the answer for every pixel, on at most 2,000 masks."""
        source: ImageSource = data.source
        if source.sets.eval is None:
            return {}
        num_classes = len(source.label_names)
        counts = [
            segmentation.count_pixels(pairs, _BASELINE_MASKS, data.max_broken)
            for pairs in (source.sets.train, source.sets.eval)
        ]
        for count in counts:
            count[self.ignore_index] = 0
        confusion = np.zeros((num_classes, num_classes), np.int64)
        confusion[:, counts[0][:num_classes].argmax()] = counts[1][:num_classes]
        metrics = segmentation_scores(confusion, source.label_names).metrics
        return {f"majority_{name}": metrics[name] for name in self.spec.metrics}
