"""`matmul`: a product whose gradient is laid out for where it runs."""

from __future__ import annotations

import jax
from jax import lax
from jaxtyping import Array, Float

from .._sharding.varying import vary, varying


def matmul(x: Float[Array, "*batch_in"], weight: Float[Array, "*in_out"]) -> Float[Array, "..."]:
    """`x @ weight`, with a gradient of `weight` that a CPU computes a third faster.

    That gradient is a product over all rows of the batch, of two arrays that both lie the wrong way
    round for it: XLA transposes one of them as it comes, often the larger and on the side where it
    helps least. Here the smaller is transposed, once, and becomes the left operand. Elsewhere than
    on a CPU it is the product that JAX's own gradient makes.

    **Arguments:** `x` is (*batch, in), `weight` a matrix (in, out).

    **Returns:** an array (*batch, out).

    **Raises:** `ValueError` for a weight that is no matrix, or does not fit.

    ```python
    >>> float(jax.grad(lambda w: et.matmul(jnp.ones((2, 3)), w).sum())(jnp.ones((3, 4)))[0, 0])
    2.0

    ```
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[:1]:
        raise ValueError(
            "A product takes a weight that is a matrix of (in, out), and `in` as the last dim of "
            f"`x`. Got x{list(x.shape)} and weight{list(weight.shape)}. Transpose or reshape one."
        )
    # In a `shard_map` with types, as JAX would by itself, which a gradient of ours keeps it from.
    axes = varying(x) | varying(weight)
    return _product(vary(x, axes), vary(weight, axes))


@jax.custom_vjp
def _product(x: Array, weight: Array) -> Array:
    return x @ weight


def _forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight), (x, weight)


def _backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = kept
    (x_grad,) = jax.linear_transpose(lambda x: x @ weight, x)(grad)

    def weight_grad(x: Array, grad: Array) -> Array:
        return jax.linear_transpose(lambda weight: x @ weight, weight)(grad)[0]

    def weight_grad_on_cpu(x: Array, grad: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        return _weight_grad_on_cpu(*rows).astype(weight.dtype)

    return x_grad, lax.platform_dependent(x, grad, cpu=weight_grad_on_cpu, default=weight_grad)


_product.defvjp(_forward, _backward)


def _weight_grad_on_cpu(
    x: Float[Array, "rows in"], grad: Float[Array, "rows out"]
) -> Float[Array, "in out"]:
    """`x.T @ grad`, by whichever transposes fewer numbers: `x`, or `grad` and the result."""
    rows, num_in, num_out = *x.shape, grad.shape[1]
    # The barriers keep XLA from folding what is transposed into the product.
    if rows * num_in < rows * num_out + num_in * num_out:
        return lax.optimization_barrier(x.T) @ grad
    return lax.optimization_barrier(lax.optimization_barrier(grad.T) @ x).T
