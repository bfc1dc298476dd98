"""Token classification: tag each word of a sentence with entities (B-PER, I-PER, O) or parts of speech."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from accel_train.core.model_card import FOLDER, Use
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.text.padding import padded
from accel_train.data.text.spans import spans_of
from accel_train.metrics import tally
from accel_train.metrics.entities import entity_counts, entity_tags
from accel_train.metrics.scores import classification_scores, entity_scores
from accel_train.model.kernels.loss_by_source import count_losses
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Columns, Facts, Scores, TaskData, Tensors, Totals
from accel_train.tasks.common import classification
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.encoder import EncoderTask
from accel_train.tasks.rows import Kept, TextSource, decimals, logits_of
from accel_train.tasks.token_classification import data as words
from accel_train.tasks.token_classification.config import SPEC, TokenClassificationData


class Source(TextSource[words.TaggedSentences]):
    """The tagged sentences, and the names of their tags."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Tags in the order of their ids."""
        return self.rows.scheme.names


class TokenClassification(EncoderTask):
    """Fine-tune any token classifier of transformers, or train one from a configuration.

    The first token of a word learns and predicts the word's label. The loss is divided by the number of labeled words.
    """

    spec = SPEC
    counts_sources = True
    head = models.TOKENS

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all tagged sentences into memory.

        Raises:
            ValueError: the model, tokenizer, sentences, or tags do not match the recipe. The message names the file,
                row, and word.
        """
        section = TokenClassificationData.of(recipe.data)
        models.check_model(recipe, self.head)
        known_names = models.known_names(recipe)
        keep = Kept(recipe, progress, known_names)
        load = partial(words.load_sentences, recipe, known_names)
        sentences = keep.rows(load, words.Sentence, words.TaggedSentences)
        names, num_of_label = sentences.scheme.names, sentences.num_train_of_label
        weights = classification.resolve_class_weights(
            recipe.loss.class_weights, np.array(list(num_of_label.values())), names
        )
        texts = keep.words(row.key for row in sentences.train)
        reader = self.reader(recipe, texts, is_pair=False, scheme=sentences.scheme)
        tokenizer, length = reader.tokenizer, reader.max_length
        models.check_offsets(recipe, tokenizer)
        encode = partial(words.tokenize_sentences, tokenizer=tokenizer, max_length=length, progress=progress)
        kept = keep.samples(
            tokenizer,
            length,
            sentences,
            encode,
            words.Sample,
            names,
            words.arrays_of,
            lambda train, evaluation: {
                "num_targets": sum(int((sample.labels != IGNORED_LABEL).sum()) for sample in train),
                "notes": [
                    *_cut(section.of_training("sentences"), sentences.train, train, length),
                    *_cut("evaluation sentences", sentences.eval or [], evaluation or [], length),
                ],
            },
        )
        num_targets = kept["num_targets"]

        self.names, self.tags = names, entity_tags(names)
        self.loss = classification.ClassLoss(recipe.loss.label_smoothing, weights)
        self.is_labelled = section.is_labelled
        self.most_words = sentences.most_words
        self.words_per_sentence = max(1.0, num_targets / len(sentences.train))
        kinds = "plain tags" if self.tags is None else f"entities of {len(self.tags.types)} types, told by B-, I- and O"
        return self.task_data(
            recipe,
            reader,
            sentences,
            train=kept["train"],
            evaluation=kept["eval"],
            lengths=kept["lengths"],
            collate=words.collate_sentences,
            fingerprint=kept["fingerprint"],
            source=Source(sentences, tokenizer, reader.config),
            facts=Facts(
                train_targets=num_targets,
                label_names=list(names),
                num_train_of_label=num_of_label,
                others={"tags": kinds},
                notes=kept["notes"],
            ),
        )

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 cross-entropy summed over words. Training adds label smoothing and class weights."""

        def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
            return self.loss(logits.flatten(0, 1), labels.flatten(), training=model.training)

        logits, labels = word_logits(model, batch), batch["labels"]
        count_losses(model, self.counted, loss_sum, logits, labels, ignored=IGNORED_LABEL)
        return loss_sum(logits, labels)

    def flops_per_target(self, recipe: Recipe, model: nn.Module) -> float | None:
        """Return 3 x the FLOPs per word of the forward pass of a mean-length sentence, without padding."""
        flops = super().flops_per_target(recipe, model)
        return None if flops is None else flops / self.words_per_sentence

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the summed loss without smoothing, and counts of entities by type or a confusion matrix."""
        logits, labels = word_logits(model, batch).float(), batch["labels"]
        loss_sum = self.loss(logits.flatten(0, 1), labels.flatten(), training=False)
        return {"loss_sum": loss_sum, **self._counts(labels, logits.argmax(-1))}

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return precision, recall, and F1 of entities with the word accuracy, or class scores of plain tags."""
        if self.tags is None:
            return classification_scores(totals["confusion"], self.names)
        right, total = totals["words"].tolist()
        return entity_scores(totals["entities"], self.tags.types, int(right), int(total))

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the tag of each word, -1 beyond a sentence's end, and its probability.

        Both have shape (N, number of words in the longest evaluation sentence).
        """
        scores, tags = word_logits(model, batch).float().softmax(-1).max(-1)
        missing = self.most_words - tags.shape[1]
        return {
            "tags": nn.functional.pad(tags.int(), (0, missing), value=-1),
            "tag_scores": nn.functional.pad(scores, (0, missing)),
        }

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return the words, their tags and probabilities, and the true tags if known. Texts have their spans, too.

        Words that were cut off have the tag and probability None.
        """
        source: Source = data.source
        samples = cast("list[words.Sample]", data.eval)
        columns: Columns = {"words": [], "tags": [], "scores": []}
        columns |= {"true_tags": []} if self.is_labelled else {}
        columns |= {} if source.evaluated[0].text is None else {"spans": []}
        for index, tags, scores in zip(rows["index"].tolist(), rows["tags"], rows["tag_scores"]):
            sentence, found = source.evaluated[index], samples[index].words.tolist()
            by_word: dict[str, dict[int, Any]] = {
                "tags": dict(zip(found, (self.names[tag] for tag in tags.tolist()))),
                "scores": dict(zip(found, decimals(scores))),
            }
            columns["words"].append(list(sentence.words))
            for name, known in by_word.items():
                columns[name].append([*map(known.get, range(len(sentence.words)))])
            if sentence.text is not None:
                columns["spans"].append(spans_of(sentence.text, sentence.places.tolist(), columns["tags"][-1]))
            if self.is_labelled:
                columns["true_tags"].append([self.names[tag] for tag in sentence.tags.tolist()])
        return columns

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of each word's most frequent training tag on the same split.

        An unknown word gets the most frequent tag of all words.
        """
        sentences: words.TaggedSentences = data.source.rows
        if sentences.eval is None:
            return {}
        counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for sentence in sentences.train:
            for word, tag in zip(sentence.words, sentence.tags.tolist()):
                counts[word][tag] += 1
        best = {word: found.most_common(1)[0][0] for word, found in counts.items()}
        every = int(np.bincount(np.concatenate([row.tags for row in sentences.train])).argmax())
        answers = [np.array([best.get(word, every) for word in sentence.words]) for sentence in sentences.eval]
        # Words that were cut off are not scored, as for the model.
        kept = [sample.words for sample in cast("list[words.Sample]", data.eval)]
        width = max(1, *map(len, kept))
        labels, predictions = (
            padded([tags[place] for tags, place in zip(side, kept)], width, IGNORED_LABEL)
            for side in ([row.tags for row in sentences.eval], answers)
        )
        totals = {name: count.numpy() for name, count in self._counts(labels, predictions).items()}
        found = self.score(0.0, totals, data).metrics
        shown = ("accuracy", "f1_macro") if self.tags is None else ("f1", "accuracy")
        return {f"most_frequent_tag_{metric}": found[metric] for metric in shown}

    def use(self, model: nn.Module, data: TaskData) -> Use:
        names = classification.listed(self.names, 40, " (config.json has all)")
        return Use(
            f"""from transformers import pipeline

tag = pipeline("token-classification", model="{FOLDER}", aggregation_strategy="first")
print(tag("a sentence"))""",
            [
                f"Gives: {len(self.names)} tags: {names}",
                models.reads(data.facts.max_length, "the rest is cut. A word has the tag of its first token"),
            ],
            "sentences",
        )

    def _counts(self, labels: Tensor, predictions: Tensor) -> Tensors:
        """Return the counts that `score` needs from labels and predictions (N, W)."""
        if self.tags is None:
            return {"confusion": tally.confusion_counts(labels, predictions, len(self.names))}
        known = labels >= 0
        right = (known & (labels == predictions)).sum()
        return {"entities": entity_counts(self.tags, labels, predictions), "words": torch.stack([right, known.sum()])}


def word_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits (N, W, C) at the first token of each word."""
    logits = logits_of(model, batch, ("labels", "word_starts"))
    return logits.gather(1, batch["word_starts"][..., None].expand(-1, -1, logits.shape[-1]))


def _cut(called: str, rows: Sequence[words.Sentence], samples: Sequence[words.Sample], max_length: int) -> list[str]:
    """Return a note about words without a token: cut off by `max_length`, or dropped by the tokenizer."""
    cut = [len(row.words) - len(sample.words) for row, sample in zip(rows, samples)]
    num_rows, num_words = sum(count > 0 for count in cut), sum(cut)
    if not num_words:
        return []
    return [
        f"words without a token within data.max_length={max_length}: {num_words:,}, of {num_rows:,} of "
        f"{len(rows):,} {called}; neither learned nor scored"
    ]
