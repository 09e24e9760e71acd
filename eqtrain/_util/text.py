"""Text for messages: code as a user writes it, kinds of arrays, tables, and lists cut short."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
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


def kind_text(dtype: Any, shape: Sequence[int]) -> str:
    """A dtype and a shape, as in `float32[8,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def some(texts: Sequence[str], most: int = 5, separator: str = "; ") -> str:
    """The first of several texts, and how many more there are."""
    more = f"{separator}and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """The lines of a table whose columns are aligned, those in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
