"""Fetch and tokenize what a run reads, with the run's own functions, so that GPUs do not wait for it."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from accel_train.buckets.store import is_of_store
from accel_train.core.format import format_bytes
from accel_train.data.cache import cache_root
from accel_train.data.hub import downloaded
from accel_train.data.sources import is_there, resolve_sources
from accel_train.engine.resolve import change_model, check_recipe
from accel_train.model.memory_estimate import build_without_weights
from accel_train.model.pretrained import fetch_weights
from accel_train.recipe.schema import Recipe
from accel_train.recipe.tasks import targets_of
from accel_train.runtime.launch_environment import with_launch_environment
from accel_train.task import TaskData, read_data


class Part(NamedTuple):
    """One kind of input of a run."""

    name: str
    about: str
    path: Path | None
    """Place of its files. None if it has no files to prepare."""
    num_bytes: int
    was_there: bool
    """Whether nothing was downloaded or tokenized for it."""


def prepare(recipe: Recipe, *, progress: bool = False) -> list[Part]:
    """Download the tokenizer, weights, and data sets of a recipe, tokenize its text, and return what is prepared.

    Everything is put into the caches that a run reads. No weights are loaded, and `output_dir` is not touched.

    Raises:
        ValueError: a run would refuse the recipe, the model, or the data.
    """
    since = time.time()
    recipe, task = check_recipe(with_launch_environment(recipe))
    task.prove(recipe)
    parts = list(_data_sets(recipe, since))
    data = read_data(task, recipe, progress=progress)
    if data.shards is not None:
        data.facts.reused = not data.shards.count(progress)
        if data.facts.train_tokens is not None:
            data.facts.train_tokens = data.shards.num_tokens
    parts.append(_samples(recipe, data, since))
    change_model(recipe, task, build_without_weights(recipe, task, data))
    pretrained, tokenizer = recipe.model.pretrained, recipe.tokenizer_in_use
    if isinstance(tokenizer, str) and tokenizer != pretrained and (folder := downloaded(tokenizer)) is not None:
        parts.append(_stored("tokenizer", tokenizer, folder, folder.glob("*token*"), since))
    if pretrained is None:
        parts.append(Part("weights", "made by the run: nothing to download", None, 0, True))
    else:
        files = fetch_weights(recipe)
        parts.append(_stored("weights", pretrained, files[0].parent, files, since))
    return parts


def _stored(name: str, about: str, folder: Path, files: Iterable[Path], since: float) -> Part:
    stats = [os.stat(file) for file in files]
    return Part(name, about, folder, sum(each.st_size for each in stats), all(each.st_mtime < since for each in stats))


def _data_sets(recipe: Recipe, since: float) -> Iterator[Part]:
    data = recipe.data
    files: list[Path] = []
    found: list[str] = []
    for key, name in data.named():
        if not is_there(name) and not is_of_store(name):
            for source in resolve_sources(name, data, key=key):
                assert source.dataset is not None
                found.append(source.description)
                files += [Path(each["filename"]) for each in source.dataset.cache_files]
    if files:
        yield _stored("data sets", ", ".join(found), files[0].parent, dict.fromkeys(files), since)


def _samples(recipe: Recipe, data: TaskData, since: float) -> Part:
    facts, name = data.facts, "samples"
    count = f"{len(data.train):,} for training"  # type: ignore[arg-type]
    if facts.train_tokens is not None:
        name, count = "tokens", f"{facts.train_tokens:,} for training, {facts.eval_tokens:,} for evaluation"
        if facts.cache_folder is None:
            return Part(name, f"{count}; files are read in place: nothing to prepare", None, 0, True)
    if facts.cache_folder is not None:
        folder = Path(facts.cache_folder)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return Part(name, count, folder, num_bytes, facts.reused)
    if targets_of(recipe.task, "pixels") not in ("images", "pixels"):
        return Part("samples", f"{count}; a start encodes rows, and keeps them from 1 MiB on", None, 0, True)
    if ".parquet" in f"{recipe.data.train} {recipe.data.eval}":
        copies = [*(cache_root(recipe.data) / "images").rglob("*.arrow")]
        return _stored("samples", f"{count}; parquet files are copied", copies[0].parent, copies, since)
    return Part("samples", f"{count}; images are read in place: nothing to cache", None, 0, True)


def format_parts(parts: Iterable[Part], seconds: float) -> str:
    """Return a line for each part, and a last one with the verdict."""
    parts = list(parts)
    lines = []
    for part in parts:
        state = "there already" if part.was_there else "new"
        stored = "" if part.path is None else f": {format_bytes(part.num_bytes)} in {part.path} ({state})"
        lines.append(f"{part.name:<10} {part.about}{stored}")
    verdict = "Everything is there already" if all(part.was_there for part in parts) else "Prepared"
    lines.append(f"{verdict} ({seconds:.1f} s). `accel-train run` with the same arguments reads it there.")
    return "\n".join(lines)
