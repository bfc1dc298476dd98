"""Recognition of the data at a path: a table, chats, text, images by class, or images with masks."""

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from accel_train.core.files import files_below
from accel_train.core.format import did_you_mean
from accel_train.data.encoding import read_text
from accel_train.data.images.images import IMAGE_SUFFIXES, list_images
from accel_train.data.images.labelled import eval_beside_train
from accel_train.data.images.pairs import LISTED_SUFFIXES, lists_pairs
from accel_train.data.sources import file_kind, is_about_data
from accel_train.data.tables import has_object_lines
from accel_train.experiments.finetune.found import TASKS, Asked, Found
from accel_train.experiments.finetune.image_tables import refuse_other_classes, table_of_images
from accel_train.experiments.finetune.images import (
    Pairs,
    find_pairs,
    lie_in_classes,
    recognise_classes,
    recognise_masks,
)
from accel_train.experiments.finetune.tables import recognise_table
from accel_train.experiments.finetune.texts import (
    find_classes,
    recognise_classes_of_texts,
    recognise_text,
    training_texts,
)
from accel_train.experiments.finetune.unused import (
    EVAL_NAME,
    TEST_NAME,
    TRAIN_NAME,
    listed,
    shards_of,
    with_unused_files,
)

_TABLES = ("csv", "jsonl", "parquet")


def recognise(asked: Asked) -> Found:
    """Return the kind of data at the path, with the recipe's settings for it.

    Raises:
        ValueError: the data are not suited for training, or are ambiguous. The message shows the flag.
    """
    if asked.task is not None and asked.task not in TASKS:
        meant = did_you_mean(asked.task, TASKS, f"it knows {', '.join(TASKS)}")
        raise ValueError(f"--task {asked.task}: finetune writes no recipe for it; {meant}")
    found = _recognise(asked)
    is_beside = found.task == "image-classification" and eval_beside_train(asked.data)[1] is not None
    if is_beside or "data.eval" in {*found.settings, *asked.given}:
        return replace(found, eval_fraction=0.0)
    return replace(found, eval_fraction=asked.data.eval_fraction) if "data.eval_fraction" in asked.given else found


def _recognise(asked: Asked) -> Found:
    path = Path(asked.path).expanduser()
    if path.is_dir():
        return with_unused_files(_recognise_folder(asked, path), asked, path)
    if glob.has_magic(path.name) and path.suffix == ".parquet" and any(path.parent.glob(path.name)):
        return with_unused_files(_recognise_file(asked, path), asked, path)
    if not path.exists():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = did_you_mean(path.name, names, "check the path", least=0.5, show=lambda name: str(path.parent / name))
        raise ValueError(f"there is no file or folder {asked.path!r} (seen from {Path.cwd()}); {meant}")
    return with_unused_files(_recognise_file(asked, path), asked, path)


def _recognise_file(asked: Asked, path: Path) -> Found:
    kind = file_kind(path)
    if path.suffix.lower() in LISTED_SUFFIXES and asked.task in (None, "semantic-segmentation"):
        if asked.task is not None:
            return recognise_masks(asked, Pairs(asked.path, None, "as --task says: a list of images with their masks"))
        if lists_pairs(path, asked.data):
            return recognise_masks(asked, Pairs(asked.path, None, "each line names an image and its mask"))
    if kind in _TABLES:
        return recognise_table(asked, path)
    if kind == "text":
        return recognise_text(asked, [path])
    if kind == "json" and (has_object_lines(path, asked.data) or read_text(path, asked.data).lstrip()[:1] == "["):
        return recognise_table(asked, path)
    if kind == "json":
        raise ValueError(
            f"{path}: finetune reads an array of objects, or one object on each line (.jsonl), "
            "and this is one document: write [row, row, ...]; SQuAD's own files: "
            f"accel-train run question_answering --data.train {path}"
        )
    if kind in ("tokens", "conll"):
        recipe = "gpt_tiny" if kind == "tokens" else "token_classification"
        raise ValueError(
            f"{path}: finetune does not read {kind} files; accel-train run {recipe} --data.train {path} does"
        )
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise ValueError(f"{path} is one image; name the folder with all of them, CLASS/*{path.suffix}")
    raise ValueError(
        f"{path}: finetune reads tables (.csv, .tsv, .jsonl, .parquet), text (.txt, .md, ...) and folders, and no "
        f"{path.suffix or 'file without an extension'}; rename or convert it"
    )


def _recognise_folder(asked: Asked, folder: Path) -> Found:
    if asked.task != "image-classification" and (pairs := find_pairs(asked.path)) is not None:
        return recognise_masks(asked, pairs)
    files = [path for path in files_below(folder) if path.is_file()]
    files = [path for path in files if not is_about_data(path, folder)]
    tables = [path for path in files if file_kind(path) in _TABLES]
    images, _ = list_images(folder)
    if images and asked.task not in ("causal-lm", "text-classification"):
        if tables and not lie_in_classes(folder, images):
            if (named := table_of_images(asked, folder, tables)) is not None:
                return recognise_table(asked, *named)
        elif asked.task is None:
            refuse_other_classes(asked, folder, images, tables)
        return recognise_classes(asked, folder, tables)
    if tables:
        return recognise_table(asked, *_training_table(folder, tables))
    texts = [path for path in files if file_kind(path) == "text"]
    if texts and asked.task != "causal-lm" and (classes := find_classes(folder, texts)) is not None:
        return recognise_classes_of_texts(asked, folder, classes)
    if texts:
        return recognise_text(asked, *training_texts(asked, texts, folder))
    there = listed([path.relative_to(folder).as_posix() for path in files])
    raise ValueError(
        f"{folder} holds nothing that finetune reads (there are {there or 'no files'}). It reads a table (.csv, .tsv, "
        ".jsonl, .parquet), text files, CLASS/ folders of images or of texts, or images/ and masks/. "
        "For a file of one class with a text on each line, write a table with the columns text and label"
    )


def _training_table(folder: Path, tables: Sequence[Path]) -> tuple[Path, Path | None]:
    """Return the table to train on, and the table to evaluate on if a name shows one."""
    tables = list(dict.fromkeys(map(shards_of, tables)))
    held_out = [path for path in tables if EVAL_NAME.search(path.stem.lower())]
    others = [path for path in tables if path not in held_out and not TEST_NAME.search(path.stem.lower())]
    others = [path for path in others if TRAIN_NAME.search(path.stem.lower())] or others
    if len(others) != 1 or len(held_out) > 1:
        named = ", ".join(str(path) for path in tables[:5])
        raise ValueError(
            f"{folder} holds several tables ({named}); name one: accel-train finetune "
            f"{quote(str([*others, *tables][0]))}"
        )
    return others[0], held_out[0] if held_out else None
