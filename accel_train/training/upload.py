"""Copy a local run folder to its bucket while the run trains. A checkpoint counts in the bucket once its manifest is
there, which is written last, after all other files have been read back."""

import os
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from typing import Self

from accel_train.buckets.store import LOCK, Store
from accel_train.checkpoint.health import TAGS, healthy_steps
from accel_train.checkpoint.store import MANIFEST, checkpoint_folders, folder_of, step_of, steps_of
from accel_train.core.errors import CheckpointError, Preempted, TrainingStopped
from accel_train.core.files import make_folders, publish_folder, write_atomically
from accel_train.core.json_io import utc_event
from accel_train.core.ownership import MARKER, RUN_NAMES
from accel_train.core.terminal import print_line
from accel_train.core.work import working
from accel_train.data.cache import stamp_of
from accel_train.observe.run_folder import RunFolder

POLL_SECONDS = 1.0
FILES_SECONDS = 60.0
"""Seconds after which changed metrics and other small files are copied, if no checkpoint is."""
WAIT_SECONDS = 3600.0
"""Seconds for which the end of a run waits for a bucket that answers no request."""
_NAMES = [name for name in RUN_NAMES if name not in ("checkpoints", ".lock", ".lock.holder")]
_TAGS = f"checkpoints/{TAGS}"


class Upload:
    """A thread that copies a locked run folder to its bucket: `with Upload(folder, url):`.

    Entering takes the lock of the bucket and fetches a newer run from there. Leaving waits until everything is copied.

    Raises:
        SettingError: on entering: the bucket cannot be written, or another run holds it.
        CheckpointError: on leaving: some files could not be copied. They are all in the run folder.
    """

    def __init__(self, folder: RunFolder, url: str) -> None:
        self._run, self._folder, self._root = folder, folder.path, folder.path / "checkpoints"
        self._store = Store(url)
        self._complete: dict[str, bytes] = {}
        """Manifests of the checkpoints in the bucket, by folder name. Empty while a checkpoint is not complete."""
        self._sent: dict[Path, list[int]] = {}
        """Size and modification time of each small file when it was copied."""
        self._closing, self._error = threading.Event(), ""
        self._due = 0.0
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def __enter__(self) -> Self:
        store = self._store
        with working(f"asking {store.url}"):
            store.take_lock(self._folder)
            store.end_uploads()
            for path in map(Path, store.names("checkpoints")):
                if step_of(path.parent) is not None:
                    manifest = store.read(str(path)) if path.name == MANIFEST else b""
                    self._complete[path.parent.name] = self._complete.get(path.parent.name) or manifest
            there = sorted(name for name, manifest in self._complete.items() if manifest)
            here = [folder.name for folder in checkpoint_folders(self._root)]
            if there[-1:] > here[-1:]:
                store.fetch("", self._folder, ("checkpoints", LOCK))
                make_folders(self._root)
                write_atomically(self._folder / _TAGS, store.read(_TAGS))
                # The newest comes last. The resume checks the digests.
                for name in there:
                    if name not in here:
                        with publish_folder(self._root / name, self._root / f".tmp-{name}-{os.getpid()}") as staging:
                            store.fetch(f"checkpoints/{name}", staging)
        store.limit_seconds, store.num_failures, store.on_failure = WAIT_SECONDS, 0, self._note
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._closing.set()
        # A run that fails leaves the rest to its next start.
        if not (error is None or isinstance(error, TrainingStopped | Preempted)):
            return
        with working(f"uploading to {self._store.url}"):
            self._thread.join()
        if self._error and error is None:
            raise CheckpointError(f"{self._error}. {self._folder} has all files: run again to upload the rest")
        print_line(self._error or f"uploaded: {self._store.url} (failed requests: {self._store.num_failures})")

    def _note(self, message: str) -> None:
        step = max(steps_of(self._root), default=0)
        self._run.append_event(utc_event("upload_slow", step, message, None, {}))
        print_line(message, sys.stderr)

    def _work(self) -> None:
        """Copy until the run has ended."""
        has_more, is_last = True, False
        while has_more or not is_last:
            is_last = self._closing.wait(0 if has_more else POLL_SECONDS)
            try:
                has_more, self._error = self._copy_changes(is_last), ""
            # Some files were rotated away meanwhile, or the bucket does not answer.
            except Exception as error:
                has_more, self._error = False, str(error)

    def _copy_changes(self, is_last: bool) -> bool:
        """Copy the newest checkpoint that the bucket lacks, and then remove old ones.

        Returns:
            Whether there may be more to copy.
        """
        here = {folder: (folder / MANIFEST).read_bytes() for folder in checkpoint_folders(self._root)}
        new = [folder for folder, manifest in here.items() if manifest not in self._complete.values()]
        # A checkpoint in the bucket has its metrics there.
        if new or is_last or time.monotonic() > self._due:
            self._store.take_lock(self._folder)
            self._put_files(_NAMES)
            self._due = time.monotonic() + FILES_SECONDS
        if new:
            # After one that a resume takes, one that a rollback takes.
            lacks_newest = not any(self._complete.values())
            folder = [folder for folder in new if lacks_newest or folder in self._lacking()] or new
            self._put_checkpoint(folder[-1], here[folder[-1]])
        # The newest checkpoint is complete in the bucket here.
        if not self._lacking():
            self._put_files([_TAGS])
            for name in [name for name, manifest in self._complete.items() if here and manifest not in here.values()]:
                self._complete[name] = b""
                self._store.remove(f"checkpoints/{name}", first=MANIFEST)
                del self._complete[name]
        if is_last and not new:
            self._store.remove(LOCK)
        return bool(new)

    def _put_checkpoint(self, folder: Path, manifest: bytes) -> None:
        where = f"checkpoints/{folder.name}"
        # If the checkpoint is rotated away meanwhile, the next pass removes what was copied.
        self._complete[folder.name] = b""
        # Left by a kill, or an older checkpoint of the same step.
        self._store.remove(where, first=MANIFEST)
        for path in _files_of(folder):
            self._store.put(path, f"{where}/{path.relative_to(folder)}")
        self._complete[folder.name] = manifest

    def _lacking(self) -> list[Path]:
        """Return the known-good checkpoints if the bucket has none of them."""
        good = [folder_of(self._root, step) for step in healthy_steps(self._root)]
        return [] if any(self._complete.get(folder.name) for folder in good) else good

    def _put_files(self, names: list[str]) -> None:
        """Copy the changed files of these names. The summary of a finished run comes after its model."""
        # Listed in the opposite order, so that no summary is copied whose model is not listed.
        found = [_files_of(self._folder / name) for name in reversed(names)]
        for path in chain.from_iterable(reversed(found)):
            if self._sent.get(path) != (stamp := stamp_of(path)):
                # Files at the top may grow.
                self._store.put(path, str(path.relative_to(self._folder)), reads_back=path.parent != self._folder)
                self._sent[path] = stamp


def _files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder. What says that they are complete comes last."""
    files = [each for each in (path, *path.rglob("*")) if each.is_file()]
    return sorted(files, key=lambda each: each.name in (MARKER, MANIFEST))
