"""Fills models with tensors of other frameworks, and gives them back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._state.train_state import kind
from .._util.text import some
from .files import as_numpy
from .leaves import named_arrays
from .rules import Made, Rule, backward, forward, sources_of


@dataclasses.dataclass(frozen=True)
class Report:
    """What rules make of tensors for a model, as `et.interop.compare` finds it.

    **Fields:** `loaded`: of each leaf that gets a value, the tensors that it is made of. `missing`:
    of each leaf that gets none, the name that a rule would make it from, or None. `unused`: the
    tensors that go nowhere.
    """

    loaded: dict[str, tuple[str, ...]]
    missing: dict[str, str | None]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} leaves have values."]
        lines += [f"missing: {text}" for text in _missing_texts(self.missing)]
        lines += [f"unused: `{name}`" for name in self.unused]
        return "\n".join(lines)


def load(
    template: PyTree,
    tensors: Mapping[str, Any],
    rules: Iterable[Rule],
    *,
    missing: Sequence[str] = (),
    unused: Sequence[str] = (),
    cast: bool = False,
) -> PyTree:
    """Fills a model with tensors of another framework.

    Inside the function that a program's `init` is given it costs no second model: what is filled is
    never drawn, and each device is sent its shard alone.

    **Arguments:**

    - `template`: a model, or its shapes from `eqx.filter_eval_shape`; or `(model, state)`, where
        the leaves of an `eqx.nn.State` go by the path of their `StateIndex` in the model:
        `stem.norm.running.0`. Leaves keep their sharding.
    - `tensors`: arrays by name: what `read` returns, or the state dict of a PyTorch model.
    - `rules`: see `rule`.
    - `missing`: regular expressions for leaves that may stay as they are in the template.
    - `unused`: regular expressions for tensors that may be left out.
    - `cast`: takes floating tensors of any floating dtype, and integers of any integer one.

    **Returns:** the template with new arrays, which share no memory with the tensors.

    **Raises:** `ValueError` for leaves without a tensor, tensors without a leaf, leaves that two
    rules fill, and shapes and dtypes that differ, by both names.

    ```python
    >>> linear = et.interop.rule("fc.weight", "weight", "o i -> i o")
    >>> tensors = {"fc.weight": np.arange(6.0, dtype=np.float32).reshape(2, 3)}
    >>> et.interop.load({"weight": jnp.zeros((3, 2))}, tensors, [linear])["weight"].tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]

    ```
    """
    names, leaves, rebuild = named_arrays(template)
    made, report = _plan(dict(zip(names, leaves, strict=True)), tensors, rules)
    lost = {
        name: source
        for name, source in report.missing.items()
        if not any(re.search(pattern, name) for pattern in missing)
    }
    left = [
        name for name in report.unused if not any(re.search(pattern, name) for pattern in unused)
    ]
    if lost or left:
        raise ValueError(
            "Every leaf must get a tensor, and every tensor must have a leaf. Got "
            + (f"leaves without one: {some(_missing_texts(lost), 8, ', ')}; " if lost else "")
            + (
                f"tensors without one: {some([f'`{name}`' for name in left], 8, ', ')}; "
                if left
                else ""
            )
            + "add rules, or pass patterns as `missing=` and `unused=`."
        )
    for name, leaf in zip(names, leaves, strict=True):
        if name not in made and isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                "A leaf that stays as it is must have a value. "
                f"Got `{name}` as a shape, {kind(leaf)}. Pass a template with arrays."
            )
    return rebuild(
        [
            _fit(made[name], leaf, cast) if name in made else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
    )


def compare(template: PyTree, tensors: Mapping[str, Any], rules: Iterable[Rule]) -> Report:
    """Says what `load` would fill, and what would be missing or unused, which it does not refuse.

    No tensor is read, save where a placeholder stands in a rule's target alone and its values are
    not declared: the length of a dim says how many they are.

    **Raises:** `ValueError` for leaves that two rules fill, and for such a dim that is not there.

    ```python
    >>> linear = et.interop.rule("fc.weight", "weight", "o i -> i o")
    >>> shapes = {"weight": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}
    >>> print(et.interop.compare(shapes, {"fc.weight": np.zeros((2, 3)), "fc.b": 0}, [linear]))
    1 leaves have values.
    missing: `bias`, which no rule makes
    unused: `fc.b`

    ```
    """
    names, leaves, _ = named_arrays(template)
    return _plan(dict(zip(names, leaves, strict=True)), tensors, rules)[1]


def export(
    model: PyTree, rules: Iterable[Rule], *, unused: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Gives a model's arrays the names and dims of another framework: `load` in reverse.

    **Arguments:**

    - `model`: or `(model, state)`, as for `load`.
    - `unused`: regular expressions for leaves that may be left out.

    **Returns:** arrays on the host. `torch.from_numpy` of each makes a state dict.

    **Raises:** `ValueError` for leaves that no rule covers, and for names that two rules make.

    ```python
    >>> linear = et.interop.rule("fc.weight", "weight", "o i -> i o")
    >>> et.interop.export({"weight": jnp.ones((3, 2))}, [linear])["fc.weight"].shape
    (2, 3)

    ```
    """
    names, leaves, _ = named_arrays(model)
    by_name = dict(zip(names, leaves, strict=True))
    made: dict[str, Made] = {}
    for each in rules:
        for one in backward(each, names, lambda name: np.array(by_name[name])):
            _add(made, one)
    used = {name for one in made.values() for name in one.inputs}
    left = [
        f"`{name}`"
        for name in names
        if name not in used and not any(re.search(pattern, name) for pattern in unused)
    ]
    if left:
        raise ValueError(
            f"Every leaf must have a rule. Got {some(left, 8, ', ')} without one. "
            "Add rules, or pass patterns as `unused=`."
        )
    return {name: one.array() for name, one in made.items()}


def _plan(
    leaves: Mapping[str, Any], tensors: Mapping[str, Any], rules: Iterable[Rule]
) -> tuple[dict[str, Made], Report]:
    rules = tuple(rules)
    made: dict[str, Made] = {}
    for each in rules:
        for one in forward(each, tensors, lambda name: as_numpy(tensors[name])):
            if one.name in leaves:
                _add(made, one)
    used = {name for one in made.values() for name in one.inputs}
    missing = {}
    for leaf in leaves:
        if leaf not in made:
            sources = (sources_of(each, leaf) for each in rules)
            missing[leaf] = next((source for source in sources if source is not None), None)
    loaded = {name: one.inputs for name, one in made.items()}
    return made, Report(loaded, missing, tuple(name for name in tensors if name not in used))


def _add(made: dict[str, Made], one: Made) -> None:
    if one.name in made:
        raise ValueError(
            "A name may be made by one rule. "
            f"Got `{one.name}` from {made[one.name].rule} and from {one.rule}. Take one away."
        )
    made[one.name] = one


def _fit(made: Made, leaf: Any, cast: bool) -> jax.Array:
    """The array of a rule as a leaf: of its shape, dtype and sharding."""
    array = made.array()
    inputs = " ".join(f"`{name}`" for name in made.inputs[:3])
    if array.shape != leaf.shape:
        raise ValueError(
            f"What a rule makes must have the leaf's shape. Got {inputs} as {array.shape} for "
            f"`{made.name}`, which is {kind(leaf)}, by {made.rule}. "
            "Correct the rule's `dims`, or the model's sizes."
        )
    if array.dtype != leaf.dtype:
        families = (jnp.floating, jnp.integer)
        alike = any(
            jnp.issubdtype(array.dtype, family) and jnp.issubdtype(leaf.dtype, family)
            for family in families
        )
        if not (cast and alike):
            raise ValueError(
                f"A tensor must have the leaf's dtype. Got {inputs} as {array.dtype} for "
                f"`{made.name}`, which is {kind(leaf)}. "
                + ("Pass `cast=True`." if alike else "Correct the rule.")
            )
        array = array.astype(leaf.dtype)
    placed = isinstance(leaf, jax.ShapeDtypeStruct) or (
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed
    )
    # Copies: of a view on the host's memory a step could not take the buffer.
    if placed and leaf.sharding is not None:
        return jax.device_put(array, leaf.sharding, may_alias=False)
    return jnp.array(array)


def _missing_texts(missing: Mapping[str, str | None]) -> list[str]:
    return [
        f"`{name}`, " + ("which no rule makes" if source is None else f"from `{source}`")
        for name, source in missing.items()
    ]
