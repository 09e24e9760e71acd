"""What a compiled step costs, read from the program itself before it runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    **Fields:** `kind`, as XLA calls it; `shapes` of what each device gets, as `f32[8,3]`; `bytes`
    of those; `times` it runs in one call of the program, its loops counted in; `devices` that take
    part in one; `axes` of the mesh that those lie along, None where they are no mesh's.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    times: int
    devices: int
    axes: tuple[str, ...] | None = None

    @property
    def elements(self) -> int:
        return sum(math.prod(_dims(shape)) for shape in self.shapes)


class Entry(NamedTuple):
    """How often collectives run in a call, and the bytes that each device gets by them."""

    times: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What one call of a compiled program costs, on each device.

    **Fields:** `collectives`; `flops`; `argument_bytes`, `output_bytes`, `temporary_bytes`, and
    `donated_bytes`, those of the output that reuse an argument's buffer.
    """

    collectives: tuple[Collective, ...]
    flops: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    donated_bytes: int

    def count(self, kind: str, *, scalars: bool = True) -> int:
        """How often a kind of collective runs in a call; with or without those of few numbers."""
        return sum(
            collective.times
            for collective in self.collectives
            if collective.kind == kind and (scalars or collective.elements > len(collective.shapes))
        )

    @property
    def ledger(self) -> dict[tuple[str, tuple[str, ...] | None], Entry]:
        """What moves in a call, for each kind of collective over each of the mesh's axes.

        ```python
        >>> def loss(model, state, batch, key):
        ...     return et.mean((batch["x"] @ model) ** 2), state, {}
        >>> shard = et.shard(et.mesh(data=4), batch=P("data"))
        >>> step = et.pipe(loss, shard, et.update(optax.sgd(0.1)), et.donate)
        >>> ts = step.init_shapes(lambda key: jnp.zeros((8, 2)))
        >>> step.inspect(ts, {"x": jnp.ones((4, 8))}).ledger
        {('all-reduce', ('data',)): Entry(times=1, bytes=72)}

        ```
        """
        entries: dict[tuple[str, tuple[str, ...] | None], Entry] = {}
        for collective in self.collectives:
            before = entries.get((collective.kind, collective.axes), Entry(0, 0))
            entries[collective.kind, collective.axes] = Entry(
                before.times + collective.times,
                before.bytes + collective.times * collective.bytes,
            )
        return entries

    def __str__(self) -> str:
        lines = [
            f"{kind}{' over ' + ' x '.join(axes) if axes else ''}: "
            f"{entry.times} a call, {entry.bytes:,} bytes"
            for (kind, axes), entry in self.ledger.items()
        ]
        return "\n".join(
            [
                *(lines or ["no collectives"]),
                f"{self.flops:,.0f} FLOPs",
                f"{self.argument_bytes:,} bytes in, {self.output_bytes:,} out, of which "
                f"{self.donated_bytes:,} donated; {self.temporary_bytes:,} temporary",
            ]
        )


def inspect_compiled(compiled: jax.stages.Compiled, mesh: Mesh | None = None) -> Inspection:
    """Reads the costs of a compiled program; `mesh` is that which it was compiled for."""
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis() or {}
    return Inspection(
        collectives=tuple(collectives_of(compiled.as_text() or "", mesh)),
        flops=float(cost.get("flops", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
    )


def collectives_of(text: str, mesh: Mesh | None = None) -> list[Collective]:
    """The collectives in the text of an HLO module, those in loops counted as often as they run.

    Those of one device with itself, which a mesh axis of size 1 leaves, move nothing and are left
    out.

    **Raises:** `ValueError` for a collective in a loop whose number of turns the text lacks.
    """
    bodies = _computations(text)
    found = []
    for name, times in _times(bodies).items():
        lines = dict(_named(bodies[name]))
        for line in lines.values():
            match = re.match(rf"(.*?) ({'|'.join(KINDS)})(-done)?\((%?[\w.\-]+)?", line)
            if match is None:
                continue
            # Of a pair of ops the second has the type of what comes out, the first the devices.
            start = lines.get((match.group(4) or "").lstrip("%"), "") if match.group(3) else line
            groups = replica_groups(start)
            devices = len(groups[0]) if groups else 0
            if devices == 1:
                continue
            if times is None:
                raise ValueError(
                    "A loop with a collective must have a known number of turns. "
                    f"Got one without, around: {line[:120]}. Use `lax.scan`, not `while_loop`."
                )
            shapes = tuple(re.findall(r"[a-z]\w*\[[\d,]*\]", match.group(1)))
            size = sum(map(_size, shapes))
            axes = None if mesh is None else _axes(groups, mesh)
            found.append(Collective(match.group(2), shapes, size, times, devices, axes))
    return found


def _named(lines: list[str]) -> list[tuple[str, str]]:
    """The ops of a computation: their names, and what stands behind the equals sign."""
    matches = (re.match(r"(?:ROOT )?%?([\w.\-]+) = (.*)", line) for line in lines)
    return [(match.group(1), match.group(2)) for match in matches if match]


# Numbers counted up, laid out in a shape, and transposed: [4,2]T(1,0).
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(shape: str, order: str | None) -> np.ndarray:
    sizes = [int(size) for size in shape.split(",")]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return places if order is None else places.transpose([int(dim) for dim in order.split(",")])


def replica_groups(line: str) -> list[list[int]]:
    """Which devices take part together in a collective, by their places in the mesh.

    Empty where the text lists none, which means all.

    **Raises:** `ValueError` for a list in a form that is not known.
    """
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line)
    if listed:
        groups = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return [[int(device) for device in group.split(",")] for group in groups]
    of_mesh = rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))? \{{([^}}]*)\}}"
    axes = re.search(of_mesh, line)
    if axes:
        pairs_of_axes = (axis.split("=") for axis in axes.group(1).split(","))
        sizes = {name.strip(" '"): int(size) for name, size in pairs_of_axes}
        along = [axis.strip(" '") for axis in axes.group(4).split(",")]
        groups = _groups_along(sizes, along)
        if axes.group(2) is None:
            return groups
        devices = _iota(axes.group(2), axes.group(3)).reshape(-1)
        return [[int(devices[place]) for place in group] for group in groups]
    counted = re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", line)
    if counted:
        devices = _iota(counted.group(3), counted.group(4))
        return devices.reshape(int(counted.group(1)), int(counted.group(2))).tolist()
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", line)
    if pairs:
        return _connected(re.findall(r"\{(\d+),(\d+)\}", pairs.group(1)))
    given = re.search(r"(replica_groups|source_target_pairs)=(?!\{\}).*", line)
    if given:
        raise ValueError(
            "The devices of a collective must be listed in a form that is known. "
            f"Got {given.group(0)[:80]}. This version of XLA writes programs in another way: "
            "report it, or use a version that the tests run with."
        )
    return []


def _connected(pairs: list[tuple[str, str]]) -> list[list[int]]:
    """The groups of devices that send to one another, however far around."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = {int(device) for device in pair}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return [sorted(group) for group in groups]


def _groups_along(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    """The groups of devices that differ along `axes` alone."""
    places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    kept = [dim for dim, name in enumerate(sizes) if name not in axes]
    moved = [list(sizes).index(name) for name in axes]
    group = math.prod(sizes[name] for name in axes)
    return places.transpose(kept + moved).reshape(-1, group).tolist()


def _axes(groups: list[list[int]], mesh: Mesh) -> tuple[str, ...] | None:
    """The axes of `mesh`, those of size 1 left out, along which the devices of each group lie."""
    sizes = {str(name): size for name, size in mesh.shape.items()}
    named = [name for name, size in sizes.items() if size > 1]
    wanted = {frozenset(group) for group in groups or [range(math.prod(sizes.values()))]}
    for count in range(1, len(named) + 1):
        for axes in itertools.combinations(named, count):
            if {frozenset(group) for group in _groups_along(sizes, list(axes))} == wanted:
                return axes
    return None


def _dims(shape: str) -> list[int]:
    inside = shape[shape.index("[") + 1 : -1]
    return [int(dim) for dim in inside.split(",") if dim]


def _size(shape: str) -> int:
    kind = shape[: shape.index("[")]
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])  # as in f32, bf16, f8e4m3fn
    return math.prod(_dims(shape)) * bits // 8


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation, by name; the entry's name is ENTRY."""
    bodies: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" ") and "HloModule" not in line:
            current = bodies.setdefault("ENTRY" if header.group(1) else header.group(2), [])
        else:
            current.append(line.strip())
    return bodies


def _times(bodies: dict[str, list[str]]) -> dict[str, int | None]:
    """How often each computation that the entry reaches runs; None where that is unknown."""
    times: dict[str, int | None] = {}

    def visit(name: str, count: int | None) -> None:
        before = times.get(name, 0)
        times[name] = None if count is None or before is None else before + count
        for line in bodies.get(name, []):
            turns: int | None = 1
            if " while(" in line:
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                turns = int(known.group(1)) if known else None
            inner = None if count is None or turns is None else count * turns
            called = re.findall(
                r"(?:body|calls|to_apply|condition|true_computation|false_computation)=%?([\w.\-]+)",
                line,
            )
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                called += [branch.strip().lstrip("%") for branch in group.split(",")]
            for callee in called:
                if callee in bodies:
                    visit(callee, inner)

    if "ENTRY" in bodies:
        visit("ENTRY", 1)
    return times
