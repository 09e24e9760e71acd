"""Which rows form which step of which epoch: pure functions, that a `Loader` makes batches from."""

from __future__ import annotations

import abc
import bisect
import dataclasses

import numpy as np
from jaxtyping import Int

from .permutation import Permutation

# Orders are computed so many places at a time, and the last block is kept: one row costs as much as
# a hundred.
_BLOCK = 2**14


class Order:
    """The order of `num_rows` rows in each epoch, in memory that does not grow with their number.

    Read by several threads: what is kept is replaced in one assignment.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool, stream: int = 0) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._stream = stream
        self._shuffle = shuffle
        self._kept = (-1, -1, np.arange(0))  # an epoch, a block of it, and its rows

    def __call__(self, epoch: int, first: int, stop: int) -> Int[np.ndarray, " places"]:
        """The rows at places `first` to `stop`."""
        if not self._shuffle:
            return np.arange(first, stop)
        blocks = range(first // _BLOCK, (stop - 1) // _BLOCK + 1)
        rows = np.concatenate([self._block(epoch, block) for block in blocks])
        return rows[first - blocks.start * _BLOCK : stop - blocks.start * _BLOCK]

    def _block(self, epoch: int, block: int) -> Int[np.ndarray, " places"]:
        kept_epoch, kept_block, rows = self._kept
        if (kept_epoch, kept_block) != (epoch, block):
            places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._num_rows))
            rows = Permutation(self._num_rows, self._seed, epoch, self._stream)(places)
            self._kept = (epoch, block, rows)
        return rows


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Rows of a global batch, and how often each has come before.

    That is the epoch, unless rows of a mixture come several times in one.
    """

    rows: Int[np.ndarray, " rows"]
    visits: Int[np.ndarray, " rows"]

    def __getitem__(self, part: slice) -> Drawn:
        return Drawn(self.rows[part], self.visits[part])

    def resized(self, size: int) -> Drawn:
        """So many rows, by repeating them from the front."""
        if len(self.rows) == size:
            return self
        return Drawn(np.resize(self.rows, size), np.resize(self.visits, size))


class AbstractPlan(abc.ABC):
    """Divides the rows of an epoch into steps. All epochs have as many steps and examples.

    Batches are full, but for the last ones of an epoch.
    """

    batch_size: int
    steps_per_epoch: int
    examples_per_epoch: int
    dropped_per_epoch: int

    @abc.abstractmethod
    def draw(self, epoch: int, step: int) -> Drawn:
        """The rows that count in this step's global batch."""

    def examples_before(self, step: int) -> int:
        """The examples of an epoch that come before this step."""
        return min(step * self.batch_size, self.examples_per_epoch)

    def step_of(self, examples: int) -> int:
        """The last step that so many examples of an epoch, or fewer, come before."""
        return bisect.bisect(range(self.steps_per_epoch), examples, key=self.examples_before) - 1

    def count(self, step: int) -> int:
        """The number of rows that count in this step's global batch."""
        return self.examples_before(step + 1) - self.examples_before(step)


class RowPlan(AbstractPlan):
    """Steps of `batch_size` rows from an order; only the last can be short."""

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, shuffle: bool, drop: bool
    ) -> None:
        self.batch_size = batch_size
        self.dropped_per_epoch = num_rows % batch_size if drop else 0
        self.examples_per_epoch = num_rows - self.dropped_per_epoch
        self.steps_per_epoch = -(-self.examples_per_epoch // batch_size)
        self._order = Order(num_rows, seed, shuffle)

    def draw(self, epoch: int, step: int) -> Drawn:
        rows = self._order(epoch, self.examples_before(step), self.examples_before(step + 1))
        return Drawn(rows, np.full(rows.shape, epoch))
