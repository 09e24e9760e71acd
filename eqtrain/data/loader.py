"""A loader whose state is one integer.

Which rows form global batch n is a pure function of the seed and n. So a run resumes at any position
without replaying what came before, every process can tell its own rows from all others', and neither
prefetching nor the number of processes can change, repeat or lose a row.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Float, Int


class RowSource(Protocol):
    """Random access to rows, each a mapping from names to arrays or numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Batches(Iterator[dict[str, np.ndarray]]):
    """The batches of a loader from some position on; see `Loader.iterate`."""

    def __init__(self, loader: Loader, start: int) -> None:
        self._loader = loader
        self._next = loader._batches_before(start)

    @property
    def position(self) -> int:
        """The number of examples that have been handed out, from the start of the first epoch."""
        return self._loader._examples_before(self._next)

    def __next__(self) -> dict[str, np.ndarray]:
        if self._loader._ends_at(self._next):
            raise StopIteration
        batch = self._loader.batch(self._next)
        self._next += 1
        return batch


class Loader:
    """Batches of a random-access source, shuffled anew in every epoch.

    All batches have the same shape, so a step compiles once. With `remainder="pad"` the last batch
    of an epoch is filled up with rows that it holds already, and every batch carries a `weight` of
    1 for each row that counts and 0 for padding: `et.mean(loss, where=batch["weight"])`. With
    `remainder="drop"` what does not fill a batch is left out, other rows each epoch if shuffled.

    The position is the number of examples handed out, not counting padding. A loop over the loader
    starts at `loader.position` and moves it with each batch, so that saving that number and setting
    it in a new process goes on with the next batch, also through `prefetch`, which moves it when a
    batch is handed out and not when it is read. After a loop that came to the end of the last
    epoch, the next one begins anew. `iterate` reads from anywhere and moves nothing.

    In several processes each reads its own block of the rows of a global batch, in order of the
    process index. A loader made in each of them compares its settings with the others' at once.

    **Arguments:**

    - `source`: a mapping from names to arrays of equal length, in memory or memory-mapped; or
        anything with `__len__` and `__getitem__`, which gives one row as such a mapping.
    - `batch_size`: rows of a *global* batch, over all devices and processes.
    - `seed`: which order. The same number in every process.
    - `shuffle`: with False, rows come in the order of the source.
    - `epochs`: how many times the source is read; None for no end.
    - `remainder`: "pad" or "drop", what happens where an epoch does not divide into batches.
    - `process_index`, `process_count`: which share of the rows is read here; those of JAX by
        default, in which case `jax.distributed.initialize` has to come first.

    **Raises:** `ValueError` for a setting that cannot work; `TypeError` for a source of another
    kind.

    ```python
    >>> loader = et.data.Loader({"x": np.arange(5)}, batch_size=2, shuffle=False, epochs=1)
    >>> [(batch["x"].tolist(), batch["weight"].tolist()) for batch in loader]
    [([0, 1], [1.0, 1.0]), ([2, 3], [1.0, 1.0]), ([4, 4], [1.0, 0.0])]

    ```
    """

    def __init__(
        self,
        source: Mapping[str, Any] | RowSource,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        remainder: str = "pad",
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> None:
        if (process_index is None) != (process_count is None):
            raise ValueError(
                "`process_index` and `process_count` belong together. "
                f"Got process_index={process_index} and process_count={process_count}. "
                "Give both, or neither."
            )
        alone = process_count is not None
        self.process_index = jax.process_index() if process_index is None else process_index
        self.process_count = jax.process_count() if process_count is None else process_count
        if remainder not in ("pad", "drop"):
            raise ValueError(f'`remainder` must be "pad" or "drop". Got {remainder!r}. Use "pad".')
        self.remainder = remainder
        self.source = _checked_source(source, remainder)
        self.num_rows = (
            len(next(iter(self.source.values()))) if _is_mapping(source) else len(source)
        )
        self.batch_size = _whole("batch_size", batch_size, 1)
        self.seed = _whole("seed", seed, 0, 2**63)
        self.shuffle = shuffle
        self.epochs = None if epochs is None else _whole("epochs", epochs, 1)
        self._check_sizes()
        if not alone and self.process_count > 1:
            self._compare_processes()
        self._order = (-1, np.arange(0))  # the epoch whose order is kept, and that order
        self._finished = False
        self._position = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (1 if rest and self.remainder == "pad" else 0)

    @property
    def examples_per_epoch(self) -> int:
        """Rows that count in one epoch."""
        return self.num_rows - self.dropped_per_epoch

    @property
    def dropped_per_epoch(self) -> int:
        """Rows left out in each epoch, which is 0 unless `remainder="drop"`."""
        return self.num_rows % self.batch_size if self.remainder == "drop" else 0

    @property
    def position(self) -> int:
        """Where a loop over the loader stands: the examples it has handed out, without padding."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self._batches_before(position)  # which raises where no batch begins
        self._position = operator.index(position)
        self._finished = False

    def __len__(self) -> int:
        """The number of batches in all epochs. **Raises:** `TypeError` if there is no end."""
        if self.epochs is None:
            raise TypeError(
                "A loader without end has no length. Got epochs=None. "
                "Use `loader.steps_per_epoch`, or set `epochs`."
            )
        return self.epochs * self.steps_per_epoch

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Iterates from `position` on, and moves it as batches are handed out."""
        batches = self.iterate(self._begin())
        for batch in batches:
            self._position = batches.position
            yield batch
        self._finished = True

    def iterate(self, start: int = 0) -> Batches:
        """The batches from a position on. It moves no position but its own.

        **Raises:** `ValueError` if no batch begins at `start`, as after a change of the batch size.
        """
        return Batches(self, start)

    def rows(self, n: int) -> Int[np.ndarray, " batch"]:
        """The rows of the source that form global batch n, those of all processes, with padding."""
        epoch, step = divmod(n, self.steps_per_epoch)
        first = step * self.batch_size
        real = self._epoch_order(epoch)[first : first + self.batch_size]
        return np.resize(real, self.batch_size)  # repeats from the front

    def weight(self, n: int) -> Float[np.ndarray, " batch"]:
        """What the rows of global batch n count for: 1, or 0 for padding."""
        first = n % self.steps_per_epoch * self.batch_size
        return (np.arange(first, first + self.batch_size) < self.num_rows).astype(np.float32)

    def batch(self, n: int) -> dict[str, np.ndarray]:
        """This process's share of global batch n."""
        local = self.batch_size // self.process_count
        share = slice(self.process_index * local, (self.process_index + 1) * local)
        rows = self.rows(n)[share]
        if _is_mapping(self.source):
            batch = {name: np.asarray(array[rows]) for name, array in self.source.items()}
        else:
            batch = _stack([_read_row(self.source, int(row), self.remainder) for row in rows], rows)
        if self.remainder == "pad":
            batch["weight"] = self.weight(n)[share]
        return batch

    def _begin(self) -> int:
        """Where the next loop starts."""
        if self._finished:
            self.position = 0
        return self._position

    def _epoch_order(self, epoch: int) -> Int[np.ndarray, " rows"]:
        if not self.shuffle:
            return np.arange(self.num_rows)
        kept, order = self._order
        if kept != epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
            self._order = (epoch, order)  # one assignment, for a reading thread
        return order

    def _ends_at(self, n: int) -> bool:
        return self.epochs is not None and n >= self.epochs * self.steps_per_epoch

    def _examples_before(self, n: int) -> int:
        epochs, steps = divmod(n, self.steps_per_epoch)
        return epochs * self.examples_per_epoch + steps * self.batch_size

    def _batches_before(self, position: int) -> int:
        position = _whole("position", position, 0)
        epochs, examples = divmod(position, self.examples_per_epoch)
        steps, rest = divmod(examples, self.batch_size)
        if rest:
            raise ValueError(
                "A position must be one at which a batch begins. "
                f"Got {position}, which is {examples} examples into an epoch of "
                f"{self.examples_per_epoch}, with batch_size={self.batch_size}. "
                f"Use {position - rest}, or the batch size with which the position was saved."
            )
        if self._ends_at(epochs * self.steps_per_epoch + steps) and (
            position > self.epochs * self.examples_per_epoch
        ):
            raise ValueError(
                "A position must not lie behind the end. "
                f"Got {position}, with {self.epochs} epochs of {self.examples_per_epoch} examples. "
                "Set more `epochs`, or go back to an earlier position."
            )
        return epochs * self.steps_per_epoch + steps

    def _check_sizes(self) -> None:
        if self.num_rows == 0:
            raise ValueError("A source must have rows. Got 0. Check where it was read from.")
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                "`process_index` must count from 0 and be below `process_count`. "
                f"Got process_index={self.process_index} and process_count={self.process_count}. "
                "Pass those of JAX, or leave both out."
            )
        if self.batch_size % self.process_count:
            raise ValueError(
                "`batch_size` is that of the global batch, which the processes share evenly. "
                f"Got batch_size={self.batch_size} for {self.process_count} processes. "
                f"Use a multiple of {self.process_count}."
            )
        if self.steps_per_epoch == 0:
            raise ValueError(
                'An epoch must have one batch at least, and with remainder="drop" it has none. '
                f"Got {self.num_rows} rows and batch_size={self.batch_size}. "
                'Use a smaller batch, or remainder="pad".'
            )

    def _compare_processes(self) -> None:
        """Finds processes that would read rows in another order, or stop at another step.

        A collective of all processes: one that never makes its loader is waited for.
        """
        from jax.experimental import multihost_utils

        settings = {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "the number of rows": self.num_rows,
            "epochs": self.epochs or 0,
            "shuffle": int(self.shuffle),
            "remainder": int(self.remainder == "pad"),
        }
        # As halves, since JAX narrows 64-bit integers.
        halves = [[value >> 32, value & 0xFFFFFFFF] for value in settings.values()]
        everywhere = multihost_utils.process_allgather(np.array(halves, np.uint32))
        for i, name in enumerate(settings):
            values = [int(high) << 32 | int(low) for high, low in everywhere[:, i]]
            if len(set(values)) > 1:
                raise ValueError(
                    "A loader must be made with the same settings in every process. "
                    f"Got {name} of {values}, one a process. Set them from the same configuration."
                )


def _is_mapping(source: Any) -> bool:
    return isinstance(source, Mapping)


def _whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    number = operator.index(value)
    if number < low or (high is not None and number >= high):
        raise ValueError(
            f"`{name}` must be {low} or more{'' if high is None else f', and below {high}'}. "
            f"Got {number}."
        )
    return number


def _checked_source(source: Any, remainder: str) -> Any:
    if not _is_mapping(source):
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise TypeError(
                "A source must be a mapping from names to arrays, or have `__len__` and "
                f"`__getitem__`. Got {type(source).__name__}. Wrap it in a class that has both."
            )
        return source
    if not source:
        raise ValueError("A source must have arrays. Got an empty mapping. Name one at least.")
    _check_no_weight(source, remainder)
    arrays = {}
    for name, array in source.items():
        if not isinstance(array, np.ndarray | jax.Array):
            raise TypeError(
                "The values of a mapping must be arrays of NumPy or JAX. "
                f"Got {type(array).__name__} as {name!r}. "
                "Use `np.asarray`, or a class with `__len__` and `__getitem__` that reads a row."
            )
        if array.ndim == 0:
            raise ValueError(
                "The arrays of a source must have one row an example. "
                f"Got a scalar as {name!r}. Add it to the batch in the loop instead."
            )
        # Only JAX's arrays are converted: a memory-mapped file must stay one.
        arrays[name] = array if isinstance(array, np.ndarray) else np.asarray(array)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name!r} with {length}" for name, length in lengths.items())
        raise ValueError(
            "The arrays of a source must have equally many rows. "
            f"Got {found}. Cut them to the same examples."
        )
    return arrays


def _check_no_weight(names: Any, remainder: str) -> None:
    if remainder == "pad" and "weight" in names:
        raise ValueError(
            "The loader adds a `weight`, 0 on padding, to each batch. "
            "Got a source that has a `weight` of its own. "
            'Rename that, and multiply the two in the loss; or use remainder="drop".'
        )


def _read_row(source: RowSource, row: int, remainder: str) -> Mapping[str, Any]:
    try:
        values = source[row]
    except StopIteration as error:
        # It would look like the end of the data.
        raise RuntimeError(f"The source raised StopIteration for row {row}.") from error
    if not _is_mapping(values):
        raise TypeError(
            "A row of a source must be a mapping from names to arrays. "
            f"Got {type(values).__name__} for row {row}. Return a dict."
        )
    _check_no_weight(values, remainder)
    return values


def _stack(
    values: list[Mapping[str, Any]], rows: Int[np.ndarray, " rows"]
) -> dict[str, np.ndarray]:
    """Stacks rows by name."""
    kinds = [{name: np.shape(value) for name, value in row.items()} for row in values]
    for row, kind in zip(rows, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                "All rows of a source must have the same names and shapes. "
                f"Got {kinds[0]} for row {rows[0]} and {kind} for row {row}. "
                "Pad them to one shape, and mark the padding in an array of its own."
            )
    return {name: np.stack([np.asarray(row[name]) for row in values]) for name in kinds[0]}
