"""Names for the leaves of a pytree, and choices of leaves by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree


def path_name(path: tuple[Any, ...]) -> str:
    """The dotted name of a leaf, such as `layers.0.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of `tree` with their dotted names."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def matching(*patterns: str, but: str | None = None) -> Callable[[PyTree], PyTree]:
    """Chooses leaves by regular expressions on their dotted paths.

    What comes back maps a pytree to one of booleans, which is what `update(trainable=)` and the
    masks of optax take. Naming leaves beats guessing from their number of dims: the scales of
    stacked norms are matrices too.

    **Arguments:**

    - `patterns`: a leaf is chosen if `re.search` finds one of them in its path.
    - `but`: a leaf whose path holds this one is not chosen.

    **Raises:** `ValueError`, when applied, if a pattern matches no leaf.

    ```python
    >>> et.matching("weight$", but="norm")({"linear.weight": 1.0, "norm.weight": 2.0})
    {'linear.weight': True, 'norm.weight': False}

    ```
    """

    def choose(tree: PyTree) -> PyTree:
        names = [name for name, _ in named_leaves(tree)]
        for pattern in (*patterns, *([but] if but else [])):
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(
                    "A pattern of `matching` must match a leaf. "
                    f"Got {pattern!r}, which matches none of: {', '.join(names)}. "
                    "Correct the pattern, or leave it out."
                )

        def chosen(path: tuple[Any, ...], _: Any) -> bool:
            name = path_name(path)
            return any(re.search(pattern, name) for pattern in patterns) and not (
                but and re.search(but, name)
            )

        return jax.tree_util.tree_map_with_path(chosen, tree)

    but_text = f", but={but!r}" if but else ""
    choose.__name__ = f"et.matching({', '.join(map(repr, patterns))}{but_text})"
    return choose
