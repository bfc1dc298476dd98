"""Files that are there whole or not at all, and are still there after a power cut."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> Path:
    """Replace a file in one move, so that a reader, a kill or a power cut finds the old one or the new one (mode 0600)."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)
    return path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
