"""The operations that bad results come from, in the flags of one device and microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from .plan import Node, Scope, Site
from .record import Branches, Record, Snapshots
from .words import INDEX, INF, NAN, NEW_INF, NEW_NAN, ZERO_DIVISOR, ZERO_FLOAT_DIVISOR

MADE, GIVEN, CHECKED = range(3)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where something bad came from. `order` is its place in the order of execution, steps of
    loops included; `rank` sorts what is to blame first."""

    kind: str
    site: Site
    iterations: tuple[int, ...]
    order: tuple[int, ...]
    category: int
    backward: bool

    @property
    def rank(self) -> tuple[Any, ...]:
        return self.category, self.kind == "division" and self.category == CHECKED, self.order


@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """One execution of a scope: a step of a loop, or a branch that was taken.

    `parent` is the execution that it is part of, `place` that of its node there.
    """

    scope: Scope
    record: Record
    order: tuple[int, ...] = ()
    iterations: tuple[int, ...] = ()
    parent: Instance | None = None
    place: int = -1

    def word(self, variable: int | None) -> int:
        return self.slot(None if variable is None else self.scope.slots[variable])

    def slot(self, slot: int | None) -> int:
        return 0 if slot is None else int(self.record.words[slot])


class Origins:
    """Walks back through one execution of a program."""

    def __init__(self, scope: Scope, record: Record) -> None:
        self.root = Instance(scope, record)
        self._instances: dict[tuple[int, ...], Instance] = {(): self.root}
        self._seen: set[Any] = set()
        self._todo: list[Any] = []
        self._found: dict[tuple[Any, ...], Origin] = {}

    def all(self) -> list[Origin]:
        """Every origin: from the results with NaNs if there are any, else from infinite ones."""
        ends = [variable for variable in self.root.scope.outputs if variable is not None]
        bad = {
            mark: [end for end in ends if is_as(self.root.word(end), mark)] for mark in (NAN, INF)
        }
        wanted = NAN if bad[NAN] else INF
        self._walk(bad[wanted], wanted)
        found = dict(self._found)
        if wanted == NAN:  # an infinite loss shows that it is not the backward pass alone
            self._walk(bad[INF], INF)
        origins = [
            dataclasses.replace(origin, backward=self._found[key].backward)
            for key, origin in found.items()
        ]
        reached = {origin.order for origin in origins}
        return [*origins, *(o for o in self._checked(self.root) if o.order not in reached)]

    def _walk(self, ends: list[int], mark: int) -> None:
        self._todo += [(self.root, end, mark, False) for end in ends]
        while self._todo:
            instance, variable, mark, backward = self._todo.pop()
            key = (instance.order, variable, mark, backward)
            if key in self._seen or not is_as(instance.word(variable), mark):
                continue
            self._seen.add(key)
            place = instance.scope.makers.get(variable)
            if place is None:
                self._outside(instance, variable, mark, backward)
            else:
                self._node(instance, place, variable, mark, backward)

    def _follow(self, instance: Instance, variable: int | None, mark: int, backward: bool) -> bool:
        """Goes on with a variable, if it is as bad as that. Whether it is."""
        bad = is_as(instance.word(variable), mark)
        if bad:
            self._todo.append((instance, variable, mark, backward))
        return bad

    def _node(self, at: Instance, place: int, variable: int, mark: int, backward: bool) -> None:
        node = at.scope.nodes[place]
        if node.bodies:
            self._into(at, place, node.outputs.index(variable), mark, backward)
            return
        backward = backward or node.site.backward
        if node.site.primitive == "input":
            self._blame(at, place, mark, MADE if mark == NAN else GIVEN, backward)
            return
        made = at.word(variable) == (NEW_NAN if mark == NAN else NEW_INF)
        followed = self._operands(at, node, mark, backward)
        if made and mark == NAN:
            self._operands(at, node, INF, backward)
        if not made and not followed and mark == INF:
            followed = self._operands(at, node, NAN, backward)
        if made or not followed:
            self._blame(at, place, mark, MADE if made else GIVEN, backward)

    def _operands(self, at: Instance, node: Node, mark: int, backward: bool) -> bool:
        followed = False
        for number, variable in enumerate(node.inputs):
            if node.chosen and not is_as(at.slot(node.chosen[number]), mark):
                continue
            followed |= self._follow(at, variable, mark, backward)
        return followed

    def _blame(self, at: Instance, place: int, mark: int, category: int, backward: bool) -> None:
        node = at.scope.nodes[place]
        checked = at.slot(node.check)
        kind = "nan" if mark == NAN else "inf"
        if checked == INDEX:
            kind, category = "index", MADE
        elif checked == ZERO_FLOAT_DIVISOR:
            kind = "division"
        self._add(Origin(kind, node.site, at.iterations, (*at.order, place), category, backward))

    def _add(self, origin: Origin) -> None:
        """Keeps an origin; one that is reached on several ways is of the forward pass if on any."""
        key = (origin.order, origin.category)
        before = self._found.get(key)
        if before is None:
            self._found[key] = origin
        elif before.backward and not origin.backward:
            self._found[key] = dataclasses.replace(before, backward=False)

    # Into loops and branches, from their results, and out of them, by what they were given.

    def _into(self, at: Instance, place: int, output: int, mark: int, backward: bool) -> None:
        node, inner = at.scope.nodes[place], at.record.inner[place]
        if isinstance(inner, Branches):
            inside = self._inside(at, place, int(inner.taken))
            followed = self._follow(inside, inside.scope.outputs[output], mark, backward)
        elif isinstance(inner, Snapshots):
            followed = self._into_while(at, place, output, mark, backward)
        elif output < node.carried and node.length:
            followed = self._follow_step(at, place, node.length - 1, output, mark, backward)
        elif output < node.carried:
            followed = self._follow(at, node.inputs[node.constants + output], mark, backward)
        else:
            followed = any(
                self._follow_step(at, place, step, output, mark, backward)
                for step in range(node.length)
            )
        if not followed:
            self._blame(at, place, mark, GIVEN, backward or node.site.backward)

    def _follow_step(
        self, at: Instance, place: int, step: int, output: int, mark: int, backward: bool
    ) -> bool:
        inside = self._inside(at, place, step)
        return self._follow(inside, inside.scope.outputs[output], mark, backward)

    def _into_while(self, at: Instance, place: int, output: int, mark: int, backward: bool) -> bool:
        """The first turn that returned what is as bad, by whichever of its results."""
        node, inner = at.scope.nodes[place], at.record.inner[place]
        number = 0 if mark == NAN else 1
        if inner.iterations[number] < 0:
            first = len(node.inputs) - node.carried
            return self._follow(at, node.inputs[first + output], mark, backward)
        inside = self._inside(at, place, int(inner.iterations[number]), number)
        wanted = inside.scope.outputs[output]
        if self._follow(inside, wanted, mark, backward):
            return True
        return any([self._follow(inside, end, mark, backward) for end in inside.scope.outputs])

    def _outside(self, at: Instance, variable: int, mark: int, backward: bool) -> None:
        """Goes on with what a scope was given: by its surroundings, or by the step before."""
        parent, place = at.parent, at.place
        assert parent is not None, "what the whole program is given is made by nodes"
        node, inner = parent.scope.nodes[place], parent.record.inner[place]
        number = at.scope.inputs.index(variable)
        if isinstance(inner, Branches):
            followed = self._follow(parent, node.inputs[number + 1], mark, backward)
        else:
            skipped = 0 if isinstance(inner, Record) else len(node.inputs) - len(at.scope.inputs)
            carried = number - node.constants
            step = at.order[-1]
            if 0 <= carried < node.carried and step > 0:
                if isinstance(inner, Record):
                    followed = self._follow_step(parent, place, step - 1, carried, mark, backward)
                else:
                    earlier = int(inner.iterations[0 if mark == NAN else 1])
                    followed = 0 <= earlier < step and self._into_while(
                        parent, place, carried, mark, backward
                    )
            else:
                followed = self._follow(parent, node.inputs[skipped + number], mark, backward)
        if not followed:
            self._blame(parent, place, mark, GIVEN, backward or node.site.backward)

    def _inside(self, at: Instance, place: int, step: int, snapshot: int | None = None) -> Instance:
        """A step of the loop at `place`, counted as it runs, or the branch of that number."""
        order = (*at.order, place, step)
        if order not in self._instances:
            node, inner = at.scope.nodes[place], at.record.inner[place]
            iterations = at.iterations
            if isinstance(inner, Branches):
                scope, record = node.bodies[step], inner.records[step]
            else:
                (scope,) = node.bodies
                index = node.length - 1 - step if node.reverse else step
                iterations = (*iterations, index)
                whole, row = (
                    (inner, index) if isinstance(inner, Record) else (inner.record, snapshot)
                )
                record = jax.tree.map(lambda leaf: leaf[row], whole)
            self._instances[order] = Instance(scope, record, order, iterations, at, place)
        return self._instances[order]

    def _checked(self, at: Instance) -> Iterator[Origin]:
        """Bad indices, and divisions of integers by zero, whatever came of them."""
        for place, node in enumerate(at.scope.nodes):
            checked = at.slot(node.check)
            if checked in (INDEX, ZERO_DIVISOR):
                kind = "index" if checked == INDEX else "division"
                order = (*at.order, place)
                yield Origin(kind, node.site, at.iterations, order, CHECKED, node.site.backward)
            for inside in self._executions(at, place, node):
                yield from self._checked(inside)

    def _executions(self, at: Instance, place: int, node: Node) -> Iterator[Instance]:
        inner = at.record.inner.get(place)
        if isinstance(inner, Branches):
            yield self._inside(at, place, int(inner.taken))
        elif isinstance(inner, Snapshots):
            if inner.iterations[2] >= 0:
                yield self._inside(at, place, int(inner.iterations[2]), 2)
        elif inner is not None and _is_checked(inner):
            yield from (self._inside(at, place, step) for step in range(node.length))


def is_as(word: int, mark: int) -> bool:
    """Whether a value is as bad as `mark` says: `NAN` or `INF`."""
    return word in ((NAN, NEW_NAN) if mark == NAN else (INF, NEW_INF))


def _is_checked(record: Record) -> bool:
    words = [leaf for leaf in jax.tree.leaves(record) if leaf.dtype == "uint8"]
    return any((leaf >= INDEX).any() for leaf in words)
