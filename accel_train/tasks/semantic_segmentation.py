"""Semantic segmentation: a class for each pixel, with any segmentation model of transformers."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING,
    AutoModelForSemanticSegmentation,
    PreTrainedConfig,
    PreTrainedModel,
)

from accel_train.data.augment import check_augment
from accel_train.data.images import text_digest
from accel_train.data.masked_images import try_pairs
from accel_train.data.masks import read_masked_images
from accel_train.data.segment_augment import check_segment_augment
from accel_train.data.segment_samples import (
    SegmentationCrops,
    SegmentationImages,
    SegmentSettings,
    SegmentSource,
    collate_segments,
)
from accel_train.data.vision import Preprocessing, model_preprocessing, note_of_lost_colours
from accel_train.metrics.scores import segmentation_scores
from accel_train.metrics.tally import confusion_counts
from accel_train.recipe import Recipe
from accel_train.task import Scores, TaskData
from accel_train.tasks.causal_lm import quiet_bars
from accel_train.tasks.classification_loss import resolve_class_weights
from accel_train.tasks.segmentation_maps import (
    at_label_size,
    mean_pixel_probabilities,
    one_at_a_time,
    pixel_loss_sum,
    view_logits,
)
from accel_train.tasks.test_time import check_scales
from accel_train.tasks.vision_models import (
    build_vision_model,
    check_image_size,
    flops_per_image,
    image_logits,
    refusal_of_size,
    vision_config,
    with_labels,
)

_OWN_METRICS = ("mean_iou", "pixel_accuracy")
_BASELINE_MASKS = 2_000


class SemanticSegmentation:
    """SegFormer, UPerNet, MobileNet and their like, from random or pretrained weights."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Folders of images and masks, tables, arrays or the embedded scenes; decoded when they are drawn."""
        data = recipe.data
        check_augment(data.augment)
        check_segment_augment(data.augment)
        for name in recipe.evaluate.metrics:
            if name not in _OWN_METRICS:
                raise ValueError(
                    f"evaluate.metrics: {name!r} is not for masks; {' and '.join(_OWN_METRICS)} are reported"
                )
        config, notes = segmentation_config(recipe)
        preprocessing, preprocessing_notes = model_preprocessing(recipe, config)
        sets = read_masked_images(data, tuple(config.id2label.values()) if recipe.model.pretrained else None)
        preprocessing_notes += note_of_lost_colours(sets.train.images, preprocessing)
        num_classes = len(sets.label_names)
        if num_classes > 255:
            raise ValueError(f"data.label_names has {num_classes} classes; a mask's pixels tell 255 apart")
        self.ignore_index, self.label_smoothing = data.ignore_index, recipe.loss.label_smoothing
        settings = SegmentSettings(
            preprocessing, data.crop_size or data.image_size, num_classes, data.ignore_index, data.augment
        )
        for pairs in (sets.train, sets.eval):
            if pairs is not None:
                try_pairs(pairs, preprocessing.mode, num_classes, data.ignore_index)
        self.class_weights = None
        if recipe.loss.class_weights is not None:
            counts = sets.train.count_pixels() if recipe.loss.class_weights == "balanced" else np.zeros(256, np.int64)
            counts[data.ignore_index] = 0
            weights = resolve_class_weights(recipe.loss.class_weights, counts[:num_classes], sets.label_names)
            self.class_weights = torch.tensor(weights)
        self._prepare_test_time(recipe, with_labels(config, sets.label_names), preprocessing)
        train = SegmentationCrops(sets.train, settings)
        return TaskData(
            train=train,
            eval=None if sets.eval is None else SegmentationImages(sets.eval, settings),
            collate=partial(collate_segments, preprocessing=preprocessing, ignore_index=data.ignore_index),
            fingerprint=text_digest([sets.identity, repr(settings)]),
            facts={
                "sources": sets.description,
                "num_train": len(sets.train),
                "num_eval": 0 if sets.eval is None else len(sets.eval),
                "label_names": list(sets.label_names),
                "image_size": data.image_size,
                "crop_size": settings.crop_size,
                "mean": list(preprocessing.mean),
                "std": list(preprocessing.std),
                "notes": [*notes, *preprocessing_notes, *sets.notes],
            },
            source=SegmentSource(sets, settings),
            draw=train.draw,
            where=lambda index: sets.train.images.where(int(sets.train.rows[index])),
        )

    def _prepare_test_time(self, recipe: Recipe, config: PreTrainedConfig, preprocessing: Preprocessing) -> None:
        """Find out, before training, whether the model can be shown the scales that the recipe averages over."""
        self.test_time = recipe.evaluate.test_time_augmentation
        if self.test_time is None:
            return
        check_scales(self.test_time, takes_any_size=True)
        for scale in self.test_time.scales:
            size = round(preprocessing.image_size * scale)
            reason = refusal_of_size(config, AutoModelForSemanticSegmentation, len(preprocessing.mean), size)
            if scale != 1 and reason is not None:
                raise ValueError(
                    f"evaluate.test_time_augmentation.scales: {scale:g} makes images of {size} x {size} pixels, which "
                    f"{config.model_type!r} does not take ({reason}); leave it out"
                )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """The segmentation model of the recipe, with a head for the classes of the data.

        Raises:
            ValueError: it cannot be loaded, segments no images, or does not take data.image_size or data.crop_size.
        """
        source: SegmentSource = data.source
        config, _ = segmentation_config(recipe)
        config = with_labels(config, source.label_names)
        for size in {recipe.data.image_size, source.settings.crop_size}:
            check_image_size(config, AutoModelForSemanticSegmentation, len(source.settings.preprocessing.mean), size)
        model, notes = build_vision_model(recipe, config, AutoModelForSemanticSegmentation)
        data.facts["notes"] += [note for note in notes if note not in data.facts["notes"]]
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over the pixels that are not ignored, in fp32; in training with smoothing and class weights."""
        logits = at_label_size(image_logits(model, batch["pixel_values"]), batch)
        labels = batch["labels"].long()
        if not model.training:
            return pixel_loss_sum(logits, labels, ignore_index=self.ignore_index)
        if self.class_weights is not None and self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(logits.device)  # once: a copy a step would wait for the device
        return pixel_loss_sum(
            logits,
            labels,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            class_weights=self.class_weights,
        )

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """3 x the convolutions and matrix products of a crop's forward pass, for each of its pixels."""
        assert isinstance(model, PreTrainedModel)
        size, channels = recipe.data.crop_size or recipe.data.image_size, getattr(model.config, "num_channels", 3)
        flops = flops_per_image(model.config, AutoModelForSemanticSegmentation, channels, size)
        return None if flops is None else flops / size**2

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss and confusion matrix of pixels, at the masks' own size; with test-time augmentation a second matrix."""
        logits = image_logits(model, batch["pixel_values"])
        views, num_classes = self._views(model, batch, logits), logits.shape[1]
        counts: dict[str, Tensor] = {}
        for own, image in one_at_a_time(batch):
            full, labels = at_label_size(logits[own], image), image["labels"].long()
            known = torch.where(labels == self.ignore_index, -1, labels)  # it may be the number of a class
            found = {
                "loss_sum": pixel_loss_sum(full, labels, ignore_index=self.ignore_index),
                "confusion": confusion_counts(known, full.argmax(1), num_classes),
            }
            del full
            if views:
                averaged = mean_pixel_probabilities([view[own] for view in views], image)
                found["confusion_averaged"] = confusion_counts(known, averaged.argmax(1), num_classes)
            counts = {name: counts[name] + value if name in counts else value for name, value in found.items()}
        return counts

    def _views(self, model: nn.Module, batch: Mapping[str, Tensor], logits: Tensor) -> list[Tensor]:
        """The coarse logits to average over; none without test-time augmentation."""
        if self.test_time is None:
            return []
        return view_logits(partial(image_logits, model), logits, batch["pixel_values"], self.test_time)

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Mean intersection over union of the classes that occur, and the share of right pixels."""
        names = data.source.label_names
        scores = segmentation_scores(totals["confusion"], names)
        if "confusion_averaged" not in totals:
            return scores
        averaged = segmentation_scores(totals["confusion_averaged"], names).metrics
        compared = {"without": dict(scores.metrics), "with": dict(averaged)}
        return Scores(scores.metrics, {**scores.details, "test_time_augmentation": compared})

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The likeliest class of each pixel, at the mask's own size; where sizes differ, 255 beyond `height` and `width`."""
        logits = image_logits(model, batch["pixel_values"])
        views = self._views(model, batch, logits)
        masks = []
        for own, image in one_at_a_time(batch):
            each = [view[own] for view in views]
            full = mean_pixel_probabilities(each, image) if views else at_label_size(logits[own], image)
            masks.append(full.argmax(1).to(torch.uint8))
            del full
        mask = torch.cat(masks)
        if "label_sizes" not in batch:
            height, width = (mask.new_full((len(mask),), size, dtype=torch.int64) for size in mask.shape[-2:])
            return {"mask": mask, "height": height, "width": width}
        height, width = batch["label_sizes"].long().unbind(1)
        down, right = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
        inside = (down[None, :, None] < height[:, None, None]) & (right[None, None, :] < width[:, None, None])
        return {"mask": mask.where(inside, 255), "height": height, "width": width}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """What calling every pixel the commonest class of the training masks gives; of 2,000 masks at most."""
        source: SegmentSource = data.source
        if source.sets.eval is None:
            return {}
        num_classes = source.settings.num_classes
        counts = [pairs.count_pixels(_BASELINE_MASKS) for pairs in (source.sets.train, source.sets.eval)]
        for count in counts:
            count[self.ignore_index] = 0
        confusion = np.zeros((num_classes, num_classes), np.int64)
        confusion[:, counts[0][:num_classes].argmax()] = counts[1][:num_classes]
        metrics = segmentation_scores(confusion, source.label_names).metrics
        return {f"majority_{name}": metrics[name] for name in _OWN_METRICS}

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """config.json and preprocessor_config.json."""
        assert isinstance(model, PreTrainedModel)
        model.config.save_pretrained(folder)
        save_preprocessing(data.source.settings.preprocessing, folder)

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Weights, configuration and image processor in transformers' own layout, and a short model card."""
        assert isinstance(model, PreTrainedModel)
        with quiet_bars():
            model.save_pretrained(folder)
        save_preprocessing(data.source.settings.preprocessing, folder)
        (folder / "README.md").write_text(_card(model, data), encoding="utf-8")

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        """Nothing to read."""
        return None


def segmentation_config(recipe: Recipe) -> tuple[PreTrainedConfig, list[str]]:
    """The configuration of the recipe's model, and notes on it.

    Auxiliary heads (of UPerNet, BEiT, DPT) are left out: transformers hands out no logits of theirs, so nothing would train
    them, and processes would wait for their gradients.
    """
    config = vision_config(recipe, MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING, "semantic segmentation")
    if not getattr(config, "use_auxiliary_head", False):
        return config, []
    config.use_auxiliary_head = False
    return config, ["the model's auxiliary head is left out: the loss is that of its last logits"]


def save_preprocessing(preprocessing: Preprocessing, folder: Path) -> None:
    """preprocessor_config.json, with which transformers' AutoImageProcessor repeats what an evaluation image goes through."""
    settings = {
        "image_processor_type": "SegformerImageProcessor",
        "do_resize": True,
        "size": {"height": preprocessing.image_size, "width": preprocessing.image_size},
        "resample": int(preprocessing.resample),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
        "do_reduce_labels": False,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _card(model: PreTrainedModel, data: TaskData) -> str:
    facts, size = data.facts, data.source.settings.preprocessing.image_size
    names = data.source.label_names
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more (config.json)" if len(names) > 20 else "")
    return f"""---
library_name: transformers
pipeline_tag: image-segmentation
tags: [semantic-segmentation, accel_train]
---
# {type(model).__name__}

It gives each pixel of an image one of {len(names)} classes: {listed}.
Images are resized to {size} x {size} pixels; `preprocessor_config.json` says how.

Trained with accel_train on {facts["num_train"]:,} images ({facts["sources"]}), and evaluated on {facts["num_eval"]:,}.

```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation

model = AutoModelForSemanticSegmentation.from_pretrained("PATH OF THIS FOLDER")
processor = AutoImageProcessor.from_pretrained("PATH OF THIS FOLDER")
image = Image.open("AN IMAGE").convert("{data.source.settings.preprocessing.mode}")
outputs = model(**processor(image, return_tensors="pt"))
mask = processor.post_process_semantic_segmentation(outputs, target_sizes=[(image.height, image.width)])[0]
```
"""
