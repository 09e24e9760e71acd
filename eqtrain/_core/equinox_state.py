"""`eqx.nn.State` inside a mesh: set by whatever has the shape and dtype of what was there.

Inside `shard_map` JAX's type of an array says on which mesh it is, unless it is a constant, and
`State.set` compares these types: there it refuses `state.set(index, jnp.array(True))`. A loss that
runs on one device has to run on a mesh, so it is given a State that compares shapes and dtypes.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._util.text import kind_text


@jax.tree_util.register_pytree_node_class
class MeshState(eqx.nn.State):
    """An `eqx.nn.State` that takes constants."""

    def set(self, item: eqx.nn.StateIndex, value: Any) -> MeshState:
        value = jax.tree.map(jnp.asarray, value)
        kinds = [jax.tree.map(_kind, tree) for tree in (self.get(item), value)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                "A state must keep its structure, shapes and dtypes. "
                f"Got {kinds[1]} for `state.set`, where there was {kinds[0]}. "
                "Cast or reshape the new value."
            )
        return as_mesh_state(super().update(_plain((item.marker,), (value,))))

    def update(self, substate: eqx.nn.State) -> MeshState:
        return as_mesh_state(super().update(as_plain_state(substate)))

    def substate(self, pytree: PyTree) -> MeshState:
        return as_mesh_state(super().substate(pytree))


def as_mesh_state(state: eqx.nn.State) -> MeshState:
    values, keys = state.tree_flatten()
    return MeshState.tree_unflatten(keys, values)


def as_plain_state(state: eqx.nn.State) -> eqx.nn.State:
    values, keys = state.tree_flatten()
    return _plain(keys, values)


def _plain(keys: Any, values: Any) -> eqx.nn.State:
    return eqx.nn.State.tree_unflatten(keys, values)


def convert(tree: PyTree, change: Any) -> PyTree:
    """`tree` with each `eqx.nn.State` in it changed."""
    return jax.tree.map(
        lambda node: change(node) if _is_state(node) else node, tree, is_leaf=_is_state
    )


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.State)


def _kind(x: Any) -> str:
    return kind_text(x.dtype, x.shape)
