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

from eqtrain.data import Loader, prefetch
from tests.data.processes import run_two


def ids(num_rows: int) -> dict[str, np.ndarray]:
    return {"id": np.arange(num_rows, dtype=np.int32), "x": np.ones((num_rows, 3), np.float32)}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 seconds"
        time.sleep(0.002)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "eqtrain-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert not reading_threads()
    yield
    assert not reading_threads()


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
        wait_for(lambda: len(source_reads) == 2 * 7)
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
    assert closed.is_set() and not reading_threads()


def test_forgotten_iterator_ends_its_thread():
    closed = threading.Event()
    batches = prefetch(endless(closed))
    next(batches)
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    del batches, cycle
    gc.collect()
    assert closed.is_set() and not reading_threads()


def test_depth_must_be_positive():
    with pytest.raises(ValueError, match="Got 0"):
        prefetch([], depth=0)


PROCESS = """
    from jax.sharding import NamedSharding, PartitionSpec as P
    from eqtrain.data import Loader, prefetch

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

    # The exit of Python ends the thread of an iterator that is still in use.
    left = prefetch(Loader(source, 8, process_index=0, process_count=1), depth=1)
    next(left)
    print("done", flush=True)
"""


def test_two_processes_share_a_batch_and_compare_their_settings():
    # Case 43.
    assert all("done" in output for output in run_two(PROCESS))
