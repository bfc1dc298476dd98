"""Tokenize a recipe's text into shards on disk, once, and reuse them (`prepare_text`)."""

import lzma
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from tqdm import tqdm

from accel_train.buckets.files import RemoteFile
from accel_train.core.errors import setting_error
from accel_train.core.files import digest64, publish_folder
from accel_train.core.format import format_count
from accel_train.core.json_io import json_digest
from accel_train.core.state import JsonRecord
from accel_train.data import cache
from accel_train.data.sources import Source, companions_of, describe, file_kind, files_of, holds_tokens
from accel_train.data.tables import resolve_both
from accel_train.data.text.documents import Split, choose_split, cut_text
from accel_train.data.text.encode import Counts, Writers, byte_bar, texts_of, write_tokens
from accel_train.data.text.fast_ids import encode_ahead
from accel_train.data.text.sharded_rows import choose_blocks
from accel_train.data.text.shards import SHUFFLED_UP_TO_BYTES, Cut, ShardedWindows, Shards, cut
from accel_train.data.text.token_files import (
    OTHER_TOKENIZER,
    choose_tail,
    count_tokens,
    notes_on_tokenizers,
    read_layouts,
)
from accel_train.data.text.tokenizers import (
    NO_TOKENIZER,
    TextTokenizer,
    load_tokenizer,
    named_tokenizer,
    prepare_tokenizer,
    train_bpe,
)
from accel_train.data.text.tokens import (
    ShardWriter,
    Tally,
    TokenStream,
    WindowDataset,
    Windows,
    by_source,
)
from accel_train.recipe.data import TrainedTokenizer, WindowData
from accel_train.recipe.schema import Recipe
from accel_train.task import Facts, FirstFingerprint

# Part of every cache key. Raise it when the same sources would give other shards. A new setting joins the key only if
# it differs from its default: runs of earlier versions then find their shards again, and resume.
_FORMAT = 1
_READING = ("text_column", "encoding", "encoding_errors", "header", "delimiter", "quoting")

Samples = TypeVar("Samples")


@dataclass(frozen=True)
class Corpus(Generic[Samples]):
    """Tokenized text or rows, ready for training. Sizes and ids are as in `TextTokenizer`."""

    train: Samples
    eval: Samples | None
    """Evaluation data. Named sets are parts of it (`parts_of`)."""
    tokenizer: Any
    """A `PreTrainedTokenizerBase`. None: ids without a tokenizer."""
    vocab_size: int
    separator_id: int
    fingerprint: str
    """Hex digest. Equal fingerprints mean equal tokens and equal targets."""
    facts: Facts
    large_files: Mapping[Path, str | Path] = field(default_factory=dict)
    """SHA-256 by path of large files whose digests are not checked yet, because that takes long (`DigestCheck`)."""
    first_fingerprint: FirstFingerprint = ""
    """Fingerprint of the same tokens in versions that copied token files."""


TextCorpus = Corpus[Windows]


@dataclass(frozen=True)
class Inputs:
    """The sources and settings of shards."""

    data: WindowData
    train: tuple[Source, ...]
    eval: tuple[Source, ...]
    """Evaluation sources. Empty if a part of `train` is held out."""
    tokenizer: TextTokenizer | TrainedTokenizer
    notes: list[str]
    progress: bool
    cut: Cut | None
    """Training text in shards that are made while a run trains. None: all of it is tokenized before."""

    @property
    def sampled_files(self) -> list[Path]:
        """The files of which only samples are read before training, because they are large."""
        sources = (*self.train, *self.eval)
        files = files_of(sources) if self.cut else _token_files(sources)
        is_large = sum(file.stat().st_size for file in files) > cache.CHECKED_AT_OPENING_BYTES
        return files if self.cut or is_large else []


def prepare_text(recipe: Recipe, *, progress: bool) -> TextCorpus:
    """Return a recipe's text as memory-mapped shards, built now or by an earlier run.

    Any number of processes may call this at once: one builds, the others wait and read. `progress` shows progress bars.

    Raises:
        ValueError: a source or the tokenizer cannot be read, or the text is too short for one window.
    """
    inputs = _inputs(recipe, progress)
    root = cache.cache_folder(recipe.data)
    sampled = {file: cache.sample_digest(file) for file in inputs.sampled_files}
    contents = _contents(inputs, root, sampled)
    folder = root / json_digest(contents)[:32]
    notes: list[str] = []
    built: TextTokenizer | None = None
    meta = cache.read_valid_meta(folder)
    if meta is None:
        with cache.lock(root / f"{folder.name}.lock"):
            meta = cache.read_valid_meta(folder)
            if meta is None:
                notes = _reasons_to_build(inputs, contents["tokenizer"], root, folder)
                built, meta = _build(inputs, root, folder)
    for note in notes if progress else ():
        tqdm.write(note, file=sys.stderr)
    corpus = _open(recipe, inputs, folder, meta, built, notes)
    if isinstance(corpus.train, ShardedWindows):
        counted = corpus.train.count_needed(recipe, progress)
        corpus.facts.train_tokens = corpus.train.num_tokens
        if not counted:
            corpus.facts.notes.append("the number of tokens to train on is an estimate from the first MiB of a source")
    if not sampled:
        return corpus

    def in_full() -> str:
        return json_digest([json_digest(_contents(inputs, root))[:32], meta["tokenizer_digest"]])

    pins = {file: root / "pinned" / digest for file, digest in sampled.items() if not isinstance(file, RemoteFile)}
    return replace(corpus, large_files={**corpus.large_files, **pins}, first_fingerprint="" if inputs.cut else in_full)


def _inputs(recipe: Recipe, progress: bool) -> Inputs:
    train, held_out, notes = resolve_both(recipe.data, by_ranges=True)
    spec = recipe.tokenizer_in_use
    if isinstance(spec, TrainedTokenizer) and holds_tokens(train):
        raise ValueError(
            "tokenizer: train_bpe needs text, and data.train holds tokens; name the tokenizer that wrote them"
        )
    if spec == NO_TOKENIZER and not (holds_tokens(train) and holds_tokens(held_out or train)):
        raise setting_error("tokenizer", spec, "text has no ids without one. Name a tokenizer, or give token files")
    tokenizer = named_tokenizer(recipe, spec) if isinstance(spec, str) else spec
    data = WindowData.of(recipe.data)
    is_cut, note = _order(data, train)
    if not is_cut and any(isinstance(file, RemoteFile) for file in files_of(train)):
        train, held_out, notes = resolve_both(recipe.data)
    whole = cut(train, data, partial(texts_of, data=data, title="", shown=False)) if is_cut else None
    return Inputs(data, train, held_out, tokenizer, [*notes, *note], progress, whole)


def _order(data: WindowData, train: Sequence[Source]) -> tuple[bool, list[str]]:
    """Return whether training text is read in blocks, and a note on a choice by its size."""
    reasons = {"files of tokens are read where they lie": holds_tokens(train)}
    return choose_blocks(data, train, reasons, SHUFFLED_UP_TO_BYTES)


def _token_files(sources: Sequence[Source]) -> list[Path]:
    """Return the token files of sources with the files that say how to read them."""
    files = [file for file in files_of(sources) if file_kind(file) == "tokens"]
    return list(dict.fromkeys(each for file in files for each in (file, *companions_of(file))))


def _contents(inputs: Inputs, root: Path, sampled: Mapping[Path, str] = {}) -> JsonRecord:
    """Return everything that determines the tokens. File names are excluded, so a corpus may move.

    `sampled` has the digests of files of which only samples are read.
    """
    data, tokenizer = inputs.data, inputs.tokenizer
    sides = {"train": inputs.train, "eval": inputs.eval}
    sizes = sum(file.stat().st_size for file in files_of((*inputs.train, *inputs.eval)))
    with byte_bar("checking the sources", sizes, inputs.progress) as bar:
        contents = {
            side: [[_source_contents(source, root, bar.update, sampled)] for source in sources]
            for side, sources in sides.items()
        }
    return {
        "format": _FORMAT,
        **contents,
        "eval_fraction": None if inputs.eval else data.eval_fraction,
        **({"by_source": True} if data.mixture else {}),
        **({"shard_bytes": inputs.cut.rule} if inputs.cut else {}),
        **({"split_seed": data.split_seed} if data.split_seed and not inputs.eval else {}),
        **({"eval_sets": [*map(len, data.by_set(inputs.eval))]} if data.eval_sets else {}),
        # Text that is shown to a trained model has other notes.
        **({} if data.is_for_training else {"shown": True}),
        **{name: getattr(data, name) for name in _READING},
        "tokenizer": tokenizer.digest if isinstance(tokenizer, TextTokenizer) else _to_train(tokenizer),
    }


def _to_train(tokenizer: TrainedTokenizer) -> JsonRecord:
    """Return the settings of a tokenizer without defaults, so that a new setting does not change them."""
    section = tokenizer.train_bpe
    return {"train_bpe": {"vocab_size": section.vocab_size, **section.model_dump(exclude_defaults=True)}}


def _source_contents(
    source: Source, root: Path, advance: Callable[[float], object], sampled: Mapping[Path, str]
) -> list[Any]:
    if source.dataset is not None:
        return [source.name, source.dataset._fingerprint]
    files = _token_files([source]) or source.files
    is_sampled = sampled and files[0] in sampled
    digests = map(sampled.__getitem__, files) if is_sampled else cache.file_digests(files, root, advance)
    return [[file.suffix.lower(), digest] for file, digest in zip(files, digests)]


def _reasons_to_build(inputs: Inputs, tokenizer_contents: Any, root: Path, folder: Path) -> list[str]:
    named = inputs.data.model_dump(
        include={"train", "eval", "subset", "split", "text_column", "eval_fraction", "encoding_errors"}
    )
    order = {"order": "blocks"} if inputs.cut else {}
    recipe_digest = json_digest({**named, **order, "tokenizer": tokenizer_contents})[:32]
    before = cache.note_latest(root, recipe_digest, folder.name)
    reasons = []
    if before and not holds_tokens(inputs.train):
        reasons.append(f"the sources changed since their tokens were kept in {root / before}: tokenizing again")
    if folder.exists():
        reasons.append(f"the kept tokens in {folder} are damaged: tokenizing again")
    return reasons


def _build(inputs: Inputs, root: Path, folder: Path) -> tuple[TextTokenizer, JsonRecord]:
    """Build in a staging folder and publish it in one rename. The caller holds the lock."""
    files = files_of((*inputs.train, *inputs.eval))
    stamps = [cache.stamp_of(file) for file in files]
    with publish_folder(folder, root / f"{folder.name}.building") as building:
        tokenizer, meta = build_shards(building, inputs)
        for file, stamp in zip(files, stamps):
            if cache.stamp_of(file) != stamp:
                raise ValueError(f"{file} changed while it was tokenised; wait for its writer, then run again")
        meta = cache.complete(building, meta)
        if folder.exists():  # damaged
            shutil.rmtree(folder)
    return tokenizer, meta


def _open(
    recipe: Recipe, inputs: Inputs, folder: Path, meta: JsonRecord, built: TextTokenizer | None, notes: list[str]
) -> TextCorpus:
    facts = Facts(**meta["facts"], cache_folder=str(folder), reused=built is None)
    facts.notes += notes
    if holds_tokens(inputs.train) and holds_tokens(inputs.eval or inputs.train):
        facts.cache_folder = None
    length = WindowData.of(recipe.data).sequence_length
    num_tokens, num_held_out = facts.train_tokens or 0, facts.eval_tokens or 0
    if num_tokens <= length:
        raise ValueError(
            f"data.sequence_length={length} needs {length + 1} training tokens for one window; {facts.sources} "
            f"gives {num_tokens}; lower it to {num_tokens - 1} or less, or add text"
        )
    tokenizer = built or inputs.tokenizer
    if isinstance(tokenizer, TrainedTokenizer):
        tokenizer = prepare_tokenizer(load_tokenizer(str(folder / "tokenizer"), trust_remote_code=False))

    def windows(side: str, sources: Sequence[Source], start: int, number: int, ends: Sequence[int]) -> Any:
        if inputs.cut and side == "train":
            split = Split(**{**meta["split"], "hashes": frozenset(meta["split"]["hashes"])})
            dtype = np.dtype(meta["dtype"])
            shards = Shards(folder / "shards", inputs.cut, tokenizer, split, dtype)
            sizes = [-(-(end - begin - 1) // length) for begin, end in pairwise([0, *(ends or [number])])]
            return ShardedWindows(shards, length, sizes)
        if holds_tokens(sources):
            tokens = replace(read_layouts(files_of(sources)).cut(start, start + number), remedy=f"; {OTHER_TOKENIZER}")
        else:
            tokens = TokenStream.of(folder / f"{side}.bin", np.dtype(meta["dtype"]), number)
        found = WindowDataset(
            tokens,
            sequence_length=length,
            vocab_size=tokenizer.vocab_size,
            marks_documents=getattr(recipe.data, "mask_documents", False) and tokens.documents is not None,
        )
        return by_source(found, ends) if ends else found

    if inputs.data.eval_sets:
        facts.eval_sets = dict(zip(inputs.data.eval_sets, meta["eval_sets"]))
    sizes = [each["eval_tokens"] for each in facts.eval_sets.values()]
    held_start, held_sources = 0 if inputs.eval else num_tokens, inputs.eval or inputs.train
    held_out = windows("eval", held_sources, held_start, num_held_out, list(accumulate(sizes)))
    return Corpus(
        train=windows("train", inputs.train, 0, num_tokens, meta.get("source_ends", ())),
        eval=held_out if num_held_out > 1 else None,
        tokenizer=tokenizer.tokenizer,
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id,
        fingerprint=json_digest([folder.name, meta["tokenizer_digest"]]),
        facts=facts,
        large_files=cache.digests_of_large_files(folder, meta),
    )


# A larger sample no longer changes which frequent pairs become tokens, but costs minutes and gigabytes.
_BPE_LIMIT_CHARACTERS = 1 << 30


def build_shards(folder: Path, inputs: Inputs) -> tuple[TextTokenizer, JsonRecord]:
    """Write train.bin, eval.bin and a trained tokenizer to a folder. Return the tokenizer and the content of meta.json.

    Raises:
        ValueError: a document cannot be read, or no training document is left.
    """
    counts = Counts(notes=[*inputs.notes, *_leaks(inputs)])
    split, are_tokens, sampled = Split(), holds_tokens(inputs.train), bool(inputs.sampled_files)
    read_before = inputs.cut.sample() if inputs.cut else inputs.train
    if not inputs.eval and not are_tokens:
        texts = partial(texts_of, read_before, inputs.data, "", shown=False)
        split = choose_split(texts(), inputs.data.eval_fraction, seed=inputs.data.split_seed)
        if inputs.cut and split.eval_fraction and not split.cut_tail:
            # Other documents with a low hash are not held out: they would be lost for training.
            held = (digest64(text.encode(), split.seed) for text in texts() if text and split.holds_out(text))
            split = replace(split, eval_fraction=0.0, hashes=frozenset(held))
        counts.notes += [split.note] if split.note else []
    tokenizer = inputs.tokenizer
    if isinstance(tokenizer, TrainedTokenizer):
        tokenizer = _train_tokenizer(tokenizer.train_bpe.vocab_size, inputs, read_before, split, counts.notes)
        tokenizer.tokenizer.save_pretrained(str(folder / "tokenizer"))
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    sides = {"train": inputs.train, "eval": inputs.eval or inputs.train}
    ends: list[int] = []
    with ExitStack() as opened:
        # Token files are read where they lie.
        written = [
            opened.enter_context(ShardWriter(folder / f"{side}.bin", dtype, tokenizer.vocab_size))
            for side, sources in sides.items()
            if not holds_tokens(sources) and not (inputs.cut and side == "train")
        ]
        train, held_out = (written[0], written[-1]) if written else (Tally(0), Tally(0))
        if are_tokens:
            stream = read_layouts(files := files_of(inputs.train))
            cut = stream.num_tokens
            if not inputs.eval:
                cut, note = choose_tail(stream, inputs.data, tokenizer.separator_id)
                held_out = count_tokens(stream, cut, stream.num_tokens, tokenizer, sampled)
                counts.notes += note
            train = count_tokens(stream, 0, cut, tokenizer, sampled)
            sizes = (read_layouts(files_of([source])).num_tokens for source in inputs.train)
            ends = [min(end, cut) for end in accumulate(sizes)]
            counts.notes += notes_on_tokenizers(files, tokenizer)
        elif inputs.cut:
            found = [_estimate(inputs.cut, span, split, inputs, tokenizer) for span in inputs.cut.spans]
            train, ends = Tally(tokenizer.vocab_size), [*accumulate(found)]
            train.num_tokens = ends[-1]
            if not inputs.eval and inputs.data.eval_fraction:
                _tokenise(read_before, split, inputs, tokenizer, (None, held_out), counts)
        else:
            # The windows of a mixture are of one source each.
            for sources in [[each] for each in inputs.train] if inputs.data.mixture else [inputs.train]:
                _tokenise(sources, split, inputs, tokenizer, (written[0], written[-1]), counts)
                ends.append(written[0].num_tokens)
        sets = []
        for named in inputs.data.by_set(inputs.eval):
            num_tokens, num_bytes = held_out.num_tokens, counts.eval_bytes
            if named and train.num_tokens and not holds_tokens(named):
                _tokenise(named, Split(eval_fraction=1.0), inputs, tokenizer, (written[-1], written[-1]), counts)
            size = read_layouts(files_of(named)).num_tokens if holds_tokens(named) else held_out.num_tokens - num_tokens
            sets.append({"eval_tokens": size, "eval_bytes": counts.eval_bytes - num_bytes})
        if holds_tokens(inputs.eval):
            stream = read_layouts(files_of(inputs.eval))
            held_out = count_tokens(stream, 0, stream.num_tokens, tokenizer, sampled)
        for key, sources, shard in ((inputs.data.train_key, inputs.train, train), ("data.eval", inputs.eval, held_out)):
            if sources and not shard.num_tokens:
                raise ValueError(f"{key} holds no documents: {describe(sources)}; every file or row is empty")
    return tokenizer, {
        "dtype": dtype.name,
        **({"source_ends": ends} if inputs.data.mixture else {}),
        "separator_id": tokenizer.separator_id,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_digest": tokenizer.digest,
        **({"split": {**vars(split), "hashes": sorted(split.hashes)}} if inputs.cut else {}),
        "eval_sets": sets,
        "facts": _corpus_facts(inputs, tokenizer.separator_id, train, held_out, counts).record(),
    }


def _leaks(inputs: Inputs) -> list[str]:
    if not inputs.data.is_for_training:
        return []
    trained, held_out = ({file.resolve() for file in files_of(side)} for side in (inputs.train, inputs.eval))
    both = sorted(trained & held_out)
    return (
        [f"the run trains on {format_count(len(both), 'file')} of data.eval ({both[0]}), in data.train too"]
        if both
        else []
    )


def _estimate(cut: Cut, span: range, split: Split, inputs: Inputs, tokenizer: TextTokenizer) -> int:
    """Return about how many tokens a span of shards has, by its first shards up to one with tokens."""
    train, silent = Tally(tokenizer.vocab_size), replace(inputs, progress=False)
    for number in span:
        _tokenise(cut.readable([number]), split, silent, tokenizer, (train, None), Counts())
        if train.num_tokens:
            return train.num_tokens * len(span) // (number - span.start + 1)
    return 0


def _tokenise(
    sources: Sequence[Source],
    split: Split,
    inputs: Inputs,
    tokenizer: TextTokenizer,
    writers: Writers,
    counts: Counts,
) -> None:
    texts = texts_of(sources, inputs.data, "tokenizing", inputs.progress)
    encode_all = partial(encode_ahead, tokenizer, progress=inputs.progress)
    write_tokens(texts, split, tokenizer.separator_id, writers, counts, encode_all)


def _train_tokenizer(
    vocab_size: int, inputs: Inputs, sources: Sequence[Source], split: Split, notes: list[str]
) -> TextTokenizer:
    num_characters = 0

    def training_texts() -> Iterator[str]:
        nonlocal num_characters
        for text in texts_of(sources, inputs.data, "training the tokenizer", inputs.progress):
            for chunk in cut_text(split.divide(text)[0]):
                num_characters += len(chunk)
                yield chunk
            if num_characters > _BPE_LIMIT_CHARACTERS:
                notes.append(f"the tokenizer was trained on the first {num_characters:,} characters")
                return

    tokenizer = prepare_tokenizer(train_bpe(training_texts(), vocab_size))
    if tokenizer.vocab_size < vocab_size:
        notes.append(f"the training text supports {tokenizer.vocab_size} tokens, not tokenizer.vocab_size={vocab_size}")
    return tokenizer


def _corpus_facts(inputs: Inputs, separator_id: int, train_shard: Tally, eval_shard: Tally, counts: Counts) -> Facts:
    """Return the facts of a built corpus. Facts on text are None if the source holds tokens.

    Token files are counted by their indexes or separators.
    """
    train_is_text, eval_is_text = not holds_tokens(inputs.train), not holds_tokens(inputs.eval or inputs.train)
    in_files = [each.num_documents for each in (train_shard, eval_shard) if not isinstance(each, ShardWriter)]
    unigram = None
    if eval_is_text and eval_shard.num_tokens > 1 and not (inputs.cut or inputs.sampled_files):
        targets = eval_shard.token_counts.copy()
        # The first token of each set is not a target for a model either.
        targets[separator_id] -= len(inputs.data.by_set(inputs.eval))
        with_one_added = train_shard.token_counts + 1
        unigram = float(-(targets * np.log2(with_one_added / with_one_added.sum())).sum()) / counts.eval_bytes
    text = bytes(counts.eval_start)
    return Facts(
        sources=describe(inputs.train, inputs.eval),
        num_documents=None
        if inputs.cut or None in in_files
        else counts.num_documents + sum(each or 0 for each in in_files),
        num_empty_documents=counts.num_empty_documents,
        num_eval_documents=counts.num_eval_documents if eval_is_text else eval_shard.num_documents or 0,
        train_tokens=train_shard.num_tokens,
        eval_tokens=eval_shard.num_tokens,
        train_bytes=counts.train_bytes if train_is_text and not inputs.cut else None,
        eval_bytes=counts.eval_bytes if eval_is_text else None,
        unigram_bits_per_byte=unigram,
        xz_bits_per_byte=8 * len(lzma.compress(text)) / len(text) if text else None,
        notes=counts.notes,
    )
