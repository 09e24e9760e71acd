"""The first TrainState: made under jit, sharded at birth."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from .._sharding.placement import Layout, trimmed
from .._util.paths import named_leaves
from .train_state import Parts, Structure, TrainState, as_arrays, flatten, scalars_as_arrays, strong


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the first TrainState is made: the program, and where what it gives belongs."""

    closed: Any
    structure: Structure
    layout: Layout | None

    def shapes(self) -> TrainState:
        """A TrainState of shapes with shardings in place of arrays."""
        return TrainState(self.structure.avals, self.structure, fresh=True)

    def run(self, key: Array) -> TrainState:
        """Makes the TrainState, each array born on the devices where it belongs."""

        def init(consts: list[Any], key: Array) -> list[Array]:
            return jax.core.eval_jaxpr(self.closed.jaxpr, consts, key)

        consts, layout = self.closed.consts, self.layout
        if layout is not None:
            key = _replicated(key, layout)
            consts = [_movable(const, layout) for const in consts]
        # Run once and never again: on a CPU, optimising the random numbers of every leaf by LLVM
        # takes seconds, three to five times as long as this. Their last bits differ by it.
        quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        leaves = jax.jit(
            init,
            out_shardings=None if layout is None else list(self.structure.shardings),
            compiler_options=quick,
        )(consts, key)
        return TrainState(tuple(leaves), self.structure, fresh=True)


def plan_state(
    make: Callable[[Array], Any],
    key: Array,
    begin: Callable[[PyTree, PyTree, Array], Parts],
    layout: Layout | None,
    state_layout: Layout | None,
    is_trainable: Callable[[PyTree], PyTree],
) -> Plan:
    """Traces `make(key)` and what the chain adds.

    **Raises:** `TypeError` for a raw key; `ValueError` for tied leaves, by name.
    """
    if not (eqx.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)) or key.shape:
        raise TypeError(
            "`init` takes a typed key, a single one. "
            f"Got {getattr(key, 'dtype', type(key).__name__)} of shape {jnp.shape(key)}. "
            "Write `key=jax.random.key(0)`."
        )
    found: list[Any] = []

    def build(key: Array) -> tuple[Array, ...]:
        make_key, step_key = jax.random.split(key)
        model, state = _model_and_state(make(make_key))
        _refuse_ties(model, "model")
        _refuse_ties(state, "state")
        parts = begin(as_arrays(model), scalars_as_arrays(state), step_key)
        treedef, static, names, leaves = flatten(parts)
        found.append((treedef, static, names, _trainable_names(parts.model, is_trainable)))
        # A copy each: what `make` closed over must outlive the step that donates its parameter.
        return tuple(jnp.copy(strong(leaf)) for leaf in leaves)

    # Traced once. Arrays that `make` closed over become arguments of the program, not constants.
    closed, shapes = jax.make_jaxpr(build, return_shape=True)(key)
    treedef, static, names, trainable = found[-1]
    shardings = _shardings(layout, state_layout, names, shapes, trainable)
    avals = tuple(
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        for shape, sharding in zip(shapes, shardings, strict=True)
    )
    return Plan(closed, Structure(treedef, static, names, avals), layout)


def _replicated(key: Array, layout: Layout) -> Array:
    """The key on every device of the mesh. As data: other processes' devices take no typed key."""
    data = jax.device_put(jax.random.key_data(key), layout.sharding(P()))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def _movable(const: Any, layout: Layout) -> Any:
    """An array that `make` closed over, where jit may move it to the devices of the mesh."""
    if not (isinstance(const, jax.Array) and const.committed):
        return const
    if jnp.issubdtype(const.dtype, jax.dtypes.extended):
        return jax.device_put(const, layout.sharding(P()))
    # From the host each device is sent its shard alone.
    return np.asarray(const)


def _model_and_state(made: Any) -> tuple[PyTree, PyTree]:
    if isinstance(made, tuple) and len(made) == 2 and not hasattr(made, "_fields"):
        return made
    return made, None


def _refuse_ties(tree: PyTree, where: str) -> None:
    seen: dict[int, str] = {}
    for name, leaf in named_leaves(tree):
        if not eqx.is_array(leaf):
            continue
        if id(leaf) in seen:
            raise ValueError(
                "An array may occur once: two copies would be trained apart. "
                f"Got the same array at `{where}.{seen[id(leaf)]}` and `{where}.{name}`. "
                "Keep it in one place and use it from there, or tie it by `eqx.nn.Shared`."
            )
        seen[id(leaf)] = name


def _trainable_names(model: PyTree, is_trainable: Callable[[PyTree], PyTree]) -> set[str]:
    return {name for name, _ in named_leaves(eqx.filter(model, is_trainable(model)))}


def _shardings(
    layout: Layout | None,
    state_layout: Layout | None,
    names: tuple[str, ...],
    shapes: tuple[Any, ...],
    trainable: set[str],
) -> tuple[Any, ...]:
    """Where each leaf lies: the model's by placement, what follows a parameter with it."""
    if layout is None or state_layout is None:
        return (None,) * len(names)
    model = {
        path: shape
        for name, shape in zip(names, shapes, strict=True)
        if (path := _in_model(name)) is not None
    }
    specs, state_specs = layout.specs_by_name(model), state_layout.specs_by_name(model)
    shardings = []
    for name, shape in zip(names, shapes, strict=True):
        spec = P()
        if (path := _in_model(name)) is not None:
            spec = specs[path]
        elif name.startswith(("opt_state", "extra")):
            owner = _owner(name, trainable)
            if owner is not None:
                owners = state_specs if name.startswith("opt_state") else specs
                spec = _spec_of_part(owners[owner], model[owner].shape, shape.shape)
        shardings.append(layout.sharding(spec))
    return tuple(shardings)


def _in_model(name: str) -> str | None:
    """The path within the model, which is empty for a model that is one array; else None."""
    return "" if name == "model" else name[6:] if name.startswith("model.") else None


def _owner(name: str, trainable: set[str]) -> str | None:
    """The parameter that an optimizer's leaf belongs to: the longest whose path ends its own.

    Where none does, one more part may follow: sm3 keeps a list for each parameter.
    """
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1):
        for start in range(1, end):
            path = ".".join(parts[start:end])
            if path in trainable:
                return path
    return "" if "" in trainable else None


def _spec_of_part(spec: P, owner: tuple[int, ...], shape: tuple[int, ...]) -> P:
    """How a leaf of `shape` lies that belongs to a parameter of shape `owner`, placed by `spec`.

    It may have the parameter's dims behind others, as the history of L-BFGS, or some of them, as
    Adafactor's statistics. Which ones those are must be plain; else it is replicated.
    """
    entries = [*spec, *[None] * (len(owner) - len(spec))]
    more = len(shape) - len(owner)
    if more >= 0:
        return trimmed(P(*[None] * more, *entries)) if shape[more:] == owner else P()
    found = {
        trimmed(P(*(entries[dim] for dim in dims)))
        for dims in itertools.combinations(range(len(owner)), len(shape))
        if tuple(owner[dim] for dim in dims) == shape
    }
    return found.pop() if len(found) == 1 else P()
