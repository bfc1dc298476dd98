"""Detect folders that look like classes but hold masks, boxes, polygons, splits of the data, audio, or shards."""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, islice
from pathlib import Path, PurePath
from typing import Any

from accel_train.core.files import read_regular
from accel_train.core.json_io import parse_json
from accel_train.data.images.decoding import open_header
from accel_train.data.images.images import IMAGE_SUFFIXES, evenly_spaced
from accel_train.data.images.pairs import have_the_same_names, pairs_below
from accel_train.data.parts import are_parts
from accel_train.recipe.tasks import TARS, TASKS

_COCO = re.compile(r"(?:.*[^a-z])?(?:annotations?|instances|coco|panoptic)(?:[^a-z].*)?\.json")
_YOLO = re.compile(r"\d+(?:\s+(?:[01]|[01]?\.\d+)(?:e-?\d+)?){4,}\s*")
_MOST_FOLDERS = 6
"""Most folders to compare as images and masks. A larger number means class folders."""
_MOST_COLOURS = 32
"""Most colors of a mask."""
_NUM_LOOKED_AT = 12
_FOLDERS_LOOKED_IN = 50
_TEXTS_LOOKED_AT = 200
"""Number of same-named text files to read for boxes and polygons, evenly spaced."""


def refuse_parts_as_classes(folder: Path, files: Sequence[str]) -> None:
    """Refuse folders such as `Train` and `Test` as two classes.

    Raises:
        ValueError: the folders are splits; the message names them.
    """
    names = sorted({name.split("/", 1)[0] for name in files if "/" in name})
    if are_parts(names):
        raise ValueError(
            f"{folder}: {', '.join(names)} are parts of the data by their names, not classes. Set data.train to one of "
            f"them, and data.eval to another. If they are classes, list them: --data.label_names '[{', '.join(names)}]'"
        )


def refuse_annotations(folder: Path, files: Sequence[str], others: Sequence[str]) -> None:
    """Refuse images annotated with boxes or polygons: COCO, YOLO, Pascal VOC, labelme.

    `files` are the images of the folder; `others` are its other files.

    Raises:
        ValueError: an annotation file is found; the message names it, and a folder of masks if one lies below.
    """
    maps = next((file for file in files if "panoptic" in os.path.dirname(file).lower()), None)
    if maps is not None:
        raise ValueError(_PANOPTIC.format(folder / maps))
    stems = {Path(name).stem for name in files if others}
    texts = [name for name in others if name.lower().endswith((".xml", ".txt", ".json")) and Path(name).stem in stems]
    looked_at = {texts[index] for index in evenly_spaced(len(texts), _TEXTS_LOOKED_AT)}
    for path in map(folder.joinpath, others):
        suffix, kind = path.suffix.lower(), None
        is_for_all = suffix == ".json" and _COCO.fullmatch(path.name.lower())
        if is_for_all or path.relative_to(folder).as_posix() in looked_at:
            kind = kind_of_annotation(path)
        if kind is None:
            continue
        if kind == "COCO panoptic":
            raise ValueError(_PANOPTIC.format(path))
        folders = [entry for entry in sorted(folder.iterdir())[:_FOLDERS_LOOKED_IN] if os.path.isdir(entry)]
        masks = next((entry for entry in folders if pairs_below(entry)), None)
        hint = f" {masks} holds masks: name that folder for semantic segmentation." if masks else ""
        raise ValueError(
            f"{path} holds boxes or polygons ({kind}). For boxes, use the task object-detection (COCO, YOLO with a "
            f"data.yaml, Pascal VOC); accel-train finetune draws polygons as masks.{hint} If the folders are classes, "
            "list them: --data.label_names '[a, b]' (with finetune also --task image-classification)"
        )


def kind_of_annotation(path: Path) -> str | None:
    """Return the format of a file with boxes or polygons. None for captions, class names and other text."""
    try:
        text = read_regular(path).decode("utf-8", "replace")
    except OSError:
        return None
    suffix = path.suffix.lower()
    if suffix == ".xml":
        return "Pascal VOC" if "<bndbox" in text else None
    if suffix == ".txt":
        return "YOLO" if _YOLO.fullmatch(text.strip().partition("\n")[0]) else None
    try:
        found = parse_json(text)
    except ValueError:
        return None
    keys = found.keys() if isinstance(found, dict) else ()
    if not {"images", "annotations"} <= {*keys}:
        return "labelme" if "shapes" in keys else None
    shapes = found["annotations"]
    is_panoptic = isinstance(shapes, list) and any(
        isinstance(each, dict) and "segments_info" in each for each in shapes
    )
    return "COCO panoptic" if is_panoptic else "COCO"


_PANOPTIC = (
    "{} belongs to COCO's panoptic segmentation, whose maps hold a number for each object, and accel_train has no task "
    "for them. For semantic segmentation, write masks of class numbers (panoptic2semantic_segmentation.py of "
    "panopticapi) into masks/ next to images/"
)


def refuse_masks_as_classes(folder: Path, files: Sequence[str]) -> None:
    """Refuse class folders that are images and their masks, by folder names or by content.

    Raises:
        ValueError: the folders are images and masks; the message names both.
    """
    why, other = "by their names", ""
    found = next(((images.name, masks.name) for images, masks in pairs_below(folder)), None)
    if found is None:
        if (found := _masks_by_content(folder, files)) is None:
            return
        why = f"the files of both have the same names and sizes, and those of {found[1]}/ few colors"
        other = f" Rename the folders {folder}/images and {folder}/masks."
    images, masks = found
    raise ValueError(
        f"{folder}: {images}/ and {masks}/ look like images and their masks ({why}), not like classes.{other} Use the "
        "task semantic-segmentation (recipe segmentation). If they are classes, list them: --data.label_names "
        f"'[{images}, {masks}]' (with finetune also --task image-classification)"
    )


def _masks_by_content(folder: Path, files: Sequence[str]) -> tuple[str, str] | None:
    """Return (images, masks), two class folders, or None.

    Their files have equal names and sizes, and only the masks have few colors.
    """
    of_class: dict[str, dict[str, str]] = {}
    for file in files:
        name, _, inner = file.partition("/")
        of_class.setdefault(name, {})[os.path.splitext(inner)[0]] = file
    if len(of_class) > _MOST_FOLDERS:
        return None
    for first, second in combinations(sorted(of_class), 2):
        one, other = of_class[first], of_class[second]
        if not have_the_same_names(list(one), list(other)):
            continue
        shared = sorted(one.keys() & other.keys())
        chosen = [shared[index] for index in evenly_spaced(len(shared), _NUM_LOOKED_AT)]
        looks, twins = ([_look(folder / side[stem]) for stem in chosen] for side in (one, other))
        if None in looks or [look and look[0] for look in looks] != [look and look[0] for look in twins]:
            continue
        have_few = [{look and look[1] for look in side} for side in (looks, twins)]
        if have_few in ([{False}, {True}], [{True}, {False}]):
            return (first, second) if True in have_few[1] else (second, first)
    return None


def _look(path: Path) -> tuple[tuple[int, int], bool] | None:
    """Return the size of an image and whether it has few colors, or None.

    None means a broken image. The reader reports it.
    """
    try:
        with open_header(path) as image:
            return image.size, image.getcolors(_MOST_COLOURS) is not None
    except (OSError, SyntaxError, ValueError):
        return None


_AUDIO = "wav mp3 flac ogg oga opus m4a aac wma aif aiff"
_VIDEO = "mp4 m4v avi mov mkv webm mpg mpeg wmv"
_SUFFIXES = {f".{name}": kind for kind, names in (("audio", _AUDIO), ("video", _VIDEO)) for name in names.split()}
_TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
_LISTED = 1_000
NO_TASK = "accel_train has no task for {0}. Use the {0} models of transformers"


def refuse_other_data(name: str, *, is_asked: bool) -> None:
    """Refuse a file or folder of audio, video, or WebDataset shards.

    Looks at the first files of a folder. `is_asked`: a task was named.

    Raises:
        ValueError: most files are of one of these kinds; the message names a file.
    """
    path = Path(name).expanduser()
    walk = ((root, sorted(files)) for root, _, files in os.walk(path)) if path.is_dir() else iter([("", [path.name])])
    files = list(islice((Path(root, file) for root, names in walk for file in names if file[0] != "."), _LISTED))
    media = [file for file in files if file.suffix.lower() in _SUFFIXES]
    has_table = any(file.suffix.lower() in _TABLES for file in files)
    if 2 * len(media) > len(files) and not has_table and not is_asked:
        kind = _SUFFIXES[media[0].suffix.lower()]
        raise ValueError(f"{name} holds {kind} ({media[0].name}), and {NO_TASK.format(kind)}")
    shards = [file for file in files if file.suffix == ".tar"]
    if path.is_dir() and files and len(shards) == len(files):
        raise ValueError(f"{name} holds tar files ({shards[0].name}). Unpack them; for WebDataset, {_as_tars()}")
    if (sample := _sample_of(files)) is not None:
        raise ValueError(f"{name} holds samples of WebDataset ({sample}). finetune does not read these; {_as_tars()}")


def _as_tars() -> str:
    """Return how to train on a WebDataset, for messages."""
    tasks = " or ".join(task for task in TASKS if TARS in TASKS[task].takes)
    return (
        f"name its tars as data.train in a recipe for {tasks}, or write a table: datasets.load_dataset('webdataset', "
        "data_files='*.tar', split='train').to_parquet('train.parquet')"
    )


def _sample_of(files: list[Path]) -> str | None:
    """Return the files of one sample of a WebDataset, or None: an image with .cls, or with .json and .txt."""
    samples = defaultdict[PurePath, list[str]](list)
    for file in files:
        samples[file.with_name(file.name.partition(".")[0])].append(file.name)
    for names in samples.values():
        ends = {name.rpartition(".")[2] for name in names}
        if any(name.lower().endswith(IMAGE_SUFFIXES) for name in names) and ("cls" in ends or {"json", "txt"} <= ends):
            return ", ".join(names)
    return None


def medium_of(cells: Sequence[Any]) -> str | None:
    """Return audio or video if the first cells of a column are such files, or None."""
    kinds = {_kind_of(cell) for cell in cells[:_NUM_LOOKED_AT]}
    return next(iter(kinds)) if len(kinds) == 1 else None


def _kind_of(cell: Any) -> str | None:
    name = cell.get("path") if isinstance(cell, dict) else cell
    return _SUFFIXES.get(os.path.splitext(name)[1].lower()) if isinstance(name, str) else None
