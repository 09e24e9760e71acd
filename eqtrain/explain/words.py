"""What is wrong with one value of a program, as one byte.

Read from the bits of the numbers themselves: XLA may compute a `float16` value in `float32` and
skip the rounding between two operations, and then no comparison would show the overflow.

The byte is the worst that any element is, since a maximum is what every backend can reduce, over
devices too. A NaN hides the infinities beside it, which matters little: it is what is asked for.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, UInt8

INF = 1  # an infinity
NEW_INF = 2  # one where all that went in was finite
NAN = 3
NEW_NAN = 4  # one where nothing that went in was a NaN
# In a word of its own, of an equation's operands; from `INDEX` on whatever comes of it.
ZERO_FLOAT_DIVISOR = 8
INDEX = 16  # an index beside the operand
ZERO_DIVISOR = 32  # an integer

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil "
    "convert_element_type cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor integer_pow "
    "lgamma log log1p log2 logistic max min mul neg nextafter pow reduce_precision rem round rsqrt "
    "sign sin sinh sqrt square sub tan tanh".split()
)
# What comes out of these went in, or was written in the program: no fault of theirs.
MOVING = frozenset(
    "all_gather all_gather_invariant all_gather_reduced all_to_all broadcast_in_dim clamp "
    "concatenate copy copy_p cummax cummin device_put dynamic_slice dynamic_update_slice empty "
    "empty2 expand_dims name optimization_barrier pad pcast pmax pmin ppermute pvary reduce_max "
    "reduce_min reduce_window_max reduce_window_min reshape reshard rev select_n "
    "sharding_constraint slice sort split squeeze stop_gradient top_k transpose".split()
)
REDUCING = frozenset("reduce_sum reduce_prod".split())

# How what went in relates to what comes out: the kind, and the parameters that decide it.
Rule = tuple[str, Any]


def rule_of(eqn: Any) -> Rule:
    """How the elements of an equation's operands relate to those of its results."""
    name = eqn.primitive.name
    if name in MOVING:
        return "moving", None
    if name in ELEMENTWISE:
        return "elementwise", None
    if name in REDUCING:
        return "reducing", tuple(eqn.params["axes"])
    if name == "dot_general":
        (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        return "dot", tuple(map(tuple, (left, right, left_batch, right_batch)))
    return "whole", None


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


@jax.jit
def word_of(value: Array) -> UInt8[Array, ""]:
    """The word of a value that no equation made: `NAN`, `INF` or 0."""
    return _worst(marks(value))


@functools.partial(jax.jit, static_argnames="rule")
def word_after(rule: Rule, operands: tuple[Array, ...], value: Array) -> UInt8[Array, ""]:
    """The word of what an equation made of its floating operands."""
    found = marks(value)
    if rule[0] == "moving":
        return _worst(found)
    before = _before(rule, [marks(operand) for operand in operands], value)
    # What came of a NaN is no new infinity either.
    new = jnp.where(found == NAN, before < NAN, (found == INF) & (before == 0))
    return _worst(found + new.astype(jnp.uint8))


@jax.jit
def words_chosen(which: Array, cases: tuple[Array, ...]) -> tuple[UInt8[Array, ""], ...]:
    """The word of each case of a `select_n`, where it is the one that is chosen."""
    number = which.astype(jnp.int32)
    return tuple(
        _worst(jnp.where(number == place, marks(case), 0)) for place, case in enumerate(cases)
    )


@jax.jit
def divisor_word(divisor: Array) -> UInt8[Array, ""]:
    """`ZERO_DIVISOR` or `ZERO_FLOAT_DIVISOR` where one is."""
    word = ZERO_FLOAT_DIVISOR if is_float(divisor.dtype) else ZERO_DIVISOR
    return jnp.any(divisor == 0).astype(jnp.uint8) * word


def marks(value: Array) -> UInt8[Array, "..."]:
    """`NAN` or `INF` or 0 for each element."""
    nan, inf = _nan_and_inf(value)
    return nan.astype(jnp.uint8) * NAN | inf.astype(jnp.uint8) * INF


def _nan_and_inf(value: Array) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
    if jnp.iscomplexobj(value):
        real, imaginary = (_nan_and_inf(part) for part in (value.real, value.imag))
        return real[0] | imaginary[0], real[1] | imaginary[1]
    kind = jnp.finfo(value.dtype)
    if kind.bits < 16:  # the formats of 8 bits and fewer have no common layout
        return jnp.isnan(value), jnp.isinf(value)
    unsigned = {16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[kind.bits]
    magnitude = lax.bitcast_convert_type(value, unsigned) << 1
    infinity = jnp.asarray(((1 << kind.nexp) - 1) << (kind.nmant + 1), unsigned)
    return magnitude > infinity, magnitude == infinity


def _before(rule: Rule, operands: list[Array], value: Array) -> UInt8[Array, "..."]:
    """The worst mark of the operands that each element of `value` can have come from."""
    kind, details = rule
    if kind == "reducing":
        (operand,) = operands
        return lax.reduce_max(operand, details)
    if kind == "dot" and len(operands) == 2:
        return _before_dot(operands[0], operands[1], *details)
    together = jnp.zeros((), jnp.uint8)
    for operand in operands:
        whole = kind != "elementwise" or operand.shape != value.shape
        together = jnp.maximum(together, _worst(operand) if whole else operand)
    return together


def _before_dot(
    left: Array,
    right: Array,
    left_summed: tuple[int, ...],
    right_summed: tuple[int, ...],
    left_batch: tuple[int, ...],
    right_batch: tuple[int, ...],
) -> UInt8[Array, "..."]:
    """As a product of matrices: batch dims, then the free ones of the left, then of the right."""

    def kept(marked: Array, summed: tuple[int, ...], batch: tuple[int, ...]) -> Array:
        free = [dim for dim in range(marked.ndim) if dim not in (*summed, *batch)]
        order = (*batch, *free, *summed)
        first = len(batch) + len(free)
        return lax.reduce_max(lax.transpose(marked, order), tuple(range(first, marked.ndim)))

    left, right = kept(left, left_summed, left_batch), kept(right, right_summed, right_batch)
    shared = len(left_batch)
    left = lax.expand_dims(left, range(left.ndim, left.ndim + right.ndim - shared))
    right = lax.expand_dims(right, range(shared, left.ndim - right.ndim + shared))
    return jnp.maximum(left, right)


def _worst(marked: Array) -> UInt8[Array, ""]:
    return lax.reduce_max(marked, tuple(range(marked.ndim)))
