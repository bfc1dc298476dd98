"""Image classification: predict one class per image with any image classifier of transformers."""

import warnings
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoModelForImageClassification

from accel_train.core.errors import DataError
from accel_train.data.images.decoding import to_mode
from accel_train.data.images.first_format import FIELDS, first_repr
from accel_train.data.images.images import evenly_spaced, text_digest
from accel_train.data.images.labelled import ImageRows, ImageSets
from accel_train.metrics import METRICS, fits, load_metric, tally
from accel_train.metrics.scores import auroc_from_histogram, classification_scores
from accel_train.model.kernels.loss_by_source import count_losses
from accel_train.recipe.data import Augment
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Scores, TaskData, Tensors, Totals
from accel_train.tasks.common import classification
from accel_train.tasks.common.vision import VisionTask, image_logits
from accel_train.tasks.image_classification.config import SPEC, ImageClassificationData
from accel_train.tasks.image_classification.data import (
    ClassificationImages,
    collate_images,
    draw_sample,
    read_labelled_images,
)
from accel_train.tasks.rows import likeliest

_TOP_5_FROM_CLASSES = 11
"""Number of classes from which top-5 accuracy is reported. With ten or fewer, it is too easy."""
_BASELINE_IMAGES = 2_000
"""Images per split that baselines read, evenly spaced. Decoding them takes a few seconds."""
_THUMBNAIL_EDGE = 8


class ImageClassification(VisionTask):
    """Train ResNets, vision transformers, and similar models from random or pretrained weights."""

    spec = SPEC
    counts_sources = True

    factory, models = AutoModelForImageClassification, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    purpose, predicts_pixels = "image classification", False
    resizes_whole_images = False
    example = """\
scores = model(**inputs).logits.softmax(-1)[0]
print(model.config.id2label[int(scores.argmax())], scores.max().item())"""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read class folders, tables, arrays, or the embedded digits. Images are decoded when they are drawn."""
        data = ImageClassificationData.of(recipe.data)
        settings = data.augment
        if not isinstance(data.image_size, int):
            raise ValueError(
                f"data.image_size={list(data.image_size)}: image-classification cuts squares out of images; "
                "give one number"
            )
        for name in recipe.evaluate.metrics:
            if name not in METRICS:
                load_metric(name, allow_hub=recipe.evaluate.allow_hub_metrics)
            elif not fits(name, "single_label"):
                raise ValueError(
                    f"evaluate.metrics: {name!r} is not for classes; "
                    "accuracy, f1_macro, mcc and auroc are among those that are"
                )
        self.evaluation = recipe.evaluate
        source, notes = self.read_images(recipe, read_labelled_images)
        sets, preprocessing = source.sets, source.preprocessing
        counts = np.bincount(sets.train.labels[sets.train.labels >= 0], minlength=len(sets.label_names))
        weights = None
        # If both are the same set, nothing is trained, and a class may be missing.
        if sets.train is not sets.eval:
            weights = classification.resolve_class_weights(recipe.loss.class_weights, counts, sets.label_names)
        self.loss = classification.ClassLoss(recipe.loss.label_smoothing, weights)
        if "auroc" in recipe.evaluate.metrics and tally.histogram_bits(len(sets.label_names)) is None:
            raise ValueError(f"evaluate.metrics: auroc is for 4,096 classes at most, there are {len(sets.label_names)}")
        train = ClassificationImages(sets.train, preprocessing)
        seen_as_it_is = settings == Augment(random_resized_crop=None, horizontal_flip=0.0)
        facts = source.facts(notes)
        facts.num_train_of_label = dict(zip(sets.label_names, counts.tolist()))
        return TaskData(
            train=train,
            eval=None if sets.eval is None else ClassificationImages(sets.eval, preprocessing),
            collate=partial(collate_images, preprocessing=preprocessing, num_classes=len(sets.label_names)),
            fingerprint=sets.identity,
            settings={"data.preprocessing": preprocessing.changed_fields()},
            first_fingerprint=text_digest(
                [sets.identity, first_repr(preprocessing), settings.model_dump_json(include=set(FIELDS["Augment"]))]
            ),
            facts=facts,
            reading_is_free=sets.decoded and seen_as_it_is,
            source=source,
            max_broken=data.max_broken,
            draw=None if seen_as_it_is else partial(draw_sample, train, settings),
            where=sets.train.where,
        )

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy summed over images. Training adds smoothing, weights, and mixed labels."""
        logits = image_logits(model, batch["pixel_values"])
        labels = batch["labels"] if "labels" in batch else batch["soft_labels"]
        loss_sum = partial(self.loss, training=model.training)
        count_losses(model, self.counted, loss_sum, logits, labels)
        return loss_sum(logits, labels)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss, the confusion matrix, and counts for further metrics and test-time augmentation."""
        pixel_values, labels = batch["pixel_values"], batch["labels"]
        logits = image_logits(model, pixel_values)
        num_classes = logits.shape[-1]
        predictions = logits.argmax(-1)
        counts = {
            "loss_sum": self.loss(logits, labels, training=False),
            "confusion": tally.confusion_counts(labels, predictions, num_classes),
        }
        if num_classes >= _TOP_5_FROM_CLASSES:
            counts["top_5"] = (logits.topk(5).indices == labels[:, None]).sum()
        if self.test_time is not None:
            averaged = self._mean_probabilities(model, pixel_values, logits)
            counts["confusion_averaged"] = tally.confusion_counts(labels, averaged.argmax(-1), num_classes)
        names = set(self.evaluation.metrics)
        if "auroc" in names:
            histogram = tally.score_histogram(tally.one_vs_rest_log_odds(logits), labels, num_classes)
            assert histogram is not None, "load_data refuses so many classes"
            counts["scores"] = histogram
        if names - {"auroc"}:
            counts["rows_predictions"], counts["rows_labels"] = predictions, labels
        return counts

    def _mean_probabilities(self, model: nn.Module, pixel_values: Tensor, logits: Tensor) -> Tensor:
        """Return mean probabilities (N, C) over all views, in fp32. `logits` belong to the unaugmented images."""
        views = self.views(model, pixel_values, logits)
        return torch.stack([each.float().softmax(-1) for each in views]).mean(0)

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return accuracy, precision, recall, F1, and Matthews' correlation, with top-5 accuracy from 11 classes."""
        names = data.source.label_names
        scores = classification_scores(totals["confusion"], names)
        metrics, details = dict(scores.metrics), dict(scores.details)
        if "top_5" in totals:
            metrics["top_5_accuracy"] = float(totals["top_5"] / max(1, totals["confusion"].sum()))
        if "scores" in totals:
            metrics["auroc"] = auroc_from_histogram(totals["scores"])
        further = [name for name in self.evaluation.metrics if name != "auroc"]
        metrics |= classification.row_metrics(further, totals, allow_hub=self.evaluation.allow_hub_metrics)
        if "confusion_averaged" in totals:
            averaged = classification_scores(totals["confusion_averaged"], names).metrics
            details["test_time_augmentation"] = {"without": dict(scores.metrics), "with": dict(averaged)}
        return Scores(metrics, details)

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the likeliest class and all probabilities, averaged over all views with test-time augmentation."""
        pixel_values = batch["pixel_values"]
        return likeliest(self._mean_probabilities(model, pixel_values, image_logits(model, pixel_values)))

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the accuracy of the commonest class and of logistic regression on 8 x 8 gray thumbnails."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        sets: ImageSets = data.source.sets
        if sets.eval is None:
            return {}
        majority = int(np.bincount(sets.train.labels).argmax())
        found = {"majority_accuracy": float((sets.eval.labels == majority).mean())}
        inputs, labels = _thumbnails(sets.train)
        if len(np.unique(labels)) < 2:
            return found
        mean, scale = inputs.mean(0), inputs.std() + 1e-6
        with warnings.catch_warnings():
            # A baseline does not have to converge.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(max_iter=200).fit((inputs - mean) / scale, labels)
        inputs, labels = _thumbnails(sets.eval)
        found["logistic_regression_accuracy"] = float((model.predict((inputs - mean) / scale) == labels).mean())
        return found


def _thumbnails(images: ImageRows) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return (n, 64) gray values in [0, 1] and (n,) labels of at most _BASELINE_IMAGES of the images."""
    chosen = evenly_spaced(len(images), _BASELINE_IMAGES)
    size = (_THUMBNAIL_EDGE, _THUMBNAIL_EDGE)
    rows, labels = [], []
    for index in chosen:
        with suppress(DataError):  # counted in training
            image = to_mode(images.image(index), "L", images.where(index)).resize(size)
            rows.append(np.asarray(image, dtype=np.float32))
            labels.append(images.labels[index])
    return np.stack(rows).reshape(len(rows), -1) / np.float32(255), np.array(labels)
