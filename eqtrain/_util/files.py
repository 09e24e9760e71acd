"""Files on disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256(path: Path, *, sync: bool = False) -> str:
    """The SHA-256 of a file, in hexadecimal; with `sync`, once its bytes are on the disk."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
