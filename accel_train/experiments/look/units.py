"""Read the samples of a task one by one, each collated alone, as the checks and the page take them."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from accel_train.core.errors import DataError
from accel_train.core.files import digest64
from accel_train.data.images.images import evenly_spaced
from accel_train.data.labels import IGNORED_LABEL
from accel_train.data.samples import fetch
from accel_train.data.text.shards import ShardedWindows
from accel_train.data.text.tokens import BEGINS, PADDING, WindowDataset, parts_of
from accel_train.task import Collated, TaskData

Hashes = NDArray[np.uint64]

MOST_TEXTS = 1_000_000
"""Texts that are read. Of more, evenly spaced ones are read."""
MOST_IMAGES = 5_000
"""Samples without token ids that are read: decoding an image takes milliseconds."""
MOST_TOKENS = 50_000_000
"""Tokens of a token file that are read as documents, from its start."""
MOST_SHOWN = 8
"""Samples of each side whose text is kept for people."""
_MOST_CHARACTERS = 50
GRAM = 5
"""Words of a group."""
_LONG_WORD = 20
"""Mean characters of a word above which a text has no spaces: each character counts as a word."""
_UNKNOWN = 0.05
"""Share of unknown tokens from which a tokenizer does not fit a text."""
_BAND = 4
"""Hashes that are compared at once."""
_NEAR = 0.8
"""Share of common groups from which texts are nearly the same."""
_LABELS = re.compile(r"(soft_)?labels?|targets?|class_ids|boxes|label_sizes|y")
"""Names of tensors that a model is not given to read."""
_NOTHING = torch.zeros(0)
_KEYS = np.random.default_rng(0).integers(1, 2**63, (2, 32), np.uint64)
_PLACE = re.compile(r"( from byte [\d,]+)?:\d+$|, row \d+$|, sample \d+ \(.*\)$| [\d,]+$")
"""Place in a file, after its name."""
_WRONG_ENCODING = re.compile("\\S\ufffd+\\S|Ã[\x80-\xbf]|Â[\xa0-\xbf]|â€")
"""A character that could not be decoded, and UTF-8 read as Latin-1 or cp1252."""
_TEMPLATE = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|user\|>|\[/?INST\]")
"""Marks of widespread chat templates. In a text, they are plain characters, which end no turn."""


class Row(NamedTuple):
    """Token ids, (T,), and whether the loss counts the prediction of each, (T,)."""

    ids: NDArray[np.int64]
    is_target: NDArray[np.bool_]


class Unit(NamedTuple):
    """A sample, a fine-tuning row, or a document of a text."""

    where: str
    digest: int
    """Hash of what the model reads."""
    label: int | None
    """Class of the whole sample; None if it has no class, or several."""
    classes: tuple[int, ...]
    """Classes in the sample: of its words, pixels, or boxes."""
    length: int
    """Tokens; 0 without token ids."""
    problems: tuple[str, ...]
    """Kinds of findings about this sample alone."""
    beginning: str
    """Beginning of the text, or why the sample cannot be read."""
    words: NDArray[np.uint32] = np.zeros(0, np.uint32)
    """Hash of each word."""
    parts: tuple[tuple[str, bool], ...] = ()
    """Text in parts, each with whether the loss counts its tokens. Empty after the first samples."""

    @property
    def file(self) -> str:
        """Return the file of the sample, or its data set."""
        return _PLACE.sub("", self.where)


Units = Sequence[Unit]


def read_units(data: TaskData, section: Any, *, is_training: bool) -> Iterator[Unit]:
    """Yield the units of one side, at most `MOST_TEXTS` or `MOST_IMAGES`, evenly spaced.

    A unit that cannot be read has the problem `unreadable`, and the error in place of its beginning.
    """
    samples: Any = _opened(data.train if is_training else data.eval)
    if samples is None:
        return
    side, tokenizer = "train" if is_training else "eval", tokenizer_of(data)
    rows = _rows(samples, tokenizer)
    count = len(samples if rows is None else rows)
    of_side = getattr(getattr(data.source, "rows", None), side, ())
    name_of = data.where if is_training else getattr(data.source, "row_ids", None)
    if name_of is None and len(of_side) == count:
        name_of = lambda number: of_side[number].where  # noqa: E731
    for number in evenly_spaced(count, MOST_IMAGES if tokenizer is None else MOST_TEXTS):
        where = name_of(number) if name_of and rows is None else f"{side} {number + 1:,}"
        try:
            batch = data.collate(fetch(samples, [number])) if rows is None else {}
        except DataError as error:
            yield Unit(where, number, None, (), 0, ("unreadable",), str(error))
            continue
        row = _row(batch, is_text=not data.facts.label_names) if rows is None else rows[number]
        yield _unit(where, batch, row, data, section, with_parts=number < MOST_SHOWN)


def tokenizer_of(data: TaskData) -> Any:
    """Return the tokenizer of a task's data, or None."""
    return getattr(data.source, "tokenizer", None)


def _rows(samples: Any, tokenizer: Any) -> list[Row] | None:
    """Return the documents of windows of a text, or the fine-tuning rows of packed windows; None for other samples."""
    parts = [part for each in parts_of(samples) for part in parts_of(_opened(each))]
    found = [_opened(stream) for each in parts for stream in parts_of(getattr(each, "windows", each))]
    if streams := [each for each in found if isinstance(each, WindowDataset)]:
        return [row for each in streams for row in _documents(each, tokenizer, MOST_TOKENS // len(streams))]
    packed = [each.rows for each in parts if hasattr(each, "rows")]
    spans = [(rows, slice(*each)) for rows in packed for each in pairwise(rows.starts)]
    return [Row(rows.tokens[span], rows.is_target[span]) for rows, span in spans] if packed else None


def _opened(samples: Any) -> Any:
    return samples.first() if isinstance(samples, ShardedWindows) else samples


def _documents(stream: WindowDataset, tokenizer: Any, most_tokens: int) -> list[Row]:
    tokens = stream.__getitems__(range(min(len(stream), most_tokens // stream.sequence_length)))[:, :-1]
    tokens -= BEGINS * (tokens >= BEGINS)
    ends = np.flatnonzero(np.isin(tokens, getattr(tokenizer, "all_special_ids", ()))) + 1
    documents = np.split(tokens[tokens != PADDING], ends)
    return [Row(each, np.ones(len(each), np.bool_)) for each in documents if len(each) > 1]


def _row(batch: Collated, *, is_text: bool) -> Row:
    """Return the token ids of a batch of one sample without padding. With `is_text`, labels are ids, and follow."""
    ids, labels = batch.get("input_ids", _NOTHING).numpy(), batch.get("labels", _NOTHING)
    read = ids[batch["attention_mask"].numpy() > 0] if "attention_mask" in batch else ids.reshape(-1)
    follow = labels[labels != IGNORED_LABEL].numpy() if is_text and labels.ndim == 2 else read[:0]
    both = np.concatenate([read, follow]).astype(np.int64)
    return Row(both, np.arange(len(both)) >= len(read))


def _unit(where: str, batch: Collated, row: Row, data: TaskData, section: Any, *, with_parts: bool) -> Unit:
    tokenizer, names = tokenizer_of(data), data.facts.label_names or ()
    text = "" if tokenizer is None else tokenizer.decode(row.ids, skip_special_tokens=True)
    tensors = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor)}
    found = {
        "no_target": batch.get("num_targets") == 0,
        "not_finite": not all(each.isfinite().all() for each in tensors.values() if each.is_floating_point()),
        **(_of_text(text, row, batch, data, section) if len(row.ids) else _of_image(batch)),
    }
    labels: Any = batch.get("labels", batch.get("class_ids", _NOTHING))
    values = [] if labels.is_floating_point() else np.unique(labels.numpy()).tolist()
    classes = tuple(each for each in values if 0 <= each < len(names))
    inputs = [each.numpy().tobytes() for name, each in tensors.items() if not _LABELS.fullmatch(name)]
    runs = groupby(zip(*row), lambda each: bool(each[1])) if tokenizer and with_parts else ()
    return Unit(
        where,
        digest64(row.ids.tobytes() or b"".join(inputs)),
        classes[0] if classes and labels.ndim == 1 else None,
        classes,
        len(row.ids),
        tuple(kind for kind, is_found in found.items() if is_found),
        " ".join(text[:_MOST_CHARACTERS].split()),
        _words(text),
        tuple((tokenizer.decode([token for token, _ in run]), counts) for counts, run in runs),
    )


def _of_text(text: str, row: Row, batch: Collated, data: TaskData, section: Any) -> dict[str, Any]:
    tokenizer = tokenizer_of(data)
    limit = getattr(section, "sequence_length", None) or data.facts.max_length or len(row.ids) + 1
    most_targets = getattr(section, "max_target_length", None) or len(row.ids) + 1
    # The first token of a document is a target, and the first of a row with an answer is not.
    is_answered = row.is_target[-1] and not row.is_target[0]
    marks = {mark for mark in _TEMPLATE.findall(text) if mark not in str(getattr(tokenizer, "chat_template", ""))}
    return {
        "cut_answers": is_answered and (row.is_target.sum() >= most_targets or (not batch and len(row.ids) > limit)),
        "cut": "attention_mask" in batch and batch["attention_mask"].numpy().sum(-1).max() >= limit,
        "unknown_tokens": np.count_nonzero(row.ids == getattr(tokenizer, "unk_token_id", -1)) > _UNKNOWN * len(row.ids),
        "empty": tokenizer is not None and not text.strip(),
        "wrong_encoding": not text.isascii() and _WRONG_ENCODING.search(text) is not None,
        "other_template": bool(marks),
    }


def _of_image(batch: Collated) -> dict[str, Any]:
    pixels, labels = batch.get("pixel_values"), batch.get("labels", _NOTHING)
    return {
        "blank_images": pixels is not None and (pixels.amax((-2, -1)) == pixels.amin((-2, -1))).all(),
        "empty_masks": labels.ndim == 3 and len(labels.unique()) == 1,
        "no_boxes": "class_ids" in batch and not (batch["class_ids"] >= 0).any(),
    }


def _words(text: str) -> NDArray[np.uint32]:
    words: Sequence[str] = text.split()
    words = text if len(text) > _LONG_WORD * len(words) else words
    return np.array([crc32(word.encode(errors="surrogatepass")) for word in words], np.uint32)


def near_pairs(units: Units) -> Iterator[tuple[int, int]]:
    """Yield pairs (later, earlier) of units whose groups of five words are 80 % the same, by MinHash (Broder 1997).

    Units that share 4 of 32 hashes at the same place are compared with the first of them, so the cost is O(n log n).
    A pair of 80 % is found with a probability of 98 %.
    """
    numbers = np.array([number for number, unit in enumerate(units) if len(unit.words) >= GRAM], np.int64)
    if not len(numbers):
        return
    groups = (_groups(units[number]) for number in numbers)
    least = (((each[:, None] * _KEYS[0] + _KEYS[1]) >> np.uint64(32)).min(axis=0) for each in groups)
    # Half of the memory of 64 bits, which the products need.
    hashes = np.fromiter(least, np.dtype((np.uint32, len(_KEYS[0]))), len(numbers))
    pairs = set[tuple[int, int]]()
    for band in range(0, len(_KEYS[0]), _BAND):
        keys = hashes[:, band : band + _BAND].astype(np.uint64) @ _KEYS[0, :_BAND]
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        pairs.update(zip(numbers.tolist(), numbers[first[group]].tolist()))
    for later, earlier in sorted(pairs):
        one, other = units[later], units[earlier]
        if one.digest != other.digest and _share(*map(np.unique, map(_groups, (one, other)))) >= _NEAR:
            yield later, earlier


def _groups(unit: Unit) -> Hashes:
    """Return a hash of each five words in sequence."""
    return np.correlate(unit.words.astype(np.uint64), _KEYS[0, :GRAM])


def _share(one: Hashes, other: Hashes) -> float:
    """Return the share of groups that both have among those that one has (Jaccard)."""
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
