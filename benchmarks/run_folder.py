"""The folder that a training script leaves, and what it shows while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunFolder:
    """`path`, or else one under `runs/` that is named for the run and the time; made if need be.

    `lines` are those of its `metrics.jsonl`.
    """

    def __init__(self, name: str, path: Path | None, console: Console):
        self.path = path or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path.mkdir(parents=True, exist_ok=True)
        self.lines: list[dict[str, Any]] = []
        self._name = name
        self._console = console

    @contextmanager
    def steps(self, total: int) -> Iterator[None]:
        """While it is open, `write` and `show` can be called."""
        progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            # Into a file it would write nothing before the end: there each `show` is a line.
            disable=not self._console.is_terminal,
        )
        with (self.path / "metrics.jsonl").open("w") as self._file, progress as self._progress:
            self._bar = progress.add_task(self._name, total=total, figures="compiling")
            self._total = total
            yield

    def write(self, line: dict[str, Any]) -> None:
        """Adds a line to `metrics.jsonl`, which can be read at once."""
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def show(self, step: int, figures: str) -> None:
        """Says how far the run is."""
        self._progress.update(self._bar, completed=step, figures=figures)
        if not self._console.is_terminal:
            print(f"{self._name} {step}/{self._total}  {figures}", flush=True)
