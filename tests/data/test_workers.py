"""Processes that read change nothing but the time. One start of two workers serves most claims."""

import multiprocessing
import os
from typing import Any

import numpy as np
import pytest

from eqtrain.data import Loader, Workers, prefetch

pytest.importorskip("grain")


def tell(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if example["id"] == BROKEN:
        raise OSError("row cannot be read")
    return {**example, "noise": rng.random(), "process": os.getpid()}


BROKEN = 23
# So large that Grain hands them over in shared memory.
SOURCE = {"id": np.arange(24), "x": np.arange(24 * 30_000.0).reshape(24, 30_000)}


def make(augment: Any = None, **settings: Any) -> Loader:
    return Loader(SOURCE, 4, seed=1, augment=augment, **settings)


def test_workers_read_the_batches_of_the_loader():
    # Up to the batch before the one whose row cannot be read.
    loader = make(tell)
    bad = next(n for n in range(12) if BROKEN in loader.rows(n))
    assert bad >= 2
    loader.position = 4  # begins at the second batch
    processes = set()
    with prefetch(Workers(loader, 2)) as batches:
        for n in range(1, bad):
            batch, rows = next(batches), loader.rows(n)
            np.testing.assert_array_equal(batch["id"], rows)
            np.testing.assert_array_equal(batch["x"], SOURCE["x"][rows].astype(np.float32))
            processes |= set(np.asarray(batch["process"]).tolist())
            assert loader.position == 4 * (n + 1)
        with pytest.raises(OSError, match="row cannot be read"):
            next(batches)
    assert loader.position == 4 * bad
    assert os.getpid() not in processes and len(processes) == min(2, bad - 1)
    assert not multiprocessing.active_children()


def test_loop_over_workers_ends_with_the_loader():
    expected = [batch["id"].tolist() for batch in make(epochs=1)]
    loader = make(epochs=1)
    workers = Workers(loader, 1)
    workers.position = 12
    assert [batch["id"].tolist() for batch in workers] == expected[3:]
    assert workers.position == 24
    with pytest.raises(RuntimeError, match="epochs=1"):
        next(iter(workers))
    workers.position = 24
    assert list(workers) == []  # without a process to be started
    assert not multiprocessing.active_children()


def test_numbers_that_are_none_are_refused():
    with pytest.raises(ValueError, match="Got num_workers=0 and depth=1"):
        Workers(make(), 0)
