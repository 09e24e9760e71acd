"""The arrays of a model, or of a model and its state, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._util.paths import named_leaves, path_name


def named_arrays(
    template: PyTree,
) -> tuple[list[str], list[Any], Callable[[list[Any]], PyTree]]:
    """The names and arrays of a model, or of a model and its state, and how to put others there."""
    if not (
        isinstance(template, tuple) and len(template) == 2 and isinstance(template[1], eqx.nn.State)
    ):
        return _of_tree(template)
    model, state = template
    names, leaves, rebuild = _of_tree(model)
    state_leaves, state_def = jax.tree.flatten(state)
    # A state says nothing of where in the model its values belong: its indices do.
    numbered = jax.tree.unflatten(state_def, list(range(len(state_leaves))))
    state_names = [""] * len(state_leaves)
    is_index = lambda node: isinstance(node, eqx.nn.StateIndex)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_index):
        if is_index(node):
            prefix = path_name(path)
            for name, number in named_leaves(numbered.get(node)):
                state_names[number] = f"{prefix}.{name}" if name else prefix

    def rebuild_both(new: list[Any]) -> PyTree:
        return rebuild(new[: len(names)]), jax.tree.unflatten(state_def, new[len(names) :])

    return [*names, *state_names], [*leaves, *state_leaves], rebuild_both


def _of_tree(tree: PyTree) -> tuple[list[str], list[Any], Callable[[list[Any]], PyTree]]:
    named = named_leaves(tree)
    where = [index for index, (_, leaf) in enumerate(named) if _is_array(leaf)]

    def rebuild(new: list[Any]) -> PyTree:
        flat = [leaf for _, leaf in named]
        for index, leaf in zip(where, new, strict=True):
            flat[index] = leaf
        return jax.tree.unflatten(jax.tree.structure(tree), flat)

    return [named[index][0] for index in where], [named[index][1] for index in where], rebuild


def _is_array(leaf: Any) -> bool:
    return (
        eqx.is_array_like(leaf) and hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct)
    )
