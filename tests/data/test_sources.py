"""What a loader reads from: rows of other libraries, many at once where that is offered."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eqtrain.data import Loader, prefetch

X = np.arange(33, dtype=np.float32).reshape(11, 3)


def same_batches(source: Any, **settings: Any) -> None:
    """As of the same rows in arrays, which the loader's other tests are about."""
    expected = Loader({"x": X, "id": np.arange(11)}, 4, seed=2, epochs=2)
    found = Loader(source, 4, seed=2, epochs=2, **settings)
    for batch, reference in zip(found, expected, strict=True):
        assert set(batch) == set(reference)
        for name, array in batch.items():
            np.testing.assert_array_equal(array, reference[name])


def rows() -> list[dict[str, Any]]:
    return [{"x": X[i].copy(), "id": i} for i in range(11)]


class Many:
    """Rows that are read a list at a time, with a note of each."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.read: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one row was asked for")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert all(type(index) is int for index in indices)
        self.read.append(indices)
        return [self.rows[index] for index in indices]


def test_list_of_rows():
    same_batches(rows())


def test_memory_mapped_arrays_are_read_where_they_are(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    same_batches({"x": mapped, "id": np.arange(11)})
    batch = Loader({"x": mapped}, 4).batch(0)
    assert type(batch["x"]) is np.ndarray and batch["x"].flags.writeable  # and not of the file


def test_rows_are_read_many_at_once_where_a_source_can():
    source = Many(rows())
    same_batches(source)
    assert [len(read) for read in source.read] == [4] * 6
    # Each process asks for its own.
    sources = [Many(rows()) for _ in range(2)]
    parts = [
        list(Loader(each, 4, seed=2, epochs=1, process_index=i, process_count=2))
        for i, each in enumerate(sources)
    ]
    for n, (first, second) in enumerate(zip(*parts, strict=True)):
        expected = Loader(rows(), 4, seed=2).rows(n).tolist()
        assert sources[0].read[n] + sources[1].read[n] == expected
        assert [*first["id"], *second["id"]] == expected


def test_rows_of_several_dtypes_are_refused():
    # NumPy would promote them, so that the dtype of a batch depended on the rows in it.
    mixed = [{"x": np.float32(1)}, {"x": np.float64(1)}]
    with pytest.raises(ValueError, match=r"'x': 'float32\[\]'} for row 0 and {'x': 'float64\[\]'}"):
        Loader(mixed, 2, shuffle=False).batch(0)
    texts = [{"text": "a"}, {"text": "longer"}]
    assert Loader(texts, 2, shuffle=False).batch(0)["text"].tolist() == ["a", "longer"]


def test_error_of_rows_read_many_at_once():
    class Ended(Many):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Loader(Ended(rows()), 4, epochs=1))
    with pytest.raises(TypeError, match="NoneType for row 1"):
        list(Loader(Many([rows()[0], None]), 2, shuffle=False, epochs=1))


@pytest.mark.parametrize("kept", [None, "numpy", "torch"])
def test_hugging_face_datasets(kept):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": X.tolist(), "id": list(range(11))})
    if kept is None:  # lists of Python's floats, which are NumPy's of 64 bits
        same_batches(dataset)
        assert Loader(dataset, 4).batch(0)["x"].dtype == np.float64
        return
    dataset = dataset.with_format(kept)
    same_batches(dataset)
    assert Loader(dataset, 4).batch(0)["x"].dtype == np.float32
    # A batch is one read: a row at a time costs many times that.
    calls = []

    class Counted(type(dataset)):
        def __getitem__(self, key: Any) -> Any:
            calls.append(key)
            return super().__getitem__(key)

    dataset.__class__ = Counted
    Loader(dataset, 4, shuffle=False).batch(1)
    assert calls == [[4, 5, 6, 7]]


def test_grain_sources_and_pipelines(tmp_path):
    grain = pytest.importorskip("grain")

    class Source(grain.sources.RandomAccessDataSource):
        def __len__(self) -> int:
            return 11

        def __getitem__(self, index: Any) -> dict[str, Any]:
            return {"id": np.asarray(index), "raw": X[index] - 1}

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "x": row["raw"] + 1}

    same_batches(grain.MapDataset.source(Source()).map(parse))
    plain = Loader(Source(), 4, shuffle=False).batch(0)
    np.testing.assert_array_equal(plain["raw"], X[:4] - 1)
    # Random transforms of Grain's are decided by the row, and not by when it is read.
    noisy = grain.MapDataset.source(Source()).seed(3).random_map(add_noise)
    one, other = Loader(noisy, 4), Loader(noisy, 4, num_threads=3)
    other.batch(1)
    np.testing.assert_array_equal(one.batch(2)["raw"], other.iterate(8).__next__()["raw"])
    # What a filter leaves out is None there, and no row.
    odd = grain.MapDataset.source(Source()).filter(lambda row: row["id"] % 2 == 1)
    with pytest.raises(TypeError, match="NoneType for row 0"):
        Loader(odd, 4, shuffle=False).batch(0)


def add_noise(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**row, "raw": row["raw"] + rng.normal(size=3)}


def jitter(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**example, "x": example["x"] + rng.normal(size=3), "noise": rng.random()}


SOURCES: list[Callable[[], Any]] = [rows, lambda: Many(rows()), lambda: {"x": X, "id": X[:, 0]}]


@pytest.mark.parametrize("source", SOURCES)
def test_batches_are_the_same_with_any_number_of_threads(source):
    def run(num_threads: int, ahead: bool) -> list[dict[str, np.ndarray]]:
        loader = Loader(source(), 4, epochs=3, augment=jitter, num_threads=num_threads)
        return list(prefetch(loader)) if ahead else list(loader)

    expected = run(0, False)
    for num_threads, ahead in ((0, True), (2, False), (4, True), (9, False)):
        for batch, reference in zip(run(num_threads, ahead), expected, strict=True):
            for name, array in batch.items():
                want = reference[name]
                np.testing.assert_array_equal(array, want.astype(np.float32) if ahead else want)


def test_noise_is_decided_by_seed_epoch_and_row():
    def noise(**settings: Any) -> dict[tuple[int, int], float]:
        """By epoch and row."""
        loader = Loader(rows(), epochs=3, augment=jitter, **settings)
        return {
            (n // loader.steps_per_epoch, row): value
            for n, batch in enumerate(loader)
            for row, value in zip(batch["id"].tolist(), batch["noise"].tolist(), strict=True)
        }

    expected = noise(batch_size=4)
    assert len(expected) == len(set(expected.values())) == 33  # padding repeats its row's
    assert noise(batch_size=3) == noise(batch_size=11, shuffle=False) == expected
    assert not set(noise(batch_size=4, seed=1).values()) & set(expected.values())


def test_augment_may_work_in_place():
    def double(example: Any, rng: np.random.Generator) -> Any:
        example["x"] *= 2
        return example

    source = rows()
    for batch in Loader(source, 8, epochs=2, augment=double):  # padding repeats rows
        np.testing.assert_array_equal(batch["x"], 2 * X[batch["id"]])
    np.testing.assert_array_equal([row["x"] for row in source], X)


def test_augment_that_gives_no_example_is_refused():
    def ends(example: Any, rng: Any) -> Any:
        raise StopIteration

    for num_threads in (0, 2):
        with pytest.raises(RuntimeError, match="`augment` raised StopIteration for row 0"):
            list(Loader(rows(), 4, shuffle=False, augment=ends, num_threads=num_threads))
        with pytest.raises(TypeError, match="`augment` must return .* Got NoneType for row 0"):
            none: Any = lambda example, rng: None  # noqa: E731
            list(Loader(rows(), 4, shuffle=False, augment=none, num_threads=num_threads))


class Gate:
    """Rows of which so many have to be asked for at once before one is given."""

    def __init__(self, together: int) -> None:
        self.barrier = threading.Barrier(together, timeout=20)
        self.failing: set[int] = set()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, int]:
        self.barrier.wait()
        if index in self.failing:
            raise OSError(f"row {index} cannot be read")
        return {"id": index}


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("eqtrain-")]


def test_threads_read_rows_at_the_same_time_and_end():
    loader = Loader(Gate(4), 4, shuffle=False, epochs=1, num_threads=4)
    assert [batch["id"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not readers()
    for batch in loader:
        assert len(readers()) == 4 and batch["id"][0] == 0
        break
    assert not readers()
    with prefetch(loader) as batches:
        next(batches)
    assert not readers()
    batches = loader.iterate()
    next(batches)
    batches.close()
    assert not readers()


def test_error_in_a_thread_comes_at_its_batch():
    source = Gate(2)
    source.failing = {5, 7}
    loader = Loader(source, 4, shuffle=False, epochs=1, num_threads=2)
    for batches in (iter(loader), prefetch(loader, depth=3)):
        loader.position = 0
        assert np.asarray(next(batches)["id"]).tolist() == [0, 1, 2, 3]
        with pytest.raises(OSError, match="row 5 cannot be read"):  # the first of them
            next(batches)
        assert loader.position == 4
        source.barrier.reset()
    assert not readers()
