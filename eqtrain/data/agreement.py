"""Finds processes that were started with different settings, before they wait for each other."""

from __future__ import annotations

import numpy as np
from jax.experimental import multihost_utils

from .digest import digest


def check_agreement(what: str, settings: dict[str, int]) -> None:
    """Compares whole numbers below 2**128 over all processes, which all have to call this.

    **Raises:** `ValueError`, in every process, that names the setting and what each of them has.
    """
    # An all-gather takes as many numbers from each process, so these come first.
    kinds = digest(", ".join(settings).encode())
    _compare(what, {"a number of settings": len(settings), "kinds of settings": kinds})
    _compare(what, settings)


def _compare(what: str, settings: dict[str, int]) -> None:
    # In bytes, since JAX narrows 64-bit integers.
    coded = [list(value.to_bytes(16, "big")) for value in settings.values()]
    everywhere = multihost_utils.process_allgather(np.array(coded, np.uint8))
    for i, name in enumerate(settings):
        values = [int.from_bytes(bytes(code.tolist()), "big") for code in everywhere[:, i]]
        if len(set(values)) > 1:
            raise ValueError(
                f"{what} must be made with the same settings in every process. "
                f"Got {name} of {values}, one a process. Set them from the same configuration."
            )
