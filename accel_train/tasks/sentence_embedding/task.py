"""Sentence embedding: train vectors whose cosine similarity tells which texts belong together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedConfig

from accel_train.core.model_card import FOLDER, Use
from accel_train.core.state import Choice, Choices, JsonRecord
from accel_train.metrics.scores import pearson_correlation, spearman_correlation
from accel_train.model.pretrained import value_of
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, Columns, Facts, Scores, TaskData, Tensors, Totals
from accel_train.tasks.common import text_models as models
from accel_train.tasks.common.encoder import EncoderTask, cut_note
from accel_train.tasks.common.texts import Divided, characters_as_words
from accel_train.tasks.rows import Kept, TextSource, decimals
from accel_train.tasks.sentence_embedding import data as rows_of
from accel_train.tasks.sentence_embedding.config import EMBEDDING, SPEC, SentenceEmbeddingData
from accel_train.tasks.sentence_embedding.folder import Pooling, pooling_of, write_folder
from accel_train.tasks.sentence_embedding.losses import GlobalBatch, Objective, Table

_MOST_ROWS_TO_FIT = 20_000
"""Most training rows that the TF-IDF baselines are fitted on."""
_NEAREST = 3
"""Nearest texts of a query in the report."""
_MAX_CHARACTERS = 200
_EXAMPLE = f"""
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{FOLDER}")
queries = model.encode(["a text"], prompt_name="query")
documents = model.encode(["another text"], prompt_name="document")
print(model.similarity(queries, documents))
"""


@dataclass(frozen=True)
class Source(TextSource[Divided[rows_of.AnchorRow]]):
    """The rows, and the prompts of their texts."""

    prompts: dict[str, str]
    """Text before anchors (`query`) and before positives and negatives (`document`)."""


class SentenceEmbedding(EncoderTask):
    """Train any encoder of transformers to embed texts. Its last hidden states are pooled to one vector per text."""

    spec = SPEC
    head = models.ENCODERS
    global_loss: GlobalBatch | None = None
    """Loss over the global batch. None for a loss of single rows (triplet)."""

    def load_data(self, recipe: Recipe, *, progress: bool) -> TaskData:
        """Read and tokenize all rows into memory.

        Raises:
            ValueError: the model, tokenizer, or rows do not match the recipe. The message names the file, row, and
                column.
        """
        section = SentenceEmbeddingData.of(recipe.data)
        models.check_model(recipe, self.head)
        self.pooling, self.pooling_reason = _pooling(recipe, section)
        read = partial(rows_of.read_anchor_rows, data=section, key=section.train_key)
        keep = Kept(recipe, progress, read=read)
        rows = keep.rows(partial(rows_of.load_rows, recipe, keep.whole), rows_of.AnchorRow)
        words = keep.words(chain.from_iterable(row.texts for row in rows.train))
        reader = self.reader(recipe, words, is_pair=False)
        _check_config(reader.config, section)
        encode = partial(
            rows_of.tokenize_rows,
            prompts=[section.prompts[name] for name in section.prompt_names],
            tokenizer=reader.tokenizer,
            max_length=reader.max_length,
            progress=progress,
        )
        kept = keep.samples(
            reader.tokenizer,
            reader.max_length,
            rows,
            encode,
            rows_of.Sample,
            ("sentence-embedding",),
            rows_of.arrays_of,
        )
        lengths = kept["lengths"]
        self.objective = Objective(
            section.loss_name,
            len(section.pair_columns),
            section.scale,
            section.symmetric,
            section.margin,
            section.matryoshka_dims,
        )
        self.global_loss = None if section.loss_name == "triplet" else GlobalBatch(self.objective)
        self.num_queries = -(-recipe.evaluate.num_examples // _NEAREST)
        self.metric_names = CORRELATIONS if section.score_column is not None else RETRIEVAL
        rows.notes.extend(_prompt_notes(section))
        found = self.task_data(
            recipe,
            reader,
            rows,
            train=kept["train"],
            evaluation=kept["eval"],
            lengths=lengths,
            collate=rows_of.collate_rows,
            fingerprint=kept["fingerprint"],
            source=Source(rows, reader.tokenizer, reader.config, section.prompts),
            facts=Facts(
                others={"pooling": self.pooling, "objective": section.loss_name},
                notes=cut_note(lengths, reader.max_length, section.of_training("rows")),
            ),
        )
        return keep.in_blocks(
            found,
            rows,
            partial(encode, progress=False),
            rows_of.Sample,
        )

    def choices(self, recipe: Recipe, model: nn.Module) -> Choices:
        """Return the loss and the pooling, with their reasons."""
        reason = "the negatives of a row are its own"
        if self.global_loss is not None:
            reason = "compares all rows of the global batch, on any number of processes and with any accumulation; an "
            reason += "evaluation compares all held-out rows, so its loss differs from the training loss"
        return {
            "data.objective": Choice(self.objective.name, reason),
            "data.pooling": Choice(self.pooling, self.pooling_reason),
        }

    def input_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a row with all its texts."""
        return (self.objective.num_texts, length)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 loss summed over rows. In training, other rows of the global batch are negatives."""
        return (self.global_loss or GlobalBatch(self.objective)).loss_sum(self._table(model, batch))

    def global_part(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the vectors of a micro-batch, packed, for `GlobalLoss.over`."""
        return self._table(model, batch).packed()

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the vectors of all texts. Loss and scores compare all of them with each other."""
        vectors, texts, scores = self._table(model, batch)
        return {"rows_vectors": vectors, "rows_texts": texts, "rows_scores": scores}

    def loss_of_rows(self, rows: Totals) -> float:
        """Return the loss summed over evaluation rows, which form one batch."""
        table = Table(*(torch.from_numpy(rows[f"rows_{name}"]) for name in Table._fields))
        return float(self.objective.row_losses(table, with_gradient=False)[0].double().sum())

    def score(self, loss: float, totals: Totals, data: TaskData) -> Scores:
        """Return the correlations of scored pairs, or recall, MRR, and nDCG of finding each anchor's positives."""
        vectors = totals["rows_vectors"]
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        if self.metric_names is CORRELATIONS:
            return Scores(correlations((unit[:, 0] * unit[:, 1]).sum(-1), totals["rows_scores"]))
        texts, rows = totals["rows_texts"], data.source.rows.eval
        metrics = retrieval(texts, lambda rows, others: unit[rows, 0] @ unit[others, 1].T)
        evaluated = [rows[index].texts for index in totals["rows_index"]]
        found = nearest_texts(texts, unit, evaluated, self.num_queries)
        return Scores(metrics, {"retrieval": {"queries": found}} if found else {})

    def baselines(self, data: TaskData) -> dict[str, float]:
        """Return the scores of the cosine similarity of TF-IDF vectors, of words and of 3 to 5 characters in words.

        They are fitted on training texts. Texts in scripts without spaces have one baseline, of 1 to 3 characters.
        """
        if data.eval is None:
            return {}
        from sklearn.feature_extraction.text import TfidfVectorizer

        rows, samples = data.source.rows, cast("list[rows_of.Sample]", data.eval)
        train = list(chain.from_iterable(row.texts for row in rows.train[:_MOST_ROWS_TO_FIT]))
        texts = np.array([sample.texts for sample in samples])
        baselines, characters = dict[str, float](), characters_as_words(train)
        analyzers: dict[str, dict[str, Any]] = {
            "tfidf": {},
            "tfidf_of_characters": {"analyzer": "char_wb", "ngram_range": (3, 5)},
        }
        for name, analyzer in (
            analyzers if characters is None else {"tfidf_of_characters": {"analyzer": characters}}
        ).items():
            vectorizer = TfidfVectorizer(sublinear_tf=True, **analyzer)
            try:
                vectorizer.fit(train)
            # The texts have no word of two letters.
            except ValueError:
                continue
            first, second = (vectorizer.transform([row.texts[side] for row in rows.eval]) for side in (0, 1))
            if self.metric_names is CORRELATIONS:
                similarities = np.asarray(first.multiply(second).sum(1)).ravel()
                found = correlations(similarities, np.array([sample.score for sample in samples]))
            else:
                found = retrieval(texts, lambda of, others: (first[of] @ second[others].T).toarray())  # noqa: B023
            baselines |= {f"{name}_{metric}": value for metric, value in found.items()}
        return baselines

    def predict_batch(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return the vector of each text, or the similarity of the first two texts of each row."""
        unit = normalize(self._table(model, batch).vectors, dim=-1)
        if unit.shape[1] == 1:
            return {"embedding": unit[:, 0]}
        return {"similarity": (unit[:, 0] * unit[:, 1]).sum(-1)}

    def prediction_columns(self, rows: Totals, data: TaskData) -> Columns:
        """Return `embedding` (a list of numbers) or `similarity`, as the shortest decimals of float32."""
        if "similarity" in rows:
            return {"similarity": decimals(rows["similarity"])}
        return {"embedding": [*map(decimals, rows["embedding"])]}

    def save(self, model: nn.Module, data: TaskData, folder: Path) -> None:
        """Write the model with its tokenizer, and the files by which sentence-transformers opens the folder."""
        # This task pads on the right.
        data.source.tokenizer.padding_side = "right"
        super().save(model, data, folder)
        write_folder(folder, self.pooling, data.source.config.hidden_size, data.facts.max_length, data.source.prompts)

    def use(self, model: nn.Module, data: TaskData) -> Use:
        facts = [
            f"Gives: vectors of {data.source.config.hidden_size} numbers, normalized; compare by cosine similarity",
            models.reads(data.facts.max_length),
            f"Loss: {self.objective.name}; pooling: {self.pooling}",
        ]
        if self.objective.dims:
            facts.append(f"Leading dimensions that work alone: {', '.join(map(str, self.objective.dims))}")
        return Use(_EXAMPLE, facts, "rows")

    def exportable(self, model: nn.Module) -> nn.Module:
        """Return the model with its pooling and normalization."""
        return Embedder(model, self.pooling)

    def export_batch(self, batch: Batch) -> Tensors:
        return {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}

    def _table(self, model: nn.Module, batch: Batch) -> Table:
        """Return the pooled vectors of a batch in fp32, with its other columns."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        found = model(input_ids=ids.flatten(0, 1), attention_mask=mask.flatten(0, 1))
        # The graph of `export --onnx` has pooled already.
        vectors = getattr(found, EMBEDDING, None)
        if vectors is None:
            vectors = pooled(found.last_hidden_state, mask.flatten(0, 1), self.pooling)
        return Table(vectors.unflatten(0, ids.shape[:2]), batch["texts"], batch["scores"])


class Embedder(nn.Module):
    """A model with its pooling and normalization, as sentence-transformers applies them to the saved folder."""

    def __init__(self, model: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **more: Tensor) -> Tensors:
        """Return `sentence_embedding` (N, D): one normalized fp32 vector per text."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **more).last_hidden_state
        return {EMBEDDING: normalize(pooled(hidden, attention_mask, self.pooling), dim=-1)}


def pooled(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return one fp32 vector (N, D) per text from (N, T, D). `mask` (N, T) is 1 for its tokens, which come first."""
    hidden = hidden.float()
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = mask.sum(1) - 1
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
    weights = mask[..., None].float()
    return (hidden * weights).sum(1) / weights.sum(1)


def _prompt_notes(section: SentenceEmbeddingData) -> list[str]:
    """Return the prompt of each column to predict, if the prompts of queries and documents differ."""
    if section.is_for_training or section.anchor_prompt == section.positive_prompt:
        return []
    named = [
        f"column {column!r} gets the {name} prompt {section.prompts[name]!r}"
        for column, name in zip(section.pair_columns, section.prompt_names, strict=True)
    ]
    other = ", ".join({"query": "document", "document": "query"}[name] for name in section.prompt_names[:1])
    return [f"{'; '.join(named)}. Set --data.column_prompts to change it, for example [{other}]"]


def _pooling(recipe: Recipe, section: SentenceEmbeddingData) -> tuple[Pooling, str]:
    """Return the pooling and the reason for it."""
    pretrained = recipe.model.pretrained
    found = pooling_of(recipe.model) if pretrained else None
    if section.pooling != "auto":
        differs = "" if found in (None, section.pooling) else f", although {pretrained} was trained with {found}"
        return section.pooling, f"as set{differs}"
    if found is not None:
        return found, f"as in {pretrained}"
    return "mean", "the default; the model names none"


def _check_config(config: PreTrainedConfig, section: SentenceEmbeddingData) -> None:
    if config.is_encoder_decoder:
        raise ValueError(
            f"model type {config.model_type!r} has an encoder and a decoder, and sentence-embedding pools one stack; "
            "name an encoder (bert, modernbert) or a decoder (qwen3)"
        )
    if not isinstance(width := value_of(config, "hidden_size"), int):
        raise ValueError(f"model type {config.model_type!r} does not say the length of its vectors (hidden_size)")
    too_many = [dim for dim in section.matryoshka_dims if dim > width]
    if too_many:
        raise ValueError(
            f"data.matryoshka_dims names {too_many[0]}, but the model's vectors have {width} numbers; leave it out"
        )


Floats = NDArray[np.floating[Any]]
CORRELATIONS = ("spearman", "pearson")
RETRIEVAL = ("recall_at_1", "recall_at_10", "mrr_at_10", "ndcg_at_10")
_LARGEST_CHUNK = 2**24
"""Most similarities in memory at a time."""


def correlations(similarities: Floats, scores: Floats) -> dict[str, float]:
    """Return Spearman's and Pearson's correlation of similarities with the scores of the pairs."""
    return {
        "spearman": spearman_correlation(similarities, scores),
        "pearson": pearson_correlation(similarities, scores),
    }


def retrieval(
    texts: NDArray[np.int64], similarities: Callable[[NDArray[Any], NDArray[Any]], Floats]
) -> dict[str, float]:
    """Return the mean over distinct anchors of recall@1, recall@10, MRR@10, and nDCG@10.

    The documents are the distinct positives of all rows. Those of an anchor are the positives of its rows. A document
    with an equal similarity counts as ranked before, so equal vectors score nothing.

    Args:
        texts: (N, K) a hash of each text: anchor, positive, and others that are not read.
        similarities: returns the matrix between the anchors of some rows and the positives of other rows.
    """
    _, rows, queries = np.unique(texts[:, 0], return_index=True, return_inverse=True)
    _, documents, targets = np.unique(texts[:, 1], return_index=True, return_inverse=True)
    pairs = np.unique(np.stack([queries, targets]), axis=1)
    ranks = []
    for chunk in np.array_split(pairs, -(-pairs.shape[1] * len(documents) // _LARGEST_CHUNK) or 1, axis=1):
        found = similarities(rows[chunk[0]], documents)
        own = np.take_along_axis(found, chunk[1][:, None], axis=1)
        # A NaN ranks last.
        ranks.append(len(documents) - (found < own).sum(1))
    rank, query = np.concatenate(ranks), pairs[0]

    def summed(values: NDArray[Any]) -> Floats:
        return np.bincount(query, values.astype(np.float64), minlength=len(rows)).astype(np.float64)

    number = np.bincount(query)
    gains = 1 / np.log2(np.arange(2, 12))
    ideal = np.cumsum(gains)[np.minimum(number, 10) - 1]
    best = np.full(len(rows), np.iinfo(np.int64).max)
    np.minimum.at(best, query, rank)
    scores = {
        "recall_at_1": summed(rank <= 1) / number,
        "recall_at_10": summed(rank <= 10) / number,
        "mrr_at_10": np.where(best <= 10, 1 / best, 0.0),
        "ndcg_at_10": summed(np.where(rank <= 10, 1 / np.log2(rank + 1), 0.0)) / ideal,
    }
    return {name: float(values.mean()) for name, values in scores.items()}


def nearest_texts(
    texts: NDArray[np.int64], unit: Floats, shown: Sequence[tuple[str, ...]], number: int
) -> list[JsonRecord]:
    """Return evenly spaced queries with the documents whose vectors are nearest, and whether these are right.

    Args:
        texts: (N, K) a hash of each text: anchor, positive, and others that are not read.
        unit: (N, K, D) the normalized vectors of the texts.
        shown: the texts of each row.
        number: most queries.
    """
    queries = np.sort(np.unique(texts[:, 0], return_index=True)[1])
    documents = np.unique(texts[:, 1], return_index=True)[1]
    found = []
    for query in queries[:: max(1, len(queries) // number)][:number] if number else ():
        similarities = unit[documents, 1] @ unit[query, 0]
        nearest = documents[np.argsort(-similarities, kind="stable")[:_NEAREST]]
        own = texts[texts[:, 0] == texts[query, 0], 1]
        ranked = [
            {
                "text": _cut(shown[row][1]),
                "similarity": float(unit[row, 1] @ unit[query, 0]),
                "is_right": bool((own == texts[row, 1]).any()),
            }
            for row in nearest.tolist()
        ]
        found.append({"query": _cut(shown[query][0]), "nearest": ranked})
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
