"""Runs jaxprs equation by equation, and notes what is wrong with each value on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._jaxpr.frames import Frame, join, user_frames
from .._jaxpr.jaxprs import (
    called,
    is_finite_literal,
    is_literal,
    is_rematerialised,
    is_zero_free,
    needed,
    open_jaxpr,
)
from .._sharding.varying import vary
from .indices import has_indices, index_word
from .loops import Inside, Ran, run_cond, run_scan, run_while
from .plan import Name, Node, Operand, Scope, Site
from .record import Record
from .tensors import measure
from .words import divisor_word, is_float, rule_of, word_after, word_of, words_chosen

# Their result holds every element of their operand and no other: what is said of one is said of
# the other, and reading it again would double the time that it takes to compile.
SAME = frozenset(
    "broadcast_in_dim copy copy_p device_put expand_dims name neg pcast pvary reshape reshard rev "
    "sharding_constraint squeeze stop_gradient transpose".split()
)
# Their result is their first operand in another shape, place or dtype, so it keeps its name.
VIEWS = (SAME - {"neg"}) | frozenset(
    "all_gather all_gather_invariant convert_element_type dynamic_slice gather reduce_precision "
    "slice split".split()
)
INSIDE = {"scan": run_scan, "while": run_while, "cond": run_cond}


class Held(NamedTuple):
    """A value of the running program, the variable of the scope that it is, and its name."""

    value: Any
    variable: int | None = None
    name: Name | None = None


NOTHING = Held(None)


@dataclasses.dataclass(frozen=True)
class Around:
    """What stands around an equation: calls, loops, and the place in program order."""

    frames: tuple[Frame, ...] = ()
    stack: str = ""
    path: tuple[int, ...] = ()
    loops: tuple[str, ...] = ()

    def of(self, eqn: Any) -> Around:
        """What stands around the inside of an equation."""
        own = str(eqn.source_info.name_stack)
        return dataclasses.replace(
            self,
            frames=join(user_frames(eqn), self.frames),
            stack="/".join(part for part in (self.stack, own) if part),
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The mesh axes over which every flag varies, and the path of the site to be measured."""

    axes: frozenset[str]
    probe: tuple[int, ...] | None


class Builder:
    """Runs the equations of one scope, and collects what is to be known of it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._words: list[Array] = []
        self._slots: list[int | None] = []
        self._nodes: list[Node] = []
        self._inner: dict[int, Any] = {}
        self._probe: Any = None

    def hold(self, value: Any, name: Name | None) -> Held:
        """Makes a variable of a value that was given to the scope."""
        word = word_of(value) if is_float(jnp.result_type(value)) else None
        return Held(value, self._variable(word), name)

    def hold_input(self, value: Any, name: Name) -> Held:
        """The same for an argument of the whole program, which is a site of its own."""
        held = self.hold(value, name)
        if self._slots[-1] is not None:
            operand = _operand(held)
            site = Site("input", (), "", (len(self._nodes),), (), (operand,))
            self._add(Node(site, (), (len(self._slots) - 1,)), None, [], [value])
        return held

    def result(self, outputs: list[Held], inputs: list[Held]) -> tuple[Record, Scope]:
        """All that was recorded, and what it means."""
        words = jnp.stack(self._words) if self._words else jnp.zeros((0,), jnp.uint8)
        scope = Scope(
            tuple(held.variable for held in inputs),
            tuple(held.variable for held in outputs),
            tuple(self._nodes),
            tuple(self._slots),
        )
        return Record(self._spread(words), self._inner, self._probe), scope

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Held],
        given: Sequence[Held],
        around: Around,
        wanted: Sequence[bool] | None = None,
    ) -> list[Held]:
        """Runs the equations of `jaxpr` as part of this scope, those that a result needs.

        Of results that are not `wanted`, nothing is to be read.
        """
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *given], strict=True))

        def read(atom: Any) -> Held:
            return Held(atom.val) if is_literal(atom) else env.get(atom, NOTHING)

        for eqn, used in needed(jaxpr, wanted):
            # The user's checks are made in the step itself. One that is left cannot be compiled.
            if eqn.primitive.name == "check":
                continue
            results = self._equation(eqn, [read(atom) for atom in eqn.invars], around, used)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, eqn: Any, held: list[Held], around: Around, wanted: Sequence[bool]
    ) -> list[Held]:
        inside = called(eqn)
        if inside is not None:
            return self._call(inside, eqn, held, around.of(eqn), wanted)
        values = [one.value for one in held]
        ran = None
        with eqn.ctx.manager:
            if eqn.primitive.name in INSIDE:
                ran = self._inside(eqn, held, around)
            if ran is not None:
                outputs = ran.outputs
            else:
                params = eqn.primitive.get_bind_params(eqn.params)
                result = eqn.primitive.bind(*values, **params)
                outputs = list(result) if eqn.primitive.multiple_results else [result]
        return self._record(eqn, held, outputs, ran, around)

    def _call(
        self, jaxpr: Any, eqn: Any, held: list[Held], around: Around, wanted: Sequence[bool]
    ) -> list[Held]:
        if is_rematerialised(eqn):
            # One by one, or what they vary over would become the same.
            held = [one._replace(value=lax.optimization_barrier(one.value)) for one in held]
        jaxpr, constants = open_jaxpr(jaxpr)
        return self.run(jaxpr, list(map(Held, constants)), held, around, wanted)

    def _inside(self, eqn: Any, held: list[Held], around: Around) -> Ran | None:
        """Runs an equation whose jaxprs are scopes of their own."""
        place = len(self._nodes)
        outer = around.of(eqn)
        name = eqn.primitive.name

        def run(
            jaxpr: Any, branch: int, values: list[Any], names: list[Name | None]
        ) -> tuple[list[Any], Record, Scope]:
            path = (*around.path, place, branch) if name == "cond" else (*around.path, place)
            loops = around.loops if name == "cond" else (*around.loops, name)
            builder = Builder(self.settings)
            given = [builder.hold(*pair) for pair in zip(values, names, strict=True)]
            jaxpr, constants = open_jaxpr(jaxpr)
            inner = dataclasses.replace(outer, path=path, loops=loops)
            outputs = builder.run(jaxpr, list(map(Held, constants)), given, inner)
            record, scope = builder.result(outputs, given)
            return [one.value for one in outputs], record, scope

        values = [_array(one.value, atom) for one, atom in zip(held, eqn.invars, strict=True)]
        inside = Inside(run, self._spread, len(around.loops))
        return INSIDE[name](eqn, values, [one.name for one in held], inside)

    def _record(
        self, eqn: Any, held: list[Held], outputs: list[Any], ran: Ran | None, around: Around
    ) -> list[Held]:
        """Makes variables of the results, and a node where something may go wrong."""
        operands = [_array(one.value, atom) for one, atom in zip(held, eqn.invars, strict=True)]
        check = None if ran else self._check(eqn, operands)
        name = held[0].name if held and eqn.primitive.name in VIEWS else None
        if eqn.primitive.name in SAME and (
            held[0].variable is not None or is_finite_literal(eqn.invars[0])
        ):
            return [Held(output, held[0].variable, name) for output in outputs]
        if not (ran or check is not None or any(is_float(atom.aval.dtype) for atom in eqn.outvars)):
            return [Held(output, None, name or self._index_name(eqn, held)) for output in outputs]
        rule = rule_of(eqn)
        floats = tuple(
            operand
            for operand, atom in zip(operands, eqn.invars, strict=True)
            if is_float(operand.dtype) and not is_finite_literal(atom)
        )
        results = []
        for output in outputs:
            floating = is_float(jnp.result_type(output))
            word = word_after(rule, floats, output) if floating else None
            results.append(Held(output, self._variable(word), name))
        place = len(self._nodes)
        whole = around.of(eqn)
        site = Site(
            eqn.primitive.name,
            whole.frames,
            whole.stack,
            (*around.path, place),
            tuple(
                _operand(one._replace(value=operand))
                for one, operand in zip(held, operands, strict=True)
            ),
            tuple(map(_operand, results)),
            around.loops,
        )
        chosen: tuple[int | None, ...] = ()
        if eqn.primitive.name == "select_n" and len(floats) and is_float(operands[1].dtype):
            words = words_chosen(operands[0], tuple(operands[1:]))
            chosen = (None, *map(self._slot, words))
        if ran is not None:
            self._inner[place] = ran.inner
        node = Node(
            site,
            tuple(one.variable for one in held),
            tuple(one.variable for one in results),
            chosen,
            check,
            () if ran is None else ran.bodies,
            **({} if ran is None else ran.details),
        )
        self._add(node, eqn, operands, outputs)
        return results

    def _index_name(self, eqn: Any, held: list[Held]) -> Name | None:
        """Indices keep their name when those that are negative are counted from the end."""
        names = [one.name for one in held[1:] if one.name is not None]
        return names[0] if eqn.primitive.name == "select_n" and len(names) == 1 else None

    def _check(self, eqn: Any, operands: list[Any]) -> int | None:
        if has_indices(eqn):
            return self._slot(index_word(eqn, operands))
        if eqn.primitive.name in ("div", "rem") and not is_zero_free(eqn.invars[1]):
            return self._slot(divisor_word(operands[1]))
        return None

    def _slot(self, word: Array) -> int:
        self._words.append(self._spread(word))
        return len(self._words) - 1

    def _variable(self, word: Array | None) -> int:
        self._slots.append(None if word is None else self._slot(word))
        return len(self._slots) - 1

    def _add(self, node: Node, eqn: Any, inputs: list[Any], outputs: list[Any]) -> None:
        self._nodes.append(node)
        if node.site.path == self.settings.probe:
            self._probe = self._spread(measure(eqn, inputs, outputs))

    def _spread(self, tree: Any) -> Any:
        """What branches and turns of a loop return must vary alike, whatever it is made from."""
        return jax.tree.map(lambda leaf: vary(leaf, self.settings.axes), tree)


def _array(value: Any, atom: Any) -> Any:
    """A value of the running program as an array; what stands in its text may be a number."""
    return jnp.asarray(value, atom.aval.dtype) if is_literal(atom) else value


def _operand(held: Held) -> Operand:
    return Operand(jnp.shape(held.value), str(jnp.result_type(held.value)), held.name)
