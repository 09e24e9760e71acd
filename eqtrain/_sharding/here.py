"""Which axes split the batch, for what a loss calls while it is traced inside `shard`."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax

from .placement import Axes, Layout


class BatchAxes(NamedTuple):
    """**Fields:** the axes that split the `batch`, and of these those that split its `rows`."""

    batch: Axes = ()
    rows: Axes = ()


# A context of JAX's: what was traced under one value is not taken from a cache under another.
_here = jax.make_user_context(BatchAxes())


def inside(layout: Layout) -> contextlib.AbstractContextManager[None]:
    """To be entered while a loss is traced inside the `shard_map` of `layout`."""
    return _here(BatchAxes(layout.batch_axes, layout.example_axes))


def batch_axes_here() -> BatchAxes:
    """The axes that split the batch where this is called: none outside `shard`."""
    return _here.value
