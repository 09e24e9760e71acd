"""The Step level: one optimizer update as a pure function of the TrainState."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._guard.findings import Findings, Watch
from .._guard.trips import Alarm, Trip
from .._sharding.placement import Layout
from .._state.initialise import Plan, plan_state
from .._state.placement_report import PlacementReport, placement_report
from .._state.train_state import Parts, TrainState, as_arrays, require_train_state
from .._util.paths import named_leaves
from .errors import StepError
from .level import Level
from .order import order_error


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step says of itself.

    **Fields:**

    - `finite`: says whether the new parameters are. It costs time, so only who asks for it pays.
    - `overflow`: whether loss scaling skips it.
    - `loss_scale`: what loss scaling has learnt from it.
    - `findings`: what its checks were given.
    - `alarm`: what the host looks at, see `Alarm`.
    """

    metrics: dict[str, PyTree]
    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    finite: Callable[[], Bool[Array, ""]]
    overflow: Bool[Array, ""] | None = None
    loss_scale: PyTree = None
    findings: Findings | None = None
    alarm: Alarm | None = None


# Makes the next parts. It is pure, and may be traced more than once.
Take = Callable[[], Parts]
Advance = Callable[[Parts, PyTree], tuple[Take, Outcome]]


@dataclasses.dataclass(frozen=True)
class View:
    """How closely a step is looked at: its checks, by a watch, and its rows in another order."""

    checks: bool | None = None
    watch: Watch | None = None
    rows: Int[Array, " rows"] | None = None


class AbstractLayer(ABC):
    """What a transform adds around a single update. Layers of lower depth lie further inside.

    The depth and not the place in the chain decides, so that a guard holds back what an average
    adds, whichever of the two was written first.
    """

    depth: ClassVar[int]

    @abstractmethod
    def add_to(self, parts: Parts) -> Parts:
        """The first parts, with what the layer keeps in `extra`."""

    @abstractmethod
    def wrap(self, advance: Advance, *, seen: bool) -> Advance:
        """The step with the layer around it. `seen` says whether a host looks at its alarm."""

    def error_of(self, trip: Trip) -> StepError | None:
        """On the host: the error that a trip stands for, if any."""
        return None

    def after_error(self, parts: Parts) -> Parts:
        """On the host: what to go on from after an error."""
        return parts

    def after_wait(self, parts: Parts) -> Parts:
        """On the host: what to go on from after a trip that the step waited to be seen."""
        return parts

    def from_elsewhere(self, parts: Parts) -> Parts:
        """On the host: what to go on from with a state from elsewhere, such as a checkpoint."""
        return parts


class Step(Level):
    """`(TrainState, batch) -> (TrainState, metrics)`. Runs as it is, or compiled by `donate`."""

    name: ClassVar[str] = "Step"
    rank: ClassVar[int] = 2

    @abstractmethod
    def begin(self, model: PyTree, state: PyTree, key: Array) -> Parts:
        """The first parts of a TrainState, without what layers keep."""

    @abstractmethod
    def advance(self, parts: Parts, batch: PyTree, view: View) -> tuple[Take, Outcome]:
        """A single update, without the layers around it."""

    @abstractmethod
    def is_trainable(self, model: PyTree) -> PyTree:
        """Which leaves are trained, as a pytree of booleans like the model."""

    @property
    @abstractmethod
    def layout(self) -> Layout | None:
        """On which mesh the step runs, and how the model lies there."""

    @property
    @abstractmethod
    def state_layout(self) -> Layout | None:
        """How the optimizer's state lies, which is as the parameters unless `update` splits it."""

    @property
    def layers(self) -> tuple[AbstractLayer, ...]:
        """What other transforms add around an update."""
        return ()

    @property
    def num_steps(self) -> int | None:
        """How many steps a call takes, on as many stacked batches; None for one that is not."""
        return None

    @property
    def view(self) -> View:
        return View()

    @property
    def replicas_every(self) -> int | None:
        """After how many steps copies are compared."""
        return None

    @property
    def bundles(self) -> str | None:
        """The folder where a trip leaves its replay bundle."""
        return None

    def init(self, make: Callable[[Array], Any], *, key: Array) -> TrainState:
        """Makes the first TrainState; see `Program.init`."""
        return self._plan(make, key).run(key)

    def init_shapes(self, make: Callable[[Array], Any], *, key: Array | None = None) -> TrainState:
        """The first TrainState without its arrays; see `Program.init_shapes`."""
        return self._plan(make, jax.random.key(0) if key is None else key).shapes()

    def placement(self, ts: TrainState) -> PlacementReport:
        """Where each leaf of a TrainState lies; see `Program.placement`."""
        if self.layout is None or self.state_layout is None:
            raise ValueError(
                "A placement is one on a mesh. Got a chain without one. "
                "Put `et.shard(mesh, ...)` before `et.update`."
            )
        model = ts.structure.unpack(ts.structure.avals).model
        trainable = {name for name, _ in named_leaves(eqx.filter(model, self.is_trainable(model)))}
        return placement_report(ts, self.layout, self.state_layout, trainable)

    def _plan(self, make: Callable[[Array], Any], key: Array) -> Plan:
        def begin(model: PyTree, state: PyTree, key: Array) -> Parts:
            parts = self.begin(model, state, key)
            for layer in self._from_inside():
                parts = layer.add_to(parts)
            return parts

        return plan_state(make, key, begin, self.layout, self.state_layout, self.is_trainable)

    def run(
        self, parts: Parts, batch: PyTree, *, seen: bool = True
    ) -> tuple[Parts, dict[str, PyTree], Alarm | None]:
        """Takes the step (or steps): the next parts, the metrics, and the alarm.

        `seen` says whether a host will look at that.
        """

        def looked_at(parts: Parts, batch: PyTree) -> tuple[Take, Outcome]:
            return self.advance(parts, batch, self.view)

        advance: Advance = looked_at
        for layer in self._from_inside():
            advance = layer.wrap(advance, seen=seen)
        if self.num_steps is None:
            take, outcome = advance(parts, batch)
            return take(), outcome.metrics, outcome.alarm
        return self._run_many(advance, parts, batch, self.num_steps)

    def _run_many(
        self, advance: Advance, parts: Parts, batch: PyTree, num_steps: int
    ) -> tuple[Parts, dict[str, PyTree], Alarm | None]:
        if self.bundles is not None:
            raise ValueError(
                "A step that leaves a replay bundle waits for the host to save it. "
                f"Got `repeat({num_steps})`, whose steps the host does not see apart. "
                "Leave out `bundles=` of `et.guard`, or `et.repeat`."
            )
        for name, leaf in named_leaves(batch):
            if jnp.shape(leaf)[:1] != (num_steps,):
                raise ValueError(
                    f"`repeat({num_steps})` takes {num_steps} batches stacked along a new leading "
                    f"dim. Got `batch.{name}` of shape {jnp.shape(leaf)}. "
                    f"Stack them: `et.data.stack(loader, {num_steps})`."
                )
        arrays, static = eqx.partition(parts, eqx.is_array)

        def body(arrays: PyTree, batch: PyTree) -> Any:
            take, outcome = advance(eqx.combine(arrays, static), batch)
            return eqx.filter(take(), eqx.is_array), (outcome.metrics, outcome.alarm)

        arrays, (metrics, alarm) = lax.scan(body, arrays, jax.tree.map(jnp.asarray, batch))
        return eqx.combine(arrays, static), metrics, alarm

    def _from_inside(self) -> list[AbstractLayer]:
        return sorted(self.layers, key=lambda layer: layer.depth)

    def judge(self, trip: Trip) -> StepError | None:
        """The error that a trip stands for, if any."""
        errors = (layer.error_of(trip) for layer in self.layers)
        return next((error for error in errors if error is not None), None)

    def recover(self, ts: TrainState) -> TrainState:
        """The TrainState to go on from after an error."""
        return ts.replace(extra=_changed(ts.parts, [it.after_error for it in self.layers]).extra)

    def adopt(self, ts: TrainState) -> tuple[Any, ...]:
        """The leaves to go on from with a TrainState from elsewhere; no other is moved."""
        if not self.layers:
            return ts.leaves
        traced = isinstance(ts.leaves[0], Tracer)  # of which no host will see an alarm
        changes = [it.after_error if traced else it.from_elsewhere for it in self.layers]
        in_extra = [name.startswith("extra") for name in ts.structure.names]
        # It may have been on the host.
        arrays = tuple(
            as_arrays(leaf) if inside else leaf
            for leaf, inside in zip(ts.leaves, in_extra, strict=True)
        )
        parts = ts.structure.unpack(arrays)
        extra = _changed(parts, changes).extra
        changed = ts.structure.pack(dataclasses.replace(parts, extra=extra))
        return tuple(
            leaf
            if new is array or not inside
            else (new if sharding is None else jax.device_put(new, sharding))
            for leaf, array, new, inside, sharding in zip(
                ts.leaves, arrays, changed, in_extra, ts.structure.shardings, strict=True
            )
        )

    def release(self, ts: TrainState) -> TrainState:
        """The TrainState to go on from once the host has done what a step waited for."""
        return ts.replace(extra=_changed(ts.parts, [it.after_wait for it in self.layers]).extra)

    def __call__(self, ts: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, PyTree]]:
        require_train_state(ts)
        parts, metrics, _ = self.run(ts.parts, batch, seen=False)
        return TrainState(ts.structure.pack(parts), ts.structure, fresh=True), metrics


class StepAround(Step):
    """A Step around another, which is as that one but for what the transform changes."""

    inner: Step

    def begin(self, model: PyTree, state: PyTree, key: Array) -> Parts:
        return self.inner.begin(model, state, key)

    def advance(self, parts: Parts, batch: PyTree, view: View) -> tuple[Take, Outcome]:
        return self.inner.advance(parts, batch, view)

    def is_trainable(self, model: PyTree) -> PyTree:
        return self.inner.is_trainable(model)

    @property
    def layout(self) -> Layout | None:
        return self.inner.layout

    @property
    def state_layout(self) -> Layout | None:
        return self.inner.state_layout

    @property
    def layers(self) -> tuple[AbstractLayer, ...]:
        own = (self,) if isinstance(self, AbstractLayer) else ()
        return (*self.inner.layers, *own)

    @property
    def num_steps(self) -> int | None:
        return self.inner.num_steps

    @property
    def view(self) -> View:
        return self.inner.view

    @property
    def replicas_every(self) -> int | None:
        return self.inner.replicas_every

    @property
    def bundles(self) -> str | None:
        return self.inner.bundles


class AbstractCompiledStep(Level):
    """A level that holds a Step, compiled."""

    inner: Step

    @property
    def step(self) -> Step:
        return self.inner


def _changed(parts: Parts, changes: list[Callable[[Parts], Parts]]) -> Parts:
    for change in changes:
        parts = change(parts)
    return parts


def keep(ok: Bool[Array, ""], take: Take, old: Parts) -> Parts:
    """What `take` makes where `ok`, else `old` bit for bit. The count of steps goes on anyway."""
    if _kinds(eqx.filter_eval_shape(take)) != _kinds(old):
        return take()  # which `TrainState` refuses, by the name of the leaf
    kept, static = eqx.partition(old, eqx.is_array)
    new = branch(ok, lambda: eqx.filter(take(), eqx.is_array), lambda: kept)
    return dataclasses.replace(eqx.combine(new, static), step=old.step + 1)


def branch(
    ok: Bool[Array, ""], then: Callable[[], PyTree], otherwise: Callable[[], PyTree]
) -> PyTree:
    """`then()` where `ok`, else `otherwise()`, with nothing computed in vain where that is cheap.

    On a CPU a branch lets an update write over what it reads, where a select holds both. On a GPU
    a branch makes the host wait for the device, and a select is one more operand of a kernel.
    """
    if not isinstance(ok, Tracer):
        return then() if ok else otherwise()

    def select() -> PyTree:
        return jax.tree.map(lambda a, b: a if a is b else jnp.where(ok, a, b), then(), otherwise())

    return lax.platform_dependent(cpu=lambda: lax.cond(ok, then, otherwise), default=select)


def _kinds(parts: Parts) -> Any:
    """What must not change from step to step: the structure, kinds of arrays, all else as it is."""
    leaves, treedef = jax.tree.flatten(parts)
    return treedef, [
        (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf for leaf in leaves
    ]


def as_step(given: Any, source: str) -> Step:
    """`given` as a Step, or the error that says where `source` belongs."""
    if not isinstance(given, Step):
        raise order_error(source, (Step,), given)
    return given
