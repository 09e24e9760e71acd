"""A look at whether a loss comes out equal where it has to, before it is compiled.

A gradient is the derivative of what all devices compute together. Along the axes that do not split
the batch they compute one loss several times, so a `psum` that the model forgot is a wrong loss on
each of them and no error of anybody's. JAX's types of values inside `shard_map` say which values
may differ along which axes, so the loss is traced once under those types, abstractly. What these
types refuse beside, such as a loop that starts from a constant, is no concern of ours: then there
is nothing to say, and the step itself is traced without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from .._sharding.placement import Layout
from .._sharding.varying import varying
from .._util.paths import named_leaves


def require_equal(
    layout: Layout,
    run: Callable[..., dict[str, PyTree]],
    specs: tuple[Any, ...],
    args: tuple[PyTree, ...],
) -> None:
    """Refuses a loss whose results differ along the mesh axes that do not split the batch.

    **Arguments:**

    - `run`: gives the loss, the metrics and the state by these names, from one device's part of
      `args`.
    - `specs`: how `args` are split.

    **Raises:** `ValueError` that names the first result which differs, and the axis; or a PRNG key
    in the state that differs from device to device at all.
    """
    axes = _axes_of_results(layout, run, specs, args)
    for name, (along, is_key) in axes.items():
        extra = sorted(along - set(layout.batch_axes))
        if extra:
            named = ", ".join(f"`{axis}`" for axis in extra)
            raise ValueError(
                "A loss must come out equal along the mesh axes that do not split the batch. "
                f"Got `{name}`, which varies over {named}. Add the missing "
                f"`jax.lax.psum(..., {extra[0]!r})` where the model joins what its shards "
                f"computed; or, if {named} splits the batch, name it in `batch=`."
            )
        if is_key and along:
            raise ValueError(
                "The state must come out equal on every device. "
                f"Got a PRNG key at `{name}` that differs along {tuple(sorted(along))}. Derive "
                "what you need from the `key` that the loss is given, and keep keys out of it."
            )


def _axes_of_results(
    layout: Layout,
    run: Callable[..., dict[str, PyTree]],
    specs: tuple[Any, ...],
    args: tuple[PyTree, ...],
) -> dict[str, tuple[frozenset[str], bool]]:
    """The axes along which each result may differ, and whether it is a PRNG key."""
    found: dict[str, tuple[frozenset[str], bool]] = {}

    def local(*args: PyTree) -> tuple[()]:
        for what, tree in run(*args).items():
            for name, leaf in named_leaves(eqx.filter(tree, eqx.is_array)):
                is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                found[f"{what}.{name}" if name else what] = (varying(leaf), is_key)
        return ()

    typed = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=P(), check_vma=True)
    try:
        jax.eval_shape(typed, *args)
    except Exception:  # a fault of the loss itself shows again, and better, in the step's own trace
        return {}
    return found


def has_keys(state: PyTree) -> bool:
    """Whether a state holds PRNG keys, which cannot be averaged."""
    return any(
        isinstance(leaf, Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for leaf in jax.tree.leaves(state)
    )
