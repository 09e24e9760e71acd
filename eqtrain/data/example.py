"""Changes to single examples, at random but the same however they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .plan import Drawn
from .source import Example

Augment = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]


class Augmentation:
    """A function of an example and a generator, with one generator for each visit of each row."""

    def __init__(self, augment: Augment, seed: int) -> None:
        self._augment = augment
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)

    def __call__(self, examples: Sequence[Example], drawn: Drawn) -> list[Example]:
        """Changes examples, which were read from the rows drawn."""
        visited = zip(examples, drawn.rows.tolist(), drawn.visits.tolist(), strict=True)
        return [self._change(example, row, visit) for example, row, visit in visited]

    def _change(self, example: Example, row: int, visit: int) -> Example:
        # The lower half of the counter counts draws, so no two generators meet.
        bits = np.random.Philox(key=self._key, counter=[0, 0, row, visit])
        # Or a change in place would be one of the source, and be made twice where a batch is filled
        # up with a row that it has.
        copied = {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in example.items()
        }
        try:
            changed = self._augment(copied, np.random.Generator(bits))
        except StopIteration as error:
            # Passed on from an iterator, it would look like the end of the data.
            raise RuntimeError(f"`augment` raised StopIteration for row {row}.") from error
        if not isinstance(changed, Mapping):
            raise TypeError(
                "`augment` must return an example, a mapping from names to arrays. "
                f"Got {type(changed).__name__} for row {row}. Return the dict that it is given."
            )
        return changed
