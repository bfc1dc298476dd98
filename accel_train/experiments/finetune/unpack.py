"""Unpack archives and convert spreadsheets into a folder next to the run, so that a recipe can name their files."""

import csv
import gzip
import hashlib
import os
import shutil
import tarfile
import time
import zipfile
import zlib
from pathlib import Path, PurePath
from typing import Any

from accel_train.core.files import files_below, make_folders, publish_folder
from accel_train.core.format import format_count
from accel_train.data.delimited import table_delimiter
from accel_train.data.encoding import read_lines
from accel_train.data.sources import file_kind, is_about_data
from accel_train.experiments.finetune.class_files import classes_by_suffix
from accel_train.experiments.finetune.recipe import WAIT_SECONDS, Asked, default_output_dir, listed

_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_SHEETS = (".xlsx", ".xls", ".xlsb", ".ods")
_MAYBE_TABLES = ("", ".txt", ".dat", ".data")
_CLASSES = "/"
"""Kind of a folder with a file for each class, named by suffix."""
_SOURCE = ".source"
"""File in the folder with the digest of the file it was made from."""
_BY_SYSTEMS = ("__MACOSX", ".DS_Store", "Thumbs.db")


def unpacked(asked: Asked, output_dir: str | None, *, is_first: bool = True) -> tuple[str, str, str | None]:
    """Return the path to read, the run folder, and a note, or the path itself if finetune reads it as it is.

    Zip and tar archives, .gz files, spreadsheets, tables with tabs in a .txt file, and files STEM.CLASS go to a folder
    OUTPUT_DIR-data. Processes other than the first wait for it.

    Raises:
        ValueError: the file is damaged, needs a password or a package, or does not fit the disk; or the folder exists
            with other data.
    """
    path = Path(asked.path).expanduser()
    classes = classes_by_suffix(asked, path) if path.is_dir() else {}
    kind = _kind_of(asked, path) if path.is_file() else _CLASSES if classes else None
    if kind is None:
        return asked.path, output_dir or default_output_dir(asked.path), None
    run = output_dir or default_output_dir(path.name.removesuffix(kind) if kind else path.name)
    folder = Path(f"{run.rstrip('/')}-data")
    staging = folder.with_name(f".{folder.name}.tmp")
    if not is_first:
        _wait_for(folder, staging)
    digest = " ".join(map(_digest, classes.values() or [path]))
    if not folder.exists():
        make_folders(folder.parent)
        with publish_folder(folder, staging):
            for name, file in classes.items():
                shutil.copyfile(file, staging / f"{name}.txt")
            if not classes:
                _write(path, kind, staging)
            (staging / _SOURCE).write_text(digest)
    mark = folder / _SOURCE
    if not mark.is_file() or mark.read_text() != digest:
        raise ValueError(
            f"{folder} exists and was not made from {path}, which would be unpacked there. Remove the folder, or name "
            "another place: --output_dir DIR"
        )
    if classes:
        note = (
            f"{path}: each suffix is a class ({listed([*classes])}), so the files are copied to {folder} as CLASS.txt"
        )
    elif kind in _MAYBE_TABLES:
        note = f"{path}: tabs divide all lines into equal columns, so it is copied to {folder} as a table"
    else:
        note = f"{path}: unpacked to {folder} ({format_count(len(files_below(folder)), 'file')})"
    return str(_data_in(folder)), run, note


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wait_for(folder: Path, staging: Path) -> None:
    """Wait until the first process has unpacked, for as long as it does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not folder.exists():
        if staging.exists():
            deadline = time.monotonic() + WAIT_SECONDS
        if time.monotonic() > deadline:
            raise ValueError(f"the first process did not make {folder}. Its error says why")
        time.sleep(0.1)


def _kind_of(asked: Asked, path: Path) -> str | None:
    """Return the ending that tells how to unpack a file, or None if it is read as it is."""
    name = path.name.lower()
    for ending in (*_ARCHIVES, *_SHEETS):
        if name.endswith(ending):
            return path.name[-len(ending) :]
    if name.endswith(".gz") and file_kind(Path(name.removesuffix(".gz"))) is not None:
        return path.name[-3:]
    is_asked = asked.task is not None or asked.data.lines is not None
    if path.suffix.lower() in _MAYBE_TABLES and not is_asked and table_delimiter(path, asked.data) == "tabs":
        # Blank lines divide the sentences of CoNLL.
        return path.suffix if all(line.strip() for line, _ in read_lines(path, asked.data)) else None
    return None


def _write(path: Path, kind: str, folder: Path) -> None:
    try:
        if kind in _MAYBE_TABLES:
            shutil.copyfile(path, folder / f"{path.stem}.tsv")
        elif kind.lower() in _SHEETS:
            _write_sheets(path, folder)
        elif kind.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                _check_space(path, folder, sum(each.file_size for each in archive.infolist()))
                archive.extractall(folder, [name for name in archive.namelist() if not _is_of_system(name)])
        elif kind.lower() == ".gz":
            with gzip.open(path) as packed, (folder / path.stem).open("wb") as file:
                shutil.copyfileobj(packed, file)
        else:
            with tarfile.open(path) as archive:
                members = [each for each in archive.getmembers() if not _is_of_system(each.name)]
                _check_space(path, folder, sum(each.size for each in members))
                archive.extractall(folder, members, filter="data")
    # RuntimeError: zipfile's own for a password. NotImplementedError: a compression that Python does not have.
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}). Unpack it yourself, and name the folder") from error


def _check_space(path: Path, folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ValueError(
            f"{path} needs {num_bytes / 1e9:,.1f} GB unpacked, and {folder.parent} has {free / 1e9:,.1f} GB free. Name "
            "another place: --output_dir DIR"
        )


def _is_of_system(name: str) -> bool:
    return any(part in _BY_SYSTEMS for part in PurePath(name).parts)


def _write_sheets(path: Path, folder: Path) -> None:
    """Write each sheet that has rows as a csv file."""
    try:
        from python_calamine import CalamineError, CalamineWorkbook
    except ImportError as error:
        raise ValueError(
            f"{path}: reading spreadsheets needs the package python-calamine: pip install 'accel-train[excel]'"
        ) from error
    try:
        book = CalamineWorkbook.from_path(str(path))
        sheets = {name: book.get_sheet_by_name(name).to_python() for name in book.sheet_names}
    except CalamineError as error:
        raise ValueError(f"{path} cannot be read as a spreadsheet ({error}). Save it as csv") from error
    sheets = {name: rows for name, rows in sheets.items() if rows}
    if not sheets:
        raise ValueError(f"{path} has no rows. Name a table with rows")
    for name, rows in sheets.items():
        stem = path.stem if len(sheets) == 1 else name.replace(os.sep, "_")
        with (folder / f"{stem}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([_shown(cell) for cell in row] for row in rows)


def _shown(cell: Any) -> str:
    """Return a cell as a spreadsheet shows it: 5 instead of 5.0."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _data_in(folder: Path) -> Path:
    """Return the one file, or the innermost folder, that holds all data apart from files such as README."""
    while True:
        data = [path for path in files_below(folder) if not is_about_data(path, folder)]
        if len(data) < 2:
            return data[0] if data else folder
        inner = Path(os.path.commonpath([path.parent for path in data]))
        if inner == folder:
            return folder
        folder = inner
