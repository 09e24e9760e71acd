"""What `eqtrain` uses beyond its own dependencies: imported where it is used, and versions."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
from typing import Any

# What a step depends on; and what writes its checkpoints and bundles.
_PACKAGES = ("eqtrain", "jax", "jaxlib", "equinox", "optax", "numpy", "orbax-checkpoint")


def extra(module: str, name: str, use: str) -> Any:
    """The module of an extra, imported now.

    **Arguments:** `name` of the extra; `use`, a sentence that says what needs it.

    **Raises:** `ImportError` that names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{use} Got a Python without it. Install the extra: `pip install "eqtrain[{name}]"`.'
        ) from error


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of what is installed of the packages that matter.

    Read once: reading them takes longer than all else that a save does in the loop.
    """
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a checkout, or an extra not installed
            found[name] = "unknown"
    return found
