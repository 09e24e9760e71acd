"""The folder of a run, as the one process that makes and deletes things in it has it."""

from __future__ import annotations

import shutil
from pathlib import Path

from .error import CheckpointError
from .integrity import sync_folder
from .lock import FolderLock
from .metadata import read_metadata, steps_in
from .retention import Retention
from .storage import UNFINISHED

# A checkpoint on its way out: renamed first, so that a number always stands for a whole one.
DELETED = ".deleted"


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
        for path in self._path.iterdir():
            if path.name.partition(".")[0].isdecimal() and (
                UNFINISHED in path.name or path.name.endswith(DELETED)
            ):
                shutil.rmtree(path)

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
