"""Over which mesh axes a value differs from device to device, inside `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jaxtyping import Array


def varying(x: Any) -> frozenset[str]:
    """The manual mesh axes along which `x` may differ from device to device."""
    aval: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    kind = aval.manual_axis_type  # None for a shape from outside
    return frozenset() if kind is None else frozenset(kind.varying)


def vary(x: Array, axes: tuple[str, ...] | frozenset[str]) -> Array:
    """Marks `x` as varying over `axes`, those that it does not vary over yet."""
    missing = tuple(axis for axis in sorted(axes) if axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x
