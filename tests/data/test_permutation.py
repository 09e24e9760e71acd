"""The order of an epoch: every row once, at random, without memory for it."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from eqtrain.data import Loader
from eqtrain.data.permutation import Permutation
from eqtrain.data.plan import Order

# Around powers of two and squares, where a digit is added, and primes, which no digits fit.
SIZES = [*range(1, 70), 97, 127, 128, 129, 255, 256, 257, 1021, 4095, 4096, 4097, 10_007, 65_537]


@pytest.mark.parametrize("epoch", [0, 1, 2**40])
def test_each_row_has_one_place(epoch):
    for size in SIZES:
        order = Permutation(size, 3, epoch)(np.arange(size))
        np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_places_can_be_asked_for_in_any_order():
    permutation = Permutation(1000, 0, 0)
    order = permutation(np.arange(1000))
    places = np.array([999, 5, 5, 0])
    np.testing.assert_array_equal(permutation(places), order[places])
    assert places.tolist() == [999, 5, 5, 0]  # which it leaves alone


def test_orders_differ_by_seed_epoch_and_stream():
    size = 50
    settings = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (2**100, 0, 0), (0, 2**35, 0)]
    orders = {tuple(Permutation(size, *each)(np.arange(size)).tolist()) for each in settings}
    assert len(orders) == len(settings)


def test_order_never_changes_from_release_to_release():
    # Or a run would resume on other rows than those that it had left.
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [4, 6, 9, 8, 1, 7, 3, 0, 5, 2]
    far = np.array([0, 1, 10**9 - 1])
    assert Permutation(10**9, 7, 3)(far).tolist() == [469684429, 668060744, 809569061]


def deviation(counts: np.ndarray, expected: float, degrees: int) -> float:
    """How many standard deviations chi-square is above what it is for equal chances."""
    square = ((counts - expected) ** 2).sum() / expected
    return (square - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize(("size", "trials"), [(3, 600), (4, 1200)])
def test_all_orders_of_few_rows_are_as_likely(size, trials):
    numbers = {order: i for i, order in enumerate(itertools.permutations(range(size)))}
    found = [tuple(Permutation(size, 11, e)(np.arange(size)).tolist()) for e in range(trials)]
    counts = np.bincount([numbers[order] for order in found], minlength=len(numbers))
    assert abs(deviation(counts, trials / len(numbers), len(numbers) - 1)) < 4


@pytest.mark.parametrize(("size", "trials"), [(37, 600), (150, 900)])
def test_each_row_comes_in_each_place_as_often(size, trials):
    table = np.zeros((size, size))
    follows = np.zeros((size, size))  # which row follows which
    for epoch in range(trials):
        order = Permutation(size, 5, epoch)(np.arange(size))
        table[np.arange(size), order] += 1
        follows[order[:-1], order[1:]] += 1
    assert abs(deviation(table.ravel(), trials / size, (size - 1) ** 2)) < 4
    off = follows[~np.eye(size, dtype=bool)]
    assert off.sum() == trials * (size - 1) and np.trace(follows) == 0
    assert abs(deviation(off, trials / size, size * (size - 1) - 1)) < 4
    # Negative control: an order that is turned round by another number each epoch.
    turned = np.zeros((size, size))
    for epoch in range(trials):
        order = (np.arange(size) + epoch) % size
        turned[order[:-1], order[1:]] += 1
    assert deviation(turned[~np.eye(size, dtype=bool)], trials / size, size * (size - 1) - 1) > 100


def correlations(order: np.ndarray) -> np.ndarray:
    """Of rows with the places they are in, and with the rows 1 to 9 places on, in deviations."""
    x = (order - order.mean()) / order.std()
    place = np.arange(len(x)) - (len(x) - 1) / 2
    serial = [(x[:-lag] * x[lag:]).mean() for lag in range(1, 10)]
    return np.array([(x * place / place.std()).mean(), *serial]) * math.sqrt(len(x))


def test_long_orders_are_as_uncorrelated_as_those_of_numpy():
    size, trials = 5000, 60
    ours = [correlations(Permutation(size, 0, e)(np.arange(size))) for e in range(trials)]
    numpys = [correlations(np.random.default_rng(e).permutation(size)) for e in range(trials)]
    for found in (ours, numpys):
        # Means of 60 have a deviation of 0.13, and deviations of 60 one of 0.09.
        assert np.abs(np.mean(found, axis=0)).max() < 0.5
        assert np.abs(np.std(found, axis=0) - 1).max() < 0.4
    # Negative control: an affine map, the other shuffle that needs no memory.
    affine = (np.arange(size) * 1999 + 17) % size
    assert np.abs(correlations(affine)).max() > 10


def test_two_epochs_are_as_different_as_two_orders_can_be():
    # Rows that keep their place are 1 on average whatever the size.
    size, trials = 500, 300
    orders = [Permutation(size, 0, epoch)(np.arange(size)) for epoch in range(trials)]
    kept = [int((a == b).sum()) for a, b in itertools.pairwise(orders)]
    assert 0.75 < np.mean(kept) < 1.25


class Endless:
    """A thousand million rows, none of which is stored."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index}


def test_a_thousand_million_rows_take_no_memory():
    tracemalloc.start()
    try:
        loader = Loader(Endless(), 1000, seed=1, epochs=3)
        seen = [loader.batch(n)["id"] for n in (0, 1, 17, 10**6 - 1, 10**6, 3 * 10**6 - 1)]
        loader.position = 2 * 10**9 + 1000
        seen.append(next(iter(loader))["id"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20  # an order of them is 8 gigabytes
    rows = np.concatenate(seen)
    assert rows.min() >= 0 and rows.max() < 10**9 and rows.max() > 9.9 * 10**8
    # Of one epoch all are different, and they are all over the source.
    assert len(set(np.concatenate(seen[:4]).tolist())) == 4000
    assert abs(np.mean(rows) / 10**9 - 0.5) < 4 / math.sqrt(12 * len(rows))


@pytest.mark.parametrize("shuffle", [True, False])
def test_blocks_of_an_order_fit_together(shuffle):
    # So long that it is made of three blocks.
    size = 40_000
    expected = Permutation(size, 4, 1)(np.arange(size)) if shuffle else np.arange(size)
    order = Order(size, 4, shuffle)
    for first, stop in ((0, size), (16_000, 17_000), (39_999, 40_000), (16_384, 32_768), (5, 5)):
        np.testing.assert_array_equal(order(1, first, stop), expected[first:stop])
