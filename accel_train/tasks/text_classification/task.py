"""Text classification of texts or pairs: predict one of several labels, several labels at once, or a number."""

from functools import partial
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from accel_train.core.errors import DataError
from accel_train.core.model_card import FOLDER, Use
from accel_train.core.state import JsonRecord
from accel_train.metrics import METRICS, tally
from accel_train.metrics.scores import auroc_from_histogram, classification_scores, multilabel_scores, regression_scores
from accel_train.model.kernels.loss_by_source import count_losses
from accel_train.model.ngrams import NgramsForSequenceClassification
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Facts, Scores, TaskData, Tensors, Totals, Training
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.encoder import EncoderTask, cut_note
from accel_train.tasks.common.texts import TextRow
from accel_train.tasks.rows import Kept, TextSource, likeliest, logits_of
from accel_train.tasks.text_classification import data as labelled
from accel_train.tasks.text_classification.calibration import fit_temperature
from accel_train.tasks.text_classification.config import SPEC, TextClassificationData
from accel_train.tasks.text_classification.metrics import (
    baseline_scores,
    check_metrics,
    count_label_metrics,
    label_metrics,
)


class Source(TextSource[labelled.LabelledTexts]):
    """The labeled texts, and the names of their classes."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Class names in the order of their ids."""
        return self.rows.scheme.names

    def shown(self, index: int) -> JsonRecord:
        """Return the text of an evaluation row for a report."""
        return {"text": "\n".join(self.evaluated[index].texts)}


class TextClassification(EncoderTask):
    """Fine-tune any sequence classifier of transformers, or train one from a configuration."""

    spec = SPEC
    counts_sources = True
    head = models.SEQUENCES

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all labeled texts into memory.

        Raises:
            ValueError: the model, tokenizer, rows, or labels do not match the recipe. The message names the file, row,
                and column.
        """
        section = TextClassificationData.of(recipe.data)
        models.check_model(recipe)
        known_names = models.known_names(recipe)
        reasons = {
            "loss.class_weights: balanced counts the labels of all rows": recipe.loss.class_weights == "balanced",
            "a new model of n-grams measures all texts": (recipe.model.config or {}).get("model_type") == "ngrams",
        }
        read = partial(labelled.read_text_rows, data=section, key=section.train_key)
        keep = Kept(recipe, progress, known_names, recipe.model.problem_type, read=read, not_in_blocks=reasons)
        texts = keep.rows(
            lambda: labelled.without_labels(labelled.load_labelled_texts(recipe, known_names, keep.whole)),
            TextRow,
            labelled.LabelledTexts,
        )
        scheme = self.scheme = texts.scheme
        check_metrics(recipe, scheme)
        counts = np.array(list(texts.num_train_of_label.values()))
        is_single, is_multi = (scheme.problem_type == kind for kind in ("single_label", "multi_label"))
        weights = (
            classification.resolve_class_weights(recipe.loss.class_weights, counts, scheme.names) if is_single else None
        )
        is_pair = len(section.text_columns) == 2
        words = keep.words(chain.from_iterable(row.texts for row in texts.train))
        reader = self.reader(recipe, words, is_pair=is_pair, scheme=scheme)
        tokenizer, length = reader.tokenizer, reader.max_length
        encode = partial(labelled.tokenize_rows, tokenizer=tokenizer, max_length=length, progress=progress)
        kept = keep.samples(
            tokenizer,
            length,
            texts,
            lambda side: encode(side, texts.eval_labels if side is texts.eval else texts.train_labels),
            labelled.Sample,
            (scheme.problem_type, *scheme.names),
            labelled.arrays_of,
        )

        self.loss = classification.ClassLoss(recipe.loss.label_smoothing, weights)
        names = recipe.evaluate.metrics
        self.counted_metrics = [name for name in names if is_multi and name in METRICS]
        self.row_metrics = [name for name in names if name not in self.counted_metrics]
        self.allow_hub_metrics = recipe.evaluate.allow_hub_metrics
        with_types = is_pair and models.with_token_types(tokenizer, reader.config)
        found = self.task_data(
            recipe,
            reader,
            texts,
            train=kept["train"],
            evaluation=kept["eval"],
            lengths=kept["lengths"],
            collate=partial(labelled.collate_texts, with_types=with_types),
            fingerprint=kept["fingerprint"],
            source=Source(texts, tokenizer, reader.config),
            facts=Facts(
                problem_type=f"{scheme.problem_type} ({scheme.reason})",
                label_names=list(scheme.names),
                num_train_of_label=texts.num_train_of_label,
                notes=cut_note(kept["lengths"], length, section.of_training("texts")),
            ),
        )
        found = keep.in_blocks(
            found,
            texts,
            partial(labelled.encode_rows, data=section, scheme=scheme, tokenize=partial(encode, progress=False)),
            labelled.Sample,
        )
        if not is_single:
            names = ("evaluate.num_examples", "loss.class_weights", "loss.label_smoothing", "data.stratify")
            found.unread.update(dict.fromkeys(names, f"the problem is {scheme.problem_type} ({scheme.reason})"))
        return found

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """Build the recipe's classifier. New n-grams measure the rarity of the training texts. A new regression of
        n-grams begins at the mean label.

        Raises:
            ValueError: the weights cannot be loaded, or are not in the safetensors format.
        """
        model = super().build_model(recipe, data)
        if isinstance(model, NgramsForSequenceClassification) and recipe.model.config and not model.rarity.is_meta:
            samples = cast("list[labelled.Sample]", data.train)
            model.measure_rarity(
                torch.from_numpy(np.stack([ids, np.arange(len(ids)) >= second_from]).astype(int))
                for ids, second_from, _ in samples
            )
            if self.scheme.problem_type == "regression":
                nn.init.constant_(model.bias, float(np.mean([sample.label for sample in samples])))
        return model

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy, binary cross-entropy, or squared error, summed over samples.

        Training adds label smoothing and class weights.
        """
        logits, loss_sum = logits_of(model, batch), partial(self._loss_sum, training=model.training)
        count_losses(model, self.counted, loss_sum, logits, batch["labels"])
        return loss_sum(logits, batch["labels"])

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss without smoothing, and counts for the scores, or rows if a metric needs them."""
        logits, labels = logits_of(model, batch).float(), batch["labels"]
        counted = {"loss_sum": self._loss_sum(logits, labels, training=False)}
        if (temperature := getattr(getattr(model, "config", None), "logit_temperature", 1.0)) != 1:
            counted["uncalibrated_loss_sum"] = self._loss_sum(logits * temperature, labels, training=False)
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

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
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
        if "uncalibrated_loss_sum" in totals:
            ratio = float(totals["uncalibrated_loss_sum"]) / max(float(totals["loss_sum"]), 1e-30)
            scores.metrics["uncalibrated_loss"] = loss * ratio
        further = classification.row_metrics(self.row_metrics, totals, allow_hub=self.allow_hub_metrics)
        return Scores({**scores.metrics, **further}, scores.details)

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return each text's label with all probabilities. A regression returns its number instead."""
        logits = logits_of(model, batch).float()
        if self.scheme.problem_type == "regression":
            return {"value": logits.squeeze(-1)}
        if self.scheme.problem_type == "multi_label":
            return {"labels": logits > 0, "scores": logits.sigmoid()}
        return likeliest(logits.softmax(dim=-1))

    def calibrate(
        self, recipe: Recipe, model: nn.Module, data: TaskData, training: Training
    ) -> tuple[JsonRecord, str] | None:
        if not isinstance(model, NgramsForSequenceClassification) or self.scheme.problem_type == "regression":
            return None
        if data.shards is not None:
            return {"logit_temperature": 1.0}, "scores are not calibrated: data.order is blocks"
        try:
            temperature, message = fit_temperature(model, data, recipe, training, self._loss_sum)
        except DataError as error:
            temperature, message = 1.0, f"scores are not calibrated: {error}"
        return {"logit_temperature": temperature}, message

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of a constant answer and of bags of words on the same split."""
        return {} if data.eval is None else baseline_scores(data.source.rows)

    def use(self, model: nn.Module, data: TaskData) -> Use:
        facts, names = data.facts, self.scheme.names
        is_regression = not facts.num_train_of_label
        # The code of an ngrams model is saved in the folder of its weights.
        consent = ", trust_remote_code=True" if isinstance(model, NgramsForSequenceClassification) else ""
        labels = f"{len(names)} labels: {classification.listed(names, 40, ' (config.json has all)')}"
        return Use(
            f"""from transformers import pipeline

classify = pipeline("text-classification", model="{FOLDER}"{consent})
print(classify("a text", truncation=True))""",
            [
                f"Problem: {facts.problem_type}",
                f"Gives: {f'a number ({names[0]})' if is_regression else labels}",
                models.reads(facts.max_length),
            ],
            "texts",
        )

    def _loss_sum(self, logits: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        if self.scheme.problem_type == "regression":
            return classification.regression_loss_sum(logits.squeeze(-1), labels)
        if self.scheme.problem_type == "multi_label":
            return classification.multi_label_loss_sum(logits, labels)
        return self.loss(logits, labels, training=training)
