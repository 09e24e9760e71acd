"""What differs between JAX versions in jaxprs, and the equations that hold jaxprs of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import jaxprs_in_params

# These run their jaxpr once, on their operands: it can be read as if it stood in their place.
CALLS = frozenset(
    "jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr".split()
)


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr and the values of its constants.

    A ClosedJaxpr holds both in JAX 0.10; in 0.12 a jaxpr is its own, constants included.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def called(eqn: Any) -> Any | None:
    """The jaxpr that an equation only calls, or None."""
    if eqn.primitive.name not in CALLS:
        return None
    return next(
        eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params
    )


def is_rematerialised(eqn: Any) -> bool:
    """Whether an equation must not share results with equal ones before it, to save memory."""
    return bool(eqn.params.get("differentiated")) and bool(eqn.params.get("prevent_cse"))


def scan_operands(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many the carry, by its parameters."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # from JAX 0.12 on
    return len(constants), len(carry)


def needed(jaxpr: Any, wanted: Sequence[bool] | None = None) -> list[tuple[Any, list[bool]]]:
    """The equations that the wanted results of a jaxpr need, and which of theirs are needed.

    Differentiation leaves many that nothing needs. XLA would drop them, were they not watched.
    """
    results = jaxpr.outvars if wanted is None else _chosen(jaxpr.outvars, wanted)
    live = {atom for atom in results if not is_literal(atom)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        used = [variable in live for variable in eqn.outvars]
        if any(used) or eqn.effects:
            found.append((eqn, used))
            live.update(atom for atom in eqn.invars if not is_literal(atom))
    return found[::-1]


def primitives(jaxpr: Any) -> set[str]:
    """The names of all primitives in a jaxpr, however deep."""
    jaxpr, _ = open_jaxpr(jaxpr)
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    inner = [sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return names.union(*map(primitives, inner))


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number in the text of the jaxpr."""
    return hasattr(atom, "val")


def is_finite_literal(atom: Any) -> bool:
    """Whether an operand is a number in the text, and no NaN or infinity."""
    return is_literal(atom) and math.isfinite(abs(_number(atom)))


def is_zero_free(atom: Any) -> bool:
    """Whether an operand is a number in the text that can be divided by."""
    return is_literal(atom) and _number(atom) != 0


def _number(atom: Any) -> complex:
    return np.asarray(atom.val).astype(np.complex128).item()


def _chosen(atoms: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [atom for atom, want in zip(atoms, wanted, strict=True) if want]
