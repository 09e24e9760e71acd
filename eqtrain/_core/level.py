"""What all levels share: what they were made of, and how that is written."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from .._util.text import name_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Level(ABC):
    """A function of a chain, after one more transform. Two are equal if they are one object.

    **Fields:** `inner` is what the transform was applied to: the level before, or the function that
    a user wrote.
    """

    # How a message names the level, and how far from the loss it is.
    name: ClassVar[str]
    rank: ClassVar[int]

    inner: Any

    @property
    @abstractmethod
    def source(self) -> str | None:
        """The transform as a user writes it; None where the user wrote none."""

    @property
    def chain(self) -> tuple[Level, ...]:
        """The level that each transform gave, from the loss outward."""
        before = self.inner.chain if isinstance(self.inner, Level) else ()
        return before if self.source is None else (*before, self)

    @property
    def function(self) -> Callable[..., Any]:
        """The function that the user wrote, innermost of all."""
        return self.inner.function if isinstance(self.inner, Level) else self.inner

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.inner

    def __repr__(self) -> str:
        sources = [str(level.source) for level in self.chain]
        return pipeline([name_of(self.function), *sources])


def pipeline(parts: list[str]) -> str:
    """A loss and its transforms as the line that joins them."""
    return f"et.pipe({', '.join(parts)})"


def written(chain: tuple[Level, ...]) -> str:
    """A chain as a message quotes it."""
    return f"`{pipeline(['loss', *(str(level.source) for level in chain)])}`"
