"""The folder of a run, as the one process that makes and deletes things in it has it."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path

from .error import CheckpointError
from .integrity import sync_folder
from .lock import FolderLock
from .metadata import read_metadata, steps_in
from .retention import Retention
from .storage import UNFINISHED

# A checkpoint on its way out: renamed first, so that a number always stands for a whole one.
DELETED = ".deleted"
# In seconds: how long nothing new has to come after a failed save, and how long to look for that.
QUIET = 0.5
PATIENCE = 10.0


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
            self.clean()
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

    def clean(self) -> None:
        """Deletes what an unfinished save or deletion left behind."""
        for path in self._leftovers():
            shutil.rmtree(path)

    def clean_after_failure(self) -> None:
        """As `clean`, until nothing comes back.

        When one write fails, Orbax no longer waits for the others. TensorStore goes on with them,
        into a folder that is being deleted, or makes it anew.
        """
        give_up = time.monotonic() + PATIENCE
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + QUIET:
            if self._leftovers():
                quiet_since = time.monotonic()
                try:
                    self.clean()
                except OSError as error:
                    changed_meanwhile = error.errno in (errno.ENOENT, errno.ENOTEMPTY)
                    if not changed_meanwhile or quiet_since > give_up:
                        raise
            time.sleep(QUIET / 10)

    def _leftovers(self) -> list[Path]:
        return [
            path
            for path in self._path.iterdir()
            if path.name.partition(".")[0].isdecimal()
            and (UNFINISHED in path.name or path.name.endswith(DELETED))
        ]

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Takes note of a checkpoint that is whole, and deletes what is then not to be kept."""
        self._metrics[step] = metrics
        # The new one has its name on disk before an old one goes.
        sync_folder(self._path)
        for old in sorted(self._metrics.keys() - self._retention.kept(self._metrics)):
            self.delete(old)

    def delete(self, step: int) -> None:
        self._metrics.pop(step, None)
        path = self._path / str(step)
        gone = path.with_name(path.name + DELETED)
        path.rename(gone)
        shutil.rmtree(gone)

    def release(self) -> None:
        self._lock.release()
