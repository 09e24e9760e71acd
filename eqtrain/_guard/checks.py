"""`checkify.check` in a loss: every check that fails is named, wherever it stands.

JAX's own `checkify` keeps one failure of a batch, loses checks that stand under `jax.checkpoint` in
a gradient, and refuses some in a loop inside `shard_map`. Here the loss is evaluated equation by
equation before it is differentiated, and what each check was given comes out as it is: with the
dims of `vmap`, stacked by loops. Whether it failed, and what it says, is for the host to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters import batching
from jaxtyping import Array, PyTree

from .._jaxpr.frames import Frame, user_frames
from .._jaxpr.jaxprs import scan_operands
from .._util.internals import (
    ErrorEffect,
    check_batching_rule,
    check_p,
    current_name_stack,
    described,
    failed,
    payload_of,
    user_context,
)

# What a check was given: whether it failed, its number, and the values in its message.
Given = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class CheckSite:
    """A check of the loss.

    **Fields:** `text`, its message before values are put in; `frames`, the user's code, the
    innermost call first; `loops`, in how many loops it stands; and `tree`, which says how what it
    was given makes an error of JAX's.
    """

    text: str
    frames: tuple[Frame, ...]
    loops: int = dataclasses.field(default=0, kw_only=True)
    # Numbered anew each time it is traced.
    tree: Any = dataclasses.field(compare=False)

    def failed(self, given: tuple[Any, ...]) -> Any:
        """Whether it failed: an array of whichever dims the check has."""
        preds = failed(jax.tree.unflatten(self.tree, given))
        return sum(preds[1:], preds[0])

    def errors(self, given: tuple[Any, ...]) -> list[tuple[tuple[int, ...], Any]]:
        """The errors that the check stands for, each with its index along the check's dims."""
        error = jax.tree.unflatten(self.tree, given).get_exception()
        if error is None:
            return []
        return list(getattr(error, "error_mapping", {(): error}).items())


@dataclasses.dataclass
class _Found:
    """What was found while a function was traced."""

    given: list[Given] = dataclasses.field(default_factory=list)
    sites: list[CheckSite] = dataclasses.field(default_factory=list)


def with_checks(
    function: Callable[..., PyTree], *args: PyTree
) -> tuple[PyTree, tuple[Given, ...], tuple[CheckSite, ...]]:
    """`function(*args)`, with what each of its checks was given. It may be differentiated.

    **Raises:** `ValueError` for a check where its result cannot be carried out from, such as a
    function with a derivative of its own.
    """
    arrays, static = eqx.partition(args, eqx.is_array)
    out_static = None

    def traced(arrays: PyTree) -> PyTree:
        nonlocal out_static
        out, out_static = eqx.partition(function(*eqx.combine(arrays, static)), eqx.is_array)
        return out

    with _every_example(True):
        closed, shape = jax.make_jaxpr(traced, return_shape=True)(arrays)
    found = _Found()
    flat = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(arrays), found)
    out = jax.tree.unflatten(jax.tree.structure(shape), map(jnp.asarray, flat))
    return eqx.combine(out, out_static), tuple(found.given), tuple(found.sites)


def _site(equation: Any, given: Given) -> CheckSite:
    tree = equation.params["err_tree"]
    error = jax.tree.unflatten(tree, given)
    exception = described(error, payload_of(error))
    text = getattr(exception, "fmt_string", type(exception).__name__)
    return CheckSite(text, user_frames(equation), tree)


# A context of JAX: what is traced under one value is not taken from a cache under another.
_every_example = jax.make_user_context(False)


def _batch_check(args: Any, dims: Any, *, err_tree: Any, debug: bool) -> Any:
    """Keeps the dim of `vmap` in what a check of a loss is given, where JAX keeps one failure."""
    if not _every_example.value:
        return check_batching_rule(args, dims, err_tree=err_tree, debug=debug)
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    args = [batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True)]
    return check_p.bind(*args, err_tree=err_tree, debug=debug), []


# Once and for good, and as JAX's own rule for all but the tracing of a loss: a rule that came and
# went with it would be met by other threads, and by what JAX keeps in its caches.
batching.primitive_batchers[check_p] = _batch_check


def _evaluate(jaxpr: Any, consts: Any, args: Any, found: _Found) -> list[Any]:
    """Evaluates a jaxpr without its checks, and adds what they were given to `found`."""
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        info = equation.source_info
        stack = current_name_stack() + info.name_stack
        with user_context(info.traceback, name_stack=stack), equation.ctx.manager:
            if equation.primitive is check_p:
                found.given.append(tuple(map(jnp.asarray, values)))
                found.sites.append(_site(equation, found.given[-1]))
                out = []
            elif any(map(_has_checks, jaxprs_in_params(equation.params))):
                out = _evaluate_inside(equation, values, found)
            else:
                params = equation.primitive.get_bind_params(equation.params)
                out = equation.primitive.bind(*values, **params)
        several = equation.primitive.multiple_results
        env |= dict(zip(equation.outvars, out if several else [out], strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _has_checks(jaxpr: Any) -> bool:
    return any(isinstance(effect, ErrorEffect) for effect in jaxpr.effects)


def _evaluate_inside(equation: Any, values: list[Any], found: _Found) -> list[Any]:
    """Evaluates an equation with checks in the functions among its parameters."""
    name, params = equation.primitive.name, equation.params
    if name in ("jit", "pjit", "closed_call"):
        inner = params["jaxpr"]
        run = _collecting(inner.jaxpr, inner.consts)
        out, given = jax.jit(run)(*values)
    elif name in ("checkpoint", "remat", "remat2"):
        run = _collecting(params["jaxpr"], ())
        checkpoint = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
        out, given = checkpoint(*values)
    elif name == "scan":
        return _scan(params, values, found)
    elif name == "while":
        return _while(params, values, found)
    elif name == "cond":
        return _cond(params["branches"], values, found)
    else:
        raise ValueError(
            "A check must stand where its result can be carried out from the loss. Got a "
            f"`checkify.check` inside `{name}`, such as a function with a derivative of its own. "
            "Move the check out of that function."
        )
    _add(found, run.found, given)
    return out


class _collecting:
    """A jaxpr as a function that gives what its checks were given too.

    It may be traced more than once: the last time counts.
    """

    def __init__(self, jaxpr: Any, consts: Any):
        self._jaxpr = jaxpr
        self._consts = consts
        self.found = _Found()

    def __call__(self, *args: Any) -> tuple[list[Any], tuple[Given, ...]]:
        self.found = _Found()
        out = _evaluate(self._jaxpr, self._consts, args, self.found)
        return out, tuple(self.found.given)


def _add(found: _Found, inner: _Found, given: tuple[Given, ...]) -> None:
    found.sites.extend(inner.sites)
    found.given.extend(given)


def _scan(params: dict[str, Any], values: list[Any], found: _Found) -> list[Any]:
    num_consts, num_carry = scan_operands(params)
    consts, rest = values[:num_consts], values[num_consts:]
    carry, xs = rest[:num_carry], rest[num_carry:]
    run = _collecting(params["jaxpr"].jaxpr, params["jaxpr"].consts)

    def body(carry: list[Any], xs: list[Any]) -> Any:
        out, given = run(*consts, *carry, *xs)
        return out[:num_carry], (out[num_carry:], given)

    carry, (ys, given) = lax.scan(
        body,
        carry,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    sites = [dataclasses.replace(site, loops=site.loops + 1) for site in run.found.sites]
    _add(found, _Found(sites=sites), given)
    return [*carry, *ys]


def _while(params: dict[str, Any], values: list[Any], found: _Found) -> list[Any]:
    """Keeps what the first turn that failed was given: how many turns there are, nobody knows."""
    at = params["cond_nconsts"]
    cond_consts, rest = values[:at], values[at:]
    body_consts, carry = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]
    cond = _collecting(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts)
    run = _collecting(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts)

    def body(carry: Any) -> Any:
        values, before = carry
        out, given = run(*body_consts, *values)
        kept = [
            _first(site, old, new)
            for site, old, new in zip(run.found.sites, before, given, strict=True)
        ]
        return out, tuple(kept)

    _, shapes = jax.eval_shape(run, *body_consts, *carry)
    out, given = lax.while_loop(
        lambda carry: cond(*cond_consts, *carry[0])[0][0], body, (carry, _nothing(shapes))
    )
    _add(found, run.found, given)
    return out


def _first(site: CheckSite, old: Given, new: Given) -> Given:
    failed = site.failed(old)

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(failed.reshape(failed.shape + (1,) * (a.ndim - failed.ndim)), a, b)

    return tuple(map(choose, old, new))


def _cond(branches: Any, values: list[Any], found: _Found) -> list[Any]:
    index, *operands = values
    runs = [_collecting(branch.jaxpr, branch.consts) for branch in branches]
    shapes = [jax.eval_shape(run, *operands)[1] for run in runs]

    def branch(place: int) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            out, given = runs[place](*operands)
            all_given = [_nothing(shape) for shape in shapes]
            all_given[place] = _as(given, shapes[place])
            return out, tuple(all_given)

        return run

    out, given = lax.switch(index, [branch(place) for place in range(len(runs))], *operands)
    for run, part in zip(runs, given, strict=True):
        _add(found, run.found, part)
    return out


def _nothing(shapes: PyTree) -> PyTree:
    """What checks that were not met were given, of the same types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _as(given: PyTree, shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x, shape: x.astype(shape.dtype), given, shapes)
