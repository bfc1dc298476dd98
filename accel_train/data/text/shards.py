"""Shards of tokens, made from raw text when they are first read: in any order, by any process, once.

A shard is the text of whole lines or rows, `SHARD_BYTES` in all: its tokens depend on the sources and the tokenizer
alone. It is published in one rename as FOLDER/000/000123.bin, with the SHA-256 of its tokens in the last 32 bytes. Its
lock is free again when a process that makes it is killed, and the next one takes over.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout
from numpy.typing import NDArray
from torch.utils.data import Dataset
from tqdm import tqdm

from accel_train.buckets.files import RemoteFile
from accel_train.core.errors import DataError
from accel_train.core.files import sync, write_atomically
from accel_train.core.hardware import usable_cores
from accel_train.core.json_io import json_digest, parse_json
from accel_train.core.terminal import is_main
from accel_train.core.work import helped, working
from accel_train.data import cache
from accel_train.data.delimited import delimiter_of, quoting_of, record_edges
from accel_train.data.encoding import encoding_of, has_parts
from accel_train.data.samples import numbered
from accel_train.data.sources import Source, files_of, num_bytes_of
from accel_train.data.tables import parquet_file
from accel_train.data.text.documents import Split
from accel_train.data.text.encode import Chunk, Counts, write_tokens
from accel_train.data.text.fast_ids import faster_encoder
from accel_train.data.text.tokenizers import TextTokenizer, TokenIds, encode_bytes
from accel_train.data.text.tokens import ShardWriter, TokenStream, WindowDataset, samples_of
from accel_train.recipe.data import BlockData
from accel_train.recipe.schema import Recipe

SHARD_BYTES = 1 << 20
SAMPLE_BYTES = 64 << 20
"""Text that is read before training: it trains a tokenizer, and its held-out documents are the evaluation data."""
SHUFFLED_UP_TO_BYTES = 32 << 20
"""Text up to which `data.order: auto` tokenizes everything before training, in about 5 s on two cores."""
WINDOW_BITS = 32
"""Bits of the number of a window in the number of a sample. The bits above them have the shard."""

EVICTED_EVERY = 32
"""A shard whose number is a multiple of it looks for `data.cache_limit` once it is made."""

_DIGEST_BYTES = 32
_ATTEMPTS = 4
_MOST_OPEN = 1024
SHOWN = 16
"""Shards of which people see some samples."""
_POLL_SECONDS = 0.02
_SHOWN_AFTER_SECONDS = 3.0
_WHOLE = -1
_CUT = {"text", "jsonl", "csv"}

Read = Callable[[Sequence[Source]], Iterable[object]]


@dataclass(frozen=True)
class Cut:
    """Raw text, cut into shards."""

    sources: tuple[Source, ...]
    pieces: NDArray[np.int64]
    """Source, file, and part of the file of each piece: (pieces, 4). See `Source.span`; -1: the whole file."""
    bounds: NDArray[np.int64]
    """First piece of each shard, and the number of pieces: (shards + 1,)."""
    num_bytes: float
    by_source: bool
    """Whether the text of a shard is of one source."""
    rule: Any
    """What decides where the text is cut, besides the text."""
    data: Any
    """`WindowData` of text, or `BlockData` of rows."""
    read: Read
    """Function that reads the text or rows of sources, to find broken lines."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def spans(self) -> list[range]:
        """The shards of each source with a weight. Without weights, all are one span."""
        if not self.by_source:
            return [range(len(self))]
        numbers = np.arange(len(self.sources) + 1)
        return [range(*each) for each in pairwise(np.searchsorted(self.pieces[self.bounds[:-1], 0], numbers).tolist())]

    def sources_of(self, number: int) -> Iterator[Source]:
        """Yield the pieces of a shard as sources."""
        for at, file, start, stop in self.pieces[slice(*self.bounds[number : number + 2])].tolist():
            source = self.sources[at]
            if source.dataset is not None:
                yield replace(source, dataset=source.dataset.select(range(start, stop)))
            else:
                yield replace(source, files=(source.files[file],), span=None if stop == _WHOLE else (start, stop))

    def sample(self) -> list[Source]:
        """Return the text of shards at equal distances, `SAMPLE_BYTES` in all. It is the same for any seed."""
        count = min(len(self), SAMPLE_BYTES // SHARD_BYTES)
        return self.readable((np.arange(count) * len(self) // count).tolist())

    def readable(self, numbers: Iterable[int]) -> list[Source]:
        """Return the pieces of shards, as `without_broken` does."""
        sources = [source for number in numbers for source in self.sources_of(number)]
        return self.without_broken(sources)[0] if self.data.max_broken else sources

    def without_broken(self, sources: Sequence[Source]) -> tuple[list[Source], list[str]]:
        """Return pieces without the lines of jsonl that `read` refuses, and the errors of these lines.

        A piece with a broken line is halved down to this line, whose first byte the error names.

        Raises:
            DataError: more than `data.max_broken` lines are broken.
        """
        parts, errors, left = list[Source](), list[str](), [*reversed(sources)]
        while left:
            source = left.pop()
            try:
                # Without those in which no line begins.
                parts += [source] if deque(self.read([source]), maxlen=1) else []
            except ValueError as error:
                start, stop = source.span or (0, int(num_bytes_of(source)))
                width = len("\n".encode(encoding_of(source.files[0], self.data)))
                middle = start + (stop - start) // (2 * width) * width
                if middle > start:
                    left += [replace(source, span=(middle, stop)), replace(source, span=(start, middle))]
                    continue
                errors.append(str(error))
                numbered(errors[-1], len(errors), self.data.max_broken)
        return parts, errors


def cut(sources: tuple[Source, ...], data: BlockData, read: Read) -> Cut:
    """Cut sources into shards. Files of conll and json stay whole, and those in encodings of several bytes, as gbk.

    Raises:
        ValueError: a parquet file is damaged.
    """
    parts, sizes = [], []
    for number, source in enumerate(sources):
        for file, path in enumerate(source.files or [None]):
            edges, weights = _edges(replace(source, files=(path,) if path else ()), data)
            count = len(edges) - 1
            parts.append(np.stack([np.full(count, number), np.full(count, file), edges[:-1], edges[1:]], 1))
            sizes.append(weights)
    weights = np.concatenate(sizes)
    pieces, by_source = np.concatenate(parts).astype(np.int64), bool(data.mixture)
    shards = (np.cumsum(weights) - weights) // SHARD_BYTES
    is_first = np.diff(shards, prepend=-1) > 0
    if by_source:
        is_first |= np.diff(pieces[:, 0], prepend=-1) > 0
    # Earlier versions cut jsonl and text in UTF-8 alone.
    files = [(source.kind, path) for source in sources for path in source.files if source.kind in _CUT]
    is_old = all(kind != "csv" and encoding_of(path, data) == "utf-8" for kind, path in files)
    rule = SHARD_BYTES if is_old else [SHARD_BYTES, "records"]
    bounds = np.append(np.flatnonzero(is_first), len(pieces))
    return Cut(sources, pieces, bounds, float(weights.sum()), by_source, rule, data, read)


def _edges(source: Source, data: BlockData) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return where the pieces of a data set or one file begin and end, and their bytes."""
    num_bytes = num_bytes_of(source)
    if source.dataset is not None:
        num_rows = len(source.dataset)
        step = max(1, int(SHARD_BYTES * num_rows / max(num_bytes, 1)))
        edges = np.append(np.arange(0, num_rows, step), num_rows)
        return edges, np.diff(edges) * (num_bytes / max(num_rows, 1))
    path = source.files[0]
    if source.kind == "parquet":
        with parquet_file(path) as file:
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
        return np.arange(len(groups) + 1), np.array([float(group.total_byte_size) for group in groups])
    if source.kind in _CUT and num_bytes > SHARD_BYTES and has_parts(encoding_of(path, data)):
        is_table = source.kind == "csv"
        edges = _records(path, data) if is_table else np.append(np.arange(0, num_bytes, SHARD_BYTES), num_bytes)
        return edges, np.diff(edges)
    return np.array([0, _WHOLE]), np.array([num_bytes])


def _records(path: Path, data: BlockData) -> NDArray[np.int64]:
    """Return the edges of the parts of a table. They are kept, because all of it is read for them."""
    rules = [encoding_of(path, data), delimiter_of(path, data), quoting_of(path, data), SHARD_BYTES]
    kept = cache.cache_folder(data) / "records" / json_digest([cache.sample_digest(path), rules])
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        write_atomically(kept, np.array(record_edges(path, data, SHARD_BYTES), np.int64).tobytes())
    return np.frombuffer(kept.read_bytes(), np.int64)


@dataclass(frozen=True)
class Shards:
    """The shards of a cut text, on disk or still to be made."""

    folder: Path
    cut: Cut
    tokenizer: TextTokenizer
    split: Split
    """Rule by which documents are left out of the training data."""
    dtype: np.dtype[Any]

    def path(self, number: int) -> Path:
        """Return the file of a shard. It may not exist yet."""
        return self.folder / f"{number // 1000:03d}" / f"{number:06d}.bin"

    def make(self, number: int) -> bool:
        """Make a shard, if no other process has made it or makes it now. Return whether it exists.

        Raises:
            DataError: its text cannot be read, or its tokens cannot be written.
        """
        path = self.path(number)
        if path.exists():
            return True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with cache.lock(path.with_suffix(".lock")).acquire(timeout=0), working("tokenizing"):
                if not path.exists():
                    self._make(number, path)
                path.with_suffix(".lock").unlink(missing_ok=True)
            if self.cut.data.limit_bytes and number % EVICTED_EVERY == 0:
                cache.evict(self.folder.parents[2], self.cut.data.limit_bytes)
        except Timeout:
            return False
        except OSError as error:
            raise DataError(
                f"tokens cannot be written to {path} ({error.strerror}). Name another data.cache_dir"
            ) from error
        except ValueError as error:
            raise DataError(str(error)) from error
        return True

    def make_all(self, numbers: Iterable[int], *, progress: bool = True) -> None:
        """Make shards, or wait until other processes have made them."""
        missing = [number for number in numbers if not self.path(number).exists()]
        while missing:
            # Seen when a resume has lost its cache, and counts the samples of the text before it.
            is_shown = progress and is_main()
            shown = tqdm(missing, "tokenizing", delay=_SHOWN_AFTER_SECONDS, disable=not is_shown, leave=False)
            left = [number for number in shown if not self.make(number)]
            if len(left) == len(missing):
                with working("waiting for tokens"):
                    time.sleep(_POLL_SECONDS)
            missing = left

    def num_tokens(self, number: int) -> int | None:
        """Return the number of tokens of a shard that exists or was removed. None: it was not made."""
        path = self.path(number)
        num_bytes = None
        with suppress(FileNotFoundError):
            num_bytes = int(path.with_suffix(".size").read_text())
        with suppress(FileNotFoundError):
            num_bytes = path.stat().st_size
        return num_bytes and (num_bytes - _DIGEST_BYTES) // self.dtype.itemsize

    def stream(self, number: int) -> TokenStream:
        """Return the tokens of a shard, as `content` does."""

        def opened(content: NDArray[np.uint8]) -> TokenStream:
            stream = TokenStream.of(self.path(number), self.dtype, len(content) // self.dtype.itemsize)
            # Maps the file.
            stream.rows(np.zeros(1, np.int64), 1)
            return stream

        return self.content(number, opened)

    def content(self, number: int, opened: Callable[[NDArray[np.uint8]], Any] = np.asarray) -> Any:
        """Return what a shard holds, memory-mapped, as `opened` returns it. A damaged one is made again.

        Raises:
            DataError: as for `make`.
        """
        path = self.path(number)
        for _ in range(_ATTEMPTS):
            self.make_all([number])
            # Another process may remove it now.
            with suppress(FileNotFoundError):
                if self.cut.data.limit_bytes:
                    os.utime(path)
                found = np.memmap(path, np.uint8, mode="r")
                if hashlib.sha256(found[:-_DIGEST_BYTES].data).digest() == found[-_DIGEST_BYTES:].tobytes():
                    return opened(found[:-_DIGEST_BYTES])
                path.unlink()
        raise DataError(f"{path} does not keep what is written to it. Name another data.cache_dir")

    def _make(self, number: int, path: Path) -> None:
        sources, building = list(self.cut.sources_of(number)), path.with_suffix(".building")
        stamps = [*map(cache.stamp_of, files_of(sources))]
        files, broken = files_of(sources), list[str]()
        try:
            self._write(sources, building)
        except ValueError:
            if self.cut.data.max_broken:
                sources, broken = self.cut.without_broken(sources)
            if not broken:
                raise
            self._write(sources, building)
        if stamps != [*map(cache.stamp_of, files)] or any(
            isinstance(file, RemoteFile) and file.has_changed() for file in files
        ):
            raise ValueError(f"{sources[0].files[0]} changed while it was tokenized. Start again")
        with building.open("ab") as file:
            file.write(hashlib.sha256(building.read_bytes()).digest())
        sync(building)
        if broken:
            write_atomically(path.with_suffix(".broken"), json.dumps(broken).encode())
        os.replace(building, path)

    def broken_in(self, number: int) -> list[str]:
        """Return the errors of the lines that a shard leaves out."""
        kept = self.path(number).with_suffix(".broken")
        return list(parse_json(kept.read_text())) if self.cut.data.max_broken and kept.exists() else []

    def _write(self, sources: Sequence[Source], building: Path) -> None:
        with ShardWriter(building, self.dtype, self.tokenizer.vocab_size) as writer:
            texts: Any = self.cut.read(sources)
            write_tokens(texts, self.split, self.tokenizer.separator_id, (writer, None), Counts(), self._encode_all)

    def _encode_all(self, batches: Iterable[list[Chunk]]) -> Iterator[tuple[list[Chunk], list[TokenIds]]]:
        for batch in batches:
            yield batch, self._encode([chunk.text for chunk in batch])

    def choose_encoder(self) -> None:
        """Choose how text is encoded, which takes a second. Forked processes then need not choose again."""
        self._encode  # noqa: B018

    @cached_property
    def _encode(self) -> Callable[[Sequence[str]], list[TokenIds]]:
        encode = self.tokenizer.encode
        return encode if encode is encode_bytes else faster_encoder(self.tokenizer, "").value


def _help(shards: Shards, numbers: Iterable[int]) -> None:
    """Make the shards that no other process makes now, until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The parent finds the same error, and says so.
    with suppress(DataError):
        for number in numbers:
            # `is_alive` would wait for helpers that were started later, too.
            if os.getppid() == parent.pid:
                shards.make(number)


def sharded(windows: Any) -> dict[str, Any]:
    """Return the arguments of `TaskData` for samples of several sources, and for windows over shards."""
    found = {"samples_of": samples_of(windows)}
    if not isinstance(windows, ShardedWindows):
        return found
    return {**found, "shards": windows, "settings": {"data.order": "blocks"}}


class ShardedWindows(Dataset[NDArray[np.int64]]):
    """Windows as in `WindowDataset`, each within one shard. Window i of shard s is sample s << 32 | i."""

    def __init__(self, shards: Shards, sequence_length: int, sizes: list[int]) -> None:
        """Take windows of the shards. `sizes` estimates the number of windows in each of the spans of shards."""
        self.shards, self.sequence_length, self.sizes = shards, sequence_length, sizes
        self._opened: dict[int, Any] = {}
        self.broken: dict[str, None] = {}
        """Errors of the lines that the counted shards leave out, in order."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    def __len__(self) -> int:
        """Return the number of windows: an estimate, until `count` has counted them."""
        return max(1, sum(self.sizes))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, as exact as the number of windows."""
        return sum(self.sizes) * self.sequence_length

    @property
    def samples_by_source(self) -> tuple[range, ...]:
        """Numbers of samples of each source with a weight: as many as it has windows, from the first one on."""
        if not self.shards.cut.by_source:
            return ()
        firsts = [span.start << WINDOW_BITS for span in self.shards.cut.spans]
        return tuple(range(first, first + size) for first, size in zip(firsts, self.sizes, strict=True))

    def count_needed(self, recipe: Recipe, progress: bool) -> bool:
        """Count what a run needs: all without `max_steps`, or the sources that end. Return whether all are counted."""
        ending = {at for at, each in enumerate(recipe.data.mixture) if each.max_epochs}
        counts_all = recipe.schedule.max_steps is None
        if counts_all or ending:
            self.count(progress, None if counts_all else ending)
        return counts_all

    def count(self, progress: bool, spans: Collection[int] | None = None) -> bool:
        """Make all shards, or those of some spans, so that their number of windows is exact.

        Return whether some were missing.
        """
        counted = {at: span for at, span in enumerate(self.shards.cut.spans) if spans is None or at in spans}
        missing = [number for span in counted.values() for number in span if self.shards.num_tokens(number) is None]
        self.shards.choose_encoder()
        cores = usable_cores().value // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        with helped(min(cores, len(missing)) - 1, _help, self.shards, missing) as helpers:
            self.shards.make_all(missing, progress=progress)
            # They find all made. Killed, one would leave its lock.
            for helper in helpers:
                helper.join()
        for at, span in counted.items():
            self.sizes[at] = int(self.counts(np.array(span)).sum())
        return bool(missing)

    def first_sample(self) -> int:
        """Return the number of the first sample of the first shard that has one.

        Raises:
            DataError: no shard has one.
        """
        numbers = range(len(self.shards.cut))
        found = next((number for number in numbers if self.counts(np.array([number]))[0]), None)
        if found is None:
            raise DataError("data.train has no text for a sample. Name other text")
        return found << WINDOW_BITS

    def counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of windows of each shard, once all of them are made.

        Raises:
            DataError: more lines are broken than `data.max_broken`, in all shards that were counted.
        """
        num_tokens = self.shards.num_tokens
        self.shards.make_all(number for number in numbers.tolist() if num_tokens(number) is None)
        for error in chain.from_iterable(map(self.shards.broken_in, numbers.tolist())):
            self.broken[error] = None
            numbered(error, len(self.broken), self.shards.cut.data.max_broken)
        return np.array([*map(self._count, numbers.tolist())])

    def _count(self, number: int) -> int:
        """Return the number of windows of a shard that is made."""
        return max(0, -(-((self.shards.num_tokens(number) or 0) - 1) // self.sequence_length))

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return window `index`: (T + 1,) int64."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return windows in the order of `indices`, as `WindowDataset` does: (B, T + 1) int64."""
        samples = np.asarray(indices, np.int64)
        rows = np.empty((len(samples), self.sequence_length + 1), np.int64)
        numbers = samples >> WINDOW_BITS
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            inside = samples[places] - (number << WINDOW_BITS)
            rows[places] = self._windows(number).__getitems__(inside.tolist())
        return rows

    def first(self) -> WindowDataset:
        """Return the windows of some shards at equal distances."""
        count = len(self.shards.cut)
        stream = TokenStream.join([self.shards.stream(number) for number in range(0, count, -(-count // SHOWN))])
        return WindowDataset(stream, sequence_length=self.sequence_length)

    def _windows(self, number: int) -> WindowDataset:
        vocab_size = self.shards.tokenizer.vocab_size
        return WindowDataset(self.opened(number), sequence_length=self.sequence_length, vocab_size=vocab_size)

    def opened(self, number: int) -> Any:
        """Return what `Shards.stream` returns for a shard, and keep it."""
        if number not in self._opened:
            if len(self._opened) == _MOST_OPEN:
                self._opened.clear()
            self._opened[number] = self.shards.stream(number)
        return self._opened[number]
