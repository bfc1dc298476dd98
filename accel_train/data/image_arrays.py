"""Images in numpy's own files (.npz, .npy), and the digits that come with scikit-learn."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_train.data.images import ArrayImages

ARRAY_SUFFIXES = frozenset((".npz", ".npy"))


def read_arrays(path: Path, image_column: str, columns: tuple[str, ...]) -> tuple[ArrayImages, dict[str, NDArray[Any]]]:
    """The images of an array file and what goes with them (labels, masks), all of one length.

    `.npz`: arrays named as the columns are, or with an s (`images`, `labels`). `.npy`: the images alone, memory-mapped;
    the rest lies beside it, with the name in place of `images` (`train_images.npy`, `train_labels.npy`).

    Raises:
        ValueError: an array is missing, or of a shape or type that are no images.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file (a pipe, a device or a folder); name an array file")
    arrays = {name: _read(path, name, image_column) for name in (image_column, *columns)}
    images = arrays.pop(image_column)
    _check_images(path, images)
    for name, array in arrays.items():
        if array.shape[:1] != images.shape[:1]:
            raise ValueError(
                f"{path}: {len(images)} images, but {name!r} has the shape {array.shape}; one each is needed"
            )
    return ArrayImages(images, str(path)), arrays


def digits() -> tuple[ArrayImages, NDArray[np.int64]]:
    """1,797 handwritten digits of 8 x 8 pixels (UCI, in scikit-learn): images and labels.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("digits come with scikit-learn, which is not installed; pip install scikit-learn") from error
    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return ArrayImages(pixels, "digits"), bunch.target.astype(np.int64)


def _read(path: Path, name: str, image_column: str) -> NDArray[Any]:
    try:
        if path.suffix.lower() == ".npz":
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                for spelling in (name, f"{name}s"):
                    if spelling in file.files:
                        return np.asarray(file[spelling])
                available = ", ".join(file.files)
            raise KeyError(f"there is no array {name!r} or '{name}s'; available: {available}")
        if name != image_column:
            path = _beside(path, name, image_column)
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except KeyError as error:
        raise ValueError(
            f"{path}: {error.args[0]}; set data.{'image' if name == image_column else name}_column"
        ) from None
    except Exception as error:  # zipfile, pickle and numpy each have their own
        raise ValueError(
            f"{path}: cannot be read as an array ({str(error).splitlines()[0]}); is it complete?"
        ) from error


def _beside(path: Path, name: str, image_column: str) -> Path:
    for old in (f"{image_column}s", image_column):
        if old in path.stem:
            return next(
                (
                    found
                    for new in (f"{name}s", name)
                    if (found := path.with_stem(path.stem.replace(old, new))).is_file()
                ),
                path.with_stem(path.stem.replace(old, f"{name}s")),
            )
    raise KeyError(f"its name has no '{image_column}s' to find the file with '{name}s' by; rename it, or use .npz")


def _check_images(path: Path, images: NDArray[Any]) -> None:
    shape = images.shape
    if images.dtype != np.uint8:
        raise ValueError(f"{path}: images are {images.dtype}; whole numbers 0 to 255 are needed: save them as uint8")
    if (len(shape) == 3 and all(shape)) or (len(shape) == 4 and shape[3] in (1, 3, 4) and all(shape)):
        return
    hint = (
        "it seems to have channels first: transpose it" if len(shape) == 4 and shape[1] in (1, 3, 4) else "reshape it"
    )
    raise ValueError(f"{path}: images of shape {shape} are not N x H x W or N x H x W x 1, 3 or 4; {hint}")
