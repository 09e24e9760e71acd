"""Several batches as one, for a step that is repeated in one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree


def stack(batches: Iterable[PyTree], num_batches: int) -> Iterator[PyTree]:
    """Stacks every `num_batches` batches along a new leading dim, as `et.repeat` takes them.

    **Raises:** `ValueError` at the end if the batches do not come out even: what is left over would
    be trained on by no step. Choose `epochs` so that they do.

    ```python
    >>> [stacked["x"].tolist() for stacked in et.data.stack([{"x": np.ones(1)}] * 4, 2)]
    [[[1.0], [1.0]], [[1.0], [1.0]]]

    ```
    """
    if num_batches < 1:
        raise ValueError(f"`stack` joins 1 batch or more. Got {num_batches}. Use that of `repeat`.")
    iterator = iter(batches)
    while group := list(itertools.islice(iterator, num_batches)):
        if len(group) < num_batches:
            raise ValueError(
                f"`stack` takes a number of batches that {num_batches} divides. "
                f"Got {len(group)} left over at the end. Choose `epochs` or `num_batches` so that "
                "they come out even."
            )
        yield jax.tree.map(_stack, *group)


def _stack(*leaves: Any) -> np.ndarray:
    return np.stack([np.asarray(leaf) for leaf in leaves])
