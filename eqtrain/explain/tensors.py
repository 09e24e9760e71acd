"""Statistics of what went into one equation and came out of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._metrics import accumulator_dtype
from .indices import beside, has_indices, starts_of
from .words import INF, NAN, is_float, marks


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Statistics of an array, on one device.

    **Fields:** `name` of the leaf that it is a view of, None if it was computed; `shape`, `dtype`;
    `minimum`, `maximum` and `mean` of its finite elements, NaN if there are none; and how many are
    `nan`, `inf` and `zeros`. All but the first three are None for what are no numbers.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    nan: int | None = None
    inf: int | None = None
    zeros: int | None = None


@dataclasses.dataclass(frozen=True)
class Indices:
    """Indices beside the dim that they point into. **Fields:** `dim` counts those that are used;
    `minimum` and `maximum` of the bad indices, `bad` how many, `largest` the last that is good."""

    dim: int
    bad: int
    minimum: int
    maximum: int
    largest: int


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What went into the blamed equation, what came out, and which of its indices are bad."""

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    indices: tuple[Indices, ...] = ()


def measure(eqn: Any, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    """The statistics as arrays, on the device. `eqn` is None where there is no equation."""
    found: dict[str, Any] = {
        "inputs": [_numbers(value) for value in inputs],
        "outputs": [_numbers(value) for value in outputs],
    }
    if eqn is not None and has_indices(eqn):
        found["indices"] = _indices(*starts_of(eqn, inputs))
    return found


def _numbers(value: Any) -> tuple[Float[Array, "3"], Int[Array, "3"]] | None:
    value = jnp.asarray(value)
    if not (is_float(value.dtype) or jnp.issubdtype(value.dtype, jnp.integer)) or value.size == 0:
        return None
    marked = marks(value) if is_float(value.dtype) else jnp.zeros(value.shape, jnp.uint8)
    finite = marked == 0
    real = jnp.abs(value) if jnp.iscomplexobj(value) else value
    wide = real.astype(accumulator_dtype(real.dtype) if is_float(real.dtype) else jnp.float32)
    zeroed = jnp.where(finite, wide, 0)
    count = finite.sum(dtype=jnp.int32)
    scale = jnp.abs(zeroed).max()  # or the sum of large numbers overflows
    scale = jnp.where(scale == 0, 1, scale)
    mean = scale * ((zeroed / scale).sum() / count.astype(wide.dtype))
    minimum = jnp.where(finite, wide, jnp.inf).min()
    maximum = jnp.where(finite, wide, -jnp.inf).max()
    nothing = count == 0
    moments = jnp.stack(
        [jnp.where(nothing, jnp.nan, number) for number in (minimum, maximum, mean)]
    )
    of_kind = [marked == NAN, marked == INF, value == 0]
    return moments, jnp.stack([kind.sum(dtype=jnp.int32) for kind in of_kind])


def _indices(starts: Array, largest: tuple[int, ...]) -> Int[Array, "4 dims"]:
    flat = starts.reshape(-1, starts.shape[-1])
    bad = beside(flat, largest)
    limits = jnp.iinfo(flat.dtype)
    return jnp.stack(
        [
            bad.sum(0, dtype=flat.dtype),
            jnp.where(bad, flat, limits.max).min(0),
            jnp.where(bad, flat, limits.min).max(0),
            jnp.asarray(largest, flat.dtype),
        ]
    )
