"""`convolve`: a convolution whose gradients are laid out for where they run.

B: batch, H and W: height and width, I and O: channels in and out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._sharding.varying import vary, varying
from .matmul import matmul


def convolve(
    x_BHWI: Float[Array, "*images"], weight: Float[Array, "*kernel"], stride: int = 1
) -> Float[Array, "batch _ _ out"]:
    """Convolves images, padded by half the kernel on all sides, with gradients that suit a CPU.

    XLA's own compute the layers before a convolution again, in another order of dims, and convolve
    the zeros that a stride leaves: a step of ResNet-18 takes 0.85 times as long without (JAX 0.12).
    Elsewhere than on a CPU they are the very convolutions that JAX's gradient makes. 1x1 kernels
    and those larger than what comes out are products everywhere.

    **Arguments:**

    - `x_BHWI`: images (batch, height, width, in), in the dtype of `weight`.
    - `weight`: a square kernel of odd size, (size, size, in, out).
    - `stride`: in both directions, 1 or more.

    **Raises:** `ValueError` for a kernel that is not square, or of even size, or for other channels
    than those of the images, or for a stride below 1.

    ```python
    >>> et.convolve(jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 4)), stride=2).shape
    (1, 4, 4, 4)

    ```
    """
    fits = weight.ndim == 4 and x_BHWI.ndim == 4 and x_BHWI.shape[-1] == weight.shape[2]
    if not fits or weight.shape[0] != weight.shape[1] or weight.shape[0] % 2 == 0:
        raise ValueError(
            "A convolution takes images of (batch, height, width, in) and a weight of (size, size, "
            f"in, out), of odd size. Got x{list(x_BHWI.shape)} and weight{list(weight.shape)}. "
            "Transpose one, or pad the kernel with zeros."
        )
    if stride < 1:
        raise ValueError(f"A stride is 1 or more. Got {stride}. Use 1 to look at every place.")
    size, num_out = weight.shape[0], weight.shape[-1]
    if size == 1:
        return matmul(x_BHWI[:, ::stride, ::stride], weight[0, 0])
    # Not "SAME", which pads a stride of 2 on one side only.
    pad = size // 2
    height, width = ((n + 2 * pad - size) // stride + 1 for n in x_BHWI.shape[1:3])
    if height * width < size * size:
        # XLA has no fast convolution on a CPU for images smaller than the kernel, which is what
        # the gradient sees: 1 GFLOP/s at 2x2 and 512 channels, and 70 for one product of all
        # windows, which are few. GPUs' libraries make such a product of it anyhow.
        windows = _windows(x_BHWI, (height, width), size=size, stride=stride, pad=pad)
        return matmul(windows, weight.reshape(-1, num_out))
    # In a `shard_map` with types, as JAX would by itself, which a gradient of ours keeps it from.
    axes = varying(x_BHWI) | varying(weight)
    return _convolve(stride, vary(x_BHWI, axes), vary(weight, axes))


def _plain(stride: int, x: Array, weight: Array) -> Array:
    pad = weight.shape[0] // 2
    return lax.conv_general_dilated(
        x,
        weight,
        window_strides=(stride, stride),
        padding=((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


_convolve = jax.custom_vjp(_plain, nondiff_argnums=(0,))


def _forward(stride: int, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _plain(stride, x, weight), (x, weight)


def _backward(stride: int, kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = kept

    def x_grad(weight: Array, grad: Array) -> Array:
        return jax.linear_transpose(lambda x: _plain(stride, x, weight), x)(grad)[0]

    def weight_grad(x: Array, grad: Array) -> Array:
        return jax.linear_transpose(lambda weight: _plain(stride, x, weight), weight)(grad)[0]

    def weight_grad_on_cpu(x: Array, grad: Array) -> Array:
        # XLA turns `x` so that channels come first. Without the barrier it does not turn what is
        # there, but computes it again in that order: norms, activations and the shortcuts before.
        # (From JAX 0.12; in 0.10 XLA takes the barrier away too early.)
        return weight_grad(lax.optimization_barrier(x), grad)

    for_weight = lax.platform_dependent(x, grad, cpu=weight_grad_on_cpu, default=weight_grad)
    if stride == 2 and weight.shape[0] == 3 and x.shape[1] % 2 == x.shape[2] % 2 == 0:
        by_parity = lax.platform_dependent(weight, grad, cpu=_x_grad_by_parity, default=x_grad)
        return by_parity, for_weight
    return x_grad(weight, grad), for_weight


_convolve.defvjp(_forward, _backward)


def _x_grad_by_parity(
    weight: Float[Array, "3 3 in out"], grad: Float[Array, "batch half_height half_width out"]
) -> Float[Array, "batch height width in"]:
    """The gradient of an image that a 3x3 kernel saw with a stride of 2.

    An even row was under the kernel's middle row alone, an odd one under the last and the first;
    columns alike. Four convolutions, one for each parity, in place of one over a `grad` that is
    three quarters zeros, for which XLA has no fast one on a CPU.
    """
    flipped_33OI = weight.swapaxes(2, 3)[::-1, ::-1]
    padded = jnp.pad(grad, ((0, 0), (0, 1), (0, 1), (0, 0)))

    def part(odd_row: int, odd_column: int) -> Array:
        rows, columns = (
            slice(None, None, 2) if odd else slice(1, 2) for odd in (odd_row, odd_column)
        )
        return lax.conv_general_dilated(
            padded[:, : grad.shape[1] + odd_row, : grad.shape[2] + odd_column],
            flipped_33OI[rows, columns],
            window_strides=(1, 1),
            padding="VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    rows = [jnp.stack([part(odd, 0), part(odd, 1)], axis=3) for odd in (0, 1)]
    batch, height, width, _ = grad.shape
    return jnp.stack(rows, axis=2).reshape(batch, 2 * height, 2 * width, -1)


def _windows(
    x_BHWI: Float[Array, "batch _ _ in"], out: tuple[int, int], *, size: int, stride: int, pad: int
) -> Float[Array, "batch height width window"]:
    """What a convolution that gives `out` sees at each place, in the order of its weight."""
    x_BHWI = jnp.pad(x_BHWI, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows, columns = (slice(None, 1 + (n - 1) * stride, stride) for n in out)
    return jnp.concatenate(
        [x_BHWI[:, i:, j:][:, rows, columns] for i in range(size) for j in range(size)], axis=-1
    )
