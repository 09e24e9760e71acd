"""Random access to rows: what a `Loader` reads from."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from .plan import AbstractPlan, RowPlan

Example = Mapping[str, Any]
Weight = Float[np.ndarray, " rows"]


@runtime_checkable
class RowSource(Protocol):
    """Anything that gives one row at a time, as a mapping from names to arrays or numbers.

    With `__getitems__` as well, which takes a list of rows and gives a list of mappings, as in a
    data set of Hugging Face or PyTorch, rows are read a batch at a time.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class AbstractReader(abc.ABC):
    """Reads rows of a source by their indices."""

    # Whether rows come in another order in batches of another size.
    order_depends_on_batch_size: ClassVar[bool] = False

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abc.abstractmethod
    def examples(self, rows: Int[np.ndarray, " rows"]) -> list[Example]:
        """These rows, one by one. Called by several threads at once."""

    def collate(
        self, examples: Sequence[Example], rows: Int[np.ndarray, " rows"], weight: Weight
    ) -> dict[str, np.ndarray]:
        """Makes new arrays of examples that were read from these rows."""
        return stack_examples(examples, rows)

    def read(self, rows: Int[np.ndarray, " rows"], weight: Weight) -> dict[str, np.ndarray]:
        """New arrays that hold these rows; those that are padding have a weight of 0."""
        return self.collate(self.examples(rows), rows, weight)

    def plan(self, batch_size: int, seed: int, shuffle: bool, drop: bool) -> AbstractPlan:
        """How the rows come in batches."""
        return RowPlan(len(self), batch_size, seed, shuffle, drop)

    def settings(self) -> dict[str, int]:
        """What has to be the same in all processes and after a restart.

        Whole numbers below 2**128.
        """
        return {"the number of rows": len(self)}


# What the loader and its helpers take.
Source = Mapping[str, Any] | RowSource | AbstractReader


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
                    "Use `np.asarray`, or a list of rows, each of them a mapping."
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

    def examples(self, rows: Int[np.ndarray, " rows"]) -> list[Example]:
        arrays = self._take(rows)
        return [{name: array[i] for name, array in arrays.items()} for i in range(len(rows))]

    def read(self, rows: Int[np.ndarray, " rows"], weight: Weight) -> dict[str, np.ndarray]:
        return self._take(rows)

    def _take(self, rows: Int[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        return {name: np.asarray(array[rows]) for name, array in self._arrays.items()}


class RowReader(AbstractReader):
    """Reads from anything with `__len__` and `__getitem__`."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._read_many = getattr(source, "__getitems__", None)

    def __len__(self) -> int:
        return len(self._source)

    def examples(self, rows: Int[np.ndarray, " rows"]) -> list[Example]:
        found = self._read(rows.tolist())
        for row, example in zip(rows, found, strict=True):
            if not isinstance(example, Mapping):
                raise TypeError(
                    "A row of a source must be a mapping from names to arrays. "
                    f"Got {type(example).__name__} for row {row}. Return a dict."
                )
        return found

    def _read(self, rows: list[int]) -> list[Any]:
        row: Any = rows
        try:
            if self._read_many is not None:
                return list(self._read_many(rows))
            found = []
            for row in rows:
                found.append(self._source[row])
            return found
        except StopIteration as error:
            # Passed on from an iterator, it would look like the end of the data.
            raise RuntimeError(f"The source raised StopIteration for row {row}.") from error


def stack_examples(
    examples: Sequence[Example], rows: Int[np.ndarray, " rows"]
) -> dict[str, np.ndarray]:
    """Stacks examples along a new leading dim. **Raises:** `ValueError` where they differ."""
    arrays = [{name: np.asarray(value) for name, value in row.items()} for row in examples]
    # The dtype of a text says how long it is.
    kinds = [
        {name: (x.shape, "text" if x.dtype.kind in "SU" else x.dtype) for name, x in row.items()}
        for row in arrays
    ]
    for row, found in zip(rows, kinds, strict=True):
        if found != kinds[0]:
            first, other = (
                {name: f"{dtype}{list(shape)}" for name, (shape, dtype) in kind.items()}
                for kind in (kinds[0], found)
            )
            lengths_differ = {n: s for n, (s, _) in found.items()} != {
                n: s for n, (s, _) in kinds[0].items()
            }
            advice = (
                "Use `et.data.bucket` or `et.data.pack` for rows of several lengths."
                if lengths_differ
                else "Convert the values of all rows to one dtype."
            )
            raise ValueError(
                "All rows of a source must have the same names, shapes and dtypes. "
                f"Got {first} for row {rows[0]} and {other} for row {row}. {advice}"
            )
    return {name: np.stack([row[name] for row in arrays]) for name in kinds[0]}


def reader(source: Source) -> AbstractReader:
    """Chooses how a source is read.

    **Raises:** `TypeError` for what is no source; `ValueError` for arrays of unequal length, and
    for a source without rows.
    """
    if isinstance(source, AbstractReader):
        chosen = source
    elif isinstance(source, Mapping):
        chosen = ArrayReader(source)
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


def plain_reader(source: Any, taker: str) -> AbstractReader:
    """As `reader`, for a source without an order of its own, which `taker` would lose."""
    chosen = reader(source)
    if type(chosen).plan is not AbstractReader.plan:
        raise TypeError(
            f"`{taker}` takes sources whose rows can come in any order. "
            f"Got a {type(chosen).__name__}, which has an order of its own. "
            "Give each of its sources to the loader that it is for."
        )
    return chosen
