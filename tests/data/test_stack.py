"""Batches stacked for `repeat` keep the loader's position."""

import gc
from typing import Any

import numpy as np
import pytest

from eqtrain.data import Loader, Prefetch, prefetch, stack
from tests.data.threads import readers, wait_for


def make_loader(rows: int = 24) -> Loader:
    return Loader({"id": np.arange(rows)}, batch_size=2, seed=3, epochs=1)


def ids(batches) -> list[int]:
    return [int(i) for batch in batches for i in np.asarray(batch["id"]).reshape(-1)]


def test_stacks_hold_the_rows_in_the_loaders_order():
    stacks = list(stack(make_loader(), 3))
    assert [stacked["id"].shape for stacked in stacks] == [(3, 2)] * 4
    assert ids(stacks) == ids(make_loader().iterate())
    assert sorted(ids(stacks)) == list(range(24))


@pytest.mark.parametrize("ahead", [False, True])
def test_the_position_counts_what_was_handed_out(ahead: bool):
    loader = make_loader()
    stacks = stack(loader, 3)
    batches = prefetch(stacks, depth=2) if ahead else iter(stacks)
    first = next(batches)
    assert loader.position == 6  # not the 18 that may have been read ahead
    if isinstance(batches, Prefetch):
        batches.close()
    rest = ids(stack(loader, 3))
    assert ids([first]) + rest == ids(make_loader().iterate())


@pytest.mark.parametrize("ahead", [False, True])
def test_threads_that_read_end_with_the_loop(ahead: bool):
    loader = Loader({"id": np.arange(24)}, batch_size=2, num_threads=2)
    stacks = stack(loader, 3)
    for _ in prefetch(stacks) if ahead else stacks:
        assert readers()
        break
    gc.collect()  # of the iterator that was left
    wait_for(lambda: not readers())


def test_stacks_that_do_not_come_out_even_are_refused():
    with pytest.raises(ValueError, match=r"divides\. Got 2 left over"):
        list(stack(make_loader(), 5))
    with pytest.raises(ValueError, match="1 batch or more"):
        stack(make_loader(), 0)


def test_rows_of_a_stack_lie_along_the_dim_after_that_of_the_steps():
    source = {"x": np.arange(16)}
    alone, stacked = (Loader(source, batch_size=4, epochs=1) for _ in range(2))
    stacks: Any = stack(stacked, 2)
    for batches, shape, dim in ((alone, (4,), 0), (stacks, (2, 4), 1)):
        share = batches.share
        assert share is not None
        [first, *_] = batches
        assert first["x"].shape == shape and shape[share.dim] == 4 and share.dim == dim
