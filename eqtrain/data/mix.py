"""Several sources in fixed proportions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from .digest import digest
from .plan import AbstractPlan, Drawn, Order, RowPlan
from .schedule import SMALLEST, Schedule
from .source import AbstractReader, Example, Source, Weight, plain_reader

Weights = Mapping[str, float | int] | Callable[[int], Mapping[str, float | int]]


class MixturePlan(AbstractPlan):
    """Steps of examples that several sources give in turn, each going through its own rows."""

    def __init__(
        self,
        num_rows: list[int],
        epoch_size: int,
        weights: Callable[[int], list[float]],
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop: bool,
    ) -> None:
        steps = RowPlan(epoch_size, batch_size, seed, shuffle, drop)
        self.batch_size = batch_size
        self.steps_per_epoch = steps.steps_per_epoch
        self.examples_per_epoch = steps.examples_per_epoch
        # The next epoch goes on with the rows that this one has no batch for.
        self.dropped_per_epoch = 0
        self._num_rows = num_rows
        self._first_rows = np.cumsum([0, *num_rows[:-1]])
        self._weights = weights
        self._seed = seed
        self._orders = [
            Order(rows, seed, shuffle, 1 + source) for source, rows in enumerate(num_rows)
        ]
        # What the sources gave before each epoch, as far as that was asked for.
        self._given = [np.zeros(len(num_rows), np.int64)]

    def draw(self, epoch: int, step: int) -> Drawn:
        places = np.arange(self.examples_before(step), self.examples_before(step + 1))
        sources, before = self._schedule(epoch)(places)
        rows, visits = np.empty_like(places), np.empty_like(places)
        given = self._given_before(epoch)
        for source in np.unique(sources).tolist():
            at = np.flatnonzero(sources == source)
            # Consecutive, since a source's examples are counted one by one.
            first = int(given[source] + before[at[0]])
            rows[at], visits[at] = self._visit(source, first, first + len(at))
        return Drawn(rows, visits)

    def _visit(self, source: int, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that are a source's examples `first` to `stop`, and the visits these are in."""
        size = self._num_rows[source]
        rows, visits = [], []
        for visit in range(first // size, (stop - 1) // size + 1):
            begin, end = max(first - visit * size, 0), min(stop - visit * size, size)
            rows.append(self._first_rows[source] + self._orders[source](visit, begin, end))
            visits.append(np.full(end - begin, visit))
        return np.concatenate(rows), np.concatenate(visits)

    def _schedule(self, epoch: int) -> Schedule:
        return Schedule(self._weights(epoch), self._seed, epoch)

    def _given_before(self, epoch: int) -> Int[np.ndarray, " sources"]:
        given = self._given
        while len(given) <= epoch:
            added = self._schedule(len(given) - 1).given(self.examples_per_epoch)
            given = [*given, given[-1] + added]
        self._given = given  # in one assignment, since a thread may read ahead
        return given[epoch]


class Mixture(AbstractReader):
    """Several sources as one; see `mix`."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Weights | None,
        epoch_size: int | None,
    ) -> None:
        if not sources:
            raise ValueError("`mix` takes one source or more. Got none. Name each in a mapping.")
        self.names = tuple(sources)
        self._readers = [plain_reader(source, "mix") for source in sources.values()]
        self._ends = np.cumsum([len(each) for each in self._readers])
        by_size = dict(zip(sources, map(len, self._readers), strict=True))
        self._weights = by_size if weights is None else weights
        self._epoch_size = len(self) if epoch_size is None else operator.index(epoch_size)
        if self._epoch_size < 1:
            raise ValueError(
                f"`epoch_size` must be 1 or more. Got {epoch_size}. Leave it out for all rows."
            )
        self.weights(0)  # which raises for what are no weights

    def __len__(self) -> int:
        return int(self._ends[-1])

    def weights(self, epoch: int) -> list[float]:
        """What each source is weighted with in an epoch. **Raises:** see `mix`."""
        found = self._weights(epoch) if callable(self._weights) else self._weights
        if set(found) != set(self.names):
            raise ValueError(
                f"`weights` must have one for each source: {', '.join(map(repr, self.names))}. "
                f"Got {', '.join(map(repr, found))} in epoch {epoch}. A weight of 0 leaves one out."
            )
        values = [float(found[name]) for name in self.names]
        if not all(math.isfinite(value) and value >= 0 for value in values) or not sum(values):
            raise ValueError(
                "`weights` must be numbers of 0 or more, and not all of them 0. "
                f"Got {dict(found)} in epoch {epoch}. They need not add up to 1."
            )
        least = min(value for value in values if value)
        if least * SMALLEST < math.fsum(values):
            raise ValueError(
                f"A weight that is not 0 must be a part in {SMALLEST} of all of them, or more. "
                f"Got {least} of {math.fsum(values)} in epoch {epoch}. Use 0 to leave a source out."
            )
        return values

    def _later_weights(self) -> list[float]:
        """Those of the second epoch, which a loader of one epoch may have none for."""
        try:
            return self.weights(1)
        except Exception:  # raised where that epoch is read
            return self.weights(0)

    def locate(self, rows: Int[np.ndarray, " rows"]) -> tuple[np.ndarray, np.ndarray]:
        """The source that each row is in, as a place in `names`, and which of its rows it is."""
        sources = np.searchsorted(self._ends, rows, "right")
        return sources, rows - np.r_[0, self._ends][sources]

    def examples(self, rows: Int[np.ndarray, " rows"]) -> list[Example]:
        sources, own = self.locate(rows)
        found: list[Any] = [None] * len(rows)
        for source in np.unique(sources).tolist():
            at = np.flatnonzero(sources == source)
            for place, example in zip(
                at.tolist(), self._readers[source].examples(own[at]), strict=True
            ):
                found[place] = example
        return found

    def read(self, rows: Int[np.ndarray, " rows"], weight: Weight) -> dict[str, np.ndarray]:
        sources, own = self.locate(rows)
        places = {source: np.flatnonzero(sources == source) for source in np.unique(sources)}
        parts = {
            self.names[source]: self._readers[source].read(own[at], weight[at])
            for source, at in places.items()
        }
        _check_same(parts)
        first = next(iter(parts.values()))
        batch = {
            name: np.empty((len(rows), *array.shape[1:]), array.dtype)
            for name, array in first.items()
        }
        for at, part in zip(places.values(), parts.values(), strict=True):
            for name, array in part.items():
                batch[name][at] = array
        return batch

    def plan(self, batch_size: int, seed: int, shuffle: bool, drop: bool) -> AbstractPlan:
        num_rows = [len(each) for each in self._readers]
        return MixturePlan(
            num_rows, self._epoch_size, self.weights, batch_size, seed, shuffle, drop
        )

    def settings(self) -> dict[str, int]:
        text = repr((self.names, self.weights(0), self._later_weights())).encode()
        own = [each.settings() for each in self._readers]
        named = zip(self.names, own, strict=True)
        return {
            "the size of an epoch": self._epoch_size,
            "the names and weights of the sources": digest(text),
            **{f"{what} of {name!r}": x for name, each in named for what, x in each.items()},
        }


def _check_same(parts: dict[str, dict[str, np.ndarray]]) -> None:
    kinds = {
        source: {name: (array.shape[1:], str(array.dtype)) for name, array in part.items()}
        for source, part in parts.items()
    }
    first, *others = kinds
    for source in others:
        if kinds[source] != kinds[first]:
            raise ValueError(
                "All sources of a mixture must have the same names, shapes and dtypes. "
                f"Got {kinds[first]} from {first!r} and {kinds[source]} from {source!r}. "
                "Convert one of them."
            )


def mix(
    sources: Mapping[str, Source],
    weights: Weights | None = None,
    *,
    epoch_size: int | None = None,
) -> Mixture:
    """Mixes several sources in fixed proportions, for a `Loader`.

    Which source and which row is example i is a pure function of the seed and i. Proportions hold
    over any stretch of an epoch, and so in each batch: of two sources, the number of examples of
    each is off by less than one, and of n sources by less than one for each time n is halved.

    Each source goes through all its rows before any of them comes again, in another order each
    time, whatever epoch the mixture is in.

    **Arguments:**

    - `sources`: each by its name; mappings of arrays, rows, or what `pack` makes of them.
    - `weights`: a number for each name, 0 or more; or a function of the epoch that returns them. By
        default how many rows each has.
    - `epoch_size`: how many examples are an epoch of the loader. By default as many as all rows.

    **Returns:** a source for a `Loader`. Its `locate` tells the source of each of `loader.rows(n)`.

    **Raises:** `ValueError` for weights that are none, and for sources that differ in their names,
    shapes or dtypes.

    ```python
    >>> sources = {"a": {"x": np.arange(100)}, "b": {"x": -np.arange(100)}}
    >>> mixture = et.data.mix(sources, {"a": 3, "b": 1})
    >>> loader = et.data.Loader(mixture, batch_size=8, shuffle=False)
    >>> loader.batch(0)["x"].tolist()
    [0, 0, 1, 2, -1, 3, 4, 5]

    ```
    """
    return Mixture(sources, weights, epoch_size)
