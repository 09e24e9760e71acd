"""Recipes from public reports: rows that come twice, never, or again after a restart.

Section I of the reports. Rows are known by their ids, and what came is compared with what has to
come, counted by hand; the wrong answers are those that were reported.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqtrain as et
from eqtrain.data import Loader, prefetch
from tests.data.processes import run_two


class Rows:
    """Rows by id, with a note of each that is read; some cannot be."""

    def __init__(self, num_rows: int, broken: tuple[int, ...] = ()) -> None:
        self.num_rows = num_rows
        self.broken = broken
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        if index in self.broken:
            raise OSError(f"row {index} cannot be read")
        return {"id": np.int32(index)}


def counted(batch: dict[str, Any]) -> list[int]:
    """The ids of rows that count."""
    weight = np.asarray(batch.get("weight", np.ones(len(batch["id"]))))
    return np.asarray(batch["id"])[weight > 0].tolist()


def test_42_each_epoch_has_an_order_of_its_own():
    def flip(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**example, "noise": rng.random(2)}

    def epochs(num_threads: int, seed: int = 0) -> list[list[Any]]:
        loader = Loader(Rows(16), 4, seed=seed, epochs=3, augment=flip, num_threads=num_threads)
        rows = [
            row
            for b in loader
            for row in zip(b["id"].tolist(), map(tuple, b["noise"]), strict=True)
        ]
        return [rows[i : i + 16] for i in (0, 16, 32)]

    found = epochs(0)
    ids = [[row for row, _ in epoch] for epoch in found]
    assert all(sorted(epoch) == list(range(16)) for epoch in ids)
    assert len({tuple(epoch) for epoch in ids}) == 3
    # Noise of each example in each epoch is its own, whoever reads it.
    assert len({noise for epoch in found for _, noise in epoch}) == 48
    assert epochs(2) == epochs(4) == found
    assert epochs(0, seed=1) != found


@pytest.mark.parametrize(("remainder", "ids"), [("drop", 20), ("pad", 22)])
def test_43_hosts_share_out_the_rows_of_an_epoch(remainder, ids):
    def run(hosts: int, seeds: list[int]) -> tuple[list[list[int]], list[Rows]]:
        """What counts in each global batch, and the sources that the hosts read from."""
        sources = [Rows(22) for _ in range(hosts)]
        batches = []
        loaders = [
            Loader(
                source, 4, seed=seed, epochs=2, remainder=remainder,
                process_index=host, process_count=hosts,
            )
            for host, (source, seed) in enumerate(zip(sources, seeds, strict=True))
        ]  # fmt: skip
        for parts in zip(*loaders, strict=True):
            batches.append([row for part in parts for row in counted(part)])
        return batches, sources

    batches, sources = run(4, [0] * 4)
    steps = len(batches) // 2
    for epoch in (batches[:steps], batches[steps:]):
        rows = sum(epoch, [])
        assert len(rows) == len(set(rows)) == ids
    assert batches == run(1, [0])[0] == run(2, [0] * 2)[0]
    # Each has read its own only: one row of each batch.
    assert [len(source.read) for source in sources] == [2 * steps] * 4
    # Negative control, which real processes refuse at the start: see case 48.
    rows = sum(run(4, [0, 1, 2, 3])[0][:steps], [])
    assert len(set(rows)) < len(rows)


def test_44_a_run_that_is_resumed_twice_goes_on():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        x = jnp.cos(batch["id"].astype(jnp.float32))
        return et.mean((x * model - 1) ** 2, where=batch["weight"]), state, {}

    step = et.pipe(loss, et.update(optax.sgd(0.1)), et.jit)
    first = step.init(lambda key: jnp.zeros(()), key=jax.random.key(0))

    def run(lengths: list[int]) -> tuple[list[int], list[float]]:
        """Ids and losses of so many batches each time, from a new loader each time."""
        ts, position = first, 0
        ids, losses = [], []
        for length in lengths:
            loader = Loader(Rows(199), 2, seed=4)
            loader.position = position
            with prefetch(loader) as batches:
                for _ in range(length):
                    batch = next(batches)
                    ts, metrics = step(ts, batch)
                    ids += counted(batch)
                    losses.append(et.fetch(metrics)["loss"])
            position = loader.position
        return ids, losses

    unbroken = run([100])
    assert sorted(unbroken[0]) == list(range(199))
    assert run([30, 10, 60]) == unbroken
    # The reported faults: the epoch anew at the first resume, or at the second.
    again = unbroken[0][:60] + unbroken[0][:20]
    assert run([30, 10])[0] != again and run([30, 10])[0] == unbroken[0][:80]
    # At the end of an epoch, one before and one after.
    assert run([99, 1, 1, 1]) == run([102])


def test_44_a_new_iterator_in_the_middle_of_a_few_rows():
    (first, second) = (counted(batch) for batch in Loader(Rows(10), 5, epochs=1))
    loader = Loader(Rows(10), 5, epochs=1)
    loader.position = 5
    assert [counted(batch) for batch in loader] == [second]
    assert sorted(first + second) == list(range(10))


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("eqtrain-")]


@pytest.fixture(params=[0, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    assert not alive()
    yield request.param
    assert not alive()


def test_46_batches_in_flight_are_not_counted(num_threads):
    expected = [counted(batch) for batch in Loader(Rows(24), 2, epochs=1)]
    source = Rows(24)
    loader = Loader(source, 2, epochs=1, num_threads=num_threads)
    with prefetch(loader, depth=4) as batches:
        found = [counted(next(batches)) for _ in range(3)]
        deadline = time.monotonic() + 20
        while len(source.read) < 2 * 7 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(source.read) == 14 and loader.position == 6  # 4 batches are in flight
    resumed = Loader(Rows(24), 2, epochs=1, num_threads=num_threads)
    resumed.position = loader.position
    assert found + [counted(batch) for batch in prefetch(resumed, depth=4)] == expected


def test_46_an_error_comes_out_at_its_batch(num_threads):
    order = [counted(batch) for batch in Loader(Rows(24), 2, epochs=1)]
    loader = Loader(Rows(24, tuple(order[7])), 2, epochs=1, num_threads=num_threads)
    batches = prefetch(loader, depth=4)
    assert [counted(next(batches)) for _ in range(7)] == order[:7]
    with pytest.raises(OSError, match=f"row {order[7][0]} cannot be read"):
        next(batches)
    assert loader.position == 14 and not alive()
    with pytest.raises(StopIteration):
        next(batches)


def test_46_an_early_stop_leaves_no_thread(num_threads):
    loader = Loader(Rows(24), 2, num_threads=num_threads)
    with prefetch(loader, depth=4) as batches:
        for batch in batches:
            if 5 in counted(batch):
                break
    assert not alive()


PROCESS = """
    from eqtrain.data import Loader, bucket, mix, prefetch

    assert jax.process_count() == 2
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    total = jax.jit(lambda batch: (batch["id"] * batch.get("weight", 1)).sum())

    def source(rows):
        return {"id": np.arange(rows, dtype=np.float32)}

    # Each step ends in a collective, in which one would wait for the other for ever.
    for remainder in ("drop", "pad"):
        loader = Loader(source(145), 48, epochs=1, remainder=remainder)
        sums = [float(total(batch)) for batch in prefetch(loader, sharding)]
        print(remainder, len(sums), sum(sums))

    rows = [{"t": np.ones(n)} for n in (1, 5, 2, 6 + index)]
    wrong = {
        "seed of [0, 1]": lambda: Loader(source(8), 4, seed=index),
        "the number of rows of [145, 144]": lambda: Loader(source(145 - index), 48),
        "epochs of [1, 2]": lambda: Loader(source(8), 4, epochs=1 + index),
        "the lengths of the rows": lambda: Loader(bucket(rows, (2, 8), pad={"t": 0}), 2),
        "bucket 1 of [8, 9]": lambda: Loader(
            bucket(rows[:3], (2, 8 + index), pad={"t": 0}), 2
        ),
        "weights of the sources": lambda: Loader(
            mix({"a": source(8), "b": source(8)}, {"a": 1, "b": 1 + index}), 4
        ),
    }
    for message, make in wrong.items():
        try:
            make()
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"went unnoticed: {message}")
    print("done")
"""


def test_48_all_hosts_take_as_many_steps():
    # By hand: 145 rows are 3 full batches of 48, and 1 row. A host each with 49, 49 and 47 rows of
    # its own, in local batches of 16, would have 3, 3 and 2.
    assert [len(range(0, rows - 15, 16)) for rows in (49, 49, 47)] == [3, 3, 2]
    policies: list[tuple[Any, int]] = [("drop", 3), ("pad", 4)]
    for remainder, steps in policies:
        loaders = [
            Loader(Rows(145), 48, epochs=1, remainder=remainder, process_index=i, process_count=3)
            for i in range(3)
        ]
        assert [len(list(loader)) for loader in loaders] == [steps] * 3
    # Two that are real; they also find settings that differ (case 43), both of them, and at once.
    kept = sum(sum(counted(Loader(Rows(145), 48).batch(n))) for n in range(3))
    whole = sum(range(145))
    for output in run_two(PROCESS):
        assert f"drop 3 {kept:.1f}" in output and f"pad 4 {whole:.1f}" in output
        assert "done" in output
