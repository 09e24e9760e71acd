"""Rows to blame are found, on predicates whose answer is known."""

import itertools
import math

import numpy as np
import pytest

from eqtrain.explain import blame_rows


def fails_for(*groups: tuple[int, ...]):
    """A predicate that holds where all rows of one of the groups are there."""
    return lambda rows: any(set(group) <= set(rows) for group in groups)


@pytest.mark.parametrize("bad", [(0,), (63,), (5, 6), (1, 31, 32, 60), tuple(range(64))])
def test_rows_that_fail_alone_are_all_found(bad):
    blame = blame_rows(fails_for(*[(row,) for row in bad]), 64)
    assert (blame.rows, blame.together, blame.complete) == (bad, (), True)
    k = len(bad)
    assert blame.calls <= min(2 * 64, 2 * k * math.log2(64 / k) + 2 * k + 2)


def test_groups_that_fail_only_together_are_found():
    blame = blame_rows(fails_for((3, 40), (7,), (10, 11, 12)), 64)
    assert blame.rows == (7,)
    assert sorted(blame.together) == [(3, 40), (10, 11, 12)]
    assert blame.calls < 80


def test_every_pair_of_eight_rows_is_found():
    for pair in itertools.combinations(range(8), 2):
        assert blame_rows(fails_for(pair), 8).together == (pair,)


def test_overflow_of_a_sum_is_a_smallest_group():
    values = np.random.default_rng(0).uniform(1, 2, 32)
    threshold = 10.0

    def fails(rows):
        return values[list(rows)].sum() > threshold

    blame = blame_rows(fails, 32)
    assert blame.rows == () and blame.together
    for group in blame.together:
        assert fails(group)
        assert not any(fails(set(group) - {row}) for row in group)  # none can be left out
    assert not fails(set(range(32)).difference(*blame.together))  # and no group was missed


def test_batch_that_does_not_fail_has_none():
    blame = blame_rows(lambda rows: False, 8)
    assert (blame.rows, blame.together, blame.calls) == ((), (), 1)


def test_calls_are_bounded_and_never_repeated():
    seen = []

    def fails(rows):
        assert rows not in seen and rows
        seen.append(rows)
        return 13 in rows

    blame = blame_rows(fails, 1024, max_calls=6)
    assert not blame.complete and blame.rows == () and len(seen) == blame.calls == 6
    seen.clear()
    assert blame_rows(fails, 1024).rows == (13,)
    assert len(seen) <= 2 * 10 + 2
