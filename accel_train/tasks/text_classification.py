"""Text classification: one label of several, several labels at once, or a number, for a text or a pair of texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from accel_train.data.labelled_texts import LabelledTexts, load_labelled_texts
from accel_train.data.labels import LabelScheme
from accel_train.data.text_tokens import (
    CollateTexts,
    TokenizedTexts,
    classifier_tokenizer,
    digest_arrays,
    note_of_cut_texts,
    resolve_max_length,
    tokenize_rows,
)
from accel_train.metrics.scores import auroc_from_histogram, classification_scores, multilabel_scores, regression_scores
from accel_train.metrics.tally import (
    confusion_counts,
    moments,
    multilabel_counts,
    one_vs_rest_log_odds,
    score_histogram,
)
from accel_train.recipe import Recipe
from accel_train.task import Scores, TaskData
from accel_train.tasks.causal_lm import quiet_bars
from accel_train.tasks.classification_loss import (
    classification_loss_sum,
    multi_label_loss_sum,
    regression_loss_sum,
    resolve_class_weights,
)
from accel_train.tasks.text_baselines import baseline_scores
from accel_train.tasks.text_cards import model_card
from accel_train.tasks.text_metrics import check_metrics, further_metrics
from accel_train.tasks.text_models import (
    build_classifier,
    check_model,
    classifier_config,
    forward_flops,
    num_positions,
    num_rows,
    order_of_names,
    takes_token_types,
)


@dataclass(frozen=True)
class Source:
    """What the task keeps of its data beside the samples."""

    texts: LabelledTexts
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    """Rows that the tokenizer needs."""
    config: PreTrainedConfig

    @property
    def label_names(self) -> tuple[str, ...]:
        """The classes in the order of their ids."""
        return self.texts.scheme.names

    def row_ids(self, index: int) -> str:
        """What names an evaluation row: its id column, else its file and row."""
        assert self.texts.eval is not None
        return self.texts.eval.ids[index]


class TextClassification:
    """Fine-tune any sequence classifier of transformers, or train one from a configuration."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenise labelled texts, all of them in memory.

        Raises:
            ValueError: model, tokenizer, rows or labels are not what the recipe says; the text names file, row and column.
        """
        check_model(recipe)
        texts = load_labelled_texts(recipe, partial(order_of_names, recipe))
        scheme = texts.scheme
        check_metrics(recipe, scheme)
        weights = resolve_class_weights(
            _for_single_label(recipe, scheme), np.array(list(texts.num_train_of_label.values())), scheme.names
        )
        tokenizer, tokenizer_notes = classifier_tokenizer(recipe, texts.train)
        config = classifier_config(recipe, tokenizer, scheme)
        is_pair = len(recipe.data.text_columns) == 2
        max_length = resolve_max_length(recipe.data.max_length, num_positions(config), tokenizer, is_pair=is_pair)
        train = tokenize_rows(texts.train, texts.train_labels, tokenizer, max_length, progress=progress)
        evaluation = None
        if texts.eval is not None and texts.eval_labels is not None:
            evaluation = tokenize_rows(texts.eval, texts.eval_labels, tokenizer, max_length, progress=progress)

        self.scheme = scheme
        self.label_smoothing = recipe.loss.label_smoothing
        self.class_weights = None if weights is None else torch.tensor(weights, dtype=torch.float32)
        self.further_metrics, self.metrics_of_labels = further_metrics(recipe, scheme)
        self.mean_length = float(train.lengths.mean())
        pad_id, multiple = int(tokenizer.pad_token_id), recipe.data.pad_to_multiple_of
        return TaskData(
            train=train,
            eval=evaluation,
            collate=CollateTexts(pad_id, multiple, max_length, with_types=is_pair and takes_token_types(config)),
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
                "notes": [*texts.notes, *tokenizer_notes, *note_of_cut_texts(train, max_length)],
            },
            reading_is_free=True,
            source=Source(texts, tokenizer, num_rows(tokenizer), config),
            lengths=train.lengths,
        )

    def build_model(self, recipe: Recipe, data: TaskData) -> nn.Module:
        """The classifier of the recipe; what of a pretrained one is new is added to the notes of the data's facts.

        Raises:
            ValueError: the weights cannot be loaded, or are no safetensors.
        """
        source: Source = data.source
        model, notes = build_classifier(recipe, source.config, source.vocab_size)
        data.facts["notes"] = list(dict.fromkeys([*data.facts["notes"], *notes]))
        return model

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy, binary cross-entropy or squared error, summed over samples, fp32.

        Label smoothing and class weights count in training only.
        """
        return self._loss_sum(_logits(model, batch), batch["labels"], training=model.training)

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """3 x the matrix products of one forward pass of a text of mean length, without padding: a target is a text."""
        assert isinstance(model, PreTrainedModel)
        forward = forward_flops(model, max(1, round(self.mean_length)))
        return None if forward is None else 3 * forward

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The plain loss, and counts that every score follows from; single rows only where a metric needs them."""
        logits, labels = _logits(model, batch).float(), batch["labels"]
        counted = {"loss_sum": self._loss_sum(logits, labels, training=False)}
        num_classes = logits.shape[-1]
        if self.scheme.problem_type == "regression":
            values = logits.squeeze(-1)
            return {
                **counted,
                "moments": moments(values, labels),
                "rows_predictions": values,
                "rows_labels": labels,
            }
        if self.scheme.problem_type == "multi_label":
            said = (logits > 0).long()
            counted["counts"] = multilabel_counts(labels.long(), said)
            counted |= self.metrics_of_labels.count(logits, labels)
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(dim=-1)
            said = logits.argmax(dim=-1)
            counted["confusion"] = confusion_counts(labels, said, num_classes)
            histogram = score_histogram(one_vs_rest_log_odds(logits), labels, num_classes)
            if histogram is not None:
                counted["histogram"] = histogram
        if self.further_metrics.names:
            counted |= {"rows_predictions": said, "rows_labels": labels, "rows_scores": scores}
        return counted

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Accuracy, precision, recall, F1, Matthews' correlation and AUROC; errors and correlations of a regression."""
        names = self.scheme.names
        if self.scheme.problem_type == "regression":
            scores = regression_scores(totals["moments"], totals["rows_predictions"], totals["rows_labels"])
        elif self.scheme.problem_type == "multi_label":
            scores = multilabel_scores(totals["counts"], names)
            scores.metrics.update(self.metrics_of_labels.compute(totals, scores.metrics))
        else:
            scores = classification_scores(totals["confusion"], names)
            if "histogram" in totals:
                scores.metrics["auroc"] = auroc_from_histogram(totals["histogram"])
        return Scores({**scores.metrics, **self.further_metrics.compute(totals)}, scores.details)

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The label of each text and its probability, and those of all classes; for multi_label every label's own; the number
        for regression."""
        logits = _logits(model, batch).float()
        if self.scheme.problem_type == "regression":
            return {"value": logits.squeeze(-1)}
        if self.scheme.problem_type == "multi_label":
            return {"labels": logits > 0, "scores": logits.sigmoid()}
        scores = logits.softmax(dim=-1)
        score, label = scores.max(dim=-1)
        return {"label": label, "score": score, "scores": scores}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """What always gives the same answer, and what a bag of words gives, on the same split."""
        return {} if data.eval is None else baseline_scores(data.source.texts)

    def save_description(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Configuration with the label names, tokenizer, and a model card."""
        assert isinstance(model, PreTrainedModel)
        model.config.save_pretrained(folder)
        tokenizer = data.source.tokenizer
        tokenizer.model_max_length = data.facts["max_length"]
        tokenizer.save_pretrained(str(folder))
        (folder / "README.md").write_text(model_card(data.facts, model.config.model_type), encoding="utf-8")

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Weights and description: for `from_pretrained`, and for `pipeline("text-classification")`."""
        assert isinstance(model, PreTrainedModel)
        with quiet_bars():
            model.save_pretrained(folder)
        self.save_description(model, data, folder)

    def sample(self, recipe: Recipe, model: nn.Module, data: TaskData) -> dict[str, Any] | None:
        """Nothing: a label is no text to read."""
        return None

    def _loss_sum(self, logits: Tensor, labels: Tensor, *, training: bool) -> Tensor:
        if self.scheme.problem_type == "regression":
            return regression_loss_sum(logits.squeeze(-1), labels)
        if self.scheme.problem_type == "multi_label":
            return multi_label_loss_sum(logits, labels)
        if not training:
            return classification_loss_sum(logits, labels)
        if self.class_weights is not None and self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(
                logits.device
            )  # once: a copy at each step would make the host wait
        return classification_loss_sum(
            logits, labels, label_smoothing=self.label_smoothing, class_weights=self.class_weights
        )


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits
    return logits


def _for_single_label(recipe: Recipe, scheme: LabelScheme) -> Any:
    """`loss.class_weights`, which like `loss.label_smoothing` is for one label of several.

    Raises:
        ValueError: one of the two is set for another problem.
    """
    loss = recipe.loss
    for name, value in (("class_weights", loss.class_weights), ("label_smoothing", loss.label_smoothing or None)):
        if value is not None and scheme.problem_type != "single_label":
            raise ValueError(
                f"loss.{name}={value!r} is for one label of several, and the problem is {scheme.problem_type} "
                f"({scheme.reason}); leave it out, or set model.problem_type: single_label"
            )
    return loss.class_weights


def _fingerprint(scheme: LabelScheme, train: TokenizedTexts, evaluation: TokenizedTexts | None) -> str:
    sides = [side for side in (train, evaluation) if side is not None]
    arrays = [array for side in sides for array in (side.ids, side.offsets, side.second_from, side.labels)]
    names = np.frombuffer("\x1e".join((scheme.problem_type, *scheme.names)).encode(), dtype=np.uint8)
    return digest_arrays([names, *arrays])
