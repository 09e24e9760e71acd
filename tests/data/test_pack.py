"""Packed sequences hold every row once, and a model sees in them what it sees in the rows alone."""

import weakref
from typing import Any

import jax
import numpy as np
import pytest

from eqtrain.data import Loader, mix, pack
from models.attention import Attention, rotary

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 13, 60).tolist()


def rows(lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    """Row i has tokens of 100 i and up."""
    return [
        {"tokens": 100 * i + np.arange(n, dtype=np.int32), "scores": np.full((n, 2), float(i))}
        for i, n in enumerate(lengths)
    ]


PAD = {"tokens": -1, "scores": np.nan}


def unpack(batch: dict[str, np.ndarray]) -> list[tuple[int, list[int]]]:
    """The tokens of each segment, in the order in which they stand."""
    found = []
    for tokens, segments, positions, scores in zip(
        *(batch[name] for name in ("tokens", "segment_ids", "positions", "scores")), strict=True
    ):
        last = segments.max()
        assert segments[segments > 0].tolist() == sorted(segments[segments > 0])
        assert (tokens[segments == 0] == -1).all() and (positions[segments == 0] == 0).all()
        assert np.isnan(scores[segments == 0]).all()
        for segment in range(1, last + 1):
            at = segments == segment
            np.testing.assert_array_equal(positions[at], np.arange(at.sum()))
            row = int(tokens[at][0]) // 100
            np.testing.assert_array_equal(scores[at], row)
            found.append((row, tokens[at].tolist()))
    return found


def test_lengths_of_small_unsigned_numbers():
    given = pack(rows([10, 3]), 4, pad=PAD, split=True, row_lengths=np.array([10, 3], np.uint8))
    assert len(given) == len(pack(rows([10, 3]), 4, pad=PAD, split=True)) == 4
    assert sorted(sum((tokens for _, tokens in unpack(Loader(given, 4).batch(0))), [])) == [
        *range(10),
        *range(100, 103),
    ]


def test_measuring_holds_a_block_of_rows_and_not_all():
    alive = most = 0

    class Source:
        def __len__(self) -> int:
            return 5000

        def __getitem__(self, row: int) -> dict[str, np.ndarray]:
            nonlocal alive, most

            def gone() -> None:
                nonlocal alive
                alive -= 1

            tokens = np.arange(1 + row % 3)
            weakref.finalize(tokens, gone)
            alive += 1
            most = max(most, alive)
            return {"tokens": tokens}

    assert len(pack(Source(), 8, pad={"tokens": 0}).padding.lengths) == 1
    assert 0 < most < 2500


@pytest.mark.parametrize("window", [1, 4, 100])
def test_each_row_is_in_one_sequence(window):
    packed = pack(rows(), 16, pad=PAD, window=window)
    batches = list(Loader(packed, 4, epochs=1, remainder="drop" if len(packed) % 4 == 0 else "pad"))
    found = {}
    for batch in batches:
        kept = batch.get("weight", np.ones(4)) > 0
        part = {name: array[kept] for name, array in batch.items()}
        assert part["segment_ids"].dtype == part["positions"].dtype == np.int32
        for row, tokens in unpack(part):
            assert row not in found
            found[row] = tokens
    assert sorted(found) == list(range(60))
    for row, tokens in found.items():
        assert tokens == (100 * row + np.arange(LENGTHS[row])).tolist()
    assert packed.padding.tokens == (sum(LENGTHS),) and packed.padding.counts == (len(packed),)
    assert packed.padding.fraction == pytest.approx(1 - sum(LENGTHS) / (16 * len(packed)))


def test_rows_keep_their_order_with_a_window_of_one():
    packed = pack(rows(), 16, pad=PAD, window=1)
    assert np.concatenate([packed.rows_in(i) for i in range(len(packed))]).tolist() == [*range(60)]
    # Greedy: the first row of a sequence had no room in the one before.
    for i in range(1, len(packed)):
        before = sum(LENGTHS[row] for row in packed.rows_in(i - 1))
        assert before + LENGTHS[packed.rows_in(i)[0]] > 16


def test_wider_window_leaves_less_padding():
    fractions = [pack(rows(), 16, pad=PAD, window=w).padding.fraction for w in (1, 4, 100)]
    assert fractions[0] > fractions[1] >= fractions[2]
    # By hand: 5 opens, 4 and 1 fill it up to 10, and 6 and 3 have the second.
    packed = pack(rows([5, 6, 4, 3, 1]), 10, pad=PAD)
    assert [packed.rows_in(i).tolist() for i in range(2)] == [[0, 2, 4], [1, 3]]


def test_one_integer_resumes_and_processes_share():
    def loader(**settings: Any) -> Loader:
        return Loader(pack(rows(), 16, pad=PAD), 4, seed=5, epochs=2, **settings)

    unbroken = list(loader())
    parts = [list(loader(process_index=i, process_count=2, num_threads=2)) for i in range(2)]
    for n, expected in enumerate(unbroken):
        resumed = loader()
        resumed.position = resumed.examples_before(n)
        found = [next(iter(resumed)), {}]
        for name, array in expected.items():
            np.testing.assert_array_equal(found[0][name], array)
            joined = np.concatenate([part[n][name] for part in parts])
            np.testing.assert_array_equal(joined, array)
    orders = [[b["tokens"][0, 0] for b in part] for part in (unbroken[:7], unbroken[7:14])]
    assert orders[0] != orders[1]


def test_rows_that_are_too_long_are_split_on_request():
    lengths = [20, 3, 8, 17]
    with pytest.raises(ValueError, match="length 8. Got 2 of 4 .* row 0 of length 20.*split=True"):
        pack(rows(lengths), 8, pad=PAD)
    packed = pack(rows(lengths), 8, pad=PAD, split=True)
    batch = Loader(packed, len(packed), shuffle=False).batch(0)
    pieces = unpack(batch)
    for row, length in enumerate(lengths):
        own = sorted(tokens for found, tokens in pieces if found == row)
        assert [len(piece) for piece in own] == [8] * (length // 8) + [length % 8] * (
            length % 8 > 0
        )
        assert sum(own, []) == (100 * row + np.arange(length)).tolist()
    assert packed.rows_in(0).tolist() == [0]


def test_source_is_read_once_a_batch_and_only_what_it_needs():
    class Many:
        def __init__(self) -> None:
            self.read: list[list[int]] = []

        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("one row was asked for")

        def __getitems__(self, indices: list[int]) -> Any:
            self.read.append(indices)
            return [rows()[index] for index in indices]

    source = Many()
    packed = pack(source, 16, pad=PAD, row_lengths=LENGTHS)
    assert source.read == []  # lengths that are given are not measured
    loader = Loader(packed, 4, process_index=1, process_count=2)
    loader.batch(0)
    needed = np.concatenate([packed.rows_in(i) for i in loader.rows(0)[2:].tolist()])
    assert source.read == [sorted(needed.tolist())]
    measured = pack(rows(), 16, pad=PAD)
    assert [measured.rows_in(i).tolist() for i in range(len(measured))] == [
        packed.rows_in(i).tolist() for i in range(len(packed))
    ]


def test_attention_sees_the_same_in_a_sequence_as_in_the_row_alone(getkey):
    packed = pack([{"tokens": row["tokens"] % 7} for row in rows()], 16, pad={"tokens": 0})
    batch = Loader(packed, 8, shuffle=False).batch(0)
    table = jax.random.normal(getkey(), (7, 16))
    attention = Attention(16, num_heads=2, num_kv_heads=1, axis=None, key=getkey())

    @jax.jit
    def run(tokens: Any, positions: Any, segments: Any) -> Any:
        return attention(table[tokens], rotary(positions, 8, 10000.0), segments)

    def outputs(*arrays: Any) -> np.ndarray:
        return np.array(run(*arrays))

    found = outputs(batch["tokens"], batch["positions"], batch["segment_ids"])
    # Each row alone, at the start of a sequence of its own and padded.
    held = [
        (i, place, row)
        for i in range(8)
        for place, row in enumerate(packed.rows_in(i).tolist(), start=1)
    ]
    alone = np.zeros((len(held), 16), np.int32)
    for k, (_, _, row) in enumerate(held):
        alone[k, : LENGTHS[row]] = (100 * row + np.arange(LENGTHS[row])) % 7
    ordinary = np.broadcast_to(np.arange(16), alone.shape)
    expected = outputs(alone, ordinary, np.zeros_like(alone))
    crossing = outputs(batch["tokens"], batch["positions"], np.ones_like(batch["segment_ids"]))
    differs = 0.0
    for k, (i, place, row) in enumerate(held):
        at = batch["segment_ids"][i] == place
        want = expected[k, : LENGTHS[row]]
        np.testing.assert_allclose(found[i, at], want, rtol=1e-5, atol=1e-5)  # float32 sums
        differs = max(differs, float(np.abs(crossing[i, at] - want).max()))
    assert len(held) > 8 and differs > 1e-3  # the control, which attends across


def test_packed_sources_can_be_mixed():
    sources = {"a": pack(rows(), 16, pad=PAD), "b": pack(rows([16] * 9), 16, pad=PAD)}
    batch = Loader(mix(sources, {"a": 1, "b": 1}), 8).batch(0)
    assert (batch["segment_ids"] == 1).all(axis=1).sum() >= 4
    assert set(batch) == {"tokens", "scores", "segment_ids", "positions", "weight"}


def test_rows_and_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Got length=0 and window=16"):
        pack(rows(), 0, pad=PAD)
    with pytest.raises(ValueError, match="Got length=8 and window=0"):
        pack(rows(), 8, pad=PAD, window=0)
    with pytest.raises(ValueError, match="Got 'scores', which `pad` does not name"):
        Loader(pack(rows(), 16, pad={"tokens": 0}), 2).batch(0)
    with pytest.raises(ValueError, match="`pack` adds .* Got a source that has 'positions'"):
        Loader(pack([{"positions": np.ones(2)}], 4, pad={"positions": 0}), 1).batch(0)
    with pytest.raises(TypeError, match="`pack` takes sources .* Got a Mixture"):
        pack(mix({"a": rows()}), 16, pad=PAD)
