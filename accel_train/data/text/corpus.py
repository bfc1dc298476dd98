"""`prepare_text`: the text of a recipe as token shards on disk, made once and found again."""

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from accel_train.data.build import Inputs, build_shards, byte_bar
from accel_train.data.cache import (
    cache_folder,
    digests_of_large_files,
    file_digests,
    lock,
    note_latest,
    publish,
    read_valid_meta,
    stamp_of,
)
from accel_train.data.facts import CorpusFacts
from accel_train.data.sources import Source, holds_tokens, resolve_sources
from accel_train.data.tokenizers import TextTokenizer, load_tokenizer, prepare_tokenizer, pretrained_tokenizer
from accel_train.data.windows import WindowDataset
from accel_train.recipe import Recipe
from accel_train.recipe_data import TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Part of every key: raise it when the same sources would give other shards.
_FORMAT = 1


@dataclass(frozen=True)
class TextCorpus:
    """Text, ready to train on."""

    train: WindowDataset
    eval: WindowDataset | None
    tokenizer: "PreTrainedTokenizerBase"
    vocab_size: int
    """Rows that an embedding needs; every id is below it."""
    separator_id: int
    """The token that begins every document."""
    fingerprint: str
    """Hex; of the sources' contents, the tokenizer and the split: equal fingerprints mean equal tokens."""
    facts: CorpusFacts
    large_files: Mapping[Path, str]
    """SHA-256 by path of the files that were not compared with theirs, because that takes long."""


def prepare_text(recipe: Recipe, *, progress: bool) -> TextCorpus:
    """Tokenise a recipe's text into memory-mapped shards, or find them where an earlier run left them.

    Any number of processes may call this at once: one builds, the others wait and read. `progress` shows bars.

    Raises:
        ValueError: a source or the tokenizer cannot be read, or there is too little text for one window.
    """
    inputs = _inputs(recipe, progress)
    cache = cache_folder(recipe.data)
    key = _digest(_contents(inputs, cache))
    folder = cache / key[:32]
    notes: list[str] = []
    built: TextTokenizer | None = None
    meta = read_valid_meta(folder)
    if meta is None:
        with lock(cache / f"{folder.name}.lock"):
            meta = read_valid_meta(folder)
            if meta is None:
                notes = _reasons_to_build(inputs, cache, folder)
                built, meta = _build(inputs, cache, folder)
    if "sha256" not in meta:  # of an earlier version
        notes.append(
            f"the kept tokens in {folder} have no digests, so only their sizes were checked: "
            "once that folder is removed, they are made with digests"
        )
    for note in notes:
        if progress:
            tqdm.write(note, file=sys.stderr)
    return _open(recipe, inputs, folder, meta, built, notes)


def _inputs(recipe: Recipe, progress: bool) -> Inputs:
    data = recipe.data
    train = resolve_sources(data.train, data, leaf="data.train")
    held_out = () if data.eval is None else resolve_sources(data.eval, data, leaf="data.eval")
    spec = recipe.tokenizer_in_use
    if isinstance(spec, TrainedTokenizer) and holds_tokens(train):
        raise ValueError(
            "tokenizer: train_bpe needs text, and data.train holds tokens; name the tokenizer that wrote them"
        )
    tokenizer = (
        pretrained_tokenizer(spec, trust_remote_code=recipe.model.trust_remote_code) if isinstance(spec, str) else spec
    )
    return Inputs(data, train, held_out, tokenizer, progress)


def _contents(inputs: Inputs, cache: Path) -> dict[str, Any]:
    """Everything that decides the tokens. File names are not in it: a corpus may move."""
    data = inputs.data
    sides = {"train": inputs.train, "eval": inputs.eval}
    sizes = sum(file.path.stat().st_size for source in (*inputs.train, *inputs.eval) for file in source.files)
    with byte_bar("checking the sources", sizes, inputs.progress) as bar:
        contents = {
            side: [[_source_contents(source, cache, bar.update)] for source in sources]
            for side, sources in sides.items()
        }
    tokenizer = inputs.tokenizer
    return {
        "format": _FORMAT,
        **contents,
        "eval_fraction": None if inputs.eval else data.eval_fraction,
        "text_column": data.text_column,
        "encoding_errors": data.encoding_errors,
        "tokenizer": tokenizer.digest if isinstance(tokenizer, TextTokenizer) else tokenizer.model_dump(),
    }


def _source_contents(source: Source, cache: Path, advance: Any) -> list[Any]:
    if source.dataset is not None:
        return [source.name, source.dataset._fingerprint]
    return [
        [file.path.suffix.lower(), digest]
        for file, digest in zip(source.files, file_digests(source.files, cache, advance))
    ]


def _reasons_to_build(inputs: Inputs, cache: Path, folder: Path) -> list[str]:
    data, tokenizer = inputs.data, inputs.tokenizer
    named = data.model_dump(
        include={"train", "eval", "subset", "split", "text_column", "eval_fraction", "encoding_errors"}
    )
    named["tokenizer"] = tokenizer.digest if isinstance(tokenizer, TextTokenizer) else tokenizer.model_dump()
    before = note_latest(cache, _digest(named)[:32], folder.name)
    reasons = []
    if before:
        reasons.append(f"the sources changed since their tokens were kept in {cache / before}: tokenising anew")
    if folder.exists():
        reasons.append(f"the kept tokens in {folder} are damaged: tokenising anew")
    return reasons


def _build(inputs: Inputs, cache: Path, folder: Path) -> tuple[TextTokenizer, dict[str, Any]]:
    """Build beside the final place and publish in one rename; the caller holds the lock."""
    files = [file for source in (*inputs.train, *inputs.eval) for file in source.files]
    stamps = [stamp_of(file) for file in files]
    building = cache / f"{folder.name}.building"
    shutil.rmtree(building, ignore_errors=True)  # of a build that was killed
    building.mkdir()
    try:
        tokenizer, meta = build_shards(building, inputs)
        for file, stamp in zip(files, stamps):
            if stamp_of(file) != stamp:
                raise ValueError(f"{file.path} changed while it was tokenised; wait for its writer, then run again")
        return tokenizer, publish(building, folder, meta)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _open(
    recipe: Recipe, inputs: Inputs, folder: Path, meta: dict[str, Any], built: TextTokenizer | None, notes: list[str]
) -> TextCorpus:
    facts = CorpusFacts(
        **{**meta["facts"], "notes": (*meta["facts"]["notes"], *notes)}, cache_folder=str(folder), reused=built is None
    )
    length = recipe.data.sequence_length
    if facts.train_tokens <= length:
        raise ValueError(
            f"data.sequence_length={length} needs {length + 1} training tokens for one window; {facts.sources} gives "
            f"{facts.train_tokens}; lower it to {facts.train_tokens - 1} or less, or add text"
        )
    tokenizer = built or inputs.tokenizer
    if isinstance(tokenizer, TrainedTokenizer):
        tokenizer = prepare_tokenizer(load_tokenizer(str(folder / "tokenizer"), trust_remote_code=False))

    def windows(name: str, num_tokens: int) -> WindowDataset:
        dtype = np.dtype(meta["dtype"])
        vocab_size = tokenizer.vocab_size
        return WindowDataset(
            folder / name, dtype=dtype, num_tokens=num_tokens, sequence_length=length, vocab_size=vocab_size
        )

    return TextCorpus(
        train=windows("train.bin", facts.train_tokens),
        eval=windows("eval.bin", facts.eval_tokens) if facts.eval_tokens > 1 else None,
        tokenizer=tokenizer.tokenizer,
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id,
        fingerprint=_digest([folder.name, meta["tokenizer_digest"]]),
        facts=facts,
        large_files=digests_of_large_files(folder, meta),
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
