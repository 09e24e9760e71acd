"""Reading ahead changes nothing but the time: no row lost, no error hidden, no thread left."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqtrain.data import Loader, prefetch, stack
from tests.data.processes import run_two
from tests.data.threads import readers, wait_for


def ids(num_rows: int) -> dict[str, np.ndarray]:
    return {"id": np.arange(num_rows, dtype=np.int32), "x": np.ones((num_rows, 3), np.float32)}


def reading_threads() -> list[threading.Thread]:
    return readers("eqtrain-prefetch")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert not reading_threads()
    yield
    wait_for(lambda: not reading_threads())


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    auto = (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "seq"), axis_types=auto, devices=jax.devices()[:4])


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_are_those_of_the_loader(mesh, depth):
    loader = Loader(ids(10), 4, epochs=2)
    expected = list(loader.iterate())
    with prefetch(loader, NamedSharding(mesh, P("data")), depth) as batches:
        found = list(batches)
    assert len(found) == len(expected) == 6
    for batch, reference in zip(found, expected, strict=True):
        assert set(batch) == {"id", "x", "weight"}
        for name, array in batch.items():
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), array.ndim)
            assert array.dtype == reference[name].dtype
            np.testing.assert_array_equal(array, reference[name])
    assert loader.position == 20
    with pytest.raises(RuntimeError, match="epochs=2"):  # as for a loop over the loader itself
        next(prefetch(loader))


def test_run_with_padding_traces_once_on_two_devices(mesh):
    # Case 28.
    sharding = NamedSharding(mesh, P("data"))
    traces = []

    @jax.jit
    def step(total: Any, batch: Any) -> Any:
        traces.append(1)
        values = batch["id"].astype(jnp.float32) * batch["weight"]
        return total + jnp.stack([values.sum(), batch["weight"].sum()])

    total = jax.device_put(jnp.zeros(2), NamedSharding(mesh, P()))
    for batch in prefetch(Loader(ids(10), 4, epochs=2), sharding):
        total = step(total, batch)
    assert total.tolist() == [90, 20] and len(traces) == 1


def test_shardings_fit_each_leaf(mesh):
    both = NamedSharding(mesh, P("data", "seq"))
    batch = {"tokens": np.ones((4, 6), np.int32), "label": np.ones(4), "scale": 2.0, "none": None}
    (placed,) = prefetch([batch], both)
    specs = {"tokens": P("data", "seq"), "label": P("data"), "scale": P()}
    for name, spec in specs.items():
        assert placed[name].sharding == NamedSharding(mesh, spec)
        np.testing.assert_array_equal(placed[name], batch[name])
    assert placed["none"] is None

    tree = {"tokens": both, "label": None, "scale": jax.devices()[3], "none": None}
    (placed,) = prefetch([batch], tree)
    assert placed["tokens"].sharding == both
    assert placed["label"].devices() == {jax.devices()[0]}
    assert placed["scale"].devices() == {jax.devices()[3]}

    with pytest.raises(ValueError, match="Got 3 for dim 0 of .*2 shards along 'data'") as info:
        list(prefetch([{"a": np.ones(4), "b": np.ones(3)}], NamedSharding(mesh, P("data"))))
    assert "batch['b']" in "".join(info.value.__notes__)


def test_reader_may_fill_the_same_arrays_again():
    # Of the alignment with which JAX takes an array over instead of copying it.
    memory = np.zeros(64 * 4 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    buffer = memory[start : start + 64 * 4]

    def batches() -> Iterator[np.ndarray]:
        for n in range(8):
            buffer[:] = n
            yield buffer

    found = list(prefetch(batches(), depth=4))
    assert [array.tolist() for array in found] == [[n] * 256 for n in range(8)]


def test_no_more_than_depth_batches_are_ahead():
    produced = []

    def batches() -> Iterator[np.ndarray]:
        for n in range(24):
            produced.append(n)
            yield np.full(2, n)

    with prefetch(batches(), depth=4) as ahead:
        assert not produced  # nothing is read before it is asked for
        for n in range(3):
            assert next(ahead)[0] == n
        wait_for(lambda: len(produced) == 7)
        time.sleep(0.05)
        assert len(produced) == 7


def test_position_counts_batches_handed_out():
    # Case 46.
    source_reads = []

    class Rows(list):
        def __getitem__(self, row: Any) -> Any:
            source_reads.append(row)
            return super().__getitem__(row)

    loader = Loader(Rows({"id": i} for i in range(24)), 2, epochs=1)
    expected = [batch["id"].tolist() for batch in loader.iterate()]
    source_reads.clear()
    with prefetch(loader, depth=4) as batches:
        assert batches.position == 0
        for n in range(3):
            assert next(batches)["id"].tolist() == expected[n]
            # All four are read before the next is asked for: it must not take their position.
            wait_for(lambda n=n: len(source_reads) == 2 * (n + 1 + 4))
        assert batches.position == loader.position == 6
    resumed = Loader(ids(24), 2, epochs=1)
    resumed.position = loader.position
    assert [batch["id"].tolist() for batch in prefetch(resumed)] == expected[3:]
    # In the same process, too: what was read ahead and dropped is read again.
    assert [batch["id"].tolist() for batch in prefetch(loader)] == expected[3:]

    batches = prefetch(loader.iterate(10))
    assert next(batches)["id"].tolist() == expected[5]
    assert batches.position == 12 and loader.position == 24
    batches.close()


def test_error_of_the_reader_comes_at_its_batch():
    # Case 46.
    failed = threading.Event()

    def batches() -> Iterator[np.ndarray]:
        for n in range(12):
            if n == 7:
                failed.set()
                raise OSError("row 7 cannot be read")
            yield np.full(2, n)

    ahead = prefetch(batches(), depth=4)
    for n in range(7):
        assert next(ahead)[0] == n
        if n == 3:  # it has already failed, and the batches before that still come
            assert failed.wait(20)
    with pytest.raises(OSError, match="row 7 cannot be read") as info:
        next(ahead)
    assert "batches" in [entry.name for entry in info.traceback]  # the reader's own line is shown
    assert not reading_threads()
    with pytest.raises(StopIteration):
        next(ahead)


def test_error_before_the_first_batch():
    def batches() -> Iterator[np.ndarray]:
        raise SystemExit(3)
        yield

    with pytest.raises(SystemExit):
        next(prefetch(batches()))


def endless(closed: threading.Event) -> Iterator[np.ndarray]:
    try:
        while True:
            yield np.zeros(2)
    finally:
        closed.set()


def test_close_ends_the_thread_and_the_generator():
    closed = threading.Event()
    batches = prefetch(endless(closed))
    next(batches)
    (thread,) = reading_threads()
    batches.close()
    assert not thread.is_alive() and closed.is_set()
    assert list(batches) == []
    batches.close()  # again does no harm
    prefetch(endless(threading.Event())).close()  # nor before the start


def test_with_block_ends_the_thread_when_its_body_raises():
    closed = threading.Event()
    with pytest.raises(KeyError, match="body"), prefetch(endless(closed)) as batches:
        for _ in batches:
            raise KeyError("body")
    assert closed.is_set() and not reading_threads()


def test_break_ends_the_thread():
    closed = threading.Event()
    for _ in prefetch(endless(closed)):
        break
    gc.collect()
    wait_for(lambda: closed.is_set() and not reading_threads())


def test_forgotten_iterator_ends_its_thread():
    closed = threading.Event()
    batches = prefetch(endless(closed))
    next(batches)
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    del batches, cycle
    gc.collect()
    wait_for(lambda: closed.is_set() and not reading_threads())


def test_garbage_collected_by_a_thread_that_is_waited_for():
    # The reading thread waits for those that read rows, and one of these may collect the iterator.
    forgotten, collected = threading.Event(), threading.Event()

    class Source:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, row: int) -> dict[str, np.ndarray]:
            if row >= 2 and not collected.is_set():
                forgotten.wait(20)
                gc.collect()
                collected.set()
            return {"id": np.array(row)}

    batches = prefetch(Loader(Source(), 2, shuffle=False, num_threads=1))
    next(batches)
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    del batches, cycle
    forgotten.set()
    wait_for(lambda: collected.is_set() and not reading_threads())


def test_settings_of_the_thread_that_asks_count():
    device = jax.devices()[3]
    with jax.default_device(device), jax.enable_x64(True):
        batch = next(prefetch([{"x": np.ones(2, np.float64)}]))
    assert batch["x"].devices() == {device} and batch["x"].dtype == np.float64
    assert next(prefetch([{"x": np.ones(2, np.float64)}]))["x"].dtype == np.float32
    with jax.enable_x64(True):
        read = next(prefetch(jnp.asarray(np.ones(2, np.float64)) for _ in range(1)))
    assert read.dtype == np.float64


def test_source_is_read_by_one_thread_at_a_time_whatever_was_left():
    class File:
        """As one with an open file: a row is where the file was told to stand."""

        def __init__(self) -> None:
            self.at = 0

        def __len__(self) -> int:
            return 4096

        def __getitem__(self, row: int) -> dict[str, np.ndarray]:
            self.at = row
            time.sleep(0.002)
            return {"id": np.array(self.at)}

    loader = Loader(File(), 8, seed=1)
    ways: list[Callable[[], Any]] = [
        lambda: loader,
        lambda: loader.iterate(loader.position),
        lambda: stack(loader, 1),
    ]
    for turn in range(12):
        n = loader.position // 8
        for batch in prefetch(ways[turn % 3](), depth=2):
            np.testing.assert_array_equal(np.ravel(batch["id"]), loader.rows(n))
            break


def test_reading_thread_may_close_the_iterator():
    taken = threading.Event()

    def read() -> Iterator[np.ndarray]:
        yield np.zeros(2)
        taken.wait(20)
        batches.close()  # as the garbage collector may, in that thread
        yield np.ones(2)

    batches = prefetch(read())
    next(batches)
    taken.set()
    wait_for(lambda: not reading_threads())
    assert list(batches) == []


def test_batches_and_stacks_tell_whose_rows_they_have():
    loader = Loader(ids(8), 4, process_index=1, process_count=2)
    assert loader.iterate().share == loader.share
    assert stack(loader.iterate(), 2).share == stack(loader, 2).share  # pyright: ignore
    assert stack([{"x": np.ones(1)}], 1).share is None  # pyright: ignore


def test_depth_must_be_positive():
    with pytest.raises(ValueError, match="Got 0"):
        prefetch([], depth=0)


PROCESS = """
    from jax.sharding import NamedSharding, PartitionSpec as P
    from eqtrain.data import Loader, bucket, prefetch, stack

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    source = {"id": np.arange(10, dtype=np.int32), "x": np.arange(20.0).reshape(10, 2)}
    loader = Loader(source, 8, epochs=2)
    assert (loader.process_index, loader.process_count) == (index, 2)
    whole = Loader(source, 8, epochs=2, process_index=0, process_count=1)
    total = jax.jit(lambda b: ((b["id"] * b["weight"]).sum(), b["x"].sum()))
    for n, batch in enumerate(prefetch(loader, sharding)):
        expected = whole.batch(n)
        for name, array in batch.items():
            assert array.shape == expected[name].shape and array.sharding == sharding
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[name][shard.index])
        found = [float(value) for value in total(batch)]
        assert found == [(expected["id"] * expected["weight"]).sum(), expected["x"].sum()]
    assert n == 3 and loader.position == 20

    try:
        Loader(source, 8, seed=index)
    except ValueError as error:
        assert "seed of [0, 1]" in str(error), error
    else:
        raise AssertionError("another seed went unnoticed")

    # An all-gather of more settings from one process than from the other would not end.
    rows = [{"tokens": np.arange(3)}] * 8
    try:
        Loader(bucket(rows, lengths=(4, 8)[: 1 + index], pad={"tokens": 0}), 8)
    except ValueError as error:
        assert "a number of settings of [9, 10]" in str(error), error
    else:
        raise AssertionError("another number of buckets went unnoticed")

    def first(shape, spec, by=("data", "model"), repeat=None, **share):
        auto = (jax.sharding.AxisType.Auto,) * 2
        sharding = NamedSharding(jax.make_mesh(shape, by, axis_types=auto), spec)
        batches = Loader(source, 8, **share)
        with prefetch(stack(batches, repeat) if repeat else batches, sharding) as taken:
            batch = next(taken)
        # The same from an iterator of its own, as an evaluation reads.
        batches = batches.iterate()
        with prefetch(stack(batches, repeat) if repeat else batches, sharding) as taken:
            assert (next(taken)["id"] == batch["id"]).all()
        return batch

    # Where a model axis lies across processes, both hold the same rows, and both read them.
    for shape, by in [((1, 4), ("data", "model")), ((2, 2), ("model", "data"))]:
        try:
            first(shape, P("data"), by)
        except ValueError as error:
            assert f"share {index} of 2 in process {index}" in str(error), error
            assert "`process_index=0, process_count=1`" in str(error), error
        else:
            raise AssertionError("different rows were taken for copies")
        batch = first(shape, P("data"), by, process_index=0, process_count=1)
        assert batch["id"].shape == (8,)
        for shard in batch["id"].addressable_shards:
            np.testing.assert_array_equal(shard.data, whole.batch(0)["id"][shard.index])
    # All rows in both, where each holds a half, would be twice the batch.
    try:
        auto = (jax.sharding.AxisType.Auto,) * 2
        across = jax.make_mesh((1, 4), ("data", "model"), axis_types=auto)
        next(prefetch(Loader(source, 8).iterate(), NamedSharding(across, P("data"))))
    except ValueError as error:
        assert f"share {index} of 2 in process {index}" in str(error), error
    else:
        raise AssertionError("different rows of an iterator were taken for copies")
    try:
        first((4, 1), P("data"), process_index=0, process_count=1)
    except ValueError as error:
        assert f"`process_index={index}, process_count=2`" in str(error), error
    else:
        raise AssertionError("a batch of twice the size was made")
    # An axis that splits columns across processes.
    try:
        first((1, 4), P("data", "model"), process_index=0, process_count=1)
    except ValueError as error:
        assert "hold 2 of 4 parts along dim 1" in str(error), error
    else:
        raise AssertionError("rows that were cut were taken for whole")
    # Stacks of batches, whose rows are along dim 1.
    batch = first((4, 1), P(None, "data"), repeat=2)
    assert batch["id"].shape == (2, 8)
    for shard in batch["id"].addressable_shards:
        expected = np.stack([whole.batch(n)["id"] for n in range(2)])
        np.testing.assert_array_equal(shard.data, expected[shard.index])

    # The exit of Python ends the thread of an iterator that is still in use.
    left = prefetch(Loader(source, 8, process_index=0, process_count=1), depth=1)
    next(left)
    print("done", flush=True)
"""


def test_two_processes_share_a_batch_and_compare_their_settings():
    # Case 43.
    assert all("done" in output for output in run_two(PROCESS))
