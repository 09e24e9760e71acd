"""Child processes that answer requests, a JSON line each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class WorkerError(RuntimeError):
    """A child process ended before it answered."""


class Worker:
    """A script of Python in a process of its own, on the CPU, whose errors go to `log`."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]):
        self.log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            )

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # gloo greets there too
                return json.loads(line)
        raise WorkerError(f"A worker ended: {self.log.read_text()[-2000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
