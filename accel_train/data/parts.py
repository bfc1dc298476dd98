"""The parts of a data set by the names of files and folders: training, evaluation, and tests."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Literal

Part = Literal["train", "eval", "test"]

_NAMES: dict[Part, str] = {
    "test": "test testing tests testset testb submission submissions",
    "eval": "validation valid val dev eval evaluation holdout heldout validationset validset valset devset evalset "
    "validate devel develop development testa",
    "train": "train training trainset trainingset trainval",
}
"""Words for each part, in the order in which one of several is chosen. CoNLL 2002 and 2003 have testa and testb.

A name with words for two parts belongs to the first of them: COCO's test-dev is for tests.
"""
_ORDER = {part: {name: number for number, name in enumerate(names.split())} for part, names in _NAMES.items()}
_WORD = {part: re.compile(rf"(?<![a-z])(?:{'|'.join(names)})(?![a-z])") for part, names in _ORDER.items()}
_UNLABELED = re.compile(r"(?<![a-z])(?:unsup(?:ervised)?|unlabell?ed|submissions?)(?![a-z])")
_ABOUT_DATA = re.compile(r"(?:readme|licen[cs]e|copying|notice|changelog|contributing)(?:[._-].*)?")
_SPELLINGS = (
    (re.compile(r"(?<=[a-z])(?=[A-Z])"), "_"),
    (re.compile(r"(?<![a-z])(h[eo]ld)[^a-z/]out(?![a-z])", re.IGNORECASE), r"\1out"),
    (re.compile(r"(?<![a-z])train[^a-z/]?val(?:id(?:ation)?)?(?![a-z])", re.IGNORECASE), "trainval"),
)
"""TestSet is read as Test_Set, held-out as heldout, and train_val as trainval: VOC's name for both parts."""


def _plain(name: str) -> str:
    for spelling, usual in _SPELLINGS:
        name = spelling.sub(usual, name)
    return name.lower()


def part_of(name: str) -> Part | None:
    """Return the part that a name or a relative path tells by one of its words, or None.

    Letters make words: train2017, train-00000-of-00002.parquet, and eng.testa tell a part; trainer, contest, and latest
    do not.
    """
    plain = _plain(name)
    return next((part for part, word in _WORD.items() if word.search(plain)), None)


def top_part(path: PurePath, *, suffix: str = "") -> tuple[PurePath, Part | None]:
    """Return the highest folder of a relative path (or the file) that is a part by its name, and the part.

    Without a part, return the top folder or the file, and None. With a suffix, only files with this suffix are parts.
    """
    places = [*reversed(path.parents[:-1]), *([path] if path.suffix.endswith(suffix) else [])]
    return next(((place, part) for place in places if (part := part_of(place.name))), ([*places, path][0], None))


def are_parts(names: Collection[str]) -> bool:
    """Return whether several names are parts, not classes: all of them, or a training part and a held-out part."""
    parts = {part_of(name) for name in names}
    return len(names) > 1 and (None not in parts or ("train" in parts and len(parts) > 2))


def is_unlabeled(name: str) -> bool:
    """Return whether a name says that its data have no labels: unsup, sample_submission.csv."""
    return _UNLABELED.search(_plain(name)) is not None


def is_about(name: str) -> bool:
    """Return whether a file describes the data by its name: README.md, LICENSE."""
    return _ABOUT_DATA.fullmatch(name.lower()) is not None


def pick(names: Iterable[str], part: Part, beside: str | None = None) -> str | None:
    """Return the name of a part: the only one, or the first usual name of several, or None.

    A name that differs from `beside` only in the word for the part comes first: val2014 for train2014.
    """
    found = sorted(name for name in names if part_of(name) == part and not is_unlabeled(name))
    found = [name for name in found if beside is not None and _frame(name) == _frame(beside)] or found
    order = _ORDER[part]
    usual = [name for name in found if _plain(name) in order]
    return min(usual, key=lambda name: order[_plain(name)], default=found[0] if len(found) == 1 else None)


def _frame(name: str) -> str:
    """Return a name without the word for its part."""
    part, plain = part_of(name), _plain(name)
    return plain if part is None else _WORD[part].sub("", plain, count=1)


def folders_of_parts(folder: Path) -> dict[Part, Path]:
    """Return the folders of the parts directly below a folder, by part.

    Nothing is returned if a folder besides `train` may be a class: `freight_train` and `bus` are classes.
    """
    names = [each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")]
    may_be_classes = [name for name in names if part_of(name) is None and not is_unlabeled(name)]
    return {} if may_be_classes and "train" not in names and not are_parts(names) else _folders(folder, names)


def folders_beside(train: Path) -> dict[Part, Path]:
    """Return the training folder and the folders next to it whose names differ only in the word for the part."""
    names = [each.name for each in train.parent.iterdir() if each.is_dir() and _frame(each.name) == _frame(train.name)]
    return {**_folders(train.parent, names), "train": train}


def _folders(parent: Path, names: Sequence[str]) -> dict[Part, Path]:
    train = pick(names, "train")
    found = {"train": train} | {part: pick(names, part, train) for part in ("eval", "test")}
    return {part: unwrapped(parent / name) for part in _NAMES if (name := found[part]) is not None}


def unwrapped(folder: Path) -> Path:
    """Return the folder with the data: `pets/pets` or `archive/pets` where nothing else lies above several folders."""
    inner = only_entry(folder)
    if inner is None or not inner.is_dir():
        return folder
    deeper = unwrapped(inner)
    num_folders = sum(each.is_dir() and not each.name.startswith(".") for each in deeper.iterdir())
    return deeper if deeper != inner or inner.name == folder.name or num_folders > 1 else folder


def only_entry(folder: Path) -> Path | None:
    """Return the only file or folder, apart from hidden ones and those that describe the data, or None."""
    entries = [
        each for each in folder.iterdir() if not each.name.startswith((".", "__MACOSX")) and not is_about(each.name)
    ]
    return entries[0] if len(entries) == 1 else None
