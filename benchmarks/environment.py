"""What a benchmark runs on, as its JSON line says."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("eqtrain", "jax", "jaxlib", "equinox", "optax", "numpy", "torch", "scikit-learn")


def environment() -> dict[str, Any]:
    """Hardware, versions, command and commit."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join(["python", *map(_relative, sys.argv)]),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions,
    }


def make_cpu_devices(count: int) -> None:
    """Makes `count` devices of the CPU, before JAX uses its first one, and threads for them.

    See `et.mesh` on why there must be more threads than devices.
    """
    os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _relative(argument: str) -> str:
    path = Path(argument)
    root = Path(__file__).resolve().parent.parent
    return str(path.resolve().relative_to(root)) if path.suffix == ".py" else argument


def _commit() -> str | None:
    """The commit, with a + if files differ from it."""
    root = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
