"""Token files of other tools, read where they lie: each format is a function from a file to its stream of tokens.

nanoGPT     .bin: uint16
llm.c       .bin: 256 int32 (magic number, version, token count, zeros), then uint16 or uint32
Megatron    .bin with .idx: type code; lengths and places of sequences; the first sequence of each document
datatrove   .ds (nanotron reads it): uint16 or uint32, with .ds.index (ends of documents) and .ds.metadata
MosaicML    .mds with index.json: number of samples, their offsets; in each sample, sizes and values of its columns

All numbers are little-endian.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.core.errors import SettingError
from accel_train.core.json_io import parse_json
from accel_train.data.sources import companions_of
from accel_train.data.text.tokenizers import TextTokenizer
from accel_train.data.text.tokens import Tally, TokenStream, tail_start
from accel_train.recipe.data import WindowData

_HEADER_INTS = 256
_TWO, _FOUR, _EIGHT = (np.dtype(name) for name in ("<u2", "<u4", "<u8"))
# llm.c, dev/data/data_common.py: magic number -> version, token type. modded-nanogpt writes the first.
_HEADERS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, _TWO), 20240801: (7, _FOUR)}
# Megatron's DType: code -> token type. Ids are not negative, so signed types are read as unsigned.
_MEGATRON = {1: np.dtype("u1"), 3: _TWO, 4: _FOUR, 5: _EIGHT, 8: _TWO}
_MEGATRON_HEADER, _MEGATRON_MAGIC = struct.Struct("<9sQBQQ"), b"MMIDIDX\0\0"
_MDS_TYPES = {f"{sign}int{8 * each.itemsize}": each for each in (_TWO, _FOUR, _EIGHT) for sign in ("", "u")}


OTHER_TOKENIZER = "set `tokenizer` to the one that wrote the file"
_NUM_SAMPLES, _SAMPLE_TOKENS = 64, 4096


def read_layouts(files: Sequence[Path]) -> TokenStream:
    """Return the tokens of files as one stream, from headers and indexes alone.

    Raises:
        ValueError: a file is incomplete, of another format, or not little-endian, or lacks its index.
    """
    layouts = {".bin": _bin, ".ds": _datatrove, ".mds": _mds}
    return TokenStream.join([layouts[file.suffix.lower()](file) for file in files])


def choose_tail(stream: TokenStream, data: WindowData, separator_id: int) -> tuple[int, list[str]]:
    """Return the position at which the held-out tail of token files begins, and a note about it.

    Raises:
        SettingError: the tail is chosen by a seed, or of a mixture.
    """
    total = stream.num_tokens
    if not data.eval_fraction:
        return total, []
    if data.split_seed:
        raise SettingError(
            "token files hold out their end, which does not depend on a seed",
            "Leave the setting out, or name evaluation data in data.eval",
            f"data.split_seed={data.split_seed}",
            ("data.split_seed",),
        )
    if data.mixture:
        problem = "token files hold out their end, which is of the last source alone"
        raise SettingError(problem, "Name evaluation data in data.eval", "data.train", ("data.train",))
    cut, at_document = tail_start(stream, separator_id, data.eval_fraction)
    place = "from the beginning of a document" if at_document else "not at a separator: none is near"
    return cut, [f"the last {total - cut:,} tokens are held out for evaluation, {place} (data.eval_fraction)"]


def notes_on_tokenizers(files: Sequence[Path], tokenizer: TextTokenizer) -> list[str]:
    """Return a note if the metadata of `.ds` files name another tokenizer than the run's."""
    metadata = [each for file in files for each in companions_of(file) if each.suffix == ".metadata"]
    names = {each.read_text().partition("\n")[0].partition("|")[0] for each in metadata}
    others = names - {getattr(tokenizer.tokenizer, "name_or_path", None)}
    return [f"the metadata of the token files name the tokenizer {', '.join(sorted(others))}"] if others else []


def count_tokens(stream: TokenStream, start: int, stop: int, tokenizer: TextTokenizer, sampled: bool) -> Tally:
    """Count the tokens and documents of a part of a stream. If `sampled`, only samples are read.

    Raises:
        ValueError: a token is not an id of the tokenizer; the message names file and position.
    """
    tally, vocab_size = Tally(tokenizer.vocab_size), tokenizer.vocab_size
    places = np.linspace(start, max(stop - _SAMPLE_TOKENS, start), _NUM_SAMPLES, dtype=np.int64).tolist()
    for place in places if sampled else [start]:
        for position, chunk in stream.chunks(place, min(place + _SAMPLE_TOKENS, stop) if sampled else stop):
            if int(chunk.max()) >= vocab_size:
                number = int(np.argmax(chunk >= vocab_size))
                path, position = stream.locate(position + number)
                swapped = "(the file may be big-endian) " if int(chunk.byteswap().max()) < vocab_size else ""
                raise ValueError(
                    f"{path}: token {int(chunk[number])} at position {position} is not below the vocabulary size "
                    f"{vocab_size}; {swapped}{OTHER_TOKENIZER}"
                )
            tally.write(chunk)
    tally.num_tokens = stop - start
    if stream.documents is not None:
        tally.num_documents = int(np.diff(np.searchsorted(stream.documents, [start, stop]))[0])
    elif not sampled and tokenizer.separator_id >= 0:
        tally.num_documents = int(tally.token_counts[tokenizer.separator_id])
    return tally


def _bin(path: Path) -> TokenStream:
    """Read nanoGPT's and llm.c's files, or Megatron's if there is an index."""
    index = path.with_suffix(".idx")
    if index.is_file():
        return _megatron(path, index)
    if path.stem.endswith(("_document", "_sentence")):
        raise ValueError(f"{path}: Megatron's index {index.name} is not next to it; copy it too, or rename a raw file")
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = np.frombuffer(file.read(12), dtype="<i4") if num_bytes >= 12 else np.zeros(3, np.int32)
    magic, version, num_tokens = (int(value) for value in start)
    if int(start[0].byteswap()) in _HEADERS:
        raise ValueError(f"{path}: its header is big-endian; write it again on a little-endian machine")
    if magic not in _HEADERS:
        return TokenStream.of(path, _TWO, _whole(path, 0, _TWO))
    known_version, dtype = _HEADERS[magic]
    expected_bytes = _HEADER_INTS * 4 + num_tokens * dtype.itemsize
    if version != known_version or num_bytes != expected_bytes:
        raise ValueError(
            f"{path}: its header (magic {magic}, version {version}) says {num_tokens} tokens, {expected_bytes} bytes "
            f"in version {known_version}; the file has {num_bytes} bytes; write it again"
        )
    return TokenStream.of(path, dtype, num_tokens, _HEADER_INTS * 4)


def _whole(path: Path, num_tokens: int, dtype: np.dtype[Any]) -> int:
    """Return the number of tokens of a file without a header, which must be `num_tokens` if that is not 0."""
    num_bytes = path.stat().st_size
    if num_bytes % dtype.itemsize:
        raise ValueError(
            f"{path}: its size in bytes, {num_bytes}, is not a whole number of uint{8 * dtype.itemsize} tokens; is the "
            "file complete?"
        )
    found = num_bytes // dtype.itemsize
    if num_tokens not in (0, found):
        raise ValueError(_incomplete(path, f"{num_tokens} tokens", f"{found}"))
    return found


def _incomplete(path: Path, expected: str, found: str) -> str:
    return f"{path}: its index says {expected}, and the file has {found}; is the file complete? Copy it again"


def _megatron(path: Path, index: Path) -> TokenStream:
    content = index.read_bytes()
    if len(content) < _MEGATRON_HEADER.size or not content.startswith(_MEGATRON_MAGIC):
        raise ValueError(f"{index}: not an index of Megatron, which begins with MMIDIDX; write it again")
    _, version, code, num_sequences, num_documents = _MEGATRON_HEADER.unpack_from(content)
    if version != 1:
        problem = "is big-endian" if version == 1 << 56 else f"has version {version}, not 1"
        raise ValueError(f"{index}: the index {problem}; write it again")
    if code not in _MEGATRON:
        raise ValueError(f"{index}: tokens of type code {code} are not integers that can be ids; write it again")
    dtype, at = _MEGATRON[code], _MEGATRON_HEADER.size
    expected = at + 12 * num_sequences + 8 * num_documents
    if len(content) < expected:
        raise ValueError(f"{index}: {expected} bytes by its header, but it has {len(content)}; copy it again")
    lengths = np.frombuffer(content, "<i4", num_sequences, at).astype(np.int64)
    places = np.frombuffer(content, "<i8", num_sequences, at + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_documents, at + 12 * num_sequences)
    ends = places + lengths * dtype.itemsize
    if num_sequences and (num_bytes := path.stat().st_size) < ends.max():
        raise ValueError(_incomplete(path, f"{ends.max()} bytes", f"{num_bytes}"))
    positions = np.concatenate([[0], np.cumsum(lengths)])
    # Sequences that follow one another in the file are one part.
    begins = np.flatnonzero(np.concatenate([[True], places[1:] != ends[:-1]])[:num_sequences])
    stops = np.append(begins[1:], num_sequences)
    parts = np.stack([begins * 0, places[begins], positions[stops] - positions[begins]], axis=1)
    return TokenStream((path,), (dtype,), parts, positions[documents[documents < num_sequences]])


def _datatrove(path: Path) -> TokenStream:
    metadata, index = (path.with_name(f"{path.name}.{name}") for name in ("metadata", "index"))
    ends = np.fromfile(index, "<u8").astype(np.int64) if index.is_file() else None
    num_tokens, size = int(ends[-1]) if ends is not None and len(ends) else 0, 0
    if metadata.is_file():
        about, count, *_ = [*metadata.read_text().splitlines(), "", ""]
        # Older versions only wrote uint16, and did not say so.
        size = int(about.rpartition("|")[2] or 2) if about.rpartition("|")[2].isdecimal() else 2
        num_tokens = int(count) if count.isdecimal() else num_tokens
    elif num_tokens:
        size = path.stat().st_size // num_tokens
    else:
        raise ValueError(f"{path}: {metadata.name} is not next to it, so the type of the tokens is not known; copy it")
    if size not in (2, 4):
        raise ValueError(f"{path}: {size} bytes per token, not 2 or 4; is the file complete, with {metadata.name}?")
    dtype = _TWO if size == 2 else _FOUR
    stream = TokenStream.of(path, dtype, _whole(path, num_tokens, dtype))
    if ends is None:
        return stream
    if len(ends) and ends[-1] != stream.num_tokens:
        raise ValueError(_incomplete(path, f"{ends[-1]} tokens", f"{stream.num_tokens}"))
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return TokenStream(stream.files, stream.dtypes, stream.parts, begins)


def _mds(path: Path) -> TokenStream:
    index = path.with_name("index.json")
    if not index.is_file():
        raise ValueError(f"{path}: {index.name} is not next to it, and says how samples are encoded; copy it too")
    shards = {shard["raw_data"]["basename"]: shard for shard in parse_json(index.read_bytes())["shards"]}
    shard: Any = shards.get(path.name, {})
    names, encodings = shard.get("column_names", []), shard.get("column_encodings", [])
    if "tokens" not in names:
        raise ValueError(
            f"{index}: {path.name} has no column tokens (it has {', '.join(names) or 'none'}); name another"
        )
    column = names.index("tokens")
    kind, _, rest = encodings[column].partition(":")
    name, _, shape = rest.partition(":")
    # llm-foundry writes int64 as bytes.
    dtype = _EIGHT if kind == "bytes" else _MDS_TYPES.get(name)
    if kind not in ("bytes", "ndarray") or dtype is None or "," in shape:
        raise ValueError(
            f"{index}: tokens are {encodings[column]}; ndarray:uint16, another integer, and bytes are read"
        )
    num_bytes, expected = path.stat().st_size, shard["raw_data"]["bytes"]
    if num_bytes != expected:
        raise ValueError(_incomplete(path, f"{expected} bytes", f"{num_bytes}"))
    content = np.memmap(path, np.uint8, mode="r")
    num_samples = int(content[:4].view("<u4")[0])
    offsets = content[4 : 8 + 4 * num_samples].view("<u4").astype(np.int64)
    if num_samples != shard["samples"] or offsets[-1] != num_bytes:
        raise ValueError(_incomplete(path, f"{shard['samples']} samples", f"{num_samples}"))
    begins, sizes = offsets[:-1], _column_sizes(content, offsets, shard["column_sizes"])
    num_variable = shard["column_sizes"].count(None)
    places, held = begins + 4 * num_variable + sizes[:column].sum(0), sizes[column]
    if kind == "ndarray" and not shape:
        # A byte with the number of dimensions, 1, and the number of bytes of the length; then the length.
        most = [1 + width + dtype.itemsize * (256**width - 1) for width in (1, 2)]
        head = 1 + 2 ** sum(held > each for each in most)
        places, held = places + head, held - head
    return TokenStream((path,), (dtype,), np.stack([places * 0, places, held // dtype.itemsize], axis=1))


def _column_sizes(content: NDArray[np.uint8], offsets: NDArray[np.int64], fixed: Sequence[int | None]) -> Any:
    """Return the bytes of each column of each sample: (columns, samples).

    A sample begins with the sizes of its columns of no fixed size. If there is one, it is not read: that would read
    the pages of the whole file.
    """
    variable = [number for number, size in enumerate(fixed) if size is None]
    sizes = np.tile(np.array([[size or 0] for size in fixed]), (1, len(offsets) - 1))
    if len(variable) == 1:
        sizes[variable] = np.diff(offsets) - 4 - sizes.sum(0)
    else:
        for rank, number in enumerate(variable):
            sizes[number] = content[(offsets[:-1] + 4 * rank)[:, None] + np.arange(4)].view("<u4")[:, 0]
    return sizes
