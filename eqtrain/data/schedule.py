"""Which of several sources comes when, so that each has its share of any stretch."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int

# Weights are fractions of this. A power of two, below which places times weights fit 64 bits.
_WHOLE = 2**31
# The smallest share whose rounding is less than a thousandth of it is one in so many.
SMALLEST = 2**21


class Schedule:
    """Which source gives the example at each place, in proportions that hold over any stretch.

    Sources are halved again and again. At each halving the left half gets its share of the places
    evenly spaced, as pixels of a slanting line are. So how many examples a source gave before a
    place is known without going through them, and is off by less than one for each halving.
    """

    def __init__(self, weights: list[float], seed: int, epoch: int) -> None:
        # Where each of the lines starts, below one.
        entropy = np.random.SeedSequence(seed, spawn_key=(0, epoch))
        self._offsets = entropy.generate_state(max(len(weights), 1), np.uint32) >> np.uint32(1)
        self._weights = weights

    def __call__(self, places: Int[np.ndarray, " places"]) -> tuple[np.ndarray, np.ndarray]:
        """The source at each place, and how many examples it gave before."""
        sources, before = np.empty_like(places), np.empty_like(places)
        self._halve(0, len(self._weights), np.arange(len(places)), places, sources, before)
        return sources, before

    def given(self, places: int) -> Int[np.ndarray, " sources"]:
        """How many examples each source gives before this place."""
        counts = np.empty(len(self._weights), np.int64)
        parts = [(0, len(self._weights), places)]
        while parts:
            first, stop, number = parts.pop()
            if stop - first == 1:
                counts[first] = number
                continue
            middle, share = self._share(first, stop)
            left = int(self._line(np.array([number]), share, middle)[0])
            parts += [(first, middle, left), (middle, stop, number - left)]
        return counts

    def _halve(
        self,
        first: int,
        stop: int,
        chosen: np.ndarray,
        places: np.ndarray,
        sources: np.ndarray,
        before: np.ndarray,
    ) -> None:
        """Fills in what `chosen` are, whose places among these sources are given."""
        if stop - first == 1:
            sources[chosen], before[chosen] = first, places
            return
        middle, share = self._share(first, stop)
        left = self._line(places, share, middle)
        goes_left = self._line(places + 1, share, middle) > left
        self._halve(first, middle, chosen[goes_left], left[goes_left], sources, before)
        right = ~goes_left
        self._halve(middle, stop, chosen[right], (places - left)[right], sources, before)

    def _share(self, first: int, stop: int) -> tuple[int, int]:
        """Where to halve these sources, and the share of the left half, in parts of `_WHOLE`."""
        middle = (first + stop) // 2
        left, right = math.fsum(self._weights[first:middle]), math.fsum(self._weights[middle:stop])
        return middle, round(left / (left + right) * _WHOLE) if left + right else 0

    def _line(self, places: np.ndarray, share: int, node: int) -> np.ndarray:
        """The height of a line of slope `share` at these places, rounded down: all in integers."""
        high, low = places // _WHOLE, places % _WHOLE
        return high * share + (low * share + int(self._offsets[node])) // _WHOLE
