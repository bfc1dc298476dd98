"""Image classification: one class for each image, with any image classifier of transformers."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification, PreTrainedModel

from accel_train.data.augment import check_augment
from accel_train.data.image_samples import ClassificationImages, ImageSource, collate_images, draw_sample
from accel_train.data.images import text_digest
from accel_train.data.labelled_images import ImageSets, read_labelled_images
from accel_train.data.vision import Preprocessing, model_preprocessing, note_of_lost_colours
from accel_train.metrics import METRICS, load_metric
from accel_train.metrics.scores import auroc_from_histogram, classification_scores
from accel_train.metrics.tally import confusion_counts, histogram_bits, one_vs_rest_log_odds, score_histogram
from accel_train.recipe import Evaluate, Recipe
from accel_train.recipe_data import Augment
from accel_train.task import Scores, TaskData
from accel_train.tasks.causal_lm import quiet_bars
from accel_train.tasks.classification_loss import classification_loss_sum, resolve_class_weights
from accel_train.tasks.image_baselines import image_baselines
from accel_train.tasks.test_time import check_scales, mean_probabilities
from accel_train.tasks.vision_models import (
    build_vision_model,
    check_image_size,
    flops_per_image,
    image_logits,
    refusal_of_size,
    vision_config,
    with_labels,
)

_TOP_5_FROM_CLASSES = 11
"""With ten classes or fewer, one of the likeliest five is no achievement."""


class ImageClassification:
    """ResNets, vision transformers and their like, from random or pretrained weights."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Class folders, tables, arrays or the embedded digits; images are decoded when they are drawn."""
        data, settings = recipe.data, recipe.data.augment
        check_augment(settings)
        _check_metrics(recipe.evaluate)
        self.evaluation = recipe.evaluate
        config = vision_config(recipe, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, "image classification")
        preprocessing, notes = model_preprocessing(recipe, config)
        known_names = tuple(config.id2label.values()) if recipe.model.pretrained is not None else None
        sets = read_labelled_images(data, known_names)
        notes += note_of_lost_colours(sets.train.images, preprocessing)
        counts = np.bincount(sets.train.labels[sets.train.labels >= 0], minlength=len(sets.label_names))
        self.class_weights = None
        if sets.train is not sets.eval:  # else nothing is trained, and a class may be missing
            weights = resolve_class_weights(recipe.loss.class_weights, counts, sets.label_names)
            self.class_weights = None if weights is None else torch.tensor(weights)
        self.label_smoothing = recipe.loss.label_smoothing
        if "auroc" in recipe.evaluate.metrics and histogram_bits(len(sets.label_names)) is None:
            raise ValueError(f"evaluate.metrics: auroc is for 4,096 classes at most, there are {len(sets.label_names)}")
        self._prepare_test_time(recipe, with_labels(config, sets.label_names), preprocessing)
        train = ClassificationImages(sets.train, preprocessing)
        seen_as_it_is = settings == Augment(random_resized_crop=None, horizontal_flip=0.0)
        return TaskData(
            train=train,
            eval=None if sets.eval is None else ClassificationImages(sets.eval, preprocessing),
            collate=partial(collate_images, preprocessing=preprocessing, num_classes=len(sets.label_names)),
            fingerprint=text_digest([sets.identity, repr(preprocessing), settings.model_dump_json()]),
            facts={
                "sources": sets.description,
                "num_train": len(sets.train),
                "num_eval": 0 if sets.eval is None else len(sets.eval),
                "label_names": list(sets.label_names),
                "num_train_of_label": dict(zip(sets.label_names, counts.tolist())),
                "image_size": data.image_size,
                "mean": list(preprocessing.mean),
                "std": list(preprocessing.std),
                "notes": [*notes, *sets.notes],
            },
            reading_is_free=sets.decoded and seen_as_it_is,
            source=ImageSource(sets, preprocessing),
            draw=None if seen_as_it_is else partial(draw_sample, train, settings),
            where=sets.train.where,
        )

    def _prepare_test_time(self, recipe: Recipe, config: Any, preprocessing: Preprocessing) -> None:
        """Find out, before training, whether the model can be shown the scales that the recipe averages over."""
        settings, self.takes_any_size = recipe.evaluate.test_time_augmentation, True
        if settings is None:
            return
        sizes = [round(preprocessing.image_size * scale) for scale in settings.scales if scale != 1]
        channels = len(preprocessing.mean)
        refusals = (refusal_of_size(config, AutoModelForImageClassification, channels, size) for size in sizes)
        self.takes_any_size = all(refusal is None for refusal in refusals)
        check_scales(settings, takes_any_size=self.takes_any_size)

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """The classifier of the recipe, with a head for the classes of the data.

        Raises:
            ValueError: it cannot be loaded, classifies no images, or does not take data.image_size.
        """
        source: ImageSource = data.source
        config = vision_config(recipe, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, "image classification")
        config = with_labels(config, source.label_names)
        channels = len(source.preprocessing.mean)
        check_image_size(config, AutoModelForImageClassification, channels, recipe.data.image_size)
        model, notes = build_vision_model(recipe, config, AutoModelForImageClassification)
        data.facts["notes"] += [note for note in notes if note not in data.facts["notes"]]
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy summed over images, in fp32; in training with smoothing, class weights and mixed labels."""
        logits = image_logits(model, batch["pixel_values"])
        labels = batch["labels"] if "labels" in batch else batch["soft_labels"]
        if not model.training:
            return cross_entropy(logits.float(), labels, reduction="sum")
        if self.class_weights is not None and self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(logits.device)  # once: a copy a step would wait for the device
        return classification_loss_sum(
            logits, labels, label_smoothing=self.label_smoothing, class_weights=self.class_weights
        )

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """3 x the convolutions and matrix products of one image's forward pass, counted on a copy without weights."""
        assert isinstance(model, PreTrainedModel)
        channels = getattr(model.config, "num_channels", 3)
        return flops_per_image(model.config, AutoModelForImageClassification, channels, recipe.data.image_size)

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss and confusion matrix; with test-time augmentation a second matrix; more where further metrics ask for it."""
        pixel_values, labels = batch["pixel_values"], batch["labels"]
        logits = image_logits(model, pixel_values)
        num_classes = logits.shape[-1]
        predictions = logits.argmax(-1)
        counts = {
            "loss_sum": cross_entropy(logits.float(), labels, reduction="sum"),
            "confusion": confusion_counts(labels, predictions, num_classes),
        }
        if num_classes >= _TOP_5_FROM_CLASSES:
            counts["top_5"] = (logits.topk(5).indices == labels[:, None]).sum()
        if self.evaluation.test_time_augmentation is not None:
            averaged = self._mean_probabilities(model, pixel_values, logits)
            counts["confusion_averaged"] = confusion_counts(labels, averaged.argmax(-1), num_classes)
        names = set(self.evaluation.metrics)
        if "auroc" in names:
            histogram = score_histogram(one_vs_rest_log_odds(logits), labels, num_classes)
            assert histogram is not None, "load_data refuses so many classes"
            counts["scores"] = histogram
        if names - {"auroc"}:
            counts["rows_predictions"], counts["rows_labels"] = predictions, labels
        return counts

    def _mean_probabilities(self, model: nn.Module, pixel_values: Tensor, logits: Tensor) -> Tensor:
        settings = self.evaluation.test_time_augmentation
        if settings is None:
            return logits.float().softmax(-1)
        return mean_probabilities(
            partial(image_logits, model), pixel_values, logits, settings, takes_any_size=self.takes_any_size
        )

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Accuracy, precision, recall, F1 and Matthews' correlation; top-5 accuracy of 11 classes or more."""
        names = data.source.label_names
        scores = classification_scores(totals["confusion"], names)
        metrics, details = dict(scores.metrics), dict(scores.details)
        if "top_5" in totals:
            metrics["top_5_accuracy"] = float(totals["top_5"] / max(1, totals["confusion"].sum()))
        if "scores" in totals:
            metrics["auroc"] = auroc_from_histogram(totals["scores"])
        for name in self.evaluation.metrics:
            if name != "auroc":
                metric = load_metric(name, allow_hub=self.evaluation.allow_hub_metrics)
                found = metric.compute(predictions=totals["rows_predictions"], references=totals["rows_labels"])
                metrics |= {key: float(value) for key, value in found.items() if np.ndim(value) == 0}
        if "confusion_averaged" in totals:
            averaged = classification_scores(totals["confusion_averaged"], names).metrics
            details["test_time_augmentation"] = {"without": dict(scores.metrics), "with": dict(averaged)}
        return Scores(metrics, details)

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The likeliest class and the probabilities: means over all views, where the recipe has test-time augmentation."""
        pixel_values = batch["pixel_values"]
        scores = self._mean_probabilities(model, pixel_values, image_logits(model, pixel_values))
        score, label = scores.max(-1)
        return {"label": label, "score": score, "scores": scores}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """The share of the commonest class, and logistic regression on thumbnails."""
        sets: ImageSets = data.source.sets
        return {} if sets.eval is None else image_baselines(sets.train, sets.eval)

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """config.json and preprocessor_config.json."""
        assert isinstance(model, PreTrainedModel)
        model.config.save_pretrained(folder)
        data.source.preprocessing.save(folder)

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Weights, configuration and image processor in transformers' own layout, and a short model card."""
        assert isinstance(model, PreTrainedModel)
        with quiet_bars():
            model.save_pretrained(folder)
        data.source.preprocessing.save(folder)
        (folder / "README.md").write_text(_card(model, data), encoding="utf-8")

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        """Nothing to read."""
        return None


_NOT_OF_CLASSES = frozenset(("mean_iou", "perplexity", "pearson", "spearman"))


def _check_metrics(section: Evaluate) -> None:
    """Refuse what cannot be computed of classes before hours of training end in it."""
    for name in section.metrics:
        if name in _NOT_OF_CLASSES:
            raise ValueError(
                f"evaluate.metrics: {name!r} is not for classes; accuracy, f1_macro, mcc and auroc are among those that are"
            )
        if name not in METRICS:
            load_metric(name, allow_hub=section.allow_hub_metrics)


def _card(model: PreTrainedModel, data: TaskData) -> str:
    facts, size = data.facts, data.source.preprocessing.image_size
    names = data.source.label_names
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more (config.json)" if len(names) > 20 else "")
    grey = data.source.preprocessing.mode == "L"
    how_to_read = f'image = Image.open("AN IMAGE").convert("{data.source.preprocessing.mode}")'
    only = " It takes one channel: images are made grey, which `pipeline()` does not do." if grey else ""
    return f"""---
library_name: transformers
pipeline_tag: image-classification
tags: [image-classification, accel_train]
---
# {type(model).__name__}

An image classifier of {len(names)} classes: {listed}.
It takes images of {size} x {size} pixels; `preprocessor_config.json` says how they are made.{only}

Trained with accel_train on {facts["num_train"]:,} images ({facts["sources"]}), and evaluated on {facts["num_eval"]:,}.

```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("PATH OF THIS FOLDER")
processor = AutoImageProcessor.from_pretrained("PATH OF THIS FOLDER")
{how_to_read}
scores = model(**processor(image, return_tensors="pt")).logits.softmax(-1)[0]
print(model.config.id2label[int(scores.argmax())], float(scores.max()))
```
"""
