"""Code as text, as a user writes it."""

from __future__ import annotations

import dataclasses
from typing import Any


class Code(str):
    """Text of code, which stands in other text of code as it is."""

    def __repr__(self) -> str:
        return str(self)


def call(verb: str, *arguments: Any, **settings: Any) -> str:
    """A call of the kit; settings that are None, as by default, are left out.

    ```python
    >>> call("accumulate", 4, order=None)
    'et.accumulate(4)'

    ```
    """
    given = [*map(repr, arguments)]
    given += [f"{name}={value!r}" for name, value in settings.items() if value is not None]
    return f"et.{verb}({', '.join(given)})" if given else f"et.{verb}"


def made_by(settings: Any) -> Code:
    """A dataclass of the kit's as a user makes it: fields with their defaults are left out."""
    given = [
        f"{field.name}={getattr(settings, field.name)!r}"
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    ]
    return Code(f"et.{type(settings).__name__}({', '.join(given)})")


def name_of(function: Any) -> str:
    """What a user calls a function; a lambda has no name."""
    name = getattr(function, "__name__", None) or type(function).__name__
    return "function" if name == "<lambda>" else name
