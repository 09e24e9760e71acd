"""The Program level: a Step, compiled."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from .._core.errors import StepError
from .._core.step import AbstractCompiledStep
from .._guard.trips import Alarm, Trip, read_flag, read_trips
from .._state.placement_report import PlacementReport
from .._state.train_state import Structure, TrainState
from .._util.text import call
from .cost import Inspection, inspect_compiled
from .dispatch import Compiled, check_donated, follow, require_arrays, same_structure
from .signature import is_concrete

if TYPE_CHECKING:
    import eqtrain.explain  # takes long, and most runs never need it

# So many replay bundles does a program leave, lest a bad run fill the disk.
MAX_BUNDLES = 3


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program(AbstractCompiledStep):
    """`(TrainState, batch) -> (TrainState, metrics)`, compiled. Made by `et.jit` or `et.donate`."""

    name: ClassVar[str] = "Program"
    rank: ClassVar[int] = 3

    donates: bool
    compiled: Compiled
    _calls: Any = dataclasses.field(default_factory=lambda: itertools.count(1))
    _bundles: Any = dataclasses.field(default_factory=itertools.count)
    _trips: Any = dataclasses.field(default_factory=lambda: collections.deque(maxlen=100))
    # The trips of each Alarm that was looked at: copies of a TrainState share one.
    _seen: Any = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    _replays: dict[Structure, Any] = dataclasses.field(default_factory=dict)
    _structures: list[Structure] = dataclasses.field(default_factory=list)

    @property
    def source(self) -> str:
        verb = "donate" if self.donates else "jit"
        return call(verb, max_compilations=self.compiled.max_compilations)

    def init(self, make: Callable[[Array], Any], *, key: Array) -> TrainState:
        """Makes the first TrainState: `make(key)` gives the model, or `(model, state)`.

        It runs under jit, each array born with its sharding, so that no device ever holds more
        than its shard; the values do not depend on the mesh. Numpy arrays become JAX arrays. In the
        state and the optimizer's state Python numbers do too; in the model they are settings.

        **Raises:** `ValueError` for tied leaves or a placement that does not fit, by name;
        `TypeError` for a raw key.
        """
        ts = self.step.init(make, key=key)
        for known in self._structures:
            if same_structure(known, ts.structure):
                return TrainState(ts.leaves, known, fresh=True)
        self._structures.append(ts.structure)
        return ts

    def init_shapes(self, make: Callable[[Array], Any], *, key: Array | None = None) -> TrainState:
        """The first TrainState as shapes and shardings, with nothing computed or stored.

        It serves `lower`, `inspect` and `placement`, beside a batch of `jax.ShapeDtypeStruct`: so a
        model of any size can be looked at before there is a machine for it.
        """
        return self.step.init_shapes(make, key=key)

    def __call__(self, ts: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, PyTree]]:
        if isinstance(ts, TrainState) and ts.fresh and ts.flag is None:
            ts.require_unused()
            # It may have been copied while steps were held back, and without a flag nobody else
            # would let them be taken again.
            require_arrays(ts)
            try:
                taken = ts.with_leaves(self.step.adopt(ts))
            except StepError as error:
                error.state = self.step.recover(ts)
                raise
        else:
            taken = ts
        return self._call(ts, taken, batch, None)

    def _call(
        self, ts: TrainState, taken: TrainState, batch: PyTree, call: int | None
    ) -> tuple[TrainState, dict[str, PyTree]]:
        """A call that was given `ts`, of which `taken` is what the step takes."""
        taken = follow(taken, batch)
        leaves, metrics, alarm = self.compiled(taken, batch)
        if call is None:
            call = next(self._calls)  # counted once nothing was refused
        if self.donates:
            ts.used = f"call {call} of `{self.compiled.name}`"
            if ts.fresh:
                check_donated(self.compiled.name, taken, leaves)
                _delete_replaced(ts, taken)
        # Of what is traced no host will see the alarm.
        traced = isinstance(leaves[0], Tracer)
        new = TrainState(leaves, ts.structure, fresh=traced)
        if alarm is not None and not traced:
            new.flag = (call, alarm, None if self.step.bundles is None else batch)
            if self._look(ts.flag, new):
                # The step before had tripped, and this one waited while it was saved.
                released = self.step.release(new)
                return self._call(released, released, batch, call)
        return new, metrics

    def check(self, ts: TrainState) -> None:
        """Looks at the flag of the step that made `ts`, which no later call looked at yet.

        Call it after the loop, and before what must not see a failed step.

        **Raises:** what a call would raise: `NonFiniteError`, `CheckError`, `ReplicasError`.
        """
        ts.require_unused()
        self._look(ts.flag, ts)

    def explain(
        self, ts: TrainState, batch: PyTree, *, step: int | None = None
    ) -> eqtrain.explain.Explanation:
        """Replays a step that went wrong, and names what went wrong first.

        The loss and its gradients are computed once more, by the same chain on the same mesh, with
        a look at every primitive. `print` shows the first one that went wrong, its line, device,
        microbatch and the rows of the global batch, with statistics of what went into it.

        **Arguments:**

        - `ts`: the TrainState that the step was given, or the one it returned if a guard skipped
          it, which is the same but for its number; or `error.state`. It is not used up.
        - `batch`: of one step, also where the chain has `repeat`.
        - `step`: its number, which the keys depend on. Unless given it is that of `ts`, or of the
          step that the guard held back last if that made `ts`.

        **Returns:** an `eqtrain.explain.Explanation`, with a rich table where `rich` prints it.

        **Raises:** `UsedStateError` for a TrainState that was donated.

        ```python
        >>> def loss(model, state, batch, key):
        ...     return et.mean(jnp.log(batch["x"]) * model), state, {}
        >>> step = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard, et.donate)
        >>> ts = step.init(lambda key: jnp.array(1.0), key=jax.random.key(0))
        >>> batch = {"x": jnp.array([1.0, 2.0, -1.0, 3.0])}
        >>> ts, metrics = step(ts, batch)
        >>> found = step.explain(ts, batch)
        >>> found.kind, found.primitive, found.rows.rows
        ('nan', 'log', (2,))

        ```
        """
        ts.require_unused()
        require_arrays(ts)
        # Most runs never need it, and it takes long to import.
        from ..explain.step import explain_step, make_replay

        if ts.structure not in self._replays:
            self._replays[ts.structure] = make_replay(self.step, ts.structure)
        return explain_step(self.step, self._replays[ts.structure], ts, batch, step)

    @property
    def trips(self) -> tuple[Trip, ...]:
        """The last steps that tripped the guard, a hundred at most, oldest first."""
        return tuple(self._trips)

    def _look(self, flag: tuple[int, Alarm, PyTree] | None, ts: TrainState) -> bool:
        """Looks at the flag of a call, and says whether `ts` waited for that."""
        if flag is None:
            return False
        call, alarm, batch = flag
        codes = read_flag(alarm.code)
        if not codes[:, 0].any():
            return False
        trips = self._seen.get(alarm)
        if trips is None:
            found = read_trips(alarm, codes, call, self.step.layout, ts.structure)
            trips = self._seen[alarm] = [self._record(trip, ts, batch) for trip in found]
        for trip in trips:
            error = self.step.judge(trip)
            if error is not None:
                error.add_note(f"It was call {call} of `{self.compiled.name}`.")
                error.trip = trip
                error.state = self.step.recover(ts)
                raise error
        return self.step.bundles is not None and any(trip.in_a_row for trip in trips)

    def _record(self, trip: Trip, ts: TrainState, batch: PyTree) -> Trip:
        """Remembers a trip, with the bundle that it leaves; not one that was only held back."""
        if trip.causes:
            # Without its batch, the state that the step was given is gone.
            if trip.in_a_row and self.step.bundles is not None and batch is not None:
                trip = dataclasses.replace(trip, bundle=self._save_bundle(trip, ts, batch))
            self._trips.append(trip)
        return trip

    def _save_bundle(self, trip: Trip, ts: TrainState, batch: PyTree) -> str | None:
        """Saves the step that tripped. `ts` is as before it, but for `step`."""
        from ..bundles import save_bundle  # an extra is imported where it is used

        folder = self.step.bundles
        if folder is None or next(self._bundles) >= MAX_BUNDLES:
            return None
        before = self.step.recover(ts).replace(step=jnp.full_like(ts.step, trip.step))
        name = os.path.join(folder, f"step-{trip.step}-call-{trip.call}")
        # A run that was resumed meets the same steps again.
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        free = next(path for path in names if not os.path.exists(path))
        reason = {"causes": list(trip.causes), "loss": trip.loss, "grad_norm": trip.grad_norm}
        try:
            return str(save_bundle(free, before, batch, program=self, reason=reason))
        except Exception as error:  # a run must not end for want of what only explains it
            warnings.warn(
                "A step that tripped should leave a replay bundle. "
                f"Got step {trip.step}, which was not saved: {type(error).__name__}: {error} "
                f"Make room in `{folder}`, or correct its permissions. The run goes on.",
                stacklevel=6,
            )
            return None

    @property
    def compilations(self) -> int:
        """How often the step was compiled; once, if all is well."""
        return self.compiled.compilations

    @property
    def batch_sharding(self) -> NamedSharding | PyTree | None:
        """Where a batch belongs, for `et.data.prefetch`; None without a mesh."""
        layout = self.step.layout
        if layout is None:
            return None
        lead = () if self.step.num_steps is None else (None,)
        return jax.tree.map(
            lambda spec: layout.sharding(P(*lead, *spec)),
            layout.batch,
            is_leaf=lambda node: isinstance(node, P),
        )

    def placement(self, ts: TrainState) -> PlacementReport:
        """Where each leaf of a TrainState, or of its shapes, lies, with the bytes a device.

        **Raises:** `ValueError` for a chain without `et.shard`.

        ```python
        >>> def loss(model, state, batch, key):
        ...     return et.mean((batch["x"] @ model) ** 2), state, {}
        >>> shard = et.shard(et.mesh(data=4), batch=P("data"), model=et.fsdp("data", min_size=1))
        >>> step = et.pipe(loss, shard, et.update(optax.sgd(0.1)), et.donate)
        >>> report = step.placement(step.init_shapes(lambda key: jnp.zeros((8, 2))))
        >>> tuple(report.leaves[0].spec), report.leaves[0].shard_shape, report.parameters
        (('data',), (2, 2), 16)

        ```
        """
        return self.step.placement(ts)

    def lower(self, ts: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the step for these arguments, as `jax.jit(...).lower` does; nothing is run."""
        return self.compiled.lower(ts, batch)

    def inspect(self, ts: TrainState, batch: PyTree) -> Inspection:
        """What the compiled step costs: collectives, FLOPs, bytes a device. Nothing is run."""
        layout = self.step.layout
        mesh = None if layout is None else layout.mesh
        return inspect_compiled(self.lower(ts, batch).compile(), mesh)


def _delete_replaced(ts: TrainState, taken: TrainState) -> None:
    """Deletes the arrays of a used-up TrainState in whose place the step took others."""
    for leaf, other in zip(ts.leaves, taken.leaves, strict=True):
        if leaf is not other and is_concrete(leaf) and not leaf.is_deleted():
            leaf.delete()
