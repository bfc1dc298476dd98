"""Find images with their masks, in two folders or in a list of files.

Known layouts: images and masks, CamVid, VOC, ADE20K, and COCO pixel maps.
"""

import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from accel_train.core.format import format_count
from accel_train.core.json_io import load_json
from accel_train.data.encoding import read_lines
from accel_train.data.images.images import IMAGE_SUFFIXES, FileImages, ImagePool, Target, list_images
from accel_train.recipe.data import Data

_IMAGES = ("images", "image", "imgs", "img", "jpegimages")
_MASK_WORDS = """masks mask annotations annotation annots annot labels label gt gts groundtruth
segmentationclass segmentationclasspng segmentations segmentation"""
_MASKS = tuple(_MASK_WORDS.split())
"""Words in the names of image and mask folders, most likely first, in any case (`Images`, `train_masks`)."""
_MAYBE_IMAGES = ("input", "inputs", "original", "originals", "raw", "source", "rgb")
_MAYBE_MASKS = ("target", "targets", "segmented", "seg", "output", "outputs")
"""Words that may also be class names. Such folders are pairs only if their files have the same names."""
BESIDE = ("annot", "_annot", "_masks", "_mask", "_labels")
"""Suffixes of a mask folder's name after the name of its image folder: CamVid has `train` and `trainannot`."""
CLASSES_FILE = ".classes.json"
"""File in a folder of masks with the class names, in the order of their numbers."""
LISTED_SUFFIXES = frozenset((".txt", ".lst"))
_MASK_ENDS = re.compile(r"(?:_masks?|_labels?|_seg|_gt|_L)$")
_LINES_LOOKED_AT = 20
_LEVELS = 4
"""Number of folders above a list in which its files are looked up."""


def pair_of_folders(path: Path) -> tuple[Path, Path] | None:
    """Return the (images, masks) folders below a path, or an image folder and the folder of its masks; or None."""
    if len(below := pairs_below(path)) == 1:
        return below[0]
    for number in range(len(path.parts) - 1, -1, -1):
        above, further = Path(*path.parts[:number]), path.parts[number + 1 :]
        for twin in _twins(above, path.parts[number]):
            if _are_a_pair(path, twin.joinpath(*further), _is_sure(path.parts[number], twin.name)):
                return path, twin.joinpath(*further)
    beside = (path.with_name(path.name + end) for end in BESIDE) if path.name else ()
    return next(((path, twin) for twin in beside if _holds_masks(twin)), None)


def pairs_below(path: Path) -> list[tuple[Path, Path]]:
    """Return (images, masks) for each image folder directly below a path. Each image folder has one mask folder."""
    pairs = []
    for entry in sorted(path.iterdir()) if os.path.isdir(path) else ():
        twins = (twin for twin in _twins(path, entry.name) if _are_a_pair(entry, twin, _is_sure(entry.name, twin.name)))
        pairs += [(entry, twin) for twin in islice(twins, 1)]
    return pairs


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", re.sub(r"ground[ _-]truth", "groundtruth", name.lower()))


def _twins(folder: Path, name: str) -> list[Path]:
    """Return the folders whose names have a mask word in place of the image word of `name`, most likely first."""
    words, found = _words(name), []
    # Most folders are not listed.
    has_image_word = not {*words}.isdisjoint((*_IMAGES, *_MAYBE_IMAGES))
    for entry in folder.iterdir() if has_image_word and os.path.isdir(folder) else ():
        others = _words(entry.name)
        different = [pair for pair in zip(words, others) if pair[0] != pair[1]] if len(words) == len(others) else []
        if len(different) == 1 and different[0][0] in (*_IMAGES, *_MAYBE_IMAGES) and os.path.isdir(entry):
            rank = (*_MASKS, *_MAYBE_MASKS)
            found += [(rank.index(different[0][1]), entry)] if different[0][1] in rank else []
    return [entry for _, entry in sorted(found)]


def _is_sure(images: str, masks: str) -> bool:
    return bool({*_IMAGES} & {*_words(images)} and {*_MASKS} & {*_words(masks)})


def _are_a_pair(images: Path, masks: Path, is_sure: bool) -> bool:
    if not os.path.isdir(images) or not _holds_masks(masks):
        return False
    return is_sure or have_the_same_names(list_images(images), list_images(masks))


def have_the_same_names(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether at least 90% of the files on the smaller side have a namesake on the other, ignoring suffixes."""
    stems, twins = ({os.path.splitext(name)[0] for name in side} for side in (names, others))
    twins = {stem if stem in stems else _MASK_ENDS.sub("", stem) for stem in twins}
    return bool(stems and twins) and len(stems & twins) >= 0.9 * min(len(stems), len(twins))


def _holds_masks(folder: Path) -> bool:
    """Return whether a folder holds masks: it is called mask or masks, or it has images."""
    return os.path.isdir(folder) and (folder.name.lower() in ("masks", "mask") or bool(list_images(folder)))


def pairs_pool(images: Path, masks: Path, stems: Sequence[str] | None = None) -> ImagePool:
    """Return images and masks with equal relative names, ignoring suffixes.

    For example, `a/b.jpg` matches `a/b.png` or `a/b_mask.png`. `stems` are the wanted names without suffixes. In VOC,
    only images with a mask are used.

    Raises:
        ValueError: an image has no mask or two masks; the message names the files.
    """
    image_names, mask_names = map(list_images, (images, masks))
    if not image_names:
        raise ValueError(f"{images} holds no image; add some, or name another folder")
    image_of = {os.path.splitext(name)[0]: name for name in image_names}
    mask_of: dict[str, str] = {}
    for name in mask_names:
        stem = os.path.splitext(name)[0]
        stem = stem if stem in image_of else _MASK_ENDS.sub("", stem)
        if stem in mask_of:
            raise ValueError(f"{masks / mask_of[stem]} and {masks / name} are masks of one image; remove one of them")
        mask_of[stem] = name
    wanted = (
        list(map(os.path.normpath, stems)) if stems is not None else [os.path.splitext(name)[0] for name in image_names]
    )
    if images.name.lower() == "jpegimages" and stems is None:
        wanted = [stem for stem in wanted if stem in mask_of]
    missing = [stem for stem in wanted if stem not in image_of]
    if missing:
        raise ValueError(
            f"{images / missing[0]}.jpg (or another image format) is listed, and not there; add it, or take it out of "
            "the list"
        )
    alone = [image_of[stem] for stem in wanted if stem not in mask_of]
    if alone:
        more = f" (and {len(alone) - 1} more without a mask)" if len(alone) > 1 else ""
        raise ValueError(
            f"{images / alone[0]} has no mask: there is no {masks / os.path.splitext(alone[0])[0]}.png (or another "
            f"image format){more}; add it, or remove the image"
        )
    named = next(
        (folder / CLASSES_FILE for folder in (masks, masks.parent) if os.path.isfile(folder / CLASSES_FILE)), None
    )
    left_out = 0 if stems is not None else len(mask_of) - len(set(wanted))
    return ImagePool(
        FileImages(images, tuple(image_of[stem] for stem in wanted)),
        f"{images} and {masks}: {format_count(len(wanted), 'pair')}",
        masks=FileImages(masks, tuple(mask_of[stem] for stem in wanted)),
        names=_class_names(named) if named else None,
        notes=(f"{masks}: left out {format_count(left_out, 'mask')} without an image",) if left_out else (),
    )


def _class_names(file: Path) -> tuple[str, ...]:
    names = load_json(file)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file}: is not a list of class names; write it again, or remove it")
    return tuple(names)


def listed_pool(path: Path, data: Data, target: Target) -> ImagePool:
    """Return the images and masks of a list: `IMAGE MASK` per line (CamVid), or a name without suffix (VOC).

    Paths are relative to the list or to a folder above it. Leading folders that do not exist here are stripped.

    Raises:
        ValueError: a line has another form or its files do not exist; the message names file and line.
    """
    lines = [(number, line.strip()) for number, (line, _) in enumerate(read_lines(path, data), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} lists no images; write `IMAGE MASK` on each line")
    if len(_fields(lines[0][1])) == 1:
        found = next((pair for folder in path.absolute().parents[:_LEVELS] if (pair := pair_of_folders(folder))), None)
        if found is None:
            raise ValueError(
                f"{path}:{lines[0][0]}: {lines[0][1]!r} is one name, and no folder of images with masks (JPEGImages "
                "and SegmentationClass) lies above; write `IMAGE MASK` on each line"
            )
        pool = pairs_pool(
            *found,
            stems=[os.path.splitext(line)[0] if line.lower().endswith((".jpg", ".png")) else line for _, line in lines],
        )
    else:
        pool = _listed_pairs(path, lines)
    return ImagePool(
        pool.images, f"{path}: {format_count(len(pool.images), 'pair')}", masks=pool.masks if target.column else None
    )


def _listed_pairs(path: Path, lines: Sequence[tuple[int, str]]) -> ImagePool:
    images, masks = [], []
    for number, line in lines:
        fields = _fields(line)
        if len(fields) != 2:
            raise ValueError(
                f"{path}:{number}: {line!r} is not `IMAGE MASK`, two paths between blanks, a tab or a comma"
            )
        images.append(fields[0])
        masks.append(fields[1])
    root, skipped = _place_of(path, lines[0][0], images[0])
    sides = []
    for names in (images, masks):
        shortened = [str(Path(*Path(name).parts[skipped:])) for name in names]
        for (number, _), name in zip(lines, shortened):
            if not os.path.isfile(root / name):
                raise ValueError(f"{path}:{number}: no file {root / name}; add it, or take the line out")
        sides.append(FileImages(root, tuple(shortened)))
    return ImagePool(sides[0], "", masks=sides[1])


def _place_of(path: Path, number: int, name: str) -> tuple[Path, int]:
    """Return the root folder of a list's files, and the number of leading folders to strip from its paths."""
    if Path(name).is_absolute() and os.path.isfile(Path(name)):
        return Path("/"), 0
    parts = Path(name).parts
    for skipped in range(len(parts)):
        for folder in path.absolute().parents[:_LEVELS] if not parts[skipped].startswith("/") else ():
            if os.path.isfile(folder / Path(*parts[skipped:])):
                return folder, skipped
    raise ValueError(
        f"{path}:{number}: no file {name!r}, seen from {path.parent} or above; check the paths in the list"
    )


def lists_pairs(path: Path, data: Data) -> bool:
    """Return whether each of the first lines names two image files: an image and its mask."""
    try:
        lines = [_fields(line) for line, _ in islice(read_lines(path, data), _LINES_LOOKED_AT) if line.strip()]
    # The list is in another encoding.
    except ValueError:
        return False
    ends = [[os.path.splitext(field)[1].lower() for field in fields] for fields in lines]
    return bool(ends) and all(len(pair) == 2 and all(end in IMAGE_SUFFIXES for end in pair) for pair in ends)


def _fields(line: str) -> list[str]:
    for delimiter in ("\t", ","):
        if delimiter in line:
            return [field.strip() for field in line.split(delimiter)]
    return line.split()
