"""Masked language modeling: text windows with tokens to predict, and rows whose masks are filled."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from accel_train.data.encoding import read_lines
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.sources import file_kind, resolve_sources
from accel_train.data.tables import check_text
from accel_train.data.text.padding import padded
from accel_train.data.text.tokens import PADDING, Windows, recut
from accel_train.task import Collated
from accel_train.tasks.common.texts import TextRow, text_rows
from accel_train.tasks.masked_lm.config import MaskedLMData
from accel_train.tasks.rows import file_by_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EVALUATION_SEED = 20_181_011
"""Seed of the evaluation masks. They are the same for any run seed."""
_MASKED, _LEFT = 0.8, 0.9
"""Cumulative shares of predicted tokens: 80% masked, 10% kept, 10% replaced (Devlin et al. 2018, section 3.1)."""


class Masked(NamedTuple):
    """A window or row with its special tokens. Both arrays are (T,) int64."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    """Tokens to predict, or -100 at other positions."""


@dataclass(frozen=True, eq=False)
class Masking:
    """The rule that masks tokens."""

    probability: float
    mask_id: int
    is_special: NDArray[np.bool_]
    """Per id: whether it is special. Special tokens are never masked and never replace another token."""
    prefix: tuple[int, ...]
    """Special tokens before a window."""
    suffix: tuple[int, ...]
    """Special tokens after a window."""

    def draw(self, tokens: NDArray[np.int64], generator: np.random.Generator) -> Masked:
        """Return a masked window. Each token has the same probability, and at least one is masked if possible."""
        may_be = ~self.is_special[tokens]
        chosen = may_be & (generator.random(len(tokens)) < self.probability)
        if not chosen.any() and may_be.any():
            chosen[generator.choice(np.flatnonzero(may_be))] = True
        share = generator.random(len(tokens))
        ids = np.where(chosen & (share < _MASKED), self.mask_id, tokens)
        is_replaced = chosen & (share >= _LEFT)
        ordinary = np.flatnonzero(~self.is_special)
        ids[is_replaced] = ordinary[generator.integers(len(ordinary), size=int(is_replaced.sum()))]
        labels = np.where(chosen, tokens, IGNORED_LABEL)
        before, after = (np.full(len(part), IGNORED_LABEL) for part in (self.prefix, self.suffix))
        return Masked(np.concatenate([self.prefix, ids, self.suffix]), np.concatenate([before, labels, after]))


def masking_of(tokenizer: "PreTrainedTokenizerBase", vocab_size: int, separator_id: int, probability: float) -> Masking:
    """Return the masking rule for a tokenizer, with the special tokens that it puts around a text."""
    is_special = np.ones(vocab_size, dtype=bool)
    is_special[list(tokenizer.get_vocab().values())] = False
    is_special[[*tokenizer.all_special_ids, separator_id]] = True
    frame = tuple(tokenizer("")["input_ids"])
    begins = bool(frame) and frame[0] in (tokenizer.cls_token_id, tokenizer.bos_token_id)
    return Masking(probability, int(tokenizer.mask_token_id), is_special, frame[:begins], frame[begins:])


class MaskedWindows(Dataset[Masked]):
    """Windows of a token stream. `draw` gives new masks; an index gives the fixed masks of evaluations."""

    def __init__(self, windows: Windows, masking: Masking, sequence_length: int) -> None:
        self.masking = masking
        framed = sequence_length - len(masking.prefix) - len(masking.suffix)
        self.windows = recut(windows, framed)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Masked:
        return self.draw(index, np.random.default_rng((_EVALUATION_SEED, index)))

    def draw(self, index: int, generator: np.random.Generator) -> Masked:
        """Return window `index` with masks from a generator. The last window may be shorter."""
        # The last token of a window is the target of a causal model and belongs to the next window.
        tokens = self.windows[index][:-1]
        return self.masking.draw(tokens[tokens != PADDING], generator)


def collate_masked(samples: Sequence[Masked], *, pad_id: int) -> Collated:
    """Return a batch: `input_ids` and `labels` (N, T) int64, and `num_targets`, the number of labels other than -100.

    If lengths differ, samples are padded on the right and the batch has `attention_mask` (N, T) int64.
    """
    ids, every = zip(*samples)
    width = max(map(len, ids))
    labels = padded(every, width, IGNORED_LABEL)
    batch = {"input_ids": padded(ids, width, pad_id), "labels": labels}
    if min(map(len, ids)) < width:
        batch["attention_mask"] = padded([np.ones(len(row)) for row in ids], width, 0)
    return {**batch, "num_targets": int((labels != IGNORED_LABEL).sum())}


def rows_to_fill(data: MaskedLMData) -> list[TextRow]:
    """Return the texts of `data.eval`, or of `data.train` without it: rows of tables and lines of text files.

    Raises:
        ValueError: no text exists, or a text cannot be read; the message names file and row.
    """
    rows, key = list[TextRow](), data.train_key
    for part in file_by_file(resolve_sources(data.eval or data.train_names, data, key=key)):
        is_text = bool(part.files) and file_kind(part.files[0]) == "text"
        rows += _lines(part.files[0], data) if is_text else text_rows([part], data, (data.text_column,), None, key=key)
    if not rows:
        raise ValueError(f"{key} holds no text; give a line or a row for each text whose masks are to be filled")
    return rows


def _lines(path: Path, data: MaskedLMData) -> Iterator[TextRow]:
    for number, (line, _) in enumerate(read_lines(path, data), start=1):
        where = f"{path}:{number}"
        if line.strip():
            yield TextRow((check_text(line.rstrip("\r\n"), where, data),), None, where, where)


def mask_rows(rows: Sequence[TextRow], tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[Masked]:
    """Return texts with masks as samples without labels. Longer texts are truncated.

    Raises:
        ValueError: a text has no mask; the message names it.
    """
    samples = []
    for row in rows:
        ids = np.array(tokenizer(row.texts[0], truncation=True, max_length=max_length)["input_ids"], dtype=np.int64)
        if not (ids == tokenizer.mask_token_id).any():
            raise ValueError(
                f"{row.where}: there is no {tokenizer.mask_token} within the text's first {max_length} tokens; write "
                "one for each token that is to be filled in"
            )
        samples.append(Masked(ids, np.full(len(ids), IGNORED_LABEL)))
    return samples
