"""`et.convolve`: the convolution and its gradients, and how a CPU computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

# Size of the kernel, stride, height and width. An odd side has no gradient by parity, 1x1 is a
# product, and so is what comes out smaller than the kernel.
SHAPES = [
    *[(3, 1, 6, 5), (3, 2, 8, 6), (3, 2, 6, 7), (3, 2, 7, 6), (3, 3, 9, 9), (5, 2, 12, 10)],
    *[(1, 1, 4, 3), (1, 2, 4, 5), (3, 1, 2, 2), (3, 2, 4, 5), (7, 2, 5, 3)],
]


def made(size: int, height: int, width: int, dtype: str = "float32", rows: int = 2):
    rng = np.random.default_rng(0)
    shapes = ((rows, height, width, 3), (size, size, 3, 4))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def reference(x, weight, stride, grad=None):
    """What a convolution gives, place by place in float64, and the gradients, 0 without `grad`."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    size, pad = len(weight), len(weight) // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = ((n - size) // stride + 1 for n in padded.shape[1:3])
    y = np.zeros((len(x), height, width, weight.shape[-1]))
    x_grad, weight_grad = np.zeros_like(padded), np.zeros_like(weight)
    for row, column in np.ndindex(height, width):
        window = np.s_[:, row * stride :, column * stride :]
        seen = padded[window][:, :size, :size]
        y[:, row, column] = np.einsum("bhwi,hwio->bo", seen, weight)
        if grad is not None:
            here = np.asarray(grad, np.float64)[:, row, column]
            x_grad[window][:, :size, :size] += np.einsum("bo,hwio->bhwi", here, weight)
            weight_grad += np.einsum("bhwi,bo->hwio", seen, here)
    inside = (slice(pad, n - pad) for n in padded.shape[1:3])
    return y, x_grad[:, *inside], weight_grad


@pytest.mark.parametrize("size, stride, height, width", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_convolution_and_its_gradients_are_those_of_float64(size, stride, height, width, dtype):
    x, weight = made(size, height, width, dtype)

    @jax.jit
    def run(x, weight, grad):
        y, backward = jax.vjp(lambda x, weight: et.convolve(x, weight, stride), x, weight)
        return y, *backward(grad)

    expected, *_ = reference(x, weight, stride)
    grad = jnp.asarray(np.random.default_rng(1).normal(size=expected.shape), dtype)
    tolerance = 1e-5 if dtype == "float32" else 0.03
    for got, wanted in zip(run(x, weight, grad), reference(x, weight, stride, grad), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, jnp.dtype(dtype))
        np.testing.assert_allclose(
            np.asarray(got, np.float64), wanted, atol=tolerance * np.abs(wanted).max()
        )


def plain(x, weight, stride):
    pads, numbers = ((1, 1), (1, 1)), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, weight, (stride, stride), pads, dimension_numbers=numbers
    )


def grads(x, weight, convolve=et.convolve):
    """Of a layer behind an activation."""

    def loss(x, weight):
        return (convolve(jax.nn.relu(x), weight, 2) ** 2).sum()

    return jax.grad(loss, (0, 1))(x, weight)


def test_a_cpu_computes_no_activation_again_and_multiplies_no_zeros():
    def counts(convolve):
        program = jax.jit(lambda x, weight: grads(x, weight, convolve))
        text = str(program.lower(*made(3, 16, 16)).compile().as_text())
        return text.count(" maximum("), text.count("lhs_dilate")

    # XLA of older JAX takes the barrier away before it fuses, and computes it twice.
    times = 1 if jax.__version_info__ >= (0, 12) else 2
    assert counts(et.convolve) == (times, 0)
    assert counts(plain) == (2, 1)  # negative control


def test_elsewhere_they_are_the_convolutions_of_jaxs_own_gradient():
    arguments = made(3, 16, 16)
    gpu = jax.jit(grads).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    cpu = jax.jit(grads).lower(*arguments).as_text()
    assert "optimization_barrier" in cpu
    assert "optimization_barrier" not in gpu
    assert gpu.count("stablehlo.convolution") == 3
    assert cpu.count("stablehlo.convolution") == 6  # one, one and four


def test_a_weight_that_all_devices_share_gets_the_sum_of_its_gradients():
    mesh = et.mesh(data=4)
    x, weight = made(3, 6, 6, rows=8)

    def local(x, weight):
        return jax.grad(lambda weight: et.convolve(x, weight, 2).sum())(weight)

    summed = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P()))
    *_, expected = reference(x, weight, 2, np.ones((8, 3, 3, 4)))
    np.testing.assert_allclose(summed(x, weight), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "x, weight",
    [
        ((1, 8, 8, 3), (3, 3, 4, 5)),
        ((1, 8, 8, 3), (3, 5, 3, 5)),
        ((1, 8, 8, 3), (2, 2, 3, 5)),
        ((8, 8, 3), (3, 3, 3, 5)),
    ],
)
def test_shapes_that_do_not_fit_are_named(x, weight):
    with pytest.raises(ValueError, match=r"\(size, size, in, out\).*Got x\[.*weight\["):
        et.convolve(jnp.ones(x), jnp.ones(weight))


def test_a_stride_of_0_is_refused():
    with pytest.raises(ValueError, match="stride is 1 or more. Got 0"):
        et.convolve(*made(3, 6, 6), stride=0)
