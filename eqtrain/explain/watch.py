"""Makes a function also return what went wrong in it, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from .._util.paths import path_name
from .plan import Plan, Site
from .record import Flags, Record
from .scope import Around, Builder, Settings


def watch(
    f: Callable[..., PyTree],
    *,
    names: Sequence[str] | None = None,
    probe: Site | None = None,
) -> Callable[..., tuple[PyTree, Flags]]:
    """Makes `f` also return flags that say, of each of its operations, what went wrong in it.

    They are read on the host, by `first_fault`. To be called under `jax.jit`, and inside
    `shard_map`, `lax.scan` or `vmap` as `f` itself: flags come out as arrays like any other. What
    stands in `f` is watched in its calls, scans, loops, branches and rematerialised blocks; a
    `shard_map`, a `custom_linear_solve` or a kernel in it counts as one operation.

    Watching is for a replay: it reads every floating value once more, and keeps XLA from fusing
    some operations.

    **Arguments:**

    - `f`: a function of pytrees, such as a loss and its gradient.
    - `names`: the name of each argument, with which the names of its leaves begin. By default the
      argument's number.
    - `probe`: a site that `first_fault` blamed, whose operands and results are to be measured as
      well, for `statistics`.

    **Returns:** a function of the same arguments that returns `(f(*args), flags)`. `f` may return
    what is no array.

    **Raises:** `ValueError`, when called, for another number of names than of arguments.

    ```python
    >>> def loss(params, x):
    ...     return jnp.log(params * x).sum()
    >>> watched = jax.jit(watch(jax.value_and_grad(loss), names=("params", "x")))
    >>> _, flags = watched(jnp.ones(2), jnp.array([1.0, -1.0]))
    >>> fault = first_fault(flags)
    >>> fault.kind, fault.site.primitive, fault.direction
    ('nan', 'log', 'forward')

    ```
    """

    def watched(*args: Any) -> tuple[PyTree, Flags]:
        if names is not None and len(names) != len(args):
            raise ValueError(
                "`names` must name each argument. "
                f"Got {len(names)} names and {len(args)} arguments. Give one name an argument."
            )
        labelled = dict(zip(names or map(str, range(len(args))), args, strict=True))
        paths, arrays = _arrays(labelled)
        out: list[Any] = []

        def of_arrays(*arrays: Any) -> list[Any]:
            values = jax.tree.leaves(args)
            found = iter(arrays)
            values = [next(found) if is_array(value) else value for value in values]
            result = f(*jax.tree.structure(args).unflatten(values))
            dynamic, static = eqx.partition(result, is_array)
            leaves, treedef = jax.tree.flatten(dynamic)
            out[:] = [treedef, static]
            return leaves

        closed = jax.make_jaxpr(of_arrays)(*arrays)
        settings = Settings(
            frozenset(jax.sharding.get_abstract_mesh().manual_axes), probe and probe.path
        )
        plans: list[Plan] = []
        constants = list(closed.consts)

        @jax.jit
        def run(constants: list[Any], arrays: list[Any]) -> tuple[list[Any], Record]:
            builder = Builder(settings)
            held = [
                builder.hold_input(value, (path,))
                for path, value in zip(paths, arrays, strict=True)
            ]
            closed_over = [builder.hold_input(value, ("closed over",)) for value in constants]
            jaxpr = getattr(closed, "jaxpr", closed)
            outputs = builder.run(jaxpr, closed_over, held, Around())
            record, scope = builder.result(outputs, [])
            plans[:] = [Plan(scope)]
            return [one.value for one in outputs], record

        leaves, record = run(constants, arrays)
        treedef, static = out
        return eqx.combine(treedef.unflatten(leaves), static), Flags(record, plans[0])

    return watched


def watching(probe: Site | None = None) -> Callable[..., Any]:
    """A look at the innermost function of a chain, whose inputs are named: see `findings.Watch`."""

    def look(run: Callable[[dict[str, PyTree]], PyTree], inputs: dict[str, PyTree]) -> Any:
        def positional(*values: PyTree) -> PyTree:
            return run(dict(zip(inputs, values, strict=True)))

        return watch(positional, names=tuple(inputs), probe=probe)(*inputs.values())

    return look


def is_array(value: Any) -> bool:
    return eqx.is_array(value) or isinstance(value, np.ndarray | np.generic)


def _arrays(labelled: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """The arrays of the arguments, with their names."""
    found = [
        (path_name((jax.tree_util.DictKey(name), *path)), leaf)
        for name, argument in labelled.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument)
        if is_array(leaf)
    ]
    return [name for name, _ in found], [leaf for _, leaf in found]
