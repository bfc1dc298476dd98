"""Where text comes from: what `data.train` and `data.eval` name, resolved to files or to a data set.

A name is, in this order: an embedded corpus, a glob, an existing file or folder, a data set of the `datasets` library.
"""

import difflib
import glob
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Literal

from accel_train.recipe_data import Data

if TYPE_CHECKING:
    import datasets

FileKind = Literal["text", "jsonl", "csv", "parquet", "tokens"]

EMBEDDED_CORPORA = ("python-stdlib", "stdlib-functions")

_TEXT_NAMES = """
    txt text md markdown rst tex org log srt html htm xml css yaml yml toml ini cfg sql
    sh py pyi c h cc cpp cxx hpp cu cuh rs go java kt scala js mjs ts tsx jsx rb php pl lua r jl swift cs fs hs ml
    ex erl clj lisp el vim asm s f90 m
"""
TEXT_SUFFIXES = frozenset(f".{name}" for name in _TEXT_NAMES.split())
"""One document is one file."""

TABLE_KINDS: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".bin": "tokens",
}
"""One document is one row; in `.bin`, documents are separated by a token."""

# Left out of python-stdlib: other people's packages, tests (some are not UTF-8 on purpose), an editor, wheels.
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "idlelib", "_bundled")
)
_HELD_OUT_NAME = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|dev|test|eval)(?:[^a-z]|$)")


_LONGEST_HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class SourceFile:
    """One file, and how to read it."""

    path: Path
    kind: FileKind


@dataclass(frozen=True)
class Source:
    """What one name of a recipe stands for: files, or a loaded data set."""

    name: str
    description: str
    files: tuple[SourceFile, ...] = ()
    dataset: "datasets.Dataset | None" = None
    notes: tuple[str, ...] = ()

    @property
    def holds_tokens(self) -> bool:
        """Token shards, which no tokenizer reads."""
        return bool(self.files) and self.files[0].kind == "tokens"


def resolve_sources(names: str | tuple[str, ...], data: Data, *, leaf: str) -> tuple[Source, ...]:
    """The files and data sets that a recipe's leaf (`data.train` or `data.eval`) names, in a fixed order.

    Raises:
        ValueError: something is missing, of an unknown kind, or mixes token shards with text.
    """
    sources = tuple(_resolve(name, data, leaf) for name in ((names,) if isinstance(names, str) else names))
    if not sources:
        raise ValueError(f"{leaf} is empty; name a file, folder, data set or one of {', '.join(EMBEDDED_CORPORA)}")
    kinds = {file.kind == "tokens" for source in sources for file in source.files} | {
        False for source in sources if source.dataset is not None
    }
    if len(kinds) > 1:
        raise ValueError(f"{leaf} mixes .bin token shards with text ({names!r}); give token shards alone")
    return sources


def located(data: Data, started_in: str | None) -> Data:
    """The data of a run that was moved, or is used from another folder: what is not seen from here, as seen from where it started."""

    def place_of(name: str) -> str:
        elsewhere = os.path.join(started_in or "", os.path.expanduser(name))
        return elsewhere if not is_there(name) and is_there(elsewhere) else name

    def places_of(names: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return place_of(names) if isinstance(names, str) else names and tuple(map(place_of, names))

    cache = data.cache_dir and place_of(data.cache_dir)
    changes = {
        "train": places_of(data.train),
        "eval": places_of(data.eval),
        "chat_template": places_of(data.chat_template),
    }
    # A cache that is not there can be made anywhere; its old place may belong to another machine.
    return data.model_copy(update={**changes, "cache_dir": cache if cache and is_there(cache) else None})


def is_there(name: str) -> bool:
    """Whether a name of `data.train` or `data.eval` is embedded data, or a file, folder or glob that is seen from here."""
    from accel_train.data.digit_scenes import NAME
    from accel_train.data.image_pools import EMBEDDED_IMAGES

    path = os.path.expanduser(name)
    return name in (*EMBEDDED_CORPORA, *EMBEDDED_IMAGES, NAME) or os.path.exists(path) or bool(glob.glob(path))


def is_path(name: str) -> bool:
    """Whether a name can only be that of a file or folder, and of no data set."""
    return (
        os.path.isabs(os.path.expanduser(name))
        or name.startswith(".")
        or bool(Path(name).suffix)
        or glob.has_magic(name)
    )


def holds_tokens(sources: Sequence[Source]) -> bool:
    """Whether these are token shards; `resolve_sources` lets no others in beside them."""
    return any(source.holds_tokens for source in sources)


def describe(sources: Sequence[Source]) -> str:
    """What is read, for people."""
    return ", ".join(source.description for source in sources)


def file_kind(path: Path) -> FileKind | None:
    """How to read a file, by the end of its name; None where that is unknown."""
    suffix = path.suffix.lower()
    return TABLE_KINDS.get(suffix) or ("text" if suffix in TEXT_SUFFIXES else None)


def python_stdlib_root() -> Path:
    """The folder of the running Python's own library."""
    return Path(sysconfig.get_path("stdlib"))


def python_stdlib_files() -> tuple[SourceFile, ...]:
    """The running Python's own library, one document per `.py` file, sorted by relative name.

    Raises:
        ValueError: this Python carries no source files (an embedded or zipped one).
    """
    root = python_stdlib_root()
    files = tuple(
        SourceFile(path, "text")
        for path in _walk(root, skipped_folders=_NOT_STDLIB)
        if path.suffix == ".py" and path.is_file()
    )
    if not files:
        raise ValueError(f"python-stdlib: {root} holds no .py files; name another corpus in data.train")
    return files


def _resolve(name: str, data: Data, leaf: str) -> Source:
    if name == "python-stdlib":
        return _describe_files(f"python-stdlib of Python {platform.python_version()}", python_stdlib_files(), name=name)
    if name == "stdlib-functions":
        from accel_train.data.stdlib_functions import stdlib_functions

        return _describe_dataset(f"stdlib-functions of Python {platform.python_version()}", stdlib_functions())
    path = Path(name).expanduser()
    if not path.exists() and glob.has_magic(name):
        if "**" in path.parts:  # which follows links
            refuse_loops(Path(*path.parts[: path.parts.index("**")]))
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        found = [match for match in matches if match.is_file()]
        if not found:
            raise ValueError(f"{leaf}: no file matches {name!r} (seen from {Path.cwd()}); check the pattern")
        return _describe_files(name, [_known_file(match, leaf) for match in found], name=name)
    if path.is_dir():
        return _resolve_folder(name, path, data, leaf)
    if path.exists():
        return _describe_files(name, [_known_file(path, leaf)], name=name)
    if name.startswith(("/", ".", "~")) or file_kind(path) is not None or not name.strip():
        raise ValueError(f"{leaf}: there is no file or folder {name!r} (seen from {Path.cwd()}){_nearest(path)}")
    return _load_dataset(name, data, leaf)


def _resolve_folder(name: str, folder: Path, data: Data, leaf: str) -> Source:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _load_saved_dataset(name, folder, data, leaf)
    paths = [path for path in _walk(folder, skipped_folders=frozenset(["__pycache__"])) if path.is_file()]
    files = [SourceFile(path, kind) for path in paths if (kind := file_kind(path))]
    if not files:
        raise ValueError(
            f"{leaf}: the folder {name!r} holds no file of a known kind (known: {_known_suffixes()}; "
            f"found: {_suffix_counts(paths) or 'nothing'})"
        )
    _refuse_held_out_tables(name, files, leaf)
    left_out = [path for path in paths if file_kind(path) is None]
    notes = (f"{name}: left out {len(left_out)} files of other kinds ({_suffix_counts(left_out)})",) if left_out else ()
    return _describe_files(name, files, name=name, notes=notes)


def _load_saved_dataset(name: str, folder: Path, data: Data, leaf: str) -> Source:
    """What `datasets` wrote with save_to_disk: one split, or several."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever the library raises for a damaged folder
        raise ValueError(f"{leaf}: {name!r} looks like a saved data set but cannot be read: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        split = _pick_split(name, list(saved), data, leaf)
        return _describe_dataset(f"{name} [{split}]", saved[split])
    return _describe_dataset(name, saved)


def _refuse_held_out_tables(name: str, files: list[SourceFile], leaf: str) -> None:
    """Training on a folder that holds `train.bin` and `val.bin` would train on the evaluation data."""
    tables = [file.path for file in files if file.kind != "text"]
    held_out = [path for path in tables if _HELD_OUT_NAME.search(path.stem.lower())]
    if held_out and len(held_out) < len(tables):
        suffix = held_out[0].suffix
        raise ValueError(
            f"{leaf}: the folder {name!r} holds {held_out[0].name} beside training files; name them apart, "
            f"for example data.train: {name}/*train*{suffix} and data.eval: {name}/{held_out[0].name}"
        )


def _known_file(path: Path, leaf: str) -> SourceFile:
    kind = file_kind(path)
    if kind is None:
        raise ValueError(
            f"{leaf}: {path} has an unknown extension {path.suffix!r}; known are {_known_suffixes()} "
            f"and more text formats; rename a plain text file to .txt"
        )
    return SourceFile(path, kind)


def _walk(root: Path, *, skipped_folders: frozenset[str]) -> list[Path]:
    """Every file below a folder, sorted by relative name; hidden files and folders are left out."""
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in skipped_folders and not name.startswith(".")]
        found += [Path(folder, file) for file in files if not file.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _load_dataset(name: str, data: Data, leaf: str) -> Source:
    import datasets

    try:
        # No trust_remote_code: data sets never run code here (`datasets` dropped scripts in 4.0).
        split = data.split
        if leaf == "data.eval":
            split = _pick_split(name, datasets.get_dataset_split_names(name, data.subset), data, leaf)
        dataset = datasets.load_dataset(name, data.subset, split=split)
    except Exception as error:  # the library raises a dozen types, from FileNotFoundError to its own
        reason = str(error).strip() or type(error).__name__
        raise ValueError(
            f"{leaf}: {name!r} is neither an existing file or folder (seen from {Path.cwd()}) nor a data set that "
            f"`datasets` can load: {reason.splitlines()[0]}{_nearest(Path(name).expanduser())}"
        ) from error
    shown = f"{name}/{data.subset}" if data.subset else name
    return _describe_dataset(f"{shown} [{split}]", dataset)


def _pick_split(name: str, available: list[str], data: Data, leaf: str) -> str:
    """The split to use: `data.split` for training; for evaluation the usual name of the held-out one."""
    wanted = ["validation", "valid", "val", "dev", "eval", "test"] if leaf == "data.eval" else [data.split]
    for split in wanted:
        if split in available:
            return split
    raise ValueError(f"{name} has no split {' or '.join(wanted)}; it has {', '.join(map(str, available))}")


def _describe_dataset(name: str, dataset: Any) -> Source:
    return Source(name, f"{name}: {len(dataset):,} rows", dataset=dataset)


def _describe_files(title: str, files: Iterable[SourceFile], *, name: str, notes: tuple[str, ...] = ()) -> Source:
    files = tuple(files)
    stats = [file.path.stat() for file in files]
    for file, stat in zip(files, stats):
        if not S_ISREG(stat.st_mode):
            raise ValueError(
                f"{file.path} is no regular file (a pipe or a device), and is not read; write its data into a file"
            )
    tabbed = [file.path for file in files if file.path.suffix.lower() == ".csv" and _has_tabs(file.path)]
    if tabbed:
        more = f" and {len(tabbed) - 1} more" if len(tabbed) > 1 else ""
        notes += (f"{tabbed[0]}{more}: read as separated by tabs, which its first line has, and no comma",)
    total_bytes = sum(stat.st_size for stat in stats)
    count = f"{len(files):,} file{'s' if len(files) != 1 else ''}"
    return Source(name, f"{title}: {count}, {total_bytes / 1e6:,.1f} MB", files, notes=notes)


def _nearest(path: Path) -> str:
    """The part of an error that says what the user may have meant."""
    try:
        siblings = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        siblings = []
    meant = [str(path.parent / match) for match in difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.5)]
    nearest = f"; the nearest existing one is {meant[0]}" if meant else ""
    return f"{nearest}; embedded corpora: {', '.join(EMBEDDED_CORPORA)}"


def _known_suffixes() -> str:
    return ".txt, .md, .py, " + ", ".join(TABLE_KINDS)


def _has_tabs(path: Path) -> bool:
    """Whether the fields of a csv file are separated by tabs, as `lines.csv_rows` reads them."""
    with path.open("rb") as file:
        header = file.readline(_LONGEST_HEADER_BYTES)
    return b"\t" in header and b"," not in header


def refuse_loops(folder: Path) -> None:
    """Refuse a folder in which a link leads back to where it is: each file would be found dozens of times, or without end.

    Raises:
        ValueError: names the link.
    """
    for root, folders, _ in os.walk(folder, followlinks=True):
        for path in (Path(root, name).absolute() for name in folders):
            if path.is_symlink() and path.resolve() in (parent.resolve() for parent in path.parents):
                raise ValueError(f"{path} is a link to {path.resolve()}, in which it lies itself; remove the link")


def _suffix_counts(paths: list[Path]) -> str:
    counts = Counter(path.suffix or "no extension" for path in paths).most_common(5)
    return ", ".join(f"{count} {suffix}" for suffix, count in counts)
