"""Multiple choice: find which of several endings belongs to a text (SWAG, RACE, ARC)."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.text.padding import joined_arrays, samples_digest
from accel_train.metrics import tally
from accel_train.recipe.schema import Recipe
from accel_train.task import Scores, TaskData
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.encoder import Encoded, EncoderTask, cut_notes, model_logits
from accel_train.tasks.multiple_choice import data as choices
from accel_train.tasks.multiple_choice.config import MultipleChoiceData

_EXAMPLE = """
tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")
model = AutoModelForMultipleChoice.from_pretrained("path/of/this/folder")
text, endings = "a text", ["one ending", "another ending"]
tokens = tokenizer([text] * len(endings), endings, truncation=True, padding=True, return_tensors="pt")
scores = model(**{name: rows[None] for name, rows in tokens.items()}).logits[0]
print(endings[scores.argmax()])
""".strip()
_WORD = re.compile(r"\w+")


class MultipleChoice(EncoderTask[choices.Choices]):
    """Fine-tune any multiple-choice model of transformers, or train one from a configuration."""

    Data = MultipleChoiceData
    head = models.CHOICES
    collate = staticmethod(choices.collate_choices)

    def read(self, recipe: Recipe) -> choices.Choices:
        """Read the texts with their endings."""
        models.refuse_metrics(recipe, "multiple-choice reports the accuracy")
        models.refuse_class_weights(recipe)
        rows = choices.load_choices(recipe)
        self.num_choices, self.choices_shape = rows.num_choices, (rows.num_choices,)
        self.label_names = tuple(map(str, range(rows.num_choices)))
        self.loss = classification.ClassLoss(recipe.loss.label_smoothing, None)
        return rows

    def texts(self, rows: choices.Choices) -> Iterable[str]:
        """Return the training texts and their endings."""
        return (text for row in rows.train for text in (row.text, *row.endings))

    def encode(self, recipe: Recipe, rows: choices.Choices, config: PreTrainedConfig, **settings: Any) -> Encoded:
        """Tokenize each text with each of its endings, and count the rows that are cut."""
        train = choices.tokenize_choices(rows.train, **settings)
        evaluation = None if rows.eval is None else choices.tokenize_choices(rows.eval, **settings)
        notes = cut_notes(train, settings["max_length"], recipe.data.of_training("rows"))
        facts = {"num_choices": rows.num_choices}
        return Encoded(train, evaluation, _fingerprint(train, evaluation), facts, notes)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the fp32 cross-entropy of the right ending, summed over texts. Training applies label smoothing."""
        return self.loss(model_logits(model, batch), batch["labels"], training=model.training)

    def evaluate_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the summed loss without smoothing, and the confusion matrix of positions."""
        logits, labels = model_logits(model, batch), batch["labels"]
        confusion = tally.confusion_counts(labels, logits.argmax(-1), self.num_choices)
        return {"loss_sum": self.loss(logits, labels, training=False), "confusion": confusion}

    def score(self, loss: float, totals: Mapping[str, NDArray[Any]], data: TaskData) -> Scores:
        """Return the accuracy. Positions carry no meaning, so they have no separate scores."""
        confusion = totals["confusion"]
        return Scores({"accuracy": float(np.trace(confusion) / confusion.sum()) if confusion.any() else float("nan")})

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the position of the likeliest ending, from 0, and the probability of each ending."""
        scores = model_logits(model, batch).float().softmax(dim=-1)
        score, label = scores.max(dim=-1)
        return {"label": label, "score": score, "scores": scores}

    def prediction_columns(self, rows: Mapping[str, NDArray[Any]], data: TaskData) -> dict[str, list[Any]]:
        """Return the likeliest ending, its position, all probabilities, and the right position if known."""
        evaluated: list[choices.ChoiceRow] = data.source.rows.eval
        asked, places = [evaluated[index] for index in rows["index"].tolist()], rows["label"].tolist()
        columns: dict[str, list[Any]] = {
            "label": [str(place) for place in places],
            "ending": [row.endings[place] for row, place in zip(asked, places)],
            "score": _decimals(rows["score"]),
        }
        if asked and asked[0].label != IGNORED_LABEL:
            columns["true_label"] = [str(row.label) for row in asked]
        # Left out if a text has many endings.
        scores = rows.get("scores", np.empty((0, 0)))
        return columns | {f"score_{place}": _decimals(scores[:, place]) for place in range(scores.shape[1])}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the accuracy of the most frequent position and of the largest word overlap with the text."""
        rows: choices.Choices = data.source.rows
        if rows.eval is None:
            return {}
        truth = np.array([row.label for row in rows.eval])
        frequent = int(np.bincount([row.label for row in rows.train]).argmax())
        overlap = np.array([_likest(row) for row in rows.eval])
        return {
            "majority_accuracy": float((truth == frequent).mean()),
            "word_overlap_accuracy": float((truth == overlap).mean()),
        }

    def card(self, facts: Mapping[str, Any], model_type: str) -> str:
        """Return the model card."""
        return models.card(
            facts,
            model_type,
            title="A model for multiple choice",
            pipeline_tag="multiple-choice",
            lines=[
                f"Gives: a score for each of {self.num_choices} endings of a text",
                f"Reads: up to {facts['max_length']} tokens, text and ending together; longer ones are cut",
            ],
            imported="AutoModelForMultipleChoice, AutoTokenizer",
            example=_EXAMPLE,
        )


def _decimals(values: NDArray[Any]) -> list[float]:
    """Return the shortest decimals that round to the same values."""
    return [float(str(value)) for value in values]


def _likest(row: choices.ChoiceRow) -> int:
    """Return the position of the ending with the largest share of words found in the text. The first wins a tie."""
    known = {*_WORD.findall(row.text.lower())}
    endings = [_WORD.findall(ending.lower()) for ending in row.endings]
    shares = [sum(word in known for word in words) / max(1, len(words)) for words in endings]
    return shares.index(max(shares))


def _fingerprint(train: list[choices.Sample], evaluation: list[choices.Sample] | None) -> str:
    arrays: list[NDArray[Any]] = []
    for side in (train, evaluation):
        if side is not None:
            ids = [each for sample in side for each in sample.ids]
            arrays += [*joined_arrays(ids), np.array([sample.second_from for sample in side], dtype=np.int32)]
            arrays.append(np.array([sample.label for sample in side]))
    return samples_digest(("multiple-choice",), arrays)
