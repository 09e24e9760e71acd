"""What a loop, `stack` and `prefetch` need of batches that have a position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Resumable(Protocol):
    """Batches with a position, which a loop that reads ahead moves when it hands a batch out.

    `begin` starts a loop; the iterator that it returns has a `position`, behind the batch that it
    gave last. That is what `handed_out` gets, once a batch is. `finish` is called at the end.
    """

    @property
    def position(self) -> int: ...

    def begin(self) -> Any: ...

    def handed_out(self, position: int) -> None: ...

    def finish(self) -> None: ...


def loop(batches: Resumable) -> Iterator[Any]:
    """The batches from their position on, which moves as they are handed out."""
    iterator = batches.begin()
    try:
        for batch in iterator:
            batches.handed_out(iterator.position)
            yield batch
    finally:
        close_if_needed(iterator)
    batches.finish()


def close_if_needed(iterator: Iterator[Any]) -> None:
    """Ends the threads and processes that an iterator may have."""
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
