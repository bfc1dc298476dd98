"""Parts that several tasks share: rows of text in memory and their source, padded pairs, counts, and predictions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor, nn

from accel_train.core.files import digest64
from accel_train.data.labels import IGNORED_LABEL, LabelScheme
from accel_train.data.sources import Source
from accel_train.data.tables import columns_read, read_rows
from accel_train.data.text.documents import Split
from accel_train.data.text.kept import Rows, Values
from accel_train.data.text.padding import padded, padded_inputs, samples_digest
from accel_train.data.text.rows_cache import bpe_of, contents_of, open_rows
from accel_train.data.text.sharded_rows import ESTIMATED, ShardedRows, cut_rows, row_shards
from accel_train.data.text.shards import sharded
from accel_train.data.text.tokenizers import KeptBPE, tokenizer_digest
from accel_train.model.kernels.chunked_loss import summed_loss
from accel_train.recipe.data import BlockData, Data, TrainedTokenizer
from accel_train.recipe.schema import Recipe
from accel_train.task import Batch, TaskData, Tensors, Totals
from accel_train.tasks.common.texts import Divided

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Kind = TypeVar("Kind", bound=Divided[Any])

_READ_BEFORE = (
    "rows of up to 64 MiB, at equal distances, are read before step 1: notes on rows, counts of classes, and baselines "
    "are about these, and evaluation rows are held out of them"
)
_FIRST = 1024
"""Training rows that are encoded before training, if the others are in shards."""


@dataclass(frozen=True)
class TextSource(Generic[Kind]):
    """The rows, tokenizer, and model configuration that a text task keeps in addition to its samples."""

    rows: Kind
    tokenizer: "PreTrainedTokenizerBase"
    config: "PreTrainedConfig"

    @property
    def evaluated(self) -> list[Any]:
        """Evaluation rows."""
        assert self.rows.eval is not None
        return self.rows.eval

    def row_ids(self, index: int) -> str:
        """Return the name of an evaluation row: its id column, or its file and row number."""
        return str(self.evaluated[index].id)


class Kept:
    """Rows, tokenizer, and samples of a recipe, kept (`open_rows`).

    `contents` is all that determines the rows besides sources and data settings. `read` returns the rows of sources, if
    they may be read in blocks.
    """

    def __init__(
        self,
        recipe: Recipe,
        progress: bool,
        *contents: object,
        read: Callable[..., list[Any]] = list,
        not_in_blocks: Mapping[str, bool] = {},
    ) -> None:
        self.recipe, self.progress, self.contents = recipe, progress, contents
        self.read = partial(_rows_of, data=recipe.data, read=read)
        self.whole, self.order_notes = cut_rows(recipe.data, not_in_blocks, self.read)
        self.keep = open_rows(recipe.data, progress, sampled=self.whole is not None)

    def rows(self, load: Callable[[], Any], make: Callable[..., Any], kind: Callable[..., Any] = Divided) -> Any:
        """Return `load()`, an instance of `kind` with rows of class `make`."""

        def build() -> Values:
            found = vars(load())
            return {**found, "scheme": asdict(found["scheme"])} if "scheme" in found else found

        found = self.keep([self.contents], build, make)
        if "scheme" in found:
            found = {**found, "scheme": TypeAdapter(LabelScheme).validate_python(found["scheme"])}
        return kind(**found)

    def words(self, texts: Iterable[str]) -> Iterable[str]:
        """Return texts that may train a tokenizer, or the BPE that they have trained."""
        spec = self.recipe.tokenizer_in_use
        if not isinstance(spec, TrainedTokenizer):
            return texts
        return KeptBPE(self.keep([self.contents, spec], partial(bpe_of, texts, spec), tuple)["bpe"])

    def samples(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        length: object,
        rows: Divided[Any],
        encode: Callable[[Any], Any],
        make: Callable[..., Any],
        names: Iterable[str],
        arrays_of: Callable[[Any], list[NDArray[Any]]],
        about: Callable[[Any, Any], Values] = lambda *_: {},
    ) -> Values:
        """Return the samples of both sides (`train`, `eval`) of class `make`, and what `about` says of them.

        `fingerprint` is a digest of names and arrays. `lengths` are the numbers of tokens of training samples, or of
        the longest text of each. `length` is all that determines an encoding besides rows and tokenizer.
        """

        def build() -> Values:
            train = encode(rows.train[: _FIRST if self.whole else None])
            evaluation = None if rows.eval is None else encode(rows.eval)
            arrays = arrays_of(train)
            return {
                "train": train,
                "eval": evaluation,
                "lengths": np.diff(arrays[1]).reshape(len(train), -1).max(axis=1),
                "fingerprint": samples_digest(names, arrays + ([] if evaluation is None else arrays_of(evaluation))),
                **about(train, evaluation),
            }

        self.determined = [tokenizer_digest(tokenizer), self.contents, length]
        kept = self.keep([contents_of(tokenizer), self.contents, length], build, make)
        # Encoding sets the truncation that is saved with the tokenizer.
        encode(rows.train[:1])
        return kept

    def in_blocks(
        self,
        found: TaskData,
        rows: Divided[Any],
        encode: Callable[..., list[Any]],
        make: Callable[..., Any],
    ) -> TaskData:
        """Return task data; if training rows are cut into shards, with samples of class `make` that are encoded there.

        `rows` were read before. `encode` takes rows, and can be pickled.
        """
        if self.whole is None:
            return found
        data, held_out = BlockData.of(self.recipe.data), [] if self.recipe.data.eval else rows.eval or []
        hashes = frozenset(digest64(row.key.encode(), data.split_seed) for row in held_out)
        shards, fingerprint, pins = row_shards(
            data,
            self.whole,
            found.fingerprint,
            self.determined,
            partial(_encode_shard, self.read, Split(hashes=hashes, seed=data.split_seed), encode),
            partial(Rows, make=make),
        )
        train = ShardedRows(shards)
        estimated = [] if train.count_needed(self.recipe, self.progress) else [ESTIMATED]
        found.facts.num_train, found.facts.cache_folder = len(train), str(shards.folder)
        found.add_notes([*self.order_notes, *estimated, _READ_BEFORE])
        return replace(
            found,
            train=train,
            lengths=None,
            fingerprint=fingerprint,
            large_files=pins,
            **sharded(train),
        )


def _rows_of(sources: Sequence[Source], data: Data, read: Callable[..., list[Any]]) -> list[Any]:
    columns = columns_read(data.input_columns[0])
    # A piece within a long row has none, and `read` refuses that.
    parts = [read([source]) for source in sources if next(read_rows(source, columns, data), None) is not None]
    return [row for part in parts for row in part]


def _encode_shard(
    read: Callable[..., list[Any]], split: Split, encode: Callable[..., list[Any]], sources: Sequence[Source]
) -> list[Any]:
    return encode([row for row in read(sources) if not split.holds_out(row.key)])


def given(*columns: str | None) -> list[str]:
    """Return the columns that a recipe names, without None."""
    return [column for column in columns if column is not None]


def file_by_file(sources: Iterable[Source]) -> Iterator[Source]:
    """Yield each file as a source of its own. A source without files stays as it is."""
    for source in sources:
        yield from source.parts()


def second_from(types: Sequence[int]) -> int:
    """Return the position of the first token of a pair's second text. For a single text, the number of tokens."""
    return types.index(1) if 1 in types else len(types)


def padded_pairs(ids: Sequence[NDArray[Any]], begins: Iterable[int], *, with_types: bool, **padding: int) -> Tensors:
    """Return `padded_inputs` of ids. `with_types` adds `token_type_ids`, which are 1 from `begins` of a row on."""
    batch = padded_inputs(ids, **padding)
    if with_types:
        types = [np.arange(len(row)) >= begin for row, begin in zip(ids, begins)]
        batch["token_type_ids"] = padded(types, batch["input_ids"].shape[1], 0)
    return batch


def logits_of(model: nn.Module, batch: Batch, not_read: Sequence[str] = ("labels",)) -> Tensor:
    """Return the logits of a batch in the model's precision, without the tensors that the model does not read."""
    return model(**{name: tensor for name, tensor in batch.items() if name not in not_read}).logits


def likeliest(scores: Tensor) -> Tensors:
    """Return the columns of predictions of one class per row, from the probabilities (N, C) of the classes."""
    score, label = scores.max(dim=-1)
    return {"label": label, "score": score, "scores": scores}


def token_counts(logits: Tensor, labels: Tensor) -> Tensors:
    """Return the summed loss without smoothing, the number of labels, and the number whose likeliest token is right."""
    return {
        "loss_sum": summed_loss(logits, labels),
        "num_hits": (logits.argmax(-1) == labels).sum(),
        "num_labels": (labels != IGNORED_LABEL).sum(),
    }


def token_accuracy(totals: Totals) -> float:
    """Return the share of right tokens, from `token_counts` of all batches."""
    return float(totals["num_hits"] / max(1, totals["num_labels"]))


def decimals(values: NDArray[Any]) -> list[float]:
    """Return the shortest decimals that round to the same values."""
    return [float(str(value)) for value in values]
