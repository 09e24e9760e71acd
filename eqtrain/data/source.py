"""Random access to rows: what a `Loader` reads from."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int


@runtime_checkable
class RowSource(Protocol):
    """Anything that gives one row at a time, as a mapping from names to arrays or numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class AbstractReader(abc.ABC):
    """Reads rows of a source by their indices, as one array a name."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abc.abstractmethod
    def read(self, rows: Int[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        """New arrays that hold these rows."""


class ArrayReader(AbstractReader):
    """Reads from a mapping of arrays, in memory or memory-mapped."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        if not source:
            raise ValueError("A source must have arrays. Got an empty mapping. Name one at least.")
        for name, array in source.items():
            if not isinstance(array, np.ndarray | jax.Array):
                raise TypeError(
                    "The values of a mapping must be arrays of NumPy or JAX. "
                    f"Got {type(array).__name__} as {name!r}. "
                    "Use `np.asarray`, or a class whose `__getitem__` reads one row."
                )
            if array.ndim == 0:
                raise ValueError(
                    "The arrays of a source must have one row an example. "
                    f"Got a scalar as {name!r}. Add it to the batch in the loop instead."
                )
        lengths = {name: array.shape[0] for name, array in source.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name!r} with {length}" for name, length in lengths.items())
            raise ValueError(
                "The arrays of a source must have equally many rows. "
                f"Got {found}. Cut them to the same examples."
            )
        # A memory-mapped file is an ndarray, and stays what it is.
        self._arrays = {name: np.asanyarray(array) for name, array in source.items()}
        self._num_rows = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._num_rows

    def read(self, rows: Int[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        return {name: np.asarray(array[rows]) for name, array in self._arrays.items()}


class RowReader(AbstractReader):
    """Reads from anything with `__len__` and `__getitem__`, row by row."""

    def __init__(self, source: RowSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: Int[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        examples = [self._read_row(int(row)) for row in rows]
        shapes = [{name: np.shape(value) for name, value in row.items()} for row in examples]
        for row, found in zip(rows, shapes, strict=True):
            if found != shapes[0]:
                raise ValueError(
                    "All rows of a source must have the same names and shapes. "
                    f"Got {shapes[0]} for row {rows[0]} and {found} for row {row}. "
                    "Pad them to one shape, and mark the padding in an array of its own."
                )
        return {name: np.stack([np.asarray(row[name]) for row in examples]) for name in shapes[0]}

    def _read_row(self, row: int) -> Mapping[str, Any]:
        try:
            example = self._source[row]
        except StopIteration as error:
            # Passed on from an iterator, it would look like the end of the data.
            raise RuntimeError(f"The source raised StopIteration for row {row}.") from error
        if not isinstance(example, Mapping):
            raise TypeError(
                "A row of a source must be a mapping from names to arrays. "
                f"Got {type(example).__name__} for row {row}. Return a dict."
            )
        return example


def reader(source: Mapping[str, Any] | RowSource) -> AbstractReader:
    """Chooses how a source is read.

    **Raises:** `TypeError` for what is no source; `ValueError` for arrays of unequal length, and
    for a source without rows.
    """
    if isinstance(source, Mapping):
        chosen: AbstractReader = ArrayReader(source)
    elif isinstance(source, RowSource):
        chosen = RowReader(source)
    else:
        raise TypeError(
            "A source must be a mapping from names to arrays, or have `__len__` and `__getitem__`. "
            f"Got {type(source).__name__}. Wrap it in a class that has both."
        )
    if len(chosen) == 0:
        raise ValueError("A source must have rows. Got 0. Check where it was read from.")
    return chosen
