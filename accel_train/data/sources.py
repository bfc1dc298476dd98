"""Resolve `data.train` and `data.eval` to files or data sets.

A name is looked up in this order: embedded corpus, glob, existing file or folder, data set of the `datasets` library.
"""

import glob
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accel_train.buckets.files import fetch_files, local_files, remote_files
from accel_train.buckets.store import is_of_store
from accel_train.core.files import files_below, refuse_link_loops
from accel_train.core.format import did_you_mean, format_count
from accel_train.data.delimited import DELIMITERS, delimiter_of, quoting_of
from accel_train.data.encoding import check_encoding, encoding_of
from accel_train.data.hub import look_for_hub, without_hub
from accel_train.data.parts import is_about, pick, top_part
from accel_train.recipe.data import Data, listed, renamed

if TYPE_CHECKING:
    import datasets

FileKind = Literal["text", "jsonl", "csv", "parquet", "conll", "json", "tokens"]

EMBEDDED_CORPORA = (
    "python-stdlib",
    "stdlib-functions",
    "stdlib-docstrings",
    "stdlib-tags",
    "stdlib-questions",
    "stdlib-names",
    "stdlib-summaries",
    "hangul-letters",
)
"""Data sets of Python's library. A function of `builtin.stdlib` makes all but the first, and has its name."""

_TEXT_NAMES = """
    txt text md markdown rst tex org log srt html htm xml css yaml yml toml ini cfg sql
    sh py pyi c h cc cpp cxx hpp cu cuh rs go java kt scala js mjs ts tsx jsx rb php pl lua r jl swift cs fs hs ml
    ex erl clj lisp el vim asm s f90 m
"""
# Each of these files is one document.
TEXT_SUFFIXES = frozenset(f".{name}" for name in _TEXT_NAMES.split())

TABLE_KINDS: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".json": "json",
    ".conll": "conll",
    **dict.fromkeys((".conllu", ".bio", ".iob", ".iob2"), "conll"),
    **dict.fromkeys((".bin", ".ds", ".mds"), "tokens"),
}
"""File kind by suffix. Each row is one document.

In token files, an index or a separator token divides documents. In CoNLL files, a blank line divides sentences.
"""

_BY_RANGES = {"text", "jsonl", "parquet", "json", None}
"""Kinds of files that may lie in a folder of a bucket which is read by ranges. Those without a kind are left out."""

_READ_IN = {
    "encoding": "text, csv, jsonl, conll, or json",
    **dict.fromkeys(("header", "delimiter", "quoting"), "csv"),
    "lines": "text",
}
"""Kinds of files that read a setting."""

_KNOWN_SUFFIXES = ".txt, .md, .py, " + ", ".join(TABLE_KINDS)


@dataclass(frozen=True)
class Source:
    """The files or the loaded data set behind one name of a recipe."""

    name: str
    description: str
    files: tuple[Path, ...] = ()
    dataset: "datasets.Dataset | None" = None
    notes: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    """Part of the only file to read: what begins in these bytes of text, jsonl, or csv, or row groups of parquet."""

    @property
    def kind(self) -> FileKind | None:
        """Kind of the first file. None for a data set, and for an unknown suffix."""
        return file_kind(self.files[0]) if self.files else None

    def parts(self) -> list["Source"]:
        """Return a source for each file, or the source itself if it is a data set."""
        return [replace(self, files=(file,)) for file in self.files] or [self]


def resolve_sources(names: Any, data: Data, *, key: str, by_ranges: bool = False) -> tuple[Source, ...]:
    """Return the files and data sets named by a recipe key (`data.train` or `data.eval`), in a fixed order.

    With `by_ranges`, files of a bucket are not copied, if all of their kinds can be read by ranges (`RemoteFile`).

    Raises:
        ValueError: a source is missing, of an unknown kind, or mixes token shards with text.
    """
    sources = tuple(_resolve(name, data, key, by_ranges) for name in listed(names))
    if not sources:
        raise ValueError(f"{key} is empty; name a file, folder, data set or one of {', '.join(EMBEDDED_CORPORA)}")
    is_text = any(source.dataset is not None for source in sources) or {*map(file_kind, files_of(sources))} != {
        "tokens"
    }
    if holds_tokens(sources) and is_text:
        raise ValueError(f"{key} mixes token files with text ({names!r}); give token files alone")
    return sources


def located(data: Data, started_in: str | None) -> Data:
    """Return the data settings of a moved run. Names that do not exist here are looked up where the run started."""

    def place_of(name: str) -> str:
        elsewhere = os.path.join(started_in or "", os.path.expanduser(name))
        return elsewhere if not is_there(name) and is_there(elsewhere) else name

    cache = data.cache_dir and place_of(data.cache_dir)
    # A missing cache can be rebuilt anywhere. Its old path may belong to another machine.
    kept = data.model_copy(update={"cache_dir": cache if cache and is_there(cache) else None})
    return renamed(kept, place_of)


def is_there(name: str) -> bool:
    """Return whether a name of `data.train` or `data.eval` is embedded data or an existing file, folder or glob."""
    from accel_train.data.builtin.digit_scenes import EMBEDDED_IMAGES

    path = os.path.expanduser(name)
    return name in (*EMBEDDED_CORPORA, *EMBEDDED_IMAGES) or os.path.exists(path) or bool(glob.glob(path))


def unread_formats(data: Data) -> dict[str, str]:
    """Return the settings of `data` that none of its files reads, by dotted name, each with the reason."""
    # Only settings that are given need a look at the files.
    given = sorted(_READ_IN.keys() & data.model_fields_set)
    names = [name for _, name in data.named()]
    if any(map(is_of_store, names)):
        return {}
    names += [str(getattr(data, name, None)) for name in ("annotations", "eval_annotations")]
    paths = [Path(path).expanduser() for name in names if given for path in (name, *glob.glob(name, recursive=True))]
    kinds = {file_kind(file) for path in paths for file in (files_below(path) if path.is_dir() else [path])}
    why = {name: f"no file is {_READ_IN[name]}" for name in given}
    return {f"data.{name}": why[name] for name in given if not any(str(kind) in why[name] for kind in kinds)}


def is_path(name: str) -> bool:
    """Return whether a name can only be a file or folder of this machine, not a data set or in a bucket."""
    if is_of_store(name):
        return False
    is_absolute = os.path.isabs(os.path.expanduser(name))
    return is_absolute or name.startswith(".") or bool(Path(name).suffix) or glob.has_magic(name)


def check_paths(data: Data) -> None:
    """Check that the files and folders of `data.train` and `data.eval` exist. Reads none of them.

    Raises:
        ValueError: a file or folder is missing, or no file matches a pattern.
    """
    for key, name in data.named():
        if is_path(name) and not is_there(name):
            _resolve(name, data, key)


def holds_tokens(sources: Sequence[Source]) -> bool:
    """Return whether the sources are token shards. `resolve_sources` refuses to mix them with other kinds."""
    return any(file_kind(file) == "tokens" for file in files_of(sources))


def files_of(sources: Sequence[Source]) -> list[Path]:
    """Return the files of all sources, in order."""
    return [file for source in sources for file in source.files]


def describe(train: Sequence[Source], held_out: Sequence[Source] = ()) -> str:
    """Return a description of the sources for users."""
    described = ", ".join(source.description for source in train)
    return f"{described}; evaluation: {describe(held_out)}" if held_out else described


def num_bytes_of(source: Source) -> float:
    """Return the bytes of a source: the sum of `num_source_bytes` over its rows or documents."""
    if source.dataset is not None:
        return float(source.dataset.data.nbytes)
    if source.span is not None and source.kind != "parquet":
        return float(source.span[1] - source.span[0])
    return float(sum(file.stat().st_size for file in source.files))


def companions_of(file: Path) -> list[Path]:
    """Return the existing files next to a token file that say how to read it."""
    names = {
        ".bin": [f"{file.stem}.idx"],
        ".ds": [f"{file.name}.metadata", f"{file.name}.index"],
        ".mds": ["index.json"],
    }
    return [path for name in names.get(file.suffix.lower(), ()) if (path := file.with_name(name)).is_file()]


def file_kind(path: Path) -> FileKind | None:
    """Return the kind of a file by its name, or None if unknown."""
    suffix = path.suffix.lower()
    return TABLE_KINDS.get(suffix) or ("text" if suffix in TEXT_SUFFIXES else None)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote a folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def is_about_data(path: Path, folder: Path) -> bool:
    """Return whether a file at the top of a data folder only describes the data, by its name: README.md, LICENSE."""
    is_text = not path.suffix or file_kind(path) == "text"
    return is_text and path.parent == folder and is_about(path.name)


def _resolve(name: str, data: Data, key: str, by_ranges: bool = False) -> Source:
    remote = remote_files(name) if by_ranges and is_of_store(name) else []
    path = Path(local_files(name)).expanduser()
    if remote and {*map(file_kind, remote)} <= _BY_RANGES and not any(file.suffix == ".arrow" for file in remote):
        if path in remote or glob.has_magic(name):
            return _describe_files(name, remote, data, key=key)
        return _resolve_folder(name, path, data, key, remote)
    name = fetch_files(name)
    if name in EMBEDDED_CORPORA:
        from accel_train.data.builtin import stdlib

        title = f"{name} of Python {platform.python_version()}"
        if name == "python-stdlib":
            return _describe_files(name, stdlib.python_stdlib_files(), data, title=title)
        return _describe_dataset(title, getattr(stdlib, name.replace("-", "_"))())
    if not path.exists() and glob.has_magic(name):
        # A `**` pattern follows links.
        if "**" in path.parts:
            refuse_link_loops(Path(*path.parts[: path.parts.index("**")]))
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        found = [match for match in matches if match.is_file()]
        if not found:
            raise ValueError(f"{key}: no file matches {name!r} (seen from {Path.cwd()}); check the pattern")
        return _describe_files(name, found, data, key=key)
    if path.is_dir():
        return _resolve_folder(name, path, data, key)
    if path.exists():
        return _describe_files(name, [path], data, key=key)
    if name.startswith(("/", ".", "~")) or file_kind(path) is not None or data.reads_any_suffix or not name.strip():
        raise ValueError(f"{key}: no file or folder {name!r} (seen from {Path.cwd()}){_nearest(path)}")
    return _load_dataset(name, data, key)


def _resolve_folder(name: str, folder: Path, data: Data, key: str, remote: Sequence[Path] = ()) -> Source:
    if not remote and is_saved_dataset(folder):
        return _load_saved_dataset(name, folder, data, key)
    paths = remote or [path for path in files_below(folder, skipped={"__pycache__"}) if path.is_file()]
    if compressed := [path for path in paths if ".mds" in path.suffixes[:-1]]:
        raise ValueError(
            f"{key}: {compressed[0]} is compressed, and tokens are read where they lie; write the shards without "
            "compression"
        )
    # JSON files describe data as often as they contain it, so JSON files in a folder are skipped.
    files = [path for path in paths if file_kind(path) not in (None, "json")]
    if not files:
        raise ValueError(
            f"{key}: the folder {name!r} holds no file of a known kind (known: {_KNOWN_SUFFIXES}; "
            f"found: {_suffix_counts(paths) or 'nothing'})"
        )
    if data.lines != "folder_names":
        refuse_held_out_files(name, folder, files, data, key)
    left_out = sorted({*paths} - {*files, *(each for file in files for each in companions_of(file))})
    notes: tuple[str, ...] = (
        (f"{name}: left out {format_count(len(left_out), 'file')} of other kinds ({_suffix_counts(left_out)})",)
        if left_out
        else ()
    )
    about = [path for path in files if is_about_data(path, folder)]
    if about and len(about) < len(files):
        files = [path for path in files if path not in about]
        notes += (
            f"{name}: left out {', '.join(path.name for path in about)}, because their names say that they describe "
            f"the data",
        )
    if data.lines == "folder_names":
        deeper = [path for path in files if folder not in (path.parent, path.parent.parent)]
        if deeper:
            raise ValueError(
                f"{key}: {deeper[0]} lies more than one folder below {name!r}. For data.lines: folder_names, name the "
                "folder that holds the folders of the classes"
            )
        loose = [path for path in files if path.parent == folder]
        if loose and len(loose) < len(files):
            files = [path for path in files if path.parent != folder]
            notes += (
                f"{name}: left out {format_count(len(loose), 'file')} outside of class folders ({loose[0].name} is "
                "the first)",
            )
    return _describe_files(name, files, data, notes=notes)


def _load_saved_dataset(name: str, folder: Path, data: Data, key: str) -> Source:
    """Return a data set written by `save_to_disk`, with one split or several."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    # The library raises many types for a damaged folder.
    except Exception as error:
        raise ValueError(f"{key}: {name!r} looks like a saved data set but cannot be read: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        split = _pick_split(name, list(saved), data, key)
        return _describe_dataset(f"{name} [{split}]", saved[split])
    return _describe_dataset(name, saved)


def refuse_held_out_files(name: str, folder: Path, files: list[Path], data: Data, key: str) -> None:
    """Refuse a folder with both training and held-out files: `train.bin` and `val.bin`, `train/` and `test/`.

    Training on this folder would train on the evaluation data. Of texts, only .txt files with a training part count: a
    program has files such as test.py.
    """
    for are_texts in (False, True):
        tops = [
            top_part(path.relative_to(folder))
            for path in files
            if (file_kind(path) == "text") is are_texts and (path.suffix == ".txt" or not are_texts)
        ]
        held_out = [place for place, part in tops if part in ("eval", "test")]
        if held_out and len(held_out) < len(tops) and (not are_texts or any(part == "train" for _, part in tops)):
            raise ValueError(
                f"{key}: the folder {name!r} holds {held_out[0]} next to training files; name them apart, for example "
                f"{data.train_key}: {name}/*train*{held_out[0].suffix} and data.eval: {name}/{held_out[0]}"
            )


def _load_dataset(name: str, data: Data, key: str) -> Source:
    import datasets

    look_for_hub(name)
    try:
        # No trust_remote_code: data sets never run code here (`datasets` removed scripts in 4.0).
        split = data.split
        if key == "data.eval":
            split = _pick_split(name, datasets.get_dataset_split_names(name, data.subset), data, key)
        dataset = datasets.load_dataset(name, data.subset, split=split)
    # The library raises a dozen types, from FileNotFoundError to its own errors.
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise ValueError(
            f"{key}: {name!r} is not a file or folder (seen from {Path.cwd()}), and `datasets` "
            f"cannot load it: {reason.splitlines()[0]}{_nearest(Path(name).expanduser())}{without_hub(name)}"
        ) from error
    shown = f"{name}/{data.subset}" if data.subset else name
    return _describe_dataset(f"{shown} [{split}]", dataset)


def _pick_split(name: str, available: list[str], data: Data, key: str) -> str:
    """Return the split to use: `data.split` for training, the usual name of a held-out split for evaluation."""
    if key == "data.eval":
        split = pick(available, "eval") or pick(available, "test")
    else:
        split = data.split if data.split in available else None
    if split is None:
        wanted = "validation or test" if key == "data.eval" else data.split
        raise ValueError(f"{name} has no split {wanted}; it has {', '.join(map(str, available))}")
    return split


def _describe_dataset(name: str, dataset: Any) -> Source:
    return Source(name, f"{name}: {format_count(len(dataset), 'row')}", dataset=dataset)


def _describe_files(
    name: str, files: Sequence[Path], data: Data, *, key: str = "", title: str = "", notes: tuple[str, ...] = ()
) -> Source:
    """Return the source of regular files of known kinds.

    Raises:
        ValueError: a file is of an unknown kind or not a regular file.
    """
    for file in files:
        if file_kind(file) is None and not data.reads_any_suffix:
            raise ValueError(
                f"{key}: {file} has an unknown extension {file.suffix!r}; known are {_KNOWN_SUFFIXES} "
                f"and more text formats; rename a plain text file to .txt"
            )
        if not file.is_file():
            raise ValueError(f"{file} is not a regular file (it is a pipe or a device); write its data into a file")
    notes += _readings(files, data)
    total_bytes = sum(file.stat().st_size for file in files)
    described = f"{title or name}: {format_count(len(files), 'file')}, {total_bytes / 1e6:,.1f} MB"
    return Source(name, described, tuple(files), notes=notes)


def _nearest(path: Path) -> str:
    """Return the end of an error message: the nearest existing name and the embedded corpora."""
    try:
        siblings = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        siblings = []
    meant = did_you_mean(path.name, siblings, least=0.5, show=lambda name: str(path.parent / name))
    return f"{'; ' + meant if meant else ''} (embedded corpora: {', '.join(EMBEDDED_CORPORA)})"


def _readings(files: Sequence[Path], data: Data) -> tuple[str, ...]:
    """Return notes on tables with an unusual detected delimiter, quoting or encoding."""
    found: dict[str, list[Path]] = {}
    for file in files:
        kind = file_kind(file)
        if kind in ("text", "csv", "jsonl", "conll"):
            check_encoding(file, data)
        if kind == "csv" and file.suffix.lower() == ".csv" and (delimiter := delimiter_of(file, data)) != ",":
            name = DELIMITERS.get(delimiter, repr(delimiter))
            found.setdefault(f"separated by {name}, because they divide its first lines equally", []).append(file)
        if kind == "csv" and data.quoting == "auto" and quoting_of(file, data) == "none":
            how = (
                "tabs and lines alone: quotes are characters of the text, since csv quoting would swallow rows "
                "(data.quoting)"
            )
            found.setdefault(how, []).append(file)
        if kind in ("csv", "jsonl") and data.encoding == "auto" and encoding_of(file, data) != "utf-8":
            found.setdefault("UTF-16, as its byte order mark says", []).append(file)
    return tuple(
        f"{named[0]}{f' and {len(named) - 1} more' if len(named) > 1 else ''}: read as {how}"
        for how, named in found.items()
    )


def _suffix_counts(paths: Sequence[Path]) -> str:
    counts = Counter(path.suffix or "no extension" for path in paths).most_common(5)
    return ", ".join(f"{count} {suffix}" for suffix, count in counts)
