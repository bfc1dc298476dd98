"""WebDataset tars of small images, and the same images in class folders."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.every_task import recipe_of

NUM_IMAGES = 24
PER_TAR = 6


def pictures() -> list[tuple[int, bytes]]:
    """The class and the PNG of each image, by class."""
    generator, found = np.random.default_rng(0), []
    for number in range(NUM_IMAGES):
        label = number * 3 // NUM_IMAGES
        pixels = generator.integers(0, 150, (20, 24, 3), dtype=np.uint8)
        pixels[..., label] += 100
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        found.append((label, file.getvalue()))
    return found


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path) -> Path:
    """All images in tars of 6; returns the folder."""
    images = pictures()
    for start in range(0, NUM_IMAGES, PER_TAR):
        members = []
        for number in range(start, start + PER_TAR):
            label, content = images[number]
            members += [(f"{number:03d}.cls", str(label).encode()), (f"{number:03d}.png", content)]
        write_tar(folder / f"{start // PER_TAR}.tar", members)
    return folder


def write_class_folders(folder: Path) -> Path:
    for number, (label, content) in enumerate(pictures()):
        path = folder / str(label) / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def recipe_of_images(folder: Path, name: str, train: Path | str, **sections: Any) -> dict[str, Any]:
    recipe = recipe_of("image-classification", folder / name, **sections)
    recipe["data"] |= {"train": str(train)}
    return recipe
