"""Resolve a name in `data.train` or `data.eval` to images with labels or masks as stored."""

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_train.core.format import format_count
from accel_train.data.builtin.digit_scenes import DIGIT_SCENES, LABEL_NAMES, digit_scenes, digits
from accel_train.data.images.images import IMAGE_SUFFIXES, FileImages, ImagePool, Target, join_images, list_files
from accel_train.data.images.misread import refuse_annotations, refuse_masks_as_classes, refuse_parts_as_classes
from accel_train.data.images.pairs import LISTED_SUFFIXES, listed_pool, pair_of_folders, pairs_pool
from accel_train.data.images.tables import ARRAY_SUFFIXES, array_pool, table_pool
from accel_train.data.images.tars import tars_among, tars_pool
from accel_train.data.sources import refuse_held_out_files, resolve_sources
from accel_train.data.tables import Unlabelled, refuse_parts_of
from accel_train.recipe.data import ImageData, listed
from accel_train.recipe.tasks import TARS


def read_pools(names: Any, data: ImageData, key: str, target: Target) -> ImagePool:
    """Return one pool with all images that `key` (`data.train` or `data.eval`) names, with their labels or masks.

    Raises:
        ValueError: a source is missing or of an unknown kind, or a row is broken; the message names it.
    """
    pools = [pool for name in listed(names) for pool in _read_pool(name, data, key, target)]
    if not pools:
        known = f"with images/ and masks/, a table, an array, or {DIGIT_SCENES}"
        known = known if target.is_mask else "with images, a table, an array, or digits"
        raise ValueError(f"{key} is empty; name a folder {known}")
    if len({pool.names for pool in pools}) > 1:
        raise ValueError(f"{key}: its sources do not agree on the names of the classes; say data.label_names")
    all_masks = [pool.masks for pool in pools if pool.masks is not None]
    return ImagePool(
        join_images([pool.images for pool in pools]),
        ", ".join(pool.description for pool in pools),
        [label for pool in pools for label in pool.labels],
        masks=join_images(all_masks) if all_masks else None,
        names=pools[0].names,
        ids=[name for pool in pools for name in pool.ids or map(pool.images.where, range(len(pool.images)))]
        if any(pool.ids for pool in pools)
        else None,
        notes=tuple(note for pool in pools for note in pool.notes),
    )


def scenes_pool(*, held_out: bool) -> ImagePool:
    """Return the embedded digit scenes with their masks: the training scenes, or the held-out ones."""
    images, masks, _ = digit_scenes(held_out=held_out)
    return ImagePool(images, f"{images.name}: {len(images):,} images", masks=masks)


def boxed_scenes_pool(*, held_out: bool) -> ImagePool:
    """Return the embedded digit scenes with the boxes of their digits: the training scenes, or the held-out ones."""
    images, _, boxes = digit_scenes(held_out=held_out)
    return ImagePool(images, f"{images.name}: {len(images):,} images", names=LABEL_NAMES[1:], boxes=boxes)


def _read_pool(name: str, data: ImageData, key: str, target: Target) -> list[ImagePool]:
    if target.is_mask and name == DIGIT_SCENES:
        return [scenes_pool(held_out=key == "data.eval")]
    if not target.is_mask and name == "digits":
        array, targets = digits()
        return [ImagePool(array, f"digits of scikit-learn: {len(array):,} images", targets.tolist())]
    path = Path(name).expanduser()
    are_tars = bool(tars_among([path]))
    if are_tars or path.suffix.lower() in ARRAY_SUFFIXES:
        found = [path] if path.is_file() else [*map(Path, sorted(glob.glob(str(path), recursive=True)))]
        if not found:
            raise ValueError(f"{key}: no file {name!r} (seen from {Path.cwd()}); check the path")
        if are_tars:
            return [tars_pool(name, found, data, target)]
        return [array_pool(each, data, target) for each in found]
    if target.is_mask and path.suffix.lower() in LISTED_SUFFIXES and path.is_file():
        return [listed_pool(path, data, target)]
    if path.is_dir() and (pool := _folder_pool(path, data, key, target)) is not None:
        return [pool]
    if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
        if target.column is not None:
            raise ValueError(
                f"{key}: {path} is one image, without a {'mask' if target.is_mask else 'label'}; name a folder"
            )
        return [ImagePool(FileImages(path.parent, (path.name,)), f"{path}: 1 image")]
    (source,) = resolve_sources(name, data, key=key)
    if key == data.train_key:
        refuse_parts_of(source, data)
    return [table_pool(table, data, target) for table in source.parts()]


def _folder_pool(path: Path, data: ImageData, key: str, target: Target) -> ImagePool | None:
    """Return the images below a folder with their labels or masks. None if it has no images (it may have tables)."""
    folders = pair_of_folders(path) if target.is_mask else None
    if folders is not None and target.mask is not None:
        return pairs_pool(*folders)
    folder = path if folders is None else folders[0]
    files, others = list_files(folder)
    if not files and not target.is_mask and not others and any(entry.is_dir() for entry in path.iterdir()):
        raise ValueError(f"{key}: no image below the folder {str(path)!r}; expected {path}/CLASS/*.png")
    if not files:
        if not (tars := tars_among(map(folder.joinpath, others))):
            return None
        refuse_held_out_files(str(path), folder, tars, data, key)
        return tars_pool(str(path), tars, data, target)
    notes = (f"{folder}: left out {format_count(len(others), 'file')} of other kinds",) if others else ()
    pool = ImagePool(FileImages(folder, tuple(files)), f"{folder}: {format_count(len(files), 'image')}", notes=notes)
    if target.label is not None:
        if data.label_names is None:
            refuse_annotations(folder, files, others)
            refuse_masks_as_classes(folder, files)
            refuse_parts_as_classes(folder, files)
        return _with_class_folders(pool, folder, files, key)
    if target.mask is not None:
        raise ValueError(
            f"{key}: {path} has no masks; expected {path}/images/ and {path}/masks/ with files of the same names (or "
            f"images/ and annotations/, JPEGImages/ and SegmentationClass/, {path} and {path}annot), a list with "
            f"`IMAGE MASK` on each line, or {TARS} (KEY.jpg, KEY.png)"
        )
    return pool


def _with_class_folders(pool: ImagePool, folder: Path, files: Sequence[str], key: str) -> ImagePool:
    """Return the pool with labels from root/CLASS/.../image: the first folder below the root is the class.

    Raises:
        Unlabelled: an image lies in no class folder.
        ValueError: a class folder has no image.
    """
    classless = [file for file in files if "/" not in file]
    if classless:
        raise Unlabelled(
            f"{key}: {folder / classless[0]} lies in no class folder; expected {folder}/CLASS/{classless[0]} (move or "
            "remove it, or name a table with columns for image and label)"
        )
    labels = [file.split("/", 1)[0] for file in files]
    folders = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    empty = sorted(folders - set(labels))
    if empty:
        raise ValueError(
            f"{key}: the class folder {folder / empty[0]} holds no image; add some, or remove the folder"
            + (f" (and {len(empty) - 1} more)" if len(empty) > 1 else "")
        )
    return replace(pool, labels=labels, description=f"{pool.description} in {format_count(len(folders), 'folder')}")
