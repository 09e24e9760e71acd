"""Reads ahead in a thread, and has batches on the devices before they are asked for."""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .loader import Batches
from .resumable import Resumable, close_if_needed
from .share import require_own_rows
from .stack import ResumableStacks, Stacked
from .workers import WorkerBatches, Workers


class _Channel:
    """What the reading thread and the consumer share. It holds no reference to the consumer."""

    def __init__(self, depth: int, source: Any) -> None:
        self.source = source
        self.changed = threading.Condition()
        self.ready: deque[tuple[Any, int | None]] = deque()
        self.room = depth
        self.error: BaseException | None = None
        self.closed = False  # nobody will ask for more
        self.ended = False  # nothing more will come


def _read(channel: _Channel, batches: Iterator[PyTree], sharding: PyTree) -> None:
    """The reading thread."""
    # Device arrays on a CPU may share the memory of NumPy's. What a loader reads is left alone, but
    # another iterator may fill the same arrays with its next batch.
    fresh = isinstance(batches, Batches | WorkerBatches)
    try:
        while True:
            with channel.changed:
                channel.changed.wait_for(lambda: channel.room > 0 or channel.closed)
                if channel.closed:
                    return
                # Taken before reading, so that never more than `depth` batches are ahead.
                channel.room -= 1
            try:
                batch = next(batches)
            except StopIteration:
                return
            # Waited for, so that what goes wrong is found at this batch.
            placed = jax.block_until_ready(_place(batch, sharding, fresh))
            with channel.changed:
                if channel.closed:
                    return
                channel.ready.append((placed, getattr(batches, "position", None)))
                channel.changed.notify_all()
            # Else this thread would hold on to a batch that the consumer has done with.
            del batch, placed
    except BaseException as error:  # raised in the consumer, at the batch that it belongs to
        channel.error = error
    finally:
        try:
            # A generator can be closed only by the thread that runs it.
            close_if_needed(batches)
        except BaseException as error:
            channel.error = channel.error or error
        with channel.changed:
            channel.ended = True
            channel.changed.notify_all()


def _stop(channel: _Channel) -> None:
    """Tells the reading thread to end. It does not wait.

    The garbage collector runs this in any thread, such as one that the reading thread waits for.
    """
    with channel.changed:
        channel.closed = True
        channel.ready.clear()
        channel.changed.notify_all()


# Threads that read, and what they share. They are daemons, since Python waits for all others before
# it calls anything at its exit; JAX must not be in use beyond that.
_READING: weakref.WeakKeyDictionary[threading.Thread, _Channel] = weakref.WeakKeyDictionary()


def _reading() -> list[tuple[threading.Thread, _Channel]]:
    while True:
        try:
            return list(_READING.items())
        except RuntimeError:  # another thread has just begun to read
            continue


def _stop_all() -> None:
    reading = _reading()
    for _, channel in reading:
        _stop(channel)
    for thread, _ in reading:
        thread.join()


def _source_of(batches: Any) -> Any:
    """The loader behind batches, stacks and workers; or else `batches`."""
    if isinstance(batches, Batches | Workers | WorkerBatches):
        return batches._loader
    if isinstance(batches, Stacked | ResumableStacks):
        return _source_of(batches._batches)
    return batches


def _wait_for_others(channel: _Channel) -> None:
    """Waits for threads whose iteration was left, and that still read from the same source.

    Two would read from it at once, which a source with one open file does not bear.
    """
    for thread, other in _reading():
        if other.closed and other.source is channel.source:
            if thread is not threading.current_thread():
                thread.join()


class Prefetch(Iterator[PyTree]):
    """An iterator over batches on devices; see `prefetch`. A context manager, too."""

    def __init__(self, batches: Iterable[PyTree], sharding: PyTree, depth: int) -> None:
        self._batches = batches
        self._sharding = sharding
        self._depth = depth
        self._channel: _Channel | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._position: int | None = getattr(batches, "position", None)

    @property
    def position(self) -> int | None:
        """The position behind the batch last handed out, whatever has been read ahead.

        None if what is read has no position.
        """
        return self._position

    def __next__(self) -> PyTree:
        if self._closed:
            raise StopIteration
        channel = self._channel or self._start()
        with channel.changed:
            channel.changed.wait_for(lambda: channel.ready or channel.ended)
            if channel.ready:
                batch, position = channel.ready.popleft()
                channel.room += 1
                channel.changed.notify_all()
                self._position = position
                if isinstance(self._batches, Resumable) and position is not None:
                    self._batches.handed_out(position)
                return batch
        self.close()
        if channel.error is not None:
            error, channel.error = channel.error, None
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame
        if isinstance(self._batches, Resumable):
            self._batches.finish()
        raise StopIteration

    def close(self) -> None:
        """Ends the reading thread, and drops what it has read ahead. Waits for a read under way."""
        self._closed = True
        if self._channel is not None and self._thread is not None:
            _stop(self._channel)
            # The garbage collector may close this in the reading thread itself.
            if self._thread is not threading.current_thread():
                self._thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> _Channel:
        channel = _Channel(self._depth, _source_of(self._batches))
        batches, sharding = self._batches, self._sharding
        share = getattr(batches, "share", None)
        for one in jax.tree.leaves(sharding):
            if (
                share is not None
                and isinstance(one, NamedSharding)
                and not one.is_fully_addressable
            ):
                require_own_rows(one, share)
        _wait_for_others(channel)
        iterator = batches.begin() if isinstance(batches, Resumable) else iter(batches)
        # Settings of this thread, which others do not see.
        config: Any = jax.config  # whose attributes no type checker knows
        device, x64 = config.jax_default_device, config.jax_enable_x64

        def read() -> None:
            with jax.default_device(device), jax.enable_x64(x64):
                _read(channel, iterator, sharding)

        thread = threading.Thread(target=read, name="eqtrain-prefetch", daemon=True)
        # When this object is garbage, as after a `break`.
        weakref.finalize(self, _stop, channel).atexit = False
        self._channel, self._thread = channel, thread
        self._position = getattr(iterator, "position", None)
        # Once more, so that it is called before what the source has registered, such as the end of
        # processes that read.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
        thread.start()
        _READING[thread] = channel
        return channel


def prefetch(batches: Iterable[PyTree], sharding: PyTree | None = None, depth: int = 2) -> Prefetch:
    """Iterates over batches that a thread reads ahead and puts on devices.

    An exception in the thread is raised here, in place of the batch that was being read. The thread
    ends with the iteration, with `close`, at the end of a `with` block, or when a loop was left and
    nothing refers to the iterator any more. It starts when the first batch is asked for.

    **Arguments:**

    - `batches`: a `Loader` or another `Resumable`, whose position moves as batches are handed out,
        or any iterable of pytrees of arrays.
    - `sharding`: a `NamedSharding`, or a prefix tree of them, for arrays with one row an example; a
        scalar is replicated, and entries of the spec beyond an array's dims are left out. With
        None, arrays go to the default device.
    - `depth`: how many batches may be ahead of the one last handed out.

    Where the mesh spans several processes, each batch read here is this process's block of rows of
    the global batch.

    **Raises:** `ValueError` for a `depth` below 1.

    ```python
    >>> loader = et.data.Loader({"x": np.arange(6)}, batch_size=2, epochs=1)
    >>> with et.data.prefetch(loader) as batches:
    ...     first = next(batches)
    >>> type(first["x"]).__name__, loader.position
    ('ArrayImpl', 2)

    ```
    """
    if depth < 1:
        raise ValueError(
            f"`depth` must be 1 or more. Got {depth}. To read without a thread, loop over the "
            "batches themselves."
        )
    return Prefetch(batches, sharding, depth)


def _place(batch: PyTree, sharding: PyTree, fresh: bool) -> PyTree:
    """Puts a batch on devices."""
    shardings = jax.tree.broadcast(sharding, batch, is_leaf=lambda node: node is None)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, sharding: _place_leaf(path, leaf, sharding, fresh), batch, shardings
    )


def _place_leaf(path: tuple[Any, ...], leaf: Any, sharding: Any, fresh: bool) -> Any:
    try:
        if not isinstance(leaf, jax.Array):
            leaf = np.array(leaf, copy=None if fresh else True)
        if isinstance(sharding, NamedSharding):
            spec = PartitionSpec(*sharding.spec[: leaf.ndim])
            sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
            if not sharding.is_fully_addressable:
                return jax.make_array_from_process_local_data(sharding, leaf)
            _check_divides(leaf.shape, sharding)
        return jax.device_put(leaf, sharding)
    except Exception as error:
        error.add_note(f"while `batch{jax.tree_util.keystr(path)}` was put on devices")
        raise


def _check_divides(shape: tuple[int, ...], sharding: NamedSharding) -> None:
    for dim, axes in enumerate(sharding.spec):
        names = [axes] if isinstance(axes, str) else axes if isinstance(axes, tuple) else []
        shards = math.prod(sharding.mesh.shape[name] for name in names)
        if shape[dim] % shards:
            raise ValueError(
                "A sharded dim must divide evenly over its mesh axes. "
                f"Got {shape[dim]} for dim {dim} of shape {shape}, and {shards} shards along "
                f"{', '.join(map(repr, names))}. Use a multiple of {shards}, such as the "
                "`batch_size` of a `Loader`, which pads."
            )
