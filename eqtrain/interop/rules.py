"""Rules that say which tensor is which leaf, and how its dims are arranged there."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import einops
import numpy as np

_HOLE = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a mapping, which can be read in both directions. Made by `et.interop.rule`."""

    source: str
    target: str
    dims: str | None
    axes: Mapping[str, int | tuple[str, ...]]

    def __str__(self) -> str:
        return f"`{self.source}` -> `{self.target}`" + (f" by {self.dims!r}" if self.dims else "")


def rule(source: str, target: str, dims: str | None = None, **axes: int | tuple[str, ...]) -> Rule:
    """Says that the tensors named `source` are the leaves whose path is `target`.

    Both may hold placeholders, such as the `{layer}` of `"encoder.layer.{layer}.bias"`. One that
    stands in both numbers pairs. One that stands in `source` alone makes a dim: the tensors of all
    its values are stacked, in order. One that stands in `target` alone is a dim that is taken
    apart. So a rule covers layers that are stacked for a scan, query, key and value in one matrix,
    and their reverses.

    **Arguments:**

    - `source`: a name in a file, or of a PyTorch state dict.
    - `target`: the dotted path of a leaf, such as `"blocks.{layer}.out.weight"`.
    - `dims`: a pattern of `einops.rearrange`, from the source's dims to the target's, such as
        `"o i -> i o"`. What placeholders make comes first, by their names. Unless given,
        dims stay as they are, stacked ones in front.
    - `axes`: by name, the values of a placeholder, as a tuple of strings in order; or the size of a
        dim that a pattern takes apart. A placeholder without values stands for 0, 1, 2 and so on.

    **Raises:** `ValueError` for a pattern that lacks a placeholder's dim.

    ```python
    >>> fused = et.interop.rule(
    ...     "layer.{layer}.{part}.weight",
    ...     "blocks.{layer}.qkv.weight",
    ...     "part o i -> i (part o)",
    ...     part=("query", "key", "value"),
    ... )
    >>> parts = {f"layer.0.{part}.weight": np.ones((2, 4)) for part in ("query", "key", "value")}
    >>> model = {"blocks": [{"qkv": {"weight": jnp.zeros((4, 6))}}]}
    >>> float(et.interop.load(model, parts, [fused], cast=True)["blocks"][0]["qkv"]["weight"].sum())
    24.0

    ```
    """
    made = Rule(source, target, dims, axes)
    stacked, taken = _only(source, target), _only(target, source)
    if dims is None:
        if stacked and taken:
            raise ValueError(
                "A rule whose source and target have placeholders of their own must say how dims "
                f"are arranged. Got {made}. Pass a pattern such as "
                f"'{' '.join(stacked)} o i -> {' '.join(taken)} i o'."
            )
        return made
    left, arrow, right = dims.partition("->")
    for side, names, pattern in (("source", stacked, left), ("target", taken, right)):
        if not arrow or set(pattern.split()[: len(names)]) != set(names):
            raise ValueError(
                "The dims that placeholders make must come first on their side of a pattern. "
                f"Got {made}, where those of the {side} are {names}. "
                "Put them in front, outside of parentheses."
            )
    return made


def prefixed(rules: Any, *, source: str = "", target: str = "") -> tuple[Rule, ...]:
    """The same rules for names that begin with something more.

    ```python
    >>> [moved] = et.interop.prefixed([et.interop.rule("norm", "norm")], source="bert.")
    >>> print(moved)
    `bert.norm` -> `norm`

    ```
    """
    return tuple(
        dataclasses.replace(rule, source=source + rule.source, target=target + rule.target)
        for rule in rules
    )


@dataclasses.dataclass(frozen=True)
class Made:
    """An array that a rule makes, from which ones, once it is asked for."""

    rule: Rule
    name: str
    inputs: tuple[str, ...]
    array: Callable[[], np.ndarray]


def forward(rule: Rule, names: Any, read: Callable[[str], np.ndarray]) -> Iterator[Made]:
    """The leaves that a rule makes of tensors."""
    return _apply(rule, names, read, rule.source, rule.target, rule.dims)


def backward(rule: Rule, names: Any, read: Callable[[str], np.ndarray]) -> Iterator[Made]:
    """The tensors that a rule makes of leaves."""
    left, _, right = (rule.dims or "").partition("->")
    reversed_dims = None if rule.dims is None else f"{right} -> {left}"
    return _apply(rule, names, read, rule.target, rule.source, reversed_dims)


def sources_of(rule: Rule, leaf: str) -> str | None:
    """The name, with placeholders where it is several, of what makes a leaf; None for others."""
    found = _matcher(rule.target, rule.axes).fullmatch(leaf)
    if found is None:
        return None
    known = found.groupdict()
    return _HOLE.sub(lambda hole: known.get(hole[1], hole[0]), rule.source)


def _apply(
    rule: Rule,
    names: Any,
    read: Callable[[str], np.ndarray],
    given: str,
    wanted: str,
    dims: str | None,
) -> Iterator[Made]:
    matcher = _matcher(given, rule.axes)
    stacked, taken = _only(given, wanted), _only(wanted, given)
    if dims is not None:
        # In the order in which the pattern has them.
        left, _, right = dims.partition("->")
        stacked, taken = left.split()[: len(stacked)], right.split()[: len(taken)]
    elif stacked or taken:  # never both
        dims = f"{' '.join(stacked or taken)} ... -> {' '.join(stacked or taken)} ..."
    groups: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    shared = [hole for hole in dict.fromkeys(_HOLE.findall(given)) if hole not in stacked]
    for name in names:
        if found := matcher.fullmatch(name):
            group = groups.setdefault(tuple(found[hole] for hole in shared), {})
            group[tuple(found[hole] for hole in stacked)] = name
    for values, group in groups.items():
        axes = [_values(rule, hole, [key[i] for key in group]) for i, hole in enumerate(stacked)]
        inputs = [group.get(key) for key in itertools.product(*axes)]
        if None in inputs:
            continue  # what is there is unused then, and what it would make is missing
        whole = tuple(name for name in inputs if name is not None)
        known = dict(zip(shared, values, strict=True))
        make = _maker(rule, dims, read, whole, tuple(map(len, axes)))
        if not taken:
            yield Made(rule, _fill(wanted, known), whole, make)
            continue
        make = functools.cache(make)
        # Only what is not declared must be read now, to see how many it is.
        axes = [
            _values(
                rule, hole, [] if hole in rule.axes else [str(i) for i in range(make().shape[dim])]
            )
            for dim, hole in enumerate(taken)
        ]
        for key in itertools.product(*(range(len(axis)) for axis in axes)):
            more = {hole: axes[i][key[i]] for i, hole in enumerate(taken)}
            name = _fill(wanted, {**known, **more})
            yield Made(rule, name, whole, lambda make=make, key=key: make()[key])


def _maker(
    rule: Rule,
    dims: str | None,
    read: Callable[[str], np.ndarray],
    inputs: tuple[str, ...],
    shape: tuple[int, ...],
) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        arrays = [read(name) for name in inputs]
        if len({(array.shape, array.dtype) for array in arrays}) > 1:
            kinds = ", ".join(f"`{n}` {a.shape}" for n, a in zip(inputs, arrays, strict=True))
            raise ValueError(
                f"What is stacked must have one shape and dtype. Got {kinds} for {rule}. "
                "Give each a leaf of its own."
            )
        array = arrays[0] if not shape else np.stack(arrays).reshape(shape + arrays[0].shape)
        if dims is None:
            return array
        sizes = {
            name: value if isinstance(value, int) else len(value)
            for name, value in rule.axes.items()
            if re.search(rf"\b{name}\b", dims)
        }
        try:
            return np.asarray(einops.rearrange(array, dims, **sizes), order="C")
        except einops.EinopsError as error:
            raise ValueError(
                f"The dims of a rule must be those of its tensors. Got {rule}, and "
                f"{' '.join(f'`{name}`' for name in inputs[:3])} of shape {arrays[0].shape}: "
                f"{str(error).strip().splitlines()[-1].strip()} Correct the pattern `{dims}`."
            ) from error

    return make


def _values(rule: Rule, hole: str, found: list[str]) -> tuple[str, ...]:
    """The values of a placeholder in order: those declared, or 0, 1, 2 up to the largest found."""
    declared = rule.axes.get(hole)
    if isinstance(declared, tuple):
        return declared
    return tuple(map(str, range(declared or max(map(int, found)) + 1)))


def _matcher(template: str, axes: Mapping[str, int | tuple[str, ...]]) -> re.Pattern[str]:
    parts, seen = [], set()
    for index, part in enumerate(_HOLE.split(template)):
        if index % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P={part})")
        else:
            values = axes.get(part)
            choices = "|".join(map(re.escape, values)) if isinstance(values, tuple) else r"\d+"
            parts.append(f"(?P<{part}>{choices})")
            seen.add(part)
    return re.compile("".join(parts))


def _fill(template: str, values: Mapping[str, str]) -> str:
    return _HOLE.sub(lambda hole: values[hole[1]], template)


def _only(template: str, other: str) -> list[str]:
    """The placeholders of a template that another lacks."""
    holes = dict.fromkeys(_HOLE.findall(template))
    return [hole for hole in holes if hole not in _HOLE.findall(other)]
