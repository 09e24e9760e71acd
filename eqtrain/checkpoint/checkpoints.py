"""The checkpoints of one run, in one folder."""

from __future__ import annotations

import atexit
import concurrent.futures
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._guard.trips import read_flag
from .._metrics import fetch
from .._programs.program import Program
from .._state.train_state import TrainState
from .error import CheckpointError
from .folder import Folder
from .metadata import Metadata, describe, read_metadata, steps_in
from .processes import all_succeed, is_first, same_everywhere
from .restore import agreed_step, restore
from .retention import Retention
from .storage import Writer, orbax

# Saves of which nobody has learnt yet how they ended: waited for at the end of the process.
_PENDING: set[Future[None]] = set()


class Checkpoints:
    """The checkpoints of one run, each in a folder with the number of its step.

    A save holds a whole TrainState, the position of a loader, and metadata in readable JSON. It
    goes on in the background while later steps run, and appears under its number only when it is
    whole and on disk. What a killed save leaves behind is deleted by the next run that opens the
    folder. One run at a time may have it open; a killed one does not count.

    In several processes all of them have to make the object and to call its methods.

    **Arguments:**

    - `folder`: one that all processes see, on a mounted file system. It is made if it is not there.
    - `keep_last`: how many of the newest are kept, 1 or more; None keeps all.
    - `keep_best`: how many are kept for the best `best_metric`; 0 for none. Of two equal ones the
        earlier is better. A save without the metric, or with one that is not finite, is not kept
        for it.
    - `best_metric`, `best_mode`: a name in the `metrics` of `save`, and "min" or "max".
    - `keep_every`: steps that are a multiple of it are kept for ever; None for none.

    **Raises:** `CheckpointError` if another run has the folder open, or if it cannot be written to;
    `ValueError` for settings that cannot work; `ImportError` without the extra `checkpoint`.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.25)), et.donate)
    >>> make, key = lambda key: jnp.array(0.0), jax.random.key(0)
    >>> loader = et.data.Loader({"x": np.full(8, 2.0, np.float32)}, batch_size=2, epochs=1)
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with et.checkpoint.Checkpoints(folder, keep_last=2) as checkpoints:
    ...     ts = checkpoints.restore_or_init(step, make, key=key, loader=loader)
    ...     for batch in loader:
    ...         ts, metrics = step(ts, batch)
    ...         checkpoints.save(ts, loader, program=step)
    >>> ts = et.checkpoint.restore(folder, step.init_shapes(make), loader)
    >>> int(ts.step), float(ts.model), loader.position
    (4, 1.875, 8)

    ```
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: int = 0,
        best_metric: str = "loss",
        best_mode: Literal["min", "max"] = "min",
        keep_every: int | None = None,
    ):
        self._retention = Retention(keep_last, keep_best, best_metric, best_mode, keep_every)
        if "://" in str(folder):
            raise ValueError(
                "The folder of checkpoints must be on a mounted file system. "
                f"Got `{folder}`. Mount the bucket, and give the path where it is mounted."
            )
        orbax()
        self.folder = Path(folder).absolute()
        # The step that this object saved or restored last: the run that the folder is of.
        self._reached: int | None = None
        self._pending: Future[None] | None = None
        # On the first process alone, which decides what is kept.
        self._owned: Folder | None = all_succeed(
            lambda: Folder(self.folder, self._retention) if is_first() else None,
            "open the folder of checkpoints",
        )
        self._writer = Writer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def steps(self) -> list[int]:
        """The steps of all checkpoints, in order of their numbers; without one under way."""
        return steps_in(self.folder)

    def latest(self) -> int | None:
        """The step of the last checkpoint, or None."""
        return max(self.steps(), default=None)

    def metadata(self, step: int | None = None) -> Metadata:
        """What a checkpoint says of itself; see `read_metadata`."""
        return read_metadata(self.folder, step)

    def save(
        self,
        ts: TrainState,
        loader: Any = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        program: Program | None = None,
    ) -> None:
        """Begins to save a TrainState, and returns while it is written.

        The next step may donate it at once. This call waits for the step that made it, and for the
        save before.

        **Arguments:**

        - `loader`: its `position` is saved, and its `order`, which a restore compares. Save between
            a step and the next batch, and the position is that behind the last batch that the
            TrainState has seen, also through `prefetch`.
        - `metrics`: of a step or an evaluation, fetched or not, for `keep_best` and the metadata.
        - `program`: that which made `ts`. Nothing is saved from a failed step on: the flag that the
            next call would look at is looked at here. Its transforms go into the metadata.

        The step that this object saved or restored last is not written again, but forced onto the
        disk once more.

        **Raises:** `NonFiniteError` as a call of `program` would; `CheckpointError` if this save
        could not begin or the one before went wrong; `ValueError` for a step that is not behind
        all there are.
        """
        ts.require_unused()
        _check(ts, program)
        self.wait()
        step = int(ts.step)
        numbers = self._numbers(metrics)
        if step == self._reached:
            all_succeed(lambda: self._sync(step), "save checkpoints")
            return
        latest = same_everywhere(self.latest())
        if latest is not None and step <= latest:
            raise ValueError(
                "A checkpoint must be of a later step than all in its folder. "
                f"Got step {step}, and `{self.folder}` holds step {latest}. "
                "Restore that one first; or give the run another folder; or, to go on from an "
                f"earlier one, `checkpoints.discard_after({step - 1})`."
            )
        meta = describe(ts.structure, step, loader, numbers, program)
        arrays = _by_name(ts)
        if ts.fresh:
            # A view of one that the program looks at next would be taken for a fault of donation.
            arrays = {name: jnp.copy(leaf) for name, leaf in arrays.items()}
        try:
            self._writer.start(self.folder / str(step), arrays, meta.as_json())
        except Exception as error:
            self._clean_after(step, error)
            raise self._failed(step, error) from error
        self._reached = step
        self._pending = self._thread.submit(self._finish, step, numbers)
        _PENDING.add(self._pending)

    def _sync(self, step: int) -> None:
        """Forces the name of a checkpoint onto the disk once more, as it may have failed."""
        if self._owned is not None:
            try:
                self._owned.sync()
            except OSError as error:
                raise self._failed(step, error) from error

    def _finish(self, step: int, metrics: dict[str, float]) -> None:
        """Runs in the background: waits for the save, then deletes what is not to be kept."""
        try:
            self._writer.wait()
            if self._owned is not None:
                self._owned.add(step, metrics)
        except Exception as error:
            self._clean_after(step, error)
            raise self._failed(step, error) from error
        if self._owned is not None:
            try:
                self._owned.prune()
            except OSError as error:
                # Not worth a run that goes on: the disk has all it was to have, and more.
                warnings.warn(
                    "Checkpoints that are not to be kept are deleted. "
                    f"Got an error in doing so, after step {step} was saved: {error} "
                    "It is tried again with the next save; correct the permissions until then.",
                    stacklevel=1,
                )

    def _clean_after(self, step: int, error: Exception) -> None:
        """Makes room again after a save that failed."""
        if step not in self.steps():
            self._reached = None
        if self._owned is not None:
            try:
                self._owned.clean_after_failure()
            except OSError as another:
                error.add_note(f"What it left behind could not be deleted: {another}")

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        good = [found for found in self.steps() if found != step]
        left = f"The last good one is of step {good[-1]}." if good else "There is none before it."
        return CheckpointError(
            f"A checkpoint must reach the disk. Got an error in saving step {step} to "
            f"`{self.folder}`: {error} {left} "
            "Make room, or correct the permissions, and save again."
        )

    def restore(
        self,
        template: TrainState,
        loader: Any = None,
        *,
        step: int | None = None,
        verify: bool = True,
    ) -> TrainState:
        """Reads a TrainState; see `eqtrain.checkpoint.restore`. The run goes on from it."""
        self.wait()
        step = agreed_step(self.folder, step)
        ts = restore(self.folder, template, loader, step=step, verify=verify)
        self._reached = step
        return ts

    def restore_or_init(
        self,
        program: Program,
        make: Callable[[Array], PyTree],
        *,
        key: Array,
        loader: Any = None,
    ) -> TrainState:
        """The TrainState of the last checkpoint; or, where there is none, `program.init`."""
        if same_everywhere(self.latest()) is None:
            return program.init(make, key=key)
        return self.restore(program.init_shapes(make, key=key), loader)

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints behind a step, so that a run can go on from it another way.

        **Raises:** `CheckpointError` if one cannot be deleted.
        """
        self.wait()

        def discard() -> None:
            if self._owned is None:
                return
            try:
                self._owned.delete(found for found in self.steps() if found > step)
            except OSError as error:
                raise CheckpointError(
                    f"The checkpoints behind step {step} must go. Got an error in deleting them "
                    f"from `{self.folder}`: {error} Correct the permissions, and discard again."
                ) from error

        self._reached = None  # also where only some of them went
        all_succeed(discard, "discard checkpoints")

    def wait(self) -> None:
        """Waits until the save under way is on disk. **Raises:** `CheckpointError` if it failed.

        If it failed in one process, it raises in all.
        """
        all_succeed(self._wait_here, "save checkpoints")

    def _wait_here(self) -> None:
        if self._pending is None:
            return
        # An interrupt here leaves it to be waited for.
        concurrent.futures.wait([self._pending])
        pending, self._pending = self._pending, None
        _PENDING.discard(pending)
        pending.result()

    def saved(self) -> bool:
        """Whether no save is under way. It does not wait, and says nothing of errors."""
        return self._pending is None or self._pending.done()

    def close(self) -> None:
        """Waits, and gives the folder free. **Raises:** as `wait` does, if it failed here."""
        try:
            # Of this process alone, since the others may not get here after an error.
            self._wait_here()
        finally:
            self._thread.shutdown()
            self._writer.close()
            if self._owned is not None:
                self._owned.release()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            # An exit whose code says that all is saved must not stand if it is not.
            if error is None or isinstance(error, SystemExit):
                raise
            error.add_note(str(failure))

    def _numbers(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        numbers = {
            name: float(value)
            for name, value in fetch(dict(metrics or {})).items()
            if isinstance(value, int | float)
        }
        name = self._retention.best_metric
        if metrics and self._retention.keep_best and name not in numbers:
            raise ValueError(
                f"`keep_best` needs the metric that it goes by. Got metrics {sorted(numbers)}, and "
                f"best_metric={name!r}. Correct one of them; or save without metrics."
            )
        # JSON has no word for the others.
        return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _wait_at_exit() -> None:
    for pending in list(_PENDING):
        error = pending.exception()
        if error is not None:
            print(f"eqtrain: {error}", file=sys.stderr)


# The thread pools that write are shut down before the functions of `atexit` run. What is registered
# here comes before that; it is what the pools themselves use.
getattr(threading, "_register_atexit", atexit.register)(_wait_at_exit)
if hasattr(os, "register_at_fork"):
    # A process that is forked has no thread that would end them.
    os.register_at_fork(after_in_child=_PENDING.clear)


def _by_name(ts: TrainState) -> dict[str, Array]:
    names = ts.structure.names
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            "The arrays of a TrainState are saved by their paths, which must differ. "
            f"Got {', '.join(f'`{name}`' for name in twice[:5])} for several. Rename one of each."
        )
    # An array without elements has nothing to save, and Orbax takes none.
    return {name: leaf for name, leaf in zip(names, ts.leaves, strict=True) if leaf.size}


def _check(ts: TrainState, program: Program | None) -> None:
    """Looks at the flag of the step that made `ts`."""
    if program is not None:
        program.check(ts)
    elif ts.flag is not None and read_flag(ts.flag[1].code)[:, 0].any():
        raise ValueError(
            "A TrainState whose step skipped something is saved only if its program allows it. "
            "Got one, and no program to ask. Write `checkpoints.save(ts, program=train_step)`."
        )
