"""Rows of several lengths: how long each is, and how much padding a fixed shape costs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from .digest import digest
from .source import Example, plain_reader

# How many rows are read at once to learn how long they are.
_READ = 1024


@dataclasses.dataclass(frozen=True)
class Padding:
    """How full the shapes are that rows were put in: printed, a table with a line for each shape.

    `lengths` are those of the shapes, `counts` how many of each there are in an epoch, without what
    fills up the last batch, and `tokens` how many tokens are in these.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def fraction(self) -> float:
        """The part of all that is computed which is padding."""
        slots = sum(length * count for length, count in zip(self.lengths, self.counts, strict=True))
        return 1 - sum(self.tokens) / slots

    def __str__(self) -> str:
        lines = [f"{'length':>8} {'count':>10} {'tokens':>14} {'padding':>8}"]
        for length, count, tokens in zip(self.lengths, self.counts, self.tokens, strict=True):
            part = 1 - tokens / (length * count) if count else 0.0
            lines.append(f"{length:>8} {count:>10,} {tokens:>14,} {part:>8.1%}")
        total = sum(self.counts), sum(self.tokens)
        lines.append(f"{'all':>8} {total[0]:>10,} {total[1]:>14,} {self.fraction:>8.1%}")
        return "\n".join(lines)


class Ragged:
    """A source some of whose arrays are as long as the row, and how long each row is."""

    def __init__(
        self, source: Any, pad: Mapping[str, Any], row_lengths: Any, longest: int | None, taker: str
    ) -> None:
        if not pad:
            raise ValueError(
                "`pad` must name the arrays that are as long as the row. Got an empty mapping. "
                'Give what each is padded with: pad={"tokens": 0}.'
            )
        self.pad = dict(pad)
        self.reader = plain_reader(source, taker)
        self.row_lengths = self._measure() if row_lengths is None else self._given(row_lengths)
        if self.row_lengths.min() < 1:
            row = int(self.row_lengths.argmin())
            raise ValueError(
                "Every row must have a token. "
                f"Got a length of {self.row_lengths[row]} for row {row}. Leave such rows out."
            )
        if longest is not None and self.row_lengths.max() > longest:
            row = int(self.row_lengths.argmax())
            raise ValueError(
                f"No row may be longer than the longest shape, of length {longest}. "
                f"Got {int((self.row_lengths > longest).sum())} of {len(self.reader)} rows which "
                f"are, such as row {row} of length {self.row_lengths[row]}. "
                "Add a longer one, cut the rows, or for `pack` use split=True."
            )

    def examples(self, rows: Int[np.ndarray, " rows"]) -> list[Example]:
        """These rows, each of its arrays in `pad` cut to the row's length."""
        examples = self.reader.examples(rows)
        return [self._cut(example, int(row)) for example, row in zip(examples, rows, strict=True)]

    def settings(self) -> dict[str, int]:
        """What has to be the same in all processes and after a restart."""
        return {**self.reader.settings(), "the lengths of the rows": self._digest}

    @functools.cached_property
    def _digest(self) -> int:
        return digest(as_bytes(self.row_lengths))

    def length_of(self, example: Example, row: int) -> int:
        """The length that the arrays in `pad` have. **Raises:** `ValueError` if they differ."""
        found = {name: np.shape(example[name])[:1] for name in self.pad if name in example}
        if len(found) < len(self.pad) or len(set(found.values())) > 1 or () in found.values():
            raise ValueError(
                "Each row must have all arrays that `pad` names, and of one length. "
                f"Got {', '.join(f'{name!r} of {shape}' for name, shape in found.items())} for row "
                f"{row}, with pad for {', '.join(map(repr, self.pad))}. "
                "Name arrays with one entry a token."
            )
        ((length,),) = set(found.values())
        return length

    def _cut(self, example: Example, row: int) -> Example:
        expected, found = int(self.row_lengths[row]), self.length_of(example, row)
        if found < expected:
            raise ValueError(
                "A row must be as long as `row_lengths` says. "
                f"Got {found} tokens for row {row}, and {expected} there. Measure them again."
            )
        return {
            name: value[:expected] if name in self.pad else value for name, value in example.items()
        }

    def _measure(self) -> Int[np.ndarray, " rows"]:
        rows = np.arange(len(self.reader))
        blocks = [rows[first : first + _READ] for first in range(0, len(rows), _READ)]
        # A block at a time, since the rows may not fit into memory together.
        read = (zip(self.reader.examples(block), block.tolist(), strict=True) for block in blocks)
        return np.array([self.length_of(example, row) for part in read for example, row in part])

    def _given(self, row_lengths: Any) -> Int[np.ndarray, " rows"]:
        lengths = np.asarray(row_lengths)
        if lengths.shape != (len(self.reader),) or not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(
                "`row_lengths` must be a whole number for each row. "
                f"Got {lengths.dtype} of shape {lengths.shape} for {len(self.reader)} rows. "
                "Leave it out to have all rows read once and measured."
            )
        # Small or unsigned ones would overflow in sums and differences.
        return lengths.astype(np.int64)


def as_bytes(numbers: Int[np.ndarray, " numbers"]) -> bytes:
    """The same on every machine."""
    return numbers.astype("<i8").tobytes()


def padded(values: Any, length: int, fill: Any) -> np.ndarray:
    """Fills up `values` to `length` along the first dim."""
    array = np.asarray(values)
    out = np.full((length, *array.shape[1:]), fill, array.dtype)
    out[: len(array)] = array
    return out


def check_names(example: Example, added: tuple[str, ...], taker: str) -> None:
    """**Raises:** `ValueError` if a row has what is added to a batch."""
    for name in added:
        if name in example:
            raise ValueError(
                f"`{taker}` adds {', '.join(map(repr, added))} to each batch. "
                f"Got a source that has {name!r} itself. Rename that."
            )
