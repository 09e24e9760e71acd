"""Which lines of the user's code an equation of a jaxpr comes from."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import sysconfig
from typing import Any

# Where a fault is never to be looked for: what draws up the computation for the user.
LIBRARIES = (
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "eqtrain",
    "jaxtyping",
    "beartype",
    "einops",
    "numpy",
    "flax",
    "haiku",
    "chex",
    "wadler_lindig",
)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A call in the user's code. **Fields:** `file`, `line` and `function`."""

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The text of the line, empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def user_frames(eqn: Any) -> tuple[Frame, ...]:
    """The frames of the user's code that made an equation, the innermost first.

    JAX keeps them in `eqn.source_info`, cut off where the surrounding jaxpr was traced, so that an
    equation of a jaxpr from a cache does not point at whoever traced it first. The frames of the
    call around it go behind them: see `join`.
    """
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ()
    return tuple(
        Frame(frame.file_name, frame.line_num, frame.function_name.rsplit(".", 1)[-1])
        for frame in traceback.frames
        if is_user_file(frame.file_name)
    )


def join(inner: tuple[Frame, ...], outer: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of an equation, and behind them those of the call that it is part of.

    Where both are of one line, as in a library's function that is a jaxpr of its own, it counts
    once.
    """
    return inner + outer[1:] if inner[-1:] == outer[:1] else inner + outer


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a file is the user's: neither a library's that is named above, nor Python's own."""
    if file.startswith("<"):  # code made at run time, as by a type checker
        return False
    return not file.startswith(_roots())


@functools.cache
def _roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    packages = [paths["purelib"], paths["platlib"]]
    loaded = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    roots = [os.path.dirname(file) for file in loaded if file]
    roots += [os.path.join(folder, name) for folder in packages for name in LIBRARIES]
    # The standard library's folder holds the installed packages too, and those may be the user's.
    standard = paths["stdlib"]
    roots += [os.path.join(standard, entry) for entry in _modules(standard)]
    return tuple(root if root.endswith(".py") else root + os.sep for root in roots)


def _modules(folder: str) -> list[str]:
    return [entry for entry in os.listdir(folder) if entry != "site-packages"]
