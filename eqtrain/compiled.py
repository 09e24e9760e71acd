"""Dispatch: one jit per structure of TrainState, and what went wrong when a call fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jaxtyping import PyTree

from .contribution import batch_size
from .paths import named_leaves
from .state import Structure, TrainState, UsedStateError, kind, require_train_state


class RecompilationWarning(UserWarning):
    """A program was compiled more than once."""


class RecompilationError(RuntimeError):
    """A program was to be compiled more often than it may be."""


class DonationWarning(UserWarning):
    """A buffer that was to be donated was not, so that it exists twice."""


class Compiled:
    """A function of a TrainState's leaves and a batch, compiled once for each structure.

    What is checked on every call costs less than a microsecond; the rest is looked at only when
    something was compiled or went wrong.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[Structure], Callable[[tuple[Any, ...], PyTree], Any]],
        out_shardings: Callable[[Structure], Any],
        donate: bool,
        max_compilations: int | None = None,
    ):
        self.name = name
        self._build = build
        self._out_shardings = out_shardings
        self._donate = donate
        self._max_compilations = max_compilations
        self._jitted: dict[Structure, Any] = {}
        self._entries = 0
        self._signatures: list[dict[str, str]] = []
        self._places: list[dict[str, Any]] = []
        self._moves = 0
        self._arguments: tuple[TrainState, PyTree] | None = None

    @property
    def compilations(self) -> int:
        """How often this was traced and compiled."""
        return len(self._signatures) + self._moves

    def __call__(self, ts: TrainState, batch: PyTree) -> Any:
        require_train_state(ts)
        ts.require_unused()
        jitted = self._jitted.get(ts.structure) or self.jitted(ts.structure)
        traced = len(self._signatures)
        if self._max_compilations is not None:
            self._refuse_moves(batch)
        self._arguments = (ts, batch)
        try:
            out = jitted(ts.leaves, batch)
        except (ValueError, RuntimeError, TypeError) as error:
            self._diagnose(error, ts, batch)
            raise
        finally:
            self._arguments = None
        if jitted._cache_size() != self._entries:
            self._entries = jitted._cache_size()
            self._note_placement(_places(ts, batch), len(self._signatures) == traced)
        return out

    def lower(self, ts: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the function for these arguments, or for their shapes. It counts as no call."""
        return self._jit(ts.structure, self._build(ts.structure)).lower(ts.leaves, batch)

    def jitted(self, structure: Structure) -> Any:
        """The jit for a structure; one that is equal to a known structure shares its jit."""
        if structure not in self._jitted:
            for known, jitted in self._jitted.items():
                if same_structure(known, structure):
                    self._jitted[structure] = jitted
                    return jitted
            self._jitted[structure] = self._jit(structure, self._traced(structure))
        return self._jitted[structure]

    def _jit(self, structure: Structure, function: Callable[..., Any]) -> Any:
        return jax.jit(
            function,
            donate_argnums=(0,) if self._donate else (),
            # A leaf that jit left out could not be donated.
            keep_unused=True,
            out_shardings=self._out_shardings(structure),
        )

    def _traced(self, structure: Structure) -> Callable[[tuple[Any, ...], PyTree], Any]:
        function = self._build(structure)

        def traced(leaves: tuple[Any, ...], batch: PyTree) -> Any:
            named = dict(zip(structure.names, leaves, strict=True))
            named |= {f"batch.{name}": leaf for name, leaf in named_leaves(batch)}
            # A tracer does not say where the argument lies, and JAX traces anew for that too.
            places = _places(*self._arguments) if self._arguments else {}
            signature = {
                name: _kind(leaf) + (f" on {places[name]}" if places.get(name) else "")
                for name, leaf in named.items()
            }
            signature["the structure"] = str(hash(structure.treedef))
            self._count(signature)
            try:
                return function(leaves, batch)
            except Exception:
                self._signatures.pop()  # refused while it was traced: nothing was compiled
                raise

        return traced

    def _count(self, signature: dict[str, str]) -> None:
        """Counts a compilation, and refuses it if it is one too many: nothing was run by now."""
        if self._signatures:
            message = (
                f"`{self.name}` should be compiled once. Got compilation "
                f"{self.compilations + 1}, since {_differences(self._signatures[-1], signature)}. "
                "Keep shapes and dtypes the same: pad the last batch, cast what differs."
            )
            limit = self._max_compilations
            if limit is not None and len(self._signatures) >= limit:
                raise RecompilationError(message)
            warnings.warn(message, RecompilationWarning, stacklevel=2)
        self._signatures.append(signature)

    def _refuse_moves(self, batch: PyTree) -> None:
        """Refuses what would be compiled once too often without being traced."""
        limit = self._max_compilations
        if limit is None or self.compilations < limit or not self._places:
            return
        moves = [_moved(seen, _batch_places(batch)) for seen in self._places]
        if all(moves):
            raise RecompilationError(_lies_elsewhere(self.name, moves[-1]))

    def _note_placement(self, places: dict[str, Any], untraced: bool) -> None:
        """Reports the compilation that no tracing shows: an argument that lies elsewhere."""
        moved = _moved(self._places[-1], places) if self._places else []
        self._places.append(places)
        if moved and untraced:
            self._moves += 1
            message = _lies_elsewhere(self.name, moved)
            warnings.warn(message, RecompilationWarning, stacklevel=3)

    def _diagnose(self, error: Exception, ts: TrainState, batch: PyTree) -> None:
        """Raises what `error` means in the terms of the caller, if that can be told."""
        if isinstance(error, UsedStateError | RecompilationError):
            return
        for name, leaf in zip(ts.structure.names, ts.leaves, strict=True):
            if _is_concrete(leaf) and leaf.is_deleted():
                raise UsedStateError(
                    "A TrainState must own its buffers. "
                    f"Got one whose `{name}` was deleted: another call that donates took it. "
                    "Use the TrainState which that call returned."
                ) from error
        for name, leaf in named_leaves(batch):
            if _is_concrete(leaf) and leaf.is_deleted():
                raise UsedStateError(
                    f"A batch must be alive. Got `batch.{name}`, which was deleted or donated. "
                    "Take it from the loader again."
                ) from error
        if not isinstance(error, TypeError | ValueError):
            return
        if "not functionalized" in str(error):
            raise ValueError(
                "A `checkify.check` needs somebody who looks at it. Got one in the loss of a chain "
                "without a guard that does. Add `et.guard` after `et.update`, with "
                'checks="user", as it is unless given.'
            ) from error
        if "incompatible devices" in str(error).lower():
            places = "; ".join(
                f"`{name}` on {_placement(leaf)}"
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


def _batch_places(batch: PyTree) -> dict[str, Any]:
    return {f"batch.{name}": _placement(leaf) for name, leaf in named_leaves(batch)}


def _places(ts: TrainState, batch: PyTree) -> dict[str, Any]:
    state = zip(ts.structure.names, map(_placement, ts.leaves), strict=True)
    return dict(state) | _batch_places(batch)


def _moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What lies elsewhere than before. What jit may put where it likes lies anywhere."""
    return [
        f"`{name}`: {before[name]} -> {place}"
        for name, place in after.items()
        if place is not None and before.get(name) is not None and before[name] != place
    ]


def _lies_elsewhere(name: str, moved: list[str]) -> str:
    return (
        f"`{name}` should be compiled once. Got arguments that lie elsewhere than before, for "
        f"which it is compiled anew: {'; '.join(moved[:3])}. "
        "Give every batch the same sharding: `et.data.prefetch(loader, sharding)`."
    )


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
        if _is_concrete(old) and old is not new and not old.is_deleted()
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


def _kind(leaf: Any) -> str:
    aval = jax.typeof(leaf)
    return kind(aval) + (" (weak)" if getattr(aval, "weak_type", False) else "")


def _is_concrete(leaf: Any) -> bool:
    """Whether a leaf has buffers, which a tracer of somebody's own jit around the call has not."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _placement(leaf: Any) -> Any:
    """Where a committed array lies; None for what jit may put where it likes."""
    return leaf.sharding if _is_concrete(leaf) and leaf.committed else None


def _differences(before: dict[str, str], after: dict[str, str]) -> str:
    changed = [
        f"`{name}` changed from {before.get(name, 'nothing')} to {after.get(name, 'nothing')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name) and name != "the structure"
    ]
    if not changed:
        return "a value changed that is no array: a Python number or a function in the model"
    return "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
