"""Rows of many lengths in batches of a few shapes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from .plan import AbstractPlan, Drawn, Order
from .ragged import Padding, Ragged, check_names, padded
from .source import AbstractReader, Example, Source, Weight


class BucketPlan(AbstractPlan):
    """Steps whose rows are all of one bucket: the full ones in any order, then the short ones."""

    def __init__(
        self,
        buckets: Sequence[np.ndarray],
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop: bool,
    ) -> None:
        self.batch_size = batch_size
        self._buckets = buckets
        # Where the full steps of each bucket begin, in the order of the buckets.
        self._starts = np.cumsum([0, *(len(rows) // batch_size for rows in buckets)])
        self._num_full = int(self._starts[-1])
        rests = [len(rows) % batch_size for rows in buckets]
        self._short = [] if drop else [bucket for bucket, rest in enumerate(rests) if rest]
        self._examples = [0, *itertools.accumulate(rests[bucket] for bucket in self._short)]
        self.dropped_per_epoch = sum(rests) if drop else 0
        self.steps_per_epoch = self._num_full + len(self._short)
        self.examples_per_epoch = sum(map(len, buckets)) - self.dropped_per_epoch
        self._step_order = Order(self._num_full, seed, shuffle)
        self._orders = [
            Order(len(rows), seed, shuffle, 1 + bucket) for bucket, rows in enumerate(buckets)
        ]

    def draw(self, epoch: int, step: int) -> Drawn:
        if step < self._num_full:
            place = int(self._step_order(epoch, step, step + 1)[0])
            bucket = int(np.searchsorted(self._starts, place, "right")) - 1
            first = (place - int(self._starts[bucket])) * self.batch_size
        else:
            bucket = self._short[step - self._num_full]
            first = len(self._buckets[bucket]) // self.batch_size * self.batch_size
        rows = self._buckets[bucket]
        stop = min(first + self.batch_size, len(rows))
        rows = rows[self._orders[bucket](epoch, first, stop)]
        return Drawn(rows, np.full(rows.shape, epoch))

    def examples_before(self, step: int) -> int:
        full = min(step, self._num_full)
        return full * self.batch_size + self._examples[step - full]


class Buckets(AbstractReader):
    """Rows sorted into buckets; see `bucket`."""

    order_depends_on_batch_size = True

    def __init__(
        self,
        source: Source,
        lengths: Sequence[int],
        pad: Mapping[str, Any],
        row_lengths: Any,
    ) -> None:
        self.lengths = tuple(sorted(int(length) for length in lengths))
        if not self.lengths or self.lengths[0] < 1 or len(set(lengths)) < len(lengths):
            raise ValueError(
                "`lengths` must be different whole numbers of 1 or more. "
                f"Got {tuple(lengths)}. Use a few, such as (64, 128, 256)."
            )
        self._ragged = Ragged(source, pad, row_lengths, self.lengths[-1], "bucket")
        self._bucket = np.searchsorted(self.lengths, self._ragged.row_lengths)

    def __len__(self) -> int:
        return len(self._ragged.reader)

    @property
    def padding(self) -> Padding:
        """How much of the batches is padding."""
        count = len(self.lengths)
        rows = np.bincount(self._bucket, minlength=count)
        tokens = np.bincount(self._bucket, self._ragged.row_lengths, minlength=count)
        return Padding(self.lengths, tuple(rows.tolist()), tuple(map(int, tokens)))

    def examples(self, rows: Int[np.ndarray, " rows"]) -> list[Example]:
        return self._ragged.examples(rows)

    def collate(
        self, examples: Sequence[Example], rows: Int[np.ndarray, " rows"], weight: Weight
    ) -> dict[str, np.ndarray]:
        longest = self.lengths[self._bucket[rows[0]]]
        pad, found, filled = self._ragged.pad, [], []
        for example, row in zip(examples, rows.tolist(), strict=True):
            check_names(example, ("length", "mask"), "bucket")
            found.append(self._ragged.length_of(example, row))
            if found[-1] > longest:
                raise ValueError(
                    f"A row must fit its bucket, of length {longest}. "
                    f"Got {found[-1]} tokens for row {row}. Let `augment` keep rows as short."
                )
            filled.append(
                {
                    name: padded(value, longest, pad[name]) if name in pad else value
                    for name, value in example.items()
                }
            )
        batch = super().collate(filled, rows, weight)
        batch["length"] = np.array(found, np.int32)
        # Not in rows that fill up a batch: a loss over tokens must not count these.
        counted = np.where(weight > 0, batch["length"], 0)
        batch["mask"] = np.arange(longest) < counted[:, None]
        return batch

    def plan(self, batch_size: int, seed: int, shuffle: bool, drop: bool) -> AbstractPlan:
        order = np.argsort(self._bucket, kind="stable")
        ends = np.searchsorted(self._bucket[order], np.arange(len(self.lengths)), "right")
        return BucketPlan(np.split(order, ends[:-1]), batch_size, seed, shuffle, drop)

    def settings(self) -> dict[str, int]:
        named = {f"bucket {i}": length for i, length in enumerate(self.lengths)}
        return {**self._ragged.settings(), "the number of buckets": len(self.lengths), **named}


def bucket(
    source: Source,
    lengths: Sequence[int],
    *,
    pad: Mapping[str, Any],
    row_lengths: Any = None,
) -> Buckets:
    """Sorts rows into buckets by length, for a `Loader` whose batches each hold one bucket's rows.

    A row is in the shortest bucket that it fits and padded to its length, so a step compiles once a
    bucket, and `et.donate(max_compilations=len(lengths))` holds it to that. The last batch of each
    bucket is filled up or dropped, as the loader's `remainder` says, and these short batches come
    last in an epoch. Without shuffling, the shortest bucket comes first.

    A batch also has `length`, the tokens of each row, for attention; and `mask`, which says of each
    token whether it counts, for the loss: false on padding, and in rows that fill up a batch.

    **Arguments:**

    - `source`: rows as for `Loader`, that have arrays of a length of their own.
    - `lengths`: those of the buckets.
    - `pad`: the arrays that have one entry a token, and what each of them is padded with.
    - `row_lengths`: how many tokens each row has. What an array has beyond is cut off. By default
        all rows are read once, and measured.

    **Returns:** a source for a `Loader`, whose `padding` tells how much of all batches is padding.

    **Raises:** `ValueError` for a row that is longer than all buckets, or empty.

    ```python
    >>> source = [{"tokens": np.arange(1, 1 + n)} for n in (2, 5, 3, 1)]
    >>> buckets = et.data.bucket(source, (3, 6), pad={"tokens": 0})
    >>> print(buckets.padding)
      length      count         tokens  padding
           3          3              6    33.3%
           6          1              5    16.7%
         all          4             11    26.7%
    >>> [batch["tokens"].shape for batch in et.data.Loader(buckets, batch_size=2, epochs=1)]
    [(2, 3), (2, 3), (2, 6)]

    ```
    """
    return Buckets(source, lengths, pad, row_lengths)
