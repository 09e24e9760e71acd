"""BatchNorm against numbers worked out by hand and against PyTorch, on one device and on many."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from models.layers import BatchNorm, Conv2d, Linear, max_pool


def make_norm(channels: int = 1, **settings: Any) -> tuple[BatchNorm, eqx.nn.State]:
    return eqx.nn.make_with_state(BatchNorm)(channels, **settings)


def column(*rows: float) -> jax.Array:
    return jnp.array(rows, jnp.float32)[:, None]


def on_mesh(norm: BatchNorm, devices: int) -> Any:
    """The norm on rows split over devices, as `(x, where, state) -> (y, state)`."""

    def local(x: jax.Array, where: jax.Array, state: eqx.nn.State) -> Any:
        return norm(x, state, where=where)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=et.mesh(data=devices),
            in_specs=(P("data"), P("data"), P()),
            out_specs=(P("data"), P()),
        )
    )


def running(norm: BatchNorm, state: eqx.nn.State) -> list[float]:
    return [float(leaf[0]) for leaf in state.get(norm.running)]


def test_padding_and_unequal_counts_do_not_shift_the_statistics():
    # Device A has rows 0, 2, 4, 10, device B one row, 1, and three of padding.
    norm, state = make_norm(momentum=0.0)
    x = column(0, 2, 4, 10, 1, 50, -7, jnp.nan)
    where = jnp.array([1, 1, 1, 1, 1, 0, 0, 0], jnp.float32)
    _, state = on_mesh(norm, 2)(x, where, state)
    np.testing.assert_allclose(running(norm, state), [3.4, 12.64], rtol=1e-6)
    mean_of_means = (4.0 + 1.0) / 2
    assert abs(running(norm, state)[0] - mean_of_means) > 0.5


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_statistics_are_joined_over_devices(devices: int):
    norm, state = make_norm()
    x = column(0, 2, 4, 10, 1, 1, 1, 1)
    y, state = on_mesh(norm, devices)(x, jnp.ones(8), state)
    expected = (np.asarray(x) - 2.5) / np.sqrt(9.25 + 1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(running(norm, state), [0.25, 1.825], rtol=1e-6)
    for leaf in jax.tree.leaves(state):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all((copy == copies[0]).all() for copy in copies)


def test_no_axes_keep_each_devices_own_statistics():
    norm, state = make_norm(axis_names=())
    x = column(0, 2, 4, 10)

    def local(x: jax.Array, state: eqx.nn.State) -> jax.Array:
        y, state = norm(x, state)
        return y

    mesh = et.mesh(data=2)
    y = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(x, state)
    np.testing.assert_allclose(y[:, 0], [-1, 1, -1, 1], rtol=1e-4)


def test_one_collective_a_call():
    norm, state = make_norm(3)
    x, where = jnp.ones((8, 2, 2, 3)), jnp.ones(8)
    text = on_mesh(norm, 4).lower(x, where, state).compile().as_text()
    assert len(re.findall(r" all-reduce\(", text)) == 1
    still = eqx.nn.inference_mode(norm)
    text = on_mesh(still, 4).lower(x, where, state).compile().as_text()
    assert " all-reduce(" not in text


def test_running_statistics_go_through_microbatches_in_order():
    norm, state = make_norm()

    def loss(model: BatchNorm, state: Any, batch: Any, key: Any) -> Any:
        y, state = model(batch["x"], state)
        return et.mean(y**2), state, {}

    def after(num_microbatches: int) -> list[float]:
        contribute = et.accumulate(num_microbatches)(loss)
        keys = et.example_keys(jax.random.key(0), 0, jnp.arange(4))
        contribution = contribute(norm, clone(state), {"x": column(0, 2, 4, 10)}, keys)
        return running(norm, contribution.state)

    np.testing.assert_allclose(after(2), [0.79, 1.8], rtol=1e-6)  # 0.1 and 1.0 after the first
    np.testing.assert_allclose(after(1), [0.4, 2.3], rtol=1e-6)  # the whole batch is another answer


def clone(state: eqx.nn.State) -> eqx.nn.State:
    """`State` refuses to be used twice."""
    leaves, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, leaves)


def test_inference_comes_to_the_statistics_of_the_data():
    norm, state = make_norm()
    x = column(0, 2, 4, 10)
    y = x
    for _ in range(200):
        y, state = norm(x, state)
    np.testing.assert_allclose(y[3, 0], 1.60357, rtol=1e-5)
    still, _ = eqx.nn.inference_mode(norm)(x, state)
    np.testing.assert_allclose(still, y, rtol=1e-5, atol=1e-5)


def test_a_batch_of_padding_alone_changes_nothing():
    norm, state = make_norm()
    y, after = norm(column(1, 2), clone(state), where=jnp.zeros(2))
    assert running(norm, after) == running(norm, state) == [0.0, 1.0]
    assert jnp.isfinite(y).all()


def test_a_large_mean_does_not_cancel_the_variance():
    norm, state = make_norm(momentum=0.0)
    x = column(0, 2, 4, 10) + 10_000
    for _ in range(2):  # the first call learns roughly where the data is
        _, state = norm(x, state)
    np.testing.assert_allclose(running(norm, state), [10_004, 14], rtol=1e-5)
    naive = jnp.square(x).mean() - jnp.square(x.mean())
    assert abs(float(naive) - 14) > 0.5  # negative control


def test_narrow_inputs_have_statistics_in_float32():
    norm, state = make_norm()
    y, state = norm(column(0, 2, 4, 10).astype(jnp.bfloat16), state)
    assert y.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state))
    np.testing.assert_allclose(running(norm, state), [0.4, 2.3], rtol=1e-6)


def test_batch_norm_equals_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(2, 3, (4, 5, 6, 3)).astype(np.float32)
    cotangent = rng.normal(size=x.shape).astype(np.float32)
    weight, bias = rng.normal(size=(2, 3)).astype(np.float32)
    theirs = torch.nn.BatchNorm2d(3, momentum=0.1)
    theirs.weight.data, theirs.bias.data = torch.tensor(weight), torch.tensor(bias)
    x_theirs = torch.tensor(x.transpose(0, 3, 1, 2).copy(), requires_grad=True)
    y_theirs = theirs(x_theirs)
    y_theirs.backward(torch.tensor(cotangent.transpose(0, 3, 1, 2).copy()))

    norm, state = make_norm(3)
    norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (jnp.array(weight), jnp.array(bias)))

    def ours(norm: BatchNorm, x: jax.Array) -> tuple[jax.Array, Any]:
        y, new = norm(x, state)
        return (y * cotangent).sum(), (y, new)

    (grad_norm, grad_x), (y, after) = jax.jit(
        jax.grad(lambda params, x: ours(eqx.combine(params, norm), x), (0, 1), has_aux=True)
    )(eqx.filter(norm, eqx.is_inexact_array), jnp.array(x))
    for mine, his in (
        (y, y_theirs.detach().numpy().transpose(0, 2, 3, 1)),
        (grad_x, x_theirs.grad.numpy().transpose(0, 2, 3, 1)),
        (grad_norm.weight, theirs.weight.grad.numpy()),
        (grad_norm.bias, theirs.bias.grad.numpy()),
        (after.get(norm.running)[0], theirs.running_mean.numpy()),
    ):
        np.testing.assert_allclose(mine, his, rtol=1e-4, atol=1e-5)
    # Theirs keeps the unbiased variance for inference, ours the biased one.
    rows = 4 * 5 * 6
    biased = 0.9 + (theirs.running_var.numpy() - 0.9) * (rows - 1) / rows
    np.testing.assert_allclose(after.get(norm.running)[1], biased, rtol=1e-5)


def test_convolution_pool_and_linear_equal_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 7, 9, 3)).astype(np.float32)
    x_theirs = torch.tensor(x.transpose(0, 3, 1, 2).copy())
    conv = Conv2d(3, 4, size=3, stride=2, key=jax.random.key(0))
    weight = torch.tensor(np.array(conv.weight).transpose(3, 2, 0, 1).copy())
    theirs = torch.nn.functional.conv2d(x_theirs, weight, stride=2, padding=1)
    np.testing.assert_allclose(
        conv(jnp.array(x)), theirs.numpy().transpose(0, 2, 3, 1), rtol=1e-4, atol=1e-5
    )
    theirs = torch.nn.functional.max_pool2d(x_theirs, 3, 2, padding=1)
    np.testing.assert_array_equal(
        max_pool(jnp.array(x), size=3, stride=2), theirs.numpy().transpose(0, 2, 3, 1)
    )
    linear = Linear(3, 5, key=jax.random.key(1))
    expected = x.astype(np.float64) @ np.array(linear.weight) + np.array(linear.bias)
    np.testing.assert_allclose(linear(jnp.array(x)), expected, rtol=1e-5, atol=1e-6)
