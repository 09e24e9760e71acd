"""What a compiled step depends on, and what two compilations differ in, leaf by leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._sharding.placement import trimmed
from .._state.train_state import TrainState
from .._util.paths import named_leaves, path_name
from .._util.text import aligned, kind_text

# More lines than this say no more.
_MAX_ROWS = 10
_MAX_WIDTH = 36
# What can differ, in the order in which it is told, with what helps.
_ADVICE = {
    "shape": "Keep shapes the same: pad the last batch, as `et.data.Loader` does.",
    "dtype": "Cast to one dtype where the batch is made.",
    "weak type": "Pass a number always as `np.float32(x)`, or always as a Python number.",
    "sharding": "Place every batch alike, by `et.data.prefetch(loader, program.batch_sharding)`, "
    "and leave a TrainState where `init` put it.",
    "static value": "What is no array is compiled into the program: make it once, or store what "
    "changes as an array.",
    "structure": "Give every batch the same keys and containers, and take TrainStates from one "
    "`make`.",
}


@dataclasses.dataclass(frozen=True)
class LeafSignature:
    """What a program depends on of one array. `place` is None where jit may put it anywhere."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    place: Any
    where: str = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return kind_text(self.dtype, self.shape) + " weak" * self.weak_type


@dataclasses.dataclass(frozen=True)
class Signature:
    """All that a compilation depends on: the leaves by name, and what is no array."""

    leaves: dict[str, LeafSignature]
    treedef: Any
    static: tuple[Any, ...]
    batch_treedef: Any


@dataclasses.dataclass(frozen=True)
class Change:
    leaf: str
    what: str
    before: str
    after: str


def signature_of(ts: TrainState, batch: PyTree) -> Signature:
    """The signature of a call, from its own arguments: a tracer does not say where they lie."""
    structure = ts.structure
    named = dict(zip(structure.names, ts.leaves, strict=True))
    named |= {in_batch(name): leaf for name, leaf in named_leaves(batch)}
    return Signature(
        {name: _leaf_signature(leaf) for name, leaf in named.items()},
        structure.treedef,
        structure.static,
        jax.tree.structure(batch),
    )


def in_batch(name: str) -> str:
    """The name that messages give to a leaf of a batch."""
    return f"batch.{name}" if name else "batch"


def _leaf_signature(leaf: Any) -> LeafSignature:
    aval = jax.typeof(leaf)
    weak_type = getattr(aval, "weak_type", False)
    place = placement(leaf)
    return LeafSignature(aval.shape, aval.dtype, weak_type, place, _where(leaf, place))


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf has buffers, which a tracer of somebody's own jit around the call has not."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def placement(leaf: Any) -> Any:
    """Where a committed array lies; None for what jit may put where it likes."""
    if not (is_concrete(leaf) and leaf.committed):
        return None
    place = leaf.sharding
    # `P("data", None)` is compiled as `P("data")` is, but does not compare equal to it.
    if isinstance(place, NamedSharding) and place.spec and place.spec[-1] is None:
        return NamedSharding(place.mesh, trimmed(place.spec), memory_kind=place.memory_kind)
    return place


def _where(leaf: Any, place: Any) -> str:
    if place is None:
        return "uncommitted" if is_concrete(leaf) else "host"
    if not isinstance(place, NamedSharding):
        return ", ".join(map(str, sorted(place.device_set, key=lambda device: device.id)))
    spec = ", ".join(map(repr, place.spec))
    axes = ", ".join(f"{name}={size}" for name, size in place.mesh.shape.items())
    return f"P({spec}) on {axes}"


def changes(before: Signature, after: Signature) -> list[Change]:
    """What differs, a line for each leaf and kind; none if all that a call passes is the same."""
    found = []
    a, b = _values(before), _values(after)
    for name in {**a, **b}:
        found += _leaf_changes(name, a.get(name, _ABSENT), b.get(name, _ABSENT))
    if before.treedef != after.treedef:
        _compare(_tree(before), _tree(after), "", found)
    if before.batch_treedef != after.batch_treedef:
        _compare(_batch_tree(before), _batch_tree(after), "batch", found)
    return found


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _tree(signature: Signature) -> Any:
    return jax.tree.unflatten(signature.treedef, signature.static)


def _batch_tree(signature: Signature) -> Any:
    return jax.tree.unflatten(signature.batch_treedef, [0] * signature.batch_treedef.num_leaves)


def _values(signature: Signature) -> dict[str, Any]:
    """All leaves by name: what is no array by its value."""
    return {**dict(named_leaves(_tree(signature))), **signature.leaves}


def _leaf_changes(name: str, old: Any, new: Any) -> list[Change]:
    arrays = [isinstance(value, LeafSignature) for value in (old, new)]
    if not all(arrays):
        if old is new or old == new:
            return []
        what = "structure" if any(arrays) or _ABSENT in (old, new) else "static value"
        return [_change(name, what, _text(old), _text(new))]
    kinds = {
        "shape": (old.shape, new.shape),
        "dtype": (old.dtype, new.dtype),
        "weak type": (old.weak_type, new.weak_type),
    }
    found = [Change(name, what, str(a), str(b)) for what, (a, b) in kinds.items() if a != b]
    if old.place != new.place:
        found.append(_change(name, "sharding", old.where, new.where))
    return found


def _compare(a: Any, b: Any, name: str, found: list[Change]) -> None:
    """Finds the nodes of two trees that differ in what is no leaf: their type, a static field."""
    if jax.tree_util.all_leaves([a]) or jax.tree_util.all_leaves([b]):
        return  # a leaf that came or went is in the list already
    if type(a) is not type(b):
        found.append(_change(name, "structure", _type_name(a), _type_name(b)))
        return
    children, others = _children(a), _children(b)
    known = len(found)
    for key in {**children, **others}:
        path = f"{name}.{key}" if name else key
        if key in children and key in others:
            _compare(children[key], others[key], path, found)
        elif not jax.tree.leaves(child := children.get(key, others.get(key))):
            sides = ("absent", _type_name(child))
            found.append(_change(path, "structure", *(sides if key in others else sides[::-1])))
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        for field in dataclasses.fields(a):
            old, new = (getattr(node, field.name, _ABSENT) for node in (a, b))
            if field.name not in children and field.name not in others and old != new:
                path = f"{name}.{field.name}" if name else field.name
                found.append(_change(path, "static value", _text(old), _text(new)))
    same_children = children.keys() == others.keys()
    if len(found) == known and same_children and jax.tree.structure(a) != jax.tree.structure(b):
        old, new = (jax.tree.structure(node).node_data() for node in (a, b))
        if old != new:
            found.append(_change(name, "structure", _text(old), _text(new)))


def _children(node: Any) -> dict[str, Any]:
    """The children of a node by the last part of their names, one level down."""
    pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda other: other is not node)
    return {path_name(path): child for path, child in pairs}


def _type_name(node: Any) -> str:
    return "None" if node is None else type(node).__name__


def _text(value: Any) -> str:
    if isinstance(value, LeafSignature | _Absent):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def _change(leaf: str, what: str, before: str, after: str) -> Change:
    """A change whose two sides read differently, also where their texts do not."""
    return Change(leaf, what, before, after if before != after else f"another {after}")


def table(found: list[Change]) -> str:
    """The changes as lines of aligned columns."""
    rows = [("leaf", "what", "before", "after")]
    rows += [(c.leaf, c.what, _short(c.before), _short(c.after)) for c in found[:_MAX_ROWS]]
    lines = [f"  {line}" for line in aligned(rows)]
    if len(found) > _MAX_ROWS:
        lines.append(f"  and {len(found) - _MAX_ROWS} more")
    return "\n".join(lines)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_WIDTH else text[: _MAX_WIDTH - 3] + "..."


def advice(found: list[Change]) -> str:
    """What to do about each kind of change that there is."""
    kinds = {change.what for change in found}
    return " ".join(text for what, text in _ADVICE.items() if what in kinds)
