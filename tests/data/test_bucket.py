"""Rows of many lengths in a few shapes: each once, resumable, and nothing of the padding counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain.data import Loader, bucket, prefetch

LENGTHS = [1, 9, 4, 5, 2, 16, 3, 4, 12, 7, 1, 5, 8, 2, 3, 6, 11, 4, 2, 5, 3, 10, 1]
SHAPES = (4, 8, 16)


def rows() -> list[dict[str, Any]]:
    """Row i has tokens of 100 i and up, and the label i."""
    return [
        {"tokens": 100 * i + np.arange(n, dtype=np.int32), "tags": np.ones((n, 2)), "label": i}
        for i, n in enumerate(LENGTHS)
    ]


def buckets(source: Any = None, **settings: Any) -> Any:
    source = rows() if source is None else source
    return bucket(source, SHAPES, pad={"tokens": -1, "tags": 0.5}, **settings)


def shape_of(length: int) -> int:
    return min(shape for shape in SHAPES if shape >= length)


@pytest.mark.parametrize("remainder", ["pad", "drop"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_comes_once_in_the_shortest_shape_it_fits(remainder, shuffle):
    loader = Loader(buckets(), 4, seed=1, epochs=2, remainder=remainder, shuffle=shuffle)
    sizes = np.bincount([SHAPES.index(shape_of(n)) for n in LENGTHS])
    assert sizes.tolist() == [12, 6, 5]
    full, short = 3 + 1 + 1, 2 if remainder == "pad" else 0
    assert loader.steps_per_epoch == full + short and loader.dropped_per_epoch == 3 * (not short)
    batches, order = list(loader), []
    for n, batch in enumerate(batches):
        weight = batch.get("weight", np.ones(4, np.float32))
        assert set(weight[:2]) == {1} or n % loader.steps_per_epoch >= full
        shape = batch["tokens"].shape[1]
        assert batch["tags"].shape == (4, shape, 2) and batch["mask"].shape == (4, shape)
        for i, row in enumerate(batch["label"].tolist()):
            length = LENGTHS[row]
            assert shape_of(length) == shape and batch["length"][i] == length
            expected = np.full(shape, -1)
            expected[:length] = 100 * row + np.arange(length)
            np.testing.assert_array_equal(batch["tokens"][i], expected)
            np.testing.assert_array_equal(batch["tags"][i, length:], 0.5)
            counts = (np.arange(shape) < length) & bool(weight[i])
            np.testing.assert_array_equal(batch["mask"][i], counts)
            order += [row] if weight[i] else []
    per_epoch = len(order) // 2
    for epoch in (order[:per_epoch], order[per_epoch:]):
        assert len(set(epoch)) == per_epoch == 23 - loader.dropped_per_epoch
    assert (order[:per_epoch] == order[per_epoch:]) != shuffle
    shapes = [batch["tokens"].shape[1] for batch in batches[:full]]
    assert (shapes == sorted(shapes)) != shuffle  # and with shuffling they are interleaved
    # No more than the shapes that were asked for, and `label` is as it was.
    assert set(shapes) == set(SHAPES) and batches[0]["label"].dtype == np.int64


def test_orders_of_buckets_are_those_of_the_seed():
    orders = {
        tuple(row for batch in Loader(buckets(), 4, seed=seed, epochs=1) for row in batch["label"])
        for seed in range(5)
    }
    assert len(orders) == 5


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_one_integer_resumes_at_any_batch(remainder):
    loader = Loader(buckets(), 4, remainder=remainder, epochs=2)
    unbroken = [batch["tokens"] for batch in loader.iterate()]
    positions = [0]
    for n in range(len(loader)):
        assert loader.batches_before(positions[-1]) == n
        resumed = Loader(buckets(), 4, remainder=remainder, epochs=2)
        resumed.position = positions[-1]
        np.testing.assert_array_equal(next(iter(resumed))["tokens"], unbroken[n])
        np.testing.assert_array_equal(loader.rows(n), resumed.rows(n))
        positions.append(resumed.position)
        counted = int(loader.weight(n).sum())
        assert positions[-1] - positions[-2] == counted
    assert positions[-1] == 2 * loader.examples_per_epoch
    if remainder == "pad":  # 5 full batches, then of 2 rows and of 1
        assert positions[:8] == [0, 4, 8, 12, 16, 20, 22, 23]
        with pytest.raises(ValueError, match="Got 21, .*Use 20"):
            loader.position = 21


def test_processes_and_threads_share_each_batch():
    whole = Loader(buckets(), 4, seed=3, epochs=1)
    settings: dict[str, Any] = {"seed": 3, "epochs": 1, "process_count": 2}
    parts = [Loader(buckets(), 4, process_index=i, num_threads=3, **settings) for i in range(2)]
    for expected, *local in zip(whole, *parts, strict=True):
        assert set(expected) == {"tokens", "tags", "label", "length", "mask", "weight"}
        for name, array in expected.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in local]), array)


def test_padding_is_reported():
    padding = buckets().padding
    assert padding.lengths == SHAPES and padding.counts == (12, 6, 5)
    assert sum(padding.tokens) == sum(LENGTHS)
    slots = sum(shape_of(length) for length in LENGTHS)
    assert padding.fraction == pytest.approx(1 - sum(LENGTHS) / slots)
    assert f"{padding.fraction:.1%}" in str(padding).splitlines()[-1]
    # It is what a loader's batches hold, where all are full.
    batches = list(Loader(buckets(), 1, epochs=1))
    assert np.mean(np.concatenate([batch["mask"].ravel() for batch in batches])) == pytest.approx(
        1 - padding.fraction
    )
    one = bucket(rows(), [16], pad={"tokens": 0, "tags": 0})
    assert one.padding.fraction > padding.fraction  # or buckets would be for nothing


def test_arrays_of_one_width_are_cut_to_lengths_that_are_given():
    tokens = np.full((len(LENGTHS), 16), 99)
    for i, length in enumerate(LENGTHS):
        tokens[i, :length] = i
    source = {"tokens": tokens, "label": np.arange(len(LENGTHS))}
    made = bucket(source, SHAPES, pad={"tokens": -1}, row_lengths=LENGTHS)
    for batch in Loader(made, 3, epochs=1):
        expected = np.where(
            np.arange(batch["tokens"].shape[1]) < batch["length"][:, None],
            batch["label"][:, None],
            -1,
        )
        np.testing.assert_array_equal(batch["tokens"], expected)


def test_step_compiles_once_a_bucket_and_padding_does_not_count():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        values = model["scale"] * batch["tokens"].astype(jnp.float32)
        return et.mean(values, where=batch["mask"]), state, {}

    mesh = et.mesh(data=2)
    step = et.pipe(
        loss,
        et.shard(mesh, batch=P("data")),
        et.update(optax.sgd(0.0)),
        et.donate(max_compilations=len(SHAPES)),
    )
    ts = step.init(lambda key: {"scale": jnp.ones(())}, key=jax.random.key(0))
    total, count = 0.0, 0.0
    source = [{"tokens": row["tokens"]} for row in rows()]
    loader = Loader(bucket(source, SHAPES, pad={"tokens": 7777}), 4, epochs=2)
    for batch in prefetch(loader, step.batch_sharding):
        ts, metrics = step(ts, batch)
        mean = metrics["loss"]
        total, count = total + float(mean.total), count + float(mean.count)
    assert step.compilations == len(SHAPES)
    assert count == 2 * sum(LENGTHS)
    assert total == 2 * sum(int(row["tokens"].sum()) for row in rows())


def test_augment_may_shorten_a_row_and_not_lengthen_it():
    def cut(example: Any, rng: np.random.Generator) -> Any:
        return {**example, "tokens": example["tokens"][:1], "tags": example["tags"][:1]}

    for batch in Loader(buckets(), 4, epochs=1, augment=cut):
        assert batch["length"].tolist() == [1] * 4 and batch["tokens"].shape[1] in SHAPES

    def double(example: Any, rng: np.random.Generator) -> Any:
        both = {name: np.concatenate([example[name]] * 2) for name in ("tokens", "tags")}
        return {**example, **both}

    with pytest.raises(ValueError, match="must fit its bucket, of length 4. Got (6|8) tokens"):
        Loader(buckets(), 12, shuffle=False, augment=double).batch(0)


def test_rows_and_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Got 4 of 23 rows .* row 5 of length 16"):
        bucket(rows(), (4, 9), pad={"tokens": 0, "tags": 0})
    with pytest.raises(ValueError, match="Got a length of 0 for row 1"):
        bucket([{"a": np.ones(1)}, {"a": np.ones(0)}], (4,), pad={"a": 0})
    for lengths in ((), (0, 4), (4, 4)):
        with pytest.raises(ValueError, match="`lengths` must be"):
            bucket(rows(), lengths, pad={"tokens": 0})
    with pytest.raises(ValueError, match="`pad` must name"):
        bucket(rows(), SHAPES, pad={})
    with pytest.raises(ValueError, match=r"'tokens' of \(1,\), 'label' of \(\) for row 0"):
        bucket(rows(), SHAPES, pad={"tokens": 0, "label": 0})
    with pytest.raises(ValueError, match="'tokens' of .*pad for 'tokens', 'other'"):
        bucket(rows(), SHAPES, pad={"tokens": 0, "other": 0})
    for lengths in (LENGTHS[:-1], np.ones(23)):
        with pytest.raises(ValueError, match="`row_lengths` must be"):
            buckets(row_lengths=lengths)
    small = buckets(row_lengths=np.array(LENGTHS, np.uint8))
    assert small.padding == buckets().padding
    wrong = buckets(row_lengths=[*LENGTHS[:-1], 2])
    with pytest.raises(ValueError, match="Got 1 tokens for row 22, and 2 there"):
        list(Loader(wrong, 4, epochs=1))
    with pytest.raises(ValueError, match="`bucket` adds .* Got a source that has 'mask'"):
        Loader(bucket([{"a": np.ones(1), "mask": 1}], (4,), pad={"a": 0}), 1).batch(0)
    with pytest.raises(TypeError, match="`bucket` takes sources .* Got a Buckets"):
        bucket(buckets(), SHAPES, pad={"tokens": 0})
    with pytest.raises(ValueError, match='remainder="drop" it has none'):
        Loader(buckets(), 13, remainder="drop")
