"""Rows of many lengths packed into sequences of one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int

from .digest import digest
from .ragged import Padding, Ragged, as_bytes, check_names, padded
from .source import AbstractReader, Example, Source

_ADDED = ("segment_ids", "positions")


def first_fit(
    lengths: Sequence[int], size: int, window: int
) -> tuple[list[list[int]], Int[np.ndarray, " bins"]]:
    """Puts items, in order, into the first of `window` open bins of `size` that has room.

    Where none has, the oldest bin is closed. Returns the items of each bin, in the order in which
    the bins were opened, and how full each is.
    """
    bins: list[list[int]] = []
    filled: list[int] = []
    open_bins: list[int] = []
    for item, length in enumerate(lengths):
        for chosen in open_bins:
            if filled[chosen] + length <= size:
                break
        else:
            chosen = len(bins)
            bins.append([])
            filled.append(0)
            open_bins.append(chosen)
            if len(open_bins) > window:
                open_bins.pop(0)
        bins[chosen].append(item)
        filled[chosen] += length
        if filled[chosen] == size:
            open_bins.remove(chosen)
    return bins, np.array(filled)


class Packed(AbstractReader):
    """Sequences that are packed with rows; see `pack`."""

    def __init__(
        self,
        source: Source,
        length: SupportsIndex,
        pad: Mapping[str, Any],
        row_lengths: Any,
        split: bool,
        window: int,
    ) -> None:
        self.length = length = operator.index(length)
        if length < 1 or window < 1:
            raise ValueError(
                "`length` and `window` must be 1 or more. "
                f"Got length={length} and window={window}. Use the model's context, and a few."
            )
        self._ragged = Ragged(source, pad, row_lengths, None if split else length, "pack")
        # A piece is a whole row, or what there is between two multiples of `length`.
        per_row = -(-self._ragged.row_lengths // length)
        self._piece_rows = np.repeat(np.arange(len(per_row)), per_row)
        before = np.repeat(np.cumsum(per_row) - per_row, per_row)
        self._piece_starts = (np.arange(len(before)) - before) * length
        rest = self._ragged.row_lengths[self._piece_rows] - self._piece_starts
        bins, self._filled = first_fit(np.minimum(rest, length).tolist(), length, window)
        self._pieces = np.concatenate([np.array(pieces) for pieces in bins])
        self._ends = np.cumsum([len(pieces) for pieces in bins])

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def padding(self) -> Padding:
        """How much of the sequences is padding."""
        return Padding((self.length,), (len(self),), (int(self._filled.sum()),))

    def rows_in(self, sequence: int) -> Int[np.ndarray, " segments"]:
        """The rows of the source that a sequence holds, or pieces of, in their order there."""
        return self._piece_rows[self._pieces_in(sequence)]

    def examples(self, rows: Int[np.ndarray, " rows"]) -> list[Example]:
        pieces = [self._pieces_in(sequence) for sequence in rows.tolist()]
        # All rows of all sequences at once, and a row of several pieces once.
        needed, place = np.unique(self._piece_rows[np.concatenate(pieces)], return_inverse=True)
        read = self._ragged.examples(needed)
        cuts = np.cumsum([len(part) for part in pieces])[:-1]
        return [
            self._join([read[i] for i in part], self._piece_starts[own].tolist())
            for part, own in zip(np.split(place, cuts), pieces, strict=True)
        ]

    def settings(self) -> dict[str, int]:
        return {
            **self._ragged.settings(),
            "the length of sequences": self.length,
            "their number": len(self),
            "how rows are packed": self._digest,
        }

    @functools.cached_property
    def _digest(self) -> int:
        return digest(as_bytes(self._pieces))

    def _pieces_in(self, sequence: int) -> Int[np.ndarray, " segments"]:
        first = int(self._ends[sequence - 1]) if sequence else 0
        return self._pieces[first : int(self._ends[sequence])]

    def _join(self, examples: list[Example], starts: list[int]) -> Example:
        pad, size = self._ragged.pad, self.length
        for example in examples:
            check_names(example, _ADDED, "pack")
            if len(example) > len(pad):
                extra = next(name for name in example if name not in pad)
                raise ValueError(
                    "All arrays of rows that are packed must have one entry a token. "
                    f"Got {extra!r}, which `pad` does not name. "
                    "Name it there, or leave it out of the source."
                )
        joined: dict[str, Any] = {}
        lengths: list[int] = []
        for name, fill in pad.items():
            pieces = [
                np.asarray(example[name])[start : start + size]
                for example, start in zip(examples, starts, strict=True)
            ]
            joined[name] = padded(np.concatenate(pieces), size, fill)
            lengths = [len(piece) for piece in pieces]
        segments = np.repeat(np.arange(1, 1 + len(lengths), dtype=np.int32), lengths)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        joined["segment_ids"] = padded(segments, size, 0)
        joined["positions"] = padded(positions, size, 0)
        return joined


def pack(
    source: Source,
    length: SupportsIndex,
    *,
    pad: Mapping[str, Any],
    row_lengths: Any = None,
    split: bool = False,
    window: int = 16,
) -> Packed:
    """Packs rows into sequences of `length` tokens, as examples of a `Loader`.

    Rows are taken in the order of the source, and each goes into the first of the last `window`
    sequences that has room. So it is known from the lengths alone which sequence holds which rows,
    and that is the same in each epoch: a loader shuffles whole sequences.

    A sequence also has `segment_ids`, which count its rows from 1 and are 0 on padding, and
    `positions` within each row. Tokens may attend to those of the same segment only; and what a
    token predicts is the next one where `segment_ids[1:] == segment_ids[:-1]`.

    **Arguments:**

    - `source`: rows as for `Loader`, that have arrays of a length of their own.
    - `length`: that of the sequences.
    - `pad`: the arrays of a row, all of which have one entry a token, and what each is padded with.
    - `row_lengths`: how many tokens each row has. What an array has beyond is cut off. By default
        all rows are read once, and measured.
    - `split`: with True, a row that is longer is cut every `length` tokens, to segments of their
        own; with False it is an error.
    - `window`: how many sequences stay open. More leave less padding; one keeps the
        order of the rows.

    **Returns:** a source for a `Loader` or `mix`, whose `padding` tells how much is padding.

    **Raises:** `ValueError` for rows that are too long or empty.

    ```python
    >>> source = [{"tokens": np.arange(1, 1 + n)} for n in (2, 3, 1)]
    >>> packed = et.data.pack(source, 4, pad={"tokens": 0})
    >>> batch = et.data.Loader(packed, batch_size=2, shuffle=False).batch(0)
    >>> batch["tokens"].tolist(), batch["segment_ids"].tolist()
    ([[1, 2, 1, 0], [1, 2, 3, 0]], [[1, 1, 2, 0], [1, 1, 1, 0]])
    >>> packed.padding.fraction
    0.25

    ```
    """
    return Packed(source, length, pad, row_lengths, split, window)
