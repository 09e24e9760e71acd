"""The folder of a run, as the one process that makes and deletes things in it has it."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from .error import CheckpointError
from .integrity import sync_folder
from .lock import FolderLock
from .metadata import read_metadata, steps_in
from .retention import Retention
from .storage import UNFINISHED

T = TypeVar("T")

# A checkpoint on its way out: renamed first, so that a number always stands for a whole one.
DELETED = ".deleted"
# In seconds: how long nothing new has to come after a failed save, how long to try to delete what
# is still changing, and how long to wait in between.
QUIET = 0.5
PATIENCE = 10.0
PAUSE = 0.05


class Folder:
    """Holds the lock of a folder, and deletes what is not to be kept.

    **Raises:** `CheckpointError` if another run has it, or if it cannot be written to.
    """

    def __init__(self, path: Path, retention: Retention):
        self._path = path
        self._retention = retention
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path)
            try:
                self._clean_at_start()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise CheckpointError(
                f"The folder of checkpoints must be one to write to. Got `{path}`: {error}. "
                "Choose another folder, or change its permissions."
            ) from error
        self._metrics = {step: self._metrics_of(step) for step in steps_in(path)}

    def _metrics_of(self, step: int) -> dict[str, float]:
        try:
            return read_metadata(self._path, step).metrics
        except CheckpointError:  # which is raised when that one is to be restored
            return {}

    def _clean_at_start(self) -> None:
        try:
            self.clean()
        except OSError as error:
            if any(UNFINISHED in path.name for path in self._leftovers()):
                raise
            # The run whose checkpoint it was went on with no more than a warning either.
            warnings.warn(
                "Checkpoints that are not to be kept are deleted. "
                f"Got an error in doing so: {error} "
                "It is tried again with each save; correct the permissions until then.",
                stacklevel=1,
            )

    def clean(self) -> None:
        """Deletes what an unfinished save or deletion left behind, all that lets itself be."""
        give_up = time.monotonic() + PATIENCE
        _each(lambda path: _remove(path, give_up), self._leftovers())

    def clean_after_failure(self) -> None:
        """As `clean`, until nothing comes back.

        When one write fails, Orbax no longer waits for the others. TensorStore goes on with them,
        into a folder that is being deleted, or makes it anew.
        """
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + QUIET:
            if self._leftovers():
                quiet_since = time.monotonic()
                self.clean()
            time.sleep(PAUSE)

    def _leftovers(self) -> list[Path]:
        return [
            path
            for path in self._path.iterdir()
            if path.name.partition(".")[0].isdecimal()
            and (UNFINISHED in path.name or path.name.endswith(DELETED))
        ]

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Takes note of a checkpoint that is whole, and has its name on disk."""
        self._metrics[step] = metrics
        self.sync()

    def sync(self) -> None:
        """Forces the names of the checkpoints onto the disk."""
        sync_folder(self._path)

    def prune(self) -> None:
        """Deletes what is not to be kept."""
        self.delete(self._metrics.keys() - self._retention.kept(self._metrics))

    def delete(self, steps: Iterable[int]) -> None:
        def delete(step: int) -> None:
            path = self._path / str(step)
            with contextlib.suppress(FileNotFoundError):  # which somebody deleted by hand
                path.rename(path.with_name(path.name + DELETED))
            self._metrics.pop(step, None)

        try:
            _each(delete, sorted(steps))
        finally:
            # Those too that could not be deleted an earlier time.
            self.clean()

    def release(self) -> None:
        self._lock.release()


def _each(function: Callable[[T], None], items: Iterable[T]) -> None:
    """Calls the function with all of them, and then raises the first error there was."""
    errors: list[OSError] = []
    for item in items:
        try:
            function(item)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _remove(path: Path, give_up: float) -> None:
    """Deletes a folder in which somebody may still write, or hold a file open on NFS."""
    while True:
        try:
            shutil.rmtree(path)
            return
        except OSError as error:
            if not path.exists():
                return
            changes = error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY)
            if not changes or time.monotonic() > give_up:
                raise
        time.sleep(PAUSE)
