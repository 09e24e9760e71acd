"""Which indices of an equation lie beside the operand that they are to point into."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from .words import INDEX


def starts_of(eqn: Any, operands: list[Any]) -> tuple[Int[Array, "... dims"], tuple[int, ...]]:
    """The indices that an equation uses, one column for each dim that it indexes, and the largest
    that is allowed of each; the smallest is 0, negative ones having been resolved before.

    **Raises:** `KeyError` for an equation without indices: see `has_indices`.
    """
    name, shape = eqn.primitive.name, operands[0].shape
    if name == "gather":
        numbers = eqn.params["dimension_numbers"]
        dims, sizes = numbers.start_index_map, eqn.params["slice_sizes"]
        starts = operands[1]
    elif name.startswith("scatter"):
        numbers = eqn.params["dimension_numbers"]
        dims, sizes = numbers.scatter_dims_to_operand_dims, _window(numbers, operands)
        starts = operands[1]
    else:
        columns, sizes = {
            "dynamic_slice": lambda: (operands[1:], eqn.params["slice_sizes"]),
            "dynamic_update_slice": lambda: (operands[2:], operands[1].shape),
        }[name]()
        dims = tuple(range(len(shape)))
        starts = jnp.stack([_wide(jnp.asarray(column)) for column in columns], -1)
    return _wide(starts), tuple(shape[dim] - sizes[dim] for dim in dims)


def has_indices(eqn: Any) -> bool:
    name = eqn.primitive.name
    # The scalar operands of an array without dims cannot be wrong.
    return name == "gather" or name.startswith(("scatter", "dynamic_")) and len(eqn.invars) > 1


def index_word(eqn: Any, operands: list[Any]) -> UInt8[Array, ""]:
    """The word of an equation's indices: `INDEX` where one is beside the operand."""
    starts, largest = starts_of(eqn, operands)
    return jnp.any(beside(starts, largest)).astype(jnp.uint8) * INDEX


def beside(starts: Array, largest: tuple[int, ...]) -> Array:
    """Which of the indices from `starts_of` are too large, or negative."""
    bound = jnp.asarray(largest, starts.dtype).reshape((1,) * (starts.ndim - 1) + (-1,))
    return (starts < 0) | (starts > bound)


def _wide(starts: Array) -> Array:
    """A bound need not fit the narrow integers that may be used for indices."""
    return starts if jnp.iinfo(starts.dtype).bits >= 32 else starts.astype(jnp.int32)


def _window(numbers: Any, operands: list[Any]) -> list[int]:
    """The size of the part of the operand that each index of a scatter writes, for each dim."""
    written = iter(operands[2].shape[dim] for dim in numbers.update_window_dims)
    absent = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [1 if dim in absent else next(written) for dim in range(operands[0].ndim)]
