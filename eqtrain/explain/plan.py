"""The watched program as plain data: its equations, and which variables connect them.

It travels as static structure beside the flags, so it compares by value and holds no tracer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from .._jaxpr.frames import Frame

# The name of a leaf; a number is the place in `Fault.iterations` of the index that belongs there.
Name = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """What goes into an equation or comes out. **Fields:** `shape`, `dtype`, and the `name` of the
    leaf that it is a view of, None if it was computed."""

    shape: tuple[int, ...]
    dtype: str
    name: Name | None = None


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in a program where something can go wrong.

    **Fields:**

    - `primitive`: as JAX calls it; `"input"` for an argument of the whole function.
    - `frames`: the user's code that it comes from, the innermost call first.
    - `name_stack`: JAX's own, such as `transpose(jvp(...))`.
    - `path`: its place in program order, through the loops and branches around it.
    - `inputs`, `outputs`: the shapes, dtypes and names of its operands and results.
    - `loops`: the primitive of each loop around it, the outermost first.
    """

    primitive: str
    frames: tuple[Frame, ...]
    name_stack: str
    path: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    loops: tuple[str, ...] = ()

    @property
    def backward(self) -> bool:
        """Whether it is part of the backward pass, where a recomputed forward does not count."""
        return "transpose(" in self.name_stack and "rematted_computation" not in self.name_stack


@dataclasses.dataclass(frozen=True)
class Node:
    """An equation of a scope, calls apart, which are read as if their equations stood there.

    `inputs` and `outputs` are variables of the scope, None for what the program's text holds.
    `chosen` are the slots of a `select_n`'s cases where they are chosen. `check` is the slot of a
    word for its indices or divisor. `bodies` are the scopes inside it: one of a loop, one for each
    branch of a `cond`.
    """

    site: Site
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    chosen: tuple[int | None, ...] = ()
    check: int | None = None
    bodies: tuple[Scope, ...] = ()
    constants: int = 0
    carried: int = 0
    length: int = 0
    reverse: bool = False


@dataclasses.dataclass(frozen=True)
class Scope:
    """A jaxpr: the variables that it is given and returns, and its nodes in program order.

    `slots` says where each variable's word stands in those of the scope, None for no floats.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    nodes: tuple[Node, ...]
    slots: tuple[int | None, ...]

    @functools.cached_property
    def makers(self) -> dict[int, int]:
        """The place of the node that makes each variable, those given left out."""
        return {
            variable: place for place, node in enumerate(self.nodes) for variable in node.outputs
        }

    def sites(self) -> Iterator[Site]:
        """Every site, in program order, those of a loop's body behind the loop itself."""
        for node in self.nodes:
            yield node.site
            for body in node.bodies:
                yield from body.sites()


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The scope of a whole program, and the variables that it returns.

    Compared by value, but by identity first, as JAX compares static structure often.
    """

    scope: Scope

    @functools.cached_property
    def _hash(self) -> int:
        return hash((len(self.scope.slots), self.scope.outputs, len(self.scope.nodes)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return self is other or (isinstance(other, Plan) and self.scope == other.scope)
