"""Placements: which PartitionSpec each leaf of a model has."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from .._util.paths import named_leaves, path_name
from .._util.text import Code, call, name_of

Axes = tuple[str, ...]
# Leaves of fewer elements are replicated: gathering them costs more than it saves.
MIN_SIZE = 2**12
# (path, leaf, mesh) -> spec
Rule = Callable[[str, Any, Mesh], P]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A rule that gives each leaf its spec, and a check that it was meant for this tree.

    `lazy` says of a path whether its leaf is handed to the loss as a shard, for `et.gather`. `text`
    is how a user wrote it.
    """

    rule: Rule
    check: Callable[[list[str]], None] = lambda names: None
    lazy: Callable[[str], bool] = lambda path: False
    text: str = "placement"

    def __repr__(self) -> str:
        return self.text


def replicate() -> Placement:
    """Places a full copy of every leaf on every device."""
    return Placement(lambda path, leaf, mesh: P(), text="et.replicate()")


def fsdp(
    axis: str,
    *,
    min_size: int = MIN_SIZE,
    lazy: str | None = None,
    beside: Placement | None = None,
) -> Placement:
    """Splits each leaf over `axis`, along its largest dim that the axis's size divides.

    **Arguments:**

    - `axis`: a mesh axis. If the batch is split over it, a leaf is gathered before the loss and its
      gradient scattered after it.
    - `min_size`: a leaf of fewer elements is replicated; gathering it costs more than it saves.
    - `lazy`: the path of a subtree, such as `"blocks"`, whose leaves reach the loss as shards: the
      model calls `et.gather(block)` in a scanned, rematerialised block, so that one block is whole
      at a time. Blocks are stacked along dim 0, which is therefore not split and does not count for
      `min_size`; or they are a sequence, as in `blocks.0.weight`.
    - `beside`: a placement that goes first, such as tensor-parallel `et.rules`. This one splits a
      dim that it left whole.

    **Raises:** `ValueError`, when a model is placed, for a leaf none of whose dims divides, by its
    path: nothing is padded. `ValueError` for `lazy` that is the path of nothing.

    **Reference:** Rajbhandari et al. 2020 (ZeRO), https://arxiv.org/abs/1910.02054

    ```python
    >>> heads = et.rules({r"query": P(None, "model")})
    >>> placement = et.fsdp("data", lazy="blocks", beside=heads)

    ```
    """

    def rule(path: str, leaf: Any, mesh: Mesh) -> P:
        _require_axes(mesh, (axis,), f"fsdp({axis!r})")
        spec = P() if beside is None else beside.rule(path, leaf, mesh)
        first = 1 if _is_stacked(path, lazy) else 0
        dims = _whole_dims(leaf, spec, first)
        if math.prod(leaf.shape[first:]) < min_size or mesh.shape[axis] == 1:
            return spec
        split = _split_largest(leaf, spec, dims, axis, mesh.shape[axis])
        if split is None:
            left = "" if len(dims) == leaf.ndim else f", of which dims {dims} may be split"
            raise ValueError(
                f"`fsdp` must find a dim that the {mesh.shape[axis]} devices of axis `{axis}` "
                f"divide. Got `{path}` of shape {leaf.shape}{left}. "
                f"Raise `min_size` above {math.prod(leaf.shape[first:])} to replicate it, or place "
                f"it by `et.rules({{{re.escape(path)!r}: P()}}, otherwise=et.fsdp({axis!r}))`."
            )
        return split

    def check(names: list[str]) -> None:
        if beside is not None:
            beside.check(names)
        if lazy is not None and not any(_is_within(name, lazy) for name in names):
            raise ValueError(
                "`lazy` of `fsdp` must be the path of a subtree of the model. "
                f"Got {lazy!r}, where the leaves are: {', '.join(names)}. "
                "Write the first parts of the paths that are gathered later."
            )

    size = None if min_size == MIN_SIZE else min_size
    text = call("fsdp", axis, min_size=size, lazy=lazy, beside=beside)
    return Placement(rule, check, lambda path: lazy is not None and _is_within(path, lazy), text)


def split_state(placement: Placement, axis: str) -> Placement:
    """How optimizer state lies: as its parameters by `placement`, and split over `axis` beside.

    What is small, or has no dim that divides, stays as its parameter: no loss looks at it.
    """

    def rule(path: str, leaf: Any, mesh: Mesh) -> P:
        spec = placement.rule(path, leaf, mesh)
        if math.prod(leaf.shape) < MIN_SIZE or axis in spec_axes(spec) or mesh.shape[axis] == 1:
            return spec
        dims = _whole_dims(leaf, spec, 0)
        return _split_largest(leaf, spec, dims, axis, mesh.shape[axis]) or spec

    return Placement(rule, placement.check, placement.lazy)


def _whole_dims(leaf: Any, spec: P, first: int) -> list[int]:
    """The dims from `first` on that a spec does not split."""
    return [dim for dim in range(first, leaf.ndim) if dim >= len(spec) or spec[dim] is None]


def _split_largest(leaf: Any, spec: P, dims: list[int], axis: str, size: int) -> P | None:
    """The spec with the largest of `dims` that divides split over `axis`; None if none does."""
    dims = [dim for dim in dims if leaf.shape[dim] % size == 0]
    if not dims:
        return None
    entries = [*spec, *[None] * (leaf.ndim - len(spec))]
    entries[max(dims, key=lambda dim: leaf.shape[dim])] = axis
    return trimmed(P(*entries))


def _is_within(path: str, subtree: str) -> bool:
    return path == subtree or path.startswith(f"{subtree}.")


def _is_stacked(path: str, lazy: str | None) -> bool:
    """Whether dim 0 of a lazy leaf numbers the blocks, which a scan takes apart."""
    return (
        lazy is not None
        and _is_within(path, lazy)
        and not path[len(lazy) + 1 :].split(".")[0].isdigit()
    )


def rules(
    patterns: Mapping[str, P | Placement], otherwise: P | Placement | None = None
) -> Placement:
    """Places each leaf by the first regular expression that `re.search` finds in its path.

    **Arguments:**

    - `patterns`: from a pattern to a spec, or to a placement such as `et.fsdp("data")`.
    - `otherwise`: for leaves that no pattern matches; replicated unless given.

    **Raises:** `ValueError`, when a model is placed, for a pattern that matches no leaf.

    ```python
    >>> placement = et.rules({r"embedding": P("model", None)}, otherwise=et.fsdp("data"))

    ```
    """

    def chosen(path: str) -> Placement:
        for pattern, spec in patterns.items():
            if re.search(pattern, path):
                return as_placement(spec)
        return replicate() if otherwise is None else as_placement(otherwise)

    def rule(path: str, leaf: Any, mesh: Mesh) -> P:
        return chosen(path).rule(path, leaf, mesh)

    def check(names: list[str]) -> None:
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(
                    "Every pattern of `rules` must match a leaf. "
                    f"Got {pattern!r}, which matches none of: {', '.join(names)}. "
                    "Correct the pattern, or leave it out."
                )
        for spec in (*patterns.values(), *([] if otherwise is None else [otherwise])):
            as_placement(spec).check(names)

    written = {pattern: Code(text_of_specs(spec)) for pattern, spec in patterns.items()}
    rest = None if otherwise is None else Code(text_of_specs(otherwise))
    text = call("rules", written, otherwise=rest)
    return Placement(rule, check, lambda path: chosen(path).lazy(path), text)


def as_placement(given: Any) -> Placement:
    """A placement as one: a Placement, one spec, a function `(path, leaf) -> P`, or a tree."""
    if isinstance(given, Placement):
        return given
    if isinstance(given, P):
        return Placement(lambda path, leaf, mesh: given, text=text_of_specs(given))
    # Looked for first: a tree of specs that is an Equinox module may be callable too.
    specs = {
        path_name(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(given, is_leaf=_is_spec)
        if _is_spec(spec)
    }
    if not specs and callable(given):
        function: Any = given
        return Placement(lambda path, leaf, mesh: function(path, leaf), text=name_of(given))
    if not specs:
        raise TypeError(
            "`model` of `shard` must be a placement, a PartitionSpec, a function "
            f"`(path, leaf) -> P` or a pytree of PartitionSpecs. Got {type(given).__name__}. "
            "Write `et.replicate()` or `et.fsdp('data')`."
        )

    def rule(path: str, leaf: Any, mesh: Mesh) -> P:
        if path not in specs:
            raise ValueError(
                "A tree of specs must have a spec for every array of the model. "
                f"Got none for `{path}` of shape {leaf.shape}. Add it; `P()` replicates."
            )
        return specs[path]

    return Placement(rule, text="specs")


def text_of_specs(given: Any) -> str:
    """A spec, a placement or a tree of them, as a user writes it."""

    def text(node: Any) -> Any:
        return Code(f"P({', '.join(map(repr, node))})") if _is_spec(node) else node

    return repr(jax.tree.map(text, given, is_leaf=_is_spec))


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where a chain runs: its mesh, how the model lies on it, and how batches are split."""

    mesh: Mesh
    placement: Placement
    batch: PyTree
    batch_axes: tuple[str, ...]
    example_axes: tuple[str, ...]
    # Whether sums over the batch axes are taken in a fixed order.
    ordered: bool = False

    def model_specs(self, model: PyTree) -> list[P]:
        """The spec of each array leaf of `model`, in order.

        **Raises:** `ValueError` for an axis that the mesh lacks, or a dim that does not divide.
        """
        return list(self.specs_by_name(dict(named_leaves(model))).values())

    def specs_by_name(self, leaves: dict[str, Any]) -> dict[str, P]:
        """The same for leaves by their paths in the model."""
        self.placement.check(list(leaves))
        specs = {}
        for name, leaf in leaves.items():
            spec = self.placement.rule(name, leaf, self.mesh)
            check_spec(self.mesh, spec, leaf.shape, f"model.{name}")
            self._require_whole_shards(spec, name)
            specs[name] = trimmed(spec)
        return specs

    def _require_whole_shards(self, spec: P, name: str) -> None:
        """Refuses a dim of which gathering over the batch axes would leave several pieces."""
        for entry in map(entry_axes, spec):
            # Those that split the batch are gathered, so they must split what the others leave.
            right = tuple(sorted(entry, key=lambda axis: axis in self.batch_axes))
            if right != entry:
                raise ValueError(
                    "In a dim that several axes split, those of the model come before those of "
                    f"the batch, {self.batch_axes}: a model gets one piece of the dim. "
                    f"Got {spec} for `model.{name}`. Write {right} for {entry}."
                )

    def batch_specs(self, batch: PyTree) -> list[P]:
        """The spec of each array leaf of `batch`, in order; a scalar is replicated."""
        try:
            full = jax.tree.broadcast(self.batch, batch, is_leaf=_is_spec)
        except ValueError as error:
            raise ValueError(
                "`batch` of `shard` must be a PartitionSpec, or a tree of them that is a prefix of "
                f"the batch. Got {self.batch} for a batch with "
                f"{', '.join(name for name, _ in named_leaves(batch))}. "
                "Give every entry of the batch a spec."
            ) from error
        specs = []
        for (name, leaf), spec in zip(
            named_leaves(batch), jax.tree.leaves(full, is_leaf=_is_spec), strict=True
        ):
            if leaf.ndim == 0:
                specs.append(P())
                continue
            # One spec serves leaves of several ranks: labels lack the dims of images.
            spec = P(*spec[: leaf.ndim]) if isinstance(self.batch, P) else spec
            check_spec(self.mesh, spec, leaf.shape, f"batch.{name}")
            specs.append(spec)
        return specs

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def constrain(self, tree: PyTree, specs: Sequence[P]) -> PyTree:
        """Says how each leaf of `tree` is to lie, in order."""
        leaves, treedef = jax.tree.flatten(tree)
        shardings = [self.sharding(spec) for spec in specs]
        return treedef.unflatten(jax.lax.with_sharding_constraint(leaves, shardings))

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes along which every device has the same rows, if there are several devices."""
        return tuple(
            axis
            for axis, size in self.mesh.shape.items()
            if size > 1 and axis not in self.batch_axes
        )

    @property
    def copies(self) -> int:
        """How many devices have the same rows."""
        return math.prod(self.mesh.shape[axis] for axis in self.model_axes)

    @property
    def batch_shards(self) -> int:
        """Into how many parts the examples are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.example_axes)


def make_layout(mesh: Mesh, batch: PyTree, model: Any) -> Layout:
    """Checks the arguments of `shard` as far as they can be without a model.

    **Raises:** `ValueError` for an unknown axis, and for batch specs that disagree on dim 0.
    """
    specs = jax.tree.leaves(batch, is_leaf=_is_spec)
    if not specs or not all(isinstance(spec, P) for spec in specs):
        raise TypeError(
            "`batch` of `shard` must be a PartitionSpec or a tree of them. "
            f"Got {batch!r}. Write `batch=P('data')` to split the examples over axis `data`."
        )
    axes: dict[str, None] = {}
    leading = set()
    for spec in specs:
        names = spec_axes(spec)
        _require_axes(mesh, names, f"batch={spec}")
        axes.update(dict.fromkeys(names))
        leading.add(entry_axes(spec[0]) if len(spec) else ())
    if len(leading) != 1:
        raise ValueError(
            "All parts of a batch must split their examples, dim 0, over the same axes. "
            f"Got {batch}. Give every spec the same first entry; scalars are replicated anyhow."
        )
    return Layout(mesh, as_placement(model), batch, tuple(axes), leading.pop())


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_axes(spec: P) -> tuple[str, ...]:
    """The mesh axes in a spec, in the order of the dims."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def trimmed(spec: P) -> P:
    """The spec without trailing Nones: JAX compares shardings that say the same by the letter."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def check_spec(mesh: Mesh, spec: P, shape: tuple[int, ...], name: str) -> None:
    """Refuses a spec that does not fit a leaf, by the leaf's name."""
    if not isinstance(spec, P):
        raise TypeError(
            "A placement must give a PartitionSpec for every leaf. "
            f"Got {spec!r} for `{name}`. Return `P()` for a leaf that is replicated."
        )
    axes = spec_axes(spec)
    _require_axes(mesh, axes, f"{spec} for `{name}`")
    if len(spec) > len(shape):
        raise ValueError(
            "A spec must not have more entries than the leaf has dims. "
            f"Got {spec} for `{name}` of shape {shape}. Remove entries."
        )
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"A mesh axis may split one dim of a leaf. Got {spec} for `{name}`. Remove one."
        )
    for dim, entry in enumerate(spec):
        size = math.prod(mesh.shape[axis] for axis in entry_axes(entry))
        if shape[dim] % size:
            what = "rows" if name.startswith("batch.") and dim == 0 else f"dim {dim}"
            raise ValueError(
                f"The devices along an axis must divide the dim that it splits. Got `{name}` of "
                f"shape {shape}, whose {what} ({shape[dim]}) {size} devices along "
                f"{' x '.join(f'`{axis}`' for axis in entry_axes(entry))} do not divide. "
                + (
                    "Change the batch size, or pad the last batch with rows of weight 0."
                    if name.startswith("batch.")
                    else "Place it by another rule, or change the size."
                )
            )


def _require_axes(mesh: Mesh, axes: tuple[str, ...], where: str) -> None:
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"A spec may name axes of the mesh alone, which has {dict(mesh.shape)}. "
                f"Got `{axis}` in {where}. Correct the name, or make the mesh with it."
            )
