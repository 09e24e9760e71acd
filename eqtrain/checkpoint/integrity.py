"""Checksums of every file of a checkpoint, in the format of `sha256sum`.

Nothing else notices a changed bit: the format has checksums for its index, not for the numbers.
`cd 1000 && sha256sum --check SHA256SUMS` does what is done here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .._util.files import sha256
from .error import CheckpointError

SUMS = "SHA256SUMS"


def files_in(folder: Path) -> list[Path]:
    """All files below a folder, in order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def checksum_lines(folder: Path, paths: Iterable[Path]) -> list[str]:
    """A line for each file, by its path relative to `folder`; each is forced onto the disk, too."""

    def line(path: Path) -> str:
        return f"{sha256(path, sync=True)}  {path.relative_to(folder).as_posix()}"

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(line, paths))


def write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checksums(folder: Path) -> dict[str, str]:
    """The checksum of each file, by its path relative to `folder`."""
    try:
        text = (folder / SUMS).read_text(encoding="utf-8")
        pairs = [line.split("  ", 1) for line in text.splitlines()]
        return {name: digest for digest, name in pairs}
    except (OSError, ValueError) as error:
        raise damaged(folder, f"`{folder / SUMS}`, which cannot be read ({error})") from error


def verify(folder: Path, below: str, share: int = 0, shares: int = 1) -> None:
    """Compares the files below a subfolder with their checksums: of so many shares, one.

    **Raises:** `CheckpointError` that names the file which is missing, shorter or different.
    """
    sums = [item for item in read_checksums(folder).items() if item[0].startswith(f"{below}/")]

    def look(item: tuple[str, str]) -> str | None:
        name, expected = item
        path = folder / name
        try:
            found = sha256(path)
        except FileNotFoundError:
            return f"`{path}`, which is missing"
        except OSError as error:
            return f"`{path}`, which cannot be read ({error})"
        if found == expected:
            return None
        return f"`{path}`, whose {path.stat().st_size} bytes have another SHA-256 than when saved"

    with ThreadPoolExecutor(4) as threads:
        for problem in threads.map(look, sums[share::shares]):
            if problem is not None:
                raise damaged(folder, problem)


def damaged(folder: Path, problem: str) -> CheckpointError:
    if not folder.exists():
        return CheckpointError(
            f"A checkpoint must be there while it is read. Got `{folder}`, which was deleted "
            "meanwhile: the run that writes to the folder no longer keeps it. Restore again."
        )
    return CheckpointError(
        f"A checkpoint must be read as it was written. Got {problem}. "
        f"Delete `{folder}`, and the last good checkpoint before it is used."
    )
