"""Several batches as one, for a step that is repeated in one call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .resumable import Resumable, close_if_needed, loop
from .share import Share


class Stacked(Iterator[PyTree]):
    """Stacks of batches, with the position behind the last of them."""

    def __init__(self, batches: Iterator[PyTree], num_batches: int) -> None:
        self._batches = batches
        self._num_batches = num_batches

    @property
    def position(self) -> Any:
        return getattr(self._batches, "position", None)

    @property
    def share(self) -> Share | None:
        return _share_of_stacks(self._batches)

    def __next__(self) -> PyTree:
        group = list(itertools.islice(self._batches, self._num_batches))
        if not group:
            raise StopIteration
        if len(group) < self._num_batches:
            raise ValueError(
                f"`stack` takes a number of batches that {self._num_batches} divides. "
                f"Got {len(group)} left over at the end. Choose `epochs` or `num_batches` so that "
                "they come out even."
            )
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *group)

    def close(self) -> None:
        """Closes the iterator over batches."""
        close_if_needed(self._batches)


class ResumableStacks:
    """Stacks from a loader, which a loop and `prefetch` move as they would the loader itself."""

    def __init__(self, batches: Resumable, num_batches: int) -> None:
        self._batches = batches
        self._num_batches = num_batches

    @property
    def position(self) -> int:
        return self._batches.position

    @property
    def share(self) -> Share | None:
        return _share_of_stacks(self._batches)

    def begin(self) -> Stacked:
        return Stacked(self._batches.begin(), self._num_batches)

    def handed_out(self, position: int) -> None:
        self._batches.handed_out(position)

    def finish(self) -> None:
        self._batches.finish()

    def __iter__(self) -> Iterator[PyTree]:
        return loop(self)


def _share_of_stacks(batches: Any) -> Share | None:
    """That of the batches, whose rows are along the dim after that of the stack."""
    share = getattr(batches, "share", None)
    return None if share is None else dataclasses.replace(share, dim=share.dim + 1)


def stack(batches: Iterable[PyTree], num_batches: int) -> Iterable[PyTree]:
    """Stacks every `num_batches` batches along a new leading dim, as `et.repeat` takes them.

    The position of a `Loader` moves as stacks are handed out, also through `prefetch`.

    **Raises:** `ValueError` at the end if the batches do not come out even: what is left over would
    be trained on by no step. Choose `epochs` so that they do.

    ```python
    >>> [stacked["x"].tolist() for stacked in et.data.stack([{"x": np.ones(1)}] * 4, 2)]
    [[[1.0], [1.0]], [[1.0], [1.0]]]

    ```
    """
    if num_batches < 1:
        raise ValueError(f"`stack` joins 1 batch or more. Got {num_batches}. Use that of `repeat`.")
    if isinstance(batches, Resumable):
        return ResumableStacks(batches, num_batches)
    return Stacked(iter(batches), num_batches)
