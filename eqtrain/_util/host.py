"""Arrays on the host, wherever they lie."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree


def fetch_whole(tree: PyTree) -> PyTree:
    """The arrays of a tree as numpy, whole on every process. All processes have to call it.

    They may be views of what lies on the device.
    """

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            from jax.experimental import multihost_utils  # which `import jax` leaves out

            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)
