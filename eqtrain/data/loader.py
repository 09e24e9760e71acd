"""A loader whose state is one integer.

Which rows form global batch n is a pure function of the seed and n. So a run resumes at any
position without replaying what came before, every process can tell its own rows from all others',
and neither threads, prefetching nor the number of processes can change, repeat or lose a row.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, Int

from .example import Augment, Augmentation
from .plan import Drawn
from .resumable import loop
from .share import Share
from .source import Example, Source, reader


class Batches(Iterator[dict[str, np.ndarray]]):
    """The batches of a loader from some position on; see `Loader.iterate`."""

    def __init__(self, loader: Loader, start: int) -> None:
        self._loader = loader
        self._next = loader.batches_before(start)
        self._threads: ThreadPoolExecutor | None = None

    @property
    def position(self) -> int:
        """The number of examples that have been handed out, from the start of the first epoch."""
        return self._loader.examples_before(self._next)

    @property
    def share(self) -> Share:
        """The share of the loader."""
        return self._loader.share

    def __next__(self) -> dict[str, np.ndarray]:
        loader = self._loader
        if loader.epochs is not None and self._next >= len(loader):
            self.close()
            raise StopIteration
        if loader.num_threads and self._threads is None:
            self._threads = ThreadPoolExecutor(loader.num_threads, "eqtrain-reader")
        batch = loader.batch(self._next, self._threads)
        self._next += 1
        return batch

    def close(self) -> None:
        """Ends the threads that read rows, where there are any; they start again when needed."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None


class Loader:
    """Batches of a random-access source, in another order each epoch.

    All batches have the same shape, so a step compiles once. With `remainder="pad"` the last batch
    of an epoch is filled up with rows that it holds already, and every batch carries a `weight` of
    1 for each row that counts and 0 for padding: `et.mean(loss, where=batch["weight"])`. With
    `remainder="drop"` what does not fill a batch is left out, other rows each epoch if shuffled.

    The position is the number of examples handed out, not counting padding. A loop over the loader
    starts at `loader.position` and moves it with each batch. So that number, saved and then set in
    a new process, goes on with the next batch; also through `prefetch`, which moves it when a batch
    is handed out and not when it is read. `loader.iterate(start)` moves nothing.

    A loop after the end begins anew if the order is that of the source. A shuffled one would repeat
    the orders it had, so that is an error: set `epochs` to all that are to be read.

    In several processes each reads its own block of the rows of a global batch, in order of the
    process index. They compare the settings of their loaders when these are made.

    **Arguments:**

    - `source`: a mapping from names to arrays of equal length, in memory or memory-mapped; or
        anything with `__len__` and `__getitem__`, which gives one row as such a mapping; or what
        `bucket`, `pack` and `mix` make of sources.
    - `batch_size`: rows of a *global* batch, over all devices and processes.
    - `seed`: which orders, and what `augment` draws. The same number in every process.
    - `shuffle`: with False, rows come in the order of the source.
    - `epochs`: how many times the source is read; None for no end.
    - `remainder`: "pad" or "drop", what happens where an epoch does not divide into batches.
    - `augment`: a function `(example, rng) -> example`, applied to each row that is read; it may
        change the example in place. What its `np.random.Generator` draws is decided by the seed,
        the row and the epoch alone.
    - `num_threads`: how many threads share the rows of a batch, for a source or an `augment` that
        waits, or computes without Python's lock. With 0, the thread that asks for a batch reads it.
    - `process_index`, `process_count`: which share of the rows is read here. By default JAX's, in
        which case `jax.distributed.initialize` has to come first, and all processes have to make
        their loaders.

    **Raises:** `ValueError` for settings that cannot work; `TypeError` for what is no source.

    ```python
    >>> loader = et.data.Loader({"x": np.arange(5)}, batch_size=2, shuffle=False, epochs=1)
    >>> [(batch["x"].tolist(), batch["weight"].tolist()) for batch in loader]
    [([0, 1], [1.0, 1.0]), ([2, 3], [1.0, 1.0]), ([4, 4], [1.0, 0.0])]

    ```
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        remainder: Literal["pad", "drop"] = "pad",
        augment: Augment | None = None,
        num_threads: int = 0,
        process_index: int | None = None,
        process_count: int | None = None,
    ) -> None:
        if remainder not in ("pad", "drop"):
            raise ValueError(f'`remainder` must be "pad" or "drop". Got {remainder!r}. Use "pad".')
        if (process_index is None) != (process_count is None):
            raise ValueError(
                "`process_index` and `process_count` belong together. "
                f"Got process_index={process_index} and process_count={process_count}. "
                "Give both, or neither."
            )
        self.remainder = remainder
        self.shuffle = shuffle
        self.batch_size = _whole("batch_size", batch_size, 1)
        self.seed = _whole("seed", seed, 0)
        self.epochs = None if epochs is None else _whole("epochs", epochs, 1)
        self.num_threads = _whole("num_threads", num_threads, 0)
        self.process_index = jax.process_index() if process_index is None else process_index
        self.process_count = jax.process_count() if process_count is None else process_count
        if isinstance(source, Mapping):
            self._check_no_weight(source)
        self._reader = reader(source)
        self.num_rows = len(self._reader)
        self._augmentation = None if augment is None else Augmentation(augment, self.seed)
        drop = self.remainder == "drop"
        self._plan = self._reader.plan(self.batch_size, self.seed, self.shuffle, drop)
        self._check_sizes()
        if process_count is None and self.process_count > 1:
            self._compare_processes()
        self._position = 0
        self._finished = False  # by a loop that came to the end

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return self._plan.steps_per_epoch

    @property
    def examples_per_epoch(self) -> int:
        """Rows that count in one epoch."""
        return self._plan.examples_per_epoch

    @property
    def dropped_per_epoch(self) -> int:
        """Rows left out in each epoch, which is 0 unless `remainder="drop"`."""
        return self._plan.dropped_per_epoch

    @property
    def order(self) -> dict[str, Any]:
        """The settings that decide which rows form a batch. A position is one of this order."""
        order: dict[str, Any] = {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_rows": self.num_rows,
            "remainder": self.remainder,
            **self._reader.settings(),
        }
        if self._reader.order_depends_on_batch_size or self.remainder == "drop":
            order["batch_size"] = self.batch_size
        return order

    @property
    def share(self) -> Share:
        """Which rows of each global batch are read here."""
        return Share(self.process_index, self.process_count)

    def __len__(self) -> int:
        """The number of batches in all epochs. **Raises:** `TypeError` if there is no end."""
        if self.epochs is None:
            raise TypeError(
                "A loader without end has no length. Got epochs=None. "
                "Use `loader.steps_per_epoch`, or set `epochs`."
            )
        return self.epochs * self.steps_per_epoch

    def rows(self, n: int) -> Int[np.ndarray, " batch"]:
        """The rows of the source that form global batch n, with padding, for all processes."""
        return self._draw(n).rows

    def weight(self, n: int) -> Float[np.ndarray, " batch"]:
        """What the rows of global batch n count for: 1, or 0 for padding."""
        count = self._plan.count(_whole("n", n, 0) % self.steps_per_epoch)
        return (np.arange(self.batch_size) < count).astype(np.float32)

    def batch(self, n: int, threads: Executor | None = None) -> dict[str, np.ndarray]:
        """This process's share of global batch n, whose rows are read by `threads` if given."""
        local = self.batch_size // self.process_count
        share = slice(self.process_index * local, (self.process_index + 1) * local)
        drawn, weight = self._draw(n)[share], self.weight(n)[share]
        if threads is None and self._augmentation is None:
            batch = self._reader.read(drawn.rows, weight)
        else:
            batch = self._reader.collate(self._examples(drawn, threads), drawn.rows, weight)
        self._check_no_weight(batch)
        if self.remainder == "pad":
            batch["weight"] = weight
        return batch

    def iterate(self, start: int = 0) -> Batches:
        """The batches from a position on. It moves its own position, and not the loader's.

        **Raises:** `ValueError` if no batch begins at `start`.
        """
        return Batches(self, start)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches from `position` on, which moves as they are handed out."""
        return loop(self)

    @property
    def position(self) -> int:
        """Where loops over the loader stand: the examples handed out, without padding."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self.batches_before(position)  # which raises where no batch begins
        self.handed_out(position)

    # What a loop over the loader consists of, here and in `prefetch`.

    def begin(self) -> Batches:
        """Starts a loop at `position`, or anew after the end. **Raises:** see `Loader`."""
        if self._finished and self.shuffle:
            raise RuntimeError(
                "A shuffled loader that came to its end would repeat the orders that it had. "
                f"Got a loop after epochs={self.epochs}. Set `epochs` to all that are to be read, "
                "or use `loader.iterate()` for the same batches again."
            )
        if self._finished:
            self.position = 0
        return self.iterate(self._position)

    def handed_out(self, position: int) -> None:
        """Moves `position`."""
        self._position = position
        self._finished = False

    def finish(self) -> None:
        """Marks that a loop came to the end."""
        self._finished = True

    def batches_before(self, position: int) -> int:
        """The number of the batch that begins at a position. **Raises:** `ValueError` if none."""
        epoch, examples = divmod(_whole("position", position, 0), self.examples_per_epoch)
        step = self._plan.step_of(examples)
        rest = examples - self._plan.examples_before(step)
        n = epoch * self.steps_per_epoch + step
        if rest:
            raise ValueError(
                "A position must be one at which a batch begins. "
                f"Got {position}, which is {examples} examples into an epoch of "
                f"{self.examples_per_epoch}, with batch_size={self.batch_size}. "
                f"Use {position - rest}, or the batch size with which the position was saved."
            )
        if self.epochs is not None and n > len(self):
            raise ValueError(
                "A position must not lie behind the end. "
                f"Got {position}, with {self.epochs} epochs of {self.examples_per_epoch} examples. "
                "Set more `epochs`, or go back to an earlier position."
            )
        return n

    def examples_before(self, n: int) -> int:
        """The position at which batch n begins."""
        epoch, step = divmod(n, self.steps_per_epoch)
        return epoch * self.examples_per_epoch + self._plan.examples_before(step)

    def _draw(self, n: int) -> Drawn:
        """The rows of global batch n, with padding: those that count, repeated from the front."""
        epoch, step = divmod(_whole("n", n, 0), self.steps_per_epoch)
        return self._plan.draw(epoch, step).resized(self.batch_size)

    def _examples(self, drawn: Drawn, threads: Executor | None) -> list[Example]:
        if threads is None:
            return self._read_examples(drawn)
        # Consecutive rows each, which a source that reads many at once has the most of.
        cuts = np.linspace(0, len(drawn.rows), self.num_threads + 1).astype(int).tolist()
        parts = [drawn[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
        read = threads.map(self._read_examples, [part for part in parts if len(part.rows)])
        return [example for part in read for example in part]

    def _read_examples(self, drawn: Drawn) -> list[Example]:
        examples = self._reader.examples(drawn.rows)
        return examples if self._augmentation is None else self._augmentation(examples, drawn)

    def _check_no_weight(self, batch: Mapping[str, Any]) -> None:
        if self.remainder == "pad" and "weight" in batch:
            raise ValueError(
                "The loader adds a `weight`, 0 on padding, to each batch. "
                "Got a source that has a `weight` of its own. "
                'Rename that and multiply the two in the loss, or use remainder="drop".'
            )

    def _check_sizes(self) -> None:
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
        """Finds processes that would read rows in another order, or stop at another step."""
        from .agreement import check_agreement  # needs a module that `import jax` leaves out

        settings = {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "epochs": self.epochs or 0,
            "shuffle": int(self.shuffle),
            "remainder": int(self.remainder == "pad"),
            **self._reader.settings(),
        }
        check_agreement("A loader", settings)


def _whole(name: str, value: Any, low: int) -> int:
    number = operator.index(value)
    # The upper bound is where the comparison of processes ends.
    if not low <= number < 2**128:
        raise ValueError(f"`{name}` must be {low} or more, and below 2**128. Got {number}.")
    return number
