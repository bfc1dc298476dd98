"""Tokenize a recipe's text into shards on disk, once, and reuse them (`prepare_text`)."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from tqdm import tqdm

from accel_train.core.files import publish_folder
from accel_train.core.json_io import json_digest
from accel_train.data import cache
from accel_train.data.sources import Source, files_of, holds_tokens, resolve_both
from accel_train.data.text.build import Inputs, build_shards, byte_bar
from accel_train.data.text.tokenizers import TextTokenizer, load_tokenizer, prepare_tokenizer, pretrained_tokenizer
from accel_train.data.text.tokens import WindowDataset
from accel_train.recipe.data import TrainedTokenizer, WindowData
from accel_train.recipe.schema import Recipe
from accel_train.task import Facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    tokenizer: "PreTrainedTokenizerBase"
    vocab_size: int
    separator_id: int
    fingerprint: str
    """Hex digest. Equal fingerprints mean equal tokens and equal targets."""
    facts: Facts
    large_files: Mapping[Path, str] = field(default_factory=dict)
    """SHA-256 by path of large files whose digests are not checked yet, because that takes long."""


TextCorpus = Corpus[WindowDataset]


def prepare_text(recipe: Recipe, *, progress: bool) -> TextCorpus:
    """Return a recipe's text as memory-mapped shards, built now or by an earlier run.

    Any number of processes may call this at once: one builds, the others wait and read. `progress` shows progress bars.

    Raises:
        ValueError: a source or the tokenizer cannot be read, or the text is too short for one window.
    """
    inputs = _inputs(recipe, progress)
    root = cache.cache_folder(recipe.data)
    contents = _contents(inputs, root)
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
    return _open(recipe, inputs, folder, meta, built, notes)


def _inputs(recipe: Recipe, progress: bool) -> Inputs:
    train, held_out, notes = resolve_both(recipe.data)
    spec = recipe.tokenizer_in_use
    if isinstance(spec, TrainedTokenizer) and holds_tokens(train):
        raise ValueError(
            "tokenizer: train_bpe needs text, and data.train holds tokens; name the tokenizer that wrote them"
        )
    tokenizer = (
        pretrained_tokenizer(spec, trust_remote_code=recipe.model.trust_remote_code) if isinstance(spec, str) else spec
    )
    return Inputs(WindowData.of(recipe.data), train, held_out, tokenizer, notes, progress)


def _contents(inputs: Inputs, root: Path) -> dict[str, Any]:
    """Return everything that determines the tokens. File names are excluded, so a corpus may move."""
    data, tokenizer = inputs.data, inputs.tokenizer
    sides = {"train": inputs.train, "eval": inputs.eval}
    sizes = sum(file.stat().st_size for file in files_of((*inputs.train, *inputs.eval)))
    with byte_bar("checking the sources", sizes, inputs.progress) as bar:
        contents = {
            side: [[_source_contents(source, root, bar.update)] for source in sources]
            for side, sources in sides.items()
        }
    return {
        "format": _FORMAT,
        **contents,
        "eval_fraction": None if inputs.eval else data.eval_fraction,
        **({"split_seed": data.split_seed} if data.split_seed and not inputs.eval else {}),
        # Text that is shown to a trained model has other notes.
        **({} if data.is_for_training else {"shown": True}),
        **{name: getattr(data, name) for name in _READING},
        "tokenizer": tokenizer.digest if isinstance(tokenizer, TextTokenizer) else _to_train(tokenizer),
    }


def _to_train(tokenizer: TrainedTokenizer) -> dict[str, Any]:
    """Return the settings of a tokenizer without defaults, so that a new setting does not change them."""
    section = tokenizer.train_bpe
    return {"train_bpe": {"vocab_size": section.vocab_size, **section.model_dump(exclude_defaults=True)}}


def _source_contents(source: Source, root: Path, advance: Callable[[float], object]) -> list[Any]:
    if source.dataset is not None:
        return [source.name, source.dataset._fingerprint]
    digests = cache.file_digests(source.files, root, advance)
    return [[file.suffix.lower(), digest] for file, digest in zip(source.files, digests)]


def _reasons_to_build(inputs: Inputs, tokenizer_contents: Any, root: Path, folder: Path) -> list[str]:
    named = inputs.data.model_dump(
        include={"train", "eval", "subset", "split", "text_column", "eval_fraction", "encoding_errors"}
    )
    recipe_digest = json_digest({**named, "tokenizer": tokenizer_contents})[:32]
    before = cache.note_latest(root, recipe_digest, folder.name)
    reasons = []
    if before:
        reasons.append(f"the sources changed since their tokens were kept in {root / before}: tokenizing again")
    if folder.exists():
        reasons.append(f"the kept tokens in {folder} are damaged: tokenizing again")
    return reasons


def _build(inputs: Inputs, root: Path, folder: Path) -> tuple[TextTokenizer, dict[str, Any]]:
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
    recipe: Recipe, inputs: Inputs, folder: Path, meta: dict[str, Any], built: TextTokenizer | None, notes: list[str]
) -> TextCorpus:
    facts = Facts(**meta["facts"], cache_folder=str(folder), reused=built is None)
    facts.notes += notes
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
    train, held_out = (
        WindowDataset(
            folder / f"{side}.bin",
            dtype=np.dtype(meta["dtype"]),
            num_tokens=number,
            sequence_length=length,
            vocab_size=tokenizer.vocab_size,
        )
        for side, number in (("train", num_tokens), ("eval", num_held_out))
    )
    return Corpus(
        train=train,
        eval=held_out if num_held_out > 1 else None,
        tokenizer=tokenizer.tokenizer,
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id,
        fingerprint=json_digest([folder.name, meta["tokenizer_digest"]]),
        facts=facts,
        large_files=cache.digests_of_large_files(folder, meta),
    )
