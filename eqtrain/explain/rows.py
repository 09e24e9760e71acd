"""Finds the rows of a batch that are to blame, by bisection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

Rows = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowBlame:
    """Which rows make a batch fail.

    **Fields:** `rows`, each of which fails alone; `together`, groups of rows that fail only
    together, each as small as can be; `calls` of the predicate that it took; and `complete`, False
    if the calls ran out before the search was done.
    """

    rows: Rows = ()
    together: tuple[Rows, ...] = ()
    calls: int = 0
    complete: bool = True


class _OutOfCalls(Exception):
    pass


def blame_rows(
    fails: Callable[[Rows], bool], num_rows: int, *, max_calls: int | None = None
) -> RowBlame:
    """Finds the rows that fail alone, and then the groups that only fail together.

    Rows are bisected, so that k bad ones among n take about 2 k log2(n / k) calls, and never more
    than 2 n. What is left when those are taken out is tried once more: if it still fails, as where
    a sum overflows, the smallest group is sought, in about 2 g log2(n / g) calls for g rows.

    **Arguments:**

    - `fails`: whether a batch of just these rows, given in increasing order and never none, fails.
      Where more rows fail whenever fewer do, what is found is exact. Otherwise it fails all the
      same, but another choice of rows might too.
    - `num_rows`: of the batch.
    - `max_calls`: after how many calls of `fails` to give up. The default is no bound but that of
      the search itself.

    **Returns:** a `RowBlame`, empty if the whole batch does not fail.

    ```python
    >>> blame_rows(lambda rows: 5 in rows or {2, 9} <= set(rows), 16)
    RowBlame(rows=(5,), together=((2, 9),), calls=22, complete=True)

    ```
    """
    known: dict[Rows, bool] = {}

    def bad(rows: Sequence[int]) -> bool:
        key = tuple(sorted(rows))
        if not key:
            return False
        if key not in known:
            if max_calls is not None and len(known) >= max_calls:
                raise _OutOfCalls
            known[key] = bool(fails(key))
        return known[key]

    alone: list[int] = []
    groups: list[Rows] = []
    complete = True
    try:
        everything = list(range(num_rows))
        if bad(everything):
            _bisect(everything, bad, alone)
            rest = [row for row in everything if row not in alone]
            while bad(rest):
                group = _smallest([], rest, bad)
                groups.append(tuple(sorted(group)))
                rest = [row for row in rest if row not in group]
    except _OutOfCalls:
        complete = False
    return RowBlame(tuple(sorted(alone)), tuple(groups), len(known), complete)


def _bisect(rows: list[int], bad: Callable[[Sequence[int]], bool], alone: list[int]) -> None:
    """Collects the rows that fail alone from `rows`, which fail."""
    if len(rows) == 1:
        alone.extend(rows)
        return
    middle = len(rows) // 2
    for half in (rows[:middle], rows[middle:]):
        if bad(half):
            _bisect(half, bad, alone)


def _smallest(
    fixed: list[int],
    rows: list[int],
    bad: Callable[[Sequence[int]], bool],
    grown: bool = False,
) -> list[int]:
    """The fewest of `rows` that fail together with those that are `fixed`.

    **Reference:** QuickXplain, Junker 2004, https://cdn.aaai.org/AAAI/2004/AAAI04-027.pdf
    """
    if grown and bad(fixed):
        return []
    if len(rows) == 1:
        return rows
    middle = len(rows) // 2
    left, right = rows[:middle], rows[middle:]
    of_right = _smallest(fixed + left, right, bad, grown=bool(left))
    of_left = _smallest(fixed + of_right, left, bad, grown=bool(of_right))
    return of_left + of_right
