"""Text classification of texts or pairs: predict one of several labels, several labels at once, or a number."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from accel_train.data.labels import LabelScheme
from accel_train.data.text.padding import joined_arrays, samples_digest
from accel_train.metrics import METRICS, tally
from accel_train.metrics.scores import auroc_from_histogram, classification_scores, multilabel_scores, regression_scores
from accel_train.model.ngrams import NgramsForSequenceClassification
from accel_train.recipe.schema import Recipe
from accel_train.task import Scores, TaskData
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.encoder import Encoded, EncoderTask, Source, cut_notes, model_logits
from accel_train.tasks.text_classification import data as labelled
from accel_train.tasks.text_classification.config import TextClassificationData
from accel_train.tasks.text_classification.metrics import (
    baseline_scores,
    check_metrics,
    count_label_metrics,
    label_metrics,
)


class TextSource(Source[labelled.LabelledTexts]):
    """The labeled texts, tokenizer, and model configuration."""

    def shown(self, index: int) -> dict[str, Any]:
        """Return the text of an evaluation row for a report."""
        assert self.rows.eval is not None
        return {"text": "\n".join(self.rows.eval[index].texts)}


class TextClassification(EncoderTask[labelled.LabelledTexts]):
    """Fine-tune any sequence classifier of transformers, or train one from a configuration."""

    Data = TextClassificationData
    head = models.SEQUENCES
    collate = staticmethod(labelled.collate_texts)
    source_type = TextSource
    scheme: LabelScheme

    def read(self, recipe: Recipe) -> labelled.LabelledTexts:
        """Read the labeled texts, and check metrics and loss against the problem type."""
        texts = labelled.load_labelled_texts(recipe, models.known_names(recipe))
        self.scheme, self.label_names = texts.scheme, texts.scheme.names
        check_metrics(recipe, texts.scheme)
        _check_loss(recipe, texts.scheme)
        counts = np.array(list(texts.num_train_of_label.values()))
        weights = classification.resolve_class_weights(recipe.loss.class_weights, counts, texts.scheme.names)
        self.loss = classification.ClassLoss(recipe.loss.label_smoothing, weights)
        self.is_pair = len(TextClassificationData.of(recipe.data).text_columns) == 2
        names = recipe.evaluate.metrics
        is_multi_label = texts.scheme.problem_type == "multi_label"
        self.counted_metrics = [name for name in names if is_multi_label and name in METRICS]
        self.row_metrics = [name for name in names if name not in self.counted_metrics]
        self.allow_hub_metrics = recipe.evaluate.allow_hub_metrics
        return texts

    def texts(self, rows: labelled.LabelledTexts) -> Iterable[str]:
        """Return the training texts."""
        return (text for row in rows.train for text in row.texts)

    def encode(
        self, recipe: Recipe, rows: labelled.LabelledTexts, config: PreTrainedConfig, **settings: Any
    ) -> Encoded:
        """Tokenize the texts, and count those that are cut."""
        train = labelled.tokenize_rows(rows.train, rows.train_labels, **settings)
        evaluation = None if rows.eval is None else labelled.tokenize_rows(rows.eval, rows.eval_labels, **settings)
        facts = {
            "problem_type": f"{rows.scheme.problem_type} ({rows.scheme.reason})",
            "label_names": list(rows.scheme.names),
            "num_train_of_label": rows.num_train_of_label,
        }
        notes = cut_notes(train, settings["max_length"], recipe.data.of_training("texts"))
        return Encoded(train, evaluation, _fingerprint(rows.scheme, train, evaluation), facts, notes)

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's classifier. A new n-gram model measures how rare n-grams are in the training texts.

        Raises:
            ValueError: the weights cannot be loaded, or are not in the safetensors format.
        """
        model = super().build_model(recipe, data)
        if isinstance(model, NgramsForSequenceClassification) and recipe.model.config and not model.rarity.is_meta:
            model.measure_rarity(
                torch.as_tensor(sample.ids, dtype=torch.long) for sample in cast("list[labelled.Sample]", data.train)
            )
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the fp32 cross-entropy, binary cross-entropy, or squared error, summed over samples.

        Training adds label smoothing and class weights.
        """
        return self._loss_sum(model_logits(model, batch), batch["labels"], training=model.training)

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the summed loss without smoothing, and counts for the scores, or rows if a metric needs them."""
        logits, labels = model_logits(model, batch).float(), batch["labels"]
        counted = {"loss_sum": self._loss_sum(logits, labels, training=False)}
        if self.scheme.problem_type == "regression":
            return {**counted, "rows_predictions": logits.squeeze(-1), "rows_labels": labels}
        if self.scheme.problem_type == "multi_label":
            predictions = (logits > 0).long()
            counted["counts"] = tally.multilabel_counts(labels.long(), predictions)
            counted |= count_label_metrics(self.counted_metrics, logits, labels)
            scores = logits.sigmoid()
        else:
            scores, predictions, num_classes = logits.softmax(dim=-1), logits.argmax(dim=-1), logits.shape[-1]
            counted["confusion"] = tally.confusion_counts(labels, predictions, num_classes)
            histogram = tally.score_histogram(tally.one_vs_rest_log_odds(logits), labels, num_classes)
            if histogram is not None:
                counted["histogram"] = histogram
        if self.row_metrics:
            counted |= {"rows_predictions": predictions, "rows_labels": labels, "rows_scores": scores}
        return counted

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Return accuracy, precision, recall, F1, Matthews' correlation, and AUROC, or the errors of a regression."""
        names = self.scheme.names
        if self.scheme.problem_type == "regression":
            scores = regression_scores(totals["rows_predictions"], totals["rows_labels"])
        elif self.scheme.problem_type == "multi_label":
            scores = multilabel_scores(totals["counts"], names)
            scores.metrics.update(label_metrics(self.counted_metrics, totals, scores.metrics))
        else:
            scores = classification_scores(totals["confusion"], names)
            if "histogram" in totals:
                scores.metrics["auroc"] = auroc_from_histogram(totals["histogram"])
        further = classification.row_metrics(self.row_metrics, totals, allow_hub=self.allow_hub_metrics)
        return Scores({**scores.metrics, **further}, scores.details)

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each text's label with all probabilities. A regression returns its number instead."""
        logits = model_logits(model, batch).float()
        if self.scheme.problem_type == "regression":
            return {"value": logits.squeeze(-1)}
        if self.scheme.problem_type == "multi_label":
            return {"labels": logits > 0, "scores": logits.sigmoid()}
        scores = logits.softmax(dim=-1)
        score, label = scores.max(dim=-1)
        return {"label": label, "score": score, "scores": scores}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of a constant answer and of bags of words on the same split."""
        return {} if data.eval is None else baseline_scores(data.source.rows)

    def card(self, facts: Mapping[str, Any], model_type: str) -> str:
        """Return the model card."""
        return models.model_card(facts, model_type)

    def _loss_sum(self, logits: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        if self.scheme.problem_type == "regression":
            return classification.regression_loss_sum(logits.squeeze(-1), labels)
        if self.scheme.problem_type == "multi_label":
            return classification.multi_label_loss_sum(logits, labels)
        return self.loss(logits, labels, training=training)


def _check_loss(recipe: Recipe, scheme: LabelScheme) -> None:
    """Raise ValueError if `loss` settings for single_label problems are used with another problem type."""
    loss = recipe.loss
    for name, value in (("class_weights", loss.class_weights), ("label_smoothing", loss.label_smoothing or None)):
        if value is not None and scheme.problem_type != "single_label":
            raise ValueError(
                f"loss.{name}={value!r} is for one label of several, and the problem is {scheme.problem_type} "
                f"({scheme.reason}); leave it out, or set model.problem_type: single_label"
            )


def _fingerprint(scheme: LabelScheme, train: list[labelled.Sample], evaluation: list[labelled.Sample] | None) -> str:
    arrays: list[NDArray[Any]] = []
    for side in (train, evaluation):
        if side is not None:
            ids, second_from, labels = zip(*side)
            arrays += [*joined_arrays(ids), np.array(second_from, dtype=np.int32), np.array(labels)]
    return samples_digest((scheme.problem_type, *scheme.names), arrays)
