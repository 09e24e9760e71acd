"""Which rows come when: each once an epoch, whatever the batch, the processes and the restarts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqtrain.data import Loader


def ids(num_rows: int) -> dict[str, np.ndarray]:
    return {"id": np.arange(num_rows), "x": np.arange(num_rows, dtype=np.float32) ** 2}


def real_ids(batches: Any) -> list[int]:
    """The rows that count."""
    rows = []
    for batch in batches:
        weight = batch.get("weight", np.ones(len(batch["id"])))
        rows += batch["id"][weight == 1].tolist()
    return rows


class Rows:
    """A source that reads row by row, and remembers which."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        assert type(index) is int
        self.read.append(index)
        return {"id": index, "x": np.float32(index) ** 2}


def test_partial_batch_is_padded_and_compiles_once():
    # Case 28.
    loader = Loader(ids(10), 4, epochs=2)
    traces = []

    @jax.jit
    def weighted(batch: dict[str, Any]) -> Any:
        traces.append(1)
        return (batch["x"] * batch["weight"]).sum(), batch["weight"].sum()

    batches = list(loader)
    assert len(loader) == len(batches) == 6 and loader.steps_per_epoch == 3
    assert all(batch["id"].shape == batch["weight"].shape == (4,) for batch in batches)
    assert all(batch["weight"].dtype == np.float32 for batch in batches)
    for epoch in (batches[:3], batches[3:]):
        assert sorted(real_ids(epoch)) == list(range(10))
        sums = np.array([weighted(batch) for batch in epoch], np.float64)
        assert sums[:, 0].sum() / sums[:, 1].sum() == 28.5  # the mean of 0, 1, 4, ..., 81
        assert epoch[-1]["weight"].tolist() == [1, 1, 0, 0]
        # Padding holds real rows, which a square root or a logarithm survives.
        assert set(epoch[-1]["id"][2:]) <= set(epoch[-1]["id"][:2])
    assert len(traces) == 1
    # Negative control: what the mean would be if padding counted.
    assert np.mean([batch["x"].mean() for batch in batches[:3]]) != 28.5


def test_remainder_can_be_dropped_and_is_told():
    # Case 28.
    loader = Loader(ids(10), 4, epochs=2, remainder="drop")
    batches = list(loader)
    assert len(loader) == len(batches) == 4 and loader.dropped_per_epoch == 2
    assert all(set(batch) == {"id", "x"} for batch in batches)
    epochs = [real_ids(batches[:2]), real_ids(batches[2:])]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert Loader(ids(10), 4).dropped_per_epoch == 0
    # Over the epochs all rows have their turn.
    many = Loader(ids(10), 4, epochs=20, remainder="drop")
    assert set(real_ids(many)) == set(range(10))


def test_padding_of_fewer_rows_than_half_a_batch():
    (batch,) = Loader(ids(3), 8, shuffle=False, epochs=1)
    assert batch["id"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert batch["weight"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_every_epoch_has_another_order_that_seed_and_epoch_decide():
    # Case 42.
    def epochs(seed: int) -> list[list[int]]:
        rows = real_ids(Loader(ids(16), 4, seed=seed, epochs=3))
        return [rows[i : i + 16] for i in (0, 16, 32)]

    first = epochs(0)
    assert all(sorted(epoch) == list(range(16)) for epoch in first)
    assert len({tuple(epoch) for epoch in first}) == 3
    assert epochs(0) == first
    assert not any(a == b for a, b in zip(epochs(1), first, strict=True))
    # The order does not depend on what was asked before.
    loader = Loader(ids(16), 4)
    assert loader.rows(9).tolist() == first[2][4:8]
    assert loader.rows(2).tolist() == first[0][8:12]


def test_without_shuffling_rows_come_in_order():
    assert real_ids(Loader(ids(6), 4, shuffle=False, epochs=2)) == [*range(6), *range(6)]


@pytest.mark.parametrize("remainder", ["pad", "drop"])
@pytest.mark.parametrize("source", [ids, Rows])
def test_processes_share_each_global_batch(remainder, source):
    # Case 43.
    whole = Loader(ids(22), 4, epochs=2, remainder=remainder)
    sources = [source(22) for _ in range(4)]
    parts = [
        Loader(s, 4, epochs=2, remainder=remainder, process_index=i, process_count=4)
        for i, s in enumerate(sources)
    ]
    steps = 6 if remainder == "pad" else 5
    assert [part.steps_per_epoch for part in parts] == [steps] * 4
    seen: list[int] = []
    for n, (expected, *local) in enumerate(zip(whole, *parts, strict=True)):
        assert all(len(batch["id"]) == 1 for batch in local)
        for name in expected:
            joined = np.concatenate([batch[name] for batch in local])
            np.testing.assert_array_equal(joined, expected[name])
            assert joined.dtype == expected[name].dtype
        seen += real_ids(local)
        if n == steps - 1:
            assert len(seen) == len(set(seen)) == (22 if remainder == "pad" else 20)
    assert len(seen) == 2 * (22 if remainder == "pad" else 20)
    if source is Rows:  # nobody reads what is another's
        assert [len(s.read) for s in sources] == [2 * steps] * 4


@pytest.mark.parametrize(("remainder", "steps"), [("drop", 3), ("pad", 4)])
def test_processes_agree_on_the_number_of_steps(remainder, steps):
    # Case 48: 49, 49 and 47 rows of their own would be 4, 4 and 3 steps.
    parts = [
        Loader(ids(145), 48, epochs=1, remainder=remainder, process_index=i, process_count=3)
        for i in range(3)
    ]
    assert [len(list(part)) for part in parts] == [steps] * 3


def test_resuming_twice_in_an_epoch_changes_nothing():
    # Case 44.
    unbroken = [batch["id"].tolist() for batch in Loader(ids(199), 2, epochs=1)]
    assert len(unbroken) == 100
    seen, position = [], 0
    for batches in (30, 10, 60):
        loader = Loader(ids(199), 2, epochs=1)
        loader.position = position
        for _, batch in zip(range(batches), loader, strict=False):
            seen.append(batch["id"].tolist())
        position = loader.position
        assert position == min(2 * len(seen), 199)
    assert seen == unbroken
    assert list(loader.iterate(199)) == []


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_position_and_batch_are_one_to_one(remainder):
    loader = Loader(ids(10), 4, remainder=remainder)
    batches = loader.iterate()
    positions = [batches.position]
    for n in range(7):
        batch = next(batches)
        positions.append(batches.position)
        resumed = next(loader.iterate(positions[n]))
        np.testing.assert_array_equal(resumed["id"], batch["id"])
        np.testing.assert_array_equal(loader.rows(n), batch["id"])
    per_epoch = [0, 4, 8, 10, 14, 18, 20, 24] if remainder == "pad" else list(range(0, 32, 4))
    assert positions == per_epoch
    assert loader.position == 0  # `iterate` moves nothing
    with pytest.raises(ValueError, match=r"Got 6, .*batch_size=4.*Use 4"):
        loader.position = 6
    with pytest.raises(ValueError, match="position"):
        loader.iterate(-4)


def test_loop_goes_on_where_the_last_one_was_left():
    loader = Loader(ids(8), 2, shuffle=False, epochs=1)
    for batch in loader:
        if 3 in batch["id"]:
            break
    assert loader.position == 4
    assert real_ids(loader) == [4, 5, 6, 7]
    assert loader.position == 8
    assert real_ids(loader) == list(range(8))  # and anew after the end
    loader.position = 8  # the end of a run that is resumed stays the end
    assert real_ids(loader) == []
    with pytest.raises(ValueError, match="behind the end.*Got 16"):
        loader.position = 16


def test_shuffled_orders_are_not_repeated_by_accident():
    loader = Loader(ids(8), 2, epochs=1)
    first = real_ids(loader)
    with pytest.raises(RuntimeError, match="epochs=1"):
        list(loader)
    assert real_ids(loader.iterate()) == first
    loader.position = 0
    assert real_ids(loader) == first


def test_endless_loader():
    loader = Loader(ids(4), 2)
    with pytest.raises(TypeError, match="epochs=None"):
        len(loader)
    batches = iter(loader)
    assert len([next(batches) for _ in range(9)]) == 9 and loader.position == 18


def test_sources(tmp_path):
    expected = [batch["x"].tolist() for batch in Loader(ids(10), 4, epochs=1)]
    file = np.memmap(tmp_path / "x", np.float32, "w+", shape=(10,))
    file[:] = ids(10)["x"]
    file.flush()
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=(10,))
    for source in ({"x": mapped}, {"x": jnp.asarray(ids(10)["x"])}, Rows(10)):
        batches = list(Loader(source, 4, epochs=1))
        assert [batch["x"].tolist() for batch in batches] == expected
        assert all(type(batch["x"]) is np.ndarray for batch in batches)
        batches[0]["x"][:] = -1  # a batch is the reader's own
    assert mapped.min() == 0


def test_wrong_sources_are_refused():
    def loader(source: Any, **settings: Any) -> Loader:
        return Loader(source, settings.pop("batch_size", 4), **settings)

    with pytest.raises(ValueError, match="'a' with 3, 'b' with 4"):
        loader({"a": np.zeros(3), "b": np.zeros(4)})
    with pytest.raises(ValueError, match="scalar as 'a'"):
        loader({"a": np.zeros(())})
    for empty in ({}, {"a": np.zeros((0, 2))}, Rows(0)):
        with pytest.raises(ValueError, match="source must have"):
            loader(empty)
    with pytest.raises(TypeError, match="list as 'a'"):
        loader({"a": [1, 2]})
    with pytest.raises(TypeError):
        loader(iter([1, 2]))
    weighted = {"x": np.zeros(8), "weight": np.ones(8)}
    with pytest.raises(ValueError, match="`weight` of its own"):
        loader(weighted)
    assert set(next(iter(loader(weighted, remainder="drop")))) == {"x", "weight"}
    with pytest.raises(ValueError, match="3 rows and batch_size=4"):
        loader(ids(3), remainder="drop")
    with pytest.raises(ValueError, match="batch_size=4 for 3 processes.*multiple of 3"):
        loader(ids(9), process_index=0, process_count=3)
    with pytest.raises(ValueError, match="process_index=2 and process_count=2"):
        loader(ids(9), process_index=2, process_count=2)
    with pytest.raises(ValueError, match="process_index=1 and process_count=None"):
        loader(ids(9), process_index=1)
    for settings in ({"batch_size": 0}, {"epochs": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must be"):
            loader(ids(9), **settings)
    with pytest.raises((ValueError, TypeError)):
        loader(ids(9), remainder="keep")


def test_rows_that_do_not_fit_are_refused():
    class Odd(Rows):
        def __init__(self, odd: Any) -> None:
            super().__init__(4)
            self.odd = odd

        def __getitem__(self, index: int) -> Any:
            if index != 2:
                return super().__getitem__(index)
            if isinstance(self.odd, Exception):
                raise self.odd
            return self.odd

    def read(odd: Any) -> list[Any]:
        return list(Loader(Odd(odd), 2, shuffle=False, epochs=1))

    with pytest.raises(ValueError, match=r"row 2 and .* for row 3"):
        read({"id": np.zeros(3), "x": 0.0})
    with pytest.raises(ValueError, match="row 2"):
        read({"id": 2})
    with pytest.raises(TypeError, match="tuple for row 2"):
        read((1, 2))
    # Passed on, it would end the epoch without a word.
    with pytest.raises(RuntimeError, match="row 2"):
        read(StopIteration())

    class Weighted(Rows):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            return {"x": 1.0, "weight": 1.0}

    with pytest.raises(ValueError, match="`weight` of its own"):
        list(Loader(Weighted(4), 2, epochs=1))
