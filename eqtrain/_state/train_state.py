"""The TrainState: all that training carries from step to step, packed for dispatch.

Flattening a model of hundreds of leaves on every call costs more than a small step. So a
TrainState holds its arrays as one flat tuple, and all that is not an array in one Structure that is
compared by identity; the trees are put together when they are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, Shaped

from .._util.paths import path_name
from .._util.text import kind_text


class UsedStateError(RuntimeError):
    """A TrainState whose buffers an earlier call took."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["model", "state", "opt_state", "key", "step", "extra"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Parts:
    """The fields of a TrainState as trees.

    `extra` holds what single transforms carry, by name: `ema`, `guard`, `loss_scale`. Any pytree
    function may put other things than arrays in their places, so the types are not narrower.
    """

    model: PyTree
    state: PyTree
    opt_state: PyTree
    key: Any
    step: Any
    extra: dict[str, PyTree]


class Structure:
    """All of a TrainState but its arrays. Two are equal if they are one object."""

    def __init__(
        self,
        treedef: Any,
        static: tuple[Any, ...],
        names: tuple[str, ...],
        avals: tuple[jax.ShapeDtypeStruct, ...],
    ):
        self.treedef = treedef
        self.static = static
        self.names = names
        self.avals = avals

    @functools.cached_property
    def sentinels(self) -> tuple[int, ...]:
        """The place of the first leaf of each field: copies share some whole field, if any."""
        fields = [name.partition(".")[0] for name in self.names]
        return tuple(fields.index(field) for field in dict.fromkeys(fields))

    @property
    def shardings(self) -> tuple[Any, ...]:
        return tuple(aval.sharding for aval in self.avals)

    @property
    def key_impls(self) -> tuple[Any, ...]:
        """Of which kind each array is that holds the words of a typed key; None for all others."""
        return tuple(leaf.key_impl for leaf in self.static if isinstance(leaf, _Array))

    def unpack(self, leaves: tuple[Any, ...]) -> Parts:
        arrays = iter(leaves)
        flat = [
            leaf.restore(next(arrays)) if isinstance(leaf, _Array) else leaf for leaf in self.static
        ]
        return jax.tree.unflatten(self.treedef, flat)

    def pack(self, parts: Parts) -> tuple[Any, ...]:
        """The arrays of `parts`, which must have this structure, shapes and dtypes.

        **Raises:** `ValueError` that names the leaf which changed.
        """
        treedef, static, names, leaves = flatten(parts)
        if treedef != self.treedef or static != self.static:
            raise ValueError(_what_changed(self, static, names))
        for name, leaf, aval in zip(names, leaves, self.avals, strict=True):
            if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
                raise ValueError(
                    "A TrainState must keep the shape and dtype of every leaf. "
                    f"Got `{name}` as {kind(leaf)} in place of {kind(aval)}. "
                    "Cast it back where it is computed."
                )
        return tuple(map(strong, leaves))


@dataclasses.dataclass(frozen=True)
class _Array:
    """Stands for an array among the static leaves.

    A typed key is held as its words, `key_impl` saying of which kind, since each typed key among
    the arguments of a compiled program costs its caller microseconds.
    """

    key_impl: Any = None

    def restore(self, leaf: Any) -> Any:
        if self.key_impl is None or not eqx.is_array(leaf):
            return leaf
        return jax.random.wrap_key_data(leaf, impl=self.key_impl)


def flatten(parts: Parts) -> tuple[Any, tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]:
    """Takes trees apart: the treedef, the static leaves, and the arrays with their names."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(parts)
    static = tuple(_Array(_key_impl(leaf)) if eqx.is_array(leaf) else leaf for _, leaf in paths)
    arrays = [(path_name(path), _words(leaf)) for path, leaf in paths if eqx.is_array(leaf)]
    return treedef, static, tuple(name for name, _ in arrays), tuple(leaf for _, leaf in arrays)


def _key_impl(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if is_key else None


def _words(leaf: Any) -> Any:
    return leaf if _key_impl(leaf) is None else jax.random.key_data(leaf)


def _what_changed(structure: Structure, static: tuple[Any, ...], names: tuple[str, ...]) -> str:
    gone = [name for name in structure.names if name not in names]
    new = [name for name in names if name not in structure.names]
    values = [f"{a!r} -> {b!r}" for a, b in zip(structure.static, static, strict=False) if a != b]
    return (
        "A TrainState must keep its structure. Got "
        + (f"arrays that are missing: {gone[:3]}; " if gone else "")
        + (f"arrays that are new: {new[:3]}; " if new else "")
        + (f"values that changed: {values[:3]}; " if values else "")
        + "make each step and each `replace` return the leaves it was given."
    )


def strong(leaf: Any) -> Any:
    """The same without weak type, which would compile the next step anew."""
    if not jax.typeof(leaf).weak_type:
        return leaf
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def kind(leaf: Any) -> str:
    """A leaf's dtype and shape, as in `float32[8,3]`."""
    return kind_text(leaf.dtype, leaf.shape)


class TrainState:
    """What training carries from step to step. Made by `init`, never by hand.

    **Fields**, each put together when it is read: `model`, `state`, `opt_state`, `key` (which never
    changes), `step` (steps taken, int32), `extra`, and `ema` where the chain has one.

    A step with `donate` uses up the TrainState it is given; reading that one afterwards raises
    `UsedStateError`.
    """

    __slots__ = ("leaves", "structure", "used", "fresh", "flag", "__weakref__")

    def __init__(self, leaves: tuple[Any, ...], structure: Structure, fresh: bool = False):
        self.leaves = leaves
        self.structure = structure
        self.used: str | None = None
        # Whether it comes from elsewhere than a step, so that its buffers may not be donatable.
        self.fresh = fresh
        # What the step that made it says of itself, for the host to look at a call later.
        self.flag: tuple[int, Any, PyTree] | None = None

    @property
    def parts(self) -> Parts:
        self.require_unused()
        return self.structure.unpack(self.leaves)

    @property
    def model(self) -> PyTree:
        return self.parts.model

    @property
    def state(self) -> PyTree:
        return self.parts.state

    @property
    def opt_state(self) -> PyTree:
        return self.parts.opt_state

    @property
    def key(self) -> Shaped[Any, ""]:
        return self.parts.key

    @property
    def step(self) -> Int[Any, ""]:
        return self.parts.step

    @property
    def extra(self) -> dict[str, PyTree]:
        return self.parts.extra

    @property
    def ema(self) -> PyTree:
        """The model with its averaged parameters.

        **Raises:** `AttributeError` if the chain has no `et.ema`.
        """
        parts = self.parts
        if "ema" not in parts.extra:
            raise AttributeError(
                "Averaged parameters are kept by `et.ema(decay)` in the chain. Got a TrainState "
                "without. Add the transform after `et.update`."
            )
        return eqx.combine(cast_like(parts.extra["ema"], parts.model), parts.model)

    def replace(self, **fields: Any) -> TrainState:
        """A TrainState with other contents in some fields, of the same structure.

        The new arrays go where the old ones were; a donating step uses them up. What the step that
        made it said of itself stays with it, unless `extra` is replaced, and with it the counts
        that this is about.

        **Raises:** `ValueError` if a leaf's shape or dtype, or the structure, differs.
        """
        parts = dataclasses.replace(self.parts, **fields)
        parts = dataclasses.replace(
            parts, **{name: as_arrays(getattr(parts, name)) for name in fields}
        )
        # Copies: a step that donates must not take what is the caller's, nor a buffer twice.
        leaves = tuple(
            new if new is old else jnp.copy(new)
            for new, old in zip(self.structure.pack(parts), self.leaves, strict=True)
        )
        shardings = self.structure.shardings
        if any(sharding is not None for sharding in shardings):
            leaves = tuple(map(jax.device_put, leaves, shardings))
        new = TrainState(leaves, self.structure, fresh=True)
        if self.flag is not None and "extra" not in fields:
            call, alarm, batch = self.flag
            # What the step was given, for a replay bundle, is no longer to be had from this one.
            others = fields.keys() & {"model", "state", "opt_state", "key"}
            new.flag = (call, alarm, None if others else batch)
        return new

    def with_leaves(self, leaves: tuple[Any, ...]) -> TrainState:
        """The same with other arrays, which are as these but lie elsewhere; itself if they are."""
        if leaves is self.leaves:
            return self
        new = TrainState(leaves, self.structure, self.fresh)
        new.flag = self.flag
        return new

    def require_unused(self) -> None:
        if self.used is not None:
            raise UsedStateError(
                "A donated TrainState cannot be used again: its buffers became the next one's. "
                f"Got one that {self.used} took. "
                "Use the TrainState which that call returned: `ts, metrics = step(ts, batch)`."
            )

    def __repr__(self) -> str:
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves)
        used = f", used up by {self.used}" if self.used else ""
        return f"TrainState({len(self.leaves)} arrays, {size:,} bytes{used})"


def _flatten_with_keys(ts: TrainState) -> Any:
    ts.require_unused()
    keys = map(jax.tree_util.GetAttrKey, ts.structure.names)
    return tuple(zip(keys, ts.leaves, strict=True)), ts.structure


def _flatten(ts: TrainState) -> Any:
    ts.require_unused()
    return ts.leaves, ts.structure


jax.tree_util.register_pytree_with_keys(
    TrainState,
    _flatten_with_keys,
    lambda structure, leaves: TrainState(tuple(leaves), structure, fresh=True),
    _flatten,
)


def require_train_state(ts: Any) -> None:
    """Refuses a model, or anything else, in place of a TrainState."""
    if not isinstance(ts, TrainState):
        raise TypeError(
            f"A step takes a TrainState and a batch. Got {type(ts).__name__}. "
            "Make the first TrainState by `train_step.init(make_model, key=...)`."
        )


def as_arrays(tree: PyTree) -> PyTree:
    """Numpy arrays as JAX arrays."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf, tree
    )


def scalars_as_arrays(tree: PyTree) -> PyTree:
    """Python numbers as arrays: as values they would change, and compile anew, every step."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf,
        as_arrays(tree),
    )


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """The arrays of `tree` in the dtypes that `like` has in their places."""
    return jax.tree.map(
        lambda x, y: None if x is None else x.astype(y.dtype),
        tree,
        like,
        is_leaf=lambda x: x is None,
    )
