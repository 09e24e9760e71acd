"""Mixtures: proportions that hold everywhere, and each source's rows in turns."""

from typing import Any

import numpy as np
import pytest

from eqtrain.data import Loader, bucket, mix
from eqtrain.data.schedule import Schedule

SIZES = {"a": 10, "b": 7, "c": 30}


def sources() -> dict[str, Any]:
    """The id says the source, by its hundreds, and the row."""
    return {name: {"id": 100 * k + np.arange(size)} for k, (name, size) in enumerate(SIZES.items())}


def drawn(loader: Loader) -> np.ndarray:
    batches = list(loader.iterate())
    weights = [batch.get("weight", np.ones(len(batch["id"]))) for batch in batches]
    return np.concatenate([b["id"][w > 0] for b, w in zip(batches, weights, strict=True)])


@pytest.mark.parametrize(
    "weights", [[1], [0.5, 0.5], [0.7, 0.3], [1, 0], [1, 2**0.5, 0.001, 3, 0, 17, 0.2], [1] * 8]
)
def test_counts_are_off_by_less_than_one_a_halving(weights):
    halvings = max(len(weights) - 1, 0).bit_length()
    share = np.array(weights) / sum(weights)
    for seed in range(3):
        schedule = Schedule([float(weight) for weight in weights], seed, 0)
        places = np.arange(3000)
        source, before = schedule(places)
        counts = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
        exact = share * (places[:, None] + 1)
        assert np.abs(counts - exact).max() < max(halvings, 1e-9)
        for stretch in (8, 100):  # from anywhere
            assert np.abs((counts - exact)[stretch:] - (counts - exact)[:-stretch]).max() < max(
                halvings, 1e-9
            )
        # `before` counts what came before, and `given` all of it.
        np.testing.assert_array_equal(before, counts[places, source] - 1)
        np.testing.assert_array_equal(schedule.given(1777), counts[1776])
        # Far on, where a product would leave 64 bits, it is still exact.
        far = 10**17
        given = schedule.given(far)
        assert given.sum() == far
        # Shares are rounded to 2**-31.
        assert np.abs(given / far - share).max() < 2.0**-30


def test_random_choice_of_sources_is_told_apart():
    # The usual way, whose proportions hold in the long run only.
    source = np.random.default_rng(0).choice(2, 3000, p=[0.7, 0.3])
    counts = np.cumsum(source == 0)
    assert np.abs(counts - 0.7 * np.arange(1, 3001)).max() > 5


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_goes_through_its_rows_before_any_comes_again(shuffle):
    mixture = mix(sources(), {"a": 3, "b": 2, "c": 1}, epoch_size=100)
    ids = drawn(Loader(mixture, 8, epochs=4, shuffle=shuffle))
    assert len(ids) == 400
    for k, (size, share) in enumerate(zip(SIZES.values(), (3, 2, 1), strict=True)):
        own = ids[ids // 100 == k] % 100
        assert abs(len(own) - 400 * share / 6) < 2 * 4
        visits = [own[i : i + size].tolist() for i in range(0, len(own) - size + 1, size)]
        assert visits and all(sorted(visit) == list(range(size)) for visit in visits)
        if shuffle:
            assert len({tuple(visit) for visit in visits}) == len(visits)
        else:
            assert all(visit == list(range(size)) for visit in visits)


def test_proportions_hold_in_each_batch():
    loader = Loader(mix(sources(), {"a": 0.5, "b": 0.25, "c": 0.25}), 8, remainder="drop")
    for n in range(5):
        counts = np.bincount(loader.batch(n)["id"] // 100, minlength=3)
        assert np.abs(counts - [4, 2, 2]).max() <= 1


def test_example_i_is_decided_by_seed_and_i():
    mixture = mix(sources(), epoch_size=48)
    ids = drawn(Loader(mixture, 4, seed=3, epochs=3))
    for batch_size in (2, 6, 48):
        np.testing.assert_array_equal(drawn(Loader(mixture, batch_size, seed=3, epochs=3)), ids)
    assert not np.array_equal(drawn(Loader(mixture, 4, seed=4, epochs=3)), ids)
    # Dropping leaves nothing out: the next epoch goes on where the last one stopped.
    dropped = Loader(mix(sources(), {"a": 1, "b": 0, "c": 0}, epoch_size=7), 5, remainder="drop")
    assert dropped.dropped_per_epoch == 0
    own = np.concatenate([dropped.batch(n)["id"] for n in range(4)])
    assert sorted(own[:10]) == sorted(own[10:]) == list(range(10))


def test_default_weights_are_the_sizes():
    mixture = mix(sources())
    assert len(mixture) == 47 and Loader(mixture, 47).steps_per_epoch == 1
    counts = np.bincount(drawn(Loader(mixture, 47, epochs=1)) // 100)
    assert np.abs(counts - list(SIZES.values())).max() <= 1


def test_weights_may_change_from_epoch_to_epoch():
    def weights(epoch: int) -> dict[str, float]:
        return {"a": 1.0, "b": float(epoch), "c": 0.0}

    mixture = mix(sources(), weights, epoch_size=60)
    loader = Loader(mixture, 6, epochs=3)
    ids = drawn(loader)
    counts = [np.bincount(part // 100, minlength=3).tolist() for part in np.split(ids, 3)]
    assert counts == [[60, 0, 0], [30, 30, 0], [20, 40, 0]]
    own = ids[ids // 100 == 1] - 100
    assert all(sorted(own[i : i + 7]) == list(range(7)) for i in range(0, 63, 7))
    # As decided without going through the epochs before.
    fresh = Loader(mix(sources(), weights, epoch_size=60), 6, epochs=3)
    np.testing.assert_array_equal(fresh.batch(25)["id"], ids[150:156])


def test_one_integer_resumes_and_processes_share():
    settings: dict[str, Any] = {"seed": 1, "epochs": 2}
    whole = Loader(mix(sources(), {"a": 1, "b": 1, "c": 3}), 6, **settings)
    parts = [
        Loader(
            mix(sources(), {"a": 1, "b": 1, "c": 3}),
            6,
            process_index=i,
            process_count=3,
            **settings,
        )
        for i in range(3)
    ]
    unbroken = list(whole.iterate())
    for n, expected in enumerate(unbroken):
        resumed = Loader(mix(sources(), {"a": 1, "b": 1, "c": 3}), 6, **settings)
        resumed.position = whole.examples_before(n)
        np.testing.assert_array_equal(next(iter(resumed))["id"], expected["id"])
        joined = np.concatenate([part.batch(n)["id"] for part in parts])
        np.testing.assert_array_equal(joined, expected["id"])


def test_rows_are_located():
    mixture = mix(sources())
    loader = Loader(mixture, 16)
    source, row = mixture.locate(loader.rows(0))
    np.testing.assert_array_equal(100 * source + row, loader.batch(0)["id"])
    assert mixture.names == ("a", "b", "c")


def test_repeated_rows_of_an_epoch_are_augmented_anew():
    def noisy(example: Any, rng: np.random.Generator) -> Any:
        return {**example, "noise": rng.random()}

    few = mix({"few": [{"id": 0}, {"id": 1}]}, epoch_size=8)
    (batch,) = Loader(few, 8, epochs=1, augment=noisy)
    assert sorted(batch["id"]) == [0] * 4 + [1] * 4 and len(set(batch["noise"])) == 8
    threaded = Loader(few, 8, epochs=1, augment=noisy, num_threads=3)
    np.testing.assert_array_equal(next(iter(threaded))["noise"], batch["noise"])


def test_sources_and_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Got none"):
        mix({})
    with pytest.raises(ValueError, match="'a', 'b', 'c'. Got 'a', 'd' in epoch 0"):
        mix(sources(), {"a": 1, "d": 1})
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`weights` must be numbers of 0 or more"):
            mix(sources(), {"a": 1, "b": 1, "c": bad})
    with pytest.raises(ValueError, match="not all of them 0"):
        mix(sources(), lambda epoch: dict.fromkeys(SIZES, 0))
    with pytest.raises(ValueError, match="a part in 2097152 .* Got 1e-07 of 2.0000001"):
        mix(sources(), {"a": 1, "b": 1, "c": 1e-7})
    with pytest.raises(ValueError, match="`epoch_size` must be 1 or more. Got 0"):
        mix(sources(), epoch_size=0)
    other = {"a": {"x": np.ones(4)}, "b": {"x": np.ones(4, np.float32)}}
    with pytest.raises(ValueError, match="float64.* from 'a' and .*float32.* from 'b'"):
        Loader(mix(other), 4).batch(0)
    buckets = bucket([{"a": np.ones(2)}], (4,), pad={"a": 0})
    with pytest.raises(TypeError, match="`mix` takes sources .* Got a Buckets"):
        mix({"a": buckets})
