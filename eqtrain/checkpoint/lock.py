"""A folder that one run at a time writes to."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import IO

from .error import CheckpointError

# A lock of the system is one of the process, which would get it a second time.
_HELD: set[Path] = set()


class FolderLock:
    """Holds the file `.lock` of a folder until `release`.

    The system gives the lock up when the process ends, however it ends, so that none is left behind
    by a run that was killed. It is one of `lockf`: unlike one of `flock`, a process that this one
    forked does not keep it.

    **Raises:** `CheckpointError` that says who holds it.
    """

    def __init__(self, folder: Path):
        self._path = folder.resolve() / ".lock"
        # Before the file is opened: closing it again would give up this process's lock.
        if self._path in _HELD:
            raise self._in_use("this process", "Close the first one, or")
        import fcntl  # not on every system on which the rest of the kit can be imported

        file = open(self._path, "a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            if isinstance(error, BlockingIOError | PermissionError):
                raise self._in_use(holder, "End that run, or") from None
            raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file: IO[str] | None = file
        _HELD.add(self._path)

    def _in_use(self, holder: str, advice: str) -> CheckpointError:
        return CheckpointError(
            "One run at a time may write checkpoints to a folder. "
            f"Got `{self._path.parent}`, which {holder} has open. {advice} use another folder."
        )

    def release(self) -> None:
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None
            _HELD.discard(self._path)
