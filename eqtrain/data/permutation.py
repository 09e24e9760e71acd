"""A random order of any number of rows that takes no memory: each place is computed when asked for.

A place below `num_rows` is written as two digits, and the digits add keyed hashes of each other in
turn (a Feistel network). Every round can be undone, so no two places meet. The digits can name a
few numbers too many; a place that lands on one goes through the network again until it does not.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int

# Twelve still show in how often each order of 7 rows comes up. Even, see `_once`.
_ROUNDS = 16


class Permutation:
    """The order of `num_rows` rows that a seed and an epoch decide.

    Orders of several things for the same seed are told apart by `stream`.

    **Reference:** Black and Rogaway 2002, Ciphers with arbitrary finite domains,
    https://doi.org/10.1007/3-540-45760-7_9
    """

    def __init__(self, num_rows: int, seed: int, epoch: int, stream: int = 0) -> None:
        # NumPy promises the same numbers in every version here, and not for `permutation`.
        entropy = np.random.SeedSequence(seed, spawn_key=(stream, epoch))
        self._keys = entropy.generate_state(_ROUNDS, np.uint64)
        self._num_rows = np.uint64(num_rows)
        high = math.isqrt(num_rows - 1) + 1
        # Even: turning an odd number of values round makes an even permutation.
        self._high = np.uint64(high + high % 2)
        self._low = np.uint64(-(-num_rows // int(self._high)))

    def __call__(self, places: Int[np.ndarray, " places"]) -> Int[np.ndarray, " places"]:
        """The rows at these places of the order."""
        rows = self._once(places.astype(np.uint64))
        while (outside := np.flatnonzero(rows >= self._num_rows)).size:
            rows[outside] = self._once(rows[outside])
        return rows.astype(np.int64)

    def _once(self, x: np.ndarray) -> np.ndarray:
        changed, other = x // self._low, x % self._low
        size, other_size = self._high, self._low
        for key in self._keys:
            changed += _below(_hash(other ^ key), size)
            changed -= size * (changed >= size)
            changed, other, size, other_size = other, changed, other_size, size
        return changed * self._low + other  # an even number of rounds leaves them where they were


def _hash(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64, https://doi.org/10.1145/2714064.2660195; in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _below(x: np.ndarray, size: np.uint64) -> np.ndarray:
    """Whole numbers below `size`, itself below 2**32, from the upper half of 64 random bits."""
    return ((x >> np.uint64(32)) * size) >> np.uint64(32)
