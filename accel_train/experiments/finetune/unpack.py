"""Write the files of archives and spreadsheets, and masks from polygons or colors, into a folder next to the run."""

import csv
import gzip
import hashlib
import os
import re
import shutil
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from accel_train.core.files import files_below, make_folders, publish_folder, sha256
from accel_train.core.format import format_count
from accel_train.core.json_io import parse_json
from accel_train.core.terminal import is_main
from accel_train.data.delimited import DELIMITERS, table_delimiter
from accel_train.data.encoding import read_lines, read_text
from accel_train.data.parts import only_entry, part_of, unwrapped
from accel_train.data.sources import file_kind, is_saved_dataset
from accel_train.data.tables import SPLITS, columns_with_parts, parts_in, rows_of
from accel_train.experiments.finetune.annotated.annotations import tables_of_classes
from accel_train.experiments.finetune.columns import data_at, read_table, source_of
from accel_train.experiments.finetune.recipe import WAIT_SECONDS, Asked, Converted, default_output_dir
from accel_train.experiments.finetune.texts import classes_by_suffix, find_label_lines
from accel_train.experiments.finetune.tree import MOST_TAGGED, Tree
from accel_train.experiments.finetune.values.parts import parts_of_card

_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_SHEETS = (".xlsx", ".xls", ".xlsb", ".ods")
_MAYBE_TABLES = ("", ".txt", ".dat", ".data")
_SOURCE = ".source"
"""File in the folder with the digest of the file it was made from."""
_SMALL_BYTES = 100_000_000
"""Size up to which an unpacked file may be any number of times larger than its archive."""
_MOST_RATIO = 250
"""Unpacked size over packed size. Text is packed to a third or a tenth, repeated rows to a hundredth."""
_LARGEST_GZIP_RATIO = 1032
_BY_SYSTEMS = ("__MACOSX", ".DS_Store", "Thumbs.db")


def unpacked(asked: Asked, output_dir: str | None) -> tuple[str, str, str | None]:
    """Return the path to read, the run folder, and a note, or the path itself if finetune reads it as it is.

    Zip and tar archives, .gz files, spreadsheets, and tables with tabs in a .txt file go to a folder OUTPUT_DIR-data.
    So do the parts of a data set in an unusual form (see `CONVERTERS`), and masks from polygons or colors (in
    OUTPUT_DIR-masks if they are in an archive). Processes other than the first wait for it.

    Raises:
        ValueError: the file is damaged, needs a password or a package, or does not fit the disk; or the folder exists
            with other data.
    """
    path, notes = asked.place, []
    kind = _kind_of(path) if path.is_file() else None
    run = output_dir or default_output_dir(path.name.removesuffix(kind) if kind else asked.path)
    if path.is_dir() and not is_saved_dataset(path):
        # The paths of a README.md are relative to its folder.
        inner = path if parts_of_card(path) else unwrapped(path)
        only = only_entry(inner)
        # An archive, or a table that may be written in another form.
        is_table = only is not None and file_kind(only) in ("csv", "jsonl", "json", "parquet")
        if only is not None and only.is_file() and (is_table or _kind_of(only)):
            inner, kind = only, _kind_of(only)
        if inner != path:
            notes.append(f"{path}: {inner} is read, the only {'file' if inner == only else 'folder'} in it")
            asked, path = replace(asked, path=str(inner)), inner
    place, folder = asked.path, Path(f"{run.rstrip('/')}-data")
    tree, is_open = Tree(path), kind is None and path.exists()
    found = next(filter(None, (convert(asked, tree) for convert in CONVERTERS if is_open)), None)
    if kind is not None:
        _publish(folder, path, sha256(path), partial(_write, path, kind.lower()))
        place = str(_data_in(folder))
        notes.append(f"{path}: unpacked to {folder} ({format_count(len(files_below(folder)), 'file')})")
    elif found is not None:
        digest = hashlib.sha256(repr(found.files).encode()).hexdigest()

        def write(staging: Path) -> None:
            for name, content in found.files.items():
                (staging / name).write_bytes(content)

        _publish(folder, path, digest, write)
        place = str(_data_in(folder))
        notes.append(f"{path}: written to {folder} as {', '.join(found.files)}{found.how}")
        if any(path.glob("*/label")):
            notes.append("the files named label are not read")
    if place != asked.path:
        folder = Path(f"{run.rstrip('/')}-masks")
    if Path(place).expanduser().is_dir() or place.lower().endswith(".json"):
        # Imports Pillow.
        from accel_train.experiments.finetune.masks import find_palette, find_polygons

        if (masks := find_polygons(asked, place) or find_palette(asked, place)) is not None:
            _publish(folder, Path(place), masks.digest, masks.write)
            notes.append(f"{place}: {masks.note}; written to {folder}")
            place = str(folder)
    return place, run, "; ".join(notes) or None


def _publish(folder: Path, path: Path, digest: str, write: Callable[[Path], None]) -> None:
    """Let the first process write a folder once, and the others wait for it. `digest` is of the data at `path`."""
    staging = folder.with_name(f".{folder.name}.tmp")
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_main() and not folder.exists():
        # As long as the first process writes.
        if staging.exists():
            deadline = time.monotonic() + WAIT_SECONDS
        if time.monotonic() > deadline:
            raise ValueError(f"the first process did not make {folder}. Its error says why")
        time.sleep(0.1)
    if not folder.exists():
        make_folders(folder.parent)
        with publish_folder(folder, staging):
            write(staging)
            (staging / _SOURCE).write_text(digest)
    mark = folder / _SOURCE
    if not mark.is_file() or mark.read_text() != digest:
        raise ValueError(
            f"{folder} exists and was not made from {path}, which would be written there. Remove the folder, or name "
            "another place: --output_dir DIR"
        )


def _kind_of(path: Path) -> str | None:
    """Return the ending that tells how to unpack a file, or None if it is read as it is."""
    name = path.name.lower()
    for ending in (*_ARCHIVES, *_SHEETS):
        if name.endswith(ending):
            return path.name[-len(ending) :]
    return path.name[-3:] if name.endswith(".gz") and file_kind(Path(name.removesuffix(".gz"))) is not None else None


def _conll_files(asked: Asked, tree: Tree) -> Converted | None:
    """Return CoNLL files whose extensions are not known: eng.train, eng.testa."""
    is_open = asked.allows("token-classification") and 0 < len(tree.files) <= MOST_TAGGED
    if not is_open or any(map(file_kind, tree.files)):
        return None
    from accel_train.experiments.finetune.annotated.text_tasks import tagged_lines  # imports torch

    found: dict[str, bytes] = {}
    for file in tree.files:
        if not tagged_lines(file, asked):
            return None
        suffix = file.suffix[1:]
        part = part_of(suffix)
        found[f"{file.stem}.{SPLITS[part] if part else suffix or 'data'}.conll"] = file.read_bytes()
    return Converted(found) if len(found) == len(tree.files) else None


_TEXTS = ("text", "texts", "sentence", "sentences", "words", "tokens", "input", "inputs", "x", "in")
_LABELS = ("label", "labels", "tag", "tags", "y", "out")
"""Words in the names of two aligned files: train_text.txt and train_labels.txt, seq.in and seq.out."""
_SUFFIXES = {"", ".txt", *(f".{name}" for name in (*_TEXTS, *_LABELS))}
_WORDS_OF_A_LABEL = 3


def _side_by_side(asked: Asked, tree: Tree) -> Converted | None:
    """Return tables of files with a text on each line and files with its label, or CoNLL files if these have its tags.

    mapping.txt may name the labels.

    Raises:
        ValueError: two files differ in lines, or labels are neither short nor a tag for each word.
    """
    is_open = asked.allows("text-classification", "token-classification") and asked.data.lines is None
    path, files = tree.path, tree.files if is_open and tree.is_folder else []
    mapping = next((file for file in files if file.name == "mapping.txt"), None)
    words_of = {
        (file.parent, *re.split(r"[^a-z0-9]+", file.name.lower())): file
        for file in files
        # The intents of ATIS.
        if file not in (mapping, file.with_name("label")) and file.suffix.lower() in _SUFFIXES
    }
    pairs = {
        file: other
        for words, file in words_of.items()
        for place, word in enumerate(words)
        if word in _LABELS
        for text in _TEXTS
        if (other := words_of.get((*words[:place], text, *words[place + 1 :]))) is not None
    }
    lines = {file: read_text(file, asked.data).splitlines() for pair in pairs.items() for file in pair}
    sizes = [
        (f"{file}:{number}", len(label.split()), len(text.split()), texts.name)
        for file, texts in pairs.items()
        for number, (label, text) in enumerate(zip(lines[file], lines[texts]), start=1)
    ]
    others = [size for size in sizes if size[1] != size[2]]
    are_tags = (
        asked.task != "text-classification" and any(size[1] > 1 for size in sizes) and 2 * len(others) < len(sizes)
    )
    if not pairs or (2 * len(pairs) < len(files) - (mapping is not None) and not are_tags):
        return None
    for file, texts in pairs.items():
        if len(lines[file]) != len(lines[texts]):
            raise ValueError(
                f"{file} has {format_count(len(lines[file]), 'line')}, and {texts} has {len(lines[texts]):,}. Lines "
                "with the same number belong together; repair the files"
            )
    if others and (
        are_tags or asked.task == "token-classification" or any(size[1] > _WORDS_OF_A_LABEL for size in sizes)
    ):
        where, num_tags, num_words, name = others[0]
        raise ValueError(
            f"{where} has {format_count(num_tags, 'tag')} for the {num_words} words of {name}; write a tag for each "
            "word, or one label on each line"
        )
    names = [line.split(maxsplit=1) for line in read_text(mapping, asked.data).splitlines()] if mapping else []
    named = {pair[0]: pair[1].strip() for pair in names if len(pair) == 2}
    parts: dict[str, bytes] = {}
    for file, texts in pairs.items():
        rows = list(zip(lines[texts], lines[file]))
        if are_tags:
            blocks = [
                "".join(f"{word} {tag}\n" for word, tag in zip(*map(str.split, row))) for row in rows if row[0].strip()
            ]
            content = asked.encoded("\n".join(blocks))
        else:
            content = asked.jsonl(
                {"text": text, "label": named.get(label.strip(), label.strip())} for text, label in rows
            )
        split = SPLITS[part_of(file.relative_to(path).as_posix()) or "train"]
        parts[f"{split}.{'conll' if are_tags else 'jsonl'}"] = content
    if len(parts) < len(pairs):
        raise ValueError(
            f"{path}: {len(pairs)} pairs of files ({', '.join(file.name for file in pairs)}) for {', '.join(parts)}. "
            "Name them train, validation, and test, or name one folder"
        )
    return Converted(parts)


_FEWEST_RECORDS = 10
"""Lines of all files from which semicolons and vertical bars in equal number divide columns. Tabs need three lines."""


def _tables_in_texts(asked: Asked, tree: Tree) -> Converted | None:
    """Return tables of text files: lines with tabs, or with equally many fields of which none is empty."""
    is_open = asked.allows("text-classification") and asked.data.lines is None and len(tree.files) <= MOST_TAGGED
    if not is_open or any(file.suffix.lower() not in _MAYBE_TABLES for file in tree.files):
        return None
    found, num_rows = dict[str, bytes](), 0
    for file in tree.files:
        try:
            if asked.task is not None and find_label_lines(asked, [file], are_parts=True) is not None:
                return None
            name = table_delimiter(file, asked.data)
            between = next((each for each in DELIMITERS if DELIMITERS[each] == name), "")
            rows = [line.split(between) for line, _ in read_lines(file, asked.data)] if between else []
        # The reader of plain text will report the byte.
        except ValueError:
            return None
        is_full = len({*map(len, rows)}) == 1 and all(field.strip() for row in rows for field in row)
        # Blank lines divide the sentences of CoNLL.
        if not rows or not (between == "\t" or is_full) or not all("".join(row).strip() for row in rows):
            return None
        num_rows += len(rows) if between != "\t" else _FEWEST_RECORDS
        found[f"{file.stem}{'.tsv' if between == chr(9) else '.csv'}"] = file.read_bytes()
    return Converted(found) if len(found) == len(tree.files) and num_rows >= _FEWEST_RECORDS else None


def _splits_of(asked: Asked, tree: Tree) -> Converted | None:
    """Return the splits of a JSON object, with arrays as rows of columns 1, 2, ... None without splits.

    Without validation, test is evaluated on.

    Raises:
        ValueError: a key is not a split, or is the same split as another.
    """
    path = tree.path
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    try:
        text = read_text(path, asked.data)
        document = parse_json(text) if text.lstrip()[:1] == "{" else {}
    # Objects on lines, another encoding, or an error that the reader reports.
    except ValueError:
        return None
    keys: dict[str, str] = {}
    # The shortest name of a part is its own: train before oos_train.
    for name in sorted(document, key=len):
        if (part := part_of(name)) is not None and isinstance(document[name], list):
            keys.setdefault(SPLITS[part], name)
    if "train" not in keys or len(keys) < 2:
        return None
    if others := [repr(name) for name in document if name not in keys.values()]:
        raise ValueError(
            f"{path}: finetune reads an array of rows for each of {', '.join(map(repr, keys.values()))}, and does not "
            f"know the part of {', '.join(others)}. Move the rows to one of these keys, or to another file"
        )
    parts = {part: document[name] for part, name in keys.items()}
    if "validation" not in parts and "test" in parts:
        parts["eval_from_test"] = parts.pop("test")
    return Converted(
        {
            f"{name}.jsonl": asked.jsonl(dict(enumerate(row, 1)) if isinstance(row, list) else row for row in rows)
            for name, rows in parts.items()
        }
    )


def _rows_by_part(asked: Asked, tree: Tree) -> Converted | None:
    """Return a file for each part that a column of a table names: parquet as parquet, other rows as jsonl.

    Returns None without this column, and for a table that names image files, because its paths are relative to it.

    Raises:
        ValueError: some rows of the column are of no part.
    """
    path = tree.path
    if not path.is_file():
        return None
    source, kind = source_of(path), file_kind(path)
    try:
        data = data_at(path, asked)
    # The reader of the table will report the byte.
    except ValueError:
        return None
    columns, names = columns_with_parts(source, data, (*asked.label, *asked.text))
    for name, cells in columns.items():
        parts = parts_in(str(path), name, cells, names)
        if parts is None:
            continue
        from accel_train.experiments.finetune.images import image_column  # imports Pillow

        images = image_column(read_table(path, asked))
        if images is not None and isinstance(images[1][0], str):
            continue
        by = f" by column {name!r}"
        if kind == "parquet":
            return Converted({f"{SPLITS[part]}.parquet": _parquet_of(path, rows) for part, rows in parts.items()}, by)
        every = list(rows_of(source, names, data))
        return Converted(
            {f"{SPLITS[part]}.jsonl": asked.jsonl(every[row] for row in rows) for part, rows in parts.items()}, by
        )
    return None


def _parquet_of(path: Path, rows: Sequence[int]) -> bytes:
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).take(rows), sink)
    return bytes(sink.getvalue())


CONVERTERS: tuple[Callable[[Asked, Tree], Converted | None], ...] = (
    _splits_of,
    classes_by_suffix,
    _side_by_side,
    _tables_in_texts,
    _conll_files,
    tables_of_classes,
    _rows_by_part,
)
"""Forms of data that are written as other files. The first that is found counts.

A JSON object with an array for each split; files STEM.CLASS; texts beside their labels or tags; tables in text files;
CoNLL files with other extensions; exports of annotation tools; and a table with a column of parts.
"""


def _write(path: Path, kind: str, folder: Path) -> None:
    try:
        if kind == ".zip" or (kind in _SHEETS and zipfile.is_zipfile(path)):
            with zipfile.ZipFile(path) as archive:
                _check_space(path, folder, sum(each.file_size for each in archive.infolist()))
                if kind == ".zip":
                    archive.extractall(folder, [name for name in archive.namelist() if not _is_of_system(name)])
        if kind in _SHEETS:
            _write_sheets(path, folder)
        elif kind == ".gz":
            _count_unpacked(path, folder)
            with gzip.open(path) as packed, (folder / path.stem).open("wb") as file:
                shutil.copyfileobj(packed, file)
        elif kind != ".zip":
            with tarfile.open(path) as archive:
                members = [each for each in archive.getmembers() if not _is_of_system(each.name)]
                _check_space(path, folder, sum(each.size for each in members))
                archive.extractall(folder, members, filter="data")
    except tarfile.FilterError as error:
        raise ValueError(f"{path} cannot be unpacked ({error}). Ask for an archive of plain files") from error
    # RuntimeError: zipfile raises it for a password, and its subclass NotImplementedError for an unknown compression.
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}). Unpack it yourself, and name the folder") from error


def _count_unpacked(path: Path, folder: Path) -> None:
    """Read a .gz file to its end, and check its size. Its own record of the size may be wrong.

    Raises:
        ValueError: as for `_check_space`, before anything is written.
    """
    free, num_bytes = shutil.disk_usage(folder).free, 0
    if path.stat().st_size * _LARGEST_GZIP_RATIO <= min(free, _SMALL_BYTES):
        return
    with gzip.open(path) as packed:
        while chunk := packed.read(2**20):
            num_bytes += len(chunk)
            if num_bytes > free or _is_bomb(path, num_bytes):
                break
    _check_space(path, folder, num_bytes)


def _is_bomb(path: Path, num_bytes: int) -> bool:
    return num_bytes > max(_SMALL_BYTES, _MOST_RATIO * path.stat().st_size)


def _check_space(path: Path, folder: Path, num_bytes: int) -> None:
    if _is_bomb(path, num_bytes):
        raise ValueError(
            f"{path} unpacks to more than {_MOST_RATIO} times its size, as files that are made to fill a disk do. Do "
            "not unpack it, unless you know its author"
        )
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ValueError(
            f"{path} needs {num_bytes / 1e9:,.1f} GB unpacked, and {folder.parent} has {free / 1e9:,.1f} GB free. "
            "Name another place: --output_dir DIR"
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
            csv.writer(file).writerows(map(_shown, row) for row in rows)


def _shown(cell: Any) -> str:
    """Return a cell as a spreadsheet shows it: 5 instead of 5.0."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _data_in(folder: Path) -> Path:
    """Return the one file, or the innermost folder, that holds all data apart from files such as README."""
    while True:
        data = Tree(folder).files
        if len(data) < 2:
            return data[0] if data else folder
        inner = Path(os.path.commonpath([path.parent for path in data]))
        if inner == folder:
            return folder
        folder = inner
