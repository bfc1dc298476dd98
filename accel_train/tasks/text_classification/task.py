"""Text classification of texts or pairs: predict one of several labels, several labels at once, or a number."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from accel_train.data.labels import LabelScheme
from accel_train.data.text.padding import joined_arrays, samples_digest
from accel_train.data.text.tokenizers import vocab_size_of
from accel_train.metrics import METRICS, tally
from accel_train.metrics.scores import auroc_from_histogram, classification_scores, multilabel_scores, regression_scores
from accel_train.model.ngrams import NgramsForSequenceClassification
from accel_train.recipe.schema import Recipe
from accel_train.task import Scores, Task, TaskData
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.texts import classifier_tokenizer
from accel_train.tasks.text_classification import data as labelled
from accel_train.tasks.text_classification.config import TextClassificationData
from accel_train.tasks.text_classification.metrics import (
    baseline_scores,
    check_metrics,
    count_label_metrics,
    label_metrics,
)


@dataclass(frozen=True)
class Source:
    """The texts, tokenizer, and model configuration that the task keeps in addition to its samples."""

    texts: labelled.LabelledTexts
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig

    @property
    def label_names(self) -> tuple[str, ...]:
        """Class names in the order of their ids."""
        return self.texts.scheme.names

    def row_ids(self, index: int) -> str:
        """Return the name of an evaluation row: its id column, or its file and row number."""
        assert self.texts.eval is not None
        return self.texts.eval[index].id

    def shown(self, index: int) -> dict[str, Any]:
        """Return the text of an evaluation row for a report."""
        assert self.texts.eval is not None
        return {"text": "\n".join(self.texts.eval[index].texts)}


class TextClassification(Task):
    """Fine-tune any sequence classifier of transformers, or train one from a configuration."""

    Data = TextClassificationData

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all labeled texts into memory.

        Raises:
            ValueError: the model, tokenizer, rows, or labels do not match the recipe. The message names the file, row,
                and column.
        """
        section = TextClassificationData.of(recipe.data)
        models.check_model(recipe)
        texts = labelled.load_labelled_texts(recipe, models.known_names(recipe))
        scheme = texts.scheme
        check_metrics(recipe, scheme)
        _check_loss(recipe, scheme)
        counts = np.array(list(texts.num_train_of_label.values()))
        weights = classification.resolve_class_weights(recipe.loss.class_weights, counts, scheme.names)
        tokenizer, tokenizer_notes = classifier_tokenizer(recipe, (text for row in texts.train for text in row.texts))
        config = models.classifier_config(recipe, tokenizer, scheme)
        is_pair = len(section.text_columns) == 2
        max_length = models.resolve_max_length(
            section.max_length, models.num_positions(config), tokenizer, is_pair=is_pair
        )
        encode = partial(labelled.tokenize_rows, tokenizer=tokenizer, max_length=max_length, progress=progress)
        train = encode(texts.train, texts.train_labels)
        evaluation = None if texts.eval is None else encode(texts.eval, texts.eval_labels)

        self.scheme = scheme
        self.loss = classification.ClassLoss(recipe.loss.label_smoothing, weights)
        names = recipe.evaluate.metrics
        self.counted_metrics = [name for name in names if scheme.problem_type == "multi_label" and name in METRICS]
        self.row_metrics = [name for name in names if name not in self.counted_metrics]
        self.allow_hub_metrics = recipe.evaluate.allow_hub_metrics
        lengths = np.array([len(sample.ids) for sample in train])
        self.mean_length = float(lengths.mean())
        # This includes a few texts that fit exactly.
        num_cut = int((lengths >= max_length).sum())
        cut = (
            f"{num_cut:,} of {len(lengths):,} {recipe.data.of_training('texts')} reach data.max_length={max_length} "
            "tokens, and are cut there"
        )
        return TaskData(
            # The DataLoader reads a list as a map-style dataset.
            train=cast("Dataset[Any]", train),
            eval=cast("Dataset[Any] | None", evaluation),
            collate=partial(
                labelled.collate_texts,
                pad_id=int(tokenizer.pad_token_id),
                multiple=section.pad_to_multiple_of,
                max_length=max_length,
                with_types=is_pair and models.with_token_types(tokenizer, config),
            ),
            fingerprint=_fingerprint(scheme, train, evaluation),
            facts={
                "sources": texts.description,
                "num_train": len(train),
                "num_eval": 0 if evaluation is None else len(evaluation),
                "problem_type": f"{scheme.problem_type} ({scheme.reason})",
                "label_names": list(scheme.names),
                "num_train_of_label": texts.num_train_of_label,
                "max_length": max_length,
                "mean_length": round(self.mean_length, 1),
                "notes": [*texts.notes, *tokenizer_notes, *([cut] if num_cut else [])],
            },
            reading_is_free=True,
            source=Source(texts, tokenizer, config),
            lengths=lengths,
            lengths_vary=True,
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's classifier and add notes about new weights in a pretrained model to the facts of `data`.

        Raises:
            ValueError: the weights cannot be loaded, or are not in the safetensors format.
        """
        source: Source = data.source
        model, notes = models.build_model(recipe, source.config, vocab_size_of(source.tokenizer))
        data.add_notes(notes)
        if isinstance(model, NgramsForSequenceClassification) and recipe.model.config and not model.rarity.is_meta:
            model.measure_rarity(
                torch.as_tensor(sample.ids, dtype=torch.long) for sample in cast("list[labelled.Sample]", data.train)
            )
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the fp32 cross-entropy, binary cross-entropy, or squared error, summed over samples.

        Training adds label smoothing and class weights.
        """
        return self._loss_sum(_logits(model, batch), batch["labels"], training=model.training)

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return 3 x the FLOPs of the forward pass of a mean-length text, without padding. A target is a text."""
        assert isinstance(model, PreTrainedModel)
        length = max(1, round(self.mean_length))
        return classification.training_flops(AutoModelForSequenceClassification, model.config, input_ids=(1, length))

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the summed loss without smoothing, and counts for the scores, or rows if a metric needs them."""
        logits, labels = _logits(model, batch).float(), batch["labels"]
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
        logits = _logits(model, batch).float()
        if self.scheme.problem_type == "regression":
            return {"value": logits.squeeze(-1)}
        if self.scheme.problem_type == "multi_label":
            return {"labels": logits > 0, "scores": logits.sigmoid()}
        scores = logits.softmax(dim=-1)
        score, label = scores.max(dim=-1)
        return {"label": label, "score": score, "scores": scores}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of a constant answer and of bags of words on the same split."""
        return {} if data.eval is None else baseline_scores(data.source.texts)

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the configuration with the label names, the tokenizer, and a model card."""
        assert isinstance(model, PreTrainedModel)
        super().save_description(model, data, folder)
        text = models.model_card(data.facts, model.config.model_type)
        models.save_tokenizer_and_card(data.source.tokenizer, data.facts["max_length"], text, folder)

    def _loss_sum(self, logits: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        if self.scheme.problem_type == "regression":
            return classification.regression_loss_sum(logits.squeeze(-1), labels)
        if self.scheme.problem_type == "multi_label":
            return classification.multi_label_loss_sum(logits, labels)
        return self.loss(logits, labels, training=training)


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits
    return logits


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
