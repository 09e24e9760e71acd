"""Randomness belongs to examples: no mesh, microbatch or `vmap` changes it, and it looks random.

The statistical tests have fixed seeds, so they pass or fail for ever. Their bounds are those that a
random mask passes with probability 1 - 1e-6 over all comparisons of the test.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqtrain.random as er

IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


def make_mesh(**axes: int) -> jax.sharding.Mesh:
    auto = (AxisType.Auto,) * len(axes)
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)


def same_keys(a: Any, b: Any) -> bool:
    words = [np.asarray(jax.random.key_data(key)) for key in (a, b)]
    return a.dtype == b.dtype and words[0].shape == words[1].shape and (words[0] == words[1]).all()


# Keys


@pytest.mark.parametrize("impl", IMPLS[:2])
def test_example_keys_are_two_folds(impl):
    key = jax.random.key(5, impl=impl)
    keys = er.example_keys(key, 3, jnp.array([[0, 7], [2**31 - 1, 1]]))
    assert keys.shape == (2, 2)
    at_step = jax.random.fold_in(key, 3)
    for place, i in {(0, 0): 0, (0, 1): 7, (1, 0): 2**31 - 1, (1, 1): 1}.items():
        assert same_keys(keys[place], jax.random.fold_in(at_step, i))
    assert not same_keys(keys, er.example_keys(key, 4, jnp.array([[0, 7], [2**31 - 1, 1]])))


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_do_not_depend_on_what_stands_beside_them(impl):
    key = jax.random.key(5, impl=impl)
    keys = er.example_keys(key, 3, jnp.arange(6))
    assert keys.dtype == key.dtype
    assert same_keys(keys[4:], er.example_keys(key, 3, jnp.arange(4, 6)))
    assert same_keys(er.fold(keys, 9)[4:], er.fold(keys[4:], 9))
    for all_rows, last_rows in zip(er.split(keys, 3), er.split(keys[4:], 3), strict=True):
        assert same_keys(all_rows[4:], last_rows)
    assert len({tuple(words) for words in np.asarray(jax.random.key_data(keys))}) == 6


def test_vmapped_fold_in_of_unsafe_rbg_depends_on_what_stands_beside_it():
    # Negative control for the test above, and the reason why such keys are derived in another way.
    fold_in = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(5, impl="unsafe_rbg")))
    assert not same_keys(fold_in(jnp.arange(6))[4:], fold_in(jnp.arange(4, 6)))


def test_fold_takes_traced_numbers_and_keys_of_any_shape():
    keys = jax.random.split(jax.random.key(0), (2, 3))
    folded = er.fold(keys, 5)
    assert same_keys(folded[1, 2], jax.random.fold_in(keys[1, 2], 5))
    assert same_keys(folded, jax.jit(er.fold)(keys, jnp.int32(5)))
    layers = jax.lax.scan(lambda _, i: (None, er.fold(keys, i)), None, jnp.arange(6))[1]
    assert same_keys(layers[5], folded) and not same_keys(layers[4], folded)
    assert er.fold(jax.random.key(0), np.int64(2**32 - 1)).shape == ()


def test_split_splits_every_key():
    keys = jax.random.split(jax.random.key(0), (2, 3))
    parts = er.split(keys, 4)
    assert [part.shape for part in parts] == [(2, 3)] * 4
    assert same_keys(jnp.stack([part[1, 2] for part in parts]), jax.random.split(keys[1, 2], 4))


def test_wrong_keys_and_numbers_are_refused():
    key, raw = jax.random.key(0), jax.random.key_data(jax.random.key(0))
    calls: list[Callable[[Any], Any]] = [
        lambda k: er.example_keys(k, 0, jnp.arange(2)),
        lambda k: er.fold(k, 0),
        er.split,
        lambda k: er.fold_axis(k, "seq"),
        lambda k: er.dropout(jnp.ones(2), 0.5, key=k),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="typed.*uint32.*wrap_key_data"):
            call(raw)
    with pytest.raises(ValueError, match=r"single one.*\(2,\)"):
        er.example_keys(jax.random.split(key), 0, jnp.arange(2))
    for number in (-1, 2**32, np.int64(2**40)):
        with pytest.raises(ValueError, match=f"32 bits.*{number}"):
            er.fold(key, number)
    # These two already break the annotations, which are checked here.
    with pytest.raises((TypeError, ValueError)):
        er.fold(key, jnp.arange(2))
    with pytest.raises(TypeError):
        er.fold(key, 0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num=0"):
        er.split(key, 0)


def test_fold_axis_folds_the_index_and_is_zero_outside_shard_map():
    key = jax.random.key(0)

    def words(mesh: jax.sharding.Mesh, *names: str) -> Any:
        def body() -> Any:
            return jax.random.key_data(er.fold_axis(key, *names))[None]

        out_specs = P(mesh.axis_names)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=out_specs))()

    folded = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(words(make_mesh(seq=4), "seq"), folded)
    np.testing.assert_array_equal(words(make_mesh(seq=1), "seq"), folded[:1])
    assert same_keys(er.fold_axis(key, "seq"), jax.random.fold_in(key, 0))
    with jax.set_mesh(make_mesh(seq=2)):  # a global view: the axis splits nothing here
        assert same_keys(jax.jit(lambda k: er.fold_axis(k, "seq"))(key), jax.random.fold_in(key, 0))
    both = words(make_mesh(seq=2, head=2), "seq", "head")
    assert len({tuple(pair) for pair in np.asarray(both)}) == 4
    assert same_keys(er.fold_axis(key), key)
    with pytest.raises(ValueError, match="'sqe'.*'seq', 'head'"):
        words(make_mesh(seq=2, head=2), "sqe")


# What dropout computes


@functools.partial(jax.jit, static_argnums=1)
def dropped(x: Any, rate: float, key: Any) -> Any:
    return er.dropout(x, rate, key=key)


def reference_hash(words: list[int], index: int) -> int:
    """The hash of one element, in Python's integers."""

    def finalise(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    a = b = 0
    for first, second in zip(words[::2], words[1::2], strict=True):
        a, b = a ^ first, b ^ second
        a ^= finalise((b + 0x9E3779B9) % 2**32)
        b ^= finalise((a + 0xBB67AE85) % 2**32)
        a ^= finalise((b + 0x3C6EF372) % 2**32)
    return finalise(finalise(index ^ a) ^ b)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_is_the_documented_hash(impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 3)
    x = np.linspace(1, 2, 3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    rate = 0.3
    expected = np.zeros_like(x)
    for i, words in enumerate(np.asarray(jax.random.key_data(keys)).tolist()):
        for j in range(20):
            if reference_hash(words, j) >= round(rate * 2**32):
                expected[i].flat[j] = x[i].flat[j] * np.float32(1 / (1 - rate))
    np.testing.assert_array_equal(dropped(x, rate, keys), expected)
    assert 5 < (expected == 0).sum() < 40


def test_masks_never_change():
    # Pinned: a resumed run must draw what the unbroken run would have drawn.
    keys = er.example_keys(jax.random.key(0), 0, jnp.arange(4))
    mask = np.asarray(dropped(jnp.ones((4, 8)), 0.5, keys) != 0)
    assert np.packbits(mask).tolist() == [68, 107, 42, 43]


@pytest.mark.parametrize("impl", IMPLS)
def test_one_key_an_example_equals_vmap(impl):
    keys = er.example_keys(jax.random.key(0, impl=impl), 0, jnp.arange(6).reshape(2, 3))
    x = jnp.ones((2, 3, 4, 5))
    batched = dropped(x, 0.5, keys)
    outer = jax.vmap(lambda x, key: er.dropout(x, 0.5, key=key))
    np.testing.assert_array_equal(batched, jax.jit(outer)(x, keys))
    np.testing.assert_array_equal(batched, jax.jit(jax.vmap(outer))(x, keys))
    for i in range(6):
        np.testing.assert_array_equal(
            batched[i // 3, i % 3], dropped(x[0, 0], 0.5, keys.ravel()[i])
        )
    assert len({row.tobytes() for row in np.asarray(batched).reshape(6, 20)}) == 6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtype_is_kept_and_the_scale_is_not_rounded_to_it(dtype):
    key, rate = jax.random.key(0), 0.1
    x = jnp.linspace(1, 2, 4096).astype(dtype)
    y = np.asarray(dropped(x, rate, key))
    assert y.dtype == dtype
    exact = (np.asarray(x, np.float32) * np.float32(1 / (1 - rate))).astype(dtype)
    np.testing.assert_array_equal(y[y != 0], exact[y != 0])
    if dtype != jnp.float32:  # negative control
        assert (np.asarray(x * dtype(1 / (1 - rate)))[y != 0] != exact[y != 0]).any()


def test_no_work_without_a_rate_or_a_key():
    x, key = jnp.ones((2, 3)), jax.random.key(0)
    assert er.dropout(x, 0.0, key=key) is x
    assert er.dropout(x, 0, key=key) is x
    assert er.dropout(x, 0.5, key=None) is x


def test_wrong_arguments_of_dropout_are_refused():
    x, keys = jnp.ones((2, 3)), jax.random.split(jax.random.key(0), 3)
    for rate in (-0.1, 1.0, 1.5, float("nan"), float("inf"), 1 - 2**-40):
        with pytest.raises(ValueError, match=rf"\[0, 1\).*{rate}"):
            er.dropout(x, rate, key=None)
    with pytest.raises(TypeError):
        jax.jit(lambda rate: er.dropout(x, rate, key=None))(0.5)
    with pytest.raises(TypeError):
        er.dropout(jnp.ones((2, 3), jnp.int32), 0.5, key=None)
    with pytest.raises(ValueError, match=r"\(3,\).*\(2, 3\)"):
        er.dropout(x, 0.5, key=keys)
    with pytest.raises(ValueError, match=r"\(3, 1, 1\).*\(3, 1\)"):
        er.dropout(jnp.ones((3, 1)), 0.5, key=keys[:, None, None])

    def outcome(*shape: int) -> Any:
        return jax.eval_shape(
            lambda x: er.dropout(x, 0.5, key=keys), jax.ShapeDtypeStruct((3, *shape), jnp.bfloat16)
        )

    assert outcome(2**16, 2**16).shape == (3, 2**16, 2**16)
    with pytest.raises(ValueError, match=f"32 bits.*{2**33}"):
        outcome(2**17, 2**16)


# Differentiation, compilation, sharding


def layers(x: Any, weights: Any, keys: Any, dropout: Callable[..., Any]) -> Any:
    def layer(x: Any, weight_and_index: Any) -> tuple[Any, None]:
        weight, i = weight_and_index
        return dropout(jnp.tanh(x @ weight), key=er.fold(keys, i)), None

    x, _ = jax.lax.scan(layer, x, (weights, jnp.arange(weights.shape[0])))
    return (x**2).sum()


def inputs(layers: int = 3, batch: int = 8, width: int = 16) -> tuple[Any, Any, Any]:
    x = jax.random.normal(jax.random.key(1), (batch, 4, width))
    weights = jax.random.normal(jax.random.key(2), (layers, width, width)) / width**0.5
    return x, weights, er.example_keys(jax.random.key(0), 0, jnp.arange(batch))


def test_gradients_use_the_mask_and_are_bit_equal_under_remat():
    x, weights, keys = inputs()

    def by_float_mask(x: Any, *, key: Any) -> Any:
        return x * jax.lax.stop_gradient(er.dropout(jnp.ones_like(x), 0.3, key=key))

    drop = functools.partial(er.dropout, rate=0.3)
    plain = functools.partial(layers, dropout=drop)
    remat = functools.partial(layers, dropout=jax.checkpoint(drop))
    other = functools.partial(layers, dropout=functools.partial(er.dropout, rate=0.30001))
    grads = [
        jax.jit(jax.grad(f, argnums=(0, 1)))(x, weights, keys)
        for f in (plain, jax.checkpoint(plain), remat, other)
    ]
    for a, b, c, d in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
        assert not (a == d).all()  # negative control
    reference = jax.jit(jax.grad(functools.partial(layers, dropout=by_float_mask)))
    # Rounded in another order.
    np.testing.assert_allclose(grads[0][0], reference(x, weights, keys), rtol=1e-4, atol=1e-5)


def test_forward_mode_is_linear():
    x, _, keys = inputs()
    y, tangent = jax.jvp(lambda x: er.dropout(x, 0.3, key=keys), (x,), (x,))
    np.testing.assert_array_equal(y, tangent)


def test_backward_keeps_only_the_words_of_the_keys():
    x, _, keys = inputs()

    def saved(dropout: Callable[..., Any]) -> int:
        residuals = jax.tree.leaves(jax.vjp(lambda x: dropout(x, 0.3, key=keys), x)[1])
        return sum(leaf.nbytes for leaf in residuals)

    def by_threefry(x: Any, rate: float, *, key: Any) -> Any:
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(key)
        return jnp.where(keep, x / (1 - rate), 0)

    assert saved(er.dropout) == 8 * keys.size
    assert saved(by_threefry) >= x.size  # negative control


def test_scan_over_layers_stacks_no_masks():
    x, weights, keys = inputs(layers=8, batch=16, width=64)

    def temporary(dropout: Callable[..., Any]) -> int:
        grad = jax.jit(jax.grad(functools.partial(layers, dropout=dropout), argnums=1))
        analysis = grad.lower(x, weights, keys).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    def by_stored_mask(x: Any, *, key: Any) -> Any:
        return x * jax.lax.stop_gradient(er.dropout(jnp.ones_like(x), 0.3, key=key))

    without = temporary(lambda x, *, key: x)
    masks = 8 * x.size  # bytes, were they booleans
    assert temporary(functools.partial(er.dropout, rate=0.3)) < without + masks / 2
    assert temporary(by_stored_mask) > without + 2 * masks  # negative control: floats


def test_mask_needs_no_threefry_and_no_loop():
    x, _, keys = inputs()

    def text(function: Callable[..., Any]) -> str:
        return jax.jit(jax.grad(lambda x, key: function(x, key).sum())).lower(x, keys).as_text()

    found = text(lambda x, key: er.dropout(x, 0.3, key=key))
    assert "threefry" not in found and "while" not in found
    control = text(lambda x, key: jnp.where(jax.random.bernoulli(key[0], 0.3, x.shape), x, 0.0))
    assert "threefry" in control


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_mask_of_an_example_is_the_same_on_any_mesh(num_devices):
    key, x = jax.random.key(3), jnp.ones((8, 16))
    alone = dropped(x, 0.5, er.example_keys(key, 7, jnp.arange(8)))
    assert len({row.tobytes() for row in np.asarray(alone)}) == 8
    mesh = make_mesh(data=num_devices)

    def body(x: Any) -> tuple[Any, Any]:
        rows = x.shape[0]
        index = jax.lax.axis_index("data") * rows + jnp.arange(rows)
        one_key = jnp.broadcast_to(key[None], (rows,))
        return (
            er.dropout(x, 0.5, key=er.example_keys(key, 7, index)),
            er.dropout(x, 0.5, key=one_key),
        )

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    own, replicated = jax.jit(mapped)(x)
    np.testing.assert_array_equal(own, alone)
    assert len({row.tobytes() for row in np.asarray(replicated)}) == 1  # negative control


def test_mask_differs_over_data_and_agrees_over_model():
    mesh = make_mesh(data=2, model=2)
    key = jax.random.key(3)

    def body(x: Any) -> Any:
        keys = er.example_keys(key, 0, jax.lax.axis_index("data")[None])
        return er.dropout(x, 0.5, key=keys)

    x = jax.device_put(jnp.ones((2, 64)), NamedSharding(mesh, P("data")))
    y = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(x)
    masks = [np.asarray(shard.data).tobytes() for shard in y.addressable_shards]
    assert len(masks) == 4 and len(set(masks)) == 2


def test_gradient_in_shard_map_equals_one_device():
    x, weights, keys = inputs()
    loss = functools.partial(layers, dropout=functools.partial(er.dropout, rate=0.3))
    expected = jax.jit(jax.grad(loss, argnums=1))(x, weights, keys)
    mesh = make_mesh(data=4)

    def body(x: Any, weights: Any, keys: Any) -> Any:
        return jax.grad(lambda w: jax.lax.psum(loss(x, w, keys), "data"))(weights)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P(), check_vma=True
    )
    np.testing.assert_allclose(jax.jit(mapped)(x, weights, keys), expected, rtol=1e-5, atol=1e-5)

    # An unvarying input with keys that vary: its gradient is summed over the axis.
    def unvarying(x: Any, keys: Any) -> Any:
        return jax.grad(lambda x: jax.lax.psum(er.dropout(x, 0.3, key=keys).sum(), "data"))(x)

    mapped = jax.shard_map(unvarying, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    parts = [jax.grad(lambda x, k=k: dropped(x, 0.3, k).sum())(x[:2]) for k in keys.reshape(4, 2)]
    np.testing.assert_allclose(jax.jit(mapped)(x[:2], keys), sum(parts), rtol=1e-6)


def test_accumulation_draws_the_same_masks_and_steps_draw_others():
    x, weights, _ = inputs()
    key = jax.random.key(4)
    loss = functools.partial(layers, dropout=functools.partial(er.dropout, rate=0.3))

    @functools.partial(jax.jit, static_argnums=1)
    def grads(step: Any, num_microbatches: int) -> Any:
        def microbatch(total: Any, part: Any) -> tuple[Any, None]:
            x, index = part
            grad = jax.grad(loss, argnums=1)(x, weights, er.example_keys(key, step, index))
            return total + grad, None

        parts = jax.tree.map(
            lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), (x, jnp.arange(8))
        )
        return jax.lax.scan(microbatch, jnp.zeros_like(weights), parts)[0]

    whole = grads(0, 1)
    for num_microbatches in (2, 4):
        # Sums of float32 in another order; another mask would change the first digit.
        np.testing.assert_allclose(grads(0, num_microbatches), whole, rtol=1e-4, atol=1e-4)
    assert np.abs(grads(1, 1) - whole).max() > 0.1


# How random masks look

RATES = [0.01, 0.1, 0.5, 0.9]


def bound(comparisons: int) -> float:
    """How many standard deviations the largest of so many may be off."""
    return float(scipy.stats.norm.isf(0.5e-6 / comparisons))


def correlations(masks: np.ndarray) -> np.ndarray:
    """The correlations of all pairs of rows, in standard deviations.

    Their squares are the chi-squares of the 2x2 tables.
    """
    z = np.corrcoef(masks.astype(np.float64)) * masks.shape[1] ** 0.5
    return z[np.triu_indices(len(masks), 1)]


def look_independent(z: np.ndarray) -> bool:
    """Neither is one pair off, nor are all of them together."""
    total = scipy.stats.chi2(z.size)
    return bool(np.abs(z).max() < bound(z.size)) and bool(
        total.ppf(0.5e-6) < (z**2).sum() < total.isf(0.5e-6)
    )


@functools.cache
def masks(rate: float) -> np.ndarray:
    """Masks for 2 steps, 3 layers, 8 examples and 2**14 elements."""

    def draw(step: Any, layer: Any) -> Any:
        keys = er.fold(er.example_keys(jax.random.key(11), step, jnp.arange(8)), layer)
        return er.dropout(jnp.ones((8, 2**14)), rate, key=keys) != 0

    over_layers = jax.vmap(draw, in_axes=(None, 0))
    draw_all = jax.jit(jax.vmap(over_layers, in_axes=(0, None)))
    return np.asarray(draw_all(jnp.arange(2), jnp.arange(3)))


@pytest.mark.parametrize("rate", RATES)
def test_share_of_kept_elements(rate):
    kept = masks(rate)
    deviation = (rate * (1 - rate)) ** 0.5
    for axis in (None, -1, (0, 1, 2)):  # of all, of one mask, of one element
        share = kept.mean(axis, dtype=np.float64)
        count = kept.size / np.size(share)
        tail = scipy.stats.binom(count, 1 - rate)
        low, high = (
            tail.ppf(q) / count for q in (0.5e-6 / np.size(share), 1 - 0.5e-6 / np.size(share))
        )
        assert low <= share.min() and share.max() <= high
    # The shares of masks spread as those of independent elements do.
    z = (kept.mean(-1, dtype=np.float64).ravel() - (1 - rate)) * 2**7 / deviation
    total = scipy.stats.chi2(z.size)
    assert total.ppf(0.5e-6) < (z**2).sum() < total.isf(0.5e-6)


@pytest.mark.parametrize("rate", RATES)
def test_masks_of_examples_steps_and_layers_are_independent(rate):
    rows = masks(rate).reshape(48, -1)
    assert look_independent(correlations(rows))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_elements_are_independent_of_their_neighbours(rate):
    rows = masks(rate).reshape(48, -1)
    z = []
    for lag in [*range(1, 33), 64, 128, 256, 512, 1024, 4096]:
        a, b = rows[:, :-lag].astype(np.float64), rows[:, lag:].astype(np.float64)
        covariance = ((a - (1 - rate)) * (b - (1 - rate))).mean(1)
        z.append(covariance / (rate * (1 - rate)) * a.shape[1] ** 0.5)
    assert look_independent(np.concatenate(z))


def test_runs_of_eight_elements_are_equally_frequent():
    counts = np.bincount(np.packbits(masks(0.5), axis=-1).ravel(), minlength=256)
    assert 1e-6 < scipy.stats.chisquare(counts).pvalue < 1 - 1e-6


def test_dependence_is_found():
    # Negative controls of the tests above.
    rows = masks(0.5).reshape(48, -1)
    assert not look_independent(correlations(np.concatenate([rows, rows[:1]])))
    inverted = np.concatenate([rows, ~rows[:1]])
    assert not look_independent(correlations(inverted))
    shared = rows.copy()
    shared[1, : 2**11] = rows[0, : 2**11]  # an eighth of one mask
    assert not look_independent(correlations(shared))
    # Every pair a little off, none of them far.
    weak = np.where(np.arange(2**14) % 24 == 0, rows[:1], rows)
    assert np.abs(correlations(weak)).max() < 10 and not look_independent(correlations(weak))


@functools.partial(jax.jit, static_argnums=1)
def hashes(words: Any, shape: tuple[int, ...]) -> Any:
    return er._hash(words, shape)


def test_all_bits_are_balanced_for_counted_keys():
    # The weakest keys there are: 0, 1, 2, ...
    words = jnp.stack([jnp.zeros(512, jnp.uint32), jnp.arange(512, dtype=jnp.uint32)], -1)
    bits = np.unpackbits(np.asarray(hashes(words, (512, 512))).view(np.uint8), bitorder="little")
    ones = bits.reshape(-1, 32).sum(0, dtype=np.int64)
    assert (np.abs(ones - 2**17) / 2**8).max() < bound(32)
    assert look_independent(correlations(bits.reshape(-1, 32).T))


@pytest.mark.parametrize("num_words", [2, 4])
def test_each_bit_of_key_and_index_changes_half_of_the_bits(num_words):
    samples = 2048
    words = jax.random.bits(jax.random.key(21), (samples, num_words))
    index = np.arange(samples) % 64
    flipped = []
    base = np.asarray(hashes(words, (samples, 2**12)))
    here = base[np.arange(samples), index]
    for word in range(num_words):
        for bit in range(32):
            other = words.at[:, word].set(words[:, word] ^ jnp.uint32(1 << bit))
            flipped.append(np.asarray(hashes(other, (samples, 64)))[np.arange(samples), index])
    flipped += [base[np.arange(samples), index ^ 1 << bit] for bit in range(12)]
    changed = np.stack(flipped) ^ here
    bits = np.unpackbits(changed.view(np.uint8).reshape(len(flipped), samples, 4), axis=-1)
    z = (bits.sum(1, dtype=np.int64) - samples / 2) / (samples / 4) ** 0.5
    assert np.abs(z).max() < bound(z.size)
    total = scipy.stats.chi2(z.size)
    assert total.ppf(0.5e-6) < (z**2).sum() < total.isf(0.5e-6)
