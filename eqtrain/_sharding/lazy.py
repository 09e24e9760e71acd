"""FSDP by layer: leaves that stay shards until the block that they belong to runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .collectives import Splits, gather_in_loss


def _refuse(shard: Shard, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        "A leaf that `fsdp(..., lazy=...)` hands over as a shard must be gathered before it is "
        f"used. Got `{shard.name}`, of which this device has {jax.typeof(shard.value)}. "
        "Write `block = et.gather(block)` at the start of the block, inside what is scanned and "
        "rematerialised."
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value"],
    meta_fields=["name", "splits", "compute_dtype"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """This device's part of a leaf. Whatever computes with it is told to gather it first.

    As a pytree it may hold anything else in the place of its array, as `eqx.partition` makes it.
    """

    value: Any
    name: str
    splits: Splits
    compute_dtype: Any = None

    shape = ndim = dtype = size = T = property(_refuse)
    astype = reshape = transpose = sum = mean = _refuse
    __jax_array__ = __array__ = __getitem__ = __iter__ = __len__ = __neg__ = __float__ = _refuse
    __matmul__ = __rmatmul__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = (
        _refuse
    )
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse


def is_shard(node: Any) -> bool:
    return isinstance(node, Shard)


def gather(tree: PyTree) -> PyTree:
    """Makes the leaves of a block whole that `et.fsdp(axis, lazy=...)` handed over as shards.

    They travel in the compute dtype of `et.precision`, by `all_gather`; their gradients are summed
    in float32, by `psum_scatter`. Call it inside the block that `lax.scan` runs and
    `jax.checkpoint` rematerialises: then one block is whole at a time, in the backward pass too.
    What is whole already is left as it is, so that a model may always call it.

    ```python
    >>> def forward(blocks, x):
    ...     @jax.checkpoint
    ...     def run(x, block):
    ...         return jnp.tanh(x @ et.gather(block)), None
    ...     return jax.lax.scan(run, x, blocks)[0]
    >>> forward(jnp.ones((3, 4, 4)), jnp.ones((2, 4))).shape
    (2, 4)

    ```
    """
    return jax.tree.map(
        lambda node: _gather_shard(node) if is_shard(node) else node, tree, is_leaf=is_shard
    )


def _gather_shard(shard: Shard) -> Array:
    return gather_in_loss(
        shard.value, shard.splits, shard.compute_dtype, jnp.dtype(shard.value.dtype)
    )


def compute_in(shard: Shard, dtype: Any) -> Shard:
    """The same shard, to be cast when it is gathered: what is cast before is summed in `dtype`."""
    floating = jnp.issubdtype(shard.value.dtype, jnp.floating)
    return dataclasses.replace(shard, compute_dtype=dtype) if floating else shard
