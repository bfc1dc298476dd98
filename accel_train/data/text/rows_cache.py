"""Rows that are encoded once, and mapped by all processes and by later starts (`open_rows`, `data/text/kept.py`)."""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.core.json_io import json_digest
from accel_train.core.version import __version__
from accel_train.data import cache
from accel_train.data.sources import files_of, num_bytes_of
from accel_train.data.tables import resolve_both
from accel_train.data.text.aligned import target_file
from accel_train.data.text.kept import UNUSABLE, Values, keep_values, say
from accel_train.data.text.tokenizers import train_bpe
from accel_train.recipe.data import Data, TrainedTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_BYTES = 1 << 20
"""Bytes of the sources from which rows are kept. Smaller sources are encoded at each start, within a second."""

# Part of every key. Raise it when the same rows would be encoded or stored in another way.
_FORMAT = 1
READ_LATER = {
    *("cache_dir", "cache_limit", "num_workers", "pin_memory"),
    *("shuffle", "group_by_length", "last_batch", "max_broken"),
}
"""Settings that do not determine the encoding."""

Keep = Callable[[Sequence[object], Callable[[], Values], Callable[..., Any]], Values]
"""Function that returns the values of an entry, memory-mapped, or builds them.

The first process builds, the others wait. Errors of a build are not kept. If the cache cannot be written, one line says
so, and the values stay in memory.

Its arguments are all that determines the values besides sources and `data` (with None: they are not kept), the function
that builds them, and the class of the rows. Rows have texts, numbers, None, arrays with one dimension, and tuples.
"""


def open_rows(data: Data, progress: bool, sampled: bool = False) -> Keep:
    """Return the function that keeps the rows of a recipe: training data from `LEAST_BYTES` on.

    Files are known by their digests, or by samples of them with `sampled`.

    Raises:
        ValueError: as for `resolve_both`.
    """

    train, held_out, _ = resolve_both(data)
    sources = (*train, *held_out)
    files, root = files_of(sources), cache.cache_root(data) / "text"
    # Of line-aligned texts, the sources name one side.
    if suffix := getattr(data, "target_suffix", None):
        files += filter(Path.is_file, [target_file(file, suffix) for file in files])
    determined: list[object] = []
    if data.is_for_training and sum(map(num_bytes_of, sources)) >= LEAST_BYTES:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stamps = [*map(cache.stamp_of, files)]
            # Names of files are part of names of rows and of notes.
            names = [(source.name, source.notes, source.dataset and source.dataset._fingerprint) for source in sources]
            settings = data.model_dump(mode="json", exclude=READ_LATER)
            versions = [_FORMAT, __version__, *map(version, ("tokenizers", "transformers"))]
            digests = map(cache.sample_digest, files) if sampled else cache.file_digests(files, root, lambda _: None)
            determined = [versions, settings, names, files, *digests]
        except UNUSABLE as error:
            say(f"not kept ({error})", progress)

    def keep(contents: Sequence[object], build: Callable[[], Values], make: Callable[..., Any]) -> Values:
        if not determined or None in contents:
            return build()
        key = json_digest([determined, contents, make])
        return keep_values(data, key, build, make, lambda: stamps == [*map(cache.stamp_of, files)], progress)

    return keep


def contents_of(tokenizer: "PreTrainedTokenizerBase") -> list[str] | None:
    """Return everything that determines the ids that a tokenizer gives, or None if its own code does."""
    is_known = tokenizer.is_fast and type(tokenizer).__module__.startswith("transformers.")
    return [repr(tokenizer), tokenizer.backend_tokenizer.to_str()] if is_known else None


def bpe_of(texts: Iterable[str], spec: TrainedTokenizer) -> Values:
    """Return a BPE that is trained on texts, as JSON."""
    return {"bpe": train_bpe(texts, spec.train_bpe.vocab_size).backend_tokenizer.to_str()}
