"""Read masks in which each class has a color, and write them as masks of class numbers."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accel_train.data.encoding import read_text
from accel_train.data.images.decoding import open_image
from accel_train.data.images.images import FileImages, evenly_spaced, in_threads, list_images, text_digest
from accel_train.data.images.pairs import pair_of_folders
from accel_train.data.parts import folders_beside
from accel_train.experiments.finetune.polygons import write_masks
from accel_train.experiments.finetune.recipe import Asked

_NUM_LOOKED_AT, _MOST_COLORS, _MOST_CLASSES, _MOST_BYTES = 200, 64, 255, 1 << 20
_LIST = re.compile(r".*(?:class|label|colou?r|palette).*\.(?:csv|txt)")
# `Car,64,0,128` (class_dict.csv), `Car:64,0,128::` (labelmap.txt of CVAT), or `64 0 128 Car` (label_colors.txt).
_COLOR = re.compile(r"(?<![^\s,;:])(\d+)[\s,;]+(\d+)[\s,;]+(\d+)(?![^\s,;:]|[\s,;:]+\d)")
_NOT_COUNTED = re.compile(r"[\W_]*(?:void|unlabell?ed|ignored?)[\W_]*", re.IGNORECASE)


class Palette(NamedTuple):
    """Images with color masks, by the image's name in the new folder."""

    files: Mapping[str, tuple[Path, Path]]
    colors: Mapping[int, str]
    """Class names by color, 0xRRGGBB, from the list `source`. Empty without a list."""
    source: Path
    ignore_index: int
    digest: str
    note: str

    def write(self, folder: Path) -> None:
        """Write images and masks. Raises ValueError for a mask of another size, or a color that may be no class."""
        colors = self.colors or self._unnamed()
        names = [name for name in dict.fromkeys(colors.values()) if not _NOT_COUNTED.fullmatch(name)]
        if not 0 < len(names) <= self.ignore_index:
            raise ValueError(f"{self.source}: {len(names)} classes. Name 1 to {self.ignore_index} (data.ignore_index)")
        table = np.full(1 << 24, self.ignore_index, np.uint8)
        table[[*colors]] = [names.index(name) if name in names else self.ignore_index for name in colors.values()]

        def draw(name: str) -> Image.Image:
            image, mask = self.files[name]
            pixels, size = _colors_in(mask), open_image(image, str(image)).size
            if pixels.shape != size[::-1]:
                sizes = "{1} x {0} pixels, and {2} has {3} x {4}".format(*pixels.shape, image, *size)
                raise ValueError(f"{mask} has {sizes}. Export the mask again, in the size of the image")
            if others := sorted({*np.unique(pixels).tolist()} - {*colors}):
                fault = f"{mask}: {len(others)} of its colors ({_shown(others[0])}) are not among the {len(colors)} of"
                raise ValueError(f"{fault} {self.source}. Add them, or export the masks without smoothing, as PNG")
            return Image.fromarray(table[pixels])

        write_masks(folder, {name: image for name, (image, _) in self.files.items()}, draw, names)

    def _unnamed(self) -> dict[int, str]:
        """Return a name for each color. Raises ValueError for many colors, or colors that only borders have."""

        def look(mask: Path) -> tuple[set[int], set[int]]:
            colors = _colors_in(mask)
            one, right, below, both = colors[:-1, :-1], colors[:-1, 1:], colors[1:, :-1], colors[1:, 1:]
            filled = one[(one == right) & (one == below) & (one == both)]
            return {*np.unique(colors).tolist()}, {*np.unique(filled).tolist()}

        looks = in_threads(look, [mask for _, mask in self.files.values()])
        found, filled = (set[int]().union(*side) for side in zip(*looks))
        if len(found) > _MOST_COLORS or found > filled:
            raise ValueError(
                f"{self.source.parent}: masks have {len(found)} colors (limit: {_MOST_COLORS}), of which "
                f"{len(found - filled)} never fill 2 x 2 pixels. Smoothing and JPEG make such colors. Export the masks "
                f"again as PNG, without smoothing, or list the classes in {self.source}: lines `name,r,g,b`"
            )
        return {color: f"color_{_shown(color, '_')}" for color in sorted(found)}


def find_palette(asked: Asked, place: str) -> Palette | None:
    """Return the color masks of a folder, or None without. Raises ValueError for unclear pairs or lists of classes."""
    path = Path(place).expanduser()
    if not asked.allows("semantic-segmentation") or not path.is_dir() or not list_images(path)[0]:
        return None
    from accel_train.experiments.finetune.images import find_pairs, not_used  # imports torch
    from accel_train.tasks.semantic_segmentation.data import masked_pool

    if (pairs := find_pairs(place)) is None:
        return None
    parts = {"train": pairs.train} | ({"val": pairs.eval} if pairs.eval and "data.eval" not in asked.given else {})
    test = folders_beside(Path(pairs.train).expanduser()).get("test")
    if pairs.train != place and test is not None and pair_of_folders(test):
        parts["test"] = str(test)
    files, stamps, roots = dict[str, tuple[Path, Path]](), list[str](), list[Path]()
    for part, source in parts.items():
        pool = masked_pool(source, asked.data, place)
        images, masks = pool.images, pool.masks
        if not isinstance(images, FileImages) or not isinstance(masks, FileImages) or pool.names is not None:
            return None
        looked_at = (masks[n] for n in evenly_spaced(len(masks), _NUM_LOOKED_AT) if part == "train")
        colored = (np.ptp(np.asarray(mask)[..., :3], 2).any() for mask in looked_at if mask.mode in ("RGB", "RGBA"))
        # Shades of gray are class numbers.
        if part == "train" and not any(colored):
            return None
        roots += [images.root, masks.root]
        stamps += map(str, in_threads(masks.inspect, range(len(masks))))
        for n, name in enumerate(images.names):
            files[f"{part}/{name}" if len(parts) > 1 else name] = images.content(n), masks.content(n)
    # Lists of images name absolute paths.
    top = Path(os.path.commonpath([path.absolute() if roots[0].is_absolute() else path, *roots]))
    places = sorted({each for root in roots for each in (top, root.parent, root)})
    lists = [file for each in places for file in sorted(each.iterdir()) if _LIST.fullmatch(file.name.lower())]
    lists = [file for file in lists if file.is_file() and file.stat().st_size <= _MOST_BYTES]
    found = {file: colors for file in lists if (colors := _named_colors(file, asked))}
    file, colors = next(iter(found.items()), (top / "class_dict.csv", {}))
    if any(other != colors for other in found.values()):
        raise ValueError(f"{' and '.join(map(str, found))} list different classes. Remove all but one")
    note = f"each color of the masks is a class, without a name in {file} (lines `name,r,g,b`; void: not counted)"
    if colors:
        ignored = ", ".join(filter(_NOT_COUNTED.fullmatch, colors.values())) or "nothing"
        note = f"colors of the masks are classes by {file}; not counted: {ignored}"
    stamps += [repr(colors), str(asked.data.ignore_index), *(f"{name} {each}" for name, each in files.items())]
    unused = ", ".join(not_used(top, [*roots, file])) or "nothing"
    return Palette(files, colors, file, asked.data.ignore_index, text_digest(stamps), f"{note}; not used: {unused}")


def _named_colors(file: Path, asked: Asked) -> dict[int, str]:
    """Return class names by color from a list, or nothing from another file. Raises ValueError for an unclear line."""
    lines = [line.strip() for line in read_text(file, asked.data).splitlines() if line.strip() and line[0] != "#"]
    if lines and not re.search(r"\d|\bb(?:lue)?\b.*\br(?:ed)?\b", lines[0].lower()):
        del lines[0]
    colors = dict[int, str]()
    for line in lines if any(map(_COLOR.search, lines)) else ():
        before, *rgb, after = _COLOR.split(line, maxsplit=1) if _COLOR.search(line) else ("", "999", "")
        name = (re.split(r"[,;:\t]", before.rstrip(" ,;:\t"))[-1] or after.lstrip(" ,;:\t")).strip("\"' ")
        is_color = max(map(int, rgb)) < 256 and re.search(r"[^\W\d]", name) is not None
        if not is_color or colors.setdefault(int.from_bytes(bytes(map(int, rgb))), name) != name:
            fault = f"{file}: {line!r} is not `name,r,g,b`, or its color has two names"
            raise ValueError(f"{fault}. Repair the line, or rename a file that does not list the colors of classes")
    return colors


def _colors_in(path: Path) -> NDArray[np.int64]:
    """Return the color of each pixel, 0xRRGGBB, (H, W). Raises ValueError if the mask cannot have exact colors."""
    mask = open_image(path, str(path))
    colors = np.asarray(np.asarray(mask.convert("RGB")).astype(np.int64) @ (1 << 16, 1 << 8, 1))
    is_opaque = mask.mode == "RGB" or (mask.mode == "RGBA" and mask.getchannel("A").getextrema() == (255, 255))
    if mask.format in ("JPEG", "MPO") or not is_opaque or len(np.unique(colors)) > _MOST_CLASSES:
        fault = f"{path} ({mask.format}, mode {mask.mode}, {len(np.unique(colors))} colors)"
        rule = f"color masks have exact, opaque RGB colors, at most {_MOST_CLASSES}; JPEG and smoothing make others"
        raise ValueError(f"{fault}: {rule}. Write the masks again as RGB PNG, from the original")
    return colors


def _shown(color: int, between: str = ",") -> str:
    return between.join(map(str, int(color).to_bytes(3)))
