"""`et.matmul`: the product and its gradients, and how a CPU computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

# Rows, in, out: the first transposes x, the second the gradient of the result.
SHAPES = [((3, 10), 4, 8), ((40,), 8, 3), ((1,), 5, 2), ((), 4, 3)]


def made(shape: tuple[int, ...], num_in: int, num_out: int, dtype: str = "float32"):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size) for size in ((*shape, num_in), (num_in, num_out))]
    arrays.append(rng.normal(size=(*shape, num_out)))
    return [jnp.asarray(array, dtype) for array in arrays]


@pytest.mark.parametrize("shape, num_in, num_out", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_and_its_gradients_are_those_of_float64(shape, num_in, num_out, dtype):
    x, weight, grad = made(shape, num_in, num_out, dtype)
    y, backward = jax.vjp(et.matmul, x, weight)
    x_grad, weight_grad = jax.jit(backward)(grad)
    x64, weight64, grad64 = (np.asarray(array, np.float64) for array in (x, weight, grad))
    rows, grads = x64.reshape(-1, num_in), grad64.reshape(-1, num_out)
    tolerance = 1e-5 if dtype == "float32" else 0.03
    for got, expected in [
        (y, x64 @ weight64),
        (x_grad, grad64 @ weight64.T),
        (weight_grad, rows.T @ grads),
    ]:
        assert (got.shape, got.dtype) == (expected.shape, jnp.dtype(dtype))
        np.testing.assert_allclose(
            np.asarray(got, np.float64), expected, atol=tolerance * np.abs(expected).max()
        )


def weight_grads(x, weight, grad):
    return jax.vjp(et.matmul, x, weight)[1](grad)[1]


@pytest.mark.parametrize("rows, num_in, num_out", [(256, 16, 64), (256, 64, 16)])
def test_a_cpu_gets_the_weights_gradient_the_way_it_multiplies_fastest(rows, num_in, num_out):
    x, weight, grad = made((rows,), num_in, num_out)
    text = jax.jit(weight_grads).lower(x, weight, grad).compile().as_text()
    products = [line for line in str(text).splitlines() if " dot(" in line]
    assert len(products) == 1
    assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in products[0]
    small = min(num_in, num_out)
    assert f"f32[{small},{max(num_in, num_out)}]" in products[0]  # `small` was transposed


def test_elsewhere_it_is_the_product_of_jaxs_own_gradient():
    x, weight, grad = made((256,), 16, 64)
    gpu = jax.jit(weight_grads).trace(x, weight, grad).lower(lowering_platforms=("cuda",)).as_text()
    cpu = jax.jit(weight_grads).lower(x, weight, grad).as_text()
    assert "optimization_barrier" in cpu
    assert "optimization_barrier" not in gpu
    assert gpu.count("dot_general") == 1


def test_a_weight_that_all_devices_share_gets_the_sum_of_its_gradients():
    mesh = et.mesh(data=4)
    x, weight, grad = made((8,), 3, 5)

    def local(x, weight, grad):
        return jax.vjp(et.matmul, x, weight)[1](grad)[1]

    specs = (P("data"), P(), P("data"))
    summed = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))
    expected = np.asarray(x, np.float64).T @ np.asarray(grad, np.float64)
    np.testing.assert_allclose(summed(x, weight, grad), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x, weight", [((2, 3), (4, 3)), ((2, 3), (2, 3, 4)), ((3,), (3,))])
def test_shapes_that_do_not_fit_are_named(x, weight):
    with pytest.raises(ValueError, match=r"matrix of \(in, out\).*Got x\[.*weight\["):
        et.matmul(jnp.ones(x), jnp.ones(weight))
