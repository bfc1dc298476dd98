"""Multiple choice: find which of several endings belongs to a text (SWAG, RACE, ARC)."""

import re
from functools import partial

import numpy as np
from torch import Tensor, nn

from accel_train.core.model_card import FOLDER, Use
from accel_train.data.labels import IGNORED_LABEL
from accel_train.metrics import tally
from accel_train.model.kernels.loss_by_source import count_losses
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Columns, Facts, Scores, TaskData, Tensors, Totals
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.encoder import EncoderTask, cut_note
from accel_train.tasks.common.texts import WORD, Divided
from accel_train.tasks.multiple_choice import data as choices
from accel_train.tasks.multiple_choice.config import SPEC, MultipleChoiceData
from accel_train.tasks.rows import (
    Kept,
    TextSource,
    decimals,
    likeliest,
    logits_of,
)

_EXAMPLE = f"""
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{FOLDER}")
model = AutoModelForMultipleChoice.from_pretrained("{FOLDER}")
text, endings = "a text", ["one ending", "another ending"]
tokens = tokenizer([text] * len(endings), endings, truncation=True, padding=True, return_tensors="pt")
scores = model(**{{name: rows[None] for name, rows in tokens.items()}}).logits[0]
print(endings[scores.argmax()])
"""
_WORD = re.compile(WORD)


class Source(TextSource[Divided[choices.ChoiceRow]]):
    """The texts with endings, and the names of their classes."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Positions of the endings, from 0, as text."""
        return tuple(map(str, range(len(self.rows.train[0].endings))))


class MultipleChoice(EncoderTask):
    """Fine-tune any multiple-choice model of transformers, or train one from a configuration."""

    spec = SPEC
    counts_sources = True
    head = models.CHOICES

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all texts and endings into memory.

        Raises:
            ValueError: the model, tokenizer, or rows do not match the recipe. The message names the file, row, and
                column.
        """
        section = MultipleChoiceData.of(recipe.data)
        models.check_model(recipe, self.head)
        keep = Kept(recipe, progress)
        rows = keep.rows(partial(choices.load_choices, recipe), choices.ChoiceRow)
        texts = (text for row in rows.train for text in (row.text, *row.endings))
        reader = self.reader(recipe, keep.words(texts), is_pair=True)
        tokenizer, length = reader.tokenizer, reader.max_length
        encode = partial(choices.tokenize_choices, tokenizer=tokenizer, max_length=length, progress=progress)
        kept = keep.samples(
            tokenizer,
            length,
            rows,
            encode,
            choices.Sample,
            ("multiple-choice",),
            choices.arrays_of,
        )
        lengths = kept["lengths"]
        self.num_choices = len(rows.train[0].endings)
        self.loss = classification.ClassLoss(recipe.loss.label_smoothing, None)
        with_types = models.with_token_types(tokenizer, reader.config, self.head)
        return self.task_data(
            recipe,
            reader,
            rows,
            train=kept["train"],
            evaluation=kept["eval"],
            lengths=lengths,
            collate=partial(choices.collate_choices, with_types=with_types),
            fingerprint=kept["fingerprint"],
            source=Source(rows, tokenizer, reader.config),
            facts=Facts(
                others={"num_choices": self.num_choices},
                notes=cut_note(lengths, length, section.of_training("rows")),
            ),
        )

    def input_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a text with all its endings."""
        return (1, self.num_choices, length)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy of the right ending, summed over texts. Training applies label smoothing."""
        logits, loss_sum = logits_of(model, batch), partial(self.loss, training=model.training)
        count_losses(model, self.counted, loss_sum, logits, batch["labels"])
        return loss_sum(logits, batch["labels"])

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss without smoothing, and the confusion matrix of positions."""
        logits, labels = logits_of(model, batch), batch["labels"]
        confusion = tally.confusion_counts(labels, logits.argmax(-1), self.num_choices)
        return {"loss_sum": self.loss(logits, labels, training=False), "confusion": confusion}

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return the accuracy. Positions carry no meaning, so they have no separate scores."""
        confusion = totals["confusion"]
        return Scores({"accuracy": float(np.trace(confusion) / confusion.sum()) if confusion.any() else float("nan")})

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the position of the likeliest ending, from 0, and the probability of each ending."""
        return likeliest(logits_of(model, batch).float().softmax(dim=-1))

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return the likeliest ending, its position, all probabilities, and the right position if known."""
        source: Source = data.source
        asked, places = [source.evaluated[index] for index in rows["index"].tolist()], rows["label"].tolist()
        columns: Columns = {
            "label": [str(place) for place in places],
            "ending": [row.endings[place] for row, place in zip(asked, places)],
            "score": decimals(rows["score"]),
        }
        if asked and asked[0].label != IGNORED_LABEL:
            columns["true_label"] = [str(row.label) for row in asked]
        # Left out if a text has many endings.
        scores = rows.get("scores", np.empty((0, 0)))
        return columns | {f"score_{place}": decimals(scores[:, place]) for place in range(scores.shape[1])}

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the accuracy of the most frequent position and of the largest word overlap with the text."""
        rows: Divided[choices.ChoiceRow] = data.source.rows
        if rows.eval is None:
            return {}
        truth = np.array([row.label for row in rows.eval])
        frequent = int(np.bincount([row.label for row in rows.train]).argmax())
        overlap = np.array([_likest(row) for row in rows.eval])
        return {
            "majority_accuracy": float((truth == frequent).mean()),
            "word_overlap_accuracy": float((truth == overlap).mean()),
        }

    def use(self, model: nn.Module, data: TaskData) -> Use:
        return Use(
            _EXAMPLE,
            [
                f"Gives: a score for each of {self.num_choices} endings of a text",
                models.reads(data.facts.max_length, "text and ending together; longer ones are cut"),
            ],
            "texts",
        )


def _likest(row: choices.ChoiceRow) -> int:
    """Return the position of the ending with the largest share of words found in the text. The first wins a tie."""
    known = {*_WORD.findall(row.text.lower())}
    endings = [_WORD.findall(ending.lower()) for ending in row.endings]
    shares = [sum(word in known for word in words) / max(1, len(words)) for words in endings]
    return shares.index(max(shares))
