"""Dispatch: one jit per structure of TrainState, and what went wrong when a call fails."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from .._core.levels import require_positive
from .._core.loss import batch_size
from .._state.train_state import Structure, TrainState, UsedStateError, require_train_state
from .._util.internals import INCOMPATIBLE_DEVICES, NOT_FUNCTIONALIZED, cache_size
from .._util.paths import named_leaves
from .signature import Signature, advice, changes, is_concrete, placement, signature_of, table


class RecompilationWarning(UserWarning):
    """A program was compiled more than once, and no `max_compilations` says that it may be."""


class RecompilationError(RuntimeError):
    """A program was to be compiled more often than it may be."""


class DonationWarning(UserWarning):
    """A buffer that was to be donated was not, so that it exists twice."""


class _Jit:
    """A jit with the number of calls that its cache knows: one more means that it was compiled."""

    __slots__ = ("run", "entries")

    def __init__(self, run: Any):
        self.run = run
        self.entries = 0


def _is_deleted(leaf: Any) -> bool:
    try:
        return leaf.is_deleted()
    except (AttributeError, jax.errors.ConcretizationTypeError):  # a tracer, or of NumPy
        return False


def require_arrays(ts: TrainState, cause: Exception | None = None) -> None:
    """Refuses a TrainState of shapes, and one with a leaf that another call took."""
    if isinstance(ts.leaves[0], jax.ShapeDtypeStruct):
        raise TypeError(
            "A TrainState must have arrays to be run. Got one of shapes, as `init_shapes` makes it "
            "for `lower`, `inspect` and `placement`. Make one by `program.init(make, key=...)`."
        )
    for name, leaf in zip(ts.structure.names, ts.leaves, strict=True):
        if _is_deleted(leaf):
            raise UsedStateError(
                "A TrainState must own its buffers. "
                f"Got one whose `{name}` was deleted: another call that donates took it. "
                "Use the TrainState which that call returned."
            ) from cause


class _Calling(threading.local):
    """What the call under way in each thread was given."""

    arguments: tuple[TrainState, PyTree] | None = None


class Compiled:
    """A function of a TrainState's leaves and a batch, compiled once for each structure.

    What is checked on every call costs less than a microsecond; the rest is looked at only when
    something was compiled or went wrong, or where `max_compilations` has been reached.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[Structure], Callable[[tuple[Any, ...], PyTree], Any]],
        out_shardings: Callable[[Structure], Any],
        donate: bool,
        max_compilations: int | None = None,
    ):
        if max_compilations is not None:
            require_positive("max_compilations", max_compilations, "One for each shape of a batch")
        self.name = name
        self._build = build
        self._out_shardings = out_shardings
        self._donate = donate
        self.max_compilations = max_compilations
        self._jits: dict[Structure, _Jit] = {}
        self._signatures: list[Signature] = []
        self._allowed: set[Any] = set()
        self._calling = _Calling()
        self._lock = threading.Lock()

    @property
    def compilations(self) -> int:
        """How often this was compiled."""
        return len(self._signatures)

    def __call__(self, ts: TrainState, batch: PyTree) -> Any:
        require_train_state(ts)
        ts.require_unused()
        jit = self._jits.get(ts.structure) or self._jit_for(ts.structure)
        # On several devices jaxlib ends the process at a deleted array. A state that a step made
        # shares its arrays with copies of it, which were given others in some fields at most.
        if ts.fresh:
            require_arrays(ts)
        else:
            for place in ts.structure.sentinels:
                if _is_deleted(ts.leaves[place]):
                    require_arrays(ts)
        if self.max_compilations is not None:
            self._refuse_new(ts, batch)
        self._calling.arguments = (ts, batch)
        try:
            out = jit.run(ts.leaves, batch)
        except (ValueError, RuntimeError, TypeError) as error:
            self._diagnose(error, ts, batch)
            raise
        finally:
            self._calling.arguments = None
        if cache_size(jit.run) != jit.entries:
            jit.entries = cache_size(jit.run)
            self._note(signature_of(ts, batch))
        return out

    def lower(self, ts: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the function for these arguments, or for their shapes. It counts as no call.

        A call of the same shapes takes what was traced here, and the other way round.
        """
        return self._jit_for(ts.structure).run.lower(ts.leaves, batch)

    def _jit_for(self, structure: Structure) -> _Jit:
        """The jit for a structure; one that is equal to a known structure shares its jit."""
        with self._lock:
            known = (jit for known, jit in self._jits.items() if same_structure(known, structure))
            jit = next(known, None) or _Jit(self._jit(structure))
            self._jits[structure] = jit
        return jit

    def _jit(self, structure: Structure) -> Any:
        traced = self._traced(structure)
        traced.__name__ = traced.__qualname__ = self.name  # in profiles, logs and errors
        return jax.jit(
            traced,
            donate_argnums=(0,) if self._donate else (),
            # A leaf that jit left out could not be donated.
            keep_unused=True,
            out_shardings=self._out_shardings(structure),
        )

    def _traced(self, structure: Structure) -> Callable[[tuple[Any, ...], PyTree], Any]:
        function = self._build(structure)

        def traced(leaves: tuple[Any, ...], batch: PyTree) -> Any:
            arguments = self._calling.arguments
            if arguments is None:  # lowered, which is no call; a call that follows counts
                return function(leaves, batch)
            signature = signature_of(*arguments)
            self._count(signature)
            try:
                return function(leaves, batch)
            except Exception:
                with self._lock:  # refused while it was traced: nothing was compiled
                    self._signatures.remove(signature)
                raise

        return traced

    def _count(self, signature: Signature) -> None:
        """Counts a compilation that is traced, and refuses it if it is one too many."""
        with self._lock:
            if self._signatures:
                self._require_allowed(signature)
                self._warn(signature)
            self._signatures.append(signature)

    def _note(self, signature: Signature) -> None:
        """Counts a compilation that no tracing shows: it was lowered before, or lies elsewhere."""
        with self._lock:
            if signature not in self._signatures:
                if self._signatures:
                    self._warn(signature)
                self._signatures.append(signature)

    def _warn(self, signature: Signature) -> None:
        """Warns of a compilation after the first; a limit says that those within it are meant."""
        if self.max_compilations is None:
            warnings.warn(self._report(signature), RecompilationWarning, stacklevel=3)

    def _refuse_new(self, ts: TrainState, batch: PyTree) -> None:
        """Refuses, before anything runs, what would be compiled once too often.

        Tracing would be too late: arrays that lie elsewhere are compiled anew without it. The
        arrays of a step lie alike, so that one stands for all.
        """
        if len(self._signatures) < (self.max_compilations or 0):
            return
        leaves, treedef = jax.tree.flatten(batch)
        state = ts.leaves if ts.fresh else ts.leaves[:1]
        key = (ts.structure, treedef, *map(_quick_key, state), *map(_quick_key, leaves))
        if key not in self._allowed:
            batch_size(batch)  # which refuses, by name, what is no array
            signature = signature_of(ts, batch)
            if signature not in self._signatures:
                self._require_allowed(signature)
            self._allowed.add(key)

    def _require_allowed(self, signature: Signature) -> None:
        limit = self.max_compilations
        if limit is not None and len(self._signatures) >= limit:
            raise RecompilationError(self._report(signature))

    def _report(self, signature: Signature) -> str:
        limit = self.max_compilations
        rule = f"`{self.name}` should be compiled once" + (
            f", and may be {limit} times (`max_compilations`)." if limit and limit > 1 else "."
        )
        # The nearest of those before, the last one if there are several.
        numbered = enumerate(self._signatures, start=1)
        compared = [(changes(known, signature), number) for number, known in numbered]
        found, number = min(compared, key=lambda pair: (len(pair[0]), -pair[1]))
        got = f"{rule} Got compilation {len(self._signatures) + 1}, for arguments"
        if not found:
            return (
                f"{got} equal to those of compilation {number}: a setting of JAX changed, such as "
                "`jax.default_matmul_precision`, or its caches were cleared. "
                "Change settings before the first step."
            )
        return f"{got} that differ from compilation {number}:\n{table(found)}\n{advice(found)}"

    def _diagnose(self, error: Exception, ts: TrainState, batch: PyTree) -> None:
        """Raises what `error` means in the terms of the caller, if that can be told."""
        if isinstance(error, UsedStateError | RecompilationError):
            return
        require_arrays(ts, error)
        for name, leaf in named_leaves(batch):
            if _is_deleted(leaf):
                raise UsedStateError(
                    f"A batch must be alive. Got `batch.{name}`, which was deleted or donated. "
                    "Take it from the loader again."
                ) from error
        if not isinstance(error, TypeError | ValueError):
            return
        if NOT_FUNCTIONALIZED in str(error):
            raise ValueError(
                "A `checkify.check` needs somebody who looks at it. Got one in the loss of a chain "
                "without a guard that does. Add `et.guard` after `et.update`, with "
                'checks="user", as it is unless given.'
            ) from error
        if INCOMPATIBLE_DEVICES in str(error).lower():
            places = "; ".join(
                f"`{name}` on {placement(leaf)}"
                for name, leaf in [
                    ("the TrainState", ts.leaves[0]),
                    *((f"batch.{name}", leaf) for name, leaf in named_leaves(batch)),
                ]
            )
            raise ValueError(
                "A batch must be on the devices of the mesh, or on the host. "
                f"Got {places}. Pass numpy arrays, or place it by `et.data.prefetch`."
            ) from error
        if isinstance(error, TypeError):
            batch_size(batch)  # which refuses, by name, what is no array


def follow(ts: TrainState, batch: PyTree) -> TrainState:
    """A new TrainState without a mesh, committed to the device that the batch is committed to.

    Left as it is, the first step would bring its outputs there, and the second be compiled anew
    for arguments that are committed.
    """
    if not isinstance(ts, TrainState) or not ts.fresh or ts.used is not None:
        return ts
    if any(sharding is not None for sharding in ts.structure.shardings):
        return ts
    places = {placement(leaf) for leaf in jax.tree.leaves(batch)} - {None}
    if len(places) == 1 and isinstance(device := places.pop(), SingleDeviceSharding):
        if all(is_concrete(leaf) and not leaf.committed for leaf in ts.leaves):
            return ts.with_leaves(tuple(jax.device_put(ts.leaves, device)))
    return ts


def _quick_key(leaf: Any) -> Any:
    """What tells most arguments apart, at a fraction of a signature's cost."""
    shape, dtype = getattr(leaf, "shape", type(leaf)), getattr(leaf, "dtype", None)
    return shape, dtype, getattr(leaf, "weak_type", False), placement(leaf)


def same_structure(a: Structure, b: Structure) -> bool:
    return (
        a.treedef == b.treedef
        and a.static == b.static
        and a.names == b.names
        and a.avals == b.avals
        and a.shardings == b.shardings
    )


def check_donated(name: str, before: TrainState, after: tuple[Any, ...]) -> None:
    """Warns of each leaf that should have been donated and was not."""
    kept = [
        leaf_name
        for leaf_name, old, new in zip(before.structure.names, before.leaves, after, strict=True)
        if is_concrete(old) and old is not new and not old.is_deleted()
    ]
    if kept:
        warnings.warn(
            f"Every buffer of a TrainState that `{name}` is given should be donated. "
            f"Got {len(kept)} that were not: {', '.join(f'`{leaf}`' for leaf in kept[:5])}. "
            "A numpy view of an array keeps it (take `np.array(x)`, a copy), and so does a "
            "sharding other than the program's.",
            DonationWarning,
            stacklevel=3,
        )
