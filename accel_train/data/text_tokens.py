"""Tokenised samples for classification: the tokenizer that makes them, the arrays they lie in, and their batches."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from tqdm import tqdm

from accel_train.data.labels import UNKNOWN_LABEL
from accel_train.data.text_rows import TextRows
from accel_train.data.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from accel_train.recipe import Recipe
from accel_train.recipe_data import TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MAX_LENGTH = 512
"""Tokens of a sample at most, where neither recipe nor model says less."""

_TEXTS_PER_CALL = 1000


class Sample(NamedTuple):
    """One text, or pair, and its label."""

    ids: NDArray[np.int32]
    second_from: int
    """Where the second text of a pair begins; the number of tokens where there is none."""
    label: Any
    """An id, a number, or a row of zeros and ones."""


class TokenizedTexts(Dataset[Sample]):
    """Samples in flat arrays: 4 bytes a token, and nothing of Python for each sample."""

    def __init__(
        self, ids: NDArray[np.int32], offsets: NDArray[np.int64], second_from: NDArray[np.int32], labels: NDArray[Any]
    ) -> None:
        self.ids, self.offsets, self.second_from, self.labels = ids, offsets, second_from, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        start, stop = self.offsets[index : index + 2]
        return Sample(self.ids[start:stop], int(self.second_from[index]), self.labels[index])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class CollateTexts:
    """Samples to a batch, padded to its longest on the right."""

    pad_id: int
    multiple: int
    """The padded length is one of this ..."""
    max_length: int
    """... and never more than this, which is what the model can take."""
    with_types: bool
    """Tell the model which tokens are of the second text."""

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """`input_ids`, `attention_mask` and perhaps `token_type_ids`, (N, T) int64; `labels` (N, ...); `num_targets`: N, less
        the texts whose class is not known."""
        longest = max(len(sample.ids) for sample in samples)
        shape = len(samples), min(-(-longest // self.multiple) * self.multiple, self.max_length)
        input_ids = np.full(shape, self.pad_id, dtype=np.int64)
        attention_mask, types = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, sample in enumerate(samples):
            length = len(sample.ids)
            input_ids[row, :length] = sample.ids
            attention_mask[row, :length] = 1
            types[row, sample.second_from : length] = 1
        batch = {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(attention_mask)}
        if self.with_types:
            batch["token_type_ids"] = torch.from_numpy(types)
        labels = np.stack([np.asarray(sample.label) for sample in samples])
        num_targets = int((labels != UNKNOWN_LABEL).sum()) if labels.ndim == 1 else len(samples)
        return {**batch, "labels": torch.from_numpy(labels), "num_targets": num_targets}


def tokenize_rows(
    rows: TextRows, labels: NDArray[Any], tokenizer: "PreTrainedTokenizerBase", max_length: int, *, progress: bool
) -> TokenizedTexts:
    """Rows as token ids with the tokenizer's special tokens; longer ones are cut, of a pair the longer text first.

    What looks like a special token inside a text is read as the characters that it is.

    Raises:
        ValueError: a text has no token at all.
    """
    # Undecided, the library warns in each DataLoader worker that is forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    pieces: list[NDArray[np.int32]] = []
    second_from = np.zeros(len(rows), dtype=np.int32)
    starts = range(0, len(rows), _TEXTS_PER_CALL)
    bar = tqdm(
        total=len(rows), desc="tokenising", unit=" texts", disable=None if progress else True, leave=False, delay=1
    )
    with bar:
        for start in starts:
            texts = rows.texts[start : start + _TEXTS_PER_CALL]
            encoded = tokenizer(
                [text[0] for text in texts],
                [text[1] for text in texts] if len(texts[0]) == 2 else None,
                truncation=True,
                max_length=max_length,
                split_special_tokens=True,
                return_token_type_ids=True,
                return_attention_mask=False,
                verbose=False,
            )
            for row, (ids, types) in enumerate(zip(encoded["input_ids"], encoded["token_type_ids"]), start=start):
                if not ids:
                    raise ValueError(
                        f"{rows.labels[row].where}: the text is empty, and the tokenizer adds no token of its own; drop the row"
                    )
                pieces.append(np.array(ids, dtype=np.int32))
                second_from[row] = types.index(1) if 1 in types else len(ids)
            bar.update(len(texts))
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    return TokenizedTexts(np.concatenate(pieces), offsets, second_from, labels)


def classifier_tokenizer(recipe: Recipe, train: TextRows) -> tuple["PreTrainedTokenizerBase", list[str]]:
    """The recipe's tokenizer with a padding token, and notes on what was decided.

    `bytes` and a BPE trained here get [CLS], [SEP] and [PAD], and read a text as [CLS] text [SEP], a pair as
    [CLS] first [SEP] second [SEP]. `auto` is the tokenizer of `model.pretrained`, else bytes.

    Raises:
        ValueError: it cannot be loaded.
    """
    choice = recipe.tokenizer_in_use
    if isinstance(choice, TrainedTokenizer):
        texts = (text for row in train.texts for text in row)
        trained = train_bpe(texts, choice.train_bpe.vocab_size)
        notes = []
        if len(trained) < choice.train_bpe.vocab_size:
            wanted = choice.train_bpe.vocab_size
            notes = [f"the training texts support {len(trained)} tokens, not tokenizer.train_bpe.vocab_size={wanted}"]
        return _with_frame(trained), notes
    if choice == "bytes":
        return _with_frame(byte_tokenizer()), []
    notes = []
    if recipe.tokenizer == "auto":
        notes.append(f"tokenizer: that of {choice}, which the model was trained with")
    tokenizer = load_tokenizer(choice, trust_remote_code=recipe.model.trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        notes.append(f"the tokenizer {choice} has no padding token: [PAD] was added, as id {tokenizer.pad_token_id}")
    return tokenizer, notes


def resolve_max_length(
    asked: int | None, positions: int | None, tokenizer: "PreTrainedTokenizerBase", *, is_pair: bool
) -> int:
    """Tokens of a sample at most: `data.max_length`, else what model and tokenizer take, 512 at most.

    Raises:
        ValueError: it is more than the model has positions, or leaves no room for text.
    """
    if asked is None:
        return min(DEFAULT_MAX_LENGTH, tokenizer.model_max_length, positions or DEFAULT_MAX_LENGTH)
    if positions is not None and asked > positions:
        raise ValueError(
            f"data.max_length={asked} is longer than the {positions} positions of the model; lower it to {positions}, or raise "
            "max_position_embeddings (n_positions) in model.config"
        )
    least = tokenizer.num_special_tokens_to_add(pair=is_pair) + 1 + is_pair
    if asked < least:
        raise ValueError(
            f"data.max_length={asked} leaves no token for {'two texts' if is_pair else 'the text'}; give at least {least}"
        )
    return asked


def note_of_cut_texts(tokenized: TokenizedTexts, max_length: int) -> Iterator[str]:
    """A note where texts fill all of `max_length`: they were cut, but for a few that fit exactly."""
    count = int((tokenized.lengths >= max_length).sum())
    if count:
        yield f"{count:,} of {len(tokenized):,} training texts reach data.max_length={max_length} tokens, and are cut there"


def digest_arrays(arrays: Iterable[NDArray[Any]]) -> str:
    """Hex digest of arrays: their types, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _with_frame(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
    )
    return tokenizer
