"""Batches that other processes read, for transforms in Python that one process is too slow for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._util.extras import extra
from .loader import Loader
from .resumable import loop
from .share import Share


class _BatchSource:
    """The batches of a loader from one on, as a source of Grain's."""

    def __init__(self, loader: Loader, first: int) -> None:
        self._loader = loader
        self._first = first

    def __len__(self) -> int:
        # Grain counts in 64 bits.
        end = sys.maxsize if self._loader.epochs is None else len(self._loader)
        return end - self._first

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return self._loader.batch(self._first + int(index))


class WorkerBatches(Iterator[dict[str, np.ndarray]]):
    """The batches of `Workers` from some position on."""

    def __init__(self, loader: Loader, num_workers: int, depth: int) -> None:
        import grain
        from absl import flags

        # Grain reads its flags when it starts a process, which is an error outside of `app.run`.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        self._loader = loader
        self._next = loader.batches_before(loader.position)
        source: Any = _BatchSource(loader, self._next)
        options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=depth)
        # A worker is one reader; what it reads ahead is bounded by `depth`.
        read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        pipeline = grain.MapDataset.source(source).to_iter_dataset(read).mp_prefetch(options)
        self._batches = iter(pipeline) if len(source) else None

    @property
    def position(self) -> int:
        """The number of examples that have been handed out, from the start of the first epoch."""
        return self._loader.examples_before(self._next)

    @property
    def share(self) -> Share:
        """The share of the loader."""
        return self._loader.share

    def __next__(self) -> dict[str, np.ndarray]:
        if self._batches is None:
            raise StopIteration
        batch = next(self._batches)
        self._next += 1
        # Large ones come in memory that Grain shares between processes, and takes back.
        return jax.tree.map(lambda array: np.array(array), batch)

    def close(self) -> None:
        """Ends the processes."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


class Workers:
    """The batches of a loader, read by processes of Grain's; its position moves all the same.

    For an `augment` or a source whose Python is the bottleneck. Whole batches are read, by the
    workers in turn, and come in order. So they are the batches of the loader, however many workers
    there are; the loader's `num_threads` has no effect. Use it in place of the loader: loop over
    it, or give it to `prefetch`.

    Workers start when a loop does, which takes seconds, and end with it, or with `close` of what
    `prefetch` returns. The loader is copied to each: arrays in memory are copied, memory-mapped
    files and sources that open theirs when they are read are not. As ever where Python starts
    processes, the script must do its work under `if __name__ == "__main__":`.

    **Arguments:**

    - `loader`: whose settings and position count.
    - `num_workers`: how many processes.
    - `depth`: how many batches each reads ahead.

    **Raises:** `ImportError` without the extra `grain`.

    **Reference:** `IterDataset.mp_prefetch` of Grain, https://google-grain.readthedocs.io
    """

    def __init__(self, loader: Loader, num_workers: int, *, depth: int = 1) -> None:
        if num_workers < 1 or depth < 1:
            raise ValueError(
                "`num_workers` and `depth` must be 1 or more. "
                f"Got num_workers={num_workers} and depth={depth}. "
                "Without workers, use the loader itself."
            )
        extra("grain", "grain", "Processes that read batches are Grain's.")
        self._loader = loader
        self._num_workers = num_workers
        self._depth = depth

    @property
    def position(self) -> int:
        """The position of the loader."""
        return self._loader.position

    @position.setter
    def position(self, position: int) -> None:
        self._loader.position = position

    @property
    def order(self) -> dict[str, Any]:
        """The order of the loader."""
        return self._loader.order

    @property
    def share(self) -> Share:
        """The share of the loader."""
        return self._loader.share

    def begin(self) -> WorkerBatches:
        self._loader.begin()  # which raises where a loop may not begin, or goes back to the start
        return WorkerBatches(self._loader, self._num_workers, self._depth)

    def handed_out(self, position: int) -> None:
        self._loader.handed_out(position)

    def finish(self) -> None:
        self._loader.finish()

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches from `position` on, which moves as they are handed out."""
        return loop(self)
