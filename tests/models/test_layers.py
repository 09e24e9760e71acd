"""BatchNorm against arithmetic by hand, NumPy in float64 and PyTorch; the other layers likewise.

On a mesh every answer is that of one device: what is split differs, what comes out does not.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqtrain as et
from models.layers import BatchNorm, Conv2d, Linear, max_pool, mean_pool

EPSILON = 1e-5
# Case 19, and most others: batch mean 2.5, biased variance 9.25.
ROWS = np.array([0, 2, 4, 10, 1, 1, 1, 1], np.float32)


def make(channels: int = 1, **options: Any) -> tuple[BatchNorm, eqx.nn.State]:
    return eqx.nn.make_with_state(BatchNorm)(channels, **options)


def column(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.float32)[:, None]


def on_mesh(
    function: Callable[..., Any],
    *,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
    **axes: Any,
) -> Callable[..., Any]:
    return jax.jit(
        jax.shard_map(
            function,
            mesh=et.mesh(**axes),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


def train(norm: BatchNorm, *, devices: int, check_vma: bool = True) -> Callable[..., Any]:
    """`(x, state, where) -> (y, state)`, rows split over devices, the state equal on all."""

    def local(x: Any, state: Any, where: Any) -> Any:
        return norm(x, state, where=where)

    return on_mesh(
        local,
        in_specs=(P("data"), P(), P("data")),
        out_specs=(P("data"), P()),
        check_vma=check_vma,
        data=devices,
    )


def running(norm: BatchNorm, state: eqx.nn.State) -> tuple[Any, Any]:
    mean, variance = state.get(norm.running)
    return np.asarray(mean).squeeze(), np.asarray(variance).squeeze()


def normalised(x: Any, mean: float, variance: float) -> np.ndarray:
    return (np.asarray(x, np.float64) - mean) / np.sqrt(variance + EPSILON)


def all_reduces(function: Callable[..., Any], *args: Any) -> int:
    """How many there are, before and after the compiler, which may merge some."""
    lowered = jax.jit(function).lower(*args)
    found = [
        len(re.findall(pattern, text or ""))
        for pattern, text in (
            (r"stablehlo\.all_reduce", lowered.as_text()),
            (r" all-reduce(?:-start)?\(", lowered.compile().as_text()),
        )
    ]
    assert found[0] == found[1]
    return found[0]


# Statistics.


@pytest.mark.parametrize("dtype", [np.float32, bool, np.int32])
@pytest.mark.parametrize("padding", [0.0, 1e30, np.nan], ids=str)
def test_unequal_counts_are_weighed_by_count(dtype, padding):
    norm, state = make()
    x = column([0, 2, 4, 10, 1, padding, padding, padding])
    where = jnp.asarray(np.array([1, 1, 1, 1, 1, 0, 0, 0], dtype))
    y, state = train(norm, devices=2)(x, state, where)
    mean, variance = running(norm, state)
    np.testing.assert_allclose(mean, 0.1 * 3.4, rtol=1e-6)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * 12.64, rtol=1e-6)
    expected = normalised([0, 2, 4, 10, 1], 3.4, 12.64)
    np.testing.assert_allclose(y[:5, 0], expected, rtol=1e-6)
    # Negative control: the mean of the devices' means is 2.5, and padding that counts gives 17 / 8.
    assert abs(mean - 0.1 * 2.5) > 0.05 and abs(mean - 0.1 * 17 / 8) > 0.05


def test_weights_between_0_and_1_weigh():
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(8, 3, 2)), rng.uniform(size=8)
    mean = np.average(x, axis=0, weights=where).mean(0)
    variance = np.average((x - mean) ** 2, axis=0, weights=where).mean(0)
    norm, state = make(2)
    _, state = train(norm, devices=4)(jnp.float32(x), state, jnp.float32(where))
    np.testing.assert_allclose(running(norm, state)[0], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(running(norm, state)[1], 0.9 + 0.1 * variance, rtol=1e-5)
    assert np.abs(mean - x.mean((0, 1))).min() > 0.01  # negative control


@pytest.mark.parametrize("axis_names", [None, ("data",)])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_running_statistics_are_those_of_all_devices(devices, axis_names):
    norm, state = make(axis_names=axis_names)
    y, state = train(norm, devices=devices)(column(ROWS), state, jnp.ones(8))
    mean, variance = running(norm, state)
    np.testing.assert_allclose(mean, 0.25, rtol=1e-6)
    np.testing.assert_allclose(variance, 1.825, rtol=1e-6)
    np.testing.assert_allclose(y[:, 0], normalised(ROWS, 2.5, 9.25), rtol=1e-6)
    for value in state.get(norm.running):
        copies = [np.asarray(shard.data).tobytes() for shard in value.addressable_shards]
        assert len(copies) == devices and len(set(copies)) == 1


def test_every_device_evaluates_an_example_alike():
    norm, state = make()
    _, state = train(norm, devices=4)(column(ROWS), state, jnp.ones(8))
    norm = eqx.nn.inference_mode(norm)
    evaluate = train(norm, devices=8)
    y, after = evaluate(column([3.0] * 8), jax.device_get(state), jnp.ones(8))
    assert len(set(np.asarray(y).ravel().tolist())) == 1
    np.testing.assert_allclose(y[0, 0], normalised(3.0, 0.25, 1.825), rtol=1e-6)
    assert running(norm, after) == running(norm, state)


@pytest.mark.parametrize("devices", [None, 2])
def test_statistics_of_microbatches_advance_in_order(devices):
    norm, state = make()

    def scan(x: Any, state: Any) -> Any:
        def body(state: Any, x: Any) -> Any:
            y, state = norm(x, state)
            return state, (y, state)

        return lax.scan(body, state, x)[1]

    # Microbatches {0, 2} and {4, 10}; on a mesh each device has one row of both.
    x = jnp.float32([[[0], [2]], [[4], [10]]])
    if devices is not None:
        spec = P(None, "data")
        scan = on_mesh(scan, in_specs=(spec, P()), out_specs=(spec, P()), data=devices)
    y, states = scan(x, state)
    mean, variance = running(norm, states)
    np.testing.assert_allclose(mean, [0.1, 0.79], rtol=1e-6)
    np.testing.assert_allclose(variance, [1.0, 1.8], rtol=1e-6)
    np.testing.assert_allclose(y[0, :, 0], normalised([0, 2], 1, 1), rtol=1e-6)
    np.testing.assert_allclose(y[1, :, 0], normalised([4, 10], 7, 9), rtol=1e-6)
    # Negative control: the batch as a whole has mean 4 and variance 14.
    _, whole = norm(x.reshape(4, 1), state)
    np.testing.assert_allclose(running(norm, whole), (0.4, 2.3), rtol=1e-6)


def test_inference_converges_to_what_training_gives():
    norm, state = make()
    x = y = column([0, 2, 4, 10])
    evaluate = eqx.nn.inference_mode(norm)
    after = []
    for _ in range(200):
        y, state = norm(x, state)
        after.append(float(evaluate(x, state)[0][-1, 0]))
    np.testing.assert_allclose(y[-1, 0], 1.60357, atol=1e-5)
    # After n steps: mean 4 (1 - 0.9^n), variance 14 - 13 * 0.9^n; no correction for the start.
    for n in (1, 3):
        decayed = 0.9**n
        expected = normalised(10, 4 * (1 - decayed), 14 - 13 * decayed)
        np.testing.assert_allclose(after[n - 1], expected, rtol=1e-6)
    np.testing.assert_allclose(after[-1], 1.60357, atol=1e-5)
    assert abs(after[2] - 1.46866) > 1  # what `eqx.nn.BatchNorm` gives after 3 steps


def test_batch_of_padding_leaves_running_statistics_alone():
    norm, state = make()
    step = train(norm, devices=2)
    _, state = step(column(ROWS), state, jnp.ones(8))
    before = running(norm, state)
    y, state = step(column(ROWS + 100), state, jnp.zeros(8))
    assert running(norm, state) == before
    assert np.isfinite(y).all()
    _, state = step(column(ROWS + 100), state, jnp.float32([0] * 7 + [1]))  # negative control
    assert running(norm, state) != before


def test_large_mean_does_not_cancel_the_variance():
    rng = np.random.default_rng(0)
    x = jnp.float32(1e4 + rng.normal(size=(256, 1)))
    exact = np.asarray(x, np.float64).var()
    norm, fresh = make(momentum=0.0)

    def error(step: Callable[..., Any], state: Any) -> float:
        y, state = step(x, state)
        assert np.isfinite(y).all()
        return abs(float(running(norm, state)[1]) / exact - 1)

    def split(x: Any, state: Any) -> Any:
        return train(norm, devices=2)(x, state, jnp.ones(256))

    # A device knows its own mean; the mean of all is guessed by the running one.
    _, warm = split(x[:128].repeat(2, 0), fresh)
    assert error(norm, jax.tree.map(jnp.copy, fresh)) < 1e-5
    assert error(split, warm) < 1e-5
    # Negative controls: float32 of 1e8 has steps of 8.
    assert error(split, fresh) > 1e-2
    assert abs(((x**2).mean() - x.mean() ** 2) / exact - 1) > 1e-2


def test_variance_of_a_constant_is_not_negative():
    norm, state = make(momentum=0.0)
    for constant in (1e-3, 0.1, 1234.567, 98765.43):
        y, after = norm(jnp.full((7, 3, 1), constant), jax.tree.map(jnp.copy, state))
        assert running(norm, after)[1] >= 0
        assert np.isfinite(y).all()


def test_statistics_are_float32_for_bfloat16():
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 + rng.normal(size=(512, 2)), jnp.bfloat16)
    norm, state = make(2)
    narrow_norm = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_array(leaf) else leaf, norm
    )
    y, after = narrow_norm(x, state)
    assert y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    mean, variance = running(norm, after)
    assert mean.dtype == variance.dtype == np.float32
    np.testing.assert_allclose(mean, 0.1 * exact.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * exact.var(0), rtol=1e-5)
    narrow = lax.fori_loop(0, 512, lambda i, total: total + x[i], jnp.zeros(2, jnp.bfloat16))
    assert np.abs(np.float32(narrow) / 512 - exact.mean(0)).min() > 0.1  # negative control


# Axes and collectives.


def test_forward_is_one_all_reduce_and_backward_another():
    norm, state = make(4)
    x, where = jnp.ones((8, 2, 2, 4)), jnp.ones(8)
    assert all_reduces(train(norm, devices=4), x, state, where) == 1
    assert all_reduces(train(eqx.nn.inference_mode(norm), devices=4), x, state, where) == 0

    def local(x: Any, state: Any, where: Any) -> Any:
        def loss(x: Any) -> Any:
            return (norm(x, state, where=where)[0] ** 3).sum()

        return jax.grad(loss)(x)

    grad = on_mesh(local, in_specs=(P("data"), P(), P("data")), out_specs=P("data"), data=4)
    assert all_reduces(grad, x, state, where) == 2

    def apart(x: Any) -> Any:  # negative control: two sums, the second of which needs the first
        mean = lax.psum(x.sum(), "data")
        return lax.psum(((x - mean) ** 2).sum(), "data")

    assert all_reduces(on_mesh(apart, in_specs=P("data"), out_specs=P(), data=4), x) == 2


def test_no_axes_keep_each_devices_own_statistics():
    norm, state = make(axis_names=())

    def local(x: Any, state: Any) -> Any:
        y, state = norm(x, state)
        return y, jax.tree.map(lambda leaf: leaf[None], state)

    arguments = column(ROWS), state
    own = on_mesh(local, in_specs=(P("data"), P()), out_specs=(P("data"), P("data")), data=2)
    assert all_reduces(own, *arguments) == 0
    y, states = own(*arguments)
    mean, variance = running(norm, states)
    np.testing.assert_allclose(mean, [0.4, 0.1], rtol=1e-6)
    np.testing.assert_allclose(variance, [2.3, 0.9], rtol=1e-6)
    np.testing.assert_allclose(y[:4, 0], normalised(ROWS[:4], 4, 14), rtol=1e-6)
    with pytest.raises(ValueError, match="out_specs"):
        train(norm, devices=2)(*arguments, jnp.ones(8))


@pytest.mark.parametrize("axis_names", [None, ("data",), ("data", "model")])
def test_axes_that_the_data_does_not_vary_over_are_left_out(axis_names):
    norm, state = make(axis_names=axis_names)

    def local(x: Any, state: Any) -> Any:
        return norm(x, state)

    step = on_mesh(local, in_specs=(P("data"), P()), out_specs=(P("data"), P()), data=4, model=2)
    assert all_reduces(step, column(ROWS), state) == 1
    np.testing.assert_allclose(running(norm, step(column(ROWS), state)[1]), (0.25, 1.825), 1e-6)


def test_split_channels_have_statistics_of_their_own():
    norm, state = make(2, axis_names=("data",))
    x = jnp.stack((ROWS, 3 * ROWS), 1)

    def local(x: Any, weight: Any, bias: Any, state: Any) -> Any:
        shard = eqx.tree_at(lambda norm: (norm.weight, norm.bias), norm, (weight, bias))
        return shard(x, state)

    channels = P("model")
    step = on_mesh(
        local,
        in_specs=(P("data", "model"), channels, channels, channels),
        out_specs=(P("data", "model"), channels),
        data=4,
        model=2,
    )
    y, state = step(x, norm.weight, norm.bias, state)
    mean, variance = running(norm, state)
    np.testing.assert_allclose(mean, [0.25, 0.75], rtol=1e-6)
    np.testing.assert_allclose(variance, [1.825, 0.9 + 0.1 * 9 * 9.25], rtol=1e-6)
    np.testing.assert_allclose(y[:, 1], normalised(3 * ROWS, 7.5, 9 * 9.25), rtol=1e-6)


def test_rows_may_be_dealt_out_by_weight_alone():
    norm, state = make()
    x, where = column([0, 2, 4, 10]), jnp.float32([1, 1, 0, 0, 0, 0, 1, 1])

    def local(x: Any, state: Any, where: Any) -> Any:
        return norm(x, state, where=where)[1]

    step = on_mesh(local, in_specs=(P(), P(), P("data")), out_specs=P(), data=2)
    np.testing.assert_allclose(running(norm, step(x, state, where)), (0.4, 2.3), rtol=1e-6)


def test_statistics_that_differ_between_devices_do_not_bias_the_sums():
    norm, state = make(momentum=0.0)
    separate = jax.tree.map(lambda leaf: jnp.stack((leaf, leaf + 50)), state)

    def local(x: Any, state: Any) -> Any:
        _, state = norm(x, jax.tree.map(lambda leaf: leaf[0], state))
        return jax.tree.map(lambda leaf: leaf[None], state)

    step = on_mesh(local, in_specs=(P("data"), P("data")), out_specs=P("data"), data=2)
    mean, variance = running(norm, step(column(ROWS), separate))
    np.testing.assert_allclose(mean, [2.5, 2.5], rtol=1e-6)
    np.testing.assert_allclose(variance, [9.25, 9.25], rtol=1e-6)


def test_unchecked_shard_map_needs_names():
    named, state = make(axis_names=("data",))
    arguments = column(ROWS), state, jnp.ones(8)
    _, after = train(named, devices=4, check_vma=False)(*arguments)
    np.testing.assert_allclose(running(named, after), (0.25, 1.825), rtol=1e-6)
    unnamed, state = make()
    with pytest.raises(ValueError, match=r"check_vma=False.*axis_names=\('data',\)"):
        train(unnamed, devices=4, check_vma=False)(*arguments)


def test_misspelt_axis_raises():
    norm, state = make(axis_names=("dta",))
    with pytest.raises(ValueError, match="'dta', where the mesh has 'data'"):
        train(norm, devices=2)(column(ROWS), state, jnp.ones(8))
    norm(column(ROWS), state)  # on one device there is no mesh to split anything


# Against PyTorch.


@pytest.mark.parametrize("devices", [None, 4])
def test_batch_norm_matches_torch(devices):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = (2 + 3 * rng.normal(size=(8, 5, 5, 3))).astype(np.float32)
    cotangent = rng.normal(size=x.shape).astype(np.float32)
    weight, bias = rng.normal(size=(2, 3)).astype(np.float32)

    reference = torch.nn.BatchNorm2d(3, momentum=0.1)
    with torch.no_grad():
        reference.weight.copy_(torch.tensor(weight))
        reference.bias.copy_(torch.tensor(bias))
    x_torch = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
    y_torch = reference(x_torch)
    (y_torch * torch.tensor(cotangent.transpose(0, 3, 1, 2))).sum().backward()

    norm, state = make(3)

    def local(weight: Any, bias: Any, x: Any, cotangent: Any, state: Any) -> Any:
        def loss(weight: Any, bias: Any, x: Any) -> Any:
            layer = eqx.tree_at(lambda norm: (norm.weight, norm.bias), norm, (weight, bias))
            y, after = layer(x, state)
            return (y * cotangent).sum(), (y, after)

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(weight, bias, x)

    if devices is not None:
        # Unvarying weights: JAX itself sums their gradients over the axis.
        local = on_mesh(
            local,
            in_specs=(P(), P(), P("data"), P("data"), P()),
            out_specs=((P(), P(), P("data")), (P("data"), P())),
            data=devices,
        )
    grads, (y, after) = jax.jit(local)(*map(jnp.asarray, (weight, bias, x, cotangent)), state)

    def close(actual: Any, expected: Any) -> None:
        # Sums of 200 terms in float32, in another order; elements near 0 are what is left of them.
        np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-5, atol=1e-5)

    close(y.transpose(0, 3, 1, 2), y_torch)
    close(grads[0], reference.weight.grad)
    close(grads[1], reference.bias.grad)
    close(grads[2].transpose(0, 3, 1, 2), x_torch.grad)
    mean, variance = running(norm, after)
    close(mean, reference.running_mean)
    # PyTorch's running variance is the unbiased one, of 8 * 5 * 5 numbers.
    close(0.9 + (variance - 0.9) * 200 / 199, reference.running_var)
    # Negative control: statistics that are constants in the backward pass give other gradients.
    constant = cotangent * weight / np.sqrt(x.var((0, 1, 2)) + EPSILON)
    assert np.abs(constant - np.asarray(grads[2])).max() > 0.01


CONVOLUTIONS = [
    *[(1, 1, (8, 8)), (1, 2, (8, 8)), (3, 1, (8, 8)), (3, 2, (8, 8)), (7, 2, (8, 8))],
    # What comes out is smaller than the kernel.
    *[(3, 1, (2, 2)), (3, 2, (4, 5)), (3, 1, (1, 6)), (7, 2, (5, 3))],
]


@pytest.mark.parametrize(("size", "stride", "shape"), CONVOLUTIONS)
def test_convolution_matches_torch(size, stride, shape, getkey):
    torch = pytest.importorskip("torch")
    conv = Conv2d(3, 4, size=size, stride=stride, key=getkey())
    x = jax.random.normal(getkey(), (2, *shape, 3))
    x_torch = torch.tensor(np.array(x).transpose(0, 3, 1, 2), requires_grad=True)
    weight = torch.tensor(np.array(conv.weight).transpose(3, 2, 0, 1), requires_grad=True)
    expected = torch.nn.functional.conv2d(x_torch, weight, stride=stride, padding=size // 2)
    # Sums of up to 147 products in float32.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)

    @jax.jit
    def run(conv: Any, x: Any) -> Any:
        def total(conv: Any, x: Any) -> Any:
            y = conv(x)
            return (y**2).sum(), y

        return jax.grad(total, argnums=(0, 1), has_aux=True)(conv, x)

    grads, y = run(conv, x)
    close(y.transpose(0, 3, 1, 2), expected.detach().numpy())
    (expected**2).sum().backward()
    close(grads[0].weight.transpose(3, 2, 0, 1), weight.grad.numpy(), atol=1e-4)
    close(grads[1].transpose(0, 3, 1, 2), x_torch.grad.numpy(), atol=1e-4)
    if stride == 2 and size > 1 and shape == (8, 8):  # negative control
        numbers = ("NHWC", "HWIO", "NHWC")
        other = lax.conv_general_dilated(x, conv.weight, (2, 2), "SAME", dimension_numbers=numbers)
        assert np.abs(other - y).max() > 0.1


def test_max_pool_matches_torch(getkey):
    torch = pytest.importorskip("torch")
    x = jax.random.normal(getkey(), (2, 8, 8, 3)) - 5  # all below 0: padding is not 0
    x_torch = torch.tensor(np.array(x).transpose(0, 3, 1, 2), requires_grad=True)
    expected = torch.nn.functional.max_pool2d(x_torch, 3, stride=2, padding=1)
    (expected**2).sum().backward()
    pooled, grad = jax.value_and_grad(lambda x: (max_pool(x, size=3, stride=2) ** 2).sum())(x)
    actual = max_pool(x, size=3, stride=2).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(actual, expected.detach().numpy())
    np.testing.assert_allclose(pooled, (expected**2).sum().item(), rtol=1e-6)
    np.testing.assert_allclose(grad.transpose(0, 3, 1, 2), x_torch.grad.numpy(), rtol=1e-6)


def test_pools_keep_bfloat16():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 32, 2)) + 4, jnp.bfloat16)
    assert max_pool(x, size=3, stride=2).dtype == jnp.bfloat16
    mean = mean_pool(x)
    assert mean.dtype == jnp.bfloat16
    # Rounded once at the end, by 2**-9 at most.
    np.testing.assert_allclose(np.float64(mean), np.float64(x).mean((1, 2)), rtol=2**-8)


def test_linear_is_a_product_and_a_sum(getkey):
    layer = Linear(3, 2, key=getkey())
    x = jax.random.normal(getkey(), (4, 5, 3))
    x64, weight, bias = (np.asarray(a, np.float64) for a in (x, layer.weight, layer.bias))
    expected = x64 @ weight + bias
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_initial_weights_have_the_variance_of_their_fan(getkey):
    conv = Conv2d(64, 128, size=3, key=getkey())
    # Standard error of a deviation from n samples: 1 / sqrt(2 n), here 0.3% and 1%.
    np.testing.assert_allclose(conv.weight.std(), np.sqrt(2 / (9 * 128)), rtol=0.02)
    layer = Linear(100, 50, key=getkey())
    for leaf in (layer.weight, layer.bias):
        assert 0.09 < np.abs(leaf).max() <= 0.1
