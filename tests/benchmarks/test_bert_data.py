"""What BERT's jobs share: each row once and whole, the same batches everywhere, one schedule."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bert_data, finetune_bert
from benchmarks.bert_data import Rows, batches, num_batches
from benchmarks.compare_bert import goals_of
from benchmarks.peers import products_bert
from models.bert import MINILM

BUCKETS = (4, 8, 16)


def rows(count: int = 103) -> Rows:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 20, size=count)  # some are longer than the last bucket
    starts = np.cumsum([0, *lengths])
    # The first token tells which row it is.
    tokens = rng.integers(1000, 2000, size=starts[-1], dtype=np.int32)
    tokens[starts[:-1]] = np.arange(1, count + 1)
    return Rows(tokens, starts, rng.integers(0, 5, size=count, dtype=np.int32))


@pytest.mark.parametrize("seed", [None, 0])
def test_batches_hold_every_row_once_in_the_smallest_bucket(seed):
    given = rows()
    found = list(batches(given, BUCKETS, 8, seed=seed))
    assert len(found) == num_batches(given, BUCKETS, 8)
    seen = []
    for batch in found:
        length = batch["tokens"].shape[1]
        assert batch["tokens"].shape == batch["mask"].shape == (8, length)
        for place in range(8):
            text = batch["tokens"][place][batch["mask"][place] == 1]
            if batch["weight"][place] == 0:
                assert len(text) == 0
                continue
            row = text[0] - 1
            seen.append(row)
            whole = given.tokens[given.starts[row] : given.starts[row + 1]]
            np.testing.assert_array_equal(text, whole[:16])
            assert length == min(bucket for bucket in BUCKETS if bucket >= len(text))
            assert batch["label"][place] == given.labels[row]
            assert batch["tokens"][place, len(text) :].max(initial=0) == 0
    assert sorted(seen) == list(range(len(given)))


def test_order_is_that_of_the_seed():
    def tokens(seed: int | None) -> list[np.ndarray]:
        return [batch["tokens"] for batch in batches(rows(), BUCKETS, 8, seed=seed)]

    assert all(np.array_equal(a, b) for a, b in zip(tokens(1), tokens(1), strict=True))
    assert not all(map(np.array_equal, tokens(1), tokens(2)))


def test_limit_draws_whole_rows():
    given = rows()
    some = given.first(10)
    assert len(some) == 10 and some.lengths.sum() == len(some.tokens)
    for row in range(10):
        origin = some.tokens[some.starts[row]] - 1
        start = given.starts[origin]
        np.testing.assert_array_equal(
            some.tokens[some.starts[row] : some.starts[row + 1]],
            given.tokens[start : start + some.lengths[row]],
        )
        assert some.labels[row] == given.labels[origin]
    assert given.first(None) is given


@pytest.mark.parametrize("total", [1, 5, 40, 2000])
def test_schedules_of_both_frameworks_are_the_same(total):
    ours = finetune_bert.make_schedule(total, 3e-4)
    for step in {0, total // 20, total // 10, total // 2, total - 1}:
        expected = bert_data.learning_rate(step, total, 3e-4)
        assert float(jnp.asarray(ours(step))) == pytest.approx(expected, rel=1e-4, abs=1e-10)


def test_floor_counts_the_products_that_it_times():
    def flops(product: Any, a: Any, b: Any) -> int:
        # Of (m, i), (i, o) and (m, o), in any order: the root of the product of sizes is m i o.
        groups = a.shape[0] if a.ndim == 3 else 1
        sizes = [array.size // groups for array in (a, b, product(a, b))]
        return 2 * groups * round(math.sqrt(math.prod(sizes)))

    layer = sum(flops(*each) for each in products_bert.products(2, 8))
    assert MINILM.num_layers * layer == products_bert.flops(2, 8)


def test_goals_are_read_from_the_better_peer():
    def line(name: str, over: float, peak: int) -> dict[str, Any]:
        ratio = {"median": over}
        return {"size": "s", "contender": name, "over_eqtrain": ratio, "peak_bytes": peak}

    ours = {"size": "s", "contender": "eqtrain", "peak_bytes": 10, "over_products": {"median": 1.2}}
    goals = goals_of([ours, line("torch", 1.4, 12), line("torch_compile", 1.2, 9)])
    assert list(goals.values()) == [False, False, True]
    goals = goals_of([ours, line("torch", 1.4, 12)])
    assert list(goals.values()) == [True, True, True]
