"""Which cases of a product run by default, and which in the second tier, the grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def pairwise(
    options: Mapping[str, Sequence[Any]],
    *,
    same: Callable[..., bool] = lambda **case: False,
    beyond: Callable[..., bool] = lambda **case: False,
) -> Any:
    """Parametrises a test with the product of `options`.

    By default run so many cases that each two options meet at least once, among them the corners
    where all are the first or all are the last: a fault that takes two causes is met. The others
    are marked `grid`.

    **Arguments:** `same` says of which cases another is the very same program, so that they are
    left out; `beyond`, which cases lie between others that run by default, and are for the grid.
    """
    names = tuple(options)
    cases = [
        case
        for case in itertools.product(*options.values())
        if not same(**dict(zip(names, case, strict=True)))
    ]
    usual = [case for case in cases if not beyond(**dict(zip(names, case, strict=True)))]
    chosen = {id(case) for case in _covering(usual)}
    params = [
        pytest.param(*case, marks=[] if id(case) in chosen else pytest.mark.grid) for case in cases
    ]
    return pytest.mark.parametrize(names, params)


def _covering(cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A few of the cases in which all pairs of options occur that occur in any; the ends first."""
    pairs = {id(case): set(_pairs(case)) for case in cases}
    missing = set().union(*pairs.values())
    chosen: list[tuple[Any, ...]] = []
    ends = [cases[0], cases[-1]]
    while ends or missing:
        rest = (case for case in cases if case not in chosen)
        best = ends.pop(0) if ends else max(rest, key=lambda case: len(pairs[id(case)] & missing))
        if best not in chosen:
            chosen.append(best)
        missing -= pairs[id(best)]
    return chosen


def _pairs(case: tuple[Any, ...]) -> Any:
    # By their text: what is compared by identity, such as a placement, has no hash of its own.
    return itertools.combinations([(place, repr(one)) for place, one in enumerate(case)], 2)


def grid(*case: Any, id: str | None = None) -> Any:  # noqa: A002 (pytest's own name)
    """A case of `parametrize` that runs in the second tier alone."""
    return pytest.param(*case, marks=pytest.mark.grid, id=id)


def default(cases: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """The cases of `parametrize`, of which all but the `chosen` are in the second tier."""
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in chosen else grid(*_values(case)) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
