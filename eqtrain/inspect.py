"""What a compiled step costs, read from the program itself before it runs."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    **Fields:** `kind`, as XLA calls it; `shapes` of what each device gets, as `f32[8,3]`; `bytes`
    of those; `times` it runs in one call of the program, its loops counted in; `devices` that take
    part in one.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    times: int
    devices: int

    @property
    def elements(self) -> int:
        return sum(math.prod(_dims(shape)) for shape in self.shapes)


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

    def __str__(self) -> str:
        counts = collections.Counter[str]()
        size = collections.Counter[str]()
        for collective in self.collectives:
            counts[collective.kind] += collective.times
            size[collective.kind] += collective.times * collective.bytes
        lines = [f"{kind}: {counts[kind]} a call, {size[kind]:,} bytes" for kind in counts]
        return "\n".join(
            [
                *(lines or ["no collectives"]),
                f"{self.flops:,.0f} FLOPs",
                f"{self.argument_bytes:,} bytes in, {self.output_bytes:,} out, of which "
                f"{self.donated_bytes:,} donated; {self.temporary_bytes:,} temporary",
            ]
        )


def inspect_compiled(compiled: jax.stages.Compiled) -> Inspection:
    """Reads the costs of a compiled program."""
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis() or {}
    return Inspection(
        collectives=tuple(collectives_of(compiled.as_text() or "")),
        flops=float(cost.get("flops", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
    )


def collectives_of(text: str) -> list[Collective]:
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
            devices = _group_size(start)
            if devices == 1:
                continue
            if times is None:
                raise ValueError(
                    "A loop with a collective must have a known number of turns. "
                    f"Got one without, around: {line[:120]}. Use `lax.scan`, not `while_loop`."
                )
            shapes = tuple(re.findall(r"[a-z]\w*\[[\d,]*\]", match.group(1)))
            size = sum(map(_size, shapes))
            found.append(Collective(match.group(2), shapes, size, times, devices))
    return found


def _named(lines: list[str]) -> list[tuple[str, str]]:
    """The ops of a computation: their names, and what stands behind the equals sign."""
    matches = (re.match(r"(?:ROOT )?%?([\w.\-]+) = (.*)", line) for line in lines)
    return [(match.group(1), match.group(2)) for match in matches if match]


def _group_size(line: str) -> int:
    """How many devices take part in a collective; 0 where the text lists none, which means all."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed.group(1).split(","))
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if axes:
        sizes = dict(axis.split("=") for axis in axes.group(1).split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in axes.group(2).split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(counted.group(1)) if counted else 0


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
